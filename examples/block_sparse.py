"""A long document through trained attention layers: dense, then with 25, 10 and 5 % of its pairs, in blocks chosen by content.

    python examples/block_sparse.py                              # 16,384 bytes; a minute and a half on 2 CPU cores
    python examples/block_sparse.py --context 128k                # on a GPU; --document book.txt for a text of your own

Attention of random weights looks at everything alike and leaves nothing to choose. So a small byte-level model with dense causal attention
is first trained on the document's beginning. Then its layers read the document's end, which is new to them, with the same weights and
inputs: dense, in blocks that ``TopBlocks`` chooses, in as many blocks at random, and in the window of as many pairs before each byte.
A row of the table: the kept share of the causal pairs, time of all layers' attention with the choosing, the relative error
‖sparse − dense‖ / ‖dense‖ of its output, and the model's loss with all layers sparse. Writes ``runs/block_sparse.png``.
Last line: ``done: 10 % chosen is … times as fast as dense, output off by …, at random by …``
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# threads that wait for each other sleep instead of spinning: five times faster where the cores are shared with other work
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from _text import document_parser, read_document, train_on_document
from recipe.main import can_draw, run_safely
from torch import nn

from dilated_attention import BlockSparseAttention, create_model
from dilated_attention.models import LongNetLM
from dilated_attention.pattern import BlockPattern, Causal, LocalWindow, RandomBlocks, TopBlocks

DENSITIES = (0.25, 0.10, 0.05)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# kind, kept share of the pairs, seconds, error
Row = tuple[str, float, float, float]


def loss_of(model: LongNetLM, text: torch.Tensor, attention: nn.Module) -> torch.Tensor:
    """Bits per byte of texts (B, N + 1), with ``attention``, which has no weights, between the projections of every layer."""
    block: Any
    for block in model.decoder.blocks:
        block.attention.attention = attention
    text = text.to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        loss: torch.Tensor = model(text[:, :-1], targets=text[:, 1:])
    return loss / math.log(2)


def attend(attention: nn.Module, layers: list[tuple[torch.Tensor, ...]]) -> tuple[float, torch.Tensor]:
    """(seconds of all layers, their outputs): the median of three after one run to warm up."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        outputs = [attention(*qkv, is_causal=True) for qkv in layers]
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), torch.stack(outputs).float()


def plot(rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for panel, column, what in zip(figure.subplots(1, 2), (3, 2), ("relative error of the output", "seconds, all layers"), strict=True):
        for kind, style, colour in (("chosen", "o-", "#0072b2"), ("random", "s--", "#d55e00"), ("window", "^:", "#009e73")):
            mine = [row for row in rows if row[0] == kind]
            panel.plot([100 * row[1] for row in mine], [row[column] for row in mine], style, color=colour, label=kind)
        panel.set(xlabel="kept pairs, % of causal pairs", ylabel=what)
        panel.axhline(rows[0][column], color="black", linestyle="-.", label="dense")
        panel.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = document_parser(__doc__, 16384, 45)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    beginning, end = read_document(args)
    torch.manual_seed(0)
    # slow rotations let contents be compared over long distances
    model: LongNetLM = create_model("longnet-tiny", num_layers=2, embed_dim=64, num_heads=2, segment_lengths=(args.context,),
                                    dilation_rates=(1,), rotary_base=1e6, device=DEVICE)  # fmt: skip
    # one segment of everything, at rate 1
    first: Any = model.decoder.blocks[0]
    dense = first.attention.attention
    steps = train_on_document(model, lambda windows: loss_of(model, windows, dense), beginning, args)
    print(f"trained {steps} steps", flush=True)
    model.eval()
    torch.set_grad_enabled(False)
    layers: list[tuple[torch.Tensor, ...]] = []
    hook = dense.register_forward_hook(lambda _, qkv, __: layers.append(tuple(x.to(DTYPE) for x in qkv)))
    bits = loss_of(model, end, dense).item()
    hook.remove()
    seconds, exact = attend(dense, layers)
    rows = [("dense", 1.0, seconds, 0.0)]
    heads, N = model.config.num_heads, args.context
    print(f"\n{N} bytes of {args.document.name}, {len(layers)} layers of {heads} heads, {DEVICE}")
    print(f"{'attention':<14} {'kept':>7} {'seconds':>8} {'speed':>6} {'error':>7} {'bits/byte':>10}")
    print(f"{'dense':<14} {1:7.1%} {seconds:8.4f} {1:6.2f} {0:7.3f} {bits:10.3f}", flush=True)
    for density in DENSITIES:
        # a causal window of w keys keeps N·w − w·(w − 1)/2 of N·(N + 1)/2 pairs
        window = max(1, round(N * (1 - math.sqrt(1 - density))))
        found: list[BlockPattern] = [TopBlocks(density=density), RandomBlocks(density, own_block=True), LocalWindow((window - 1, 0))]
        for kind, pattern in zip(("chosen", "random", "window"), found, strict=True):
            sparse = BlockSparseAttention(pattern)
            seconds, out = attend(sparse, layers)
            kept = pattern.pairs(N, heads, is_causal=True) / Causal().pairs(N, heads)
            rows.append((kind, kept, seconds, float((out - exact).norm() / exact.norm())))
            figures = (
                f"{kept:7.1%} {seconds:8.4f} {rows[0][2] / seconds:6.2f} {rows[-1][3]:7.3f} {loss_of(model, end, sparse).item():10.3f}"
            )
            print(f"{f'{kind} {density:.0%}':<14} {figures}", flush=True)
    if can_draw():
        plot(rows, args.out / "block_sparse.png")
    chosen, random = rows[4:6]
    errors = f"output off by {chosen[3]:.3f}, at random by {random[3]:.3f}"
    print(f"done: 10 % chosen is {rows[0][2] / chosen[2]:.1f} times as fast as dense, {errors}")
    return 0


if __name__ == "__main__":
    sys.exit(run_safely(main))
