"""Makes the plan of a pass: chooses its backend and the way it runs, and puts tensors into a form that kernels accept.

Both the single-process ops and the distributed ones use it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.backends import AttentionRequest, Backend, Bounds, Hardware, Options, detect, registry
from dilated_attention.engine.branches import chunking, run_branches, run_problems
from dilated_attention.engine.branches.places import layout_of
from dilated_attention.engine.branches.problems import Range, Shape
from dilated_attention.engine.kernels import tiles
from dilated_attention.engine.kernels.tiles_choice import NAME, is_packed, packed_library, rounded, runs_on_tiles
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.engine.plan import Plan, Runner, Tensors
from dilated_attention.pattern import DilatedPattern

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
    longest = min(max(pattern.segment_lengths), Nk if is_one else max([end - start for start, end in documents], default=0))
    length = max([-(-min(w, longest) // r) for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)])
    causal, window = settings.is_causal, settings.window_sides
    # what differs from pair to pair is cut for each launch, so that the heads of one need equal offsets
    by_position = settings.dropout_p > 0 or bool(settings.bias)
    shape = Shape(H, Hk, (first, first + Nq), (0, Nk), documents, causal, window, shifted_heads=not has_padding and not by_position)
    # such a mixture's two passes run alike, since the backward reads outputs that the forward saved
    both = settings.detached and (settings.needs_grad or is_backward)

    def decide() -> tuple[AttentionRequest, Options, Backend, bool]:
        request = request_of(
            tensors[:4], settings, is_backward, longest, length, hardware=hardware, key_mask=has_padding, window=window is not None,
            precision=settings.precision,
        )  # fmt: skip
        chosen = select_backend(request, settings)
        named = settings.backend != "auto"
        if not named:
            chosen = registry.get(packed_library(pattern, shape, request, B, chosen.name))
        is_whole = runs_on_tiles(pattern, shape, request, B, chosen.name, both=both, named=named, host_ms=host_ms[is_backward])
        return request, Options(settings.scale, deterministic=request.deterministic, softcap=settings.softcap), chosen, is_whole

    kind = decision = None
    if is_one and shape.queries == shape.keys:
        # one answer for calls of this kind, whatever their length
        is_gpu = (q.device.type if hardware is None else hardware.device_type) == "cuda"
        sizes = rounded(Nk) if is_gpu else 0, rounded_length(length), extent_of(tensors[:4], longest)
        state = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
        kind = settings, pattern, is_backward, has_padding, host_ms, B, H, Hk, D, q.dtype, hardware or q.device, sizes, state
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
        runner=run_problems, request=request, backend=chosen, capabilities=can, options=options, dtype=q.dtype,
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
        plan.runner, plan.backend = tiles, registry.get(NAME)
        plan.capabilities = plan.backend.capabilities
        if is_new and hardware is None and tiles.compile_ahead(plan, tensors, has_padding) and settings.needs_grad and not is_backward:
            # the backward's kernels, too, beside the forward's; one tensor stands in for dout and out
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
        in_one_launch = may_be_one and (_take_one_launch(plan, tensors, is_fused) or _take_bounds(plan, q.device))
        if is_fused and not in_one_launch:
            plan.runner = run_branches
    return plan


def _take_one_launch(plan: Plan, tensors: Tensors, is_fused: bool) -> bool:
    """Puts a call that is one dense problem of all queries, keys and heads into one launch; returns whether it is one."""
    can = plan.capabilities
    # branches write into views given to them, and nothing is copied
    if is_fused and can.writes_views:
        return False
    problems = plan.problems
    problem = problems.problems[0] if len(problems.problems) == 1 and problems.covered else None
    if problem is None or problem.segments > 1 or problem.step > 1 or problem.zero_keys:
        return False
    if problem.band is not None or (problem.k_start, problem.k_start + problem.k_len) != plan.shape.keys:
        return False
    if can.max_batch is not None and plan.size[0] > can.max_batch:
        return False
    if can.max_extent is not None:
        extents = [1 + sum([(n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)]) for x in tensors]
        if max(extents) > can.max_extent:
            return False
    plan.one_launch, plan.options = True, replace(plan.options, causal=problem.causal)
    return True


def _take_bounds(plan: Plan, device: torch.device) -> bool:
    """Puts a dense call over packed documents, or with a part of the queries, into one launch of a library that takes their boundaries;
    returns whether it did."""
    shape, pattern = plan.shape, plan.pattern
    if not is_packed(pattern, shape, plan.capabilities, plan.size[0]):
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
        dropout=settings.dropout_p > 0,
        softcap=settings.softcap > 0,
        bias=bool(settings.bias),
        deterministic=settings.deterministic or torch_deterministic,
        torch_deterministic=torch_deterministic,
        shapes_repeat=torch.backends.cudnn.benchmark,
        extent=extent_of(views, span),
        length=rounded_length(length),
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
    return chunking.transient_budget(0)


def kernel_ready(x: torch.Tensor) -> torch.Tensor:
    """Returns x if kernels accept it (last stride 1 and, on a GPU, 16-byte aligned rows), otherwise a contiguous copy."""
    if x.stride(-1) != 1 and x.shape[-1] > 0:
        # contiguous() would not copy where only a dimension of size 1 has another stride, but kernels read that stride
        return x.clone(memory_format=torch.contiguous_format)
    if x.device.type == "cuda":
        size = x.element_size()
        if x.data_ptr() % 16 or any(stride * size % 16 for stride in x.stride()[:-1]):
            return x.contiguous() if not x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    return x


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Disables autocast, which stays on inside an op and would round a backend's float32 arithmetic to half precision."""
    device_type = x.device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else _AS_IT_IS


def new_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
