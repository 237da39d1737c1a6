"""The ops of attention on a sharded sequence, and how a call runs: agreement of the ranks, setup, padding, exchange, computation. All kinds
of attention run here; they differ in their setup, and in when the ranks can tell whether they have kernels.

A backward needs only its own out and lse, so with such an op as must-save in a selective-checkpointing policy nothing is exchanged a second
time in the recomputation."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention.backends.base import Bias, new_lse
from dilated_attention.backends.hardware import detect, keep_for_graph
from dilated_attention.distributed.comm.call_consistency import agreed_call, device_memory, op_name, ring_call
from dilated_attention.distributed.comm.group import members_named
from dilated_attention.distributed.comm.p2p import Holdings, Wire, holdings, reshard, wire_of
from dilated_attention.distributed.comm.session import session_of, sessions
from dilated_attention.distributed.exchange import run
from dilated_attention.distributed.exchange.blocks import BlockPart, block_parts, held_documents
from dilated_attention.distributed.exchange.plan import RingProblem, Step, key_span, make_step
from dilated_attention.distributed.exchange.run import Pair, Part, SparseRows, Tensors, Term, parts_of
from dilated_attention.distributed.sharding.layout import Runs, ShardSpec, joined, shards_of, spans
from dilated_attention.engine.branches.launches import Masks, without_padding
from dilated_attention.engine.branches.problems import Range
from dilated_attention.engine.ops.bounds import bounds_of, document_ranges
from dilated_attention.engine.ops.definition import define_attention
from dilated_attention.engine.ops.prepare import kernel_ready, make_plan, new_like
from dilated_attention.engine.ops.resolve import CallInputs, MaybeTensor, Outputs, ResolvedCall, positions_as_places, record_of
from dilated_attention.engine.ops.settings import as_dense
from dilated_attention.pattern import DilatedPattern, pattern_from_spec
from dilated_attention.pattern.blocks.base import redefined_classes

# what ``exchange`` may be, besides "auto"; "ring" and "2d" run as "auto"
EXCHANGES = ("all_gather", "ring", "all_to_all", "2d")
# assumed rates (docs/ring.md): of a half-precision forward on an H200, and of what a rank receives by NCCL among four of them
FLOPS_PER_SECOND, BYTES_PER_SECOND = 600e12, 300e9
# the fraction of a device's memory that the keys of two steps may take
MEMORY_SHARE = 0.25
# keys arrive in several steps if they take longer than STEP_SHARE of the time of the arithmetic: in at most MOST_STEPS, each of at least
# STEP_BYTES, and with at least as much arithmetic as the host takes to issue the step (by kind of pattern)
STEP_SHARE, MOST_STEPS, STEP_BYTES = 0.06, 4, 16 * 2**20
HOST_SECONDS = {"dense": 0.3e-3, "blocks": 0.7e-3}
# the most bytes of tables and lists in all cached setups, without those that ``block_lists`` caches, and the most setups
MAX_CACHED_BYTES, MOST_SETUPS = 2**30, 512
# with fewer bytes of keys and values per rank a call is not separated (``Crossing``): its two calls, merge and chosen rows take the host
# longer than one call. Two H200s, LongNet 12×64 in 16 bits, forward + backward, separated and not: 32,768 a rank (96 MiB) 3.5 and 2.2 ms,
# 131,072 (384 MiB) 5.7 and 8.6 ms (benchmarks/results)
SMALL_BYTES = 2**27


class ResolvedRing(ResolvedCall):
    """Calls on a sharded sequence. The third output is (N, number of the call), int64 on the CPU."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return op_name(self.settings)

    def forward(self, inputs: CallInputs, bias: Bias | None) -> Outputs:
        ring_pass = RingPass(self, inputs, bias)
        ring_pass.seq_len, number = agreed_call(
            ring_pass.members, inputs, self.settings, ring_pass.ring, ring_pass.bounds, self.alive, ring_pass.check_kernels
        )
        out, lse = ring_pass.forward() if inputs.q.shape[0] else (new_like(inputs.q), new_lse(inputs.q))
        return out, lse, torch.tensor((ring_pass.seq_len, number), dtype=torch.int64)

    def backward(self, dout: Tensor, dlse: MaybeTensor, inputs: CallInputs, bias: Bias | None, outputs: Outputs) -> Tensors:
        out, lse, whole = outputs
        ring_pass = RingPass(self, inputs, bias, dout, out)
        ring_pass.seq_len, number = whole.tolist()  # type: ignore[union-attr]
        if ring_pass.members.group is not None:
            # for comparison with the other ranks
            session_of(ring_pass.members, ring_pass.ring.timeout).enter(f"the backward of call {number}")
        return ring_pass.backward(lse, dlse) if inputs.q.shape[0] else tuple(new_like(x) for x in inputs[:3])


class RingPass:
    """One pass on one rank. ``of_backward``: dout and out; ``bounds``: of packed documents, or None; ``seq_len``: N once it is known."""

    setup: RingSetup
    masks: Masks

    def __init__(self, call: ResolvedRing, inputs: CallInputs, bias: Bias | None, *of_backward: Tensor) -> None:
        self.call, self.inputs, self.bias, self.ring = call, inputs, bias, ring_call(call.settings)
        self.members, self.seq_len = members_named(self.ring.group_name), -1
        self.bounds = None if inputs.cu_seqlens is None else bounds_of(inputs.cu_seqlens)
        self.tensors, self.of_backward = (tuple(map(kernel_ready, x)) for x in (inputs[:3], of_backward))

    def check_kernels(self, seq_len: int) -> str:
        """Raises BackendUnavailable if this rank has no kernels for some pass; else returns the digest of a setup."""
        self.seq_len, settings, views = seq_len, as_dense(self.call.settings, self.inputs.q), self.inputs[:3]
        has_padding = self.inputs.key_padding_mask is not None
        # a sequence of no positions launches nothing
        if settings.branches is not None and seq_len:
            for is_backward in (False, True) if settings.needs_grad else (False,):
                # dout is like q. A plan for named hardware compiles nothing; the whole call is never launched, only its parts are
                tensors, hardware = (*views, views[0]) if is_backward else views, detect(views[0].device)
                make_plan(settings, tensors, is_backward, has_padding=has_padding, num_keys=seq_len, hardware=hardware)
        if not settings.blocks:
            return ""
        self._find_setup()
        return self.setup.digest

    def _find_setup(self) -> None:
        call, members, (q, k, _) = self.call, self.members, self.tensors
        # a pattern that holds a function is a part of the kind, since its name may be given again once it is gone
        place = call.alive, members.rank, members.size, self.ring, self.seq_len, self.bounds, q.device
        options = call.settings, self.inputs.key_padding_mask is None, torch.are_deterministic_algorithms_enabled()
        self.setup = cached_setup((*place, *options, len(redefined_classes), q.dtype, q.shape, k.shape), lambda: make_setup(self))
        keep_for_graph(self.setup, q.device.type)

    def _move(self, what: str) -> None:
        """Gathers padding and places of all ranks' keys, and moves q, k and v to where they are computed on."""
        self._find_setup()
        (q, k, v), bias, padding, seed = self.tensors, self.bias, self.inputs.key_padding_mask, self.inputs.seed
        # padding could spread NaN through sums
        self.tensors = (q, *without_padding(k, v, padding))
        if bias is not None:
            by_position = self.call.settings.bias == "position"
            places = positions_as_places(self.seq_len, k, bias.keys.dtype) if by_position else self._whole(bias.keys, "places of keys")
            bias = bias._replace(keys=places)
        if padding is not None:
            padding = self._whole(padding, "padding masks")
        self.masks = Masks(padding, 0 if seed is None else int(seed.item()), bias)
        self.tensors = self._reshard(self.tensors, "qkk", f"{what}: q, k and v")

    def _whole(self, x: Tensor, what: str) -> Tensor:
        """Returns numbers (B, N, …) of all positions from this rank's (B, n, …)."""
        N, size = self.seq_len, self.members.size
        rows = [ShardSpec(spans(N, rank, size, self.ring.layout), (0, 1)) for rank in range(size)]
        whole = [ShardSpec(((0, N, 1),), (0, 1))] * size
        return reshard([x[:, :, None]], [rows], [whole], self.members.rank, self._wire(), what)[0][:, :, 0]

    def _wire(self) -> Wire | None:
        """Returns the wire. Every rank opens it, even one that has nothing to exchange."""
        return wire_of(self.members, self.ring.timeout, self.tensors[0].device)

    def _reshard(self, tensors: Sequence[Tensor], which: str, what: str, *, back: bool = False, add: bool = False) -> Tensors:
        """Regroups tensors of queries (``q``) and keys (``k``), named by the letters of ``which``, for the computation or back as given."""
        if self.setup.moves is None:
            return tuple(tensors)
        old, new = ([side["qk".index(letter)] for letter in which] for side in self.setup.moves[:: -1 if back else 1])
        return tuple(reshard(tensors, old, new, self.members.rank, self._wire(), what, add=add))

    def forward(self) -> Pair:
        """Returns (out (B, n, H, D), lse (B, H, n)), contiguous, in the caller's layout."""
        self._move("forward")
        setup = self.setup
        out, lse = run.compute(setup.terms, setup.steps, self.masks, self.tensors, (), self._wire() if setup.exchanges else None)
        out, lse = self._reshard((out, lse.transpose(1, 2)), "qq", "forward: out and lse", back=True)
        return out.contiguous(), lse.transpose(1, 2).contiguous()

    def backward(self, lse: Tensor, dlse: MaybeTensor) -> Tensors:
        """Returns (dq, dk, dv), contiguous, in the caller's layout. lse and dlse are (B, H, n)."""
        dout, out = self.of_backward
        self._move("backward")
        setup = self.setup
        if setup.moves and dlse is None and self.ring.lse_grad:
            # other ranks may have a gradient of lse, and all must send the same
            dlse = torch.zeros_like(lse)
        rows = [x.transpose(1, 2) for x in (lse, dlse) if x is not None]
        dout, out, *rows = self._reshard((dout, out, *rows), "qqqq"[: 2 + len(rows)], "backward: dout, out and lse")
        saved = dout, out, *(x.transpose(1, 2) for x in rows), *(() if dlse is not None else (None,))
        wire = self._wire() if setup.exchanges else None
        dq, dk, dv = run.compute(setup.terms, setup.steps, self.masks, self.tensors, saved, wire)
        # ranks that share a key/value head each have a contribution to its gradient
        shared = setup.by_heads and self.inputs.k.shape[2] < self.members.size
        (dq,) = self._reshard((dq,), "q", "backward: dq", back=True)
        dk, dv = self._reshard((dk, dv), "kk", "backward: dk and dv", back=True, add=shared)
        return tuple(x.to(like.dtype).contiguous() for x, like in zip((dq, dk, dv), self.tensors, strict=True))


resolve_ring = functools.partial(record_of, ResolvedRing)
# what to use for second derivatives and forward mode
_ALTERNATIVES = {
    "ring_attention": "dilated_attention.engine.reference.reference_attention on one process, which is plain autograd",
    "ring_block_sparse_attention": "softmax attention in plain autograd under the mask pattern.dense_mask(N, N, H), on one process",
    "ring_block_sparse_dilated_attention": "softmax attention in plain autograd with the sum of both patterns' dense_mask(N, N, H) as "
    "multiplicities, on one process",
}
ring_attention_op, ring_block_sparse_attention_op, ring_block_sparse_dilated_attention_op = (
    define_attention(name, resolve_ring, alternative, new_saved=lambda *_: torch.empty(2, dtype=torch.int64, device="cpu"))
    for name, alternative in _ALTERNATIVES.items()
)


# --- the setup of a kind of calls -------------------------------------------------------------------------------------------------
# All of it follows from what every rank knows: no rank asks another, and nothing waits for a GPU.


def steps_of(
    kind: str, problem: RingProblem, sizes: tuple[int, int, int], memory: int, *, needs_grad: bool, forced: int = 0
) -> list[Range]:
    """Returns the key/value heads [first, last) of each step. All ranks must come to the same answer.

    Args:
        kind: a key of ``HOST_SECONDS``; calls of another kind take several steps only to save memory.
        sizes: batch, head dim and bytes of an element.
        memory: bytes of memory of a device.
        forced: the number of steps that the caller asks for; 0 for any.
    """
    (batch, head_dim, itemsize), kv_heads = sizes, problem.num_kv_heads
    # bytes of K and V at a position, of all heads
    row_bytes = 2 * batch * head_dim * itemsize * kv_heads
    # of the keys that a rank would hold at once, in training with their gradients
    rows, held, limit = problem.seq_len, row_bytes * (1 + needs_grad), max(1.0, MEMORY_SHARE * memory)
    if rows * held > limit and (problem.blocks is not None or problem.window is not None):
        rows = max(span.end - span.start for span in (key_span(problem, rank) for rank in range(problem.size)))
    count = math.ceil(2 * rows * held / limit) if rows * held > limit else 1
    if kind in HOST_SECONDS and not forced:
        # where heads need different positions, the mean over heads
        needed = (problem.needed(rank) for rank in range(problem.size))
        brought = max(x.count([(0, problem.seq_len)]) / x.heads for x in needed) * row_bytes
        seconds = 4 * batch * head_dim * problem.pairs / FLOPS_PER_SECOND
        if brought / BYTES_PER_SECOND > STEP_SHARE * seconds:
            count = max(count, min(MOST_STEPS, int(brought) // STEP_BYTES, int(seconds / HOST_SECONDS[kind])))
    count = min(forced or count, kv_heads)
    return list(itertools.pairwise(kv_heads * step // count for step in range(count + 1)))


def why_no_heads(num_heads: int, num_kv_heads: int, parts: int, branch_heads: str) -> str | None:
    """Returns why heads cannot be divided among ``parts`` ranks, or None if they can."""
    if num_heads % parts:
        return f"{num_heads} heads are not a multiple of {parts} ranks"
    if num_kv_heads % parts and parts % num_kv_heads:
        return f"{num_kv_heads} key/value heads and {parts} ranks: neither is a multiple of the other"
    if branch_heads == "split":
        return "branch_heads='split' gives heads branches of their own"
    return None


def exchange_of(name: str, layout: str, size: int, num_heads: int, num_kv_heads: int, *, is_dense: bool, is_causal: bool) -> str:
    """Returns the exchange that ``name`` stands for. ``"auto"`` divides the heads (``"all_to_all"``) only for dense causal calls on
    contiguous shards, where the last rank would have most of the work. Elsewhere needed keys are fewer bytes, or travel while others are
    computed. ``is_dense``: without a window, or with one longer than a shard."""
    if name in ("all_gather", "all_to_all"):
        return name
    uneven = is_dense and is_causal and layout == "contiguous" and size > 1
    return "all_to_all" if uneven and why_no_heads(num_heads, num_kv_heads, size, "all") is None else "all_gather"


class Crossing(NamedTuple):
    """How a call is separated into branches whose segments stay within ranks and branches that cross ranks.

    A rank computes the former by the engine on its own rows, while the keys of the latter are in flight. The latter are usually sparse: if
    all of them take every g-th position of each head, they are a pattern (w/g, r/g) on N/g positions. It is computed as a ring of its own,
    on every g-th row of each head of a rank's tensors, and merged into the rest.

    Attributes:
        home: the branches that stay within ranks, on all positions.
        problem: the branches that cross ranks, on every g-th position.
        step: g.
        offsets: the position, below g, of the first row of each key/value head and of its query heads.
    """

    home: DilatedPattern
    problem: RingProblem
    step: int
    offsets: tuple[int, ...]


def crossing_of(problem: RingProblem, row_bytes: int) -> Crossing | None:
    """Returns how a call is separated; None if it is not: all branches stay within ranks or all cross them, those that cross have no common
    g > 1, or a rank's keys and values, of ``row_bytes`` a position, have fewer than SMALL_BYTES."""
    pattern, H = problem.pattern, problem.num_heads
    if pattern is None or problem.seq_len // problem.size * row_bytes < SMALL_BYTES:
        return None
    if pattern.branch_heads != "all" or problem.blocks is not None or len(problem.documents) != 1:
        return None
    if pattern.tail != "mask" and not problem.is_causal:
        return None
    N, bounds = problem.seq_len, {bound for spans in problem.shards for span in spans for bound in span}
    stays = [all(bound % length == 0 or bound == N for bound in bounds) for length, _ in pattern.branches]
    if all(stays) or not any(stays):
        return None
    home, far = (pattern.with_branches([b for b, inside in enumerate(stays) if inside is wanted], H) for wanted in (True, False))
    # a segment that is longer than the sequence is as good as one of its length
    branches, offsets = [(min(length, N), rate) for length, rate in far.branches], far.offsets(H)
    step = math.gcd(N, *itertools.chain(*branches), *bounds)
    # the query heads of a key/value head must all take the same one of the g positions
    group = H // problem.num_kv_heads
    firsts = tuple(x % step for x in offsets[0][::group])
    if step == 1 or any(x % step != firsts[h // group] for row in offsets for h, x in enumerate(row)):
        return None
    sparse_offsets = tuple(tuple(x // step for x in row) for row in offsets)
    lengths, rates = zip(*((length // step, rate // step) for length, rate in branches), strict=True)
    sparse = replace(
        problem,
        pattern=DilatedPattern(lengths, rates, sparse_offsets, "all", pattern.tail),
        documents=((0, N // step),),
        shards=tuple(tuple((start // step, end // step) for start, end in spans) for spans in problem.shards),
    )
    return Crossing(home, sparse, step, firsts)


class RingSetup(NamedTuple):
    """What calls of the same kind have in common. It is made once, since making it takes the host longer than a short call takes.

    Args:
        steps: the steps of the exchange, each of some key/value heads.
        nbytes: bytes of its tables and lists.
        exchanges: whether any rank sends keys; the same on all ranks.
        terms: what a pass computes, see ``run.py``.
        moves: what each rank holds before and after the computation, and during it; None if that is the same.
        by_heads: each rank computes some heads of the whole sequence, so no keys are exchanged.
        digest: see ``KeptBlocks``.
    """

    steps: tuple[Step, ...]
    nbytes: int
    exchanges: bool
    terms: tuple[Term, ...]
    moves: tuple[Holdings, Holdings] | None = None
    by_heads: bool = False
    digest: str = ""


_setups: dict[Hashable, RingSetup] = {}


def cached_setup(kind: Hashable, make: Callable[[], RingSetup]) -> RingSetup:
    """Returns the setup of calls of this kind, and makes it for the first of them. A full cache forgets all other setups, since those of
    packed batches are not used again."""
    setup = _setups.get(kind)
    if setup is None:
        setup = make()
        # a copy, since threads of other groups may add theirs meanwhile
        if len(_setups) >= MOST_SETUPS or setup.nbytes + sum(x.nbytes for x in _setups.copy().values()) > MAX_CACHED_BYTES:
            _setups.clear()
        _setups[kind] = setup
    return setup


def make_setup(of: RingPass) -> RingSetup:
    """Makes the setup of calls like this one; raises BackendUnavailable if this rank has no kernels for blocks of some pass."""
    # 1. which rows and heads each rank holds while it computes
    members, tensors, ring, N, padding = of.members, of.tensors, of.ring, of.seq_len, of.inputs.key_padding_mask
    q, k, _ = tensors
    me, size, device, settings = members.rank, members.size, k.device, as_dense(of.call.settings, q)
    (B, _, H, D), Hk = q.shape, k.shape[2]
    documents = document_ranges((0, N) if of.bounds is None else of.bounds, N)
    blocks, pattern = pattern_from_spec(settings.blocks) if settings.blocks else None, settings.pattern if settings.branches else None
    is_dense = blocks is None and pattern is not None and pattern.dilation_rates == (1,) and pattern.segment_lengths[0] >= N
    # with a window that is no longer than a shard, only the first rank has less work
    is_even = bool(settings.window) and 0 <= settings.window[0] <= N // size
    exchange = exchange_of(ring.exchange, ring.layout, size, H, Hk, is_dense=is_dense and not is_even, is_causal=settings.is_causal)
    by_heads, moves, first, last, kv_heads = exchange == "all_to_all", None, 0, H, Hk
    # with ``by_heads`` a rank needs no other, so the problem is one of a single rank. Nothing here may hold the group: a setup outlives
    # groups, and another group may get the same name
    shards: tuple[Runs, ...] = (joined([(0, N)]),) if by_heads else shards_of(N, size, ring.layout, is_causal=settings.is_causal)
    own_index, is_shared = (0, False) if by_heads else (me, size > 1)
    if size > 1 and (by_heads or ring.layout == "striped"):
        given = holdings([spans(N, rank, size, ring.layout) for rank in range(size)], H, Hk, by_heads=False)
        rows = [tuple((start, stop, 1) for start, stop in runs) for runs in (shards * size if by_heads else shards)]
        moves = given, holdings(rows, H, Hk, by_heads=by_heads)
        (first, last), (low, high) = (side[me].heads for side in moves[1])
        kv_heads = high - low
    num_heads, group = last - first, (last - first) // kv_heads
    # has the shape of this rank's queries while it computes, but takes no memory
    q_like = q.new_empty((1, 1, 1, 1)).expand(B, sum(end - start for start, end in shards[own_index]), num_heads, D)
    if pattern is not None and pattern.branch_heads == "all":
        pattern = pattern.with_heads(first, last, H)
    problem = RingProblem(
        pattern, documents, shards, num_heads, kv_heads, settings.is_causal,
        None if pattern is None else settings.window_sides, blocks, device,
    )  # fmt: skip
    # 2. which branches are computed apart, which span of keys this rank holds, and how many heads a step brings
    terms, sparse_rows, row_bytes = list[Term](), None, 2 * B * D * k.element_size() * kv_heads
    # masks and dropout count all positions, and detached mixing needs the outputs of all branches
    may_separate = padding is None and not (settings.dropout_p or settings.detached or settings.bias)
    if is_shared and may_separate and (crossing := crossing_of(problem, row_bytes)) is not None:
        home = parts_of(replace(problem, pattern=crossing.home), settings, (0, num_heads), own_index, None, first)
        terms, problem = [Term((home,), q_like)], crossing.problem
        sparse_rows = SparseRows(crossing.step, crossing.offsets, q_like, device)
        q_like = q_like[:, :: crossing.step]
    span, steps_of_heads = key_span(problem, own_index), [(0, kv_heads)]
    # heads that run different branches are not divided into steps
    if is_shared and (pattern is None or pattern.branch_heads == "all"):
        kind, sizes = "dense" if is_dense else "dilated" if blocks is None else "blocks", (B, D, k.element_size())
        memory = device_memory(device)
        steps_of_heads = steps_of(kind, problem, sizes, memory, needs_grad=settings.needs_grad, forced=ring.head_steps)
    # 3. what each step brings, and what is computed with it
    steps = list[Step]()
    for index, heads in enumerate(steps_of_heads):
        what = f"heads {index + 1} of {len(steps_of_heads)}"
        # the same rows of as many other heads share all that the first step has, and their parts even the plans; dropout differs between
        # heads
        is_alike = index > 0 and problem.same_rows and not settings.dropout_p and heads[1] - heads[0] == steps[0].num_kv_heads
        steps.append(replace(steps[0], what=what, kv_heads=heads) if is_alike else make_step(problem, own_index, heads, span, what, device))
    exchanges = any(problem.needed(rank, step.kv_heads).pieces for step in steps for rank in range(problem.size))

    def term_of(make: Callable[[Range], tuple[Part, ...]], chosen_rows: SparseRows | None) -> Term:
        parts = list[tuple[Part, ...]]()
        for step in steps:
            heads = step.kv_heads[0] * group, step.kv_heads[1] * group
            is_alike = bool(parts) and step.sources is steps[0].sources
            parts.append(tuple([replace(part, heads=heads) for part in parts[0]]) if is_alike else make(heads))
        return Term(parts, q_like, steps, chosen_rows)

    if pattern is not None:
        terms.append(term_of(lambda heads: parts_of(problem, settings, heads, own_index, span, first), sparse_rows))
    tables = {id(x): x.nbytes for step in steps for x in (step.send.numbers, step.place.numbers, step.sources, step.own_places)}
    if blocks is not None:
        documents_held = held_documents(problem, own_index, span, settings, device)
        terms.append(term_of(lambda heads: block_parts(documents_held, heads, device), None))
        # before any rank sends anything; raises BackendUnavailable if this rank has no kernels for some pass
        for part, (q_part, k_part, _) in run.dry_run(terms[-1:], steps, tensors):
            assert isinstance(part, BlockPart)
            tables[id(part.lists)] = part.lists.nbytes
            for is_backward in (False, True) if settings.needs_grad else (False,):
                part.backend(q_part, k_part, padding is not None, is_backward)
    session = None if members.group is None else sessions.get(members.group)
    if session is not None and device.type not in session.wires and (exchanges or moves):
        # the ranks have yet to connect, which takes a while
        if moves:
            queries, keys = (side[me] for side in moves[1])
            held = zip(tensors, (queries, keys, keys), strict=True)
            tensors = tuple([x.new_empty((len(x), shard.rows, shard.heads[1] - shard.heads[0], D)) for x, shard in held])
        run.compile_ahead(terms, steps, tensors, padding, exchanges=exchanges, needs_grad=settings.needs_grad)
    return RingSetup(
        steps=tuple(steps),
        nbytes=sum(tables.values()),
        exchanges=exchanges,
        terms=tuple(terms),
        moves=moves,
        by_heads=by_heads,
        digest="" if blocks is None else problem.kept.digest,
    )
