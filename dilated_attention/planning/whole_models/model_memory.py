"""Peak memory of a model's training step or forward: fake tensors trace the stack; formulas give the attention and the loss.

The memory inside attention is not linear in the length, as everything else is; it is added at the requested length.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.ops.prepare import saved_elements_of_sequence
from dilated_attention.factory import create_model
from dilated_attention.models import LongNetConfig, LongNetLM, Pretrained
from dilated_attention.models.loss import CHUNK_BYTES, summed_cross_entropy
from dilated_attention.models.summary import cache_bytes
from dilated_attention.pattern import DilatedPattern
from dilated_attention.planning.estimate.memory import memory_of
from dilated_attention.planning.estimate.problem import Problem
from dilated_attention.planning.whole_models.trace import LENGTHS, FusedNorms, Tape, Traced, deepened, extrapolated, fake_tensors

# positions of a prompt that generation computes at a time (models/language_model.py)
PREFILL = 8192
Terms = tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a trace depends on."""

    preset: str
    overrides: tuple[tuple[str, Any], ...]
    batch_size: int
    training: bool
    dtype: torch.dtype
    casts: bool
    checkpoint_activations: bool
    on_gpu: bool

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.float32 if self.casts else self.dtype


def peak_of_step(run: Run, shards: int, problem: Problem) -> tuple[Terms, str]:
    """Returns (terms at the highest point, when it occurs), for the process with the highest peak.

    FSDP shards weights, gradients and the optimizer's moments over ``shards`` processes, and gathers blocks whole.
    """
    model, rows = model_of(run.preset, run.overrides), -(-problem.num_positions // problem.world_size)
    size, names = run.weight_dtype.itemsize, model.named_modules()
    sizes = [parameter.numel() * size for parameter in model.parameters()]
    blocks = [sum(p.numel() for p in module.parameters()) for name, module in names if name.rpartition(".")[0].endswith("blocks")]
    total, gathered = sum(sizes), 2 * max(blocks, default=0) * size if shards > 1 else 0
    workspace = 0 if problem.machine.is_cpu else (32 if problem.machine.capability >= (9, 0) else 8) * 2**20
    # a workspace for each thread that runs matrix products: the caller's, and autograd's
    terms = [("weights", -(-total // shards)), ("cuBLAS's workspaces", (1 + run.training) * workspace), ("two unsharded blocks", gathered)]
    cached = cache_of(run, problem)
    at_a_time = rows if cached is None else min(rows, PREFILL)
    inside, kept = insides(problem.of_length(at_a_time) if at_a_time < rows else problem), _kept_bytes(problem)
    moments, num_forward = moments_of(run, at_a_time)
    found: list[tuple[Terms, str]] = []
    loss_grads = 0
    if run.training:
        # torch's AdamW computes the roots of all parameters' second moments at once on a GPU; on a CPU it needs two temporaries for one
        # parameter
        temporaries = total // shards if run.on_gpu else 2 * max(sizes)
        found.append(((("gradients", total // shards), ("optimizer's temporaries", temporaries)), "in the optimizer's step"))
        # at the loss, no gradient of the stack has been computed yet
        end, (loss, loss_grads) = moments[num_forward - 1], _loss_of(run, rows)
        alive = end.alive + kept * end.kept
        found.append(((("activations", alive), ("logits and their gradients, a chunk at a time", loss)), "at the loss"))
        terms.append(("optimizer's moments", -(-2 * total // shards)))
    for index, x in enumerate(moments):
        is_backward = index >= num_forward
        parts: Terms = (
            ("gradients", x.grads // shards + loss_grads * is_backward),
            ("activations", x.alive + x.inside + kept * x.kept - x.grads),
            ("inside attention", inside.get(x.attention, 0)),
        )
        found.append((parts, "in the backward" if is_backward else "in the forward"))
    highest, moment = max(found, key=lambda one: sum(size for _, size in one[0]))
    return tuple(term for term in (*terms, ("keys and values of the cache", cached or 0), *highest) if term[1]), moment


def cache_of(run: Run, problem: Problem) -> int | None:
    """Returns the bytes of the keys and values that generation caches; None where a run does not generate from a cache."""
    model = model_of(run.preset, run.overrides)
    if run.training or problem.world_size > 1 or not isinstance(model, LongNetLM):
        return None
    each = cache_bytes(stack_of(model), problem.num_positions, run.dtype.itemsize)
    return None if each is None else run.batch_size * each


def insides(problem: Problem) -> dict[str, int]:
    """Returns the bytes, forward and backward, that attention allocates in addition to its inputs and results, which the trace counts."""
    found, rows = memory_of(problem), problem.batch_size * -(-problem.num_positions // problem.world_size)
    inputs = rows * (problem.num_heads + problem.num_kv_heads) * problem.head_dim * problem.itemsize
    lse = rows * problem.num_heads * accumulation_dtype(problem.dtype).itemsize
    # q, k, v and out; with gradients twice that
    return {"forward": max(0, found.forward_peak - 2 * inputs - lse), "backward": max(0, found.backward_peak - 4 * inputs - lse)}


def _kept_bytes(problem: Problem) -> int:
    """Returns the bytes of branch outputs that a call with detached mixing saves on a GPU (engine/ops/prepare.py)."""
    if problem.device_type != "cuda" or problem.world_size > 1 or not isinstance(problem.pattern, DilatedPattern):
        return 0
    shape = problem.batch_size, problem.num_positions, problem.num_heads, problem.head_dim
    return problem.itemsize * int(saved_elements_of_sequence(problem.pattern, shape, problem.num_kv_heads, problem.itemsize))


@functools.lru_cache(maxsize=16)
def model_of(preset: str, overrides: tuple[tuple[str, Any], ...]) -> Pretrained:
    return create_model(preset, **dict(overrides), device="meta")


def stack_of(model: Pretrained) -> LongNetConfig:
    """Returns the configuration of a model's blocks."""
    config: LongNetConfig = getattr(model.config, "encoder", model.config)
    return config


def moments_of(run: Run, positions: int) -> Traced:
    """Returns the moments of the stack's step, from its input to the input's gradient; the loss is traced separately."""
    (short, num_forward), (long, _) = (_deep_moments(run, rows) for rows in LENGTHS)
    return extrapolated(short, long, (positions - LENGTHS[0]) / (LENGTHS[1] - LENGTHS[0])), num_forward


@functools.lru_cache(maxsize=64)
def _deep_moments(run: Run, rows: int) -> Traced:
    return deepened(lambda blocks: _moments(run, rows, blocks), stack_of(model_of(run.preset, run.overrides)).num_layers)


def _moments(run: Run, rows: int, blocks: int) -> Traced:
    overrides = dict(run.overrides) | {"num_layers": blocks}
    model = create_model(run.preset, **overrides, checkpoint_activations=run.checkpoint_activations, dtype=run.weight_dtype, device="meta")
    with fake_tensors():
        model.to_empty(device="cpu").train(run.training)
        tape = Tape(on_gpu=run.on_gpu, parameters=model.parameters())
        # in training, norms before linear layers are this library's own operation
        norms = FusedNorms() if run.on_gpu and not run.training else nullcontext()
        with tape, norms, torch.autocast("cpu", run.dtype, enabled=run.casts), torch.set_grad_enabled(run.training):
            # tokens, tiles or patches are created inside the tape: they live as long as the step
            out, given = _stack_forward(model, run.batch_size, rows, run.weight_dtype)
            if run.training:
                # like a loss, this does not keep the hidden states alive, and nothing keeps the gradient that it returns
                loss = _Empty.apply(out, (), out.dtype)
                del out
                tape.note()
            num_forward = len(tape.moments)
            if run.training:
                loss.backward()
        del given
        return tape.moments, num_forward


class _Empty(torch.autograd.Function):
    """A tensor without values, computed from another one that nothing else keeps alive; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        ctx.like = (x.shape, x.dtype)
        return x.new_empty(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype), None, None


def _stack_forward(model: Pretrained, batch: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """Returns (hidden states, the inputs) of a model run on inputs without values."""
    if isinstance(model, LongNetLM):
        tokens = torch.zeros((batch, rows), dtype=torch.int64)
        return model.hidden(tokens), tokens
    embedding: Any = getattr(model, "tile_embedding", None) or model.patch_embedding  # type: ignore[attr-defined]
    width = embedding.in_features if isinstance(embedding, nn.Linear) else embedding.in_channels * embedding.kernel_size[0] ** 2
    tiles = torch.empty((batch, rows, width), dtype=dtype)
    x = nn.functional.linear(tiles, embedding.weight.flatten(1), embedding.bias)
    # positions are added in the parameters' dtype, which determines the dtype of the residual stream
    return model.encoder(x + torch.empty_like(x[:1], dtype=dtype)), tiles  # type: ignore[operator]


def _loss_of(run: Run, rows: int) -> tuple[int, int]:
    """Returns (peak bytes of the loss and its backward, hidden states included; of these, the gradients of the output layer).

    A loss of a few chunks is traced; that of many is extrapolated from it, as each additional chunk repeats the same operations.
    """
    model = model_of(run.preset, run.overrides)
    if not isinstance(model, LongNetLM):
        return 0, 0
    vocabulary, embed = model.output_weight.shape
    rows *= run.batch_size
    chunk = max(1, CHUNK_BYTES // (4 * vocabulary))
    moments, _ = deepened(lambda few: _loss_moments(min(rows, few * chunk), vocabulary, embed, run), -(-rows // chunk))
    return max(moment.alive + moment.inside for moment in moments), vocabulary * embed * run.weight_dtype.itemsize


@functools.lru_cache(maxsize=64)
def _loss_moments(rows: int, vocabulary: int, embed: int, run: Run) -> Traced:
    with fake_tensors():
        start = torch.empty((), requires_grad=True)
        weight = torch.empty((vocabulary, embed), dtype=run.weight_dtype, requires_grad=True)
        targets = torch.zeros(rows, dtype=torch.int64)
        tape = Tape(on_gpu=run.on_gpu)
        with tape:
            with torch.autocast("cpu", run.dtype, enabled=run.casts):
                loss = summed_cross_entropy(_Empty.apply(start, (rows, embed), run.weight_dtype), weight, targets)
            num_forward = len(tape.moments)
            loss.backward()
        return tape.moments, num_forward
