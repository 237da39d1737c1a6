"""Patterns define which queries attend to which keys. They are frozen, validated records that can count and draw themselves."""

import importlib
import pkgutil

from dilated_attention.pattern import blocks
from dilated_attention.pattern.base import Pattern
from dilated_attention.pattern.blocks.base import BlockPattern, kinds, pattern_from_spec
from dilated_attention.pattern.blocks.compose import Intersection, PerHead, Sparsity, Union, with_sparsity
from dilated_attention.pattern.blocks.content import ChosenBlocks, TopBlocks
from dilated_attention.pattern.blocks.flex_mask import MaskFunction, from_block_mask, to_block_mask
from dilated_attention.pattern.blocks.whole_blocks import Axial, BlockTensor, DilatedBlocks, RandomBlocks, Strided
from dilated_attention.pattern.blocks.window import BigBird, Causal, Document, GlobalLocal, LocalWindow
from dilated_attention.pattern.checks import MAX_LENGTH
from dilated_attention.pattern.dilated import NOT_IN_BRANCH, DilatedPattern, HeadOffsets, geometric_branches, taken

__all__ = [
    "MAX_LENGTH",
    "NOT_IN_BRANCH",
    "Axial",
    "BigBird",
    "BlockPattern",
    "BlockTensor",
    "Causal",
    "ChosenBlocks",
    "DilatedBlocks",
    "DilatedPattern",
    "Document",
    "GlobalLocal",
    "HeadOffsets",
    "Intersection",
    "LocalWindow",
    "MaskFunction",
    "Pattern",
    "PerHead",
    "RandomBlocks",
    "Sparsity",
    "Strided",
    "TopBlocks",
    "Union",
    "from_block_mask",
    "geometric_branches",
    "pattern_from_spec",
    "taken",
    "to_block_mask",
    "with_sparsity",
]

# a class in a new file of the folder is public, too; it needs a line above only for type checkers
for file in pkgutil.iter_modules(blocks.__path__, "dilated_attention.pattern.blocks."):
    importlib.import_module(file.name)
globals().update(kinds())
__all__ += kinds().keys() - __all__
