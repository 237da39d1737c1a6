"""How this library judges a backend, for whoever writes one: random cases, a float64 oracle, bounds that come from the data.

    from dilated_attention.testing import check_backend
    print(check_backend("my_backend", device="cuda", cases=200))

E(x) is the largest absolute error of x against float64. In half precision a result passes if E ≤ 2·E(plain) + band, where *plain*
is softmax attention written in plain PyTorch in the same dtype over the same multiset of keys, and *band* is one rounding of
the result: no tolerance is chosen by hand. lse is float32 whatever the inputs, so it is judged as float32.

Shape letters: B batch, N positions, H query heads, K key/value heads, D head dim, G branches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch

from dilated_attention.backends import BackendUnavailable, Dropout, registry
from dilated_attention.backends.dropout import keep_mask
from dilated_attention.engine.reference import reference_attention
from dilated_attention.functional import attention, dilated_attention
from dilated_attention.pattern import DilatedPattern

T = TypeVar("T")
Result = dict[str, torch.Tensor]

HEAD_DIMS = (1, 3, 8, 16, 24, 48, 59, 64)
LAYOUTS = (
    "contiguous",
    "heads_first",
    "packed",
    "offset",
    "strided_dim",
    "transposed_dim",
    "expanded_batch",
    "expanded_heads",
    "expanded_rows",
)
RESULTS = ("out", "lse", "dq", "dk", "dv")

FLOAT64_TOLERANCE = 1e-10
FLOAT32_TOLERANCE = 1e-5


class Chooser(Protocol):
    """Where a case's choices come from: ``random.Random``, or a hypothesis strategy that shrinks towards the first choice."""

    def randint(self, a: int, b: int, /) -> int: ...

    def choice(self, options: Sequence[T], /) -> T: ...


@dataclass(frozen=True, kw_only=True)
class Space:
    """What ``random_case`` may draw. The defaults are everything that plain torch can do."""

    head_dims: tuple[int, ...] = HEAD_DIMS
    max_length: int = 70
    max_segment: int | None = None
    heads_per_kv: tuple[int, ...] = (1, 2, 3)
    layouts: tuple[str, ...] = LAYOUTS
    padding: bool = True
    window: bool = True
    dropout: bool = True
    lse_grad: bool = True

    @classmethod
    def of_backend(cls, name: str, **changes: Any) -> Space:
        """What the backend's declared facts allow."""
        facts = registry.get(name).facts
        dims = tuple(sorted(facts.head_dims or HEAD_DIMS))
        dims = tuple(d for d in dims if d <= facts.max_head_dim and d % facts.head_dim_multiple == 0) or (facts.head_dim_multiple,)
        space = cls(head_dims=dims, padding=facts.key_mask, window=facts.window, dropout=facts.dropout)
        return replace(space, **changes)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call with all its options. Its repr rebuilds it; ``inputs`` makes its tensors from ``seed``.

    Args:
        window: for ``attention`` instead of ``dilated_attention``; the pattern is then one whole segment of rate 1.
        padding: ``"none"`` · ``"some"`` keys · ``"row"``: also every key of the first sequence · ``"all"`` keys.
        bounds: of packed documents, as ``cu_seqlens``.
        lse_grad: the loss reads lse, too.
        layouts: memory layout of q, k, v and dout, of ``LAYOUTS``.
    """

    pattern: DilatedPattern
    batch: int = 1
    num_queries: int = 1
    num_keys: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 8
    is_causal: bool = False
    query_offset: int = 0
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    mixture_grad: str = "exact"
    dropout_p: float = 0.0
    padding: str = "none"
    bounds: tuple[int, ...] | None = None
    lse_grad: bool = False
    layouts: tuple[str, str, str, str] = ("contiguous",) * 4
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case. ``dlse`` is the factor of lse in the loss, zero where the case has no gradient of lse."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    key_padding_mask: torch.Tensor | None
    cu_seqlens: torch.Tensor | None


@dataclass(frozen=True)
class Measured:
    """One result of one case: its error and the bound that it must keep."""

    name: str
    error: float
    bound: float

    @property
    def passes(self) -> bool:
        return self.error <= self.bound


@dataclass
class Report:
    """What ``check_backend`` found. ``worst`` is the largest error / bound of each result, 1 being the limit."""

    backend: str
    device: str
    cases: int = 0
    refused: int = 0
    worst: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.worst.items())
        return f"{self.backend} on {self.device}: {self.cases} cases within bounds, {self.refused} refused; worst error/bound: {ratios}"


def random_case(source: Chooser | int, space: Space | None = None) -> Case:
    """Draw a case; ``source`` is a seed, a ``random.Random``, or anything with its ``randint`` and ``choice``."""
    draw: Chooser = random.Random(source) if isinstance(source, int) else source
    space = space or Space()

    def chance(percent: int) -> bool:
        return draw.randint(0, 99) >= 100 - percent

    kv_heads = draw.randint(1, 3)
    heads = kv_heads * draw.choice(space.heads_per_kv)
    num_keys = draw.randint(0, 9) if chance(20) else draw.randint(0, space.max_length)
    window = None
    if space.window and chance(8):
        window = (draw.choice([None, draw.randint(0, num_keys)]), draw.choice([None, draw.randint(0, num_keys)]))
        pattern = DilatedPattern((2**62,), (1,), "zero")
    else:
        pattern = _random_pattern(draw, heads, num_keys, space.max_segment)
    bounds, query_offset, num_queries = None, 0, num_keys
    if chance(25):
        bounds = (0, *sorted(draw.randint(0, num_keys) for _ in range(draw.randint(0, 4))), num_keys)
    elif num_keys and chance(30):
        query_offset = draw.randint(0, num_keys - 1)
        num_queries = draw.randint(0 if chance(5) else 1, num_keys - query_offset)
    mixture_grad = "detached" if chance(30) else "exact"
    layouts = [draw.choice(space.layouts) if chance(25) else "contiguous" for _ in range(4)]
    return Case(
        pattern=pattern,
        batch=1 if bounds else draw.randint(1, 3),
        num_queries=num_queries,
        num_keys=num_keys,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw.choice(space.head_dims),
        is_causal=chance(50),
        query_offset=query_offset,
        scale=draw.choice([0.01, 0.1, 0.3]) if chance(25) else None,
        window=window,
        mixture_grad=mixture_grad,
        dropout_p=draw.choice([0.1, 0.5, 0.9]) if space.dropout and chance(20) else 0.0,
        padding=draw.choice(["some", "some", "row", "all"]) if space.padding and chance(30) else "none",
        bounds=bounds,
        # the lse of detached mixing has no gradient
        lse_grad=space.lse_grad and mixture_grad == "exact" and chance(30),
        layouts=(layouts[0], layouts[1], layouts[2], layouts[3]),
        seed=draw.randint(0, 2**16),
    )


def _random_pattern(draw: Chooser, heads: int, num_keys: int, max_segment: int | None) -> DilatedPattern:
    longest = min(2 * num_keys + 2, max_segment or 2 * num_keys + 2)
    lengths = [draw.randint(1, draw.choice([min(8, longest), longest])) for _ in range(draw.randint(1, 4))]
    if max_segment is None and draw.randint(0, 9) == 9:
        lengths[-1] = 2**40
    rates = [draw.randint(1, min(length, draw.choice([3, 11]))) for length in lengths]
    kind = draw.choice(["cyclic", "blocked", "zero", "lists", "split"])
    offsets: Any = "cyclic" if kind == "split" else kind
    if kind == "lists":
        offsets = tuple(tuple(draw.randint(0, rate - 1) for _ in range(heads)) for rate in rates)
    tail = "zero_keys" if draw.randint(0, 99) >= 75 else "mask"
    return DilatedPattern(tuple(lengths), tuple(rates), offsets, "split" if kind == "split" else "all", tail)


def make_tensor(
    shape: Sequence[int], layout: str, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator
) -> torch.Tensor:
    """Normal numbers of shape (B, N, H, D), the same on every device, lying in memory as ``layout`` says."""
    B, N, H, D = shape

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).to(device)

    if layout == "contiguous":
        return normal(B, N, H, D)
    if layout == "heads_first":
        return normal(B, H, N, D).transpose(1, 2)
    if layout == "packed":
        return normal(B, N, 3, H, D)[:, :, 1]
    if layout == "offset":
        return normal(B * N * H * D + 3)[3:].view(B, N, H, D)
    if layout == "strided_dim":
        return normal(B, N, H, 2 * D)[..., ::2]
    if layout == "transposed_dim":
        return normal(B, N, D, H).transpose(2, 3)
    if layout == "expanded_batch":
        return normal(1, N, H, D).expand(B, N, H, D)
    if layout == "expanded_heads":
        return normal(B, N, 1, D).expand(B, N, H, D)
    if layout == "expanded_rows":
        return normal(B, 1, H, D).expand(B, N, H, D)
    raise ValueError(f"layout is {layout!r}; expected one of {', '.join(map(repr, LAYOUTS))}")


def inputs(case: Case, dtype: torch.dtype, device: torch.device | str = "cpu") -> Inputs:
    """The case's tensors; equal for equal ``case.seed``, up to the rounding to ``dtype``."""
    generator = torch.Generator().manual_seed(case.seed)
    queries = (case.batch, case.num_queries, case.heads, case.head_dim)
    keys = (case.batch, case.num_keys, case.kv_heads, case.head_dim)
    shapes = (queries, keys, keys, queries)
    q, k, v, dout = (make_tensor(shape, layout, dtype, device, generator) for shape, layout in zip(shapes, case.layouts, strict=True))
    accumulation = torch.float64 if dtype is torch.float64 else torch.float32
    dlse = torch.randn(case.batch, case.heads, case.num_queries, generator=generator, dtype=torch.float64) * case.lse_grad
    padding = None
    if case.padding != "none":
        padding = torch.rand(case.batch, case.num_keys, generator=generator) < 0.4
        padding[: {"some": 0, "row": 1, "all": case.batch}[case.padding]] = True
        padding = padding.to(device)
    cu_seqlens = None if case.bounds is None else torch.tensor(case.bounds, dtype=torch.int32, device=device)
    return Inputs(q, k, v, dout, dlse.to(accumulation).to(device), padding, cu_seqlens)


def multiplicities(
    case: Case, key_padding_mask: torch.Tensor | None, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(m (G, B or 1, H, Nq, Nk), z (G, 1, H, Nq)) in float32, vectorised: what ``engine.reference`` says row by row."""
    keys = torch.arange(case.num_keys, device=device)
    rows = torch.arange(case.query_offset, case.query_offset + case.num_queries, device=device)
    starts = torch.zeros_like(keys)
    sizes = torch.full_like(keys, case.num_keys)
    if case.bounds is not None:
        for start, end in zip(case.bounds, case.bounds[1:], strict=False):
            starts[start:end], sizes[start:end] = start, end - start
    inside = keys - starts
    allowed = torch.ones(case.num_queries, case.num_keys, dtype=torch.bool, device=device)
    difference = keys[None, :] - rows[:, None]
    left, right = case.window or (None, None)
    if left is not None:
        allowed &= difference >= -left
    if right is not None:
        allowed &= difference <= right
    if case.is_causal:
        allowed &= difference <= 0
    m = torch.zeros(case.pattern.num_branches, case.heads, case.num_queries, case.num_keys, device=device)
    z = torch.zeros(case.pattern.num_branches, case.heads, case.num_queries, device=device)
    for branch, ((length, rate), offsets) in enumerate(zip(case.pattern.branches, case.pattern.offsets(case.heads), strict=True)):
        segment = inside // length
        same = (starts[rows, None] == starts[None, :]) & (segment[rows, None] == segment[None, :])
        for head, offset in enumerate(offsets):
            if offset < 0:
                continue
            taken = inside % length % rate == offset
            real = same & taken[rows, None] & taken[None, :]
            m[branch, head] = real & allowed
            if case.pattern.tail == "zero_keys" and not case.is_causal:
                places = (sizes.clamp(max=length) + rate - 1) // rate
                z[branch, head] = torch.where(taken[rows], places[rows] - real.sum(-1), 0)
    m = m[:, None]
    if key_padding_mask is not None:
        m = m * ~key_padding_mask.to(device)[None, :, None, None, :]
    return m, z[:, None]


def dropout_keep(case: Case, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """bool (B, H, Nq, Nk): the weights that dropout of this seed keeps."""
    queries = torch.arange(case.query_offset, case.query_offset + case.num_queries, device=device)
    keys = torch.arange(case.num_keys, device=device)
    batch = torch.arange(case.batch, device=device)
    positions = (queries.repeat(case.batch, 1), keys.repeat(case.batch, 1))
    return keep_mask(Dropout(case.dropout_p, seed, batch, torch.arange(case.heads, device=device), *positions), slice(None))


def op_seed(case: Case) -> int:
    """The dropout seed that the next call draws after ``torch.manual_seed(case.seed)``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        return int(torch.randint(2**62, (), dtype=torch.int64))


def plain_attention(case: Case, x: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse): softmax attention in plain PyTorch over the case's multiset, every operation in q's dtype; differentiable."""
    parts = [part[1:] for part in _softmax_parts(case, x, q, k, v)]
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts]).detach()
    lse = lses.logsumexp(0)
    mixing = (lses - _finite(lse)).exp().transpose(2, 3)
    return sum((out * weight[..., None] for (out, _), weight in zip(parts, mixing, strict=True)), torch.zeros_like(q)), lse


def _softmax_parts(
    case: Case, x: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(p, out, lse) of each softmax that has a gradient of its own: one, or with detached mixing one a branch. p is before dropout."""
    m, z = multiplicities(case, x.key_padding_mask, q.device)
    if case.mixture_grad == "exact":
        m, z = m.sum(0, keepdim=True), z.sum(0, keepdim=True)
    k, v = (y.repeat_interleave(case.heads // case.kv_heads, dim=2) for y in (k, v))
    s_BHNM = torch.einsum("bihd,bjhd->bhij", q, k) * _scale(case)
    s_BHNM = torch.cat([s_BHNM, s_BHNM.new_zeros(*s_BHNM.shape[:-1], 1)], dim=-1)
    keep = dropout_keep(case, op_seed(case), q.device).to(q.dtype) / (1 - case.dropout_p) if case.dropout_p else None
    parts = []
    for m_BHNM, z_BHN in zip(m, z, strict=True):
        times = torch.cat([m_BHNM, z_BHN[..., None].expand(*m_BHNM.shape[:-1], 1)], dim=-1).expand(s_BHNM.shape)
        empty = (times == 0).all(-1, keepdim=True)
        logits = torch.where(times > 0, s_BHNM + times.clamp(min=1).double().log().to(q.dtype), -torch.inf)
        logits = torch.where(empty, 0.0, logits)
        p_BHNM = torch.where(empty, 0.0, logits.softmax(-1))[..., :-1]
        out = torch.einsum("bhij,bjhd->bihd", p_BHNM if keep is None else p_BHNM * keep, v)
        parts.append((p_BHNM, out, torch.where(empty[..., 0], -torch.inf, logits.logsumexp(-1))))
    return parts


def rounded_out_error(case: Case, x: Inputs) -> tuple[float, float]:
    """Error of (dq, dk) if nothing but the saved out is rounded to the inputs' dtype.

    Every flash backward reads δ = rowsum(dout ∘ out) from it; plain softmax keeps p instead, and where all cancels (a single key)
    is exact by luck.
    """
    q, k, v, dout = (y.double() for y in (x.q, x.k, x.v, x.dout))
    with torch.no_grad():
        parts = _softmax_parts(case, x, q, k, v)
        lse = torch.stack([lse for _, _, lse in parts]).logsumexp(0)
        ds_BHNM = torch.zeros_like(parts[0][0])
        for p_BHNM, out, part_lse in parts:
            delta_error = (dout * (out.to(x.q.dtype).double() - out)).sum(-1).transpose(1, 2)
            ds_BHNM += p_BHNM * ((part_lse - _finite(lse)).exp() * delta_error * _scale(case))[..., None]
        group = case.heads // case.kv_heads
        dq = torch.einsum("bhij,bjhd->bihd", ds_BHNM, k.repeat_interleave(group, dim=2))
        dk = torch.einsum("bhij,bihd->bjhd", ds_BHNM, q)
        dk = dk.reshape(case.batch, case.num_keys, case.kv_heads, group, case.head_dim).sum(3)
    return largest(dq), largest(dk)


def _scale(case: Case) -> float:
    return case.head_dim**-0.5 if case.scale is None else case.scale


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)


def reference(case: Case, x: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``engine.reference.reference_attention`` on the case: the definition itself, row by row on the CPU. For small N."""
    return reference_attention(
        q,
        k,
        v,
        case.pattern,
        is_causal=case.is_causal,
        scale=case.scale,
        query_offset=case.query_offset,
        window=case.window,
        cu_seqlens=x.cu_seqlens,
        key_padding_mask=x.key_padding_mask,
        mixture_grad=case.mixture_grad,
        keep=dropout_keep(case, op_seed(case)) if case.dropout_p else None,
        dropout_p=case.dropout_p,
    )


def call(case: Case, x: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **overrides: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The library's own function on the case; ``overrides`` are further arguments, such as ``backend``."""
    options: dict[str, Any] = {
        "is_causal": case.is_causal,
        "scale": case.scale,
        "cu_seqlens": x.cu_seqlens,
        "key_padding_mask": x.key_padding_mask,
        "dropout_p": case.dropout_p,
        "query_offset": case.query_offset,
        "return_lse": True,
    }
    if case.dropout_p:
        torch.manual_seed(case.seed)
    if case.window is not None:
        return attention(q, k, v, window=case.window, **options | overrides)  # type: ignore[no-any-return]
    pattern = case.pattern
    options |= {"head_offsets": pattern.head_offsets, "branch_heads": pattern.branch_heads, "tail": pattern.tail}
    options["mixture_grad"] = case.mixture_grad
    return dilated_attention(q, k, v, pattern.segment_lengths, pattern.dilation_rates, **options | overrides)  # type: ignore[no-any-return]


def results(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]], case: Case, x: Inputs, dtype: torch.dtype | None = None, **options: Any
) -> Result:
    """out, lse and the three gradients of ``function(case, inputs, q, k, v)``, with q, k, v in ``dtype`` (None: as they are)."""
    leaves = [(y if dtype is None else y.to(dtype)).detach().requires_grad_() for y in (x.q, x.k, x.v)]
    out, lse = function(case, x, *leaves, **options)
    outputs, cotangents = [out], [x.dout.to(out.dtype).to(out.device)]
    if case.lse_grad:
        outputs.append(lse)
        cotangents.append(x.dlse.to(lse.dtype).to(lse.device))
    grads = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    found = (out, lse, *(torch.zeros_like(y) if g is None else g for y, g in zip(leaves, grads, strict=True)))
    return {name: y.detach() for name, y in zip(RESULTS, found, strict=True)}


def max_error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest absolute difference, in float64. Equal infinities count as equal; a NaN, or an infinity of one only, is infinite."""
    if x.shape != truth.shape:
        raise AssertionError(f"shapes differ: {tuple(x.shape)} and {tuple(truth.shape)}")
    x, truth = x.detach().double(), truth.detach().double().to(x.device)
    difference = torch.where(x == truth, 0.0, (x - truth).abs())
    return float(torch.where(difference.isnan(), torch.inf, difference).max()) if difference.numel() else 0.0


def largest(x: torch.Tensor) -> float:
    """Largest absolute finite value."""
    finite = x.detach().double()
    finite = finite[finite.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def low_precision_bound(plain: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> float:
    """2·E(plain) + band; the band is one rounding to ``dtype`` of the largest value, and never less than float32 is allowed.

    The latter matters where everything cancels: with a single key, dq is 0 and plain softmax happens to give exactly that.
    """
    return 2 * max_error(plain, truth) + torch.finfo(dtype).eps * largest(truth) + relative_bound(truth, FLOAT32_TOLERANCE)


def relative_bound(truth: torch.Tensor, tolerance: float, dropout_p: float = 0.0) -> float:
    """Of results whose inputs are of order 1: relative above 1, absolute below, where sums cancel; dropout scales what it keeps."""
    return tolerance * max(1 / (1 - dropout_p), largest(truth))


def measure(case: Case, backend: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Measured]:
    """Errors and bounds of all results of a case.

    float64 is held to 1e-10 and, on a CPU, float32 to 1e-5; everything else to ``low_precision_bound``.
    """
    x = inputs(case, dtype, device)
    mine = results(call, case, x, backend=backend)
    truth = results(plain_attention, case, x, torch.float64)
    on_cpu = torch.device(device).type == "cpu"
    if dtype is torch.float64 or (dtype is torch.float32 and on_cpu):
        tolerance = FLOAT64_TOLERANCE if dtype is torch.float64 else FLOAT32_TOLERANCE
        return [Measured(n, max_error(mine[n], truth[n]), relative_bound(truth[n], tolerance, case.dropout_p)) for n in RESULTS]
    plain = results(plain_attention, case, x)
    bounds = {name: low_precision_bound(plain[name], truth[name], dtype) for name in RESULTS}
    if dtype is not torch.float32:
        for name, error in zip(("dq", "dk"), rounded_out_error(case, x), strict=True):
            bounds[name] += 2 * error
        float32 = results(plain_attention, case, x, torch.float32)
        # an error of lse is a relative error of every weight: kernels for half precision may use a faster exp, well below their rounding
        bounds["lse"] = low_precision_bound(float32["lse"], truth["lse"], torch.float32) + torch.finfo(dtype).eps / 8
    return [Measured(n, max_error(mine[n], truth[n]), bounds[n]) for n in RESULTS]


def check_backend(
    name: str,
    *,
    device: torch.device | str | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    cases: int = 100,
    seed: int = 0,
    space: Space | None = None,
) -> Report:
    """Judge a registered backend on random cases, forward and backward, through the public functions.

    Args:
        name: as registered.
        device: where to run; None for CUDA if there is one and the backend runs there, else the CPU.
        dtypes: to draw from; None for all that its facts declare.
        cases: how many to run.
        seed: of the first case; case i of seed s is case i + 1 of seed s − 1.
        space: what to draw; None for what its facts allow.

    Raises:
        AssertionError: a result off its bound, with the case to repeat it; or half of the cases refused.
    """
    facts = registry.get(name).facts
    if device is None:
        device = "cuda" if torch.cuda.is_available() and "cuda" in facts.devices else "cpu"
    choices = sorted(dtypes or facts.dtypes, key=str)
    space = space or Space.of_backend(name)
    report = Report(name, str(device))
    for index in range(seed, seed + cases):
        case, dtype = random_case(index, space), choices[index % len(choices)]
        try:
            measured = measure(case, name, dtype, device)
        except BackendUnavailable:
            report.refused += 1
            continue
        for result in measured:
            if not result.passes:
                raise AssertionError(
                    f"{name} {dtype} on {device}: E({result.name}) = {result.error:.3g} > {result.bound:.3g} for\nmeasure({case}, {name!r}, {dtype})"
                )
            ratio = result.error / result.bound if result.bound else 0.0
            report.worst[result.name] = max(report.worst.get(result.name, 0.0), ratio)
        report.cases += 1
    if report.refused > cases // 2:
        raise AssertionError(f"{name} refused {report.refused} of {cases} cases; give a space that it can run, or see explain_backend")
    return report
