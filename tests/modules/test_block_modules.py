"""The modules of block-sparse attention: their settings reach the function, their parameters are those of the dilated layer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from dilated_attention import BlockSparseDilatedAttention, create_attention
from dilated_attention.pattern import BlockPattern, BlockTensor, GlobalLocal, Sparsity, TopBlocks

PATTERN = GlobalLocal(20, 3, block_size=64)

# --- settings ----------------------------------------------------------------------------------------------------------------------------

KINDS = ["block_sparse", "block_sparse_dilated", "multihead_block_sparse", "multihead_block_sparse_dilated"]


def make(kind: str, **settings: Any) -> Any:
    settings |= {"segment_lengths": [16], "dilation_rates": [3]} if "dilated" in kind else {}
    return create_attention(kind, **settings, **({"embed_dim": 16, "num_heads": 4} if "multihead" in kind else {}))


def pattern_of(layer: nn.Module) -> BlockPattern:
    layer = getattr(layer, "attention", layer)
    return layer.block_pattern if isinstance(layer, BlockSparseDilatedAttention) else layer.pattern  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sparsity_ratio_is_the_density(kind: str) -> None:
    for ratio, sparsity in ((0.1, "random"), (0.25, "local"), (0.5, "big_bird")):
        assert pattern_of(make(kind, sparsity_ratio=ratio, sparsity=sparsity, block_size=64)) == Sparsity(ratio, sparsity, block_size=64)
    seeded = pattern_of(make(kind, sparsity_ratio=0.1, seed=3, block_size=(64, 128)))
    assert seeded == Sparsity(0.1, "random", 3, block_size=(64, 128))


@pytest.mark.parametrize("kind", [*KINDS, "dilated", "multihead_dilated"])
@pytest.mark.parametrize(
    "pattern", [PATTERN, TopBlocks(1, block_size=64), BlockTensor(torch.eye(2, dtype=torch.bool), block_size=64)], ids=repr
)
def test_copies_and_pickles_compute_the_same_on_parameters_of_their_own(pattern: BlockPattern, kind: str) -> None:
    torch.manual_seed(0)
    layer = make(kind, **({"pattern": pattern} if "block" in kind else {}))
    inputs = (torch.randn(1, 90, 16),) if kind.startswith("multihead") else (torch.randn(1, 90, 4, 4), *torch.randn(2, 1, 90, 2, 4))
    expected = layer(*inputs)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        # a pattern that holds a tensor is that of an object
        assert pattern.holds_objects or repr(other) == repr(layer)
        assert torch.equal(other(*inputs)[0], expected[0])
        for parameter in other.parameters():
            parameter.data.add_(1.0)
    assert torch.equal(layer(*inputs)[0], expected[0])
    assert "block" not in kind or repr(pattern) in repr(layer)
    assert "dilated" not in kind or "segment_lengths=[16], dilation_rates=[3]" in repr(layer)
