"""Language models of known shapes with random weights: prompts and decoding steps by kind of attention, timed in turns once they are right.

The kinds of attention have no parameters of their own, so their models share every parameter. They process the same tokens, in turns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from dilated_attention.bench import accuracy
from dilated_attention.bench.measure.limits import attempt, release
from dilated_attention.bench.measure.timing import in_turns, loop, summary
from dilated_attention.bench.report.rows import Row
from dilated_attention.factory import MODEL_PRESETS, create_model
from dilated_attention.fork import cached_property
from dilated_attention.models import KVCache, LongNetConfig, LongNetLM
from dilated_attention.models.generation import Stepper, prefill
from dilated_attention.pattern import GlobalLocal, LocalWindow, geometric_branches

KINDS = ("dense", "dilated", "block_sparse")
# further kinds: branches up to 1M positions, and 2,048 keys with 128 global ones
MORE_KINDS = ("dilated-1M", "global-local")
# layers of the models compared with float64; each adds its own rounding
LAYERS = 2
# turns of decoding; places of a random context at which a turn takes steps, and positions that these spread over
_TURNS, _PLACES, _SPREAD = 5, 4, 32768


@dataclass(frozen=True)
class Shape:
    """A model: a preset, with fields changed where a run uses a reduced model.

    Args:
        preset: of ``factory.presets``.
        changes: fields that differ.
        small: whether windows and segments are short, too.
    """

    preset: str
    changes: dict[str, Any] = field(default_factory=dict)
    small: bool = False

    @property
    def name(self) -> str:
        """Returns the name of the measured model, which shows a reduction: ``"gpt2-124m cut to 2 × 128"``."""
        return self.preset if not self.changes else f"{self.preset} cut to {self.config.num_layers} × {self.config.embed_dim}"

    @cached_property
    def config(self) -> LongNetConfig:
        """Returns the configuration with dense attention."""
        return self.model("dense", device="meta").config

    def kind(self, name: str) -> dict[str, Any]:
        """Returns the configuration fields of a kind of attention."""
        window, lengths, rates = 256 if self.small else 1024, *geometric_branches(*((4096, 256) if self.small else (2**20, 2048)))
        kinds: dict[str, dict[str, Any]] = {
            "dense": {"attention": "dense"},
            "dilated": {"segment_lengths": (256, 1024), "dilation_rates": (1, 4)} if self.small else {},
            "dilated-1M": {"segment_lengths": lengths, "dilation_rates": rates},
            "global-local": {"attention": "block_sparse", "block_pattern": GlobalLocal((2 * window - 1, 0), 128)},
            "block_sparse": {"attention": "block_sparse", "block_pattern": LocalWindow((window - 1, 0), block_size=min(128, window // 4))},
        }
        return kinds[name]

    def legend(self, kind: str) -> str:
        """Describes what a query attends to."""
        config = self.model(kind, device="meta").config
        if config.kind == "dilated":
            return "segments/rates " + ", ".join(f"{w:,}/{r}" for w, r in zip(config.segment_lengths, config.dilation_rates, strict=True))
        return "all keys before it" if config.kind == "dense" else repr(config.pattern)

    def model(self, kind: str, **options: Any) -> LongNetLM:
        # XPOS overflows bfloat16 in long contexts, and the other positions take the same time
        positions = {"positions": "rotary"} if getattr(MODEL_PRESETS[self.preset], "positions", "") == "xpos" else {}
        return cast(LongNetLM, create_model(self.preset, **positions | self.changes | self.kind(kind), **options))


def family(shape: Shape, kinds: Sequence[str], device: torch.device, dtype: torch.dtype) -> dict[str, LongNetLM]:
    """Returns a model for each kind, all sharing the same parameters."""
    torch.manual_seed(0)
    first, found = shape.model("dense", device=device, dtype=dtype), dict[str, LongNetLM]()
    for kind in kinds:
        found[kind] = shape.model(kind, device="meta", dtype=dtype)
        found[kind].load_state_dict(first.state_dict(keep_vars=True), assign=True)
    return found


@functools.cache
def check(preset: str, head_dim: int, small: bool, kind: str, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Returns relative errors against float64 on plain PyTorch, of two narrow layers with the preset's head dim. Computed once per process.

    ``"logits"``; ``"decoded"``: logits of tokens decoded with a cache, against those of the whole sequence. The context is longer than
    the window and the first segment.
    """
    narrow = {"vocab_size": 256, "num_layers": LAYERS, "num_heads": 2, "embed_dim": 2 * head_dim, "ffn_dim": 8 * head_dim}
    grouped = cast(LongNetConfig, MODEL_PRESETS[preset]).num_kv_heads is not None
    shape = Shape(preset, narrow | {"num_kv_heads": 1 if grouped else None}, small)
    torch.manual_seed(1)
    model = shape.model(kind, device=device, dtype=dtype)
    exact = shape.model(kind, device="cpu", dtype=torch.float64, backend="math")
    exact.load_state_dict(model.state_dict())
    length, new = 600 if small else 2560, 4
    tokens = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(2))
    here = tokens.to(device)
    model.eval()
    with torch.no_grad():
        logits, true = model(here).cpu(), exact(tokens)
        cache = KVCache(model.config, 1, length, device=device, dtype=dtype)
        decoded = [prefill(model, here[:, : length - new], cache)]
        step = Stepper(model, cache)
        decoded += [step(here[:, i : i + 1]).clone() for i in range(length - new, length)]
    return {
        "logits": accuracy.relative(logits, true),
        "decoded": accuracy.relative(torch.stack(decoded, 1).cpu(), true[:, length - new - 1 :]),
    }


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
        errors, note = attempt(check, shape.preset, shape.config.head_dim, shape.small, kind, device, dtype)
        note = note or accuracy.wrong(errors or {}, LAYERS * accuracy.BOUNDS[dtype])
        about = {"dtype": str(dtype).removeprefix("torch."), "attention": shape.legend(kind)}
        rows[kind] = Row(name=kind, case=case | about, errors=errors or {}, note=note)
    release()
    random = torch.Generator().manual_seed(4)
    prompt = None if is_random else torch.randint(shape.config.vocab_size or 1, (batch, context), generator=random).to(device)
    right = [kind for kind in kinds if not rows[kind].note]
    models, why = attempt(family, shape, right, device, dtype)
    for kind in right:
        writer, note = (None, why) if models is None else attempt(Writer, context, new_tokens, prompt, batch, models[kind])
        if writer is not None:
            able[kind] = writer
        elif able and note == "out of memory":
            note += ", with what the other kinds hold"
        rows[kind] = replace(rows[kind], note=note)
    reading = {} if is_random else in_turns({kind: writer.read for kind, writer in able.items()}, device, seconds=seconds)
    samples = [{kind: loop(writer.turn, device) for kind, writer in able.items()} for _ in range(_TURNS)]
    found = [row for kind, row in rows.items() if kind not in able]
    for kind, writer in able.items():
        steps = new_tokens * len(writer.places)
        timings = {} if is_random else {"prefill": (reading[kind], batch * context)}
        timings["step" if is_random else "decode"] = summary([took[kind] / steps for took in samples]), batch
        for task, (timing, tokens) in timings.items():
            values = timing | {"tokens_per_s": 1000 * tokens / timing["ms"], "cache_bytes": writer.cache.nbytes}
            found.append(replace(rows[kind], case=rows[kind].case | {"task": task}, values=values))
    return found
