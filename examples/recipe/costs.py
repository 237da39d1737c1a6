"""What a training costs: its FLOPs by formula, the share of the device's that it reaches, its memory; and the plot of its loss."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import torch

from dilated_attention.models import LongNetLM
from recipe import log

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


def plot(run: Path, name: str, baselines: dict[str, float], unit: str, title: str) -> None:
    """Draws the bits of a run's log over time, and those of ``baselines`` as lines, into a picture in its folder."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    lines = log.read(run)
    trained, held_out = ([(line["seconds"], float(line[key])) for line in lines if key in line] for key in ("train/bits", "held_out/bits"))
    # sequences differ by more than a model learns in many steps
    span = max(1, len(trained) // 40)
    means = [sum(bits for _, bits in trained[i - span : i]) / span for i in range(span, len(trained) + 1)]
    axes.plot([seconds for seconds, _ in trained[span - 1 :]], means, lw=1, color="#56b4e9", label=f"training, mean of {span} steps")
    axes.plot(*zip(*held_out, strict=True), "o-", ms=4, color="#d55e00", label="held out")
    # the first steps are above chance, and may leave the picture
    compared = [*baselines.values(), *(bits for _, bits in held_out)]
    highest, lowest = max(compared), min(*means, *compared)
    bottom, top = (limit + 0.05 * sign * (highest - lowest) for limit, sign in ((lowest, -1), (highest, 1)))
    place = bottom
    for label, value in sorted(baselines.items(), key=lambda item: item[1]):
        # next to its line, or above the label below
        place = max(value, place + 0.045 * (top - bottom))
        axes.axhline(value, color="black", lw=0.8)
        axes.annotate(f"{label} {value:.3f}", (1.01, place), xycoords=axes.get_yaxis_transform(), va="center", fontsize="small")
    axes.set(xlabel="seconds of training", ylabel=f"bits per {unit}", ylim=(bottom, top))
    axes.set_title(textwrap.fill(title, 60), fontsize="small")
    axes.legend(fontsize="small", loc="best")
    figure.savefig(run / name, dpi=100)
