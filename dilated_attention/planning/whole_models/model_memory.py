"""Peak memory of a model's training step or forward: fake tensors trace the stack; formulas give the attention and the loss."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.branches.strategy import saved_budget
from dilated_attention.factory import create_model
from dilated_attention.models import LongNetConfig, LongNetLM, Pretrained
from dilated_attention.models.loss import CHUNK_BYTES, summed_cross_entropy
from dilated_attention.models.summary import cache_rows
from dilated_attention.pattern import DilatedPattern
from dilated_attention.planning.estimate.memory import memory_of
from dilated_attention.planning.estimate.problem import Problem
from dilated_attention.planning.whole_models.hub_config import HubModel
from dilated_attention.planning.whole_models.timeline import DEPTHS, Point, Timeline, Traced, deepened, timeline
from dilated_attention.planning.whole_models.trace import FusedNorms, Tape, Unfilled, fake_tensors

# positions of a prompt that generation computes at a time (models/language_model.py)
PREFILL = 8192
_LENGTHS = (2048, 3072)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a trace depends on."""

    preset: str | HubModel
    overrides: tuple[tuple[str, Any], ...]
    batch_size: int
    training: bool
    dtype: torch.dtype
    casts: bool
    checkpoint_activations: bool
    on_gpu: bool
    is_causal: bool

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.float32 if self.casts else self.dtype


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Bytes that do not depend on the length.

    Args:
        weights, moments: as sharded.
        whole: bytes of the blocks that FSDP has gathered.
        step: needed by the optimizer's step in addition to weights, gradients and moments.
        grads: gradients of all parameters, unsharded.
        shards: number of processes over which gradients are sharded.
    """

    weights: int
    moments: int
    whole: int
    step: int
    grads: int
    shards: int


def fixed_of(model: nn.Module, run: Run, shards: int) -> Fixed:
    sizes = [parameter.numel() for parameter in model.parameters()]
    size = run.weight_dtype.itemsize
    total = sum(sizes) + extra_parameters(run.preset)
    blocks = [
        sum(p.numel() for p in module.parameters()) for name, module in model.named_modules() if name.rpartition(".")[0].endswith("blocks")
    ]
    whole = 0 if shards == 1 else 2 * max(blocks, default=0) * size
    if not run.training:
        return Fixed(weights=-(-total * size // shards), moments=0, whole=whole, step=0, grads=0, shards=shards)
    # torch's AdamW computes the roots of all parameters' second moments at once on a GPU; on a CPU it needs two temporaries for one
    # parameter
    step = total * size // shards if run.on_gpu else 2 * max(sizes) * size
    return Fixed(
        weights=-(-total * size // shards),
        moments=-(-2 * total * size // shards),
        whole=whole,
        step=step,
        grads=total * size,
        shards=shards,
    )


def peak_of_step(run: Run, fixed: Fixed, problem: Problem) -> tuple[tuple[tuple[str, int], ...], str]:
    """Returns (terms at the highest point, when it occurs), for the process with the highest peak."""
    model, rows = model_of(run.preset, run.overrides), -(-problem.num_positions // problem.world_size)
    config: LongNetConfig = getattr(model.config, "encoder", model.config)
    terms: list[tuple[str, int]] = [("weights", fixed.weights)]
    if problem.gpu is not None:
        # one for each thread that runs matrix products: the caller's, and autograd's
        terms.append(("cuBLAS's workspaces", (1 + run.training) * (32 if problem.gpu.capability >= (9, 0) else 8) * 2**20))
    if fixed.whole:
        terms.append(("two unsharded blocks", fixed.whole))
    if not run.training:
        cached, at_a_time = 0, rows
        if isinstance(model, LongNetLM) and config.is_causal and problem.world_size == 1:
            kept = cache_rows(config, problem.num_positions)
            if kept is not None:
                at_a_time = min(rows, PREFILL)
                row = 2 * (config.num_kv_heads or config.num_heads) * config.head_dim * run.dtype.itemsize
                cached = run.batch_size * config.num_layers * row * kept
        inside = insides(problem if at_a_time == rows else problem.of_length(at_a_time))
        top, point = trace_of(run).highest(at_a_time, lambda p: p.inside.at(at_a_time) + inside.get(p.attention, 0))
        within = inside.get(point.attention, 0)
        terms += [("keys and values of the cache", cached), ("activations", top - within), ("inside attention", within)]
        return tuple(term for term in terms if term[1]), "in the forward"
    terms.append(("optimizer's moments", fixed.moments))
    base = sum(size for _, size in terms)
    inside, kept = insides(problem), _kept_bytes(problem)
    line = trace_of(run)
    loss, loss_grads = _loss_of(run, rows) if isinstance(model, LongNetLM) else (0, 0)

    def extra(point: Point) -> int:
        spread = point.grads - point.grads // fixed.shards
        return point.inside.at(rows) + inside.get(point.attention, 0) + kept * point.kept - spread + loss_grads * point.in_backward

    found, point = line.highest(rows, extra)
    # at the loss, no gradient of the stack has been computed yet
    at_loss = line.end_of_forward.alive.at(rows) + loss + kept * line.end_of_forward.kept
    at_step = fixed.grads // fixed.shards + fixed.step
    highest = max(found, at_loss, at_step)
    if highest == at_step:
        return (*terms, ("gradients", fixed.grads // fixed.shards), ("optimizer's temporaries", fixed.step)), "in the optimizer's step"
    if highest == at_loss:
        return (*terms, ("activations", at_loss - loss), ("logits and their gradients, a chunk at a time", loss)), "at the loss"
    grads = point.grads // fixed.shards + loss_grads * point.in_backward
    attention = inside.get(point.attention, 0)
    assert base + found == base + grads + attention + (found - grads - attention)
    parts = [("gradients", grads), ("activations", found - grads - attention), ("inside attention", attention)]
    return (*terms, *(part for part in parts if part[1])), "in the backward" if point.in_backward else "in the forward"


def insides(problem: Problem) -> dict[str, int]:
    """Returns the bytes, forward and backward, that attention allocates in addition to its inputs and results, which the trace counts."""
    found = memory_of(problem)
    rows = problem.batch_size * -(-problem.num_positions // problem.world_size)
    e, a = problem.itemsize, accumulation_dtype(problem.dtype).itemsize
    q, k = rows * problem.num_heads * problem.head_dim * e, rows * problem.num_kv_heads * problem.head_dim * e
    lse = rows * problem.num_heads * a
    return {
        "forward": max(0, found.forward_peak - (2 * q + 2 * k) - lse),
        "backward": max(0, found.backward_peak - (4 * q + 4 * k) - lse) if problem.training else 0,
    }


def _kept_bytes(problem: Problem) -> int:
    """Returns the bytes of branch outputs that a call with detached mixing saves on a GPU (engine/ops/prepare.py)."""
    pattern = problem.pattern
    if problem.device_type != "cuda" or problem.world_size > 1 or not isinstance(pattern, DilatedPattern) or pattern.num_branches == 1:
        return 0
    if pattern.branch_heads == "split" or problem.num_kv_heads != problem.num_heads:
        return 0
    N = problem.num_positions
    rows = sum(-(-N // w) * -(-min(N, w) // r) for w, r in pattern.branches)
    size = problem.batch_size * problem.num_heads * problem.head_dim * rows * problem.itemsize
    return size if size <= saved_budget() else 0


@functools.lru_cache(maxsize=16)
def model_of(preset: str | HubModel, overrides: tuple[tuple[str, Any], ...]) -> Pretrained:
    with Unfilled():
        return _created(preset, **dict(overrides), device="meta")


def extra_parameters(preset: str | HubModel) -> int:
    """Returns the number of parameters of a model that its blocks do not have."""
    return 0 if isinstance(preset, str) else preset.extra_parameters


def _created(preset: str | HubModel, **options: Any) -> Pretrained:
    if isinstance(preset, str):
        return create_model(preset, **options)
    changes = {field.name: options.pop(field.name) for field in fields(LongNetConfig) if field.name in options}
    return LongNetLM(replace(preset.config, **changes), **options)


@functools.lru_cache(maxsize=32)
def trace_of(run: Run) -> Timeline:
    """Traces the stack's step, from its input to the input's gradient; the loss is traced separately."""
    config: Any = model_of(run.preset, run.overrides).config
    return timeline(lambda rows, blocks: _moments(run, rows, blocks), _LENGTHS, getattr(config, "encoder", config).num_layers)


def _moments(run: Run, rows: int, blocks: int) -> Traced:
    overrides = dict(run.overrides) | {"num_layers": blocks}
    with fake_tensors():
        with Unfilled():
            model = _created(run.preset, **overrides, checkpoint_activations=run.checkpoint_activations, dtype=run.weight_dtype)
        model.train(run.training)
        tape = Tape(on_gpu=run.on_gpu)
        tape.ignore(model.parameters())
        tape.watch(model.parameters())
        # in training, norms before linear layers are this library's own operation
        norms = FusedNorms() if run.on_gpu and not run.training else nullcontext()
        with tape, norms, torch.autocast("cpu", run.dtype, enabled=run.casts), torch.set_grad_enabled(run.training):
            # tokens, tiles or patches are created inside the tape: they live as long as the step
            out, given = _stack_forward(model, run.batch_size, rows, run.weight_dtype)
            if run.training:
                # like a loss, this does not keep the hidden states alive, and nothing keeps the gradient that it returns
                loss = _Loss.apply(out)
                del out
                tape.note()
            num_forward = len(tape.moments)
            if run.training:
                loss.backward()
        del given
        return tape.moments, num_forward


class _Loss(torch.autograd.Function):
    """Any scalar computed from a tensor, without values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.like = (x.shape, x.dtype)
        return x.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype)


class _Hidden(torch.autograd.Function):
    """Rows of any hidden states, which nothing else keeps alive."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return start.new_empty(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].new_empty((), dtype=torch.float32), None, None


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
    assert isinstance(model, LongNetLM)
    vocabulary, embed = model.output_weight.shape
    rows *= run.batch_size
    chunk = max(1, CHUNK_BYTES // (4 * vocabulary))
    grads = vocabulary * embed * run.weight_dtype.itemsize
    chunks = -(-rows // chunk)
    if chunks <= DEPTHS[1]:
        return _loss_peak(rows, vocabulary, embed, run), grads
    moments, _ = deepened(lambda few: _loss_moments(few * chunk, vocabulary, embed, run), chunks)
    return max(moment.alive + moment.inside for moment in moments), grads


def _loss_peak(rows: int, vocabulary: int, embed: int, run: Run) -> int:
    return max(moment.alive + moment.inside for moment in _loss_moments(rows, vocabulary, embed, run)[0])


@functools.lru_cache(maxsize=64)
def _loss_moments(rows: int, vocabulary: int, embed: int, run: Run) -> Traced:
    with fake_tensors():
        start = torch.empty((), requires_grad=True)
        weight = torch.empty((vocabulary, embed), dtype=run.weight_dtype, requires_grad=True)
        targets = torch.zeros(rows, dtype=torch.int64)
        tape = Tape(on_gpu=run.on_gpu)
        with tape:
            with torch.autocast("cpu", run.dtype, enabled=run.casts):
                loss = summed_cross_entropy(_Hidden.apply(start, (rows, embed), run.weight_dtype), weight, targets)
            num_forward = len(tape.moments)
            loss.backward()
        return tape.moments, num_forward
