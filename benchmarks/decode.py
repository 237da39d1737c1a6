"""Language models of known shapes with random weights: steps of generating after a long context, by kind of attention, timed in turns.

The kinds of attention have no parameters of their own, so their models share every parameter.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from dataclasses import replace
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


def model_of(preset: str, kind: str, **options: Any) -> LongNetLM:
    """Creates a preset with a kind of attention."""
    lengths, rates = geometric_branches(2**20, 2048)
    kinds: dict[str, dict[str, Any]] = {
        "dense": {"attention": "dense"},
        "dilated": {},
        "dilated-1M": {"segment_lengths": lengths, "dilation_rates": rates},
        "global-local": {"attention": "block_sparse", "block_pattern": GlobalLocal((2047, 0), 128)},
        "block_sparse": {"attention": "block_sparse", "block_pattern": LocalWindow((1023, 0), block_size=128)},
    }
    # XPOS overflows bfloat16 in long contexts, and the other positions take the same time
    is_xpos = getattr(MODEL_PRESETS[preset], "positions", "") == "xpos"
    return cast(LongNetLM, create_model(preset, **kinds[kind] | ({"positions": "rotary"} if is_xpos else {}) | options))


def _narrow(preset: str) -> dict[str, Any]:
    """Returns the options of a model of two layers with the preset's head dim, which is compared, and timed in a small run."""
    config = cast(LongNetConfig, MODEL_PRESETS[preset])
    width = {"num_heads": 2, "embed_dim": 2 * config.head_dim, "ffn_dim": 256} | ({"num_kv_heads": 1} if config.num_kv_heads else {})
    return {"vocab_size": 256, "num_layers": _LAYERS} | width


@functools.cache
def errors_of(preset: str, kind: str, device: torch.device, dtype: torch.dtype, length: int = 2560) -> dict[str, float]:
    """Returns relative errors against float64 on plain PyTorch, of two narrow layers with the preset's head dim.

    ``"logits"``; ``"decoded"``: logits of tokens decoded with a cache, against those of the whole sequence. The context is longer than
    the window and the first segment.
    """
    narrow, new = _narrow(preset), 4
    torch.manual_seed(1)
    model = model_of(preset, kind, **narrow, device=device, dtype=dtype).eval()
    exact = model_of(preset, kind, **narrow, device="cpu", dtype=torch.float64, backend="math")
    exact.load_state_dict(model.state_dict())
    tokens = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(2))
    here = tokens.to(device)
    with torch.no_grad():
        logits, true = model(here).cpu(), exact.eval()(tokens)
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


def measure(preset: str, context: int, batch: int, options: argparse.Namespace) -> list[Row]:
    """Returns a row for each kind: ``called``, a step of all requests, ``tokens_per_s`` of all, ``cache_bytes``."""
    device, dtype = options.device, options.dtypes[0]
    case = {"task": "decode", "model": preset, "N": context, "B": batch, "dtype": str(dtype).removeprefix("torch.")}
    rows, writers, new_tokens = dict[str, Row](), dict[str, _Writer](), 8 if options.is_small else 16
    sizes = _narrow(preset) if options.is_small else {}
    torch.manual_seed(0)
    weights = model_of(preset, "dense", **sizes, device=device, dtype=dtype).state_dict(keep_vars=True)
    for kind in options.kinds:
        errors, note = attempt(errors_of, preset, kind, device, dtype)
        note = note or wrong(errors or {}, _LAYERS * BOUNDS[dtype])
        release()
        if not note:
            model = model_of(preset, kind, **sizes, device="meta", dtype=dtype)
            model.load_state_dict(weights, assign=True)
            writer, note = attempt(_Writer, context, new_tokens, batch, model)
            writers |= {} if writer is None else {kind: writer}
        rows[kind] = Row(name=kind, case=case, errors=errors or {}, note=note)
    samples = [{kind: loop(writer.turn, device) for kind, writer in writers.items()} for _ in range(_TURNS)]
    for kind, writer in writers.items():
        ms = statistics.median(took[kind] for took in samples) / new_tokens / len(writer.places)
        values = {"called": ms, "tokens_per_s": 1000 * batch / ms, "cache_bytes": writer.cache.nbytes}
        rows[kind] = replace(rows[kind], values=values)
    return list(rows.values())
