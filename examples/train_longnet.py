"""Train a byte-level LongNet on Python's own source text, at a context of 8,192, and show what came of it.

    python examples/train_longnet.py                              # CPU or GPU, whatever is there; about 4 minutes on 2 CPU cores
    python examples/train_longnet.py --data my.txt --minutes 600 --out runs/mine   # your own text, a file or a folder
    python examples/train_longnet.py --out runs/mine --resume auto                 # go on where it was stopped, by whatever
    torchrun --nproc_per_node=2 examples/train_longnet.py         # data-parallel
    torchrun --nproc_per_node=4 examples/train_longnet.py --context-parallel 2 --fsdp  # 2 processes a sequence, FSDP2 over all 4

Flags may stand in a file: ``--config run.toml``. ``--out`` gets ``log.jsonl`` and TensorBoard's curves while the run goes, a checkpoint
every ``--save-minutes`` and on Ctrl-C or SIGTERM, and at the end the model, a plot of the loss and a picture of the attention pattern;
then the memory test of ``extreme_length.py`` runs. Last line: ``done: validation … bits per byte, … unigram … bigram …``.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# threads that wait for each other sleep instead of spinning: five times faster where the cores are shared with other work
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import _text
import torch
from _muon import optimizers_of
from recipe import log, settings
from recipe.costs import flops_per_token, peak_flops
from recipe.main import can_draw, run_safely
from recipe.processes import Processes, precision
from recipe.trainer import Lengths, Task, Trainer, generator_of

from dilated_attention import DilatedPattern, create_model, explain_backend
from dilated_attention.factory import MODEL_PRESETS
from dilated_attention.models import LongNetLM


def arguments() -> tuple[settings.Parser, argparse.Namespace]:
    whole = settings.number(int, 1)
    parser = settings.Parser(__doc__, free=("data", "validations", "skip_memory_test", "expect_below_bigram"))
    settings.add_common(parser, out="runs/longnet", lr=1e-2, minutes=2.5)
    parser.add_argument("--data", type=Path, help="a text file or a folder of them (default: Python's standard library)")
    parser.add_argument("--preset", default="longnet-tiny", help="of create_model, with a vocabulary of 256 or more")
    parser.add_argument("--layers", type=whole, help="instead of the preset's")
    parser.add_argument("--embed-dim", type=whole, help="the same")
    parser.add_argument("--heads", type=whole, help="the same")
    parser.add_argument("--segment-lengths", type=whole, nargs="+", help="branches, instead of those that follow from the context")
    parser.add_argument("--dilation-rates", type=whole, nargs="+", help="one for each segment length")
    parser.add_argument("--context", type=settings.number(int, 2), default=8192, help="bytes a training sequence")
    parser.add_argument("--first-context", type=settings.number(int, 2), help="of the first sequences, which double until --context")
    parser.add_argument("--batch", type=whole, help="sequences a step and row of processes (default: 1 on a CPU, 8 on a GPU)")
    parser.add_argument("--validations", type=settings.number(int, 0), default=4, help="on the way, on held-out text (default: 4)")
    parser.add_argument("--skip-memory-test", action="store_true")
    parser.add_argument("--expect-below-bigram", action="store_true", help="exit code 1 unless the validation is below both entropies")
    return parser, settings.parse(parser)


def build(args: argparse.Namespace, processes: Processes | None) -> LongNetLM:
    """The model over processes, or with None that of one process."""
    given = {"num_layers": args.layers, "embed_dim": args.embed_dim, "num_heads": args.heads}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if bool(args.segment_lengths) != bool(args.dilation_rates):
        one, other = ("dilation-rates", "segment-lengths") if args.dilation_rates else ("segment-lengths", "dilation-rates")
        raise ValueError(f"--{one} is given and --{other} is not; give both, one rate for each segment, or neither")
    if args.segment_lengths:
        options |= {"segment_lengths": tuple(args.segment_lengths), "dilation_rates": tuple(args.dilation_rates)}
    elif args.context > max(getattr(MODEL_PRESETS.get(args.preset), "segment_lengths", None) or [args.context]):
        # the preset's branches end before the context does
        options["context_length"] = args.context
    positions = getattr(MODEL_PRESETS.get(args.preset), "positions", "none")
    if positions == "xpos" and args.context > 65536:
        # XPOS's scale leaves the range of bfloat16 beyond 70,000 positions, unless it decays more slowly
        options["xpos_scale_base"] = args.context / 128
    elif positions == "rotary" and args.context > 32768:
        options["rotary_base"] = settings.rotary_base(args.context)
    options["backend"] = args.backend
    device = processes.device if processes is not None else "meta"
    spread = processes.model_options() if processes is not None else {}
    model = create_model(args.preset, device=device, **options, **spread)
    if not isinstance(model, LongNetLM) or not model.config.is_causal:
        raise ValueError(f"--preset is {args.preset}, which is no causal language model; expected one such as longnet-tiny or longnet-125m")
    return model


def task_of(
    args: argparse.Namespace, processes: Processes, parallel: torch.nn.Module, model: LongNetLM, train: torch.Tensor, valid: torch.Tensor
) -> Task:
    device, lengths = processes.device, Lengths(args.first_context, args.context)

    def loss(sequences: Sequence[int], progress: float) -> torch.Tensor:
        # several short sequences stand for one, so that every step has as many bytes
        length = lengths.at(progress)
        windows = [_text.random_windows(train, length, args.context // length, generator_of(args.seed, i)) for i in sequences]
        tokens = torch.cat(windows).to(device)
        inputs, targets = processes.shard(tokens[:, :-1], tokens[:, 1:])
        with precision(device):
            return parallel(inputs, targets=targets, seq_len=length)

    def evaluate(progress: float) -> float:
        """Mean bits per byte over 16 windows of the held-out text, over 4 on the way."""
        losses = []
        for tokens in _text.windows(valid, args.context, 16 if progress == 1 else 4).to(device):
            inputs, targets = processes.shard(tokens[None, :-1], tokens[None, 1:])
            with precision(device):
                losses.append(parallel(inputs, targets=targets, seq_len=args.context).item())
        return sum(losses) / len(losses) / math.log(2)

    return Task(
        loss=loss,
        evaluate=evaluate,
        tokens=lambda _: args.context,
        length=lengths.at,
        flops=lambda length: flops_per_token(model, length),
        unit="byte",
        data=hashlib.sha256(train.numpy().tobytes()).hexdigest()[:16],
        evaluations=args.validations,
        batch=args.batch or (8 if device.type == "cuda" else 1),
    )


def main() -> int:
    parser, args = arguments()
    with settings.wrong_usage(parser):
        # all that may be wrong with what was asked for shows before a process waits for another, or a file is written
        if args.data and args.data.is_dir() and args.out.resolve().is_relative_to(args.data.resolve()):
            raise ValueError(f"--out {args.out} is in --data {args.data}, and would be read as text; give another --out")
        train_text, valid_text, source = _text.read(args.data, args.context + 1)
        processes = Processes(args.context_parallel, args.layout, args.fsdp)
        torch.manual_seed(args.seed)
        model = build(args, processes)
        config, device = model.config, processes.device
        parallel = processes.parallel(model)
        peak, _ = peak_flops(device, None)
        task = task_of(args, processes, parallel, model, train_text, valid_text)
        trainer = Trainer(args, processes, model, parallel, optimizers_of(model, args.lr), task, peak)
    unigram, bigram = _text.entropies(valid_text)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kind = {"head_dim": config.head_dim, "num_heads": config.num_heads, "is_causal": True, "dtype": dtype}
    print(explain_backend(device=device, backend=args.backend, **kind), "\n")
    reads = f"branches {config.pattern.branches}" if config.kind == "dilated" else f"{config.kind} attention"
    print(f"{args.preset}: {model.num_parameters:,} parameters, {reads}, context {args.context}")
    print(f"{source}: {len(train_text):,} bytes to train on, {len(valid_text):,} held out")
    trainer.train()
    if trainer.stopped_by:
        return trainer.report_stop(lambda: build(args, None))
    print(f"peak memory of a process in training: {trainer.peak_memory():.2f} GiB")
    trainer.save_model(lambda: build(args, None))
    bits = trainer.evaluate()
    if processes.rank:
        return 0
    return report(args, trainer, bits, valid_text, {"unigram": unigram, "bigram": bigram})


def report(args: argparse.Namespace, trainer: Trainer, bits: float, valid_text: torch.Tensor, entropy: dict[str, float]) -> int:
    run, device = args.out, trainer.processes.device
    sample = _text.windows(valid_text, min(args.context, 512), 2)
    model = LongNetLM.from_pretrained(run / "checkpoint", device=device, backend=args.backend)
    pictures = ""
    if can_draw():
        pictures = ", loss.png"
        log.plot(run, "loss.png", entropy, "byte", f"{args.preset} on {args.data.name if args.data else 'Python source text'}")
        if model.config.kind == "dilated":
            pictures += " and pattern.png (segments at a 16th)"
            # drawn with segments a 16th as long: at full length one segment would fill a legible picture
            segments = [max(w // 16, r) for w, r in model.config.pattern.branches]
            drawn = DilatedPattern(segments, model.config.dilation_rates)
            drawn.show(256, min(model.config.num_heads, 4), is_causal=True, path=str(run / "pattern.png"))
    prompt = sample[0, :64].tolist() if args.data else list(b"def read_lines(path, encoding='utf-8'):\n    ")
    generator = torch.Generator(device).manual_seed(args.seed)
    tokens = torch.tensor(prompt, device=device)[None]
    written = model.generate(tokens, 160, temperature=0.7, top_k=40, generator=generator)[0].tolist()
    print(f"\nsample:\n{bytes(token & 255 for token in written).decode('utf-8', 'replace')}\n")
    print(f"log.jsonl, checkpoint (the model, loaded back), checkpoints{pictures} in {run}")
    code = 0
    if not args.skip_memory_test:
        # a process of its own: the highest memory use of this one is the training's
        print("\nextreme length:", flush=True)
        script = Path(__file__).with_name("extreme_length.py")
        # 2^20 tokens in a quarter of a minute on two cores; by itself the script takes two fifths of the memory
        code = subprocess.run([sys.executable, str(script), "--budget-gib", "2.5"], check=False).returncode
    is_below = bits < min(entropy.values())
    verdict = "below" if is_below else "not below both"
    figures = f"{bits:.3f} bits per byte, {verdict}: unigram {entropy['unigram']:.3f}, bigram {entropy['bigram']:.3f} of the same text"
    print(f"done: validation {figures}; {trainer.done.step} steps in {trainer.done.seconds:.0f} s{trainer.remark}")
    return 1 if args.expect_below_bigram and not is_below else code


if __name__ == "__main__":
    sys.exit(run_safely(main))
