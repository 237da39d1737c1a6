"""Generation with a language model, by kind of attention: the prompt into a cache, then token by token, in turns."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from dilated_attention.bench.measure.skip import attempt, release
from dilated_attention.bench.measure.timing import Timing, in_turns, one_call, synchronise
from dilated_attention.bench.report.rows import Row
from dilated_attention.bench.workloads.language import Shape, family, right
from dilated_attention.models import KVCache, LongNetLM
from dilated_attention.models.generation import Stepper, prefill

# number of decoding turns
_TURNS = 5


@dataclass
class Writer:
    """One kind's model with its cache. A prompt can be read repeatedly; generated tokens follow it."""

    model: LongNetLM
    cache: KVCache
    prompt: torch.Tensor
    last: torch.Tensor | None = None
    step: Stepper | None = None

    @torch.no_grad()
    def read(self) -> None:
        """Reads the prompt into the cache."""
        for request in range(self.cache.num_requests):
            self.cache.free(request)
        self.last = prefill(self.model, self.prompt, self.cache).argmax(-1, keepdim=True)

    @torch.no_grad()
    def write(self, count: int) -> None:
        """Generates ``count`` tokens greedily."""
        assert self.last is not None
        self.step = self.step or Stepper(self.model, self.cache)
        for _ in range(count):
            self.last = self.step(self.last).argmax(-1, keepdim=True)


def measure(
    shape: Shape,
    kinds: tuple[str, ...],
    context: int,
    batch: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
    new_tokens: int = 32,
) -> list[Row]:
    """Returns two rows for each kind: task ``"prefill"`` of a prompt of ``context`` tokens, and ``"decode"`` after it.

    Values: ``ms`` of a whole prompt and of one step of all requests, with percentiles; ``tokens_per_s`` over all requests;
    ``cache_bytes``; on a GPU ``peak_bytes`` of everything, excluding the other kinds' caches.

    Args:
        new_tokens: tokens generated in one turn.
    """
    case = {"model": shape.name, "N": context, "B": batch, "dtype": str(dtype).removeprefix("torch.")}
    prefilled, decoded = case | {"task": "prefill"}, case | {"task": "decode"}
    rows, errors = right(shape, kinds, ("logits", "decoded"), prefilled, device, dtype)
    attention = {kind: {"attention": shape.legend(kind)} for kind in kinds}
    release()
    if not errors:
        return rows
    made = attempt(functools.partial(family, shape, tuple(errors), device, dtype))
    if made.value is None:
        return [*rows, *(Row(name=kind, case=prefilled | attention[kind], note=made.note) for kind in errors)]
    generator = torch.Generator().manual_seed(4)
    vocab = shape.config.vocab_size
    assert vocab is not None
    prompt = torch.randint(vocab, (batch, context), generator=generator).to(device)
    writers: dict[str, Writer] = {}
    peaks: dict[str, int | None] = {}
    for kind, model in made.value.items():
        others = sum(writer.cache.nbytes for writer in writers.values())
        first = attempt(functools.partial(_first, model.eval(), prompt, new_tokens, device, dtype))
        if first.value is None:
            beside = " beside the other kinds' caches" if first.note == "out of memory" and writers else ""
            rows.append(Row(name=kind, case=prefilled | attention[kind], note=first.note + beside))
        else:
            writers[kind], peak = first.value
            peaks[kind] = None if peak is None else peak - others
    reading = in_turns({kind: writer.read for kind, writer in writers.items()}, device, seconds=seconds)
    writing = _written(writers, new_tokens, device)
    for kind, writer in writers.items():
        more = {"cache_bytes": writer.cache.nbytes} | ({} if peaks[kind] is None else {"peak_bytes": peaks[kind]})
        for row_case, timing, tokens in ((prefilled, reading[kind], batch * context), (decoded, writing[kind], batch)):
            values = timing.values() | {"tokens_per_s": 1000 * tokens / timing.ms} | more
            rows.append(Row(name=kind, case=row_case | attention[kind], values=values, errors=errors[kind]))  # type: ignore[arg-type]
    return rows


def _first(model: LongNetLM, prompt: torch.Tensor, new_tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Writer, int | None]:
    """Reads a prompt and generates some tokens, which compiles kernels and captures the step. Also returns the peak; None without CUDA."""
    batch, context = prompt.shape
    longest = context + 4 + _TURNS * new_tokens
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    writer = Writer(model, KVCache(model.config, batch, longest, device=device, dtype=dtype), prompt)
    writer.read()
    writer.write(2)
    synchronise(device)
    return writer, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _written(writers: dict[str, Writer], new_tokens: int, device: torch.device) -> dict[str, Timing]:
    """Returns the milliseconds of a step: each turn generates a few tokens after the previous ones."""
    samples: dict[str, list[float]] = {kind: [] for kind in writers}
    for writer in writers.values():
        writer.write(2)
    for _ in range(_TURNS):
        for kind, writer in writers.items():
            samples[kind].append(1000 * one_call(functools.partial(writer.write, new_tokens), device) / new_tokens)
    return {kind: Timing.of(times) for kind, times in samples.items()}
