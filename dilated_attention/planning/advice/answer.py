"""The answer of ``recommend``: settings from the table ``rules.json``, each with its reason and the source of that reason."""

from __future__ import annotations

import functools
import json
import operator
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_WIDTH = 118
_NAMES = 24
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "least": operator.ge, "most": operator.le, "above": operator.gt, "below": operator.lt,
    "not": lambda fact, wanted: not _agrees(fact, wanted),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One decision.

    Args:
        name, value: the setting and its value.
        reason: a rule that follows from the definition, or a measured figure with the machine it was measured on.
        source: page and heading of this repository's documentation that has the figure, ``"docs/ring.md, Figures"``; or ``"computed"``
            where the planning functions computed it for this request.
    """

    name: str
    value: str
    reason: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """An answer to "what should I use for this?". ``str()`` prints it, ``as_dict()`` returns it.

    Args:
        use_case: one of ``USE_CASES``.
        request: what was asked, with defaults filled in.
        machine: the hardware it is for.
        kind: ``"dense"`` · ``"dilated"`` · ``"block_sparse"``, or for a sequence shared by several processes ``"ring"`` (dense) ·
            ``"ring_dilated"`` · ``"ring_block_sparse"``: the names of ``LongNetConfig.attention``.
        segment_lengths, dilation_rates: of the branches; empty where there are none.
        keys_per_query: mean number of keys per query and head, with multiplicity; None where the length is not fixed.
        dense_keys_per_query: the same for dense attention with the same causality.
        forward, backward: backends chosen on this machine; ``backward`` is None without gradients, both are None where no backend can
            compute it.
        memory: bytes that one device needs by the estimates cited in ``settings``; None where nothing was estimated.
        fits: whether this memory fits on the device; None where nothing was estimated.
        settings: the decisions, ``kind`` and ``branches`` first.
        setup: lines that precede ``code``: imports, a mesh.
        code: the line to paste.
    """

    use_case: str
    request: dict[str, Any]
    machine: str
    kind: str
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    keys_per_query: float | None
    dense_keys_per_query: float | None
    forward: str | None
    backward: str | None
    memory: int | None
    fits: bool | None
    settings: tuple[Setting, ...]
    setup: tuple[str, ...]
    code: str

    def setting(self, name: str) -> Setting:
        """Returns the decision with this name.

        Raises:
            KeyError: there is none; the message lists the existing names.
        """
        for setting in self.settings:
            if setting.name == name:
                return setting
        raise KeyError(f"no setting is called {name!r}; the settings are {', '.join(setting.name for setting in self.settings)}")

    def as_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = _WIDTH) -> str:
        """Returns the answer in lines of at most ``width`` characters, except for the code."""
        names = min(_NAMES, width // 3)
        lines = [f"{self.use_case}: {self.machine}", ""]
        for setting in self.settings:
            cited = "" if setting.source == "computed" else f" [{setting.source}]"
            wrapped = textwrap.wrap(f"{setting.value}: {setting.reason}{cited}", width - names, break_on_hyphens=False)
            name = [setting.name] if len(setting.name) >= names else []
            first = "" if name else setting.name
            lines += [*name, *(f"{first if i == 0 else '':<{names}}{line}".rstrip() for i, line in enumerate(wrapped))]
        return "\n".join([*lines, "", *(f"    {line}" for line in (*self.setup, self.code))])


@functools.lru_cache(maxsize=1)
def rule_table() -> dict[str, Any]:
    """Returns ``rules.json``; its first line says what it has."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("rules.json").read_text(encoding="utf-8"))
    return found


def settings_of(facts: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Returns, for each setting of the table, its first row whose conditions hold; settings without such a row are left out."""
    taken: dict[str, dict[str, Any]] = {}
    for row in rule_table()["rules"]:
        if row["setting"] not in taken and holds(row.get("when", {}), facts):
            taken[row["setting"]] = row
    return tuple(
        Setting(name=name, value=filled(row["value"], facts), reason=filled(row["reason"], facts), source=row["source"])
        for name, row in taken.items()
        if not row.get("skip")
    )


def holds(when: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    return all(_agrees(facts[name], wanted) for name, wanted in when.items())


def _agrees(fact: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return fact is not None and all(_COMPARE[name](fact, bound) for name, bound in wanted.items())
    return fact in wanted if isinstance(wanted, list) else bool(fact == wanted)


def filled(parts: str | list[Any], facts: Mapping[str, Any]) -> str:
    """Returns a text, or those of its parts whose conditions hold, with facts and figures in place of their names."""
    rows = [parts] if isinstance(parts, str) else parts
    listed: list[dict[str, Any]] = [{"text": row} if isinstance(row, str) else row for row in rows]
    figures = {name: figure for group in rule_table()["figures"].values() for name, figure in group.items()}
    return "".join(part["text"] for part in listed if holds(part.get("when", {}), facts)).format_map(figures | dict(facts))
