"""How far several GPUs go together: seconds by length, every result checked on sampled rows against float64.

    torchrun --nproc-per-node 4 benchmarks/ring_extreme.py                         # 2^30 forward, 2^28 forward + backward
    torchrun --nproc-per-node 4 benchmarks/ring_extreme.py --forward 24 --train 22 # powers of two that fit smaller GPUs

One head of 64, bfloat16, ``ring_dilated_attention`` over contiguous shards. Branches keep 2048 keys each: w = 2048 · 4^i, and the whole
sequence. The oracle is spread, too: a sampled row goes to all ranks, each of which sums over the keys that it holds, in float64.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from _timing import machine, save

from dilated_attention import DilatedPattern, ring_dilated_attention
from dilated_attention.engine.reference_rows import partners

HEAD_DIM = 64


def branches(length: int) -> tuple[list[int], list[int]]:
    lengths = [2048]
    while lengths[-1] * 4 < length:
        lengths.append(lengths[-1] * 4)
    lengths.append(length)
    return lengths, [w // 2048 for w in lengths]


class SpreadOracle:
    """Sums of one row over all ranks' rows, in float64."""

    def __init__(self, pattern: DilatedPattern, length: int, is_causal: bool) -> None:
        self.pattern, self.length, self.is_causal = pattern, length, is_causal
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.first = self.rank * (length // self.size)
        self.rows = length // self.size

    def mine(self, position: int, *, after: bool) -> torch.Tensor:
        """Rows held here that share segments with the position: its keys, or those whose key it is (``after``)."""
        others = partners(self.pattern, position, 0, 1, self.length)
        if self.is_causal:
            others = others[others >= position] if after else others[others <= position]
        local = others - self.first
        return local[(local >= 0) & (local < self.rows)].cuda()

    def row(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Row ``position`` of a spread (1, n, …) tensor, on all ranks."""
        owner = position // self.rows
        row = x[0, position - self.first].double().flatten() if owner == self.rank else x.new_empty(x[0, 0].numel(), dtype=torch.float64)
        dist.broadcast(row, owner)
        return row

    def total(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def forward(self, position: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse)."""
        keys = self.mine(position, after=False)
        scores = k[0, keys, 0].double() @ self.row(q, position) * HEAD_DIM**-0.5
        high = scores.max() if len(keys) else scores.new_tensor(-1e300)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        weights = (scores - high).exp()
        total = self.total(weights.sum())
        return self.total(weights @ v[0, keys, 0].double()) / total, high + total.log()

    def backward(self, position: int, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv), out and lse taken as given."""
        dout, q, k, v, out, lse = tensors
        scale = HEAD_DIM**-0.5
        q_i, dout_i, out_i, k_i, v_i = (self.row(x, position) for x in (q, dout, out, k, v))
        lse_i = self.row(lse.transpose(1, 2), position)
        keys, queries = self.mine(position, after=False), self.mine(position, after=True)
        k_j, v_j = (x[0, keys, 0].double() for x in (k, v))
        p = (k_j @ q_i * scale - lse_i).exp()
        dq = self.total((p * (v_j @ dout_i - dout_i @ out_i)) @ k_j * scale)
        q_j, dout_j, out_j = (x[0, queries, 0].double() for x in (q, dout, out))
        p = (q_j @ k_i * scale - lse[0, 0, queries].double()).exp()
        dk = self.total((p * (dout_j @ v_i - (dout_j * out_j).sum(-1))) @ q_j * scale)
        return dq, dk, self.total(p @ dout_j)


def relative(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    got, want = (torch.stack(list(side)) for side in zip(*pairs, strict=True))
    return float((got - want).norm() / want.norm())


def run(power: int, backward: bool, is_causal: bool, path: str | None) -> None:
    length, size, rank = 2**power, dist.get_world_size(), dist.get_rank()
    lengths, rates = branches(length)
    oracle = SpreadOracle(DilatedPattern(lengths, rates), length, is_causal)
    generator = torch.Generator("cuda").manual_seed(rank)
    shape = (1, length // size, 1, HEAD_DIM)
    make: Callable[[], torch.Tensor] = lambda: torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)  # noqa: E731
    q, k, v = (make().requires_grad_(backward) for _ in range(3))
    dout = make() if backward else None
    seconds, results = [], []
    # the second run has compiled kernels, plans and communicators
    for _ in range(2):
        results = []
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        out, lse = ring_dilated_attention(q, k, v, lengths, rates, is_causal=is_causal, seq_len=length, return_lse=True)
        grads = torch.autograd.grad(out, (q, k, v), dout) if backward else ()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        results = [out.detach(), lse.detach(), *grads]
        del out, lse, grads
    slowest = torch.tensor([seconds[-1], torch.cuda.max_memory_allocated()], dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    out, lse, *grads_ = results
    chooser = torch.Generator().manual_seed(7)
    # ends of shards and of the whole, and any
    positions = [0, length - 1, length // size - 1, length // size, *torch.randint(0, length, (20,), generator=chooser).tolist()]
    pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    with torch.no_grad():
        for position in positions:
            want_out, _ = oracle.forward(position, q, k, v)
            pairs.setdefault("out", []).append((oracle.row(out, position), want_out))
            if dout is not None:
                wanted = oracle.backward(position, (dout, q, k, v, out, lse))
                for name, got, want in zip(("dq", "dk", "dv"), grads_, wanted, strict=True):
                    pairs.setdefault(name, []).append((oracle.row(got, position), want))
    errors = {name: relative(rows) for name, rows in pairs.items()}
    wrong = [name for name, error in errors.items() if not error < 0.02]
    if rank == 0:
        shown = " ".join(f"{name} {error:.1e}" for name, error in errors.items())
        took = float(slowest[0])
        print(
            f"2^{power} on {size} {'forward+backward' if backward else 'forward':>16} {'causal' if is_causal else 'full':>6}: "
            f"{took:8.3f} s {length / took / 1e6:8.1f} M tokens/s, peak {float(slowest[1]) / 2**30:.1f} GiB a GPU, "
            f"{float(slowest[1]) * size / length:.1f} bytes/token | {shown}{' WRONG' if wrong else ''}",
            flush=True,
        )
        record = {"tokens": length, "gpus": size, "backward": backward, "causal": is_causal, "seconds": took}
        save(path, record | {"peak_bytes": float(slowest[1]), "errors": errors, "wrong": wrong, **machine()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forward", type=int, nargs="*", default=[30], help="powers of two for the forward")
    parser.add_argument("--train", type=int, nargs="*", default=[28], help="powers of two for forward and backward")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--save", help="append JSON lines here")
    args = parser.parse_args()
    if not torch.cuda.is_available() or "RANK" not in os.environ:
        raise SystemExit("start it by torchrun on a machine with several CUDA GPUs")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    for powers, backward in ((args.forward, False), (args.train, True)):
        for power in powers:
            run(power, backward, args.causal, args.save)
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
