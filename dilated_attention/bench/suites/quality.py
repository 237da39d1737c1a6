"""What patterns cost a model with pretrained weights: loss over dense attention at equal numbers of pairs, keys found, time."""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from dilated_attention.bench.measure.skip import Refused, release
from dilated_attention.bench.models import equal_pairs, pretrained, texts
from dilated_attention.bench.models.equal_pairs import METHODS, Case
from dilated_attention.bench.report import quality as report
from dilated_attention.bench.report.plots import Plot
from dilated_attention.bench.report.quality import DENSE
from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.bench.report.tables import Table
from dilated_attention.bench.suite import Group, Session, Suite
from dilated_attention.fork import cached_property
from dilated_attention.parsing import UsageError, positive, size
from dilated_attention.pattern import Pattern

# bytes of a file's beginning and end that tell it from others
_ENDS = 2**16
# bins of the loss by position
BINS = 8
# by size: positions, passages, densities in %, needles' depths in %, needles of each depth and length, methods
_FULL = (8192, 100, (50, 25, 10, 5), (5, 25, 50, 75, 95), 16, tuple(METHODS))
_SMALL = (2048, 3, (50, 25), (10, 50), 1, ("global-local", "top-blocks", "dilated"))

# a method at a density: the pattern for a case; raises Refused
Solved = Callable[[Case], Pattern]


class Quality(Suite):
    """Measures loss, found keys and time of a pretrained model under each pattern, as it is and after tuning to the pattern."""

    name = "quality"
    about = "loss of a pretrained model over dense, by pattern, density and position; hidden keys found; time; before and after tuning"
    # needs a model
    in_all = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add, small = parser.add_argument, ", ".join(_SMALL[5])
        add("--model", type=Path, required=True, help="folder that save_pretrained wrote, with its tokenizer, or a .gguf file")
        add("--texts", type=Path, nargs="+", default=[], metavar="PATH", help="files or folders; default: Python's standard library")
        add("--length", type=size, help=f"tokens of a passage; default: {_FULL[0]}, on a CPU {_SMALL[0]}")
        add("--passages", type=size, help=f"to score; default: {_FULL[1]}, on a CPU {_SMALL[1]}")
        add("--densities", type=_percent, nargs="+", metavar="PERCENT", help="of the causal pairs; default: 50 25 10 5, on a CPU 50 25")
        add("--methods", nargs="*", choices=METHODS, help=f"default: all, on a CPU {small}")
        about = 'another one: its spec() with "?" for the number that decides how many pairs are kept; repeatable'
        add("--pattern", type=_named, action="append", default=[], metavar="NAME=SPEC", help=about)
        add("--needle-lengths", type=size, nargs="*", help="default: a quarter, half and all of --length; on a CPU all")
        add("--tuning", type=positive, metavar="SECONDS", help="tune to each pattern at most so long, and measure again")
        add("--lr", type=positive, default=1e-4, help="highest learning rate of tuning; default: 1e-4")
        add("--seed", type=int, default=0, help="of the choice of texts and keys; default: 0")

    def settings(self, session: Session) -> dict[str, Any]:
        options = session.options
        kept = {name: getattr(options, name) for name in ("seed", "tuning", "lr")}
        return super().settings(session) | kept | {
            "model": options.model.name,
            "texts": [path.name for path in options.texts],
            # other checkpoints and texts have the same names
            "content": _fingerprint([options.model, *options.texts]),
            "passages": _sizes(session)[1],
            "patterns": dict(options.pattern),
            "needle_lengths": _needle_lengths(session),
            "dtype": str(session.dtype).removeprefix("torch."),
        }  # fmt: skip

    def groups(self, session: Session) -> Sequence[Group]:
        options = session.options
        length, _, densities, *_, methods = _sizes(session)
        families: dict[str, Solved] = {
            name: functools.partial(equal_pairs.of, name) for name in (methods if options.methods is None else options.methods)
        }
        families |= {name: functools.partial(equal_pairs.solve, *equal_pairs.family_of(spec)) for name, spec in options.pattern}
        # read by the first group that measures
        work = functools.cache(lambda: _Work(session))
        groups = []
        for is_tuned in (False, True) if options.tuning else (False,):
            tuned = f" tuned {options.tuning:g} s" if is_tuned else ""
            groups.append(Group(f"{DENSE} N={length}{tuned}", functools.partial(_rows, work, DENSE, None, 1.0, is_tuned)))
            for share, (name, solved) in itertools.product(densities, families.items()):
                run = functools.partial(_rows, work, name, solved, share / 100, is_tuned)
                groups.append(Group(f"{name} {share:g} % N={length}{tuned}", run))
        return groups

    def tables(self, results: Results) -> list[Table]:
        return report.tables(results)

    def plots(self, results: Results) -> list[Plot]:
        return report.plots(results)


def _rows(work: Callable[[], _Work], name: str, solved: Solved | None, share: float, is_tuned: bool) -> list[Row]:
    return list(work().rows(name, solved, share, is_tuned))


def _fingerprint(places: Iterable[Path]) -> str:
    """Returns a digest of the names and sizes of files, and of what they begin and end with."""
    digest = hashlib.sha256()
    for place in places:
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.is_file():
                size = file.stat().st_size
                with file.open("rb") as content:
                    begin = content.read(_ENDS)
                    content.seek(max(0, size - _ENDS))
                    digest.update(b"%s %d %s %s" % (file.name.encode(), size, begin, content.read()))
    return digest.hexdigest()[:16]


def _percent(text: str) -> float:
    share = positive(text)
    if share >= 100:
        raise argparse.ArgumentTypeError(f"{text} is not a density; expected a share of the pairs in percent, above 0 and below 100")
    return share


def _named(text: str) -> tuple[str, str]:
    name, _, spec = text.partition("=")
    if not name or name in (DENSE, *METHODS):
        raise argparse.ArgumentTypeError(f"{text!r} has no name of its own; expected NAME=SPEC, and not dense or one of --methods")
    try:
        equal_pairs.family_of(spec)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name, spec


def _sizes(session: Session) -> tuple[Any, ...]:
    options = session.options
    length, count, densities, *others = _FULL if session.full else _SMALL
    return options.length or length, options.passages or count, options.densities or densities, *others


def _needle_lengths(session: Session) -> list[int]:
    length = _sizes(session)[0]
    if session.options.needle_lengths is None:
        return [length // 4, length // 2, length] if session.full else [length]
    longest = max(session.options.needle_lengths, default=0)
    if longest > length:
        raise UsageError(f"--needle-lengths has {longest:,}; expected at most --length, {length:,}")
    return list(session.options.needle_lengths)


class _Work:
    """The model, the texts to score and those to tune on, read once."""

    def __init__(self, session: Session) -> None:
        self.session = session
        options = session.options
        self.length, count, _, self.depths, self.num_needles, _ = _sizes(session)
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
        scored, self.tuned_on = texts.split(options.texts, options.seed)
        self.passages = texts.passages(self.tokenizer, scored, self.length, count)
        self.bins = list(itertools.pairwise(round(i * self.length / BINS) for i in range(BINS + 1)))
        counts = [[texts.num_bytes(self.tokenizer, passage[low:high]) for low, high in self.bins] for passage in self.passages]
        self.bytes = torch.tensor(counts)

    @cached_property
    def to_tune(self) -> torch.Tensor:
        return texts.packed(self.tokenizer, self.tuned_on, self.length)

    def rows(self, name: str, solved: Solved | None, share: float, is_tuned: bool) -> Iterable[Row]:
        """Yields the rows of one method at one density: of the loss, of its positions, and of each needle test."""
        case = {"share": round(100 * share, 6), "N": self.length, "tuned": is_tuned}
        try:
            pattern = None if solved is None else solved(Case(self.length, self.heads, share))
        except Refused as refusal:
            yield Row(name=name, case=case | {"task": "loss"}, note=str(refusal))
            return
        model, took = self._tuned(pattern) if is_tuned else (self.model, {})
        pretrained.use(model, pattern)
        yield from self._loss(model, name, case, pattern, took)
        for length in _needle_lengths(self.session):
            try:
                pretrained.use(model, None if solved is None else solved(Case(length, self.heads, share)))
                yield from self._needles(model, name, case, length)
            except Refused as refusal:
                yield Row(name=name, case=case | {"task": "needle", "length": length}, note=str(refusal))
        if is_tuned:
            del model
            release()

    def _tuned(self, pattern: Pattern | None) -> tuple[Any, dict[str, float]]:
        """Returns a model of its own, tuned to the pattern, and what that took."""
        options = self.session.options
        model, _ = pretrained.load(options.model, self.session.device, torch.float32)
        pretrained.use(model, pattern)
        took = pretrained.tune(model, self.to_tune, seconds=options.tuning, lr=options.lr, seed=options.seed)
        pretrained.cast(model, self.session.dtype)
        return model, took

    def _loss(self, model: Any, name: str, case: dict[str, Any], pattern: Pattern | None, took: dict[str, float]) -> Iterable[Row]:
        bits, us_per_token = pretrained.score(model, self.passages)
        # the first token of a passage has no prediction; its bytes count as if it had cost nothing, in all methods alike
        bits = torch.nn.functional.pad(bits.double(), (1, 0))
        by_bin = torch.stack([bits[:, low:high].sum(1) for low, high in self.bins], 1)
        half = BINS // 2
        figures = {"bits_per_byte": float(by_bin[:, half:].sum() / self.bytes[:, half:].sum()), "us_per_token": us_per_token} | took
        figures["kept_pct"] = 100 if pattern is None else 100 * equal_pairs.share_of(pattern, self.length, self.heads)
        per_passage = by_bin[:, half:].sum(1) / self.bytes[:, half:].sum(1)
        figures |= {f"passage_{i:03d}": float(x) for i, x in enumerate(per_passage)}
        # the parameters that were solved for
        about = {"pattern": repr(pattern)} if pattern is not None else {}
        about |= {"about": METHODS[name][1]} if name in METHODS else {}
        yield Row(name=name, case=case | {"task": "loss"} | about, values=figures)
        for (low, high), one, count in zip(self.bins, by_bin.sum(0).tolist(), self.bytes.sum(0).tolist(), strict=True):
            yield Row(name=name, case=case | {"task": "position", "from": low, "to": high}, values={"bits_per_byte": one / count})

    def _needles(self, model: Any, name: str, case: dict[str, Any], length: int) -> Iterable[Row]:
        for depth in self.depths:
            made = texts.needles(self.tokenizer, self.passages, length, depth / 100, self.num_needles, self.session.options.seed)
            right, bits = pretrained.find(model, *made)
            figures = {"digits_pct": 100 * float(right.double().mean()), "keys_pct": 100 * float(right.all(1).double().mean())}
            figures["bits_per_digit"] = float(bits.mean())
            yield Row(name=name, case=case | {"task": "needle", "length": length, "depth_pct": depth}, values=figures)
