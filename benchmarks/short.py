"""Short sequences: one dilated attention beside dense attention on the same kernels, called as usual and replayed from a CUDA graph.

    python benchmarks/short.py --save short.jsonl

At 4,000 positions LongNet's branches have nearly as many pairs as dense attention, in a dozen short launches; what counts is the CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _timing import inputs, interleaved, machine, save
from floor import LENGTHS, SHAPES

from dilated_attention import attention, dilated_attention


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """``step`` as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(name: str, N: int, batch: int, is_causal: bool, path: str | None) -> None:
    H, D, rates = SHAPES[name]
    q, k, v, dout = inputs(N, H, D, count=4, batch=batch)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward(dilated: bool) -> torch.Tensor:
        if dilated:
            return dilated_attention(q, k, v, LENGTHS, rates, is_causal=is_causal)  # type: ignore[no-any-return]
        return attention(q, k, v, is_causal=is_causal)  # type: ignore[no-any-return]

    def inference(dilated: bool) -> torch.Tensor:
        with torch.no_grad():
            return forward(dilated)

    def training(dilated: bool) -> Any:
        return torch.autograd.grad(forward(dilated), leaves, dout)

    calls: dict[str, Callable[[], Any]] = {}
    for which, dilated in (("dilated", True), ("dense", False)):
        for kind, step in (("forward", inference), ("both", training)):
            calls[f"{which} {kind}"] = lambda step=step, dilated=dilated: step(dilated)  # type: ignore[misc]
            calls[f"{which} {kind} graph"] = captured(lambda step=step, dilated=dilated: step(dilated))  # type: ignore[misc]
    times = {key: value[0] for key, value in interleaved(calls, seconds=0.3).items()}
    record: dict[str, Any] = {"shape": name, "N": N, "batch": batch, "causal": is_causal, "ms": times, **machine()}
    text = f"{name:>7} {batch} × {N} {'causal' if is_causal else 'full':>6}:"
    for kind in ("forward", "both", "forward graph", "both graph"):
        ratio = times[f"dense {kind}"] / times[f"dilated {kind}"]
        record[f"{kind} ratio"] = ratio
        text += f" | {kind} {times[f'dilated {kind}']:.3f} dense {times[f'dense {kind}']:.3f} ms = {ratio:.2f}"
    print(text, flush=True)
    save(path, record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--shapes", nargs="+", default=["12x64", "16x128"])
    parser.add_argument("--save", help="append JSON lines here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU: benchmarks/cpu_speed.py is the CPU's")
    for name in args.shapes:
        for N in args.lengths:
            for batch in args.batches:
                for is_causal in (False, True):
                    measure(name, N, batch, is_causal, args.save)


if __name__ == "__main__":
    main()
