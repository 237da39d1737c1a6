"""Content-chosen blocks: what the choice and its lists cost beside the attention over them.

    python benchmarks/choose.py --lengths 131072 1048576 --shapes 16x128 --density 0.1 --save choose.jsonl

A line a case: block means, choice (means included), lists, and both together, medians of torch.cuda events in ms; kept blocks over all
blocks that a row sees; peak memory beside q and k. ``--profile`` also prints the kernels of one call.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _timing import inputs, interleaved, machine, peak_extra, save

from dilated_attention.engine.blocks.bitmask import lists_of_kept
from dilated_attention.engine.blocks.selection import block_means, choose_blocks_op
from dilated_attention.engine.blocks.selection_grid import make_grid
from dilated_attention.pattern import TopBlocks


def measure(N: int, shape: str, pattern: TopBlocks, is_causal: bool, args: argparse.Namespace) -> None:
    H, D = map(int, shape.split("x"))
    q, k = inputs(N, H, D, count=2, batch=args.batch)
    spec, scale = pattern.spec(), D**-0.5
    grid = make_grid(N, N, pattern.block_size, None, None, is_causal, 0, pattern.queries_are_before(is_causal), pattern.near, q.device)

    def means() -> Any:
        return block_means(q, grid.queries), block_means(k, grid.keys)

    def choose() -> torch.Tensor:
        return choose_blocks_op(q, k, None, None, spec, is_causal, scale, 0)

    def lists(kept: torch.Tensor) -> Any:
        return lists_of_kept(kept, pattern, N, N, is_causal=is_causal)

    kept = choose()
    found = lists(kept)
    seen = int(grid.seen.sum()) * found.num_groups
    calls = {"means": means, "choose": choose, "lists": lambda: lists(kept), "both": lambda: lists(choose())}
    times = {name: median for name, (median, _) in interleaved(calls, seconds=args.seconds).items()}
    peak = peak_extra(calls["both"])
    what = f"{args.batch} × {N} × {shape} {'causal' if is_causal else 'full'}, {args.kind} {args.amount}"
    timing = ", ".join(f"{name} {ms:.3f}" for name, ms in times.items())
    print(f"{what}: {timing} ms; {found.num_entries / seen:.2%} of seen blocks, {peak / 2**20:.0f} MiB at the peak", flush=True)
    save(args.save, {"N": N, "batch": args.batch, "shape": shape, "causal": is_causal, "kind": args.kind,
                     "amount": args.amount, "block": pattern.block_size, "ms": times,
                     "kept": found.num_entries / seen, "peak_bytes": peak, **machine()})  # fmt: skip
    if args.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as profile:
            calls["both"]()
            torch.cuda.synchronize()
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=60))


def check(pattern: TopBlocks, is_causal: bool) -> None:
    """The choice of the kernels is that of plain torch, given the same scores, and every list that of plain torch."""
    from dilated_attention.engine.blocks import bitmask_triton, selection_triton
    from dilated_attention.engine.blocks import selection as torch_choose
    from dilated_attention.engine.blocks.bitmask import _partial_deltas, _write_lists

    N, H, D = 20_000, 4, 128
    q, k = inputs(N, H, D, count=2)
    block = pattern.block_size
    grid = make_grid(N, N, block, None, None, is_causal, 0, pattern.queries_are_before(is_causal), pattern.near, q.device)
    (document,) = grid.documents
    columns = document.columns[1]
    part = torch_choose.part_of(pattern, grid, document, None, H, 0)
    scores = torch_choose._scores(block_means(q, grid.queries), block_means(k, grid.keys))
    # many equal ones
    scores = (scores * 64).round() / 64
    weights = None if pattern.mass is None else torch_choose.softmax_weights(scores, part)
    share = 0 if pattern.mass is None else torch_choose.share_units(pattern.mass)
    found, true = (torch.zeros((1, H, grid.num_rows, grid.words), dtype=torch.int32, device=q.device) for _ in range(2))
    selection_triton.choose_rows(found, scores, weights, part, columns, share)
    torch_choose.choose_rows(true, scores, weights, part, columns, share)
    assert torch.equal(found, true), f"{pattern}: {int((found != true).sum())} words differ"
    deltas = _partial_deltas(*block) if is_causal else range(0)
    for a, b in zip(
        bitmask_triton.write_lists(found, block, columns, 0, deltas), _write_lists(true, block, columns, 0, deltas), strict=True
    ):
        assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 131072, 1048576])
    parser.add_argument("--shapes", nargs="+", default=["16x128"], help="heads x head dim")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--block", nargs=2, type=int, default=[128, 128], help="positions of a query block, of a key block")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--density", type=float)
    kind.add_argument("--blocks", type=int)
    kind.add_argument("--mass", type=float)
    parser.add_argument("--causal", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--seconds", type=float, default=0.6, help="of timing a case")
    parser.add_argument("--check", action="store_true", help="first compare kernels with plain torch")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--save", help="append JSON lines here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU: this measures GPU kernels")
    args.kind = next((name for name in ("density", "blocks", "mass") if getattr(args, name) is not None), "density")
    amount = getattr(args, args.kind)
    args.amount = 0.1 if amount is None else amount
    pattern = TopBlocks(**{args.kind: args.amount}, block_size=tuple(args.block))
    if args.check:
        for is_causal in (False, True):
            for some in (pattern, TopBlocks(blocks=7, block_size=pattern.block_size), TopBlocks(mass=0.6, block_size=pattern.block_size)):
                check(some, is_causal)
        print("kernels choose and list as plain torch does", flush=True)
    for shape in args.shapes:
        for N in args.lengths:
            for is_causal in args.causal:
                measure(N, shape, pattern, bool(is_causal), args)


if __name__ == "__main__":
    main()
