"""Tiny saved models for the tests of commands that load one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dilated_attention.models import LongNetConfig, LongNetLM

SHAPE: dict[str, Any] = {"embed_dim": 32, "num_layers": 2, "num_heads": 2, "segment_lengths": (64, 256), "dilation_rates": (1, 4)}
KINDS: dict[str, dict[str, Any]] = {
    "bytes": {"vocab_size": 256},
    "bases": {"vocab_size": 5, "kmer": 4, "tie_embeddings": False},
    "masked bases": {"vocab_size": 5, "kmer": 4, "tie_embeddings": False, "is_causal": False},
    "masked bytes": {"vocab_size": 256, "is_causal": False},
    "words": {"vocab_size": 300},
}


def saved(kind: str, folder: Path) -> LongNetLM:
    """Saves a model with weights of one seed, and returns it."""
    torch.manual_seed(0)
    model = LongNetLM(LongNetConfig(**SHAPE, **KINDS[kind])).eval()
    model.save_pretrained(folder)
    return model
