"""Estimates the bytes that dilated attention takes from shapes alone: inputs, results, and what the plans of its passes allocate.

Q = B·N·H·D and K = B·N·Hk·D elements of e bytes in the inputs' dtype; R = B·N·H rows of the log-sum-exp, a bytes each (float32, or float64
for float64). In addition to inputs (Q + 2K)·e, results and gradients:

    branches   with P places of a chunk in all branches except the direct one: B·H·P·(D·e + 4) forward, 3·B·H·P·D·e backward, in which
               there are the chunk's lse and what a launch sums in float32, too: dq, and also dk and dv where query heads share them
               (FlashAttention's kernels)
    whole      with P places in all branches except the direct one, which has rate 1: B·H·P·(D·e + 4) forward; dq, dk, dv at the places
               backward, and 8 bytes (16 with dropout) for each head and each place of all branches
    problems   results in the accumulation dtype while they are summed, and the results of one launch and of the previous one

An op that runs out of memory raises an error of torch's type, with what the call needs, what is free, a way out, and torch's words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dilated_attention.backends import BackendUnavailable, Hardware, detect
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.branches import run_branches, run_problems
from dilated_attention.engine.ops.prepare import fuses, make_plan
from dilated_attention.engine.ops.settings import CallSettings, pattern_of
from dilated_attention.pattern import DilatedPattern


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes alive at the peak of each pass, itemized. ``str()`` prints both lists.

    Args:
        forward: (what, bytes) at the peak of the forward, including the inputs.
        backward: the same for the backward; empty without one.
    """

    forward: tuple[tuple[str, int], ...]
    backward: tuple[tuple[str, int], ...] = ()

    @property
    def forward_peak(self) -> int:
        return sum(size for _, size in self.forward)

    @property
    def backward_peak(self) -> int:
        return sum(size for _, size in self.backward)

    @property
    def peak(self) -> int:
        """Bytes alive at the peak of the whole call."""
        return max(self.forward_peak, self.backward_peak)

    def __str__(self) -> str:
        lines = []
        for name, terms, total in (("forward", self.forward, self.forward_peak), ("backward", self.backward, self.backward_peak)):
            if terms:
                lines += [f"{what:<34}{size / 2**20:>12,.1f} MiB" for what, size in ((name, total), *((f"  {x}", n) for x, n in terms))]
        return "\n".join(lines)


def attention_memory(
    pattern: DilatedPattern,
    num_positions: int,
    num_heads: int,
    head_dim: int,
    *,
    batch_size: int = 1,
    num_kv_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    hardware: Hardware | None = None,
    is_causal: bool = False,
    needs_grad: bool = True,
    key_padding_mask: bool = False,
    backend: str = "auto",
    detached: bool = False,
    dropout_p: float = 0.0,
    window: tuple[int, ...] = (),
    keys: tuple[int, int] | None = None,
    host_ms: tuple[float, float] = (0.0, 0.0),
) -> MemoryEstimate:
    """Estimates the peak memory of ``dilated_attention`` on contiguous q, k, v (and dout), as the engine allocates it.

    Counted are the tensors of the call, including those of its caller, and the float32 sums that backward kernels keep on a GPU, which for
    one long problem are as large as a gradient. Not counted are other allocations of a kernel, such as for results that it cannot write
    into a given tensor (bounded by a launch, see ``PART_BYTES``), cached or fragmented memory of an allocator, and torch itself.

    Args:
        pattern: branches and head offsets.
        num_positions: N, the number of queries and of keys.
        num_heads: H.
        head_dim: D.
        batch_size: B.
        num_kv_heads: Hk; None for H.
        dtype: dtype of q, k, v.
        hardware: the machine; None for this one's CPU.
        is_causal, key_padding_mask, backend, dropout_p: as in the call.
        detached: mixing is detached.
        window: as in ``CallSettings``.
        needs_grad: whether to include the backward. The estimate assumes no gradient of lse.
        keys: (keys in memory, the first query's position among them) of a rank whose queries see more keys than are its own. Only its
            own keys and their gradients are counted here.
        host_ms: see ``make_plan``.

    >>> pattern = DilatedPattern((2048, 8192), (1, 4))
    >>> print(attention_memory(pattern, 2**20, 8, 64))
    """
    H, Hk, D, B, N = num_heads, num_kv_heads or num_heads, head_dim, batch_size, num_positions
    machine = hardware or detect("cpu")
    branches: Any = astuple(pattern)
    settings = CallSettings(
        D**-0.5, dropout_p, branches=branches, window=window, is_causal=is_causal, detached=detached, needs_grad=needs_grad, backend=backend
    )
    q, k = (torch.empty((B, N, heads, D), dtype=dtype, device="meta") for heads in (H, Hk))
    given: dict[str, Any] = {}
    if keys is not None:
        settings, k, given = settings._replace(query_offset=keys[1]), k.new_empty((B, keys[0], Hk, D)), {"documents": ((0, keys[0]),)}
    Q, K, R, a = q.nbytes, q.nbytes // H * Hk, B * N * H, accumulation_dtype(dtype).itemsize
    # with padding, k and v are copied with their padded rows zeroed
    common = [("q, k, v", Q + 2 * K + B * N * key_padding_mask), ("k, v without padding", 2 * K * key_padding_mask)]
    passes: list[list[tuple[str, int]]] = [[], []]
    saved = 0
    for is_backward in (False, True)[: 1 + needs_grad]:
        tensors = (q, k, k, q, q) if is_backward else (q, k, k)
        options = given | {"has_padding": key_padding_mask, "saved": not is_backward or saved > 0, "hardware": machine}
        try:
            plan = make_plan(settings, tensors, is_backward, host_ms=host_ms, **options)
        except BackendUnavailable:
            # no kernel of this machine computes it
            options["runner"] = run_branches if fuses(machine, dtype) else run_problems
            plan = make_plan(settings._replace(backend="math"), tensors, is_backward, **options)
        saved = saved if is_backward else plan.saved * dtype.itemsize
        results = [("out, dout", 2 * Q), ("dq, dk, dv", Q + 2 * K)] if is_backward else [("out", Q)]
        passes[is_backward] = [*common, ("the branches' own outputs", saved), *results, ("lse", R * a), *plan.runner.terms(plan)]
    forward, backward = (tuple((what, size) for what, size in terms if size) for terms in passes)
    return MemoryEstimate(forward=forward, backward=backward)


def readable(num_bytes: float) -> str:
    """Formats a number of bytes, e.g. as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 100 else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.0f} TiB" if num_bytes >= 100 else f"{num_bytes:.3g} TiB"


P = ParamSpec("P")
R = TypeVar("R")


def explain_shortage(error: RuntimeError, name: str, x: Mapping[str, Any]) -> None:
    """If an allocator of torch raised ``error``, raises it again with what the pass ``name`` of an op with arguments x needs."""
    of_cpu = type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)
    if error.__cause__ is not None or not (of_cpu or isinstance(error, torch.OutOfMemoryError)):
        return
    try:
        needs, device = needed(x), next(t.device for t in tree_leaves(dict(x)) if isinstance(t, Tensor))
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
        return (("inputs", sum(t.nbytes for t in tree_leaves(dict(x)) if isinstance(t, Tensor))),)
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
