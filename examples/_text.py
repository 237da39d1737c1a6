"""Bytes to train on, already on any machine: the source text of Python's standard library, or one document. And n-gram entropies."""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
from recipe.settings import number

from dilated_attention.parsing import size

# a real text in one piece on any machine with Python: its language reference, 757,011 bytes in 3.11
DOCUMENT = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
# every 12th file is held out, so that both parts hold the same kinds of text
HOLD_OUT = 12


def read(path: Path | None, at_least: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """(training bytes, validation bytes, where they are from), uint8.

    A single file is split at 11/12 of its length, or earlier if the validation needs it. Of a folder with more every 12th file is held out.

    Args:
        path: a file or a folder of text; None for the ``*.py`` files of the standard library, site-packages left out.
        at_least: bytes that either part needs.

    Raises:
        ValueError: if there is less text, or none.
    """
    train, held_out, source = _parts(path, at_least)
    for part, name in ((train, "train on"), (held_out, "hold out")):
        if len(part) < at_least:
            raise ValueError(
                f"--data {path or source} has {len(part):,} bytes to {name}, and a context of {at_least - 1:,} needs {at_least:,}; "
                "give more text or a smaller --context; of a folder every 12th file is held out, of one file a 12th"
            )
    return train, held_out, source


def _parts(path: Path | None, at_least: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    if path is not None and not path.exists():
        raise ValueError(f"--data {path} does not exist; expected a text file or a folder of them")
    folder = path or Path(sysconfig.get_paths()["stdlib"])
    if folder.is_file():
        files = [folder]
    else:
        files = sorted(file for file in folder.rglob("*" if path else "*.py") if file.is_file() and "site-packages" not in file.parts)
    if not files:
        raise ValueError(f"--data {folder} holds no files; give a text file or a folder of text files")
    if len(files) == 1:
        text = _tensor([files[0].read_bytes()])
        cut = min(len(text) * (HOLD_OUT - 1) // HOLD_OUT, max(len(text) - at_least, len(text) // 2))
        return text[:cut], text[cut:], str(files[0])
    train = [file.read_bytes() for i, file in enumerate(files) if i % HOLD_OUT]
    held_out = [file.read_bytes() for i, file in enumerate(files) if i % HOLD_OUT == 0]
    return _tensor(train), _tensor(held_out), f"{len(files)} files of {folder.name}"


def entropies(text: torch.Tensor) -> tuple[float, float]:
    """(unigram, bigram) entropy of the text in bits per byte: H(X_t) and H(X_t | X_{t−1}) of its own counts.

    No model of that order can be better on this text, not even one that had seen its statistics before.
    """
    codes = text.long()
    pairs = torch.bincount(codes[:-1] * 256 + codes[1:], minlength=65_536).double().view(256, 256)
    return _entropy(torch.bincount(codes, minlength=256).double()), _entropy(pairs.flatten()) - _entropy(pairs.sum(1))


def windows(text: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """``count`` windows of ``length`` + 1 bytes, evenly over the text: (count, length + 1) int64."""
    starts = torch.linspace(0, len(text) - length - 1, count).long()
    return torch.stack([text[start : start + length + 1] for start in starts]).long()


def random_windows(text: torch.Tensor, length: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """The same at random places."""
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    return torch.stack([text[start : start + length + 1] for start in starts]).long()


def document_parser(description: str | None, context: int, seconds: float) -> argparse.ArgumentParser:
    """Returns the flags of a script that trains on a document's beginning and reads its end."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--context", type=size, default=context, help="bytes of the document's end that are read")
    parser.add_argument("--train-seconds", type=number(float, 0, above=True), default=seconds, help="of each model")
    parser.add_argument("--steps", type=size, default=10**9, help="of training, at most")
    return parser


def read_document(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """(the beginning (M,), the end (1, context + 1) int64)"""
    text = torch.frombuffer(bytearray(args.document.read_bytes()), dtype=torch.uint8)
    if len(text) < 3 * args.context:
        raise SystemExit(f"{args.document} has {len(text)} bytes; expected at least three times --context, {3 * args.context}")
    return text[: -args.context - 1], text[None, -args.context - 1 :].long()


def train_on_document(
    model: torch.nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor], text: torch.Tensor, args: argparse.Namespace
) -> int:
    """Steps in ``--train-seconds``, on short windows for half of the time, then on longer ones: attention that has never met far keys only
    suffers from them. Lengths follow the clock, so that models meet long windows for an equal time."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    generator = torch.Generator().manual_seed(0)
    start, step = time.perf_counter(), 0
    while (done := max((time.perf_counter() - start) / args.train_seconds, step / args.steps)) < 1:
        length = min(args.context, 1024 if done < 0.5 else 4096 if done < 0.65 else args.context)
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, (step + 1) / 20, 0.1 + 2 * (1 - done))
        loss_of(random_windows(text, length, max(1, 2048 // length), generator)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
    return step


def _tensor(parts: list[bytes]) -> torch.Tensor:
    joined = b"\n".join(parts)
    # torch makes no tensor of an empty buffer
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)


def _entropy(counts: torch.Tensor) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * p.log2()).sum())
