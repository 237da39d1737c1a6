"""A tiny language model's loss by dtype, compared step by step with the same training in float32."""

from __future__ import annotations

import contextlib
import functools

import torch

from dilated_attention.bench.measure.skip import attempt
from dilated_attention.bench.report.rows import Row
from dilated_attention.factory import create_model


def losses(num_positions: int, steps: int, device: torch.device) -> list[Row]:
    """Returns a row for each dtype: ``first`` and ``last`` loss in nats per token; ``mean`` and ``largest`` difference from float32's.

    float16 and bfloat16 train from the same weights on the same data under autocast, with float32 weights. float64 uses float64 everywhere.
    """
    exact = _trained(num_positions, steps, device, torch.float32)
    rows = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        found = attempt(functools.partial(_trained, num_positions, steps, device, dtype), foreign=True)
        values = {}
        if found.value:
            off = [abs(a - b) for a, b in zip(found.value, exact, strict=True)]
            values = {"first": found.value[0], "last": found.value[-1], "mean": sum(off) / steps, "largest": max(off)}
        name = str(dtype).removeprefix("torch.")
        rows.append(Row(name=name, case={"part": "loss", "dtype": name, "N": num_positions}, values=values, note=found.note))
    return rows


def _trained(num_positions: int, steps: int, device: torch.device, dtype: torch.dtype) -> list[float]:
    """Returns the loss before each step of AdamW."""
    torch.manual_seed(0)
    # weights are drawn in float32, so that all dtypes start with the same ones
    model = create_model("longnet-tiny", segment_lengths=(num_positions // 8, num_positions), dilation_rates=(1, 4))
    model = model.to(device=device, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found: list[float] = []
    for step in range(steps):
        # bytes, each 1, 2 or 3 above the previous one: something that can be learned
        draw = torch.randint(1, 4, (2, num_positions), generator=torch.Generator().manual_seed(step))
        tokens = (draw.cumsum(1) % 256).to(device)
        with torch.autocast(device.type, dtype) if dtype.itemsize == 2 else contextlib.nullcontext():
            logits = model(tokens[:, :-1])
        logits = getattr(logits, "logits", logits)
        wide = logits if logits.dtype is torch.float64 else logits.float()
        loss = torch.nn.functional.cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten())
        found.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return found
