"""What is around a training script's ``main``: one process prints, and what ends a run early ends it in one line."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dilated_attention.backends import BackendUnavailable

_interrupts: list[int] = []


def interrupted() -> int | None:
    """SIGINT if it came since ``run_safely`` began, even where a library has swallowed it, as some do while they load."""
    return _interrupts[-1] if _interrupts else None


def _interrupt(kind: int, _: Any) -> None:
    _interrupts.append(kind)
    raise KeyboardInterrupt


def run_safely(main: Callable[[], int]) -> int:
    """Calls ``main`` and returns the exit code: its own; 130 for a Ctrl-C that came before training; 141 where nobody reads the output any
    more; 1 where the loss is no number, a file cannot be read or written, a setting is refused, or the machine does not suffice."""
    is_first = os.environ.get("RANK", "0") == "0"
    _interrupts.clear()
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    before = signal.signal(signal.SIGINT, _interrupt)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stdout if is_first else nowhere):
        try:
            try:
                return main()
            except Exception as error:
                # a library may have made an error of its own of it
                if interrupted():
                    raise KeyboardInterrupt from error
                raise
        except KeyboardInterrupt:
            if is_first:
                print("interrupted; what is not saved is lost", file=sys.stderr)
            return 130
        except BrokenPipeError:
            # of what is still buffered, when the interpreter ends
            for stream in (sys.__stdout__, sys.__stderr__):
                if stream is not None:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            return 141
        except (FloatingPointError, OSError, ValueError, BackendUnavailable, torch.OutOfMemoryError) as error:
            if is_first:
                print(error, file=sys.stderr)
            return 1
        finally:
            signal.signal(signal.SIGINT, before)
            if dist.is_initialized():
                dist.destroy_process_group()


def can_draw() -> bool:
    """Returns whether matplotlib can be imported, and prints what is missing if it cannot: its absence must not cost what was computed."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        print(f'no pictures, {error}: pip install "dilated-attention[plot]"')
        return False
    return True
