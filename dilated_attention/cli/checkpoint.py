"""The saved model that a command works on: its folder, device, backend and dtype, and errors of one line."""

from __future__ import annotations

import argparse
import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention.cli.choices import DTYPES
from dilated_attention.parsing import UsageError

if TYPE_CHECKING:
    import torch

    from dilated_attention.models import LongNetLM, Vocabulary


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Adds ``args.folder``, ``device``, ``backend`` and ``dtype``."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="of save_pretrained, or of a run with checkpoint/ in it")
    parser.add_argument("--device", help="cpu, cuda or cuda:<index>; default: the GPU if there is one")
    parser.add_argument("--backend", default="auto", help="of the attention; default: auto")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: bfloat16 on a GPU that supports it, else float32")


def load(args: argparse.Namespace, device: torch.device) -> tuple[LongNetLM, Vocabulary]:
    """Returns the model in eval mode and the vocabulary of its tokens; ``args.folder`` is then the model's, if it was a run's.

    Raises:
        UsageError: if there is no such backend.
        OSError: if the folder holds no language model of bytes or bases, or files are damaged.
    """
    from dilated_attention.backends import registry
    from dilated_attention.models import LongNetLM, vocabulary_of
    from dilated_attention.models.checkpoint import find_model

    try:
        registry.check_name(args.backend)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    args.folder = folder = find_model(args.folder)
    try:
        model = LongNetLM.from_pretrained(folder, device=device, backend=args.backend)
        return model, vocabulary_of(model.config)
    except (ValueError, RuntimeError, ImportError) as error:
        raise OSError(f"{folder} cannot be used: {_shortened(error)}") from error


@contextlib.contextmanager
def computing(model: LongNetLM, args: argparse.Namespace, device: torch.device, *, autocast: bool) -> Iterator[str]:
    """Computes in ``args.dtype`` and yields its name.

    Args:
        autocast: in 16 bits, cast where torch's autocast does, as in training; else cast the weights themselves.

    Raises:
        OSError: in place of errors of the model and its device, which have no traceback to show.
    """
    import torch

    from dilated_attention.backends import BackendUnavailable

    default = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    dtype: torch.dtype = getattr(torch, args.dtype or default)
    is_cast = autocast and dtype.itemsize == 2 and model.output_weight.dtype != dtype
    model.to(torch.float32 if is_cast else dtype)
    try:
        with torch.autocast(device.type, dtype) if is_cast else contextlib.nullcontext():
            yield args.dtype or default
    except (ValueError, torch.OutOfMemoryError, BackendUnavailable) as error:
        raise error if isinstance(error, UsageError) else OSError(_shortened(error)) from error


def _shortened(error: BaseException) -> str:
    return textwrap.shorten(str(error), 500, placeholder=" …")
