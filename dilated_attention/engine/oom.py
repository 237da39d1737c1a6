"""The error of an op that runs out of memory: of torch's type, with what the call needs, what is free, a way out, and torch's words."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from dilated_attention.backends import detect
from dilated_attention.engine.memory import attention_memory, readable
from dilated_attention.engine.ops.settings import pattern_of

P = ParamSpec("P")
R = TypeVar("R")


def explain_shortage(error: RuntimeError, name: str, x: Mapping[str, Any]) -> None:
    """If an allocator of torch raised ``error``, raises it again with what the pass ``name`` of an op with arguments x needs."""
    of_cpu = type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)
    if error.__cause__ is not None or not (of_cpu or isinstance(error, torch.OutOfMemoryError)):
        return
    try:
        needs, device = needed(x), next(t.device for t in tree_leaves(dict(x)) if isinstance(t, torch.Tensor))
        terms = ", ".join(f"{what} {readable(size)}" for what, size in needs if size)
        said = f"needs at least {readable(sum(size for _, size in needs))} ({terms})"
        if device.type == "cuda":
            # what the allocator holds unused may be in pieces
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            said += f"; free {readable(torch.cuda.mem_get_info(device)[0] + unused)}"
    except Exception as failed:  # noqa: BLE001 - whatever it is, the shortage must not be hidden by it
        said = f"ran out of memory, and what it needs is not known ({type(failed).__name__}: {failed})"
    raise type(error)(f"the {name} {said}. Call it with fewer sequences or positions at once. torch: {error}") from error


def needed(x: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Returns (what, bytes): of dilated self-attention the engine's account, of other attention inputs and results, else the inputs."""
    if "k" not in x:
        return (("inputs", sum(t.nbytes for t in tree_leaves(dict(x)) if isinstance(t, torch.Tensor))),)
    q, k, trains = x["q"], x["k"], bool(x["needs_grad"] or "dout" in x)
    (B, N, H, D), Hk = q.shape, k.shape[2]
    if x["branches"] and not x["blocks"] and not x["sharding"] and k.shape[1] == N:
        found = attention_memory(
            pattern_of(x["branches"]), N, H, D, batch_size=B, num_kv_heads=Hk, dtype=q.dtype, hardware=detect(q.device),
            is_causal=x["is_causal"], needs_grad=trains, detached=x["detached"], backend=x["backend"], dropout_p=x["dropout_p"],
        )  # fmt: skip
        return max(found.forward, found.backward, key=lambda terms: sum(size for _, size in terms))
    inputs = q.nbytes + 2 * k.nbytes
    return ("q, k, v", inputs), ("out, dout" if trains else "out", q.nbytes * (1 + trains)), ("dq, dk, dv", inputs * trains)


def explains_shortage(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates an op's implementation, below ``torch.library.custom_op``, so that it sees only calls that really run."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                explain_shortage(error, name, {"arguments": args, **kwargs})
                raise

        return run

    return decorate
