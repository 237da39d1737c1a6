"""Memory of a model of Llama-7B's shape, extrapolated from measurements of a few layers to all of them."""

from __future__ import annotations

import gc
from typing import Any

import torch

from dilated_attention.bench.measure.subprocess_runner import Peak
from dilated_attention.factory import create_model
from dilated_attention.models import LongNetLM
from dilated_attention.pattern import LocalWindow

# its published configuration: width, layers, heads, feed-forward width, vocabulary
FULL: dict[str, Any] = {"embed_dim": 4096, "num_heads": 32, "ffn_dim": 11008, "vocab_size": 32000}
LAYERS = 32
# the same proportions at a sixteenth of the width, for a CPU
SMALL: dict[str, Any] = {"embed_dim": 256, "num_heads": 4, "ffn_dim": 688, "vocab_size": 2000}
_SHAPE: dict[str, Any] = {"num_kv_heads": None, "tie_embeddings": False, "qk_norm": False}
_PRESET = "llama-1b"
ATTENTION: dict[str, dict[str, Any]] = {
    "dense": {"attention": "dense", "segment_lengths": (), "dilation_rates": ()},
    "dilated": {"segment_lengths": (2048, 8192, 32768), "dilation_rates": (1, 4, 16)},
    "window of 1,024": {"attention": "block_sparse", "segment_lengths": (), "dilation_rates": (), "block_pattern": LocalWindow((1023, 0))},
}
# (what, training, checkpoint_activations)
WORK = {"training": (True, False), "training, checkpointed": (True, True), "generating": (False, False)}
# numbers of layers that are measured; the difference between both gives the memory of each further layer
DEPTHS = (2, 4)


def overrides_of(kind: str, full: bool, layers: int) -> dict[str, Any]:
    """Returns the overrides for ``create_model(PRESET, …)`` and ``plan_model``."""
    return (FULL if full else SMALL) | _SHAPE | ATTENTION[kind] | {"num_layers": layers}


def planned(kind: str, work: str, num_positions: int, *, full: bool, layers: int, gpu: Any, memory: int | None = None) -> Any:
    """Returns ``plan_model`` of the model; with ``memory`` also the longest sequence that fits into it."""
    from dilated_attention.planning import plan_model

    training, checkpoints = WORK[work]
    return plan_model(
        _PRESET,
        num_positions=num_positions,
        training=training,
        checkpoint_activations=checkpoints,
        gpu=gpu,
        memory=memory,
        find_longest=memory is not None,
        **overrides_of(kind, full, layers),
    )


def measured(kind: str, work: str, num_positions: int, layers: int, full: bool, device: torch.device) -> int:
    """Returns the peak bytes of two training steps of AdamW, or of a prompt and two generated tokens, in the current process.

    On a GPU, training keeps float32 weights under bfloat16 autocast and generation uses bfloat16 weights; on a CPU everything is float32.
    """
    if device.type != "cuda":
        # code that is loaded on first use does not count towards the model
        _run(kind, work, 64, 2, False, device)
    gc.collect()
    peak = Peak(device)
    _run(kind, work, num_positions, layers, full, device)
    return peak.bytes()


def _run(kind: str, work: str, num_positions: int, layers: int, full: bool, device: torch.device) -> None:
    training, checkpoints = WORK[work]
    half = device.type == "cuda"
    dtype = torch.float32 if training or not half else torch.bfloat16
    options: dict[str, Any] = {"checkpoint_activations": checkpoints, "device": device, "dtype": dtype}
    model = create_model(_PRESET, **overrides_of(kind, full, layers), **options)
    assert isinstance(model, LongNetLM)
    tokens = torch.randint(model.config.vocab_size or 1, (1, num_positions + 1), device=device)
    if not training:
        model.eval().generate(tokens[:, : num_positions - 2], 2, cuda_graph=False)
        return
    optimizer = torch.optim.AdamW(model.parameters())
    # the second step includes the moments that the first one created
    for _ in range(2):
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = model(tokens[:, :-1], targets=tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert bool(loss.isfinite())
