"""Block-sparse attention beside dense FlashAttention-4 and FlexAttention in one run, through the public module.

    python benchmarks/block_sparse.py --save sparse.jsonl                       # random blocks of 128x128
    python benchmarks/block_sparse.py --parts random kernels --densities 0.1 0.02
    python benchmarks/block_sparse.py --parts chosen --lengths 131072 1048576   # blocks chosen by content
    python benchmarks/block_sparse.py --parts patterns                          # window, global, BigBird, causal

A figure is the *fraction of proportional*: time of dense × density ÷ time of ours, dense being this library's ``attention`` on
FlashAttention-4 (on what it takes, without it). 1 is all that skipping can bring. Each runs alone for a while, at its own clock, by
turns. Forward alone, and backward alone
(``torch.autograd.grad`` on a kept graph). Errors of sampled rows against float64 come first: a wrong result has no speed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from _timing import inputs, machine, save, sustained

from dilated_attention import BlockSparseAttention, attention
from dilated_attention.backends import registry
from dilated_attention.backends.base import Options
from dilated_attention.backends.block_lists import BlockLists
from dilated_attention.engine.blocks.lists import block_lists, clear_block_lists
from dilated_attention.pattern import BigBird, BlockPattern, GlobalLocal, LocalWindow, RandomBlocks, TopBlocks

SHAPES = ((32768, 16, 128), (65536, 16, 64))
DENSITIES = (0.5, 0.1, 0.05, 0.02)


def backward_of(function: Callable[[], torch.Tensor], leaves: list[torch.Tensor], dout: torch.Tensor) -> Callable[[], Any]:
    out = function()
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def sampled_block_error(
    lists: BlockLists, tensors: list[torch.Tensor], results: list[torch.Tensor], *, count: int = 12
) -> dict[str, float]:
    """Relative error of out, and absolute of lse, in sampled query blocks, against float64 over the pairs that the lists keep."""
    q, k, v = tensors
    out, lse = results
    generator = torch.Generator().manual_seed(0)
    worst = {"out": 0.0, "lse": 0.0}
    for _ in range(count):
        h, row = int(torch.randint(q.shape[2], (1,), generator=generator)), int(torch.randint(lists.num_rows, (1,), generator=generator))
        at = (h if lists.num_heads > 1 else 0) * lists.num_rows + row
        first, last = lists.row_starts[at : at + 2].tolist()
        if first == last:
            continue
        columns = lists.columns[first:last].long()
        keys = (columns[:, None] * lists.k_block + torch.arange(lists.k_block, device=q.device)).flatten()
        inside = keys < k.shape[1]
        rows = slice(row * lists.q_block, min((row + 1) * lists.q_block, q.shape[1]))
        kv = h * k.shape[2] // q.shape[2]
        kept = _kept_pairs(lists, slice(first, last))[: rows.stop - rows.start, inside]
        keys = keys[inside]
        s = (q[0, rows, h].double() @ k[0, keys, kv].double().T * q.shape[3] ** -0.5).masked_fill(~kept, -torch.inf)
        true = s.softmax(-1) @ v[0, keys, kv].double()
        worst["out"] = max(worst["out"], float((out[0, rows, h].double() - true).norm() / true.norm()))
        worst["lse"] = max(worst["lse"], float((lse[0, h, rows].double() - s.logsumexp(-1)).abs().max()))
    return worst


def _kept_pairs(lists: BlockLists, entries: slice) -> torch.Tensor:
    """bool (q_block, entries · k_block)."""
    columns = lists.columns[entries]
    kept = torch.ones(columns.shape[0], lists.q_block, lists.k_block, dtype=torch.bool, device=columns.device)
    if lists.masks is not None:
        masked = lists.masks[entries] >= 0
        words = lists.bits[lists.masks[entries][masked].long()]
        kept[masked] = ((words[..., None] >> torch.arange(32, device=words.device)) & 1).flatten(-2).bool()
    return kept.transpose(0, 1).flatten(1)


def flex_calls(lists: BlockLists, leaves: list[torch.Tensor], dout: torch.Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(forward, backward) of FlexAttention over the same blocks, compiled, in its own layout."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    from dilated_attention.backends.block_kernels.block_tables import row_tables

    (table,) = row_tables(lists)
    empty = tuple(torch.zeros_like(x) for x in table.partial)
    N = lists.num_keys
    width = lists.num_columns - table.full[1].shape[-1]
    # its own transposition takes the number of columns from the width of the index tensor
    full = table.full[0], torch.nn.functional.pad(table.full[1], (0, width))
    mask = BlockMask.from_kv_blocks(
        empty[0], torch.zeros_like(full[1]), *full, BLOCK_SIZE=(lists.q_block, lists.k_block), seq_lengths=(N, N)
    )
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in leaves)
    out = compiled(q, k, v, block_mask=mask)
    grad = dout.transpose(1, 2).contiguous()

    def forward() -> Any:
        with torch.no_grad():
            return compiled(q, k, v, block_mask=mask)

    return forward, lambda: torch.autograd.grad(out, [q, k, v], grad, retain_graph=True)


def random_part(args: argparse.Namespace) -> None:
    for N, H, D in SHAPES:
        *qkv, dout = inputs(N, H, D, count=4)
        leaves = [x.requires_grad_() for x in qkv]
        for density in args.densities:
            random_row(args, leaves, dout, RandomBlocks(density, seed=1))


def random_row(args: argparse.Namespace, leaves: list[torch.Tensor], dout: torch.Tensor, pattern: RandomBlocks) -> None:
    _, N, H, D = leaves[0].shape
    layer = BlockSparseAttention(pattern, backend=args.backend)

    def dense() -> torch.Tensor:
        result: torch.Tensor = attention(*leaves)
        return result

    lists = block_lists(pattern, N, H, device=leaves[0].device)
    kept = pattern.density(N, H)
    with torch.no_grad():
        error = sampled_block_error(lists, leaves, list(layer(*leaves, return_lse=True)))
    calls = {"dense": _without_grad(dense), "ours": _without_grad(lambda: layer(*leaves))}
    backward = {"dense": backward_of(dense, leaves, dout), "ours": backward_of(lambda: layer(*leaves), leaves, dout)}
    if "flex" in args.parts:
        calls["flex"], backward["flex"] = flex_calls(lists, leaves, dout)
    record = {"part": "random", "N": N, "H": H, "D": D, "density": kept, "error": error}
    for which, functions in (("forward", calls), ("backward", backward)):
        if "kernels" in args.parts:
            functions |= kernel_calls(which, lists, leaves, dout)
        times = sustained(functions, turn=args.seconds)
        of_dense = times["dense"][0]
        record[which] = {name: {"ms": ms, "spread": spread, "fraction": of_dense * kept / ms} for name, (ms, spread) in times.items()}
    save(args.save, record | machine())
    print(
        f"N={N} {H}x{D} density {kept:.4f} error {error['out']:.1e} | "
        + " | ".join(f"{which} " + _row(record[which]) for which in ("forward", "backward")),
        flush=True,
    )


def kernel_calls(which: str, lists: BlockLists, leaves: list[torch.Tensor], dout: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Each backend's raw function that can."""
    q, k, v = (x.detach() for x in leaves)
    options = Options(scale=q.shape[3] ** -0.5)
    found: dict[str, Callable[[], Any]] = {}
    out, lse = registry.get("triton").forward_blocks(q, k, v, lists, options)
    for name in ("gluon", "cudnn_fe", "flash4", "triton"):
        if name not in registry.names():
            continue
        backend = registry.get(name)
        try:
            if which == "forward":
                backend.forward_blocks(q, k, v, lists, options)
                found[name] = lambda backend=backend: backend.forward_blocks(q, k, v, lists, options)
            else:
                backend.backward_blocks(dout, q, k, v, out, lse, lists, options)
                found[name] = lambda backend=backend: backend.backward_blocks(dout, q, k, v, out, lse, lists, options)
        except (AssertionError, ImportError, ValueError, RuntimeError) as error:
            print(f"  {name} {which}: {str(error)[:100]}", flush=True)
    return found


def patterns_part(args: argparse.Namespace) -> None:
    """Time of building lists for the first time, their memory, and the attention, at long lengths."""
    for N in args.lengths:
        H, D = 16, 128
        leaves = inputs(N, H, D)
        named: dict[str, tuple[BlockPattern, bool]] = {
            "window 2048": (LocalWindow(2048), False),
            "window 2048 causal": (LocalWindow(2048), True),
            "global 128 + window 1024": (GlobalLocal(1024, 128), False),
            "BigBird 512, 128, 8": (BigBird(512, 128, 8, 0), False),
        }
        for name, (pattern, causal) in named.items():
            device = leaves[0].device
            with torch.no_grad():
                layer = BlockSparseAttention(pattern)
                layer(*leaves, is_causal=causal)
                built = []
                for _ in range(3):
                    clear_block_lists()
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    lists = block_lists(pattern, N, H, is_causal=causal, device=device)
                    torch.cuda.synchronize()
                    built.append(1000 * (time.perf_counter() - start))
                error = sampled_block_error(lists, leaves, list(layer(*leaves, is_causal=causal, return_lse=True)))
                ms = sustained({"ours": lambda: layer(*leaves, is_causal=causal)}, turn=args.seconds)["ours"][0]  # noqa: B023
            pairs = pattern.pairs(N, H, is_causal=causal)
            share = lists.nbytes / (leaves[0].numel() * leaves[0].element_size())
            record = {
                "part": "patterns",
                "N": N,
                "pattern": name,
                "ms": ms,
                "build_ms": min(built),
                "list_share_of_q": share,
                "error": error,
            }
            record["tflops"] = 4 * D * pairs / ms / 1e9
            save(args.save, record | machine())
            print(
                f"N={N} {name}: {ms:.2f} ms, {record['tflops']:.0f} TFLOP/s, building {min(built):.2f} ms ({min(built) / ms:.1%}), "
                f"lists {share:.3%} of q, error {error['out']:.1e}",
                flush=True,
            )


def chosen_part(args: argparse.Namespace) -> None:
    """Blocks chosen by content at 10 %: choosing beside attending."""
    from dilated_attention.engine.blocks.bitmask import lists_of_kept
    from dilated_attention.engine.blocks.selection import choose_blocks_op

    for N in args.lengths:
        for causal in (False, True):
            H, D = 16, 128
            *qkv, dout = inputs(N, H, D, count=4)
            leaves = [x.requires_grad_() for x in qkv]
            pattern = TopBlocks(density=0.1)
            layer = BlockSparseAttention(pattern)
            scale = D**-0.5

            def choose(pattern: TopBlocks = pattern, causal: bool = causal) -> BlockLists:
                kept = choose_blocks_op(leaves[0], leaves[1], None, None, pattern.spec(), causal, scale, 0)  # noqa: B023
                return lists_of_kept(kept, pattern, N, N, is_causal=causal)  # noqa: B023

            with torch.no_grad():
                lists = choose()
                error = sampled_block_error(lists, leaves, list(layer(*leaves, is_causal=causal, return_lse=True)))
            calls = {"choose": _without_grad(choose), "all": _without_grad(lambda: layer(*leaves, is_causal=causal))}  # noqa: B023
            forward = sustained(calls, turn=args.seconds)
            kept = lists.num_entries / (lists.num_groups * lists.num_rows * lists.num_columns)
            attend = forward["all"][0] - forward["choose"][0]
            record = {
                "part": "chosen", "N": N, "causal": causal, "density": kept, "choose_ms": forward["choose"][0], "all_ms": forward["all"][0],
                "share": forward["choose"][0] / attend, "error": error,
            }  # fmt: skip
            backward = sustained({"ours": backward_of(lambda: layer(*leaves, is_causal=causal), leaves, dout)}, turn=args.seconds)  # noqa: B023
            record["backward_ms"] = backward["ours"][0]
            save(args.save, record | machine())
            print(
                f"N={N} causal={causal} density {kept:.4f}: all {forward['all'][0]:.2f} ms, choosing {forward['choose'][0]:.2f} ms "
                f"({record['share']:.1%} of attending), backward {backward['ours'][0]:.2f} ms, error {error['out']:.1e}",
                flush=True,
            )


def _without_grad(function: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return function()

    return call


def _row(times: dict[str, dict[str, float]]) -> str:
    return ", ".join(f"{name} {x['ms']:.3f} ms ({x['fraction']:.3f})" for name, x in times.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["random", "flex"], choices=["random", "flex", "kernels", "patterns", "chosen"])
    parser.add_argument("--densities", nargs="+", type=float, default=DENSITIES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[131072, 1048576])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seconds", type=float, default=0.15, help="that a function runs alone in each of its three turns")
    parser.add_argument("--save", help="a file to which one JSON line a row is added")
    args = parser.parse_args()
    if "random" in args.parts:
        random_part(args)
    if "patterns" in args.parts:
        patterns_part(args)
    if "chosen" in args.parts:
        chosen_part(args)


if __name__ == "__main__":
    main()
