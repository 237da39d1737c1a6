"""Measures a contender on a sequence that processes share: correctness first, then time.

It is held to float64 as a function of the whole sequence, or, where no process can hold that, in sampled rows. What is wrong has no time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from dilated_attention import create_model, shard_sequence
from dilated_attention.bench.accuracy.contender_check import check, forget
from dilated_attention.bench.accuracy.correctness import RESULTS, Attend, relative, wrong
from dilated_attention.bench.measure.forward_backward import FLOPS, call_of
from dilated_attention.bench.measure.rank_sync import RankSync
from dilated_attention.bench.measure.skip import Refused, release
from dilated_attention.bench.measure.timing import captured, peak_extra
from dilated_attention.bench.report.rows import Row
from dilated_attention.bench.workloads.contenders import Contender, dense_pattern
from dilated_attention.bench.workloads.problem import Problem
from dilated_attention.bench.workloads.rings import OnShards, pattern_of, ring_call
from dilated_attention.distributed import Layout, spans
from dilated_attention.distributed.comm.comm_stats import traffic
from dilated_attention.distributed.comm.group import members_of
from dilated_attention.engine.reference_rows import sampled_gradients, sampled_rows
from dilated_attention.fork import cached_property
from dilated_attention.models.sharded import average_gradients
from dilated_attention.pattern import DilatedPattern

Errors = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contender on one problem.

    Args:
        at: N → the problem of that length.
        case: what its rows have in common.
        kind: ``"ring"``; ``"one process"`` on the whole sequence while the others wait; ``"kernel"``, alone on as many tokens as a process
            has, on all processes at once; or ``"foreign"``, third-party code.
        fits: whether one process can hold the whole sequence.
    """

    contender: Contender
    at: Callable[[int], Problem]
    num_positions: int
    case: dict[str, Any]
    kind: str
    passes: tuple[str, ...]
    fits: bool = True

    @property
    def who(self) -> dict[str, Any]:
        return {"ranks": 1 if self.kind == "one process" else None, "foreign": self.kind == "foreign"}

    @cached_property
    def problem(self) -> Problem:
        return self.at(self.num_positions)

    @cached_property
    def attend(self) -> Attend:
        return self.contender.make(self.problem)

    def check(self, together: RankSync, most: int) -> list[Errors]:
        """Returns each process's errors, on at most this many positions."""
        trains = "both" in self.passes
        if self.kind == "ring" and not self.fits:
            return together.everywhere(lambda: row_errors(self.problem, trains))
        problem = self.at(min(self.num_positions, most))

        def errors() -> Errors:
            attend = self.contender.make(problem)
            attend = replace(attend, group=together.group) if isinstance(attend, OnShards) else attend
            try:
                return check(self.contender, problem, attend, gradients=trains)
            finally:
                forget()

        return together.everywhere(errors, **self.who)

    def call(self, which: str) -> tuple[Callable[[], Any], dict[str, float]]:
        """Returns a call on this process's part, and figures that need no measurement."""
        problem, attend = self.problem, self.attend
        pairs = self.contender.pairs(problem) or 0
        figures: dict[str, float] = {"pairs": pairs, "flops": FLOPS[which] * pairs * problem.head_dim}
        if isinstance(attend, OnShards):
            size = members_of(None).size
            figures["flops"] /= size
            if problem.bounds is not None:
                runs = [spans(problem.num_positions, rank, size, attend.layout) for rank in range(size)]
                held = [sum(problem.pairs(dense_pattern(problem), (start, stop)) for start, stop, _ in mine) for mine in runs]
                figures["imbalance"] = max(held) * size / sum(held)
            elif isinstance(attend.layout, Layout):
                figures["imbalance"] = attend.layout.imbalance
        return call_of(self.contender, attend, problem, which, {}), figures


class SlideStep(Entry):
    """A training step of Prov-GigaPath's slide encoder, 12 layers of 768, on one slide: over all processes, or on one of them alone.

    Weights are random; a step is the forward without dropout (on a GPU under autocast to bfloat16), the sum of the slide's vector, its
    backward, and the mean of the gradients over the processes; no optimiser. The vector is compared with one process's.
    """

    def check(self, together: RankSync, most: int) -> list[dict[str, float]]:
        def errors() -> dict[str, float]:
            with torch.no_grad():
                found, wanted = (self._vector(*self._made(shared=shared)) for shared in (True, False))
            return {"vector (whole)": relative(found, wanted.double())}

        return together.everywhere(errors) if self.kind == "ring" else [{}]

    def call(self, which: str) -> tuple[Callable[[], Any], dict[str, float]]:
        model, inputs = self._made(shared=self.kind == "ring")

        def step() -> None:
            model.zero_grad(set_to_none=True)
            self._vector(model, inputs).sum().backward()
            if self.kind == "ring":
                average_gradients(model)

        return step, {}

    def _made(self, *, shared: bool) -> tuple[Any, list[torch.Tensor]]:
        """Returns the model, and this process's embeddings (1, L, 1536) and pixels (1, L, 2) of tiles in a square, row by row."""
        tiles, device, shared = self.problem.num_positions, self.problem.device, shared and dist.is_initialized()
        torch.manual_seed(0)
        options: dict[str, Any] = {"dropout": 0.0, "drop_path": 0.0, "device": device} | ({"group": dist.group.WORLD} if shared else {})
        # one layer for a try
        options |= {"num_layers": 1} if device.type == "cpu" else {}
        model, side = create_model("gigapath-12l768d", **options).train(), math.isqrt(tiles - 1) + 1
        place = torch.arange(tiles, device=device)
        coords = torch.stack((place // side, place % side), -1).float()[None] * 256
        x = torch.randn(1, tiles, 1536, generator=torch.Generator(device).manual_seed(0), device=device)
        return model, shard_sequence(None, [x, coords], [1, 1]) if shared else [x, coords]

    def _vector(self, model: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
        device = self.problem.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return model(*inputs).float()  # type: ignore[no-any-return]


class Sharded:
    """A tensor in contiguous shards of equal length, indexed by positions of the whole along ``dim``: every process gets the rows."""

    def __init__(self, x: torch.Tensor, dim: int = 1) -> None:
        members = members_of(None)
        self.x, self.dim, self.device, self.size = x.detach(), dim, x.device, members.size
        self.first = members.rank * x.shape[dim]
        self.shape = (*x.shape[:dim], x.shape[dim] * members.size, *x.shape[dim + 1 :])

    def __getitem__(self, index: tuple[Any, ...]) -> torch.Tensor:
        local = torch.as_tensor(index[self.dim], device=self.device) - self.first
        mine = (local >= 0) & (local < self.x.shape[self.dim])
        rows = self.x[(*index[: self.dim], torch.where(mine, local, 0), *index[self.dim + 1 :])].double()
        rows = torch.where(mine.reshape((*mine.shape, *(1,) * (rows.ndim - mine.ndim))), rows, 0.0)
        if self.size > 1:
            dist.all_reduce(rows)
        return rows


def row_errors(problem: Problem, trains: bool) -> Errors:
    """Compares sampled rows of head 0 with float64; their keys come from the processes that hold them."""
    members, N, pattern = members_of(None), problem.num_positions, pattern_of(problem)
    if N % members.size or problem.num_heads != problem.kv_heads or not isinstance(pattern, DilatedPattern):
        raise Refused(f"{N} positions on {members.size} processes, pattern {pattern}; sampled rows need equal shards, heads and branches")
    local, options = replace(problem, num_positions=N // members.size), {"is_causal": problem.is_causal}
    leaves, dout = [x.requires_grad_(trains) for x in local.qkv(members.rank)], local.draw(problem.num_heads, 101 + members.rank)
    out, lse = ring_call(problem, *leaves, return_lse=True)
    found = [out, *(torch.autograd.grad(out, leaves, dout) if trains else ())]
    # the ends of the whole and of a shard, and any
    chosen = torch.randint(N, (20,), generator=torch.Generator().manual_seed(7))
    positions = torch.cat([torch.tensor([0, N - 1, N // members.size - 1]), chosen])
    rows: Any = [(position, 0) for position in positions.tolist()]
    q, k, v, douts, outs = (Sharded(x) for x in (*leaves, dout, out))
    true = [sampled_rows(pattern, q, k, v, rows, **options)[0]]  # type: ignore[arg-type]
    if trains:
        true += sampled_gradients(pattern, (douts, q, k, v, outs, Sharded(lse, 2)), rows, **options)  # type: ignore[arg-type]
    return {name: relative(Sharded(x)[0, positions, 0], y) for name, x, y in zip(RESULTS, found, true, strict=False)}


def measure(entry: Entry, together: RankSync, *, seconds: float, check_tokens: int, graphs: bool) -> list[Row]:
    """Returns a row for each pass of a contender, or one with a note where it fails or is wrong.

    Values: those of ``RankSync.called``, ``graph_ms``, ``tflops`` of one process, ``tokens_per_s``, and of the process with the most
    ``sent_bytes``, ``received_bytes`` and, on a GPU, ``peak_bytes`` beyond the inputs.
    """
    rows: list[Row] = []
    errors: Errors = {}
    name, case = entry.contender.name, entry.case
    with contextlib.ExitStack() as stack:
        try:
            together.everywhere(lambda: bool(stack.enter_context(getattr(entry.attend, "context", contextlib.nullcontext)())), **entry.who)
            found = entry.check(together, check_tokens)
            # NaN is the largest
            errors = {key: max((one[key] for one in found), key=lambda error: (error != error, error)) for key in found[0]}
            if note := wrong(errors, entry.contender.allowed(entry.problem)):
                raise Refused(note)
            for which in entry.passes:
                case = entry.case | {"pass": which}
                release()
                rows.append(Row(name=name, case=case, values=_timed(entry, together, which, seconds, graphs), errors=errors))
        except Refused as refused:
            rows.append(Row(name=name, case=case, errors=errors, note=str(refused)))
    release()
    return rows


def _timed(entry: Entry, together: RankSync, which: str, seconds: float, graphs: bool) -> dict[str, float]:
    calls: list[Callable[[], Any]] = []

    def prepare() -> dict[str, float]:
        call, figures = entry.call(which)
        calls.append(call)
        # opens communicators and compiles kernels
        call()
        with traffic() as counted:
            call()
        figures |= {"sent_bytes": counted.sent, "received_bytes": counted.received}
        peak = peak_extra(call, together.device)
        return figures | ({} if peak is None else {"peak_bytes": peak})

    prepared = together.everywhere(prepare, **entry.who)
    values = {name: max(found[name] for found in prepared) for name in prepared[0]}
    values |= together.called(lambda: calls[-1](), seconds=seconds, **entry.who)
    if graphs and together.device.type == "cuda" and entry.kind != "foreign":
        # a call that cannot be captured has the figures of plain calls alone
        with contextlib.suppress(Refused):
            together.everywhere(lambda: calls.append(_captured(calls[0])), **entry.who)
            values["graph_ms"] = together.called(lambda: calls[-1](), seconds=seconds, **entry.who)["ms"]
    flops, problem = values.pop("flops", 0.0), entry.problem
    values["tokens_per_s"] = 1000 * problem.batch_size * problem.num_positions / values["ms"]
    return values | ({"tflops": flops / values["ms"] / 1e9} if flops else {})


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns the call as one CUDA graph: what the GPU does, without the time of Python."""
    try:
        return captured(call)
    except RuntimeError as error:
        raise Refused(f"cannot be captured: {error}") from error
