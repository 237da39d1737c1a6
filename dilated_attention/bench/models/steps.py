"""Training steps, prompts and decoding steps of language models by kind of attention, timed in turns."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dilated_attention.bench.measure.timing import Timing, in_turns, one_call
from dilated_attention.bench.models.language import Shape, started
from dilated_attention.bench.report.rows import Row
from dilated_attention.models import KVCache, LongNetLM
from dilated_attention.models.generation import Stepper, prefill
from dilated_attention.models.summary import footprint

# share of a device's memory that the estimate for weights, gradients, moments and activations may take
_USABLE = 0.85
# tensors of the weights' size and dtype: weights, gradients, two moments
_COPIES = 4
# turns of decoding; places of a random context at which a turn takes steps, and positions that these spread over
_TURNS, _PLACES, _SPREAD = 5, 4, 32768


def is_checkpointed(shape: Shape, tokens: int, dtype: torch.dtype, memory: int) -> bool:
    """Returns whether AdamW's weights, gradients and moments leave too little of ``memory`` bytes for stored activations, by estimate."""
    model = shape.model("dense", device="meta")
    needed = _COPIES * model.num_parameters * dtype.itemsize + footprint(model.config, 0, checkpoint_activations=False).total(tokens)
    return needed > _USABLE * memory


class Trainer:
    """One kind's training step on alternating batches. The parameters and the optimiser are shared with the other kinds."""

    def __init__(self, batches: Sequence[torch.Tensor], shared: dict[str, Any], model: LongNetLM) -> None:
        self.model, self.batches, self.values = model, itertools.cycle(batches), dict[str, float]()
        device = batches[0].device
        if not shared:
            shared["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.optimizer = shared["optimizer"]
        # compiles, and creates the moments
        self()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self()
            torch.cuda.synchronize(device)
            self.values["peak_bytes"] = torch.cuda.max_memory_allocated(device)

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
    if checkpointed is None:
        # small models, which a CPU measures, fit
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**62
        checkpointed = is_checkpointed(shape, batch * context, dtype, memory)
    case = {"task": "train", "optimizer": "AdamW", "checkpointed": checkpointed} | _case(shape, context, batch, dtype)
    start = functools.partial(Trainer, [_tokens(shape, batch, context + 1, i).to(device) for i in range(4)], {})
    rows, able = started(shape, kinds, ("logits", "gradient"), case, start, device, dtype, checkpoint_activations=checkpointed)
    timings = in_turns(able, device, seconds=seconds)
    for i, row in enumerate(rows):
        if row.name not in able:
            continue
        trainer, ms, tokens = able[row.name], timings[row.name].ms, batch * context
        if not math.isfinite(loss := float(trainer.loss)):
            rows[i] = replace(row, note=f"wrong: the loss is {loss}")
            continue
        values = timings[row.name].values() | {"samples_per_s": 1000 * batch / ms, "tokens_per_s": 1000 * tokens / ms, "loss": loss}
        values |= {"tflops": tokens * trainer.model.summary((context,)).training_flops(context) / ms / 1e9}
        rows[i] = replace(row, values=values | trainer.values)
    return rows


class Writer:
    """One kind's model with its cache: full of random numbers, or after a prompt. A turn writes again at the same places."""

    def __init__(self, context: int, new_tokens: int, prompt: torch.Tensor | None, batch: int, model: LongNetLM) -> None:
        parameter, length = next(model.parameters()), context + (0 if prompt is None else new_tokens)
        # what a row reads depends on its place in its segments
        spread = min(_SPREAD, context // 2) // _PLACES
        self.places = [length - new_tokens - i * spread for i in range(_PLACES if prompt is None else 1)]
        self.model, self.prompt, self.new_tokens = model.eval(), prompt, new_tokens
        self.cache = KVCache(model.config, batch, length, device=parameter.device, dtype=parameter.dtype)
        self.last = torch.zeros(batch, 1, dtype=torch.int64, device=parameter.device)
        if prompt is not None:
            self.read()
        else:
            for x in (*self.cache.keys, *self.cache.values):
                # a piece at a time: float32 noise for all of a cache would need its memory twice
                for part in x.flatten(0, 1).split(2**20):
                    part.normal_()
        self.step = Stepper(self.model, self.cache)
        # captures the step
        self.turn()

    @torch.no_grad()
    def read(self) -> None:
        """Reads the prompt into the cache."""
        assert self.prompt is not None
        for request in range(self.cache.num_requests):
            self.cache.free(request)
        self.last = prefill(self.model, self.prompt, self.cache).argmax(-1, keepdim=True)

    @torch.no_grad()
    def turn(self) -> None:
        """Writes the likeliest tokens after each place."""
        for place in self.places:
            self.cache.lengths = [place] * self.cache.num_requests
            self.cache.positions.fill_(place)
            for _ in range(self.new_tokens):
                self.last = self.step(self.last).argmax(-1, keepdim=True)


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
    case = {"task": "step" if is_random else "prefill"} | _case(shape, context, batch, dtype)
    prompt = None if is_random else _tokens(shape, batch, context, 4).to(device)
    start = functools.partial(Writer, context, new_tokens, prompt, batch)
    rows, able = started(shape, kinds, ("logits", "decoded"), case, start, device, dtype)
    reading = {} if is_random else in_turns({kind: writer.read for kind, writer in able.items()}, device, seconds=seconds)
    samples = [{kind: one_call(writer.turn, device) for kind, writer in able.items()} for _ in range(_TURNS)]
    made = [row for row in rows if row.name not in able]
    for row in rows:
        if row.name in able:
            writer = able[row.name]
            steps = new_tokens * len(writer.places)
            timings = {"prefill": (reading[row.name], batch * context)} if reading else {}
            timings["step" if is_random else "decode"] = Timing.of([1000 * took[row.name] / steps for took in samples]), batch
            for task, (timing, tokens) in timings.items():
                values = timing.values() | {"tokens_per_s": 1000 * tokens / timing.ms, "cache_bytes": writer.cache.nbytes}
                made.append(replace(row, case=row.case | {"task": task}, values=values))
    return made


def _case(shape: Shape, context: int, batch: int, dtype: torch.dtype) -> dict[str, Any]:
    return {"model": shape.name, "N": context, "B": batch, "dtype": str(dtype).removeprefix("torch.")}


def _tokens(shape: Shape, batch: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(shape.config.vocab_size or 1, (batch, length), generator=torch.Generator().manual_seed(seed))
