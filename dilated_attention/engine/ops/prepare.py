"""Makes the plan of a pass: chooses its backend and the way it runs, and puts tensors into a form that kernels accept.

Both the single-process ops and the distributed ones use it.

A whole call runs on the kernels that walk a table of tiles, or problem by problem on a kernel library. A library's kernels are faster on
long problems, but every problem is a separate launch, which takes more host time than GPU time at short lengths. So both times are
estimated from the shipped rates and the plan's launches, and the faster way is chosen.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention.backends import AttentionRequest, Backend, Bounds, Capabilities, Hardware, Mask, Options, detect, rates, registry
from dilated_attention.engine.branches import places, run_branches, run_problems, run_tiles
from dilated_attention.engine.branches.launches import PART_BYTES, entries_at_once
from dilated_attention.engine.branches.places import layout_of, stages_of
from dilated_attention.engine.branches.problems import Range, Shape, offsets_of
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.engine.plan import Plan, Runner, Tensors
from dilated_attention.pattern import NOT_IN_BRANCH, DilatedPattern

# queries per windowed problem on a backend that masks keys instead of skipping them
WINDOW_BLOCK = 512
_AS_IT_IS = contextlib.nullcontext()


def make_plan(
    settings: CallSettings, tensors: Tensors, is_backward: bool, *, has_padding: bool = False, documents: tuple[Range, ...] | None = None,
    saved: bool = False, pattern: DilatedPattern | None = None, num_keys: int | None = None, host_ms: tuple[float, float] = (0.0, 0.0),
    hardware: Hardware | None = None, runner: Runner | None = None, position_offset: int = 0, first_head: int = 0,
) -> Plan:  # fmt: skip
    """Decides how a pass runs on these tensors: q, k, v and in a backward dout and out. Every such decision is made here.

    The forward of a call that needs gradients checks both passes, so BackendUnavailable is raised before anything is allocated.

    Args:
        has_padding: there is a mask of keys.
        documents: (start, end) pairs that partition the keys; None for a single document.
        saved: a forward may save the branches' outputs; a backward gets those that its forward has saved.
        pattern: the branches, if not those of the settings.
        num_keys: number of keys of the whole sequence, where k holds only a part of it.
        host_ms: host time in ms that what surrounds a forward and a backward takes, for the choice of how they run.
        hardware: of another machine; then the tensors may have no memory, and no kernel is compiled ahead.
        runner: use this one, whichever is faster.
        position_offset, first_head: see ``Plan``.
    """
    q, k = tensors[:2]
    pattern = settings.pattern if pattern is None else pattern
    (B, Nq, H, D), Hk = q.shape, k.shape[2]
    Nk, first = num_keys if num_keys is not None else k.shape[1], settings.query_offset
    is_plain, is_one = documents is None, documents is None or len(documents) == 1
    documents = ((0, Nk),) if documents is None else documents
    # the most positions that a problem spans, and the most rows that it has
    longest = min(max(pattern.segment_lengths), max([end - start for start, end in documents], default=0))
    length = max([-(-min(w, longest) // r) for w, r in pattern.branches])
    window = None
    if settings.window:
        # libraries count the sides of a window in 32 bits, and one compiled kernel of the tiles serves windows of any width
        left, right = (None if side < 0 else min(side, Nk) for side in settings.window)
        window = left, right
    # masks, dropout and bias depend on positions, so a launch with them holds only heads of one offset
    by_position = settings.dropout_p > 0 or bool(settings.bias)
    shape = Shape(
        H, Hk, (first, first + Nq), (0, Nk), documents, settings.is_causal, window, shifted_heads=not has_padding and not by_position
    )
    # with detached mixing the backward reads what the forward saved, so both run alike
    both = settings.detached and (settings.needs_grad or is_backward)

    def decide() -> tuple[AttentionRequest, Options, Backend, bool]:
        request = request_of(
            tensors[:4], settings, is_backward, longest, length, hardware=hardware, key_mask=has_padding, window=window is not None,
            precision=settings.precision,
        )  # fmt: skip
        chosen = select_backend(request, settings)
        named = settings.backend != "auto"
        if not named:
            chosen = registry.get(packed_library(pattern, rounded_shape(shape), request, B, chosen.name))
        is_whole = runs_on_tiles(pattern, shape, request, B, chosen.name, both=both, named=named, host_ms=host_ms[is_backward])
        return request, settings.kernel_options(), chosen, is_whole

    kind = decision = None
    if is_one:
        # one answer for calls of this kind, whatever their length
        is_gpu = (q.device.type if hardware is None else hardware.device_type) == "cuda"
        lengths = rounded_shape(shape)[2:4] if is_gpu else None
        sizes = lengths, shape.is_cut, rounded_length(length), extent_of(tensors[:4], longest)
        state = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
        alike = settings._replace(query_offset=0)
        kind = alike, pattern, is_backward, has_padding, host_ms, B, H, Hk, D, q.dtype, hardware or q.device, sizes, state
        decision = registry.cached.get(kind)
    if is_new := decision is None:
        decision = decide()
        if kind is not None:
            registry.remember(kind, decision)
    request, options, chosen, is_whole = decision

    can = chosen.capabilities
    if not is_whole:
        shape = shape._replace(window_block=None if can.native_window else WINDOW_BLOCK, aligned_last=can.aligned_last)
    plan = Plan(
        settings=settings, pattern=pattern, shape=shape, is_backward=is_backward, size=(B, D, q.element_size()),
        runner=run_problems, request=request, backend=chosen, options=options, dtype=q.dtype,
        position_offset=position_offset, first_head=first_head,
    )  # fmt: skip
    plan.is_saved = saved and is_backward
    if saved and not is_backward and both and pattern.num_branches > 1:
        if is_plain:
            may_save = settings.saves_outputs and fuses(request.hardware, q.dtype)
            plan.saved = saved_elements(pattern, q.shape, k.shape, q.element_size()) if may_save else 0
        elif is_whole:
            elements = layout_of(pattern, shape, True, (0, H)).num_places * B * H * D
            plan.saved = elements if elements * q.element_size() <= saved_budget() else 0
        plan.is_saved = plan.saved > 0
    if runner is not None:
        plan.runner = runner
    elif is_whole:
        plan.runner, plan.backend = run_tiles, registry.get(TILES)
        if is_new and hardware is None and run_tiles.compile_ahead(plan, tensors, has_padding) and settings.needs_grad and not is_backward:
            # called only to start compiling the backward's kernels, beside the forward's; one tensor stands in for dout and out
            like = torch.empty(q.shape, dtype=q.dtype, device="meta")
            make_plan(
                settings, (*tensors, like, like), True, has_padding=has_padding, documents=None if is_plain else documents,
                saved=plan.is_saved, pattern=pattern, num_keys=num_keys, host_ms=host_ms,
            )  # fmt: skip
    else:
        # self-attention over a single document: each row of a branch is in one problem, which begins with its segment
        is_fused = shape.queries == shape.keys and first == 0 and documents == ((0, Nk),) and window is None and not by_position
        is_fused = is_fused and fuses(request.hardware, q.dtype)
        may_be_one = not plan.is_saved and not has_padding and not by_position and pattern.num_branches == 1
        in_one_launch = may_be_one and (_try_one_launch(plan, tensors, is_fused) or _try_bounds(plan, q.device))
        if is_fused and not in_one_launch:
            plan.runner = run_branches
    return plan


def _try_one_launch(plan: Plan, tensors: Tensors, is_fused: bool) -> bool:
    """Changes the plan of a call that is one dense problem of all queries, keys and heads to one launch; returns whether it did."""
    can = plan.backend.capabilities
    # branches write into views given to them, and nothing is copied
    if is_fused and can.writes_views:
        return False
    problems = plan.problems
    problem = problems.problems[0] if len(problems.problems) == 1 and problems.covered else None
    if problem is None or problem.segments > 1 or problem.step > 1 or problem.zero_keys:
        return False
    if (problem.k_start, problem.k_start + problem.k_len) != plan.shape.keys or entries_at_once(tensors, can) < plan.size[0]:
        return False
    plan.one_launch, plan.options = True, replace(plan.options, causal=problem.causal, mask=Mask(None, problem.band))
    return True


def _try_bounds(plan: Plan, device: torch.device) -> bool:
    """Changes the plan of a dense call over packed documents, or with a part of the queries, to one launch of a library that takes their
    boundaries; returns whether it did."""
    shape, pattern = plan.shape, plan.pattern
    if not is_packed(pattern, shape, plan.backend.capabilities, plan.size[0]):
        return False
    (first, last), length = shape.queries, pattern.segment_lengths[0]
    # segments that hold queries of this call
    touched: list[Range] = []
    for start, end in shape.documents:
        low = start + max(0, first - start) // length * length
        touched += [(a, min(a + length, end)) for a in range(low, min(end, last), length) if min(a + length, end) > first]
    if not touched:
        return False
    seen = [min(end, last) if shape.is_causal else end for _, end in touched]
    first_key = touched[0][0]
    queries, keys = [0, *(min(end, last) - first for _, end in touched)], [0, *(end - first_key for end in seen)]
    longest = max(b - a for a, b in itertools.pairwise(queries)), max(b - a for a, b in itertools.pairwise(keys))
    of_queries, of_keys = (torch.tensor(x, dtype=torch.int32, device=device) for x in (queries, keys))
    plan.bounds = Bounds(of_queries, of_keys, *longest)
    plan.one_launch, plan.options, plan.key_rows = True, replace(plan.options, causal=shape.is_causal), slice(first_key, seen[-1])
    return True


def fuses(hardware: Hardware, dtype: torch.dtype) -> bool:
    """Whether branches run in chunks with one merge each. On a CPU a launch costs little, and merging each problem stays in the cache."""
    return hardware.device_type == "cuda" and dtype is not torch.float64 and "triton" in hardware.packages


def request_of(
    views: Tensors, settings: CallSettings, is_backward: bool, span: int, length: int, *, hardware: Hardware | None = None, **more: Any
) -> AttentionRequest:
    """Builds the request to a backend for ``views`` (q, k and the other tensors it reads), whose problems span up to ``span`` positions."""
    q, k = views[:2]
    torch_deterministic = torch.are_deterministic_algorithms_enabled()
    return AttentionRequest(
        hardware=hardware or detect(q.device),
        dtype=q.dtype,
        head_dim=q.shape[3],
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        causal=settings.is_causal,
        needs_grad=is_backward,
        deterministic=settings.deterministic or torch_deterministic,
        torch_deterministic=torch_deterministic,
        shapes_repeat=torch.backends.cudnn.benchmark,
        extent=extent_of(views, span),
        length=rounded_length(length),
        **settings.features,
        **more,
    )


def extent_of(views: Tensors, length: int) -> int:
    """Returns the most elements that ``length`` positions of all heads span in memory; in a heads-first layout, heads are far apart.

    Spans within 32 bits suit every backend and are 0, so that the answer to one request holds for nearly all lengths.
    """
    extent = max([(length - 1) * s[1] + (n[2] - 1) * s[2] + n[3] for n, s in [(x.shape, x.stride()) for x in views]])
    return extent if extent >= 2**31 else 0


def rounded_length(length: int) -> int:
    return 2 ** round(math.log2(max(1, length)))  # type: ignore[no-any-return]


def select_backend(request: AttentionRequest, settings: CallSettings) -> Backend:
    """Selects the backend of this pass; each pass has its own, since every backward accepts any other's out and lse.

    A forward that needs gradients checks both passes, so BackendUnavailable comes before any work.
    """
    chosen = registry.select(request, settings.backend)
    if settings.needs_grad and not request.needs_grad:
        registry.select(replace(request, needs_grad=True), settings.backend)
    return chosen


def saved_elements(pattern: DilatedPattern, q: Any, k: Any, itemsize: int) -> Any:
    """Number of elements of per-branch outputs that a forward of one whole sequence saves for a detached backward; 0 if it saves none.

    They are saved where all of them are in memory at once anyway: in the fused forward (``fuses``) of a call that is one chunk. The result
    depends only on the shapes q and k, so fake tensors work too, and a symbolic length stays symbolic.
    """
    B, N, H, D = q
    if k[1] != N or k[2] != H or pattern.num_branches == 1 or pattern.branch_heads == "split":
        return 0
    rows = sum(((N + w - 1) // w) * ((torch.sym_min(N, w) + r - 1) // r) for w, r in pattern.branches)
    elements = B * H * D * rows
    return elements if elements * itemsize <= saved_budget() else 0


def saved_budget() -> int:
    """Limit in bytes of the per-branch outputs that a call saves for its backward: the budget of a chunk, whatever the inputs' size."""
    return places.transient_budget(0)


def kernel_ready(x: Tensor) -> Tensor:
    """Returns x if kernels accept it (last stride 1 and, on a GPU, 16-byte aligned rows), otherwise a contiguous copy."""
    if x.stride(-1) == 1 or not x.shape[-1]:
        if x.device.type != "cuda":
            return x
        size = x.element_size()
        if not (x.data_ptr() % 16 or any(stride * size % 16 for stride in x.stride()[:-1])):
            return x
    # contiguous() would not copy where only a dimension of size 1 has another stride, but kernels read that stride
    return x.clone(memory_format=torch.contiguous_format)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Disables autocast, which stays on inside an op and would round a backend's float32 arithmetic to half precision."""
    device_type = x.device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else _AS_IT_IS


def new_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


TILES = "tiles"
# Host time in ms, forward and backward, of one launch of a library (its views and kernels), and of the rest of a call, on H200s. The
# backward takes 0.095 and 0.35 where a launch of torch's takes 7 µs; hosts of other machines took up to 1.5 times as long. A whole call
# on tiles takes less than 0.1 and 0.25.
_PROBLEM_MS = 0.09, 0.12
_CALL_MS = 0.2, 0.5
# host time in ms that a call on tiles takes in addition to its kernels
TILES_CALL_MS = 0.1
# the same of a call that is one launch without copies of q, k and v: not more than that of the tiles, so their kernels decide
_LAUNCH_MS = 0.09
# measured time of the tiles under causality over that of their rate, for self-attention of one sequence: LongNet's segments, 12 x 64
# and 16 x 128, 32,768 to 1,048,576 positions, on an H200
_CAUSAL = 1.3
# TFLOP/s of the tiles and of a library, forward and backward, in half precision and float32, for requests without a row in the table
_TILES_TFLOPS = (250.0, 45.0), (190.0, 33.0)
_LIBRARY_TFLOPS = (420.0, 35.0), (380.0, 30.0)
# bytes per element of a problem's results that are read and written to sum them, forward and backward; bytes/s of such sums
_SUM_BYTES = 12, 36
_MEMORY = 2e12
# measured time of a library's kernels in a cut call over that of their rates: GigaPath's segments, half of 50,000 and of 200,000 queries,
# on H200s (benchmarks/results/2026-11-23-h200x2/rings.md)
_CUT = 1.6
# kernels that are slower than the tiles at every length; those of the second set only in half precision
_SLOWER = frozenset({"math", "flex"})
_SLOWER_HALF = frozenset({"sdpa_efficient", "xformers"})


def is_packed(pattern: DilatedPattern, shape: Shape, capabilities: Capabilities, batch: int) -> bool:
    """Whether a library that takes boundaries in place of problems computes a call in one launch, if it has no mask by position and its
    backward no gradient of lse."""
    if not capabilities.documents or batch != 1 or shape.window is not None or shape.heads is not None:
        return False
    if pattern.branches[0][1] != 1 or pattern.num_branches > 1 or pattern.branch_heads != "all":
        return False
    # a segment at the end has zero keys
    if pattern.tail != "mask" and not shape.is_causal:
        return False
    # keys of a part of the sequence, like those of one rank, have other positions; self-attention of one document is folded into a batch
    if shape.keys != (0, shape.documents[-1][1]) or shape.queries[1] > shape.keys[1]:
        return False
    return len(shape.documents) > 1 or shape.is_cut


def packed_library(pattern: DilatedPattern, shape: Shape, request: AttentionRequest, batch: int, preferred: str) -> str:
    """Returns the library for a call over documents or a part of the queries.

    It is the preferred one, which computes problem by problem, unless one that takes boundaries in place of problems is faster.
    """
    if request.hardware.device_type != "cuda" or request.key_mask or request.dropout or pattern.num_branches > 1:
        return preferred
    for name in registry.order(request):
        backend = registry.get(name)
        if not is_packed(pattern, shape, backend.capabilities, batch) or backend.reasons_against(request):
            continue
        packed_ms, preferred_ms = (library_ms(pattern, shape, request, batch, which) for which in (name, preferred))
        if name == preferred or packed_ms > preferred_ms:
            return preferred
        registry.tell_once(f"backend {name} (in place of {preferred}, estimated to take longer or as long) for {request.describe()}")
        return name
    return preferred


def runs_on_tiles(
    pattern: DilatedPattern, shape: Shape, request: AttentionRequest, batch: int, library: str, *, both: bool = False, named: bool = False,
    host_ms: float = 0.0,
) -> bool:  # fmt: skip
    """Whether a pass runs on tiles in place of ``library``.

    Args:
        both: both passes decide alike, by their times together: with detached mixing the backward reads what the forward saved.
        named: the caller named the library.
        host_ms: host time in ms that what surrounds the pass takes.
    """
    if shape.keys[0] or (shape.documents and shape.documents[-1][1] != shape.keys[1]):
        # tables have all keys of the documents
        return False
    is_self, is_own = shape.queries == shape.keys and len(shape.documents) == 1, registry.get(library).capabilities.whole_calls
    takes_own = is_own and (named or not both)
    if takes_own and (not is_self or shape.window is not None or request.dropout or request.bias):
        # the runner of branches can cut by positions, too, but knows no such calls
        return True
    if not takes_own and (named or request.hardware.device_type != "cuda"):
        return False
    shape = rounded_shape(shape)
    passes = [replace(request, needs_grad=which, extent=0) for which in ((False, True) if both else (request.needs_grad,))]
    if not takes_own and any(registry.get(TILES).reasons_against(one) for one in passes):
        return False
    size, group = (batch, request.head_dim, request.dtype.itemsize), shape.num_heads // shape.num_kv_heads
    of_passes = [run_tiles.head_bytes(pattern, shape, size, one.needs_grad, both) for one in passes]
    # the smallest group of heads that can run at a time stays within the budget
    fits = all(of_head * group <= budget for of_head, budget in of_passes)
    if takes_own or not fits:
        return fits
    tiles_total = library_total = 0.0
    for request in passes:
        name = packed_library(pattern, shape, request, batch, registry.select(request).name) if both else library
        if name in _SLOWER or (name in _SLOWER_HALF and request.dtype is not torch.float32):
            return True
        own_ms = tiles_ms(pattern, shape, request, batch, host_ms)
        tiles_total += own_ms
        library_total += own_ms if name == TILES else library_ms(pattern, shape, request, batch, name, host_ms)
    return tiles_total <= library_total


def rounded_shape(shape: Shape) -> Shape:
    """Returns the shape by which decisions are made: of one document with lengths of four binary digits, so that there is one answer for
    all lengths between two of them."""
    if len(shape.documents) != 1:
        return shape
    last, count, num_keys = (rounded(x) for x in (shape.queries[1], shape.queries[1] - shape.queries[0], shape.keys[1]))
    return shape._replace(queries=(last - count, last), keys=(0, num_keys), documents=((0, num_keys),))


def rounded(num_positions: int) -> int:
    """Returns the next number of four binary digits."""
    step = 1 << max(0, num_positions.bit_length() - 4)
    return -(-num_positions // step) * step


def _kernel_ms(
    pattern: DilatedPattern, shape: Shape, request: AttentionRequest, batch: int, name: str, assumed: tuple[tuple[float, float], ...]
) -> float:
    """Returns the time of a backend's kernels at its shipped rate, or at the one that is ``assumed`` for its kind."""
    rate = rates.rate_of(name, request) or assumed[request.needs_grad][request.dtype is torch.float32]
    # two products of matrices forward, five backward, of two operations each
    return (10 if request.needs_grad else 4) * request.head_dim * _pairs(pattern, shape) * batch / rate / 1e9


@functools.lru_cache(maxsize=16)
def _pairs(pattern: DilatedPattern, shape: Shape) -> int:
    pairs = sum(pattern.pairs(end - start, shape.num_heads, is_causal=shape.is_causal) for start, end in shape.documents)
    (first, last), num_keys = shape.queries, max(1, shape.keys[1])
    if shape.is_causal and len(shape.documents) == 1 and min(pattern.segment_lengths) >= num_keys:
        # later queries see more keys
        pairs = pairs * (last * (last + 1) - first * (first + 1)) // (num_keys * (num_keys + 1))
    else:
        pairs = pairs * (last - first) // num_keys
    if shape.window is not None:
        left, right = (num_keys if side is None else side for side in shape.window)
        right = 0 if shape.is_causal else right
        keys_before = _sum_of_least(last, left) - _sum_of_least(first, left)
        keys_after = _sum_of_least(num_keys - first, right) - _sum_of_least(num_keys - last, right)
        pairs = min(pairs, (keys_before + keys_after + last - first) * shape.num_heads)
    return pairs


def _sum_of_least(count: int, most: int) -> int:
    """Returns the sum of min(i, most) over 0 ≤ i < count."""
    growing = min(count, most + 1)
    return growing * (growing - 1) // 2 + (count - growing) * most


def tiles_ms(pattern: DilatedPattern, shape: Shape, request: AttentionRequest, batch: int, host_ms: float = 0.0) -> float:
    kernels = _kernel_ms(pattern, shape, request, batch, TILES, _TILES_TFLOPS)
    is_whole = not shape.is_cut and len(shape.documents) == 1
    return max(kernels * (_CAUSAL if shape.is_causal and is_whole and pattern.num_branches > 1 else 1), host_ms) + TILES_CALL_MS


def library_ms(pattern: DilatedPattern, shape: Shape, request: AttentionRequest, batch: int, library: str, host_ms: float = 0.0) -> float:
    kernels = _kernel_ms(pattern, shape, request, batch, library, _LIBRARY_TFLOPS)
    masked, can = request.key_mask or request.dropout, registry.get(library).capabilities
    packed = not masked and is_packed(pattern, shape, can, batch)
    launches = 1 if packed else _launches(pattern, shape, request, batch)
    if launches > 1 and (shape.is_cut or len(shape.documents) > 1):
        # the results of a cut call are summed problem by problem, in float32, between short launches
        kernels *= _CUT
        rows = batch * shape.num_heads * sum(-(-(shape.queries[1] - shape.queries[0]) // rate) for rate in pattern.dilation_rates)
        kernels += rows * request.head_dim * _SUM_BYTES[request.needs_grad] / _MEMORY * 1e3
    if packed or (launches == 1 and shape.is_cut):
        return max(kernels, _LAUNCH_MS + host_ms)
    return max(kernels, launches * _PROBLEM_MS[request.needs_grad] + _CALL_MS[request.needs_grad] + host_ms)


def _launches(pattern: DilatedPattern, shape: Shape, request: AttentionRequest, batch: int) -> int:
    """Estimates the number of kernel launches of a library, from a few integers a branch."""
    groups = _head_groups(pattern, shape.num_heads)
    N, H, D = shape.queries[1], shape.num_heads, request.head_dim
    if not request.needs_grad or len(shape.documents) > 1 or shape.queries != shape.keys:
        # every document has separate launches
        return sum(
            count * _runs(w, start, end) for (w, _), count in zip(pattern.branches, groups, strict=True) for start, end in shape.documents
        )
    # limited memory cuts a long backward into chunks, each with all problems, and cuts these further by what accumulates in float32
    total = 0
    for stage in stages_of(pattern, shape, (batch, D, request.dtype.itemsize), True):
        positions, heads = min(stage.positions, N), min(stage.heads, H)
        of_chunk = 0
        branches, stage_groups = stage.pattern.branches, _head_groups(stage.pattern, H)
        for (w, rate), count in [(branches[b], stage_groups[b]) for b in stage.branches]:
            accumulated = 4 * D * batch * heads * -(-positions // rate)
            of_chunk += max(min(count, heads) * _runs(w, 0, positions), -(-accumulated // PART_BYTES["cuda"]))
        total += of_chunk * -(-N // positions) * -(-H // heads)
    return total


def _head_groups(pattern: DilatedPattern, num_heads: int) -> tuple[int, ...]:
    """Returns the number of groups of heads of each branch that are one view: heads of one offset, or of offsets that grow evenly."""
    counts = []
    for row in offsets_of(pattern, num_heads):
        offsets = [offset for offset in row if offset != NOT_IN_BRANCH]
        different = len(set(offsets))
        counts.append(min(different, -(-len(offsets) // different)) if offsets else 0)
    return tuple(counts)


def _runs(length: int, start: int, end: int) -> int:
    """Returns the number of different lengths of the segments of a document: that of the last one differs."""
    return 1 + (end - start > length and (end - start) % length > 0)
