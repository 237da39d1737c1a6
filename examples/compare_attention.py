"""Which attention should a model be trained with? Trains one from nothing, all for the same time, and writes what came of it.

    python examples/compare_attention.py --attention window-1024 --context 32768 --seconds 360 --lr 1e-3 --out runs/compare/window
    python examples/compare_attention.py --attention dense --context 1m --data genomes a.fa.gz b.fa.gz --checkpoint --out runs/compare/dna
    python examples/compare_attention.py --table runs/compare --pictures runs    # what came of them

``--data bytes`` is the text that this Python's packages ship, ``--data bytes FOLDER`` that of other packages, ``--data genomes FILE …`` two
strains in a sequence. The learning rate follows the share of ``--seconds`` that is over, and evaluations stop the clock. A run that is
called again goes on where it was stopped; of one that has ended ``--out``.json holds settings, speed, memory and the held-out bits: over
time, by position in the context, by how far back the 24 symbols before one stood last, and of a random string that stood once.
With ``--first-context`` sequences begin short and double in equal shares of the training, until they are ``--context`` long.
Last line: ``done: … bits per byte``
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _compare_data import Strains, Text, binned, copy_distance
from recipe import log, settings
from recipe.main import can_draw, run_safely
from recipe.processes import Processes, precision
from recipe.trainer import Lengths, Task, Trainer, generator_of

from dilated_attention import create_model, explain_backend
from dilated_attention.models import LongNetLM
from dilated_attention.pattern import BigBird, BlockPattern, DilatedBlocks, GlobalLocal, LocalWindow, TopBlocks, geometric_branches

NAMES = (
    "dense", "window-1024", "window-4096", "longnet-2", "longnet-4", "dilated-blocks", "bigbird", "topblocks", "mix-window-dense",
    "mix-window-nope", "mix-window-dilated", "dilated-offsets",
)  # fmt: skip
# of the needle test: bytes of the string, those of them that only say which it is, and bytes from one string to the next
NEEDLE, CUE, APART = 32, 8, 40
Entry = dict[str, Any]


def blocks(pattern: BlockPattern) -> Entry:
    return {"attention": "block_sparse", "block_pattern": pattern}


def window(size: int) -> Entry:
    return blocks(LocalWindow((size - 1, 0)))


def longnet(context: int, growth: int) -> Entry:
    segments, rates = geometric_branches(context, min(2048, max(1, context // 4)), growth)
    return {"attention": "dilated", "segment_lengths": segments, "dilation_rates": rates}


def attention_of(name: str, context: int, heads: int, layers: int) -> list[Entry]:
    """The entries of ``create_model(attention=…)``, which layers take in turn."""
    if size := re.fullmatch(r"window-0*([1-9]\d{0,17})", name):
        return [window(int(size[1]))]
    if growth := re.fullmatch(r"longnet-0*([2-9]|[1-9]\d{1,17})", name):
        return [longnet(context, int(growth[1]))]
    if name == "dilated-blocks":
        # the first 128 keys, a window of 1,024, and at each rate 4, 16, … four blocks of 128 before it, until they reach the whole context
        pattern: BlockPattern = GlobalLocal((1023, 0), 128)
        for rate in geometric_branches(-(-context // 512), 1, 4)[1][1:]:
            pattern = pattern | DilatedBlocks(rate, 8)
        return [blocks(pattern)]
    if name == "dilated-offsets":
        # head h of layer l takes the positions ≡ h + l · heads, so that layers together take more of them than one has heads
        entry = longnet(context, 4)
        return [
            entry | {"head_offsets": tuple(tuple((h + depth * heads) % rate for h in range(heads)) for rate in entry["dilation_rates"])}
            for depth in range(layers)
        ]
    entries = {
        "dense": [{"attention": "dense"}],
        "bigbird": [blocks(BigBird((1023, 0), 128, 8))],
        "topblocks": [blocks(TopBlocks(density=0.1))],
        "mix-window-dense": [window(1024)] * 3 + [{"attention": "dense"}],
        # dense layers that rotate nothing: what they say of a key does not depend on how far back it stands
        "mix-window-nope": [window(1024)] * 3 + [{"attention": "dense", "positions": "none"}],
        "mix-window-dilated": [window(1024), longnet(context, 4)],
    }
    if name not in entries:
        raise ValueError(f"--attention is {name}; expected one of {', '.join(NAMES)}, or another number: window- from 1, longnet- from 2")
    return entries[name]


def arguments() -> tuple[settings.Parser, argparse.Namespace]:
    whole = settings.number(int, 1)
    parser = settings.Parser(__doc__, free=("data", "cache", "table", "pictures"))
    settings.add_common(parser, out="runs/compare/run", lr=1e-3, minutes=6, processes=False)
    parser.set_defaults(resume="auto")
    parser.add_argument("--attention", default="dense", help=", ".join(NAMES))
    parser.add_argument("--context", type=settings.number(int, 512), default=32768, help="bytes or bases of a sequence (default: 32768)")
    parser.add_argument("--first-context", type=settings.number(int, 64), help="bytes or bases of the first sequences (default: --context)")
    parser.add_argument("--data", nargs="+", default=["bytes"], metavar="KIND", help="bytes [FOLDER], or genomes FASTA FASTA …")
    parser.add_argument("--cache", type=Path, default=Path("runs/compare-bytes.pt"), help="where the text of packages is kept")
    parser.add_argument("--tokens", type=whole, default=262_144, help="of a step (default: 262,144); at least one sequence")
    parser.add_argument("--layers", type=whole, default=10)
    parser.add_argument("--embed-dim", type=whole, default=512)
    parser.add_argument("--heads", type=whole, default=8)
    parser.add_argument("--checkpoint", action="store_true", help="keep only each block's input for the backward")
    parser.add_argument("--evaluations", type=settings.number(int, 0), default=8, help="on the way")
    parser.add_argument("--held-out", type=whole, default=524_288, help="tokens of each; four times as many at the end (default: 524,288)")
    parser.add_argument("--table", type=Path, help="print a table of the results in this folder")
    parser.add_argument("--pictures", type=Path, help="of --table: draw loss over time and by position into this folder")
    return parser, settings.parse(parser)


class Run:
    """One run: its data, its model, and what is measured of it."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        kind, *paths = args.data
        if kind not in ("bytes", "genomes") or (kind == "bytes" and len(paths) > 1):
            raise ValueError(f"--data is {' '.join(args.data)}; expected bytes, bytes FOLDER, or genomes and FASTA files")
        files = [Path(path) for path in paths]
        self.data: Text | Strains
        self.data = Text(files[0] if files else None, args.cache, device) if kind == "bytes" else Strains(files, args.context, device)
        self.batch = max(1, args.tokens // args.context)
        self.lengths = Lengths(args.first_context, args.context)
        if kind == "genomes" and (first := self.lengths.at(0.0)) % 2:
            raise ValueError(f"a sequence of {first:,} bases has no halves; give an even --context, and --first-context")
        torch.manual_seed(args.seed)
        self.model = self.build(device)

    def build(self, device: torch.device | str) -> LongNetLM:
        args, data = self.args, self.data
        shape: dict[str, Any] = {"embed_dim": args.embed_dim, "num_layers": args.layers, "num_heads": args.heads}
        tokens = {"vocab_size": data.vocab_size, "kmer": data.kmer, "tie_embeddings": data.kmer == 1}
        entries = attention_of(args.attention, args.context, args.heads, args.layers)
        options: dict[str, Any] = {"checkpoint_activations": args.checkpoint, "backend": args.backend, "device": device}
        base = settings.rotary_base(args.context)
        return create_model("longnet-50m", attention=entries, rotary_base=base, **shape, **tokens, **options)

    def tokens(self, progress: float) -> int:
        """Of a sequence; while sequences are shorter than --tokens and --context, several stand for one, so that a step has --tokens."""
        length = self.lengths.at(progress)
        return length * max(1, min(self.args.tokens, self.args.context) // length)

    def loss(self, sequences: Sequence[int], progress: float) -> torch.Tensor:
        length = self.lengths.at(progress)
        generators = [generator_of(self.args.seed, i) for i in sequences]
        count = self.tokens(progress) // length
        windows = torch.stack([self.data.random_window(length, generator) for generator in generators for _ in range(count)])
        with precision(self.device):
            return self.model(self.data.inputs(windows), targets=self.data.targets(windows))

    def warm_up(self) -> None:
        """Forwards and backwards whose gradients are dropped: kernels are compiled and chosen before the clock runs."""
        count = len(self.lengths.all)
        for i in range(count):
            self.loss(range(self.batch), i / count).backward()
        self.model.zero_grad(set_to_none=True)

    def bits(self, windows: torch.Tensor) -> torch.Tensor:
        """Bits of every target of windows (B, N + 1), (B, N); NaN where there is none."""
        targets = self.data.targets(windows)
        with torch.no_grad(), precision(self.device):
            hidden = self.model.eval().hidden(self.data.inputs(windows))
            parts = [torch.nn.functional.linear(x, self.model.output_weight) for x in hidden.flatten(0, 1).split(65_536)]
        pairs = zip(parts, targets.flatten().split(65_536), strict=True)
        nats = torch.cat([torch.nn.functional.cross_entropy(x.float(), y, reduction="none") for x, y in pairs])
        return nats.view(targets.shape).masked_fill(targets == -100, math.nan) / math.log(2)

    def windows(self, progress: float) -> list[torch.Tensor]:
        count = max(1, self.args.held_out * (4 if progress == 1 else 1) // self.args.context)
        return list(torch.stack(list(self.data.held_out(self.args.context, count))).split(self.batch))

    def evaluate(self, progress: float) -> float:
        return torch.cat([self.bits(windows) for windows in self.windows(progress)]).nanmean().item()

    def figures(self) -> dict[str, Any]:
        """Bits of the held-out windows: of all, by position and by distance of a copy, each [from, below, tokens, bits]."""
        windows = self.windows(1.0)
        bits = torch.cat([self.bits(x) for x in windows])
        far = torch.stack([copy_distance(window, self.data.vocab_size) for x in windows for window in x])
        position = torch.arange(1, bits.shape[1] + 1, device=self.device).expand_as(bits)
        figures = {"bits": bits.nanmean().item(), "by_position": binned(position, bits), "by_copy": binned(far, bits)}
        if isinstance(self.data, Text):
            figures["needle"] = self.needle(torch.cat(windows))
        return figures

    def needle(self, windows: torch.Tensor) -> list[list[float]]:
        """[distance, tokens, bits] of the last bytes of random strings near the end of a window that stand once at that distance before."""
        n, nearest = self.args.context, min(512, self.args.context // 4)
        distances = [nearest * 4**i for i in range(20) if nearest * 4**i <= n // 2]
        distances.append(n - APART * (len(distances) + 2))
        ends = [n + 1 - APART * (i + 1) + NEEDLE for i in range(len(distances))]
        drawn = torch.randint(33, 127, (len(windows), len(distances), NEEDLE), generator=torch.Generator().manual_seed(1)).to(self.device)
        changed = windows.clone()
        for i, (distance, end) in enumerate(zip(distances, ends, strict=True)):
            for place in (end, end - distance):
                changed[:, place - NEEDLE : place] = drawn[:, i]
        bits = torch.cat([self.bits(x) for x in changed.split(self.batch)])
        scored = [bits[:, end - NEEDLE + CUE - 1 : end - 1] for end in ends]
        return [[distance, x.numel(), x.mean().item()] for distance, x in zip(distances, scored, strict=True)]


def train(parser: settings.Parser, args: argparse.Namespace) -> int:
    result = args.out.with_name(f"{args.out.name}.json")
    with settings.wrong_usage(parser):
        processes = Processes()
        device = processes.device
        run = Run(args, device)
        model = run.model
        task = Task(
            loss=run.loss, evaluate=run.evaluate, tokens=run.tokens, length=run.lengths.at, unit=run.data.unit, data=run.data.data,
            evaluations=args.evaluations, batch=run.batch,
        )  # fmt: skip
        matrices = [p for p in model.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim != 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
        trainer = Trainer(args, processes, model, model, [optimizer], task)
    size = f"{model.num_parameters:,} parameters, {run.batch * run.tokens(0):,} {run.data.unit}s a step"
    print(f"{args.attention}: {size}; {run.data.source}", flush=True)
    run.warm_up()
    trainer.train()
    if trainer.stopped_by:
        return trainer.report_stop()
    seconds, memory = trainer.done.seconds, trainer.peak_memory()
    start = time.perf_counter()
    figures = run.figures()
    tokens = trainer.done.tokens
    curve = [[x["seconds"], x["tokens"], x["held_out/bits"]] for x in log.read(args.out) if "held_out/bits" in x]
    dense = explain_backend(
        device=device,
        head_dim=args.embed_dim // args.heads,
        num_heads=args.heads,
        is_causal=True,
        length=args.context,
        backend=args.backend,
    )
    outcome = {
        "settings": json.loads(settings.save(args)) | {"data": args.data[0]},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__, "dense_kernels": [dense.forward, dense.backward],
        "source": run.data.source, "parameters": model.num_parameters, "rotary_base": model.config.rotary_base, "steps": trainer.done.step,
        "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds,
        "peak_gib": memory, "final_evaluation_seconds": time.perf_counter() - start,
        "curve": [*curve, [seconds, tokens, figures["bits"]]], **figures,
    }  # fmt: skip
    result.write_text(json.dumps(outcome) + "\n", encoding="utf-8")
    print(f"done: {figures['bits']:.4f} bits per {run.data.unit}, {outcome['tokens_per_second']:,.0f} {run.data.unit}s/s; {result}")
    return 0


def main() -> int:
    parser, args = arguments()
    if args.table:
        from _compare_table import pictures, table

        print(table(args.table))
        return pictures(args.table, args.pictures) if args.pictures and can_draw() else 0
    return train(parser, args)


if __name__ == "__main__":
    sys.exit(run_safely(main))
