"""Tensors and arrays in place of plain arguments, of which ``==`` gives no bool, are refused like any other wrong value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dilated_attention as da
from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.pattern import Document, LocalWindow

SPARSE, META = torch.tensor([1, 2]).to_sparse(), torch.tensor([1, 2], device="meta")
Q = torch.zeros(1, 8, 2, 4)
DENSE: dict[str, Any] = {"embed_dim": 8, "num_layers": 1, "num_heads": 2, "attention": "dense"}


@pytest.mark.parametrize("value", [torch.tensor([1, 2]), np.array([1, 2]), SPARSE, META], ids=["tensor", "array", "sparse", "meta"])
def test_where_an_option_has_no_effect(value: Any) -> None:
    for name in ("sparsity", "block_size", "seed"):
        with pytest.raises(ValueError, match=f"(?s)^{name} is .* leave {name} at its default"):
            da.BlockSparseAttention(LocalWindow(4), **{name: value})
    with pytest.raises(ValueError, match=r"(?s)^tail is .* applies only to branches"):
        da.attention_map(Q, Q, query_rows=[0], pattern=LocalWindow(4), tail=value)
    with pytest.raises(ValueError, match=r"(?s)^tail is .* leave it out"):
        LongNetConfig(**DENSE, tail=value)
    with pytest.raises(ValueError, match=r"(?s)^exchange is .* leave it out"):
        da.plan_attention("dense", num_positions=64, num_heads=2, head_dim=8, exchange=value)


@pytest.mark.parametrize("value", [None, 3, {}, "x"])
def test_segments_of_dense_attention(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^segment_lengths is .* which has none; leave it out"):
        LongNetConfig(**DENSE, segment_lengths=value)


@pytest.mark.parametrize("value", [SPARSE, META], ids=["sparse", "meta"])
def test_tensors_without_a_list_of_numbers(value: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"(?s)^segment_lengths is .*expected a list of integers"):
        da.dilated_attention(Q, Q, Q, value, [1, 1])
    with pytest.raises(TypeError, match=r"(?s)^lengths is .*expected a list of integers"):
        Document(value)


def test_a_sparse_attention_mask() -> None:
    model = LongNetLM(LongNetConfig(vocab_size=4, **DENSE))
    with pytest.raises(TypeError, match="attention_mask is a sparse tensor"):
        model(torch.zeros(1, 2, dtype=torch.int64), attention_mask=torch.ones(1, 2, dtype=torch.int64).to_sparse())
