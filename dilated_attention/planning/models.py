"""``plan_model``: the cost of training or running a model preset. Fake tensors trace its blocks; formulas give the attention and the loss.
All but attention is linear in the length: two short traces give it at any; attention's own memory is added at the requested length."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dilated_attention.engine.ops.prepare import saved_elements
from dilated_attention.engine.ops.resolve import INPUTS
from dilated_attention.engine.ops.settings import settings_of
from dilated_attention.factory import create_model
from dilated_attention.functional.fused_layers import plain_layers
from dilated_attention.models import LongNetConfig, LongNetLM, Pretrained
from dilated_attention.models.config import sum_over_layers
from dilated_attention.models.loss import CHUNK_BYTES
from dilated_attention.models.summary import cache_bytes, embedding_parameters
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.pattern.checks import as_int
from dilated_attention.planning.attention import ESTIMATE_BY_HAND, fit_of, pairs_of, passes_of, shared_fields
from dilated_attention.planning.gpus import Gpu
from dilated_attention.planning.memory import counts_of, memory_of, sizes_of
from dilated_attention.planning.plans import ModelPlan, seconds_text
from dilated_attention.planning.problem import MOST, Problem, kind_of, make_problem
from dilated_attention.planning.ring import exchange_of
from dilated_attention.validation import check_bool

# positions of a prompt that generation computes at a time (models/language_model.py)
PREFILL = 8192
# lengths of the two traces, and the blocks that are traced of a deep stack, of which those in the middle stand for the others
_LENGTHS, _BLOCKS = (2048, 3072), 5
# shares of the peaks that linear layers, and the memory traffic between them, are assumed to reach. With these, the estimate for a training
# step of Prov-GigaPath's encoder on 45,681 tiles matches what an H200 measured
# (benchmarks/results/2026-11-21-h200/slide-encoder.jsonl)
_BANDWIDTH_SHARE, _LINEAR_SHARE = 0.5, 0.45
# fitted to steps on an H200 (benchmarks/results/2026-11-21-h200/decode.jsonl; 2026-11-21-h200/train-infer.json holds others): a step of
# 12 blocks that reads few keys takes 0.84 ms as a CUDA graph, and a dense row of many keys reads at 3.7 to 4.5 of the 4.8 TB/s
_DECODE_SECONDS, _READ_SHARE = 0.84e-3 / 12, 0.9
# rows over which the keys of a generated token are averaged
_ROWS = 4096
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

    @property
    def model(self) -> Pretrained:
        return model_of(self.preset, self.overrides)


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
    """Estimates what a model needs on one process: its blocks are traced with fake tensors, attention and the loss are formulas.

    Args:
        preset: a name of ``factory.MODEL_PRESETS``.
        num_positions: N of each sequence; for a slide its tiles, for an image its patches.
        batch_size: sequences at a time.
        training: a step of forward, backward and AdamW in float32. False: a language model generates, with keys and values of N positions
            cached and prompts processed ``PREFILL`` positions at a time; any other model runs its forward.
        world_size: processes that share each sequence (context parallelism), one GPU each.
        weight_shards: processes over which FSDP shards weights, gradients and the optimizer's moments; two blocks at a time are gathered
            whole.
        checkpoint_activations: see ``create_model``.
        dtype: that the model computes in; None for the default of ``plan_attention``.
        autocast: weights in float32 and autocast to ``dtype``; None enables it in training where ``dtype`` is a 16-bit one.
        gpu, memory, find_longest: see ``plan_attention``.
        overrides: fields of the preset's configuration, see ``create_model``.

    Raises:
        ValueError, TypeError: see ``plan_attention`` and ``create_model``.

    >>> print(plan_model("llama-1b", num_positions=131072, gpu="H200",
    ...                  checkpoint_activations=True))
    """
    flags = {"checkpoint_activations": checkpoint_activations, "find_longest": find_longest}
    for name, flag in (flags if autocast is None else flags | {"autocast": autocast}).items():
        check_bool(name, flag)
    as_int("weight_shards", weight_shards, minimum=1, maximum=MOST["weight_shards"])
    # overrides are frozen because plans are cached by their arguments
    fields = tuple((name, _frozen(value)) for name, value in sorted(overrides.items()))
    model = model_of(preset, fields)
    config = stack_of(model)
    # the attention of each layer
    problems = tuple(
        make_problem(
            kind_of(one.kind, world_size), num_positions=num_positions, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim, batch_size=batch_size, dtype=dtype, world_size=world_size, is_causal=config.is_causal,
            training=training, layout=None if world_size == 1 else "contiguous", pattern=None if one.kind == "dense" else one.pattern,
            gpu=gpu, memory=memory,
        )
        for one in config.cycle
    )  # fmt: skip
    problem = problems[0]
    machine = problem.machine
    half = problem.dtype in (torch.float16, torch.bfloat16)
    casts = (training and half) if autocast is None else autocast
    if casts and not half:
        raise ValueError(f"autocast is True and dtype is {problem.dtype}; autocast computes in float16 or bfloat16: leave it out")
    run = Run(
        preset=preset, overrides=fields, batch_size=batch_size, training=training, dtype=problem.dtype, casts=casts,
        checkpoint_activations=checkpoint_activations, on_gpu=not machine.is_cpu,
    )  # fmt: skip

    def bytes_needed(other: Problem) -> int:
        of_length = tuple(one.of_length(other.num_positions) for one in problems)
        return sum(size for _, size in _peak_of_step(run, weight_shards, of_length)[0])

    terms, moment = _peak_of_step(run, weight_shards, problems)
    fits, longest = fit_of(problem, bytes_needed, find_longest)
    # that of the layer which receives most
    exchange = max(map(exchange_of, problems), key=lambda one: one.bytes.forward_received)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    parameters, cached = sum(sizes.values()), _cache_of(run, problem)
    # a lookup costs nothing, but a tied embedding is also the matrix of the output layer
    multiplied = parameters - (0 if config.tie_embeddings else embedding_parameters(sizes))
    # 2 per matrix parameter and position, and 4·E per pair of a layer and head; the backward twice that
    flops = (6 if training else 2) * multiplied * batch_size * num_positions
    pairs = sum_over_layers([pairs_of(one)[0] for one in problems], config.num_layers)
    attended = (12 if training else 4) * config.embed_dim * pairs / config.num_heads
    # the GPU's time alone is far too short where chunks wait for the CPU
    why_not = "a prompt enters the cache in chunks and mostly waits for the CPU; python -m benchmarks train-infer measures it"
    times = _step_seconds(run, problems, flops) if cached is None else (None, "", why_not)
    decode: tuple[float | None, str] = (None, "")
    if cached is not None and weight_shards == 1:
        decode = _decode_seconds(config.num_layers, problems, cached, multiplied * run.weight_dtype.itemsize)
    return ModelPlan(
        **shared_fields(problem), preset=preset, autocast=casts, weight_shards=weight_shards, parameters=parameters,
        checkpoint_activations=checkpoint_activations, layers=config.num_layers, terms=terms, moment=moment, flops=flops + attended,
        exchange=exchange, seconds=times[0], time_source=times[1], no_time=times[2], fits=fits, longest=longest, decode_seconds=decode[0],
        decode_source=decode[1],
    )  # fmt: skip


@functools.lru_cache(maxsize=16)
def model_of(preset: str, overrides: tuple[tuple[str, Any], ...]) -> Pretrained:
    return create_model(preset, **{name: _thawed(value) for name, value in overrides}, device="meta")


def stack_of(model: Pretrained) -> LongNetConfig:
    """Returns the configuration of a model's blocks."""
    config: LongNetConfig = getattr(model.config, "encoder", model.config)
    return config


def _peak_of_step(run: Run, shards: int, problems: tuple[Problem, ...]) -> tuple[Terms, str]:
    """Returns (terms at the highest point, when it occurs), for the process with the highest peak. FSDP shards weights, gradients and the
    optimizer's moments over ``shards`` processes, and gathers blocks whole. Where layers differ, each is taken to need what the one that
    needs most does."""
    problem = problems[0]
    size, rows = run.weight_dtype.itemsize, problem.rows
    sizes = [parameter.numel() * size for parameter in run.model.parameters()]
    blocks = [sum(p.numel() for p in x.parameters()) for name, x in run.model.named_modules() if name.rpartition(".")[0].endswith("blocks")]
    total, workspace = sum(sizes), (32 if problem.machine.capability >= (9, 0) else 8) * 2**20 * run.on_gpu
    # a workspace for each thread that runs matrix products: the caller's, and autograd's
    always = [("weights", -(-total // shards)), ("cuBLAS's workspaces", (1 + run.training) * workspace)]
    always += [("two unsharded blocks", 2 * max(blocks, default=0) * size * (shards > 1))]
    cached = _cache_of(run, problem)
    at_a_time = rows if cached is None else min(rows, PREFILL)
    each = [_inside_attention(one.of_length(at_a_time) if at_a_time < rows else one) for one in problems]
    inside, kept = {name: max(one[name] for one in each) for name in ("forward", "backward")}, max(map(_kept_bytes, problems))
    moments, num_forward = _moments_of(run, at_a_time)
    candidates: list[tuple[Terms, str]] = []
    loss_grads = 0
    if run.training:
        # torch's AdamW computes the roots of all parameters' second moments at once on a GPU, of one at a time on a CPU
        temporaries = total // shards if run.on_gpu else 2 * max(sizes)
        candidates.append(((("gradients", total // shards), ("optimizer's temporaries", temporaries)), "in the optimizer's step"))
        # at the loss, no gradient of the stack has been computed yet
        end, (loss, loss_grads) = moments[num_forward - 1], _loss_of(run, rows)
        activations = "activations", end.alive + kept * end.kept
        candidates.append(((activations, ("logits and their gradients, a chunk at a time", loss)), "at the loss"))
        always.append(("optimizer's moments", -(-2 * total // shards)))
    for index, x in enumerate(moments):
        is_backward = index >= num_forward
        parts: Terms = (
            ("gradients", x.grads // shards + loss_grads * is_backward), ("activations", x.alive + kept * x.kept - x.grads),
            ("inside attention", inside.get(x.attention, 0)),
        )  # fmt: skip
        candidates.append((parts, "in the backward" if is_backward else "in the forward"))
    highest, moment = max(candidates, key=lambda one: sum(size for _, size in one[0]))
    return tuple(term for term in (*always, ("keys and values of the cache", cached or 0), *highest) if term[1]), moment


def _loss_of(run: Run, rows: int) -> tuple[int, int]:
    """Returns (peak bytes of the loss and its backward, hidden states included; of these, the gradients of the output layer)."""
    if not isinstance(run.model, LongNetLM):
        return 0, 0
    vocabulary, embed = run.model.output_weight.shape
    e, size = run.dtype.itemsize, run.weight_dtype.itemsize
    rows, grads = rows * run.batch_size, vocabulary * embed * size
    # a chunk as computed, in float32, and its softmax or gradient; hidden states and their gradients; the weight's cast and gradient
    chunk = min(rows, max(1, CHUNK_BYTES // (4 * vocabulary))) * vocabulary * (8 + e * (e < 4))
    return chunk + 2 * rows * embed * size + grads + vocabulary * embed * e * run.casts, grads


def _cache_of(run: Run, problem: Problem) -> int | None:
    """Returns the bytes of the keys and values that generation caches; None where a run does not generate from a cache."""
    if run.training or problem.world_size > 1 or not isinstance(run.model, LongNetLM):
        return None
    each = cache_bytes(stack_of(run.model), problem.num_positions, run.dtype.itemsize)
    return None if each is None else run.batch_size * each


def _inside_attention(problem: Problem) -> dict[str, int]:
    """Returns the bytes, forward and backward, that attention allocates in addition to its inputs and results, which the trace counts."""
    estimate, (Q, K, R, e, a) = memory_of(problem), sizes_of(problem)
    # q, k, v and out; with gradients twice that
    peaks = {"forward": estimate.forward_peak - 2 * (Q + K) * e, "backward": estimate.backward_peak - 4 * (Q + K) * e}
    return {name: max(0, peak - R * a) for name, peak in peaks.items()}


def _kept_bytes(problem: Problem) -> int:
    """Returns the bytes of branch outputs that a call with detached mixing saves on a GPU (engine/ops/prepare.py)."""
    if problem.machine.is_cpu or problem.world_size > 1 or not isinstance(problem.pattern, DilatedPattern):
        return 0
    q, k = ((problem.batch_size, problem.num_positions, heads, problem.head_dim) for heads in (problem.num_heads, problem.num_kv_heads))
    e = problem.dtype.itemsize
    return e * int(saved_elements(problem.pattern, q, k, e))


class _Moment(NamedTuple):
    """The state after one operation.

    ``alive, grads``: bytes of everything created since the trace began that still lives; of these, the gradients of parameters. ``kept``:
    number of attention calls with detached mixing whose branch outputs may be alive, since a GPU saves them for the backward. ``moved``:
    bytes that operations, except attention, have read and written so far. ``attention``: ``"forward"`` or ``"backward"`` of an attention
    op, whose internal memory is not counted here; else "".
    """

    alive: int
    grads: int
    kept: int
    moved: int
    attention: str


class _Tape(TorchDispatchMode):
    """Records a moment for each operation that creates something. Parameters are counted elsewhere, their gradients apart."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.moments: list[_Moment] = []
        self.alive = self.grads = self.kept = self.moved = 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()
        for parameter in parameters:
            self.seen.add(parameter.untyped_storage())
            parameter.register_post_accumulate_grad_hook(self._made_grad)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made, name = 0, str(func)
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage()) not in self.seen:
                self.seen.add(storage)
                made += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes(), 0)
        self.alive += made
        attention = "" if "_attention" not in name.partition(".")[2] else "backward" if "_backward" in name else "forward"
        if attention == "forward" and (settings := settings_of(*args[len(INPUTS) :])).detached and settings.needs_grad:
            # the branch outputs are freed together with the log-sum-exp, which the backward needs as well
            self.kept += 1
            weakref.finalize(out[1].untyped_storage(), self._free, 0, 1)
        if made and not attention:
            # a lookup reads the rows that it returns, not the table
            read = sum(x.nbytes for x in tree_iter(args) if isinstance(x, torch.Tensor))
            self.moved += made + (made if name == "aten.embedding.default" else read)
        if made or attention:
            self.moments.append(_Moment(self.alive, self.grads, self.kept, self.moved, attention))
        return out

    def _made_grad(self, parameter: torch.Tensor) -> None:
        self.grads += 0 if parameter.grad is None else parameter.grad.untyped_storage().nbytes()

    def _free(self, size: int, kept: int) -> None:
        self.alive -= size
        self.kept -= kept


class _Loss(torch.autograd.Function):
    """A number that does not keep the hidden states alive, whose gradient for them nothing keeps either."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.like = x.shape, x.dtype
        return x.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        return torch.empty(ctx.like[0], dtype=ctx.like[1])


def _moments_of(run: Run, positions: int) -> tuple[list[_Moment], int]:
    """Returns the moments of the stack's step, from its input to the input's gradient, and how many of them are of the forward."""
    (short, num_forward), (long, _) = (_trace(run, rows) for rows in _LENGTHS)
    part = (positions - _LENGTHS[0]) / (_LENGTHS[1] - _LENGTHS[0])
    found = []
    for a, b in zip(short, long, strict=True):
        alive, grads, kept, moved = (x + round(part * (y - x)) for x, y in zip(a[:4], b[:4], strict=True))
        found.append(_Moment(alive, grads, kept, moved, a.attention))
    return found, num_forward


@functools.lru_cache(maxsize=64)
def _trace(run: Run, rows: int) -> tuple[list[_Moment], int]:
    """Returns the moments of a step of these rows, and how many are of the forward; of a deep stack of equal blocks from few of them."""
    config = stack_of(run.model)
    if config.num_layers <= _BLOCKS or config.kind == "mixed":
        return _trace_of(run, rows, config.num_layers)
    moments, num_forward = _trace_of(run, rows, _BLOCKS)
    count = config.num_layers - _BLOCKS
    forward, each = _deepened(moments[:num_forward], count)
    backward, _ = _deepened(moments[num_forward:], count)
    return forward + [_later(x, each, count) for x in backward], len(forward)


def _later(moment: _Moment, each: Sequence[int], count: int) -> _Moment:
    """Returns a moment after ``count`` more blocks, ``each`` of which changes alive, grads, kept and moved by so much."""
    alive, grads, kept, moved = (x + count * change for x, change in zip(moment[:4], each, strict=True))
    return _Moment(alive, grads, kept, moved, moment.attention)


def _deepened(pass_: list[_Moment], count: int) -> tuple[list[_Moment], list[int]]:
    """Returns the moments of a pass of ``_BLOCKS`` blocks that call attention equally often, with ``count`` more, and what one changes."""
    if not pass_:
        return pass_, [0] * 4
    calls = [i for i, moment in enumerate(pass_) if moment.attention]
    size = calls[len(calls) // 2] - calls[len(calls) // 2 - len(calls) // _BLOCKS]
    second = (len(pass_) - 2 * size) // 2
    third, end = second + size, second + 2 * size
    each = [after - before for after, before in zip(pass_[third][:4], pass_[second][:4], strict=True)]
    added = [_later(x, each, number) for number in range(1, count + 1) for x in pass_[third:end]]
    return [*pass_[:end], *added, *(_later(x, each, count) for x in pass_[end:])], each


def _trace_of(run: Run, rows: int, blocks: int) -> tuple[list[_Moment], int]:
    overrides = {name: _thawed(value) for name, value in run.overrides} | {"checkpoint_activations": run.checkpoint_activations}
    overrides |= {"num_layers": blocks}
    model: Any = create_model(run.preset, **overrides, dtype=run.weight_dtype, device="meta")
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.simplefilter("ignore")
        model.to_empty(device="cpu").train(run.training)
        tape = _Tape(model.parameters())
        # tokens, tiles or patches are created inside the tape: they live as long as the step
        # with the layers' kernels of a GPU, or without
        with (
            plain_layers(forced=run.on_gpu), tape, torch.autocast("cpu", run.dtype, enabled=run.casts), torch.set_grad_enabled(run.training)
        ):  # fmt: skip
            if isinstance(model, LongNetLM):
                given = torch.zeros((run.batch_size, rows), dtype=torch.int64)
                out = model.hidden(given)
            else:
                embedding = getattr(model, "tile_embedding", None) or model.patch_embedding
                is_linear = isinstance(embedding, nn.Linear)
                width = embedding.in_features if is_linear else embedding.in_channels * embedding.kernel_size[0] ** 2
                given = torch.empty((run.batch_size, rows, width), dtype=run.weight_dtype)
                x = nn.functional.linear(given, embedding.weight.flatten(1), embedding.bias)
                # positions are added in the parameters' dtype, which determines the dtype of the residual stream
                out = model.encoder(x + torch.empty_like(x[:1], dtype=run.weight_dtype))
                del x
            loss = _Loss.apply(out) if run.training else out
            del out
            num_forward = len(tape.moments)
            if run.training:
                loss.backward()
        del given
    return tape.moments, num_forward


def _step_seconds(run: Run, problems: tuple[Problem, ...], flops: float) -> tuple[float | None, str, str]:
    """Estimates a training step or a forward: attention, linear layers (``flops``) at a share of the peak, traffic at a share of the
    bandwidth. Returns (seconds, what they are based on, the reason where there are none)."""
    problem = problems[0]
    gpu = problem.machine
    if gpu.is_cpu:
        # whatever was measured of attention alone
        return None, "", f"rates of linear layers on a CPU are not known; {ESTIMATE_BY_HAND}"
    estimates = {one: passes_of(one, exchange_of(one), (0, 0)) for one in problems}
    for passes, why_not in estimates.values():
        if not passes:
            return None, "", why_not
    peak = gpu.peak(problem.dtype)
    if peak is None or gpu.bandwidth is None:
        return None, "", "rates of its linear layers were not measured"
    again = run.training and run.checkpoint_activations

    def seconds_of(one: Problem) -> float:
        passes = estimates[one][0]
        return sum(x.seconds for x in passes) + (passes[0].seconds if again else 0.0)

    attention = sum_over_layers(list(map(seconds_of, problems)), stack_of(run.model).num_layers)
    sources = "; ".join(dict.fromkeys(passes[0].source for passes, _ in estimates.values()))
    linear = flops * (4 / 3 if again else 1) / problem.world_size / (peak * _LINEAR_SHARE)
    moved = _moments_of(run, problem.rows)[0][-1].moved / (gpu.bandwidth * _BANDWIDTH_SHARE)
    source = (
        f"attention {seconds_text(attention)} ({sources}); "
        f"linear layers {seconds_text(linear)}, taken at {_LINEAR_SHARE:.0%} of the peak; "
        f"what is read and written between {seconds_text(moved)}, at {_BANDWIDTH_SHARE:.0%} of the bandwidth; "
        "without the CPU's own time, which short sequences wait for"
    )
    return attention + linear + moved, source, ""


def _decode_seconds(blocks: int, problems: tuple[Problem, ...], cached: int, weight_bytes: int) -> tuple[float | None, str]:
    """Returns (seconds of a step that adds one token to each of B sequences of N positions, what it is based on). ``cached``: bytes of all
    cached keys and values, the most that can be read.

    seconds = blocks · 70 µs + (weights + B · keys and values that a row reads) / (90 % of the bandwidth). None where no rate is known.
    """
    bandwidth = problems[0].machine.bandwidth
    if bandwidth is None:
        return None, ""
    row = 2 * problems[0].num_kv_heads * problems[0].head_dim * problems[0].dtype.itemsize
    read = min(cached, problems[0].batch_size * row * sum_over_layers(list(map(_keys_of_row, problems)), blocks))
    seconds = blocks * _DECODE_SECONDS + (weight_bytes + read) / (bandwidth * _READ_SHARE)
    return seconds, f"{_DECODE_SECONDS * 1e6:.0f} µs a block, as on an H200; weights and cached keys at {_READ_SHARE:.0%} of the bandwidth"


def _keys_of_row(problem: Problem) -> int:
    """Returns how many positions' keys a row after N positions reads; heads that share keys are taken to read different ones."""
    N, H, Hk, pattern = problem.num_positions, problem.num_heads, problem.num_kv_heads, problem.pattern
    if problem.computes == "dense":
        return N
    if isinstance(pattern, BlockPattern):
        # the mean over all rows; where windows are narrow it is that of the last ones
        return -(-counts_of(problem).pairs // (N * Hk))
    rows = min(_ROWS, N)
    return -(-(pattern.pairs(N, H, is_causal=True) - pattern.pairs(N - rows, H, is_causal=True)) // (rows * Hk))


class _Entry(tuple[tuple[str, Any], ...]):
    """The items of a dict of overrides."""


def _frozen(value: Any) -> Any:
    """Converts lists to tuples and dicts to entries, recursively, so that overrides have a hash."""
    if isinstance(value, dict):
        return _Entry((name, _frozen(x)) for name, x in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _thawed(value: Any) -> Any:
    """Returns what was frozen, with tuples in place of lists."""
    if isinstance(value, _Entry):
        return {name: _thawed(x) for name, x in value}
    return tuple(map(_thawed, value)) if isinstance(value, tuple) else value
