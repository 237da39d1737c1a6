"""``module_memory``: peak memory of a multi-head attention layer, with its projections, from one run with fake tensors."""

from __future__ import annotations

from typing import Any

import torch

from dilated_attention.engine.memory import MemoryEstimate
from dilated_attention.factory import create_attention
from dilated_attention.pattern.checks import as_int, one_of
from dilated_attention.planning.estimate.gpus import Gpu
from dilated_attention.planning.estimate.problem import machine_of, make_problem
from dilated_attention.planning.whole_models.model_memory import Terms, insides
from dilated_attention.planning.whole_models.trace import Moment, Tape, fake_tensors

# except for the attention, a layer on a sharded sequence does on its own rows what the layer of a single process does
_LAYERS = {
    f"{ring}multihead_{kind}": (f"{ring}{kind}", f"multihead_{kind}") for ring in ("", "ring_") for kind in ("dilated", "block_sparse")
}


def module_memory(
    kind: str,
    *,
    embed_dim: int,
    num_heads: int,
    num_positions: int,
    batch_size: int = 1,
    world_size: int = 1,
    dtype: torch.dtype | None = None,
    is_causal: bool = False,
    training: bool = True,
    gpu: str | Gpu | None = None,
    **config: Any,
) -> MemoryEstimate:
    """Returns the peak memory of a call of the layer and, with ``training``, of its backward, on one process.

    Args:
        kind: ``"multihead_dilated"`` · ``"multihead_block_sparse"`` · and for a sequence that ``world_size`` processes share
            ``"ring_multihead_dilated"`` · ``"ring_multihead_block_sparse"``.
        embed_dim, num_heads: of the layer.
        num_positions: N, of the whole sequence.
        dtype: of the layer and its input; None for the default of ``plan_attention``.
        gpu: see ``plan_attention``.
        config: further arguments of the layer: ``segment_lengths``, ``pattern``, ``rotary``, …

    The estimate counts parameters and their gradients, the input and its gradient, and the output and its gradient.
    """
    one_of("kind", kind, tuple(_LAYERS))
    attention, layer_kind = _LAYERS[kind]
    machine = machine_of(gpu)
    of_pattern = {name: config[name] for name in ("segment_lengths", "dilation_rates", "pattern", "num_kv_heads") if name in config}
    problem = make_problem(
        attention, num_positions=num_positions, num_heads=num_heads, head_dim=as_int("embed_dim", embed_dim, minimum=1) // num_heads,
        batch_size=batch_size, world_size=world_size, dtype=dtype, is_causal=is_causal, training=training, gpu=machine.gpu, **of_pattern,
    )  # fmt: skip
    rows = -(-num_positions // world_size)
    inside = insides(problem)
    with fake_tensors():
        layer = create_attention(layer_kind, embed_dim=embed_dim, num_heads=num_heads, dtype=problem.dtype, **config)
        layer.train(training)
        weights = sum(p.numel() * p.element_size() for p in layer.parameters())
        tape = Tape(on_gpu=machine.gpu is not None, parameters=layer.parameters())
        with tape, torch.set_grad_enabled(training):
            x = torch.empty((batch_size, rows, embed_dim), dtype=problem.dtype, requires_grad=training)
            y, _ = layer(x, is_causal=is_causal)
            num_forward = len(tape.moments)
            if training:
                grad = torch.empty_like(y)
                y.backward(grad)
    inputs = batch_size * rows * embed_dim * problem.itemsize

    def terms(moments: list[Moment]) -> Terms:
        top = max(moments, key=lambda moment: moment.alive + moment.inside + inside.get(moment.attention, 0))
        attention = inside.get(top.attention, 0)
        found = [
            ("parameters", weights), ("input", inputs), ("gradients of parameters", top.grads),
            ("activations and their gradients", top.alive + top.inside - top.grads - inputs), ("inside attention", attention),
        ]  # fmt: skip
        return tuple((what, size) for what, size in found if size)

    backward = terms(tape.moments[num_forward:]) if training else ()
    return MemoryEstimate(inputs=inputs, forward=terms(tape.moments[:num_forward]), backward=backward)
