"""Prompts and decoding steps of language models by kind of attention, timed in turns."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from dilated_attention.bench.accuracy import correctness
from dilated_attention.bench.measure.skip import attempt, release
from dilated_attention.bench.measure.timing import Timing, in_turns, one_call
from dilated_attention.bench.models.language import LAYERS, Shape, check, family
from dilated_attention.bench.report.rows import Row
from dilated_attention.models import KVCache, LongNetLM
from dilated_attention.models.generation import Stepper, prefill

# turns of decoding; places of a random context at which a turn takes steps, and positions that these spread over
_TURNS, _PLACES, _SPREAD = 5, 4, 32768


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

    Values: ``ms`` of a prompt and of one step of all requests, with percentiles; ``tokens_per_s`` of all requests; ``cache_bytes``. A kind
    that is wrong, is refused or does not fit has one row with a note.

    Args:
        new_tokens: steps in a row.
        is_random: the cache holds random numbers in place of a prompt, and the only rows are of task ``"step"``.
    """
    case = {"task": "step" if is_random else "prefill", "model": shape.name, "N": context, "B": batch}
    rows, able = dict[str, Row](), dict[str, Writer]()
    for kind in kinds:
        checked = attempt(functools.partial(check, shape.preset, shape.config.head_dim, shape.small, kind, device, dtype))
        note = checked.note or correctness.wrong(checked.value or {}, LAYERS * correctness.BOUNDS[dtype])
        about = {"dtype": str(dtype).removeprefix("torch."), "attention": shape.legend(kind)}
        rows[kind] = Row(name=kind, case=case | about, errors=checked.value or {}, note=note)
    release()
    random = torch.Generator().manual_seed(4)
    prompt = None if is_random else torch.randint(shape.config.vocab_size or 1, (batch, context), generator=random).to(device)
    right = [kind for kind in kinds if not rows[kind].note]
    models = attempt(functools.partial(family, shape, right, device, dtype))
    for kind in right:
        note = models.note
        if models.value is not None:
            made = attempt(functools.partial(Writer, context, new_tokens, prompt, batch, models.value[kind]))
            note = made.note + (", with what the other kinds hold" if able and made.note == "out of memory" else "")
            if made.value is not None:
                able[kind] = made.value
        rows[kind] = replace(rows[kind], note=note)
    reading = {} if is_random else in_turns({kind: writer.read for kind, writer in able.items()}, device, seconds=seconds)
    samples = [{kind: one_call(writer.turn, device) for kind, writer in able.items()} for _ in range(_TURNS)]
    found = [row for kind, row in rows.items() if kind not in able]
    for kind, writer in able.items():
        steps = new_tokens * len(writer.places)
        timings = {} if is_random else {"prefill": (reading[kind], batch * context)}
        timings["step" if is_random else "decode"] = Timing.of([1000 * took[kind] / steps for took in samples]), batch
        for task, (timing, tokens) in timings.items():
            values = timing.values() | {"tokens_per_s": 1000 * tokens / timing.ms, "cache_bytes": writer.cache.nbytes}
            found.append(replace(rows[kind], case=rows[kind].case | {"task": task}, values=values))
    return found
