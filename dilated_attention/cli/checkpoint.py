"""The saved model that ``generate`` and ``evaluate`` work on."""

from __future__ import annotations

import argparse
import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from dilated_attention.backends import BackendUnavailable, registry
from dilated_attention.cli.arguments import DTYPE_NAMES, device_of
from dilated_attention.models import LongNetLM, Vocabulary, vocabulary_of
from dilated_attention.models.saving import find_model
from dilated_attention.parsing import UsageError


class Checkpoint(NamedTuple):
    model: LongNetLM
    vocabulary: Vocabulary
    folder: Path
    device: torch.device
    dtype: str


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="of save_pretrained, or of a run with checkpoint/ in it")
    parser.add_argument("--device", help="cpu, cuda or cuda:<index>; default: the GPU if there is one")
    parser.add_argument("--backend", default="auto", help="of the attention; default: auto")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="default: bfloat16 on a GPU that supports it, else float32")


@contextlib.contextmanager
def opened(args: argparse.Namespace, *, autocast: bool) -> Iterator[Checkpoint]:
    """Loads the model of ``add_checkpoint``'s arguments and computes in their dtype.

    Args:
        autocast: in 16 bits, cast where torch's autocast does, as in training; else cast the weights themselves.

    Raises:
        UsageError: if there is no such backend or device.
        OSError: in place of errors of the files, the model and its device, in one line.
    """
    registry.check_name(args.backend)
    device = device_of(args.device)
    default = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    dtype: torch.dtype = getattr(torch, args.dtype or default)
    folder = find_model(args.folder)
    try:
        try:
            model = LongNetLM.from_pretrained(folder, device=device, backend=args.backend)
            vocabulary = vocabulary_of(model.config)
        except (ValueError, RuntimeError, ImportError) as error:
            raise OSError(f"{folder} cannot be used: {_shortened(error)}") from error
        is_cast = autocast and dtype.itemsize == 2 and model.output_weight.dtype != dtype
        model.to(torch.float32 if is_cast else dtype)
        with torch.autocast(device.type, dtype) if is_cast else contextlib.nullcontext():
            yield Checkpoint(model, vocabulary, folder, device, args.dtype or default)
    except UsageError:
        raise
    except (ValueError, torch.OutOfMemoryError, BackendUnavailable) as error:
        raise OSError(_shortened(error)) from error


def _shortened(error: BaseException) -> str:
    return textwrap.shorten(str(error), 500, placeholder=" …")
