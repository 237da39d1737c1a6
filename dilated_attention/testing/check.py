"""Runs the library's public functions on cases and compares every result, including gradients, with its bound."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dilated_attention.backends import BackendUnavailable, registry
from dilated_attention.functional import (
    Alibi,
    Distance,
    LocalOptions,
    attention,
    block_sparse_attention,
    block_sparse_dilated_attention,
    dilated_attention,
)
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.testing.bounds import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, low_precision_bound, max_error, relative_bound
from dilated_attention.testing.cases import Case, Inputs, Space, inputs, random_case
from dilated_attention.testing.oracle import plain_attention, rounded_out_error

# the results of one case by their names
Result = dict[str, torch.Tensor]
# the results that every case has; a case with sinks has "dsinks", too, and one with a bias "dslopes"
RESULTS = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Measured:
    """One result of one case: its error and the bound that it must not exceed."""

    name: str
    error: float
    bound: float

    @property
    def passes(self) -> bool:
        return self.error <= self.bound


@dataclass
class Report:
    """The findings of ``check_backend``. ``worst`` is the largest error / bound of each result; the limit is 1."""

    backend: str
    device: str
    cases: int = 0
    refused: int = 0
    worst: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.worst.items())
        return f"{self.backend} on {self.device}: {self.cases} cases within bounds, {self.refused} refused; worst error/bound: {ratios}"


def function_of(case: Case, x: Inputs) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns the public function of a case, its arguments after q, k and v, and its options."""
    options = {name: getattr(case, name) for name in LocalOptions.__annotations__ if hasattr(case, name)}
    options |= {name: getattr(x, name) for name in ("cu_seqlens", "key_padding_mask", "sinks")}
    options |= {"bias": bias_of(case, x), "return_lse": True}
    if case.window is not None:
        return attention, (), options | {"window": case.window}
    branches: tuple[Any, ...] = ()
    if (dilated := case.dilated) is not None:
        branches = dilated.segment_lengths, dilated.dilation_rates
        options |= {"head_offsets": dilated.head_offsets, "branch_heads": dilated.branch_heads, "tail": dilated.tail}
    if isinstance(case.pattern, BlockPattern):
        return (block_sparse_dilated_attention if branches else block_sparse_attention), (*branches, case.pattern), options
    return dilated_attention, branches, options | {"mixture_grad": case.mixture_grad}


def bias_of(case: Case, x: Inputs) -> Alibi | Distance | None:
    """Returns the case's bias as the public functions take it."""
    if x.slopes is None:
        return None
    assert x.coordinates is not None
    # coordinates that all batch entries share are given without the batch dimension, so that cases try both forms
    coordinates = x.coordinates[0] if len(x.coordinates) == 1 else x.coordinates
    return Alibi(x.slopes) if case.bias == "alibi" else Distance(coordinates, x.slopes)


def call(case: Case, x: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **overrides: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls the library's public function on the case; ``overrides`` are further arguments, such as ``backend``."""
    if case.dropout_p:
        # the call draws its dropout seed from torch's generator; the oracle repeats the draw (``op_seed``)
        torch.manual_seed(case.seed)
    function, arguments, options = function_of(case, x)
    return function(q, k, v, *arguments, **options | overrides)  # type: ignore[no-any-return]


def results(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]], case: Case, x: Inputs, dtype: torch.dtype | None = None, **options: Any
) -> Result:
    """Returns out, lse and the gradients of ``function(case, inputs, q, k, v)``, with q, k, v, slopes and sinks in ``dtype`` (None: as they
    are); without sinks there is no ``dsinks``, without a bias no ``dslopes``."""
    given = {name: y for name in ("q", "k", "v", "slopes", "sinks") if (y := getattr(x, name)) is not None}
    leaves = {name: (y if dtype is None else y.to(dtype)).detach().requires_grad_() for name, y in given.items()}
    # the function takes q, k and v as arguments, and slopes and sinks from the inputs
    parameters = {name: y for name, y in leaves.items() if name in ("slopes", "sinks")}
    out, lse = function(case, replace(x, **parameters), leaves["q"], leaves["k"], leaves["v"], **options)
    outputs, cotangents = [out], [x.dout.to(out.dtype).to(out.device)]
    if case.lse_grad:
        outputs.append(lse)
        cotangents.append(x.dlse.to(lse.dtype).to(lse.device))
    grads = torch.autograd.grad(outputs, tuple(leaves.values()), cotangents, allow_unused=True)
    of_leaves = {f"d{name}": torch.zeros_like(y) if g is None else g for (name, y), g in zip(leaves.items(), grads, strict=True)}
    return {name: y.detach() for name, y in {"out": out, "lse": lse, **of_leaves}.items()}


def measure(case: Case, backend: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Measured]:
    """Returns the errors and bounds (see ``truth_and_bounds``) of all results of a case."""
    x = inputs(case, dtype, device)
    computed = results(call, case, x, backend=backend)
    truth, bounds = truth_and_bounds(case, x)
    return [Measured(name, max_error(y, truth[name]), bounds[name]) for name, y in computed.items()]


def truth_and_bounds(case: Case, x: Inputs) -> tuple[Result, dict[str, float]]:
    """Returns all results of a case in float64, and their bounds for the dtype and device of the inputs.

    In float64, and in float32 on a CPU, a bound is relative to the largest value: 1e-10 and 1e-5. Elsewhere it is 2·E(plain) + band, which
    ``dilated_attention.testing`` defines, and more for the results named below.
    """
    dtype = x.q.dtype
    truth = results(plain_attention, case, x, torch.float64)
    tolerance = FLOAT64_TOLERANCE if dtype is torch.float64 else FLOAT32_TOLERANCE
    exact = {name: relative_bound(truth[name], tolerance, case.dropout_p) * x.reach(name) for name in truth}
    if dtype is torch.float64 or (dtype is torch.float32 and x.q.device.type == "cpu"):
        return truth, exact
    plain = results(plain_attention, case, x)
    bounds = {name: low_precision_bound(plain[name], truth[name], dtype) for name in truth}
    if dtype is torch.float32 and "dslopes" in bounds:
        # a sum over all rows whose terms cancel: the plain error may be small by chance, which must not make the bound small
        bounds["dslopes"] = max(bounds["dslopes"], exact["dslopes"])
    if dtype is not torch.float32:
        # backwards read out as it was rounded; the plain computation does not, so it cannot show this error
        for name, error in rounded_out_error(case, x).items():
            bounds[name] += 2 * error
        float32 = results(plain_attention, case, x, torch.float32)
        # lse is judged as float32. Its error is a relative error of every weight. Kernels for half precision may use a faster exp, so an
        # eighth of that dtype's rounding is allowed in addition
        bounds["lse"] = low_precision_bound(float32["lse"], truth["lse"], torch.float32) + torch.finfo(dtype).eps / 8
    return truth, bounds


def _case_of(name: str, index: int) -> Case:
    """Returns case ``index`` of a backend, of what it declares: short, in one long problem, or with blocks."""
    capabilities, space = registry.get(name).capabilities, Space.of_backend(name)
    if capabilities.blocks_only or (capabilities.block_sizes and index % 5 == 2):
        return random_case(index, replace(space, max_length=1100 if index % 25 == 2 else 300, blocks=True))
    case = random_case(index, space)
    if index % 5 != 4:
        return case
    draw = random.Random(index)
    n, sides = draw.randint(300, 800), [draw.choice([None, draw.randint(0, 400)]) for _ in range(2)]
    heads = draw.choice([1, 2, 12])
    if index % 25 == 4:
        # beyond what a kernel may hold of a row at once; fewer heads, for the oracle's memory
        n, heads = draw.randint(1100, 2100), min(heads, 2)
    wide = 128 % capabilities.head_dim_multiple == 0 and capabilities.max_head_dim >= 128
    kv_heads = 1 if index % 4 == 0 else heads
    return replace(
        case, pattern=DilatedPattern((2**62,), (1,), "zero"), batch=2 if heads < 12 and n < 1100 else 1, num_queries=n, num_keys=n,
        query_offset=0, heads=heads, kv_heads=kv_heads, head_dim=128 if wide and draw.randint(0, 1) else case.head_dim, bounds=None,
        mixture_grad="exact", is_causal=index // 10 % 2 == 0, window=(sides[0], sides[1]) if space.window and index % 2 else None,
    )  # fmt: skip


def check_backend(
    name: str,
    *,
    device: torch.device | str | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    cases: int = 100,
    seed: int = 0,
    space: Space | None = None,
) -> Report:
    """Tests a registered backend on random cases, forward and backward, through the public functions.

    Args:
        name: the registered name.
        device: where to run; None for CUDA if it is available and the backend supports it, else the CPU.
        dtypes: the dtypes to draw from; None for all that its capabilities declare.
        cases: the number of cases to run.
        seed: the seed of the first case; case i of seed s is case i + 1 of seed s − 1.
        space: what to draw; None for what the backend's capabilities allow: every fifth case is dense, or within a window, over 300 to 800
            positions, and every 25th over 1,100 to 2,100, since a backend may work in pieces; another fifth has lists of blocks, if it
            takes them, of up to 300 positions, and of up to 1,100. All numbers are finite.

    Raises:
        AssertionError: if a result exceeds its bound (the message has the case to repeat it), or over half of the cases were refused.
    """
    capabilities = registry.get(name).capabilities
    if device is None:
        device = "cuda" if torch.cuda.is_available() and "cuda" in capabilities.devices else "cpu"
    choices = sorted(dtypes or capabilities.dtypes, key=str)
    report = Report(name, str(device))
    for index in range(seed, seed + cases):
        case = _case_of(name, index) if space is None else random_case(index, space)
        dtype = choices[index % len(choices)]
        try:
            measured = measure(case, name, dtype, device)
        except BackendUnavailable:
            report.refused += 1
            continue
        for found in measured:
            if not found.passes:
                raise AssertionError(
                    f"{name} {dtype} on {device}: E({found.name}) = {found.error:.3g} > {found.bound:.3g} for\nmeasure({case}, "
                    f"{name!r}, {dtype}, {str(device)!r})"
                )
            # with a bound of 0 the error is 0, too
            ratio = found.error / found.bound if found.bound else 0.0
            report.worst[found.name] = max(report.worst.get(found.name, 0.0), ratio)
        report.cases += 1
    if report.refused > cases // 2:
        raise AssertionError(f"{name} refused {report.refused} of {cases} cases; give a space that it can run, or see explain_backend")
    return report
