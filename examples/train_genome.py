"""Train a base-level LongNet on a bacterium's whole chromosome, and compare it with Markov models of the same held-out bases.

    python examples/train_genome.py                              # one CPU: context 16,384; minutes on 2 cores
    python examples/train_genome.py --objective masked           # 15 % of the bases hidden, attention both ways
    python examples/train_genome.py --scale gpu --minutes 3      # one H200: 1,048,576 bases in one sequence, bf16, compiled, checkpointed
    torchrun --nproc_per_node=4 examples/train_genome.py --scale gpu --context-parallel 4 --fsdp  # the same sequence over 4 GPUs

The chromosome is in the wheel of pyrodigal (``pip install pyrodigal==3.7.1``); another comes with ``--fasta``. The last 15 % are held out.
Writes ``genome.json`` (settings, every step, results), ``genome.png`` (the curve and the Markov models) and a checkpoint to ``--out``.
Last line: ``done: held-out … bits per base, below the Markov models of orders …``; exit code 1 if it is not below orders 0 to 2, or with
masks 0 and 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# threads that wait for each other sleep instead of spinning: five times faster where the cores are shared with other work
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import _markov
import torch
import torch.distributed as dist
from _genome import LETTERS, Chromosome, GenomeLM, find_fasta, geometric_branches, read_fasta
from _measure import flops_per_base, peak_flops, plot
from _memory import peak_memory
from _muon import Muon
from _parallel import Processes

from dilated_attention.models import LongNetConfig

SCALES: dict[str, dict[str, Any]] = {
    "cpu": {"length": 16_384, "short_length": 2048, "layers": 3, "embed_dim": 128, "heads": 4, "first_segment": 512}
    | {"dropout": 0.0, "short_share": 0.8},
    "gpu": {"length": 1_048_576, "short_length": 65_536, "layers": 12, "embed_dim": 512, "heads": 8, "first_segment": 2048}
    # at a 50th of its parameters and of the bases, 29 times through them: 1.98 held-out bits and rising without dropout, 1.96 with it
    | {"dropout": 0.2, "short_share": 0.5, "compile": True, "checkpoint": True},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fasta", type=Path, help="a FASTA file, plain or .gz (default: the chromosome in pyrodigal's wheel)")
    parser.add_argument("--objective", choices=("causal", "masked"), default="causal")
    parser.add_argument("--scale", choices=tuple(SCALES), default="cpu", help="defaults of the options that follow")
    parser.add_argument("--length", type=int, help="bases of a training sequence")
    parser.add_argument("--short-length", type=int, help="bases of the first ones: many small steps before the long sequences")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--embed-dim", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--first-segment", type=int, help="the shortest segment; others are 4 times the one before, up to the length")
    parser.add_argument("--segment-lengths", type=int, nargs="+", help="of the branches, instead of --first-segment")
    parser.add_argument("--dilation-rates", type=int, nargs="+")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile of the blocks")
    parser.add_argument("--checkpoint", action=argparse.BooleanOptionalAction, help="keep only each block's input for the backward")
    parser.add_argument("--kmer", type=int, default=6, help="an input is a base with its k - 1 nearest; 1: the base alone")
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--both-strands", action=argparse.BooleanOptionalAction, default=True, help="train on the reverse complement, too")
    parser.add_argument("--held-out", type=float, default=0.15, help="share of the chromosome at its end")
    parser.add_argument("--minutes", type=float, default=8.0, help="length of the training, without compilation and evaluation")
    parser.add_argument("--steps", type=int, help="a number of steps instead")
    parser.add_argument("--short-share", type=float, help="share of the training with --short-length; 0: none")
    parser.add_argument("--evaluations", type=int, default=8, help="of the held-out part while training")
    parser.add_argument("--evaluate-share", type=int, default=8, help="those read every n-th window; the last one reads all")
    parser.add_argument("--markov-order", type=int, default=12, help="the highest; each takes seconds on a CPU")
    parser.add_argument("--context-parallel", type=int, default=1, metavar="N", help="processes that share each sequence")
    parser.add_argument("--layout", default="contiguous", help="how they share it: contiguous, zigzag or striped")
    parser.add_argument("--fsdp", action="store_true", help="shard parameters over all processes (FSDP2)")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--peak-tflops", type=float, help="of one device, for the share that is used")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/genome"))
    args = parser.parse_args()
    for name, value in SCALES[args.scale].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if (args.segment_lengths is None) != (args.dilation_rates is None):
        parser.error("--segment-lengths and --dilation-rates belong together: give both, or --first-segment")
    if args.segment_lengths is None:
        args.segment_lengths, args.dilation_rates = geometric_branches(args.length, args.first_segment)
    return args


def learning_rate(progress: float) -> float:
    """Factor of the highest rate at a fraction of the training: a short warm-up, then a cosine to a twentieth."""
    warm_up = min(1.0, (progress + 0.002) / 0.04)
    return warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def optimizers_of(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for embedding, output and all vectors; the same rate serves both."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and ".blocks." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or ".blocks." not in name]
    return [Muon(inner, lr=lr), torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)]


def precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


@dataclass
class Run:
    """A training: model, data, processes and what was measured."""

    args: argparse.Namespace
    processes: Processes
    chromosome: Chromosome
    model: GenomeLM
    parallel: torch.nn.Module
    # of each step: its length, seconds it took, bits per base of the training sequence
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    # (steps done, seconds of training, bits per base of the held-out part)
    evaluations: list[tuple[int, float, float]] = field(default_factory=list)
    warm_up_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds, _ in self.steps)

    @property
    def lengths(self) -> list[int]:
        return [self.args.short_length, self.args.length] if self.args.short_share > 0 else [self.args.length]

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Of one whole sequence (N,), in nats; each process computes its shard."""
        tokens, wanted = self.processes.shard(inputs[None], targets[None])
        with precision(self.processes.device):
            return self.parallel(tokens, targets=wanted, seq_len=len(inputs))

    def progress(self) -> float:
        done = len(self.steps) / self.args.steps if self.args.steps else self.seconds / (60 * self.args.minutes)
        if not self.processes.distributed:
            return done
        # one clock for all: a process that stopped a step early would leave the others waiting
        shared = torch.tensor(done, device=self.processes.device, dtype=torch.float64)
        dist.broadcast(shared, src=0)
        return float(shared)

    def warm_up(self) -> None:
        """A forward and backward of each length, whose gradients are dropped: kernels are compiled and chosen before the clock runs."""
        start = time.perf_counter()
        for length in self.lengths:
            self.loss(*self.chromosome.random_window(length, torch.Generator().manual_seed(0))).backward()
            self.model.zero_grad(set_to_none=True)
        self.warm_up_seconds = time.perf_counter() - start

    def train(self) -> None:
        args, optimizers = self.args, optimizers_of(self.model, self.args.lr)
        if args.compile:
            self.warm_up()
            print(f"compiled in {self.warm_up_seconds:.0f} s", flush=True)
        # processes that share a sequence draw the same ones
        generator = torch.Generator().manual_seed(args.seed * 1000 + self.processes.row)
        printed = 0.0
        while (progress := self.progress()) < 1:
            start = time.perf_counter()
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = args.lr * learning_rate(progress)
            length = args.short_length if progress < args.short_share else args.length
            loss = self.loss(*self.chromosome.random_window(length, generator))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            # waits for the device
            bits = loss.item() / math.log(2)
            self.steps.append((length, time.perf_counter() - start, bits))
            if progress >= (len(self.evaluations) + 1) / (args.evaluations + 1):
                self.evaluate(length, args.evaluate_share)
            if self.seconds > printed + 10:
                printed = self.seconds
                recent = [bits for _, _, bits in self.steps[-20:]]
                print(f"{printed:5.0f} s, step {len(self.steps)}, {sum(recent) / len(recent):.4f} bits/base", flush=True)

    @torch.no_grad()
    def evaluate(self, length: int, share: int = 1) -> float:
        """Bits per base over every ``share``-th window of the held-out part; while sequences are short, so are these windows."""
        self.model.eval()
        total, count = 0.0, 0
        # compiled code is for training
        with torch.compiler.set_stance("force_eager"):
            for inputs, targets in self.chromosome.held_out(length, share):
                scored = int((targets != -100).sum())
                total, count = total + self.loss(inputs, targets).item() * scored, count + scored
        self.model.train()
        bits = total / count / math.log(2)
        self.evaluations.append((len(self.steps), self.seconds, bits))
        print(
            f"{self.seconds:5.0f} s, step {len(self.steps)}, held out: {bits:.4f} bits/base over {count:,} in windows of {length:,}",
            flush=True,
        )
        return bits

    def speed(self) -> dict[str, Any]:
        """Of the steps at the last length, which is the full one, at their median: the first pays for what is chosen and allocated once."""
        args, world = self.args, self.processes.rows * self.args.context_parallel
        length = self.steps[-1][0]
        seconds = statistics.median([seconds for n, seconds, _ in self.steps if n == length])
        bases = length * self.processes.rows / seconds
        peak, source = peak_flops(self.processes.device, args.peak_tflops)
        flops = flops_per_base(self.model, length)
        memory = torch.tensor(peak_memory(self.processes.device) / 2**30, device=self.processes.device)
        if self.processes.distributed:
            dist.all_reduce(memory, dist.ReduceOp.MAX)
        return {
            "bases a sequence": length,
            "seconds a step (median)": seconds,
            "bases/s": bases,
            "FLOPs a base": flops,
            "TFLOP/s a device": bases * flops / world / 1e12,
            "MFU": bases * flops / world / peak,
            "peak TFLOP/s": peak / 1e12,
            "peak from": source,
            "peak memory GiB": float(memory),
        }


def build(args: argparse.Namespace, processes: Processes) -> tuple[GenomeLM, torch.nn.Module]:
    """The model, and the same with its gradients averaged over processes."""
    config = LongNetConfig(
        vocab_size=len(LETTERS),
        embed_dim=args.embed_dim,
        num_layers=args.layers,
        num_heads=args.heads,
        segment_lengths=tuple(args.segment_lengths),
        dilation_rates=tuple(args.dilation_rates),
        is_causal=args.objective == "causal",
        dropout=args.dropout,
        tie_embeddings=False,
    )
    options: dict[str, Any] = {"backend": args.backend, "checkpoint_activations": bool(args.checkpoint), "device": processes.device}
    if args.context_parallel > 1:
        # each waits for the others' compilers
        options["timeout"] = 600.0
    model = GenomeLM(config, k=args.kmer, **options, **processes.model_options())
    if args.compile:
        # before FSDP2, whose hooks around a block are no part of it
        for block in model.decoder.blocks:
            block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
    return model, processes.parallel(model)


def main() -> int:
    args = arguments()
    processes = Processes(args.context_parallel, args.layout, args.fsdp)
    # ranks other than the first stay silent
    with contextlib.redirect_stdout(sys.stdout if processes.rank == 0 else open(os.devnull, "w")):
        torch.manual_seed(args.seed)
        name, symbols = read_fasta(find_fasta(args.fasta))
        symbols = symbols.to(processes.device)
        cut = round(len(symbols) * (1 - args.held_out))
        chromosome = Chromosome(symbols=symbols, cut=cut, is_causal=args.objective == "causal", k=args.kmer, both_strands=args.both_strands)
        model, parallel = build(args, processes)
        print(f"{name}: {cut:,} bases to train on, {len(symbols) - cut:,} held out")
        print(f"{model.num_parameters:,} parameters, branches {model.config.pattern.branches}, {args.objective}, length {args.length:,}")
        run = Run(args, processes, chromosome, model, parallel)
        run.train()
        # taken before the evaluation of all windows, which does not belong to the training
        speed = run.speed()
        bits = run.evaluate(args.length)
        weights = processes.weights(model) if processes.is_spread else model.state_dict()
        code = report(run, name, bits, speed, weights) if processes.rank == 0 else 0
    if processes.distributed:
        dist.destroy_process_group()
    return code


def report(run: Run, name: str, bits: float, speed: dict[str, Any], weights: dict[str, torch.Tensor]) -> int:
    args, chromosome, device = run.args, run.chromosome, run.processes.device
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
    for key, value in speed.items():
        form = "" if isinstance(value, str) else ",.4g" if abs(value) < 1000 else ",.0f"
        print(f"{key}: {value:{form}}")
    args.out.mkdir(parents=True, exist_ok=True)
    log = {
        "chromosome": name,
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "processes": run.processes.rows * args.context_parallel,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "parameters": run.model.num_parameters,
        "held out bits per base": bits,
        "speed": speed,
        "compile seconds": run.warm_up_seconds,
        "markov": [dataclasses.asdict(row) for row in rows],
        "steps": run.steps,
        "evaluations": run.evaluations,
    }
    (args.out / "genome.json").write_text(json.dumps(log) + "\n")
    save_checkpoint(run.model, args, weights)
    plot(log, args.out / "genome.png")
    print(f"genome.json, genome.png and checkpoint in {args.out}")
    below = [row.k for row in rows if bits < row.smoothed]
    # a two-sided model of order 1 sees two bases, as the other kind of order 2 does
    needed = 2 if chromosome.is_causal else 1
    if not set(below) >= set(range(needed + 1)):
        print(
            f"not below the Markov models of orders 0 to {needed}: held-out {bits:.4f} bits per base after {len(run.steps)} steps",
            file=sys.stderr,
        )
        return 1
    lowest = min(rows, key=lambda row: row.interpolated)
    print(
        f"done: held-out {bits:.4f} bits per base, below the Markov models of orders {', '.join(map(str, below))}; "
        f"all orders to {lowest.k} interpolated {lowest.interpolated:.4f}; {len(run.steps)} steps in {run.seconds:.0f} s"
    )
    return 0


def save_checkpoint(model: GenomeLM, args: argparse.Namespace, weights: dict[str, torch.Tensor]) -> None:
    """For ``GenomeLM.from_pretrained(folder, k=…)``, on one process or several."""
    alone = GenomeLM(model.config, k=args.kmer, device="meta")
    # what FSDP2 gathers are views of its buffers, and safetensors stores whole tensors
    alone.load_state_dict({key: value.cpu().clone() for key, value in weights.items()}, assign=True)
    alone.save_pretrained(args.out / "checkpoint")


if __name__ == "__main__":
    sys.exit(main())
