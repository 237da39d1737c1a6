"""Dilated attention against the arithmetic floor: the same FLOPs as independent dense problems of 2048 on the same backend.

    python benchmarks/floor.py --save floor.jsonl            # what "auto" takes, against FlashAttention-4
    python benchmarks/floor.py --backend flash4 sdpa_cudnn --lengths 49152

FLASH3_LIBRARY (and FLASH3_CUDART) in the environment load FlashAttention-3's library for --backend flash3.
ratio = floor time ÷ our time, in the same run, turn by turn. Errors of sampled rows against float64 come first: a wrong result
has no speed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from _timing import inputs, interleaved, machine, sampled_error, save

from dilated_attention import DilatedPattern, dilated_attention
from dilated_attention.backends import AttentionRequest, Backend, Options, detect, registry
from dilated_attention.backends.flash import flash3
from dilated_attention.engine.branches.plan import Shape, make_plan

LENGTHS = [2048, 4096, 8192, 16384, 32768]
SHAPES = {
    "12x64": (12, 64, [1, 2, 4, 6, 12]),
    "16x128": (16, 128, [1, 2, 4, 8, 16]),
    "16x64": (16, 64, [1, 2, 4, 8, 16]),
}
FLOOR = 2048


def floor_calls(backend: str, pairs: int, H: int, D: int, is_causal: bool) -> tuple[Callable[[], Any], Callable[[], Any], float]:
    """(forward, backward, factor): factor × their time is that of ``pairs`` as dense problems of 2048."""
    per_problem = H * (FLOOR * (FLOOR + 1) // 2 if is_causal else FLOOR * FLOOR)
    problems = max(1, min(round(pairs / per_problem), 2**20 // FLOOR))
    q, k, v, dout = (x.view(problems, FLOOR, H, D) for x in inputs(problems * FLOOR, H, D, count=4))
    kernels = _kernels(backend, D)
    options = Options(scale=D**-0.5, causal=is_causal)
    out, lse = kernels.forward(q, k, v, options)
    return (
        lambda: kernels.forward(q, k, v, options),
        lambda: kernels.backward(dout, q, k, v, out, lse, options),
        pairs / (problems * per_problem),
    )


def _kernels(backend: str, D: int) -> Backend:
    """The library that the floor is measured on: the fastest one here, unless another is asked for."""
    if backend in ("auto", "nested"):
        return registry.select(AttentionRequest(hardware=detect("cuda"), dtype=torch.bfloat16, head_dim=D, needs_grad=True))
    return registry.get(backend)


def measure(name: str, N: int, is_causal: bool, backend: str, path: str | None, *, passes: str = "fb") -> None:
    H, D, rates = SHAPES[name]
    pattern = DilatedPattern(LENGTHS, rates)
    pairs = make_plan(pattern, Shape(H, H, (0, N), (0, N), ((0, N),), is_causal)).pairs
    q, k, v, dout = inputs(N, H, D, count=4)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> Any:
        return dilated_attention(q, k, v, LENGTHS, rates, is_causal=is_causal, return_lse=True, backend=backend)

    out, lse = forward()
    grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    with torch.no_grad():
        errors = sampled_error(pattern, [q, k, v, dout], [out, lse, *grads], is_causal=is_causal)
    del grads
    shown = " ".join(f"{key} {value:.1e}" for key, value in errors.items())
    right = all(value < 0.02 for value in errors.values())
    record: dict[str, Any] = {"shape": name, "N": N, "causal": is_causal, "backend": backend, "errors": errors, **machine()}
    label = f"{name:>7} {N:>8} {'causal' if is_causal else 'full':>6} {backend:>14}"
    if not right:
        print(f"{label}  WRONG: {shown}", flush=True)
        save(path, record | {"wrong": True})
        return
    floor_forward, floor_backward, factor = floor_calls(backend, pairs, H, D, is_causal)

    def without_grad() -> None:
        with torch.no_grad():
            forward()

    calls: dict[str, Callable[[], Any]] = {}
    if "f" in passes:
        calls |= {"forward": without_grad, "floor forward": floor_forward}
    if "b" in passes:
        calls |= {"backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), "floor backward": floor_backward}
    times = interleaved(calls)
    text = ""
    for which, per_pair in (("forward", 4), ("backward", 10)):
        if which in times:
            ours, spread = times[which]
            floor = times[f"floor {which}"][0] * factor
            rate = per_pair * D * pairs / ours / 1e9
            record |= {
                which: ours,
                f"{which}_spread": spread,
                f"{which}_floor": floor,
                f"{which}_ratio": floor / ours,
                f"{which}_tflops": rate,
            }
            text += f" | {which} {ours:8.3f} ms ±{100 * spread:4.1f} % floor {floor:8.3f} ratio {floor / ours:.3f} {rate:5.0f} TFLOP/s"
    print(f"{label}{text} | {shown}", flush=True)
    save(path, record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["auto"])
    parser.add_argument("--shapes", nargs="+", default=["12x64", "16x128"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 49152, 65536, 524288, 1048576])
    parser.add_argument("--masks", nargs="+", default=["full", "causal"])
    parser.add_argument("--save", help="append JSON lines here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU: this benchmark measures GPU kernels; benchmarks/cpu_speed.py is the CPU's")
    if os.environ.get("FLASH3_LIBRARY"):
        flash3.load_library(os.environ["FLASH3_LIBRARY"], os.environ.get("FLASH3_CUDART"))
    for backend in args.backend:
        for name in args.shapes:
            request = AttentionRequest(hardware=detect("cuda"), dtype=torch.bfloat16, head_dim=SHAPES[name][1], needs_grad=True)
            if reasons := _kernels(backend, SHAPES[name][1]).reasons_against(request):
                print(f"{name:>7} {backend:>14} cannot: {'; '.join(reasons)}")
                continue
            for N in args.lengths:
                for mask in args.masks:
                    measure(name, N, mask == "causal", backend, args.save)
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
