"""Passages of real texts for a language model: what is scored, what is tuned on, and keys hidden in them. Nothing is downloaded."""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# folders in that of the standard library that are no part of it, and differ between machines
_INSTALLED = {"site-packages", "dist-packages"}
SUFFIXES = (".py", ".txt", ".md", ".rst")
# tables of numbers and codes have fewer letters and spaces; nearly all text and code has more
_LETTERS = 0.8
# per file, so that no single one decides a score
_PASSAGES_PER_FILE = 3
_NAMES = ("Ada", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry")


def split(places: Sequence[Path], seed: int) -> tuple[list[Path], list[Path]]:
    """Returns the files to score and those to tune on, no text in both, in an order that only ``seed`` and the files decide.

    Args:
        places: files and folders, of which all files with one of ``SUFFIXES`` are taken except tables of data and second copies;
            none for the sources of Python's standard library.
    """
    found: dict[str, Path] = {}
    for place in places or (Path(sysconfig.get_path("stdlib")),):
        if not place.exists():
            raise ValueError(f"--texts {place} does not exist; expected a file or folder of {', '.join(SUFFIXES)}")
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.suffix in SUFFIXES and file.is_file() and not _INSTALLED & set(file.relative_to(place).parts):
                content = file.read_bytes()
                text = content.decode(errors="replace")
                if sum(x.isalpha() or x.isspace() for x in text) >= _LETTERS * max(1, len(text)):
                    found.setdefault(hashlib.sha256(content).hexdigest(), file)
    # by the hash of the content, which paths do not change
    ordered = [found[key] for key in sorted(found)]
    random.Random(seed).shuffle(ordered)
    return ordered[::2], ordered[1::2]


def passages(tokenizer: Any, files: Sequence[Path], length: int, count: int) -> torch.Tensor:
    """Returns (count, length) int64, each of one file, of as many files as there are. Raises ValueError where they hold fewer passages."""
    of_file = functools.cache(lambda file: packed(tokenizer, [file], length))
    every = (of_file(file)[i] for i in range(_PASSAGES_PER_FILE) for file in files if len(of_file(file)) > i)
    found = list(itertools.islice(every, count))
    if len(found) < count:
        raise ValueError(
            f"the texts hold {len(found)} passages of {length:,} tokens to score, at most {_PASSAGES_PER_FILE} of a file and half of the "
            f"files, as the others are for tuning; expected {count}: give more --texts, or less --passages or --length"
        )
    return torch.stack(found)


def packed(tokenizer: Any, files: Sequence[Path], length: int) -> torch.Tensor:
    """Returns (passages, length) int64 of all files joined one after another, without what is left at the end."""
    ids = torch.cat([tokens(tokenizer, file.read_text(encoding="utf-8", errors="replace")) for file in files])
    return ids[: ids.numel() // length * length].view(-1, length)


def tokens(tokenizer: Any, text: str) -> torch.Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)


def num_bytes(tokenizer: Any, ids: torch.Tensor) -> int:
    """Returns the UTF-8 bytes of the text of (n,) tokens."""
    return len(tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False).encode())


def needles(tokenizer: Any, texts: torch.Tensor, length: int, depth: float, count: int, seed: int) -> tuple[torch.Tensor, int]:
    """Hides "The pass key of Ada is 48213." at ``depth``, 0 the beginning and 1 the end of a text, and asks for it at the end.

    Returns (count, length) tokens, and how many last tokens are the key's digits. The same arguments give the same keys. Digits are
    random, so whoever does not attend to the key guesses one of ten. ``texts``, (passages, at least length), are what keys are hidden in.
    """
    draw = random.Random(f"{seed} {length} {depth}")
    made: list[torch.Tensor] = []
    digits: set[int] = set()
    while len(made) < count:
        name, key = draw.choice(_NAMES), str(draw.randrange(10_000, 100_000))
        asked, answer = tokens(tokenizer, f"\n\nThe pass key of {name} is"), tokens(tokenizer, f" {key}")
        hidden = torch.cat([asked, answer, tokens(tokenizer, f". Remember: {key} is the pass key of {name}.\n\n")])
        left = length - hidden.numel() - asked.numel() - answer.numel()
        if left < 2:
            raise ValueError(f"a needle test of {length} tokens leaves {left} for text around the key; expected --needle-lengths from 128")
        text = texts[len(made) % len(texts)][:left]
        at = round(depth * left)
        made.append(torch.cat([text[:at], hidden, text[at:], asked, answer]))
        # a token for the space before the digits is no digit
        digits.add(sum(any(x.isdigit() for x in tokenizer.decode([token])) for token in answer.tolist()))
    return torch.stack(made), min(digits)
