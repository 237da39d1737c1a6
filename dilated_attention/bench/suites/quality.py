"""What patterns cost a model with pretrained weights: loss over dense attention at equal numbers of pairs, keys found, time."""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dilated_attention.bench.measure.limits import Refused, release
from dilated_attention.bench.models import equal_pairs, pretrained
from dilated_attention.bench.models.equal_pairs import METHODS, Case, Family
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table, across, by, failures, having, labelled, listing
from dilated_attention.bench.runner import Group, Session, Suite
from dilated_attention.parsing import UsageError, below, positive, size
from dilated_attention.pattern import Pattern

# the name of the rows that others are compared with
DENSE = "dense"
_EQUAL = "every pattern of a density keeps the same share of dense attention's causal pairs; a pair of several branches counts in each"
_COLUMNS = {"over dense, %": ("over", 1.0), "±": ("over_error", 1.0),
            "over dense that was tuned as long, %": ("over_tuned", 1.0), "± tuned": ("over_tuned_error", 1.0),
            "kept pairs, %": ("kept_pct", 1.0), "bits a byte": ("bits_per_byte", 1.0), "forward, µs a token": ("us_per_token", 1.0),
            "tuning, tokens": ("tuning_tokens", 1.0)}  # fmt: skip
_NAME = "{name}, {share:g} %"
_GUESS = "digits of a hidden key that are the likeliest token after the right ones before them; a guess at one digit finds 10 %"
# bins of the loss by position
BINS = 8
# by size, on a GPU and on a CPU: what options set, needles' depths in %, and needles of each depth and length
_SIZES: dict[str, tuple[Any, Any]] = {
    "length": (8192, 2048),
    "passages": (100, 3),
    "densities": ((50, 25, 10, 5), (50, 25)),
    "methods": (tuple(METHODS), ("global-local", "top-blocks", "dilated")),
    "depths": ((5, 25, 50, 75, 95), (10, 50)),
    "needles": (16, 1),
}


class Quality(Suite):
    """Measures loss, found keys and time of a pretrained model under each pattern, as it is and after tuning to the pattern."""

    name = "quality"
    about = "loss of a pretrained model over dense, by pattern, density and position; hidden keys found; time; before and after tuning"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add, defaults = parser.add_argument, {name: f"default: {full}, on a CPU {small}" for name, (full, small) in _SIZES.items()}
        add("--model", type=Path, required=True, help="folder that save_pretrained wrote, with its tokenizer, or a .gguf file")
        add("--texts", type=Path, nargs="+", default=[], metavar="PATH", help="files or folders; default: Python's standard library")
        add("--length", type=size, help=f"tokens of a passage; {defaults['length']}")
        add("--passages", type=size, help=f"to score; {defaults['passages']}")
        percent = functools.partial(below, most=100, otherwise="not a density; expected a share of the pairs in percent, below 100")
        add("--densities", type=percent, nargs="+", metavar="PERCENT", help=f"of the causal pairs; {defaults['densities']}")
        add("--methods", nargs="*", choices=METHODS, help=f"default: all, on a CPU {', '.join(_SIZES['methods'][1])}")
        about = 'another one: its spec() with "?" for the number that decides how many pairs are kept; repeatable'
        add("--pattern", type=_named, action="append", default=[], metavar="NAME=SPEC", help=about)
        add("--needle-lengths", type=size, nargs="*", help="default: a quarter, half and all of --length; on a CPU all")
        add("--tuning", type=positive, metavar="SECONDS", help="tune to each pattern at most so long, and measure again")
        add("--lr", type=positive, default=1e-4, help="highest learning rate of tuning; default: 1e-4")
        add("--seed", type=int, default=0, help="of the choice of texts and keys; default: 0")

    def settings(self, session: Session) -> dict[str, Any]:
        options = session.options
        return super().settings(session) | {name: getattr(options, name) for name in ("seed", "tuning", "lr")} | {
            "model": options.model.name,
            "texts": [path.name for path in options.texts],
            # other checkpoints and texts have the same names
            "content": _fingerprint([options.model, *options.texts]),
            "passages": _given(session, "passages"),
            "patterns": dict(options.pattern),
            "needle_lengths": _needle_lengths(session),
            "dtype": str(session.dtype).removeprefix("torch."),
        }  # fmt: skip

    def groups(self, session: Session) -> Sequence[Group]:
        options, length = session.options, _given(session, "length")
        families = {name: METHODS[name][0] for name in _given(session, "methods")}
        families |= {name: equal_pairs.family_of(spec) for name, spec in options.pattern}
        # read by the first group that measures
        work = functools.cache(lambda: _Work(session))

        def measured(*given: Any) -> Iterator[Row]:
            return work().rows(*given)

        groups = []
        for is_tuned in (False, True) if options.tuning else (False,):
            tuned = f" tuned {options.tuning:g} s" if is_tuned else ""
            groups.append(Group(f"{DENSE} N={length}{tuned}", functools.partial(measured, DENSE, None, 100, is_tuned)))
            for percent, (name, family) in itertools.product(_given(session, "densities"), families.items()):
                run = functools.partial(measured, name, family, percent, is_tuned)
                groups.append(Group(f"{name} {percent:g} % N={length}{tuned}", run))
        return groups

    def tables(self, results: Results) -> list[Table]:
        found = list[Table]()
        for is_tuned, rows in by(having(results, task="loss"), "tuned"):
            suffix, bases = ", tuned" if is_tuned else "", {"over": dense_row(results, False), "over_tuned": dense_row(results, is_tuned)}
            shown = []
            for row in rows:
                figures = {}
                for key, base in bases.items():
                    if base is not None and row.values and row is not base:
                        figures[key], figures[f"{key}_error"] = over(row, base)
                shown.append(replace(row, values=row.values | figures))
            about = "; ".join(dict.fromkeys(f"{row.name}: {row.case['about']}" for row in rows if "about" in row.case))
            passages = sum(key.startswith("passage_") for row in rows[:1] for key in row.values)
            caption = f"{passages} passages of {rows[0].case['N']:,} tokens, second half; ± standard error over passages; {_EQUAL}; {about}"
            columns = {head: place for head, place in _COLUMNS.items() if is_tuned or "tuned" not in head}
            found += listing(labelled(shown, _NAME), columns, title=f"Loss over dense{suffix}", caption=caption)
            dense = {row.case["from"]: row.values["bits_per_byte"] for row in having(results, task="position", tuned=False, share=100.0)}
            positions = [
                replace(row, values={"over": 100 * (row.values["bits_per_byte"] / dense[row.case["from"]] - 1)})
                for row in labelled(having(results, task="position", tuned=is_tuned), **{"positions to": "{to}"})
                if row.case["from"] in dense
            ]
            found += across(labelled(positions, _NAME), "positions to", "over", title=f"Loss over dense, %, by position{suffix}")
            needles = labelled(having(results, task="needle", tuned=is_tuned), _NAME, **{"length, depth": "{length:,}, {depth_pct} %"})
            title = f"Hidden keys: digits found, %{suffix}"
            found += across(needles, "length, depth", "digits_pct", title=title, caption=_GUESS)
        return [*found, *failures(results)]


def over(row: Row, base: Row) -> tuple[float, float]:
    """Returns the loss of ``row`` over that of ``base`` in %, and its standard error from the differences passage by passage.

    100 · (L / L_base − 1) of the bits a byte of all passages together; the error is that of the mean difference of n passages, in % of
    L_base: s / √n, NaN for a single passage.
    """
    keys = [key for key in row.values if key.startswith("passage_")]
    differences = [row.values[key] - base.values[key] for key in keys]
    error = statistics.stdev(differences) / math.sqrt(len(keys)) if len(keys) > 1 else math.nan
    loss = base.values["bits_per_byte"]
    return 100 * (row.values["bits_per_byte"] / loss - 1), 100 * error / loss


def dense_row(results: Results, is_tuned: bool) -> Row | None:
    return next((row for row in having(results, task="loss", tuned=is_tuned) if row.name == DENSE and row.values), None)


def _fingerprint(places: Iterable[Path]) -> str:
    """Returns a digest of the names, sizes and times of files."""
    files = [file for place in places for file in (place, *sorted(place.rglob("*"))) if file.is_file()]
    known = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]


def _named(text: str) -> tuple[str, str]:
    name, _, spec = text.partition("=")
    if not name or name in (DENSE, *METHODS):
        raise argparse.ArgumentTypeError(f"{text!r} has no name of its own; expected NAME=SPEC, and not dense or one of --methods")
    try:
        equal_pairs.family_of(spec)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name, spec


def _given(session: Session, name: str) -> Any:
    """Returns an option, or its default by size."""
    found = getattr(session.options, name, None)
    return _SIZES[name][0 if session.full else 1] if found is None else found


def _needle_lengths(session: Session) -> list[int]:
    length, given = _given(session, "length"), session.options.needle_lengths
    if given is None:
        return [length // 4, length // 2, length] if session.full else [length]
    if max(given, default=0) > length:
        raise UsageError(f"--needle-lengths has {max(given):,}; expected at most --length, {length:,}")
    return list(given)


class _Work:
    """The model, the texts to score and those to tune on, read once."""

    def __init__(self, session: Session) -> None:
        self.session = session
        options, self.length = session.options, _given(session, "length")
        self.model, self.tokenizer = pretrained.load(options.model, session.device, session.dtype)
        config = self.model.config
        limit, window = (getattr(config, name, None) for name in ("max_position_embeddings", "sliding_window"))
        if limit is not None and self.length > limit:
            raise UsageError(f"--length is {self.length:,}; expected at most {limit:,}, the model's max_position_embeddings")
        if window is not None and window < self.length and getattr(config, "use_sliding_window", True):
            raise ValueError(
                f"layers of {options.model.name} keep their own window of {window:,} under every pattern; expected a model without one, "
                f"or --length up to {window:,}"
            )
        self.heads = int(config.num_attention_heads)
        scored, tuned_on = pretrained.split_texts(options.texts, options.seed)
        self.passages = pretrained.passages(self.tokenizer, scored, self.length, _given(session, "passages"))
        self.to_tune = functools.cache(lambda: pretrained.packed(self.tokenizer, tuned_on, self.length))
        self.bins = list(itertools.pairwise(round(i * self.length / BINS) for i in range(BINS + 1)))
        counts = [[pretrained.num_bytes(self.tokenizer, passage[low:high]) for low, high in self.bins] for passage in self.passages]
        self.bytes = torch.tensor(counts)

    def rows(self, name: str, family: Family | None, percent: float, is_tuned: bool) -> Iterator[Row]:
        """Yields the rows of one method at one density: of the loss, of its positions, and of each needle test."""
        case = {"share": round(float(percent), 6), "N": self.length, "tuned": is_tuned}
        options, model, took, pattern = self.session.options, self.model, dict[str, float](), None
        try:
            pattern = self._pattern(family, self.length, percent)
        except Refused as refusal:
            yield Row(name=name, case=case | {"task": "loss"}, note=str(refusal))
            return
        if is_tuned:
            model, _ = pretrained.load(options.model, self.session.device, torch.float32)
            pretrained.use(model, pattern)
            took = pretrained.tune(model, self.to_tune(), seconds=options.tuning, lr=options.lr, seed=options.seed)
            pretrained.cast(model, self.session.dtype)
        pretrained.use(model, pattern)
        # the parameters that were solved for
        about = {} if pattern is None else {"pattern": repr(pattern)}
        about |= {"about": METHODS[name][1]} if name in METHODS else {}
        took["kept_pct"] = 100 if pattern is None else 100 * equal_pairs.share_of(pattern, self.length, self.heads)
        yield from self._loss(model, name, case, about, took)
        for length in _needle_lengths(self.session):
            try:
                pretrained.use(model, self._pattern(family, length, percent))
                yield from self._needles(model, name, case | {"task": "needle", "length": length})
            except Refused as refusal:
                yield Row(name=name, case=case | {"task": "needle", "length": length}, note=str(refusal))
        del model
        release()

    def _pattern(self, family: Family | None, length: int, percent: float) -> Pattern | None:
        return None if family is None else equal_pairs.solve(family, Case(length, self.heads, percent / 100))

    def _loss(self, model: Any, name: str, case: dict[str, Any], about: dict[str, str], figures: dict[str, float]) -> Iterator[Row]:
        bits, figures["us_per_token"] = pretrained.score(model, self.passages)
        # the first token of a passage has no prediction; its bytes count as if it had cost nothing, in all methods alike
        bits = torch.nn.functional.pad(bits.double(), (1, 0))
        by_bin = torch.stack([bits[:, low:high].sum(1) for low, high in self.bins], 1)
        late, late_bytes = by_bin[:, BINS // 2 :].sum(1), self.bytes[:, BINS // 2 :].sum(1)
        figures["bits_per_byte"] = float(late.sum() / late_bytes.sum())
        figures |= {f"passage_{i:03d}": x for i, x in enumerate((late / late_bytes).tolist())}
        yield Row(name=name, case=case | {"task": "loss"} | about, values=figures)
        for (low, high), each in zip(self.bins, (by_bin.sum(0) / self.bytes.sum(0)).tolist(), strict=True):
            yield Row(name=name, case=case | {"task": "position", "from": low, "to": high}, values={"bits_per_byte": each})

    def _needles(self, model: Any, name: str, case: dict[str, Any]) -> Iterator[Row]:
        count, seed = _given(self.session, "needles"), self.session.options.seed
        for depth in _given(self.session, "depths"):
            made = pretrained.needles(self.tokenizer, self.passages, case["length"], depth / 100, count, seed)
            right = pretrained.find(model, *made)
            yield Row(name=name, case=case | {"depth_pct": depth}, values={"digits_pct": 100 * float(right.double().mean())})
