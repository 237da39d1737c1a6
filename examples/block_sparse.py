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

import argparse
import math
import os
import statistics
import sys
import sysconfig
import time
from pathlib import Path

# threads that wait for each other sleep instead of spinning: five times faster where the cores are shared with other work
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from _pictures import can_draw
from _text import random_windows
from recipe.main import run_safely
from torch import nn

from dilated_attention import BlockSparseAttention, create_model
from dilated_attention.models import LongNetLM
from dilated_attention.parsing import size
from dilated_attention.pattern import BlockPattern, Causal, LocalWindow, RandomBlocks, TopBlocks

# a real text in one piece on any machine with Python: its language reference, 757,011 bytes in 3.11
DOCUMENT = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
DENSITIES = (0.25, 0.10, 0.05)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# kind, kept share of the pairs, seconds, error
Row = tuple[str, float, float, float]


def loss_of(model: LongNetLM, text: torch.Tensor, attention: nn.Module) -> torch.Tensor:
    """Bits per byte of texts (B, N + 1), with ``attention``, which has no weights, between the projections of every layer."""
    for block in model.decoder.blocks:
        block.attention.attention = attention
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        loss: torch.Tensor = model(text[:, :-1], targets=text[:, 1:])
    return loss / math.log(2)


def trained(text: torch.Tensor, args: argparse.Namespace) -> tuple[LongNetLM, nn.Module]:
    """On short windows for half of the time, then on longer ones: attention that has never met far keys only suffers from them.

    Returns the model and its dense attention: one segment of everything, at rate 1."""
    torch.manual_seed(0)
    # slow rotations let contents be compared over long distances
    model = create_model("longnet-tiny", num_layers=2, embed_dim=64, num_heads=2, segment_lengths=(args.context,), dilation_rates=(1,),
                         rotary_base=1e6, device=DEVICE)  # fmt: skip
    assert isinstance(model, LongNetLM)
    dense = model.decoder.blocks[0].attention.attention
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    generator = torch.Generator().manual_seed(0)
    start, step = time.perf_counter(), 0
    while (done := max((time.perf_counter() - start) / args.train_seconds, step / args.steps)) < 1:
        length = min(args.context, 1024 if done < 0.5 else 4096 if done < 0.65 else args.context)
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, (step + 1) / 20, 0.1 + 2 * (1 - done))
        loss = loss_of(model, random_windows(text, length, max(1, 2048 // length), generator).to(DEVICE), dense)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
    print(f"trained {step} steps in {time.perf_counter() - start:.0f} s: {loss.item():.2f} bits/byte", flush=True)
    return model.eval(), dense


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--context", type=size, default=16384, help="bytes of the document's end that are read")
    parser.add_argument("--train-seconds", type=float, default=45)
    parser.add_argument("--steps", type=size, default=10**9, help="of training, at most")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    text = torch.frombuffer(bytearray(args.document.read_bytes()), dtype=torch.uint8)
    if len(text) < 3 * args.context:
        raise SystemExit(f"{args.document} has {len(text)} bytes; expected at least three times --context, {3 * args.context}")
    model, dense = trained(text[: -args.context - 1], args)
    torch.set_grad_enabled(False)
    end = text[None, -args.context - 1 :].long().to(DEVICE)
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
