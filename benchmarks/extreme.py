"""How far one GPU goes: seconds and bytes per token by length, every result checked on sampled rows against float64.

    python benchmarks/extreme.py                          # forward to 2^28 tokens, forward + backward to 2^26, on a 141 GB GPU
    python benchmarks/extreme.py --forward 24 --train 22  # powers of two that fit a smaller one

One head of 64, bfloat16. Branches keep 2048 keys each: w = 2048 · 4^i up to the whole sequence, r = 4^i. Bytes per token are the peak
of the allocator over the call, inputs and results included, divided by the tokens; q, k, v and out alone are 512.
"""

from __future__ import annotations

import argparse
import time

import torch
from _timing import inputs, machine, sampled_error, save

from dilated_attention import DilatedPattern, dilated_attention


def branches(length: int) -> tuple[list[int], list[int]]:
    lengths, rates = [2048], [1]
    while lengths[-1] * 4 <= length:
        lengths.append(lengths[-1] * 4)
        rates.append(rates[-1] * 4)
    return lengths, rates


def run(power: int, backward: bool, is_causal: bool, path: str | None) -> None:
    length = 2**power
    lengths, rates = branches(length)
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    start_bytes = torch.cuda.memory_allocated()
    q, k, v, *rest = inputs(length, 1, 64, count=4 if backward else 3)
    leaves = [x.requires_grad_(backward) for x in (q, k, v)]
    seconds = []
    results: list[torch.Tensor] = []
    # the second run has compiled kernels and plans
    for _ in range(2):
        results = []
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        out, lse = dilated_attention(q, k, v, lengths, rates, is_causal=is_causal, return_lse=True)
        results = [out, lse]
        if backward:
            results += torch.autograd.grad(out, leaves, rest[0])
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() - start_bytes
        del out, lse
    with torch.no_grad():
        errors = sampled_error(DilatedPattern(lengths, rates), [q, k, v, *rest], [x.detach() for x in results], is_causal=is_causal)
    wrong = [name for name, error in errors.items() if not error < 0.02]
    shown = " ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(
        f"2^{power} {'forward+backward' if backward else 'forward':>16} {'causal' if is_causal else 'full':>6}: "
        f"{seconds[-1]:8.3f} s {length / seconds[-1] / 1e6:8.1f} M tokens/s {seconds[-1] / length * 1e9:7.2f} ns/token "
        f"{peak / length:7.1f} bytes/token | {shown}{' WRONG' if wrong else ''}",
        flush=True,
    )
    record = {"tokens": length, "backward": backward, "causal": is_causal, "seconds": seconds[-1], "bytes_per_token": peak / length}
    save(path, record | {"errors": errors, "wrong": wrong, **machine()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forward", type=int, default=28, help="largest power of two for the forward")
    parser.add_argument("--train", type=int, default=26, help="largest power of two for forward and backward")
    parser.add_argument("--first", type=int, default=20)
    parser.add_argument("--step", type=int, default=2)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--save", help="append JSON lines here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU: examples/extreme_length.py measures the CPU")
    for last, backward in ((args.forward, False), (args.train, True)):
        for power in range(args.first, last + 1, args.step):
            try:
                run(power, backward, args.causal, args.save)
            except torch.OutOfMemoryError as error:
                print(
                    f"2^{power} {'forward+backward' if backward else 'forward'}: out of memory: {str(error).splitlines()[0][:160]}",
                    flush=True,
                )
                break


if __name__ == "__main__":
    main()
