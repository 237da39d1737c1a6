"""Measures a contender on a sequence that processes share: correctness first, then time.

A contender is first held to float64 in plain PyTorch on a short sequence. This library's rings are then held to one process's result on
the whole sequence, or, where no process can hold it, to float64 in sampled rows. What is wrong has no time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from dilated_attention.bench.accuracy.correctness import BOUNDS, RESULTS, Attend, relative, wrong
from dilated_attention.bench.measure.rank_sync import RankSync
from dilated_attention.bench.measure.skip import Refused, release
from dilated_attention.bench.measure.timing import captured, peak_extra
from dilated_attention.bench.report.rows import Row
from dilated_attention.bench.sharded.cases import FLOPS, Setting, Way
from dilated_attention.distributed import Layout, shard_sequence, spans
from dilated_attention.distributed.comm.comm_stats import traffic
from dilated_attention.distributed.comm.group import members_of
from dilated_attention.distributed.sharding.layout import local_length
from dilated_attention.engine.reference_rows import sampled_gradients, sampled_rows
from dilated_attention.pattern import DilatedPattern

Errors = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class ShardedContender:
    """One way to compute a setting.

    Args:
        way: raises ``Refused`` where it cannot compute a setting.
        case: what its rows have in common.
        kernel: the backend.
        kind: ``"ring"``; ``"one process"`` on the whole sequence while the others wait; ``"kernel"``, alone on as many tokens as a process
            has, on all processes at once; or ``"foreign"``, third-party code.
    """

    name: str
    setting: Setting
    way: Callable[[Setting], Way]
    case: dict[str, Any]
    kernel: str
    kind: str

    @property
    def who(self) -> dict[str, Any]:
        return {"ranks": 1 if self.kind == "one process" else None, "foreign": self.kind == "foreign"}

    def check(self, together: RankSync, tokens: int) -> list[Errors]:
        """Returns each process's errors."""
        setting, N = self.setting, self.setting.problem.num_positions
        found = self._compared(setting.of_length(min(N, tokens), scaled=True), together, exact=True)
        if self.kind != "ring":
            return found
        fits = setting.case.fits
        more = self._compared(setting, together, exact=False) if fits else together.everywhere(lambda: _row_errors(setting))
        return [a | b for a, b in zip(found, more, strict=True)]

    def _compared(self, setting: Setting, together: RankSync, *, exact: bool) -> list[Errors]:
        """Compares with float64 in plain PyTorch (``exact``) or with one process's result, over all rows that a process holds."""
        problem, true, inputs = setting.problem, [], []

        def truth() -> None:
            inputs.extend([*problem.qkv(7), problem.draw(problem.num_heads, 101)])
            attend = setting.attend(shared=False, backend="math" if exact else self.kernel)
            true.extend(_results(attend, [x.double() if exact else x for x in inputs]))

        def errors() -> Errors:
            way = self.way(setting)
            mine, wanted = (xs if way.layout is None else shard_sequence(None, xs, [1] * 4, layout=way.layout) for xs in (inputs, true))
            names = RESULTS if exact else [f"{name} (whole)" for name in RESULTS]
            return {name: relative(a, b.double()) for name, a, b in zip(names, _results(way.attend, mine), wanted, strict=True)}

        try:
            together.everywhere(truth)
        except Refused:
            if exact:
                raise
            # what one process cannot compute is compared on the short sequence alone
            return [{}] * together.size
        return together.everywhere(errors, **self.who)

    def call(self, which: str) -> tuple[Callable[[], Any], dict[str, float]]:
        """Returns a call on this process's part, and figures that need no measurement."""
        way, problem, members = self.way(self.setting), self.setting.problem, members_of(None)
        figures: dict[str, float] = {"pairs": self.setting.pairs()}
        figures["flops"] = FLOPS[which] * figures["pairs"] * problem.head_dim
        if way.layout is not None:
            N, layout, size = problem.num_positions, way.layout, members.size
            figures["flops"] /= size
            problem = replace(problem, num_positions=local_length(N, members.rank, size, layout))
            if self.setting.case.packed:
                held = [sum(self.setting.pairs(start, stop) for start, stop, _ in spans(N, rank, size, layout)) for rank in range(size)]
                figures["imbalance"] = max(held) * size / sum(held)
            elif isinstance(layout, Layout):
                figures["imbalance"] = layout.imbalance
        leaves, dout = problem.qkv(members.rank), problem.draw(problem.num_heads, 101)
        if which == "forward":
            leaves = [x.detach() for x in leaves]
            return lambda: way.attend(*leaves), figures
        return lambda: torch.autograd.grad(way.attend(*leaves), leaves, dout), figures


def _results(attend: Attend, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].detach())]


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


def _row_errors(setting: Setting) -> Errors:
    """Compares sampled rows of head 0 with float64; their keys come from the processes that hold them."""
    problem, pattern, trains = setting.problem, setting.pattern, "both" in setting.case.passes
    N, rank = problem.num_positions, members_of(None).rank
    if N % setting.size or problem.num_heads != problem.kv_heads or not isinstance(pattern, DilatedPattern):
        raise Refused(f"{N} positions on {setting.size} processes, pattern {pattern}; sampled rows need equal shards, heads and branches")
    local, options = replace(problem, num_positions=N // setting.size), {"is_causal": problem.is_causal}
    leaves, dout = [x.requires_grad_(trains) for x in local.qkv(rank)], local.draw(problem.num_heads, 101 + rank)
    out, lse = setting.attend(shared=True, return_lse=True)(*leaves)
    found = [out, *(torch.autograd.grad(out, leaves, dout) if trains else ())]
    # the ends of the whole and of a shard, and any
    chosen = torch.randint(N, (20,), generator=torch.Generator().manual_seed(7))
    positions = torch.cat([torch.tensor([0, N - 1, N // setting.size - 1]), chosen])
    rows: Any = [(position, 0) for position in positions.tolist()]
    q, k, v, douts, outs = (Sharded(x) for x in (*leaves, dout, out))
    true = [sampled_rows(pattern, q, k, v, rows, **options)[0]]  # type: ignore[arg-type]
    if trains:
        true += sampled_gradients(pattern, (douts, q, k, v, outs, Sharded(lse, 2)), rows, **options)  # type: ignore[arg-type]
    return {f"{name} (rows)": relative(Sharded(x)[0, positions, 0], y) for name, x, y in zip(RESULTS, found, true, strict=False)}


def measure(contender: ShardedContender, together: RankSync, *, seconds: float, check_tokens: int, graphs: bool) -> list[Row]:
    """Returns a row for each pass of a contender, or one with a note where it fails or is wrong.

    Values: those of ``RankSync.called``, ``graph_ms``, ``tflops`` of one process, ``tokens_per_s``, and of the process with the most
    ``sent_bytes``, ``received_bytes`` and, on a GPU, ``peak_bytes`` beyond the inputs.
    """
    rows: list[Row] = []
    errors: Errors = {}
    which = None
    with contextlib.ExitStack() as stack:
        try:
            together.everywhere(lambda: bool(stack.enter_context(contender.way(contender.setting).context())), **contender.who)
            found = contender.check(together, check_tokens)
            # NaN is the largest
            errors = {name: max((one[name] for one in found), key=lambda error: (error != error, error)) for name in found[0]}
            if note := wrong(errors, BOUNDS[contender.setting.problem.dtype]):
                raise Refused(note)
            for which in contender.setting.case.passes:
                release()
                values = _timed(contender, together, which, seconds, graphs)
                rows.append(Row(name=contender.name, case=contender.case | {"pass": which}, values=values, errors=errors))
        except Refused as refused:
            case = contender.case | ({} if which is None else {"pass": which})
            rows.append(Row(name=contender.name, case=case, errors=errors, note=str(refused)))
    release()
    return rows


def _timed(contender: ShardedContender, together: RankSync, which: str, seconds: float, graphs: bool) -> dict[str, float]:
    calls: list[Callable[[], Any]] = []

    def prepare() -> dict[str, float]:
        call, figures = contender.call(which)
        calls.append(call)
        # opens communicators and compiles kernels
        call()
        with traffic() as counted:
            call()
        figures |= {"sent_bytes": counted.sent, "received_bytes": counted.received}
        peak = peak_extra(call, together.device)
        return figures | ({} if peak is None else {"peak_bytes": peak})

    prepared = together.everywhere(prepare, **contender.who)
    values = {name: max(found[name] for found in prepared) for name in prepared[0]}
    values |= together.called(lambda: calls[-1](), seconds=seconds, **contender.who)
    if graphs and together.device.type == "cuda" and contender.kind != "foreign":
        # a call that cannot be captured has the figures of plain calls alone
        with contextlib.suppress(Refused):
            together.everywhere(lambda: calls.append(_captured(calls[0])), **contender.who)
            values["graph_ms"] = together.called(lambda: calls[-1](), seconds=seconds, **contender.who)["ms"]
    flops, problem = values.pop("flops", 0.0), contender.setting.problem
    values["tokens_per_s"] = 1000 * problem.batch_size * problem.num_positions / values["ms"]
    return values | ({"tflops": flops / values["ms"] / 1e9} if flops else {})


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns the call as one CUDA graph: what the GPU does, without the time of Python."""
    try:
        return captured(call)
    except RuntimeError as error:
        raise Refused(f"cannot be captured: {error}") from error
