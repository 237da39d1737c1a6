"""Train a byte-level LongNet on Python's own source text, at a context of 8,192, and show what came of it.

    python examples/train_longnet.py                              # CPU or GPU, whatever is there; about 4 minutes on 2 CPU cores
    torchrun --nproc_per_node=2 examples/train_longnet.py         # data-parallel
    torchrun --nproc_per_node=4 examples/train_longnet.py --context-parallel 2 --fsdp  # 2 processes a sequence, FSDP2 over all 4
    python examples/train_longnet.py --data my.txt --seconds 600  # your own text

Writes a checkpoint, a plot of the loss and a picture of the attention pattern to ``--out``, then runs the memory test of
``extreme_length.py``. Last line: ``done: validation … bits per byte, below unigram … and bigram …``; exit code 1 if it is not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

# threads that wait for each other sleep instead of spinning: five times faster where the cores are shared with other work
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import _text
import torch
import torch.distributed as dist
from _parallel import Processes
from tqdm import tqdm

from dilated_attention import DilatedPattern, create_model, explain_backend
from dilated_attention.models import LongNetLM


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a text file or a folder of them (default: Python's standard library)")
    parser.add_argument("--preset", default="longnet-tiny")
    parser.add_argument("--context", type=int, default=8192, help="bytes a training sequence")
    parser.add_argument("--batch", type=int, help="sequences a step and row of processes (default: 1 on a CPU, 8 on a GPU)")
    parser.add_argument("--context-parallel", type=int, default=1, metavar="N", help="processes that share each sequence")
    parser.add_argument("--layout", default="contiguous", help="how they share it: contiguous, zigzag or striped")
    parser.add_argument("--fsdp", action="store_true", help="shard parameters over all processes (FSDP2) instead of copying them (DDP)")
    parser.add_argument("--seconds", type=float, default=150.0, help="length of the training")
    parser.add_argument("--steps", type=int, help="a number of steps instead")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/longnet"))
    parser.add_argument("--history", type=Path, help="a file for [seconds, bits per byte] of every step, as JSON")
    parser.add_argument("--skip-memory-test", action="store_true")
    return parser.parse_args()


def learning_rate(progress: float) -> float:
    """Factor of the highest rate at a fraction of the training: a short warm-up, then a cosine to a twentieth."""
    warm_up = min(1.0, (progress + 0.002) / 0.04)
    return warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def optimizers_of(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for the embedding and all vectors; the same rate serves both."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embedding" in name]
    muon = torch.optim.Muon(inner, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)]


def train(model: LongNetLM, text: torch.Tensor, args: argparse.Namespace, processes: Processes) -> list[tuple[float, float]]:
    """(seconds, bits per byte) of every step."""
    device = processes.device
    parallel = processes.parallel(model)
    optimizers = optimizers_of(model, args.lr)
    # processes that share a sequence draw the same ones
    generator = torch.Generator().manual_seed(args.seed * 1000 + processes.row)
    batch = args.batch or (8 if device.type == "cuda" else 1)
    history: list[tuple[float, float]] = []
    start = time.perf_counter()
    total = args.steps or int(args.seconds)
    with tqdm(total=total, unit="step" if args.steps else "s", disable=processes.rank != 0, dynamic_ncols=True, mininterval=1.0) as bar:
        while True:
            elapsed = time.perf_counter() - start
            progress = torch.tensor(len(history) / args.steps if args.steps else elapsed / args.seconds, device=device)
            if processes.distributed:
                # one clock for all: a process that stopped a step early would leave the others waiting
                dist.broadcast(progress, src=0)
            if progress >= 1:
                break
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = args.lr * learning_rate(progress.item())
            tokens = _text.random_windows(text, args.context, batch, generator).to(device)
            inputs, targets = processes.shard(tokens[:, :-1], tokens[:, 1:])
            with precision(device):
                loss = parallel(inputs, targets=targets, seq_len=args.context)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            history.append((time.perf_counter() - start, loss.item() / math.log(2)))
            speed = len(history) * batch * args.context * processes.rows / history[-1][0]
            bar.n = len(history) if args.steps else min(total, int(history[-1][0]))
            bar.set_postfix_str(f"step {len(history)}, {history[-1][1]:.3f} bits/byte, {speed:,.0f} tokens/s")
    return history


def precision(device: torch.device) -> contextlib.AbstractContextManager[None]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


@torch.no_grad()
def validate(model: LongNetLM, text: torch.Tensor, context: int, device: torch.device) -> float:
    """Mean bits per byte over 16 windows of the held-out text."""
    model.eval()
    losses = []
    for tokens in _text.windows(text, context, 16):
        with precision(device):
            losses.append(model(tokens[None, :-1].to(device), targets=tokens[None, 1:].to(device)).item())
    return sum(losses) / len(losses) / math.log(2)


def check_checkpoint(model: LongNetLM, folder: Path, tokens: torch.Tensor) -> None:
    """Write, load back, and compare logits bit for bit."""
    model.eval().save_pretrained(folder)
    loaded = LongNetLM.from_pretrained(folder, device=tokens.device)
    with torch.no_grad():
        if not torch.equal(model(tokens), loaded(tokens)):
            raise SystemExit(f"the checkpoint in {folder} does not give the model's own logits back")


def plot(history: list[tuple[float, float]], baselines: dict[str, float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([t for t, _ in history], [loss for _, loss in history], lw=1, label="training loss")
    for (name, value), style in zip(baselines.items(), ("--", ":", "-."), strict=True):
        axes.axhline(value, ls=style, color="black", lw=1, label=f"{name} {value:.2f}")
    axes.set(xlabel="seconds", ylabel="bits per byte", ylim=(0, 8), title="LongNet on Python's source text")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    args = arguments()
    processes = Processes(args.context_parallel, args.layout, args.fsdp)
    device, rank = processes.device, processes.rank
    # ranks other than the first stay silent
    with contextlib.redirect_stdout(sys.stdout if rank == 0 else open(os.devnull, "w")):
        torch.manual_seed(args.seed)
        # XPOS's scale leaves the range of bfloat16 beyond 70,000 positions, unless it decays more slowly
        slower = {"xpos_scale_base": args.context / 128} if args.context > 65536 else {}
        model = create_model(args.preset, backend=args.backend, device=device, **processes.model_options(), **slower)
        assert isinstance(model, LongNetLM)
        config = model.config
        train_text, valid_text, source = _text.read(args.data)
        unigram, bigram = _text.entropies(valid_text)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        kind = {"head_dim": config.head_dim, "num_heads": config.num_heads, "is_causal": True, "dtype": dtype}
        print(explain_backend(device=device, backend=args.backend, **kind), "\n")
        print(f"{args.preset}: {model.num_parameters:,} parameters, branches {config.pattern.branches}, context {args.context}")
        print(f"{source}: {len(train_text):,} bytes to train on, {len(valid_text):,} held out")
        history = train(model, train_text, args, processes)
        if device.type == "cuda":
            print(f"peak memory of a process in training: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")
        if processes.is_spread:
            # the first process reports alone, on a model of its own
            weights = processes.weights(model)
            model = create_model(args.preset, backend=args.backend, device=device, **slower)
            model.load_state_dict(weights)
        if rank == 0:
            if args.history:
                args.history.write_text(json.dumps(history))
            code = report(model, args, history, valid_text, {"unigram": unigram, "bigram": bigram}, device)
    if processes.distributed:
        dist.destroy_process_group()
    return code if rank == 0 else 0


def report(
    model: LongNetLM,
    args: argparse.Namespace,
    history: list[tuple[float, float]],
    valid_text: torch.Tensor,
    entropy: dict[str, float],
    device: torch.device,
) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    bits = validate(model, valid_text, args.context, device)
    sample = _text.windows(valid_text, min(args.context, 512), 2).to(device)
    check_checkpoint(model, args.out / "checkpoint", sample)
    plot(history, {"validation": bits, **entropy}, args.out / "loss.png")
    # drawn with segments a 16th as long: at full length one segment would fill a legible picture
    segments = [max(w // 16, r) for w, r in model.config.pattern.branches]
    drawn = DilatedPattern(segments, model.config.dilation_rates)
    drawn.show(256, min(model.config.num_heads, 4), is_causal=True, path=str(args.out / "pattern.png"))
    prompt = b"def read_lines(path, encoding='utf-8'):\n    "
    tokens = torch.tensor(list(prompt), device=device)[None]
    generator = torch.Generator(device).manual_seed(args.seed)
    written = model.generate(tokens, 160, temperature=0.7, top_k=40, generator=generator)[0].tolist()
    print(f"\nsample:\n{bytes(written).decode('utf-8', 'replace')}\n")
    print(f"checkpoint (loaded back, equal logits), loss.png and pattern.png (segments at a 16th) in {args.out}")
    code = 0
    if not args.skip_memory_test:
        # a process of its own: the highest memory use of this one is the training's
        print("\nextreme length:", flush=True)
        code = subprocess.run([sys.executable, str(Path(__file__).with_name("extreme_length.py"))], check=False).returncode
    figures = f"{bits:.3f} bits per byte; unigram {entropy['unigram']:.3f}, bigram {entropy['bigram']:.3f} of the same text"
    if bits >= min(entropy.values()):
        print(f"not below both: validation {figures} after {len(history)} steps", file=sys.stderr)
        return 1
    print(f"done: validation {figures}; {len(history)} steps in {history[-1][0]:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
