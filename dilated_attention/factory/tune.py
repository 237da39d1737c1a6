"""The sweep behind a measured preference: every usable backend, pass, head dim, length and mask, checked for correctness and then timed.

The raw ``backend.forward`` and ``backend.backward`` run on (P, L, G, D) problems of about equal arithmetic. A backend is left out of the
table if its result on a small problem of the same kind differs from ``math`` in float32. Lengths are visited from coarse to fine, so that
a sweep that runs out of time still covers every head dim.

Shape letters: P problems, L rows, G heads, D head dim.
"""

from __future__ import annotations

import datetime
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dilated_attention.backends import AttentionRequest, Backend, Hardware, Options, detect, registry, tuning_table
from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.backends.tuning_table import Timing, TuningRow, TuningTable

Tensors = tuple[torch.Tensor, ...]
# errors of a kernel library that cannot compute a problem after all; a sweep continues without it
_FAILURES = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, ImportError)
_PER_PAIR = {"forward": 4, "backward": 10}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is measured, and for how long. Half precision is bfloat16 where the device supports it."""

    head_dims: tuple[int, ...]
    lengths: tuple[int, ...]
    dtypes: tuple[str, ...] = ("half", "float32")
    backends: tuple[str, ...] = ()
    seconds: float = 480.0
    # work of one forward launch, and elements of one tensor: enough to fill the device, small enough to try many
    half_flops: float = 2e12
    float32_flops: float = 3e11
    max_elements: int = 2**26
    # timed rounds per point, and the limit on their time
    rounds: tuple[int, int] = (3, 20)
    point_seconds: float = 0.25

    def shape(self, dtype: str, length: int, head_dim: int) -> tuple[int, int, int, int]:
        flops = self.half_flops if dtype == "half" else self.float32_flops
        pairs = min(flops / (4 * length**2 * head_dim), self.max_elements / (length * head_dim))
        heads = max(1, min(8, int(pairs)))
        # 65,535 is the launch limit of several libraries
        return min(max(1, int(pairs) // heads), 65_535), length, heads, head_dim

    def points(self) -> list[tuple[int, str, int, bool]]:
        """Returns (length, dtype, head dim, causal) in the order of measurement: every third length from the longest, then the others."""
        descending = sorted(set(self.lengths), reverse=True)
        stages = (descending[::3], [length for i, length in enumerate(descending) if i % 3])
        kinds = itertools.product(self.dtypes, self.head_dims)
        return [
            (length, *kind, causal)
            for stage, kind in itertools.product(stages, list(kinds))
            for length in stage
            for causal in (False, True)
        ]


def default_sweep(hardware: Hardware) -> Sweep:
    """Returns the widest reasonable sweep: on a GPU the most common head dims come first, on a CPU it takes about a minute."""
    if hardware.device_type == "cuda":
        return Sweep(head_dims=(64, 128, 32, 96, 48, 192, 256), lengths=tuple(2**i for i in range(8, 17)))
    return Sweep(
        head_dims=(32, 64),
        lengths=(256, 512, 1024, 2048),
        seconds=120.0,
        half_flops=3e8,
        float32_flops=3e8,
        max_elements=2**20,
        point_seconds=0.2,
    )


def measure(sweep: Sweep, *, device: torch.device | str | None = None, progress: Callable[[str], None] = lambda line: None) -> TuningTable:
    """Measures and returns the table; writes nothing.

    Args:
        device: by default the GPU if there is one.
        progress: called with one line per measured point.

    Raises:
        ValueError: no point was measured.
    """
    hardware = detect(device)
    bench = _Bench(sweep, torch.device(device if device is not None else hardware.device_type), hardware, progress)
    started = time.monotonic()
    points = sweep.points()
    rows: list[TuningRow] = []
    done = 0
    for length, dtype, head_dim, causal in points:
        if time.monotonic() - started >= sweep.seconds:
            break
        try:
            new = bench.point(dtype, head_dim, length, causal)
        except RuntimeError as failure:
            # a kernel that faults makes the GPU unusable for this process; earlier measurements remain valid
            progress(f"stopped: {_first_line(failure)}")
            break
        rows += new
        done += 1
        names = " · ".join(f"{row.which} {row.timings[0].backend} {row.timings[0].tflops:.4g}" for row in new)
        kind = f"{dtype} head_dim {head_dim} length {length} {'causal' if causal else 'full'}"
        progress(f"[{done}/{len(points)}, {time.monotonic() - started:.0f} s] {kind}: {names or 'no backend'} TFLOP/s")
    if done < len(points):
        progress(f"measured {done} of {len(points)} points within {sweep.seconds:g} s; requests between them take the nearest")
    if not rows:
        raise ValueError(f"nothing was measured in seconds={sweep.seconds:g}; give the sweep more time, or other head dims")
    rows.sort(key=lambda row: (row.dtype, row.which, row.causal, row.head_dim, row.length))
    return TuningTable(
        architecture=hardware.architecture,
        environment=tuning_table.environment(hardware),
        date=datetime.date.today().isoformat(),
        source=f"{hardware.name or hardware.device_type}, {hardware.versions[0]}, bench --tune, {done} of {len(points)} points",
        rows=tuple(rows),
    )


@dataclass
class _Bench:
    sweep: Sweep
    device: torch.device
    hardware: Hardware
    progress: Callable[[str], None]
    # (backend, pass, dtype, head dim, causal) → whether its result is correct
    _right: dict[tuple[object, ...], bool] = field(default_factory=dict)

    def point(self, dtype: str, head_dim: int, length: int, causal: bool) -> list[TuningRow]:
        """Returns the rows of both passes; a pass that no backend can compute has none."""
        shape = self.sweep.shape(dtype, length, head_dim)
        torch_dtype = self._torch_dtype(dtype)
        generator = torch.Generator(self.device).manual_seed(1)
        options = Options(scale=head_dim**-0.5, causal=causal)
        try:
            q, k, v, dout = (torch.randn(shape, dtype=torch_dtype, device=self.device, generator=generator) for _ in range(4))
        except torch.OutOfMemoryError:
            self.progress(f"length {length}, head_dim {head_dim}: the inputs do not fit")
            return []
        rows: list[TuningRow] = []
        saved: Tensors = ()
        for which in ("forward", "backward"):
            if which == "backward" and not saved:
                break
            usable = [
                backend
                for backend in self._usable(torch_dtype, shape, causal, which)
                if self._is_right(backend, which, torch_dtype, head_dim, causal)
            ]
            calls = {backend.name: _call(backend, which, (dout, q, k, v, *saved), options) for backend in usable}
            times = self._times(calls)
            if not times:
                continue
            P, L, G, D = shape
            work = _PER_PAIR[which] * D * P * G * L * ((L + 1) / 2 if causal else L)
            timings = tuple(Timing(name, float(f"{ms:.4g}"), float(f"{work / ms / 1e9:.4g}")) for name, ms in times.items())
            rows.append(TuningRow(which=which, dtype=dtype, head_dim=head_dim, length=length, causal=causal, timings=timings))
            if which == "forward":
                saved = registry.get(timings[0].backend).forward(q, k, v, options)
        return rows

    def _torch_dtype(self, dtype: str) -> torch.dtype:
        if dtype == "float32":
            return torch.float32
        old = self.device.type == "cuda" and (self.hardware.capability or (0, 0)) < (8, 0)
        return torch.float16 if old else torch.bfloat16

    def _usable(self, dtype: torch.dtype, shape: tuple[int, ...], causal: bool, which: str) -> list[Backend]:
        _, L, G, D = shape
        request = AttentionRequest(
            hardware=self.hardware,
            dtype=dtype,
            head_dim=D,
            num_heads=G,
            num_kv_heads=G,
            causal=causal,
            needs_grad=which == "backward",
            torch_deterministic=torch.are_deterministic_algorithms_enabled(),
            extent=L * G * D,
            length=L,
        )
        names = [name for name in registry.names() if not self.sweep.backends or name in self.sweep.backends]
        return [backend for backend in map(registry.get, names) if not backend.reasons_against(request)]

    def _is_right(self, backend: Backend, which: str, dtype: torch.dtype, head_dim: int, causal: bool) -> bool:
        key = (backend.name, which, dtype, head_dim, causal)
        if key not in self._right:
            try:
                error, bound = self._error(backend, which, dtype, head_dim, causal)
                reason = "" if error <= bound else f"wrong by {error:.2g} of the largest value, allowed {bound:.2g}"
            except _FAILURES as failure:
                reason = _first_line(failure)
            self._right[key] = not reason
            if reason:
                kind = f"{which} {str(dtype).removeprefix('torch.')} head_dim {head_dim} {'causal' if causal else 'full'}"
                self.progress(f"{backend.name} left out of {kind}: {reason}")
        return self._right[key]

    def _error(self, backend: Backend, which: str, dtype: torch.dtype, head_dim: int, causal: bool) -> tuple[float, float]:
        """Returns (error, bound) relative to the largest value, compared with ``math`` in float32 on the same rounded inputs."""
        generator = torch.Generator(self.device).manual_seed(2)
        # not a multiple of any kernel's tile, and more than one tile
        shape = (2, 333, 2, head_dim)
        inputs = [torch.randn(shape, device=self.device, generator=generator).to(dtype) for _ in range(4)]
        options = Options(scale=head_dim**-0.5, causal=causal)
        math = registry.get("math")
        dout, q, k, v = (x.float() for x in inputs)
        out, lse = math.forward(q, k, v, options)
        if which == "forward":
            expected: Tensors = (out, lse)
        else:
            expected = math.backward(dout, q, k, v, out, lse, options)
        got = _call(backend, which, (*inputs, out.to(dtype), lse), options)()
        errors = [float((x.float() - y).abs().max() / y.abs().max()) for x, y in zip(got, expected, strict=True)]
        # eight roundings of a half (bfloat16's 2⁻⁹), or of TF32, which PyTorch may use for float32 products
        bound = 2.0**-6 if dtype is not torch.float32 else 2.0**-8
        # NaN is never below the bound; max() alone could miss it
        return (max(errors) if all(error == error for error in errors) else float("inf")), bound

    def _times(self, calls: dict[str, Callable[[], Tensors]]) -> dict[str, float]:
        """Returns {name: median ms}, fastest first. The calls take turns, so that a drifting clock affects all of them."""
        first: dict[str, float] = {}
        for name, call in calls.items():
            try:
                # the first call may compile for these strides
                self._once(call)
                first[name] = self._once(call)
            except torch.OutOfMemoryError:
                self.progress(f"{name} left out: not enough memory")
            except _FAILURES as failure:
                self.progress(f"{name} left out: {_first_line(failure)}")
        if not first:
            return {}
        # a backend that is ten times slower than the best needs no more than one call
        close = [name for name in first if first[name] <= 10 * min(first.values())]
        least, most = self.sweep.rounds
        rounds = max(least, min(most, int(1000 * self.sweep.point_seconds / sum(first[name] for name in close))))
        samples: dict[str, list[float]] = {name: [] for name in close}
        for _ in range(rounds):
            for name in close:
                samples[name].append(self._once(calls[name]))
        medians = first | {name: statistics.median(times) for name, times in samples.items()}
        return dict(sorted(medians.items(), key=lambda item: item[1]))

    def _once(self, call: Callable[[], Tensors]) -> float:
        """Returns the milliseconds of one call."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            call()
            return 1000 * (time.perf_counter() - begin)
        with torch.cuda.device(self.device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # unlike in a model, the GPU idles before each call: a short kernel in front hides the launch
            torch.cuda._sleep(500_000)
            start.record()
            call()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end))


def _call(backend: Backend, which: str, tensors: Tensors, options: Options) -> Callable[[], Tensors]:
    """Returns the call as the engine makes it, with results written to preallocated memory.

    ``tensors`` are dout, q, k, v and, for the backward, out and lse.
    """
    dout, q, k, v, *saved = tensors
    if which == "forward":
        P, L, G, _ = q.shape
        result, rows = torch.empty_like(q), torch.empty((P, G, L), dtype=accumulation_dtype(q.dtype), device=q.device)

        def forward() -> Tensors:
            backend.forward_into(q, k, v, options, result, rows)
            return result, rows

        return forward
    out, lse = saved
    grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))

    def backward() -> Tensors:
        backend.backward_into(dout, q, k, v, out, lse, options, grads)
        return grads

    return backward


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def winners(table: TuningTable) -> str:
    """Formats the fastest backend of every row with its TFLOP/s, one line per head dim, one column per length."""
    lines = []

    def key(row: TuningRow) -> tuple[str, str, bool]:
        return row.dtype, row.which, row.causal

    for (dtype, which, causal), group in itertools.groupby(sorted(table.rows, key=key), key):
        rows = list(group)
        lengths = sorted({row.length for row in rows})
        lines.append(f"{dtype} {which} {'causal' if causal else 'full'}, fastest and TFLOP/s by length")
        lines.append(f"  {'head_dim':<9}" + "".join(f"{length:>20}" for length in lengths))
        for head_dim in sorted({row.head_dim for row in rows}):
            cells: dict[int, str] = {
                row.length: f"{row.timings[0].backend} {row.timings[0].tflops:.3g}" for row in rows if row.head_dim == head_dim
            }
            lines.append(f"  {head_dim:<9}" + "".join(f"{cells.get(length, '–'):>20}" for length in lengths))
    return "\n".join(lines)
