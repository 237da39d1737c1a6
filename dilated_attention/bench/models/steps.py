"""Training steps, prompts and decoding steps of language models by kind of attention, timed in turns."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.bench.measure.timing import Timing, in_turns, one_call, synchronise
from dilated_attention.bench.models.language import Shape, started
from dilated_attention.bench.report.rows import Row
from dilated_attention.models import KVCache, LongNetLM
from dilated_attention.models.generation import Stepper, prefill
from dilated_attention.models.summary import footprint

# share of a device's memory that the estimate for weights, gradients, moments and activations may take
_USABLE = 0.85
# tensors of the weights' size and dtype: weights, gradients, two moments
_COPIES = 4
# turns of decoding; places of the context at which a turn takes steps, and positions that these spread over
_TURNS, _PLACES, _SPREAD = 5, 4, 32768


def is_checkpointed(shape: Shape, tokens: int, dtype: torch.dtype, memory: int | None) -> bool:
    """Returns whether AdamW's weights, gradients and moments leave too little of ``memory`` bytes for stored activations, by estimate.

    Args:
        memory: None for a CPU, whose small models fit.
    """
    model = shape.model("dense", device="meta")
    needed = _COPIES * model.num_parameters * dtype.itemsize + footprint(model.config, 0, checkpoint_activations=False).total(tokens)
    return memory is not None and needed > _USABLE * memory


class Trainer:
    """One kind's training step on alternating batches. The parameters and the optimiser are shared with the other kinds."""

    def __init__(self, batches: Sequence[torch.Tensor], shared: dict[str, Any], model: LongNetLM) -> None:
        self.model, self.batches, self.optimizer = model, itertools.cycle(batches), shared["optimizer"]
        self.loss = torch.tensor(math.nan)

    def __call__(self) -> None:
        tokens = next(self.batches)
        try:
            loss = self.model(tokens[:, :-1], targets=tokens[:, 1:])
            loss.backward()
            self.optimizer.step()
        finally:
            # an interrupted step leaves gradients
            self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()


def train(
    shape: Shape, kinds: Sequence[str], context: int, batch: int, *, device: torch.device, dtype: torch.dtype, seconds: float,
    checkpointed: bool | None = None,
) -> list[Row]:  # fmt: skip
    """Returns a row for each kind.

    Values: ``ms`` of a step, with percentiles; ``samples_per_s``, sequences of ``context`` tokens; ``tokens_per_s``; ``tflops`` by the
    FLOPs that the model needs, without recomputation; ``loss`` after the last step; on a GPU ``peak_bytes`` of everything.
    """
    on_gpu = device.type == "cuda"
    if checkpointed is None:
        memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else None
        checkpointed = is_checkpointed(shape, batch * context, dtype, memory)
    case = {"task": "train", "model": shape.name, "N": context, "B": batch, "dtype": str(dtype).removeprefix("torch.")}
    case |= {"optimizer": "AdamW", "checkpointed": checkpointed}
    batches = [_tokens(shape, batch, context + 1, i).to(device) for i in range(4)]
    shared: dict[str, Any] = {}
    peaks: dict[int, dict[str, float]] = {}

    def start(model: LongNetLM) -> Trainer:
        if not shared:
            shared["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
        trainer = Trainer(batches, shared, model)
        # compiles, and creates the moments
        trainer()
        if on_gpu:
            synchronise(device)
            torch.cuda.reset_peak_memory_stats(device)
            trainer()
            synchronise(device)
            peaks[id(trainer)] = {"peak_bytes": torch.cuda.max_memory_allocated(device)}
        return trainer

    options = {"checkpoint_activations": checkpointed}
    rows, able = started(shape, kinds, ("logits", "gradient"), case, start, device, dtype, **options)
    timings = in_turns(able, device, seconds=seconds)
    for i, row in enumerate(rows):
        if row.name not in able:
            continue
        trainer, ms = able[row.name], timings[row.name].ms
        loss, tokens = float(trainer.loss), batch * context
        values = timings[row.name].values() | {"samples_per_s": 1000 * batch / ms, "tokens_per_s": 1000 * tokens / ms, "loss": loss}
        values |= {"tflops": tokens * trainer.model.summary((context,)).training_flops(context) / ms / 1e9}
        is_finite = math.isfinite(loss)
        note = "" if is_finite else f"wrong: the loss is {loss}"
        rows[i] = replace(row, values=values | peaks.get(id(trainer), {}) if is_finite else {}, note=note)
    return rows


class Writer:
    """One kind's model with its cache: full of random numbers, or after a prompt, which can be read repeatedly."""

    def __init__(self, context: int, new_tokens: int, prompt: torch.Tensor | None, batch: int, model: LongNetLM) -> None:
        parameter = next(model.parameters())
        self.model, self.prompt, self.context, self.new_tokens = model.eval(), prompt, context, new_tokens
        spare = 4 + _TURNS * new_tokens if prompt is not None else 0
        self.cache = KVCache(model.config, batch, context + spare, device=parameter.device, dtype=parameter.dtype)
        self.last = torch.zeros(batch, 1, dtype=torch.int64, device=parameter.device)
        if prompt is None:
            for x in (*self.cache.keys, *self.cache.values):
                # a piece at a time: float32 noise for all of a cache would need its memory twice
                for part in x.flatten(0, 1).split(2**20):
                    part.normal_()
            self._at(context // 2)
        else:
            self.read()
        self.step = Stepper(self.model, self.cache)
        # captures the step
        self._write(2)

    @torch.no_grad()
    def read(self) -> None:
        """Reads the prompt into the cache."""
        assert self.prompt is not None
        for request in range(self.cache.num_requests):
            self.cache.free(request)
        self.last = prefill(self.model, self.prompt, self.cache).argmax(-1, keepdim=True)

    def _at(self, place: int) -> None:
        self.cache.lengths = [place] * self.cache.num_requests
        self.cache.positions.fill_(place)

    @torch.no_grad()
    def _write(self, count: int) -> None:
        for _ in range(count):
            self.last = self.step(self.last).argmax(-1, keepdim=True)

    def turn(self) -> int:
        """Generates tokens greedily and returns the steps: after what is there, or at places before the end of a random context.

        What a row reads depends on its place in its segments.
        """
        if self.prompt is not None:
            self._write(self.new_tokens)
            return self.new_tokens
        spread = min(_SPREAD, self.context // 2) // _PLACES
        for i in range(_PLACES):
            self._at(self.context - self.new_tokens - i * spread)
            self._write(self.new_tokens)
        return _PLACES * self.new_tokens


def generate(
    shape: Shape, kinds: Sequence[str], context: int, batch: int, *, device: torch.device, dtype: torch.dtype, seconds: float,
    new_tokens: int = 32, is_random: bool = False,
) -> list[Row]:  # fmt: skip
    """Returns rows of task ``"prefill"``, a prompt of ``context`` tokens, and of task ``"decode"``, steps after it, for each kind.

    Values: ``ms`` of a prompt and of one step of all requests, with percentiles; ``tokens_per_s`` over all requests; ``cache_bytes``.

    Args:
        new_tokens: steps in a row.
        is_random: the cache holds random numbers in place of a prompt, and the only rows are of task ``"step"``.
    """
    case = {"task": "step" if is_random else "prefill", "model": shape.name, "N": context, "B": batch}
    case |= {"dtype": str(dtype).removeprefix("torch.")}
    prompt = None if is_random else _tokens(shape, batch, context, 4).to(device)
    start = functools.partial(Writer, context, new_tokens, prompt, batch)
    rows, able = started(shape, kinds, ("logits", "decoded"), case, start, device, dtype)
    reading = {} if is_random else in_turns({kind: writer.read for kind, writer in able.items()}, device, seconds=seconds)
    samples: dict[str, list[float]] = {kind: [] for kind in able}
    for _ in range(_TURNS):
        for kind, writer in able.items():
            steps = 0

            def turn(writer: Writer = writer) -> None:
                nonlocal steps
                steps = writer.turn()

            took = one_call(turn, device)
            samples[kind].append(1000 * took / steps)
    made = []
    for row in rows:
        if row.name not in able:
            made.append(row)
            continue
        timings = {"prefill": (reading[row.name], batch * context)} if reading else {}
        for task, (timing, tokens) in (timings | {"step" if is_random else "decode": (Timing.of(samples[row.name]), batch)}).items():
            values = timing.values() | {"tokens_per_s": 1000 * tokens / timing.ms, "cache_bytes": able[row.name].cache.nbytes}
            made.append(replace(row, case=row.case | {"task": task}, values=values))
    return made


def _tokens(shape: Shape, batch: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(shape.config.vocab_size or 1, (batch, length), generator=torch.Generator().manual_seed(seed))
