"""A tiny language model's loss by dtype, step by step, compared with the same training in float32."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from dilated_attention.bench.measure.skip import Attempt, attempt
from dilated_attention.bench.report.rows import Row
from dilated_attention.factory import create_model
from dilated_attention.modules import DilatedAttention


def losses(num_positions: int, steps: int, device: torch.device, extra: dict[str, Any]) -> list[Row]:
    """Returns a row for each dtype and step: ``loss`` in nats per token, and ``difference`` from float32's at that step.

    float16 and bfloat16 train from the same weights on the same data under autocast, with float32 weights. float64 uses float64 everywhere.
    fp8 has no gradients: it is the loss of the float32 training's weights at that step, with attention in 8-bit products.
    """
    data = [_tokens(num_positions, device, step) for step in range(steps)]
    columns: dict[str, Attempt[list[float]]] = {"fp8": Attempt([])}
    columns["float32"] = Attempt(_trained(data, device, torch.float32, columns))
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        train = functools.partial(_trained, data, device, dtype, None)
        columns[str(dtype).removeprefix("torch.")] = attempt(train, foreign=True)
    exact = columns["float32"].value or []
    rows = []
    for name, column in columns.items():
        case = {"part": "loss", "dtype": name, "N": num_positions} | extra
        if column.value is None:
            rows.append(Row(name=name, case=case, note=column.note))
        for step, loss in enumerate(column.value or []):
            rows.append(Row(name=name, case=case | {"step": step}, values={"loss": loss, "difference": loss - exact[step]}))
    return rows


def _tokens(num_positions: int, device: torch.device, step: int) -> torch.Tensor:
    """Returns (2, N) bytes, each 1, 2 or 3 above the previous one: something that can be learned."""
    generator = torch.Generator().manual_seed(step)
    return (torch.randint(1, 4, (2, num_positions), generator=generator).cumsum(1) % 256).to(device)


def _trained(
    data: list[torch.Tensor], device: torch.device, dtype: torch.dtype, columns: dict[str, Attempt[list[float]]] | None
) -> list[float]:
    """Returns the loss before each step of AdamW; adds the loss of the same weights in 8 bits to ``columns``."""
    torch.manual_seed(0)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    length = data[0].shape[1]
    # weights are drawn in float32, so that all dtypes start with the same ones
    model = create_model("longnet-tiny", segment_lengths=(length // 8, length), dilation_rates=(1, 4)).to(device=device, dtype=wide)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found: list[float] = []
    for tokens in data:
        if columns is not None and columns["fp8"].value is not None:
            mine = attempt(functools.partial(_in_8_bits, model, tokens), foreign=True)
            columns["fp8"] = Attempt(None, mine.note) if mine.value is None else Attempt([*columns["fp8"].value, mine.value])
        with torch.autocast(device.type, dtype) if dtype.itemsize == 2 else contextlib.nullcontext():
            loss = _loss(model, tokens)
        found.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return found


def _loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    logits = getattr(logits, "logits", logits)
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten())


def _in_8_bits(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    layers = [layer for layer in model.modules() if isinstance(layer, DilatedAttention)]
    try:
        for layer in layers:
            layer.precision = "fp8"
        with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16):
            return float(_loss(model, tokens))
    finally:
        for layer in layers:
            layer.precision = "native"
