"""Hypothesis strategies: ``testing.random_case`` with its choices drawn, and so shrunk, by hypothesis."""

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st

from dilated_attention.pattern import BlockPattern
from dilated_attention.testing import Case, Space, random_case
from dilated_attention.testing.cases import random_blocks

T = TypeVar("T")


class _Draws:
    """The part of ``random.Random`` that ``random_case`` uses. Shrinks towards a, and towards the first option."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def randint(self, a: int, b: int, /) -> int:
        return self._draw(st.integers(a, b))

    def choice(self, options: Sequence[T], /) -> T:
        return self._draw(st.sampled_from(options))


@st.composite
def cases(draw: st.DrawFn, space: Space | None = None) -> Case:
    """Any valid call: every option of ``dilated_attention``, or a window of ``attention``; with ``Space.blocks`` blocks, too."""
    return random_case(_Draws(draw), space)


@st.composite
def some_patterns(draw: st.DrawFn, heads: int, length: int, block: tuple[int, int], *, any_length: bool) -> BlockPattern:
    """``any_length``: a pattern that exists at every length."""
    return random_blocks(_Draws(draw), heads, length, block, any_length=any_length)
