"""What ``recommend`` answers: settings, each with its reason and where that stands."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

_WIDTH = 118
_NAMES = 24


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One decision.

    Args:
        name, value: what is set to what.
        reason: why; a rule that follows from the definition, or a measured figure with the machine it was measured on.
        source: page and heading of this repository's documentation where the figure stands, ``"docs/ring.md, Figures"``; or ``"computed"``
            where it was worked out for this request by the functions that plan it.
    """

    name: str
    value: str
    reason: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """An answer to "what do I take for this?"; ``str()`` prints it, ``as_dict()`` gives it.

    Args:
        use_case: one of ``USE_CASES``.
        request: what was asked, with defaults filled in.
        machine: the hardware it is for.
        kind: ``"dense"`` · ``"dilated"`` · ``"block_sparse"``, or of a sequence that processes share ``"ring"`` (dense) ·
            ``"ring_dilated"`` · ``"ring_block_sparse"``: the names of ``LongNetConfig.attention``.
        segment_lengths, dilation_rates: of the branches; empty where there are none.
        keys_per_query: mean number of keys of a query and head, with multiplicity; None where the length is open.
        dense_keys_per_query: that of dense attention with the same causality.
        forward, backward: backends that take it on this machine; ``backward`` is None without gradients, both are None where none can.
        memory: bytes that one device needs by the estimates cited in ``settings``; None where nothing was estimated.
        fits: whether they fit; None where nothing was estimated.
        settings: the decisions, ``kind`` and ``branches`` first.
        setup: lines that go before ``code``: imports, a mesh.
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
        """The decision of this name.

        Raises:
            KeyError: there is none; with the names there are.
        """
        for setting in self.settings:
            if setting.name == name:
                return setting
        raise KeyError(f"no setting is called {name!r}; there are {', '.join(setting.name for setting in self.settings)}")

    def as_dict(self) -> dict[str, Any]:
        told = asdict(self)
        return told | {name: list(told[name]) for name in ("segment_lengths", "dilation_rates", "settings", "setup")}

    def __str__(self) -> str:
        lines = [f"{self.use_case}: {self.machine}", ""]
        for setting in self.settings:
            cited = "" if setting.source == "computed" else f" [{setting.source}]"
            wrapped = textwrap.wrap(f"{setting.value}: {setting.reason}{cited}", _WIDTH - _NAMES, break_on_hyphens=False)
            lines += [f"{setting.name if i == 0 else '':<{_NAMES}}{line}".rstrip() for i, line in enumerate(wrapped)]
        return "\n".join([*lines, "", *(f"    {line}" for line in (*self.setup, self.code))])
