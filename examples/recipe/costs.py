"""What a training costs: its FLOPs by formula, the share of the device's that it reaches, its memory; and the plot of its loss."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path
from typing import Any

import torch

from dilated_attention.models import LongNetLM

# dense bf16 TFLOP/s that the makers state; another machine is measured
PEAK_TFLOPS = {"H200": 989.4, "H100": 989.4, "A100": 312.0, "B200": 2250.0}


def flops_per_token(model: LongNetLM, length: int) -> float:
    """Of a training step, without recomputation: 6 for each weight of a matrix product, 12·D for each pair of query and key."""
    config = model.config
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name)
    pairs = sum(layer.pattern.pairs(length, config.num_heads, is_causal=config.is_causal) for layer in config.layers)
    return 6 * weights + 12 * config.head_dim * pairs / length


def peak_flops(device: torch.device, stated: float | None) -> tuple[float, str]:
    """(FLOP/s of one device, where the figure is from)."""
    if stated is not None:
        return stated * 1e12, "--peak-tflops"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, tflops in PEAK_TFLOPS.items():
            if known in name:
                return tflops * 1e12, f"{name}, bf16 as stated by its maker"
    # enough to fill it; a CPU core takes a second for the larger ones
    size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    x = torch.randn(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        (x @ x)[0, 0].item()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds), f"a product of two {size} x {size} matrices on this machine"


def plot(log: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps, seconds = log["steps"], 0.0
    times = [seconds := seconds + step for _, step, _ in steps]
    # sequences differ by more than a model learns in many steps
    span = max(1, len(steps) // 40)
    means = [sum(bits for _, _, bits in steps[i - span : i]) / span for i in range(span, len(steps) + 1)]
    axes.plot(times[span - 1 :], means, lw=1, color="#56b4e9", label=f"training, mean of {span} sequences")
    held_out = log["evaluations"]
    axes.plot([t for _, t, _ in held_out], [bits for _, _, bits in held_out], "o-", ms=4, color="#d55e00", label="held out")
    best = min(log["markov"], key=lambda row: row["smoothed"])
    shown = [log["markov"][k] for k in (2, 4, 6) if k < len(log["markov"])]
    lines = [(row["smoothed"], f"Markov order {row['k']}") for row in {row["k"]: row for row in (*shown, best)}.values()]
    lines.append((log["markov"][-1]["interpolated"], "interpolated"))
    # the first steps are above chance, and may leave the picture
    highest = max(2.05, *(bits for _, _, bits in held_out))
    lowest = min(log["held out bits per base"], *means, *(value for value, _ in lines))
    bottom, top = (limit + 0.05 * sign * (highest - lowest) for limit, sign in ((lowest, -1), (highest, 1)))
    place = bottom
    for value, label in sorted(lines):
        # next to its line, or above the label below
        place = max(value, place + 0.045 * (top - bottom))
        axes.axhline(value, color="black", lw=0.8, ls="--" if label == "interpolated" else "-")
        axes.annotate(f"{label} {value:.3f}", (1.01, place), xycoords=axes.get_yaxis_transform(), va="center", fontsize="small")
    axes.set(xlabel="seconds of training", ylabel="bits per base", ylim=(bottom, top))
    axes.set_title(textwrap.fill(log["chromosome"], 60), fontsize="small")
    axes.legend(fontsize="small", loc="best")
    figure.savefig(path, dpi=100)
