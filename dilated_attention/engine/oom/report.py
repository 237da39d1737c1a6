"""Writes the error message for a call that runs out of memory inside one of this library's operations.

The exception remains the one that torch raised, with its type and traceback. Its message keeps torch's own text, since other libraries
search for it. In front of that text, it states what was requested, what the call needs in total, what is available, and which smaller
calls would fit.
"""

from __future__ import annotations

import gc
import os
import re
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from dilated_attention.engine.oom.device_memory import MemoryInfo, memory_info, size_text
from dilated_attention.engine.oom.requirement import MemoryRequirement, dtype_text, largest, terms_text

# estimates count tensors, but kernels need a little more, and the allocator rounds blocks up
MARGIN = 0.95
_PACKAGE = Path(__file__).parents[2]
_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
_BYTES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether one of torch's allocators raised the error. The CPU allocator has no error type, so the message is checked.

    It is False for an error that has already been explained.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return not hasattr(error, "_told")
    return type(error) is RuntimeError and "DefaultCPUAllocator" in str(error) and not hasattr(error, "_told")


def explain(error: RuntimeError, requirement_of: Callable[[], MemoryRequirement]) -> None:
    """Puts an explanation of the shortage in front of the error's message, in place.

    First it releases what the failed call holds, since its frames end here anyway. So the figures show what others hold, and a handler
    that keeps the error does not keep the memory.
    """
    own = str(error)
    error._told = True  # type: ignore[attr-defined]
    place = _place(error)
    _let_go(error)
    try:
        text = _text(own, place, requirement_of())
    except Exception as failed:  # noqa: BLE001 - whatever it is, the shortage must not be hidden by it
        text = f"out of memory in {place}; no details are available ({type(failed).__name__}: {failed})"
    # a single argument, since some libraries read args[0]
    error.args = (f"{text}\n  torch: {own.strip()}",)


def _let_go(error: RuntimeError) -> None:
    """Clears the frames of the failed call.

    A frame keeps its function alive, and a nested function keeps the variables of the enclosing one. So these variables are cleared
    too, if the enclosing function was also part of the failed call.
    """
    traceback.clear_frames(error.__traceback__)
    # the first frame is the caller, which is still running
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    inside = {code for frame in frames for code in _defined_in(frame.f_code)}
    for frame in frames:
        if frame.f_code in inside:
            for found in gc.get_referents(frame):
                if isinstance(found, types.FunctionType) and found.__code__ is frame.f_code:
                    for cell in found.__closure__ or ():
                        cell.cell_contents = None


def _defined_in(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _defined_in(constant)


def asked_bytes(text: str) -> int | None:
    """Returns the number of bytes that torch's message says were requested, or None."""
    found = _ASKED.search(text)
    return None if found is None else int(float(found[1]) * _BYTES[found[2]])


def suggestions_for(requirement: MemoryRequirement, memory: MemoryInfo, asked: int | None) -> list[str]:
    """Returns sentences, each with a setting that would fit into the available memory according to the estimate."""
    suggestions = list(_in_pieces(requirement, memory, asked))
    if requirement.terms is None or memory.left is None:
        return suggestions
    # the call's own tensors count as available, since their size changes with the setting
    there = int(MARGIN * (memory.left + requirement.held))
    now = requirement.setting

    def fits(**changes: object) -> bool:
        return requirement.bytes_at(replace(now, **changes)) <= there  # type: ignore[arg-type]

    def with_bytes(text: str, **changes: object) -> str:
        size = size_text(requirement.bytes_at(replace(now, **changes)))  # type: ignore[arg-type]
        return f"{text}: {'at least' if requirement.least else 'about'} {size}"

    if now.detached and fits(detached=False):
        suggestions.append(with_bytes('mixture_grad="exact" in place of "detached"', detached=False))
    if requirement.can_shorten and now.dtype.itemsize > 2 and fits(dtype=torch.bfloat16):
        suggestions.append(with_bytes(f"bfloat16 in place of {dtype_text(now.dtype)}", dtype=torch.bfloat16))
    batch = largest(lambda batch: fits(batch=batch), now.batch)
    if batch is not None:
        suggestions.append(with_bytes(f"{batch} in place of {now.batch} sequences at once", batch=batch))
    length = largest(lambda length: fits(length=length), now.length, step=max(1, now.length // 256)) if requirement.can_shorten else None
    if length is not None:
        suggestions.append(with_bytes(f"{length:,} in place of {now.length:,} positions", length=length))
    for way in requirement.suggestions:
        suggestions += way(there)
    return suggestions


def _in_pieces(requirement: MemoryRequirement, memory: MemoryInfo, asked: int | None) -> Iterator[str]:
    kept = memory.reserved - memory.allocated
    if requirement.device.type == "cuda" and asked is not None and kept >= asked:
        how = "" if "expandable_segments:True" in allocator_settings() else "; PYTORCH_ALLOC_CONF=expandable_segments:True joins them"
        yield f"torch has {size_text(kept)} reserved that no tensor holds, in pieces too small or of other streams{how}"


def allocator_settings() -> str:
    """Returns the settings of torch's allocator in the environment, under any of the variable's names."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return ",".join(os.environ.get(name, "") for name in names).strip(",")


def _text(own: str, place: str, requirement: MemoryRequirement) -> str:
    asked, memory = asked_bytes(own), memory_info(requirement.device)
    lines = [f"{requirement.name} ran out of memory: it asked for {'more' if asked is None else size_text(asked)} in {place}"]
    lines.append(f"  call: {requirement.shapes}")
    if requirement.terms is not None:
        how = "at least" if requirement.least else "about"
        terms, held = terms_text(requirement.terms(requirement.setting)), size_text(requirement.held)
        lines.append(f"  needs: {how} {terms}; of that {held} existed before the call")
    lines.append(f"  memory: {memory}")
    suggestions = suggestions_for(requirement, memory, asked)
    if suggestions:
        # cached free blocks of this call's sizes get split for smaller tensors, and the remainders are unusable
        lines.append("  would fit, after torch.cuda.empty_cache():" if requirement.device.type == "cuda" else "  would fit:")
        lines += [f"    {way}" for way in suggestions]
    elif requirement.terms is not None and memory.left is not None:
        others = max(0, memory.allocated - requirement.held)
        lines.append(f"  would fit: no part of this call, while other tensors hold {size_text(others)}: free some of that")
    return "\n".join(lines)


def _place(error: BaseException) -> str:
    """Returns the innermost function of this package in the error's traceback."""
    found = "an operation"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        # skips names such as "<genexpr>"
        is_named = not frame.f_code.co_name.startswith("<")
        if is_named and path.is_relative_to(_PACKAGE) and path.name != "op_hooks.py":
            found = f"{frame.f_code.co_name} ({path.relative_to(_PACKAGE)})"
    return found
