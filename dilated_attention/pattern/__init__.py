"""What attends to what. Patterns are frozen, validated records that count and draw themselves."""

from dilated_attention.pattern.base import Pattern
from dilated_attention.pattern.block import BlockPattern
from dilated_attention.pattern.block_compose import Intersection, PerHead, Union
from dilated_attention.pattern.block_window import Causal, Document, LocalWindow
from dilated_attention.pattern.content import ChosenBlocks, TopBlocks
from dilated_attention.pattern.dilated import MAX_LENGTH, NOT_IN_BRANCH, DilatedPattern, HeadOffsets, taken
from dilated_attention.pattern.spec import pattern_from_spec

__all__ = [
    "MAX_LENGTH",
    "NOT_IN_BRANCH",
    "BlockPattern",
    "Causal",
    "ChosenBlocks",
    "DilatedPattern",
    "Document",
    "HeadOffsets",
    "Intersection",
    "LocalWindow",
    "Pattern",
    "PerHead",
    "TopBlocks",
    "Union",
    "pattern_from_spec",
    "taken",
]
