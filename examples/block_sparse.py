"""A long document through trained attention layers: dense, then with 25, 10 and 5 % of its blocks, chosen by content or at random.

    python examples/block_sparse.py                              # 8,192 bytes, about two minutes on 2 CPU cores
    python examples/block_sparse.py --length 131072              # on a GPU
    python examples/block_sparse.py --document book.txt

A small byte-level model with dense causal attention is first trained on the document's beginning, since attention of random weights looks at everything
alike and leaves nothing to choose. Its layers then read the document's end with the same weights: each layer gets the dense layer's input.
A row of the table: the kept share of the causal pairs, time of all layers, the relative error ‖sparse − dense‖ / ‖dense‖ of their attention's output,
and the model's loss with all of its layers sparse. Writes ``runs/block_sparse.png``.
Last line: ``done: 10 % chosen is … times as fast as dense, output off by …, at random by …``
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sysconfig
import time
from pathlib import Path

import torch
from _text import random_windows
from torch import nn

from dilated_attention import MultiheadBlockSparseAttention, MultiheadDilatedAttention, create_model
from dilated_attention.models import LongNetLM
from dilated_attention.pattern import BlockPattern, TopBlocks, with_sparsity

# a real text in one piece on any machine with Python: its language reference, 757,011 bytes in 3.11
DOCUMENT = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
DENSITIES = (0.25, 0.10, 0.05)
WHOLE = 2**40


def trained(text: torch.Tensor, args: argparse.Namespace, device: str) -> LongNetLM:
    """Dense causal attention is dilated attention of one segment as long as anything, rate 1."""
    torch.manual_seed(0)
    model = create_model("longnet-tiny", segment_lengths=(WHOLE,), dilation_rates=(1,), rotary_base=1e6).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05)
    generator = torch.Generator().manual_seed(0)
    start, step = time.perf_counter(), 0
    while (done := (time.perf_counter() - start) / args.train_seconds) < 1 and step < args.steps:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 10) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
        window = random_windows(text, args.context, args.batch, generator).to(device)
        loss = model(window[:, :-1], targets=window[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
    print(
        f"trained {step} steps of {args.batch} × {args.context} bytes in {time.perf_counter() - start:.0f} s: {loss.item() / math.log(2):.2f} bits/byte"
    )
    return model.eval()


def with_pattern(model: LongNetLM, pattern: BlockPattern) -> LongNetLM:
    """The model with every attention layer block-sparse, weights as they are: parameters have the same names."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, MultiheadDilatedAttention):
                sparse = MultiheadBlockSparseAttention(
                    layer.embed_dim, layer.num_heads, pattern, num_kv_heads=layer.num_kv_heads,
                    layer_norm_eps=model.config.layer_norm_eps, rotary=layer.rotary, rotary_base=layer.rotary_base,
                ).to(next(layer.parameters()).device)  # fmt: skip
                sparse.load_state_dict(layer.state_dict())
                setattr(parent, name, sparse)
    return model.eval()


def attention_layers(model: LongNetLM) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (MultiheadDilatedAttention, MultiheadBlockSparseAttention))]


@torch.no_grad()
def inputs_of_layers(model: LongNetLM, tokens: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, given: found.append(given[0])) for layer in attention_layers(model)]
    model(tokens, targets=tokens)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def attend(model: LongNetLM, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each layer's softmax(QKᵀ)V, before normalisation and projection, is what a pattern changes; here with both, as the model uses it."""
    return [layer(x, is_causal=True)[0] for layer, x in zip(attention_layers(model), inputs, strict=True)]


def seconds(model: LongNetLM, inputs: list[torch.Tensor], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        attend(model, inputs)
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@torch.no_grad()
def bits_per_byte(model: LongNetLM, text: torch.Tensor) -> float:
    return float(model(text[None, :-1], targets=text[None, 1:])) / math.log(2)


def plot(rows: list[tuple[str, float, float, float]], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('no plot: pip install "dilated-attention[plot]"')
        return
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for kind, colour in (("chosen", "#2171b5"), ("random", "#d94801")):
        mine = [row for row in rows if row[0].startswith(kind)]
        left.plot([100 * row[1] for row in mine], [row[3] for row in mine], "o-", color=colour, label=kind)
        right.plot([100 * row[1] for row in mine], [row[2] for row in mine], "o-", color=colour, label=kind)
    left.set(xlabel="kept pairs, % of causal pairs", ylabel="relative error of the output", ylim=(0, None))
    right.set(xlabel="kept pairs, % of causal pairs", ylabel="seconds, all layers", ylim=(0, None))
    right.axhline(rows[0][2], color="#636363", linestyle="--", label="dense")
    for panel in (left, right):
        panel.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--length", type=int, default=8192, help="bytes of the document's end that are read")
    parser.add_argument("--context", type=int, default=1024, help="of training")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--train-seconds", type=float, default=60)
    parser.add_argument("--steps", type=int, default=10**9, help="of training, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = torch.frombuffer(bytearray(args.document.read_bytes()), dtype=torch.uint8)
    if len(text) < args.length + 1 + args.context:
        raise SystemExit(
            f"{args.document} has {len(text)} bytes; --length {args.length} and --context {args.context} need more: choose shorter ones"
        )
    model = trained(text[: -args.length - 1], args, device)
    end = text[-args.length - 1 :].long().to(device)
    inputs = inputs_of_layers(model, end[None, :-1])
    dense = attend(model, inputs)
    rows = [("dense", 1.0, seconds(model, inputs, args.repeats), 0.0)]
    print(f"\n{args.length} bytes of {args.document.name}, {len(inputs)} layers of {model.config.num_heads} heads, {device}")
    print(f"{'attention':<14} {'kept':>7} {'seconds':>8} {'speed':>6} {'error':>7} {'bits/byte':>10}")
    print(f"{'dense':<14} {1:7.1%} {rows[0][2]:8.3f} {1:6.2f} {0:7.3f} {bits_per_byte(model, end):10.3f}")
    for density in DENSITIES:
        for kind, pattern in (("chosen", TopBlocks(density=density)), ("random", with_sparsity(density))):
            sparse = with_pattern(model, pattern)
            found = attend(sparse, inputs)
            error = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(found, dense, strict=True)))
            error /= math.sqrt(sum(float(b.square().sum()) for b in dense))
            # chosen blocks: of those that a row sees, rounded up; the diagonal's are kept in any case
            name = f"{kind} {density:.0%}"
            rows.append((name, density, seconds(sparse, inputs, args.repeats), error))
            print(
                f"{name:<14} {density:7.1%} {rows[-1][2]:8.3f} {rows[0][2] / rows[-1][2]:6.2f} {error:7.3f} {bits_per_byte(sparse, end):10.3f}",
                flush=True,
            )
    plot(rows, args.out / "block_sparse.png")
    (chosen,) = [row for row in rows if row[0] == "chosen 10%"]
    (random,) = [row for row in rows if row[0] == "random 10%"]
    print(
        f"done: 10 % chosen is {rows[0][2] / chosen[2]:.1f} times as fast as dense, output off by {chosen[3]:.3f}, at random by {random[3]:.3f}"
    )


if __name__ == "__main__":
    main()
