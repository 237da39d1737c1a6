"""Language models of known shapes with random weights: steps of generating after a long context, by kind of attention, timed in turns.

The kinds of attention have no parameters of their own, so their models share every parameter.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any, cast

import torch

from benchmarks.report import Row
from benchmarks.timing import attempt, loop, release
from benchmarks.truth import BOUNDS, relative, wrong
from dilated_attention.factory import MODEL_PRESETS, create_model
from dilated_attention.models import KVCache, LongNetConfig, LongNetLM
from dilated_attention.models.generation import Stepper, prefill
from dilated_attention.pattern import GlobalLocal, LocalWindow, geometric_branches

KINDS = ("dense", "dilated", "block_sparse", "dilated-1M", "global-local")
# layers of the models compared with float64; each adds its own rounding
_LAYERS = 2
# turns of steps; places of the context at which a turn takes steps, and positions that these spread over
_TURNS, _PLACES, _SPREAD = 5, 4, 32768


def model_of(preset: str, kind: str, *, is_small: bool = False, **options: Any) -> LongNetLM:
    """Creates a preset with a kind of attention; a small one has two narrow layers, short windows and segments."""
    config = cast(LongNetConfig, MODEL_PRESETS[preset])
    window, lengths, rates = 256 if is_small else 1024, *geometric_branches(*((4096, 256) if is_small else (2**20, 2048)))
    kinds: dict[str, dict[str, Any]] = {
        "dense": {"attention": "dense"},
        "dilated": {"segment_lengths": (256, 1024), "dilation_rates": (1, 4)} if is_small else {},
        "dilated-1M": {"segment_lengths": lengths, "dilation_rates": rates},
        "global-local": {"attention": "block_sparse", "block_pattern": GlobalLocal((2 * window - 1, 0), 128)},
        "block_sparse": {"attention": "block_sparse", "block_pattern": LocalWindow((window - 1, 0), block_size=min(128, window // 4))},
    }
    # XPOS overflows bfloat16 in long contexts, and the other positions take the same time
    options = ({"positions": "rotary"} if getattr(config, "positions", "") == "xpos" else {}) | options
    if is_small:
        narrow = {"vocab_size": 1024, "num_layers": 2, "num_heads": 2 if config.head_dim > 64 else 4, "embed_dim": 128, "ffn_dim": None}
        options = narrow | ({"num_kv_heads": 1} if config.num_kv_heads else {}) | options
    return cast(LongNetLM, create_model(preset, **kinds[kind] | options))


@functools.cache
def errors_of(preset: str, kind: str, is_small: bool, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Returns relative errors against float64 on plain PyTorch, of two narrow layers with the preset's head dim.

    ``"logits"``; ``"decoded"``: logits of tokens decoded with a cache, against those of the whole sequence. The context is longer than
    the window and the first segment.
    """
    head_dim = cast(LongNetConfig, MODEL_PRESETS[preset]).head_dim
    narrow: dict[str, Any] = {"vocab_size": 256, "num_layers": _LAYERS, "num_heads": 2, "embed_dim": 2 * head_dim, "ffn_dim": 8 * head_dim}
    narrow |= {"num_kv_heads": 1} if cast(LongNetConfig, MODEL_PRESETS[preset]).num_kv_heads else {}
    torch.manual_seed(1)
    model = model_of(preset, kind, is_small=is_small, **narrow, device=device, dtype=dtype)
    exact = model_of(preset, kind, is_small=is_small, **narrow, device="cpu", dtype=torch.float64, backend="math")
    exact.load_state_dict(model.state_dict())
    length, new = 600 if is_small else 2560, 4
    tokens = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(2))
    here = tokens.to(device)
    model.eval()
    with torch.no_grad():
        logits, true = model(here).cpu(), exact(tokens)
        cache = KVCache(model.config, 1, length, device=device, dtype=dtype)
        decoded = [prefill(model, here[:, : length - new], cache)]
        step = Stepper(model, cache)
        decoded += [step(here[:, i : i + 1]).clone() for i in range(length - new, length)]
    return {"logits": relative(logits, true), "decoded": relative(torch.stack(decoded, 1).cpu(), true[:, length - new - 1 :])}


class _Writer:
    """One kind's model with its cache full of random numbers. A turn writes again at the same places."""

    def __init__(self, context: int, new_tokens: int, batch: int, model: LongNetLM) -> None:
        parameter = next(model.parameters())
        # what a row reads depends on its place in its segments
        spread = min(_SPREAD, context // 2) // _PLACES
        self.places = [context - new_tokens - i * spread for i in range(_PLACES)]
        self.model, self.new_tokens = model.eval(), new_tokens
        self.cache = KVCache(model.config, batch, context, device=parameter.device, dtype=parameter.dtype)
        self.last = torch.zeros(batch, 1, dtype=torch.int64, device=parameter.device)
        for x in (*self.cache.keys, *self.cache.values):
            # a piece at a time: float32 noise for all of a cache would need its memory twice
            for part in x.flatten(0, 1).split(2**20):
                part.normal_()
        self.step = Stepper(self.model, self.cache)
        # captures the step
        self.turn()

    @torch.no_grad()
    def turn(self) -> None:
        """Writes the likeliest tokens after each place."""
        for place in self.places:
            self.cache.lengths = [place] * self.cache.num_requests
            self.cache.positions.fill_(place)
            for _ in range(self.new_tokens):
                self.last = self.step(self.last).argmax(-1, keepdim=True)


def measure(
    preset: str, kinds: Sequence[str], context: int, batch: int, device: torch.device, dtype: torch.dtype, *, is_small: bool = False
) -> list[Row]:
    """Returns a row for each kind: ``called``, a step of all requests, ``tokens_per_s`` of all, ``cache_bytes``."""
    case = {"task": "decode", "model": preset, "N": context, "B": batch, "dtype": str(dtype).removeprefix("torch.")}
    rows, writers, new_tokens = dict[str, Row](), dict[str, _Writer](), 8 if is_small else 16
    torch.manual_seed(0)
    first = model_of(preset, "dense", is_small=is_small, device=device, dtype=dtype)
    for kind in kinds:
        errors, note = attempt(errors_of, preset, kind, is_small, device, dtype)
        note = note or wrong(errors or {}, _LAYERS * BOUNDS[dtype])
        rows[kind] = Row(name=kind, case=case, errors=errors or {}, note=note)
        release()
        if not note:
            model = model_of(preset, kind, is_small=is_small, device="meta", dtype=dtype)
            model.load_state_dict(first.state_dict(keep_vars=True), assign=True)
            writer, note = attempt(_Writer, context, new_tokens, batch, model)
            if writer is None:
                rows[kind] = Row(name=kind, case=case, errors=errors or {}, note=note)
            else:
                writers[kind] = writer
    samples = [{kind: loop(writer.turn, device) for kind, writer in writers.items()} for _ in range(_TURNS)]
    for kind, writer in writers.items():
        ms = statistics.median(took[kind] for took in samples) / new_tokens / len(writer.places)
        values = {"called": ms, "tokens_per_s": 1000 * batch / ms, "cache_bytes": writer.cache.nbytes}
        rows[kind] = Row(name=kind, case=case, errors=rows[kind].errors, values=values)
    return list(rows.values())
