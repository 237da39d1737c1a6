"""``plan_model``: what training or running a model preset takes, traced with fake tensors through all its layers at two lengths."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from dilated_attention.backends.base import accumulation_dtype
from dilated_attention.engine.schedule import kept_budget
from dilated_attention.factory import create_model
from dilated_attention.models import LongNetConfig, LongNetLM, Pretrained
from dilated_attention.models.loss import summed_cross_entropy
from dilated_attention.models.summary import USABLE, Summary, cache_rows
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.pattern.checks import as_int
from dilated_attention.planning.attention import memory_of
from dilated_attention.planning.gpus import Gpu
from dilated_attention.planning.plan import MOST_POSITIONS, machine_of, search
from dilated_attention.planning.problem import Problem, make_problem
from dilated_attention.planning.rings import NO_EXCHANGE, Exchange, exchange_of
from dilated_attention.planning.speed import passes_of
from dilated_attention.planning.timeline import Point, Timeline, Traced, timeline
from dilated_attention.planning.trace import Tape, fake_tensors

# positions of a prompt that generation computes at a time (models/language_model.py)
PREFILL = 8192
_LENGTHS = (2048, 3072)
# shares of the peaks that linear layers, and what is read and written between them, are taken to reach: with them a training step of Prov-GigaPath's
# encoder on 45,681 tiles comes out as an H200 measured it (benchmarks/results/2026-11-21-h200-slide-encoder.jsonl)
_BANDWIDTH_SHARE = 0.5
_LINEAR_SHARE = 0.45


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """A training step, or generation, in figures of one process; ``str`` prints them, ``as_dict`` gives them.

    Args:
        preset, …: as asked. With ``world_size`` processes each has its share of the positions, and every figure is that of one.
        parameters: of the whole model.
        terms: (what, bytes) at the highest point.
        moment: when that is.
        flops: of the whole step: forward and backward, without what is computed twice; of inference the forward.
        exchange: of each layer's attention.
        seconds: an estimate, None where no rate is known; ``no_time`` says why, ``time_source`` what it is made of.
        fits, longest: as of ``AttentionPlan``.
    """

    preset: str
    num_positions: int
    batch_size: int
    training: bool
    dtype: str
    autocast: bool
    world_size: int
    weight_shards: int
    checkpoint_activations: bool
    parameters: int
    layers: int
    terms: tuple[tuple[str, int], ...]
    moment: str
    flops: float
    exchange: Exchange
    seconds: float | None
    time_source: str
    no_time: str
    device: str
    device_memory: int
    fits: bool
    longest: int

    @property
    def peak(self) -> int:
        """Bytes at the highest point, of one process."""
        return sum(size for _, size in self.terms)

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["terms"] = [list(term) for term in self.terms]
        return found | {"peak": self.peak}

    def __str__(self) -> str:
        from dilated_attention.planning.text import model_text

        return model_text(self)


def plan_model(
    preset: str,
    *,
    num_positions: int,
    batch_size: int = 1,
    training: bool = True,
    world_size: int = 1,
    weight_shards: int = 1,
    checkpoint_activations: bool = False,
    dtype: torch.dtype | None = None,
    autocast: bool | None = None,
    gpu: str | Gpu | None = None,
    memory: int | None = None,
    find_longest: bool = True,
    **overrides: Any,
) -> ModelPlan:
    """What a model takes on one process, from fake tensors and formulas.

    Args:
        preset: a name of ``factory.MODEL_PRESETS``.
        num_positions: N of each sequence; of a slide its tiles, of an image its patches.
        batch_size: sequences at a time.
        training: a step of forward, backward and AdamW in float32. False: a language model generates, with keys and values of N positions
            cached and prompts read ``PREFILL`` positions at a time; any other model runs forward.
        world_size: processes that share each sequence (context parallelism), one GPU each.
        weight_shards: processes over which FSDP spreads weights, gradients and the optimizer's moments; two blocks are whole at a time.
        checkpoint_activations: as of ``create_model``.
        dtype: that the model computes in; None for that of ``plan_attention``.
        autocast: weights in float32 and autocast to ``dtype``; None: in training, where ``dtype`` is a 16-bit one.
        gpu, memory, find_longest: as of ``plan_attention``.
        overrides: fields of the preset's configuration, as of ``create_model``.

    Raises:
        ValueError, TypeError: as of ``plan_attention`` and ``create_model``.

    >>> print(plan_model("llama-1b", num_positions=131072, gpu="H200", checkpoint_activations=True))
    """
    machine = machine_of(gpu, memory)
    sizes = {"num_positions": num_positions, "batch_size": batch_size, "world_size": world_size, "weight_shards": weight_shards}
    sizes = {name: as_int(name, value, minimum=1) for name, value in sizes.items()}
    model = create_model(preset, **overrides, device="meta")
    config: LongNetConfig = getattr(model.config, "encoder", model.config)
    problem = _attention_of(config, machine.gpu, sizes, dtype, training)
    half = problem.dtype in (torch.float16, torch.bfloat16)
    casts = (training and half) if autocast is None else autocast
    if casts and not half:
        raise ValueError(f"autocast is True and dtype is {problem.dtype}; autocast computes in float16 or bfloat16: leave it out")
    run = _Run(
        preset=preset,
        overrides=tuple(sorted(overrides.items())),
        batch_size=batch_size,
        training=training,
        dtype=problem.dtype,
        casts=casts,
        checkpoint_activations=checkpoint_activations,
        on_gpu=machine.gpu is not None,
        is_causal=config.is_causal,
    )
    fixed = _fixed_of(model, run, sizes["weight_shards"])
    terms, moment = _peak(run, fixed, problem)
    budget = int(USABLE * machine.memory)
    fits = sum(size for _, size in terms) <= budget
    longest = num_positions * fits
    if find_longest:

        def excess(n: int) -> int:
            return sum(size for _, size in _peak(run, fixed, problem.of_length(n))[0]) - budget

        longest = search(excess, world_size, MOST_POSITIONS)
    exchange = exchange_of(problem) if world_size > 1 else NO_EXCHANGE
    sizes_of = {name: parameter.numel() for name, parameter in model.named_parameters()}
    flops = _flops(config, sizes_of, problem)
    seconds, source, why_not = _seconds(run, problem, exchange, flops)
    return ModelPlan(
        preset=preset,
        num_positions=num_positions,
        batch_size=batch_size,
        training=training,
        dtype=str(problem.dtype).removeprefix("torch."),
        autocast=casts,
        world_size=world_size,
        weight_shards=weight_shards,
        checkpoint_activations=checkpoint_activations,
        parameters=sum(sizes_of.values()),
        layers=config.num_layers,
        terms=terms,
        moment=moment,
        flops=flops,
        exchange=exchange,
        seconds=seconds,
        time_source=source,
        no_time=why_not,
        device=machine.name,
        device_memory=machine.memory,
        fits=fits,
        longest=longest,
    )


def _attention_of(config: LongNetConfig, gpu: Gpu | None, sizes: dict[str, int], dtype: torch.dtype | None, training: bool) -> Problem:
    """One layer's attention as a problem of its own."""
    pattern = None if config.kind == "dense" else config.pattern
    spread = {"dense": "ring", "dilated": "ring_dilated", "block_sparse": "ring_block_sparse"}
    return make_problem(
        spread[config.kind] if sizes["world_size"] > 1 else config.kind,
        num_positions=sizes["num_positions"],
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        batch_size=sizes["batch_size"],
        dtype=dtype,
        world_size=sizes["world_size"],
        layout="contiguous" if sizes["world_size"] > 1 else None,
        is_causal=config.is_causal,
        training=training,
        pattern=pattern,
        gpu=gpu,
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What a trace depends on."""

    preset: str
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
class _Fixed:
    """Bytes that do not depend on the length.

    Args:
        weights, moments: as they are spread.
        whole: of blocks that FSDP has gathered.
        step: beside weights, gradients and moments in the optimizer's step.
        grads: of all parameters, whole.
        shards: over which gradients are spread.
    """

    weights: int
    moments: int
    whole: int
    step: int
    grads: int
    shards: int


def _fixed_of(model: nn.Module, run: _Run, shards: int) -> _Fixed:
    sizes = [parameter.numel() for parameter in model.parameters()]
    size = run.weight_dtype.itemsize
    total = sum(sizes)
    blocks = [
        sum(p.numel() for p in module.parameters()) for name, module in model.named_modules() if name.rpartition(".")[0].endswith("blocks")
    ]
    whole = 0 if shards == 1 else 2 * max(blocks, default=0) * size
    if not run.training:
        return _Fixed(weights=-(-total * size // shards), moments=0, whole=whole, step=0, grads=0, shards=shards)
    # torch's AdamW makes the root of the second moments of all parameters at once on a GPU, twice of one on a CPU
    step = total * size // shards if run.on_gpu else 2 * max(sizes) * size
    return _Fixed(
        weights=-(-total * size // shards),
        moments=-(-2 * total * size // shards),
        whole=whole,
        step=step,
        grads=total * size,
        shards=shards,
    )


def _peak(run: _Run, fixed: _Fixed, problem: Problem) -> tuple[tuple[tuple[str, int], ...], str]:
    """(terms at the highest point, when it is), on the process with most."""
    model, rows = _model_of(run.preset, run.overrides), -(-problem.num_positions // problem.world_size)
    config: LongNetConfig = getattr(model.config, "encoder", model.config)
    terms: list[tuple[str, int]] = [("weights", fixed.weights)]
    if problem.gpu is not None:
        # one for each thread that multiplies: the caller's, and autograd's
        terms.append(("cuBLAS's workspaces", (1 + run.training) * (32 if problem.gpu.capability >= (9, 0) else 8) * 2**20))
    if fixed.whole:
        terms.append(("two blocks whole", fixed.whole))
    if not run.training:
        cached, at_a_time = 0, rows
        if isinstance(model, LongNetLM) and config.is_causal and problem.world_size == 1:
            kept = cache_rows(config, problem.num_positions)
            if kept is not None:
                at_a_time = min(rows, PREFILL)
                row = 2 * (config.num_kv_heads or config.num_heads) * config.head_dim * run.dtype.itemsize
                cached = run.batch_size * config.num_layers * row * kept
        inside = insides(problem if at_a_time == rows else problem.of_length(at_a_time))
        top, point = _trace(run).highest(at_a_time, lambda p: p.inside.at(at_a_time) + inside.get(p.attention, 0))
        extra = inside.get(point.attention, 0)
        terms += [("keys and values of the cache", cached), ("activations", top - extra), ("inside attention", extra)]
        return tuple(term for term in terms if term[1]), "in the forward"
    terms.append(("optimizer's moments", fixed.moments))
    base = sum(size for _, size in terms)
    inside, kept = insides(problem), _kept_bytes(problem)
    line = _trace(run)
    loss, loss_grads = _loss_of(run, rows) if isinstance(model, LongNetLM) else (0, 0)

    def extra(point: Point) -> int:
        spread = point.grads - point.grads // fixed.shards
        return point.inside.at(rows) + inside.get(point.attention, 0) + kept * point.kept - spread + (loss_grads if point.grads else 0)

    found, point = line.highest(rows, extra)
    # at the loss no gradient of the stack is there yet, and every layer's attention keeps what it keeps
    at_loss = line.end_of_forward.at(rows) + loss + kept * (0 if run.checkpoint_activations else config.num_layers)
    at_step = fixed.grads // fixed.shards + fixed.step
    highest = max(found, at_loss, at_step)
    if highest == at_step:
        return (*terms, ("gradients", fixed.grads // fixed.shards), ("optimizer's temporaries", fixed.step)), "in the optimizer's step"
    if highest == at_loss:
        return (*terms, ("activations", at_loss - loss), ("logits and their gradients, a chunk at a time", loss)), "at the loss"
    grads = point.grads // fixed.shards + (loss_grads if point.grads else 0)
    attention = inside.get(point.attention, 0)
    assert base + found == base + grads + attention + (found - grads - attention)
    parts = [("gradients", grads), ("activations", found - grads - attention), ("inside attention", attention)]
    return (
        *terms,
        *(part for part in parts if part[1]),
    ), "in the backward" if point.grads or point.attention == "backward" else "in the forward"


def insides(problem: Problem) -> dict[str, int]:
    """Bytes of attention beside its inputs and results, which the trace has: forward, and backward."""
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
    """What a call with detached mixing keeps of its branches' outputs on a GPU (engine/prepare.py)."""
    pattern = problem.pattern
    if problem.device_type != "cuda" or problem.world_size > 1 or not isinstance(pattern, DilatedPattern) or pattern.num_branches == 1:
        return 0
    if pattern.branch_heads == "split" or problem.num_kv_heads != problem.num_heads:
        return 0
    N = problem.num_positions
    rows = sum(-(-N // w) * -(-min(N, w) // r) for w, r in pattern.branches)
    size = problem.batch_size * problem.num_heads * problem.head_dim * rows * problem.itemsize
    return size if size <= kept_budget() else 0


@functools.lru_cache(maxsize=16)
def _model_of(preset: str, overrides: tuple[tuple[str, Any], ...]) -> Pretrained:
    return create_model(preset, **dict(overrides), device="meta")


@functools.lru_cache(maxsize=32)
def _trace(run: _Run) -> Timeline:
    """The stack's step, from its input to the input's gradient; the loss is traced apart."""
    config: Any = _model_of(run.preset, run.overrides).config
    return timeline(lambda rows, blocks: _moments(run, rows, blocks), _LENGTHS, getattr(config, "encoder", config).num_layers)


def _moments(run: _Run, rows: int, blocks: int) -> Traced:
    overrides = dict(run.overrides) | {"num_layers": blocks}
    with fake_tensors():
        model = create_model(run.preset, **overrides, checkpoint_activations=run.checkpoint_activations, dtype=run.weight_dtype)
        model.train(run.training)
        tape = Tape(on_gpu=run.on_gpu)
        tape.ignore(model.parameters())
        tape.watch(model.parameters())
        with tape, torch.autocast("cpu", run.dtype, enabled=run.casts), torch.set_grad_enabled(run.training):
            # tokens, tiles or patches are made inside the tape: they live as long as the step
            out, given = _stack_forward(model, run.batch_size, rows, run.weight_dtype)
            num_forward = len(tape.moments)
            if run.training:
                grad = torch.empty_like(out)
                out.backward(grad)
                del grad
        del out, given
        return tape.moments, num_forward


def _stack_forward(model: Pretrained, batch: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """(hidden states, the inputs) of a model on inputs without values."""
    if isinstance(model, LongNetLM):
        tokens = torch.zeros((batch, rows), dtype=torch.int64)
        return model.hidden(tokens), tokens
    embedding: Any = getattr(model, "tile_embedding", None) or model.patch_embedding  # type: ignore[attr-defined]
    width = embedding.in_features if isinstance(embedding, nn.Linear) else embedding.in_channels * embedding.kernel_size[0] ** 2
    tiles = torch.empty((batch, rows, width), dtype=dtype)
    x = nn.functional.linear(tiles, embedding.weight.flatten(1), embedding.bias)
    # places are added in the parameters' dtype, which makes that of the residual stream
    return model.encoder(x + torch.empty_like(x[:1], dtype=dtype)), tiles  # type: ignore[operator]


def _loss_of(run: _Run, rows: int) -> tuple[int, int]:
    """(bytes at the highest point of the loss and its backward, beside the hidden states; of them, gradients of the output layer).

    A loss of few chunks is traced; that of many is told from two of few, as chunks differ in nothing.
    """
    model = _model_of(run.preset, run.overrides)
    assert isinstance(model, LongNetLM)
    vocabulary, embed = model.output_weight.shape
    rows *= run.batch_size
    chunk = max(1, 64 * 2**20 // (4 * vocabulary))
    grads = vocabulary * embed * run.weight_dtype.itemsize
    few, some = 3 * chunk, 5 * chunk
    if rows <= some:
        return _loss_peak(rows, vocabulary, embed, run), grads
    first, second = (_loss_peak(n, vocabulary, embed, run) for n in (few, some))
    return second + (second - first) * (rows - some) // (some - few), grads


@functools.lru_cache(maxsize=64)
def _loss_peak(rows: int, vocabulary: int, embed: int, run: _Run) -> int:
    with fake_tensors():
        hidden = torch.empty((rows, embed), dtype=run.weight_dtype if not run.casts else torch.float32, requires_grad=True)
        weight = torch.empty((vocabulary, embed), dtype=run.weight_dtype, requires_grad=True)
        targets = torch.zeros(rows, dtype=torch.int64)
        tape = Tape(on_gpu=run.on_gpu)
        with tape:
            with torch.autocast("cpu", run.dtype, enabled=run.casts):
                loss = summed_cross_entropy(hidden, weight, targets)
            loss.backward()
        return max(moment.alive + moment.inside for moment in tape.moments)


def _flops(config: LongNetConfig, sizes: dict[str, int], problem: Problem) -> float:
    embeddings = sum(size for key, size in sizes.items() if key.endswith("embedding.weight"))
    summary = Summary(
        name="", config=config, num_parameters=sum(sizes.values()), embedding_parameters=embeddings, lengths=(), memory=1, device=""
    )
    each = (
        summary.training_flops(problem.num_positions) if not isinstance(problem.pattern, BlockPattern) else _block_flops(summary, problem)
    )
    return problem.batch_size * problem.num_positions * each / (1 if problem.training else 3)


def _block_flops(summary: Summary, problem: Problem) -> float:
    from dilated_attention.planning.plan import pairs_of

    config = summary.config
    keys = pairs_of(problem)[0] / (problem.batch_size * problem.num_positions * problem.num_heads)
    looked_up = 0 if config.tie_embeddings else summary.embedding_parameters
    return 6 * (summary.num_parameters - looked_up) + 12 * config.embed_dim * keys * config.num_layers


def _seconds(run: _Run, problem: Problem, exchange: Exchange, flops: float) -> tuple[float | None, str, str]:
    """(seconds of a step or a forward, what they are made of, why there are none)."""
    gpu = problem.gpu
    least = (0, 0)
    passes, why_not = passes_of(problem, exchange, least)
    if not passes:
        return None, "", why_not
    peak = None if gpu is None else gpu.peak(problem.dtype)
    if gpu is None or peak is None or gpu.bandwidth is None:
        return None, "", "rates of its linear layers were not measured"
    model = _model_of(run.preset, run.overrides)
    config: LongNetConfig = getattr(model.config, "encoder", model.config)
    again = run.training and run.checkpoint_activations
    attention = config.num_layers * (sum(one.seconds for one in passes) + (passes[0].seconds if again else 0.0))
    pairs = (
        problem.pattern.pairs(problem.num_positions, config.num_heads, is_causal=config.is_causal)
        if not isinstance(problem.pattern, BlockPattern)
        else 0
    )
    attended = 12 * config.embed_dim * pairs / config.num_heads * config.num_layers * run.batch_size / (1 if run.training else 3)
    linear = max(0.0, flops - attended) * (4 / 3 if again else 1) / problem.world_size / (peak * _LINEAR_SHARE)
    rows = -(-problem.num_positions // problem.world_size)
    moved = _trace(run).moved.at(rows) / (gpu.bandwidth * _BANDWIDTH_SHARE)
    source = (
        f"attention {attention * 1e3:,.3g} ms ({passes[0].source}); linear layers {linear * 1e3:,.3g} ms, taken at {_LINEAR_SHARE:.0%} of the peak; "
        f"what is read and written between {moved * 1e3:,.3g} ms, at {_BANDWIDTH_SHARE:.0%} of the bandwidth; the CPU's own time is left out, for which short sequences wait"
    )
    return attention + linear + moved, source, ""
