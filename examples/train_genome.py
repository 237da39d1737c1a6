"""Train a base-level model on a bacterium's whole chromosome, and compare it with Markov models of the same held-out bases.

    python examples/train_genome.py                              # one CPU: context 16,384; minutes on 2 cores
    python examples/train_genome.py --fasta my.fa.gz --out runs/mine   # your own genome, all of its records
    python examples/train_genome.py --out runs/mine --resume auto      # go on where it was stopped, by whatever
    python examples/train_genome.py --attention mixed            # three layers of windows to a dense one, in place of LongNet's branches
    python examples/train_genome.py --objective masked           # 15 % of the bases hidden, attention both ways
    python examples/train_genome.py --scale gpu --minutes 3      # one H200: 1,048,576 bases in one sequence, bf16, compiled, checkpointed
    torchrun --nproc_per_node=4 examples/train_genome.py --scale gpu --context-parallel 4 --fsdp  # the same sequence over 4 GPUs

The chromosome is in the wheel of pyrodigal (``pip install pyrodigal==3.7.1``). The last 15 % are held out, or with ``--held-out NAME …``
the records of these names. ``--out`` gets ``log.jsonl`` and TensorBoard's curves while the run goes, a checkpoint every
``--save-minutes`` and on Ctrl-C or SIGTERM, then the model and ``held_out.fa``; at the end also ``genome.json`` (settings, every step,
results) and ``genome.png`` (the curve and the Markov models).
Last line: ``done: held-out … bits per base, below the Markov models of orders …``; exit code 1 if it is not below orders 0 to 2, or with
masks 0 and 1, and ``--expect-below-markov`` asked for that.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# threads that wait for each other sleep instead of spinning: five times faster where the cores are shared with other work
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import _markov
import torch
from _genome import UNKNOWN, Chromosome, find_fasta, known_share, read_genome, shrink_output, write_held_out
from _muon import optimizers_of
from recipe import log, settings
from recipe.costs import flops_per_token, peak_flops
from recipe.main import can_draw, run_safely
from recipe.processes import Processes, precision
from recipe.trainer import Task, Trainer, generator_of

from dilated_attention.models import BASES, LongNetConfig, LongNetLM
from dilated_attention.pattern import LocalWindow, geometric_branches

SCALES: dict[str, dict[str, Any]] = {
    "cpu": {"context": 16_384, "short_context": 2048, "layers": 3, "embed_dim": 128, "heads": 4, "first_segment": 512}
    | {"dropout": 0.0, "short_share": 0.8},
    "gpu": {"context": 1_048_576, "short_context": 65_536, "layers": 12, "embed_dim": 512, "heads": 8, "first_segment": 2048}
    # at a 50th of its parameters and of the bases, 29 times through them: 1.98 held-out bits and rising without dropout, 1.96 with it
    | {"dropout": 0.2, "short_share": 0.5, "compile": True, "checkpoint": True},
}


def share_or_name(text: str) -> float | str:
    """A number above 0 and at most 0.9; anything else is a name, such as 1 of a chromosome."""
    try:
        share = float(text)
    except ValueError:
        return text
    return share if 0 < share <= 0.9 else text


def arguments() -> tuple[settings.Parser, argparse.Namespace]:
    whole, share = settings.number(int, 1), settings.number(float, 0, 1)
    parser = settings.Parser(__doc__, free=("fasta", "evaluations", "checkpoint", "compile", "peak_tflops", "expect_below_markov"))
    settings.add_common(parser, out="runs/genome", lr=1e-2, minutes=8.0)
    parser.add_argument("--fasta", type=Path, help="a FASTA file, plain or .gz (default: the chromosome in pyrodigal's wheel)")
    parser.add_argument("--objective", choices=("causal", "masked"), default="causal")
    parser.add_argument("--attention", choices=("longnet", "mixed"), default="longnet", help="mixed: windows of 1,024, and dense layers")
    parser.add_argument("--scale", choices=tuple(SCALES), default="cpu", help="defaults of the options that follow")
    parser.add_argument("--context", type=whole, help="bases of a training sequence")
    parser.add_argument("--short-context", type=whole, help="bases of the first ones: many small steps before the long sequences")
    parser.add_argument("--layers", type=whole)
    parser.add_argument("--embed-dim", type=whole)
    parser.add_argument("--heads", type=whole)
    parser.add_argument("--first-segment", type=whole, help="the shortest segment; others are 4 times the one before, up to the length")
    parser.add_argument("--segment-lengths", type=whole, nargs="+", help="of the branches, instead of --first-segment")
    parser.add_argument("--dilation-rates", type=whole, nargs="+")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile of the blocks")
    parser.add_argument("--checkpoint", action=argparse.BooleanOptionalAction, help="keep only each block's input for the backward")
    parser.add_argument("--kmer", type=settings.number(int, 1, 12), default=6, help="an input is a base with its k - 1 nearest")
    parser.add_argument("--dropout", type=share)
    parser.add_argument("--both-strands", action=argparse.BooleanOptionalAction, default=True, help="train on the reverse complement, too")
    parser.add_argument(
        "--held-out",
        type=share_or_name,
        nargs="+",
        default=[0.15],
        metavar="X",
        help="share of the bases, the last (0.15), or records",
    )
    parser.add_argument("--short-share", type=share, help="share of the training with --short-context; 0: none")
    parser.add_argument("--evaluations", type=settings.number(int, 0), default=8, help="of the held-out part while training")
    parser.add_argument("--evaluate-share", type=whole, default=8, help="those read every n-th window; the last one reads all")
    parser.add_argument("--markov-order", type=settings.number(int, 0, 16), default=12, help="the highest; each takes seconds on a CPU")
    parser.add_argument("--peak-tflops", type=settings.number(float, 0, above=True), help="of one device, for the share that is used")
    parser.add_argument("--expect-below-markov", action="store_true", help="exit code 1 unless the result is below the Markov models")
    args = settings.parse(parser)
    is_mixed = args.attention == "mixed"
    for name in ("first_segment", "segment_lengths", "dilation_rates"):
        if is_mixed and getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')} is given with --attention mixed, which has no branches; leave one of the two out")
    for name, value in SCALES[args.scale].items():
        if getattr(args, name) is None and not (is_mixed and name == "first_segment"):
            setattr(args, name, min(value, args.context) if name == "short_context" else value)
    if args.short_context > args.context:
        parser.error(f"--short-context is {args.short_context:,} and --context {args.context:,}; expected at most that")
    if (args.segment_lengths is None) != (args.dilation_rates is None):
        parser.error("--segment-lengths and --dilation-rates belong together: give both, or --first-segment")
    if args.segment_lengths is None and not is_mixed:
        args.segment_lengths, args.dilation_rates = (list(x) for x in geometric_branches(args.context, args.first_segment))
    return parser, args


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a run reads, and its loss on it."""

    args: argparse.Namespace
    processes: Processes
    chromosome: Chromosome
    model: LongNetLM
    parallel: torch.nn.Module

    def length(self, progress: float) -> int:
        return int(self.args.short_context if progress < self.args.short_share else self.args.context)

    def loss_of(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Of one whole sequence (N,), in nats; each process computes its shard."""
        tokens, wanted = self.processes.shard(inputs[None], targets[None])
        with precision(self.processes.device):
            return self.parallel(tokens, targets=wanted, seq_len=len(inputs))

    def loss(self, sequences: Sequence[int], progress: float) -> torch.Tensor:
        (index,) = sequences
        return self.loss_of(*self.chromosome.random_window(self.length(progress), generator_of(self.args.seed, index)))

    def warm_up(self) -> float:
        """Seconds of a forward and backward of each length, whose gradients are dropped: kernels are compiled and chosen before the clock
        runs."""
        start = time.perf_counter()
        for length in {self.length(0.0), self.length(1.0)}:
            self.loss_of(*self.chromosome.random_window(length, generator_of(0, 0))).backward()
            self.model.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    def evaluate(self, progress: float) -> float:
        """Bits per base over windows of the held-out part, all of them at the end; while sequences are short, so are the windows."""
        total, count = 0.0, 0
        # compiled code is for training
        with torch.compiler.set_stance("force_eager"):
            for inputs, targets in self.chromosome.held_out(self.length(progress), 1 if progress == 1 else self.args.evaluate_share):
                scored = int((targets != -100).sum())
                if scored:
                    total, count = total + self.loss_of(inputs, targets).item() * scored, count + scored
        return total / max(count, 1) / math.log(2)


def attention_of(args: argparse.Namespace) -> dict[str, Any]:
    """LongNet's branches in every layer; or layers of windows and, every fourth and the last of fewer, a dense one."""
    if args.attention == "longnet":
        return {"segment_lengths": tuple(args.segment_lengths), "dilation_rates": tuple(args.dilation_rates)}
    window = LocalWindow((1023, 0) if args.objective == "causal" else (511, 512))
    windows = {"attention": "block_sparse", "block_pattern": window}
    # a dense layer that rotates nothing: what it says of a key does not depend on how far back it stands
    return {"attention": [*[windows] * min(3, args.layers - 1), {"attention": "dense", "positions": "none"}]}


def build(args: argparse.Namespace, processes: Processes | None) -> LongNetLM:
    """The model over processes, or with None that of one process, without values."""
    config = LongNetConfig(
        vocab_size=len(BASES),
        kmer=args.kmer,
        embed_dim=args.embed_dim,
        num_layers=args.layers,
        num_heads=args.heads,
        **attention_of(args),
        is_causal=args.objective == "causal",
        dropout=args.dropout,
        tie_embeddings=False,
    )
    if processes is None:
        return LongNetLM(config, device="meta")
    options: dict[str, Any] = {"backend": args.backend, "checkpoint_activations": bool(args.checkpoint), "device": processes.device}
    if args.context_parallel > 1:
        # each waits for the others' compilers
        options["timeout"] = 600.0
    model = LongNetLM(config, **options, **processes.model_options())
    shrink_output(model)
    if args.compile:
        # before FSDP2, whose hooks around a block are no part of it
        for block in model.decoder.blocks:
            block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
    return model


def main() -> int:
    parser, args = arguments()
    with settings.wrong_usage(parser):
        # all that may be wrong with what was asked for shows before a process waits for another, or a file is written
        genome = read_genome(find_fasta(args.fasta), args.held_out)
        symbols, cut = genome.symbols, genome.cut
        data = hashlib.sha256(symbols.numpy().tobytes()).hexdigest()[:16]
        if not cut or len(symbols) - cut < 2:
            raise ValueError(f"--held-out leaves {cut:,} bases to train on and {len(symbols) - cut:,} to evaluate; choose another")
        if cut <= args.context:
            raise ValueError(f"{cut:,} bases to train on, and --context is {args.context:,}; choose a smaller one, or a longer genome")
        if not (symbols[cut:] != UNKNOWN).any():
            raise ValueError(f"the last {len(symbols) - cut:,} bases are all unknown; expected some to evaluate: choose another --held-out")
        known = known_share(symbols[:cut])
        if known < 0.01:
            raise ValueError(
                f"of the {cut:,} bases to train on {known:.1%} are known; expected at least 1%: leave records of N out of --fasta"
            )
        processes = Processes(args.context_parallel, args.layout, args.fsdp)
        symbols = symbols.to(processes.device)
        chromosome = Chromosome(symbols=symbols, cut=cut, is_causal=args.objective == "causal", k=args.kmer, both_strands=args.both_strands)
        torch.manual_seed(args.seed)
        model = build(args, processes)
        reading = Reading(args, processes, chromosome, model, processes.parallel(model))
        peak, peak_source = peak_flops(processes.device, args.peak_tflops)
        task = Task(
            loss=reading.loss,
            evaluate=reading.evaluate,
            tokens=reading.length,
            flops=lambda length: flops_per_token(model, length),
            unit="base",
            data=data,
            evaluations=args.evaluations,
            batch=1,
        )
        trainer = Trainer(args, processes, model, reading.parallel, optimizers_of(model, args.lr), task, peak)
    unknown = "" if known == 1 else f"; {1 - known:.2%} of the former are N"
    print(f"{genome.name}: {cut:,} bases to train on, {len(symbols) - cut:,} held out{unknown}")
    attention = f"branches {model.config.pattern.branches}" if args.attention == "longnet" else "windows of 1,024 and dense layers"
    print(f"{model.num_parameters:,} parameters, {attention}, {args.objective}, context {args.context:,}")
    compile_seconds = 0.0
    if args.compile:
        compile_seconds = reading.warm_up()
        print(f"compiled in {compile_seconds:.0f} s", flush=True)
    trainer.train()
    if processes.rank == 0:
        write_held_out(genome, args.out / "held_out.fa")
    if trainer.stopped_by:
        return trainer.report_stop(lambda: build(args, None))
    # taken before the evaluation of all windows, which does not belong to the training
    memory = trainer.peak_memory()
    trainer.save_model(lambda: build(args, None))
    bits = trainer.evaluate()
    if processes.rank:
        return 0
    speed = speed_of(args, model, processes, peak, peak_source) | {"peak memory GiB": memory}
    return report(args, reading, trainer, {"chromosome": genome.name, "bits": bits, "speed": speed, "compile seconds": compile_seconds})


def speed_of(args: argparse.Namespace, model: LongNetLM, processes: Processes, peak: float, source: str) -> dict[str, Any]:
    """Of the steps at the last length, which is the full one, at their median: the first pays for what is chosen and allocated once."""
    steps = steps_of(args.out)
    length = steps[-1][0]
    seconds = statistics.median([seconds for n, seconds, _ in steps if n == length])
    bases = length * processes.rows / seconds
    flops = flops_per_token(model, length)
    return {
        "bases a sequence": length,
        "seconds a step (median)": seconds,
        "bases/s": bases,
        "FLOPs a base": flops,
        "TFLOP/s a device": bases * flops / processes.world / 1e12,
        "MFU": bases * flops / processes.world / peak,
        "peak TFLOP/s": peak / 1e12,
        "peak from": source,
    }


def steps_of(run: Path) -> list[tuple[int, float, float]]:
    """(length, seconds it took, bits per base of the training sequence) of every step."""
    lines = [line for line in log.read(run) if "train/bits" in line]
    before = [0.0, *(line["seconds"] for line in lines)]
    return [(line["length"], line["seconds"] - start, line["train/bits"]) for line, start in zip(lines, before, strict=False)]


def report(args: argparse.Namespace, reading: Reading, trainer: Trainer, found: dict[str, Any]) -> int:
    chromosome, bits = reading.chromosome, found["bits"]
    if chromosome.is_causal:
        rows = _markov.adaptive(chromosome.symbols, chromosome.scored(), args.markov_order, args.both_strands)
        print("\nMarkov models of the same bases, which count all that came before, bits per base:")
    else:
        rows = _markov.two_sided(chromosome.symbols, chromosome.scored(), chromosome.cut, args.markov_order // 2, args.both_strands)
        print("\nMarkov models of the same hidden bases, from the k before and the k after, bits per base:")
    print(" k  smoothed  interpolated with lower k")
    for row in rows:
        print(f"{row.k:2d}  {row.smoothed:8.4f}  {row.interpolated:8.4f}")
    print()
    for key, value in found["speed"].items():
        form = "" if isinstance(value, str) else ",.4g" if abs(value) < 1000 else ",.0f"
        print(f"{key}: {value:{form}}")
    device = reading.processes.device
    steps = steps_of(args.out)
    evaluated = [line for line in log.read(args.out) if "held_out/bits" in line]
    results = {
        "chromosome": found["chromosome"],
        "settings": json.loads(settings.save(args)),
        "processes": reading.processes.world,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "parameters": reading.model.num_parameters,
        "held out bits per base": bits,
        "speed": found["speed"],
        "compile seconds": found["compile seconds"],
        "markov": [dataclasses.asdict(row) for row in rows],
        "steps": steps,
        "evaluations": [(line["step"], line["seconds"], line["held_out/bits"]) for line in evaluated],
    }
    (args.out / "genome.json").write_text(json.dumps(results) + "\n")
    picture = ""
    if can_draw():
        picture = ", genome.png"
        chosen = [*(row for row in rows if row.k in (2, 4, 6)), min(rows, key=lambda row: row.smoothed)]
        baselines = {f"Markov order {row.k}": row.smoothed for row in chosen} | {"interpolated": rows[-1].interpolated}
        log.plot(args.out, "genome.png", baselines, "base", found["chromosome"])
    print(f"log.jsonl, checkpoint (the model), checkpoints, held_out.fa, genome.json{picture} in {args.out}")
    below = [row.k for row in rows if bits < row.smoothed]
    # a two-sided model of order 1 sees two bases, as the other kind of order 2 does
    needed = range(min(3 if chromosome.is_causal else 2, len(rows)))
    verdict = f"below the Markov models of orders {', '.join(map(str, below))}"
    if not set(below) >= set(needed):
        verdict = f"not below the Markov models of orders 0 to {needed[-1]}"
    lowest = min(rows, key=lambda row: row.interpolated)
    print(
        f"done: held-out {bits:.4f} bits per base, {verdict}; all orders to {lowest.k} interpolated {lowest.interpolated:.4f}; "
        f"{len(steps)} steps in {trainer.done.seconds:.0f} s{trainer.remark}"
    )
    return 1 if args.expect_below_markov and verdict.startswith("not") else 0


if __name__ == "__main__":
    sys.exit(run_safely(main))
