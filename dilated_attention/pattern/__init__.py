"""What attends to what. Patterns are frozen, validated records that count and draw themselves."""

from dilated_attention.pattern.base import Pattern
from dilated_attention.pattern.dilated import MAX_LENGTH, NOT_IN_BRANCH, DilatedPattern, HeadOffsets, taken

__all__ = ["MAX_LENGTH", "NOT_IN_BRANCH", "DilatedPattern", "HeadOffsets", "Pattern", "taken"]
