"""Settings that cannot work are refused when a module is made, by every module that takes them: one table for the 13 classes."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch

from dilated_attention import modules
from dilated_attention.pattern import LocalWindow, TopBlocks

KINDS = [name for name in modules.__all__ if hasattr(getattr(modules, name), "forward")]
PATTERN = LocalWindow(20)
Bad = tuple[dict[str, Any], type[Exception], str]

ATTENTION: list[Bad] = [
    ({"dropout": 1.0}, ValueError, r"dropout is 1.0.*\[0, 1\)"),
    ({"dropout": -0.1}, ValueError, "dropout is -0.1"),
    ({"dropout": "0.1"}, TypeError, "dropout is '0.1'"),
    ({"scale": 0.0}, ValueError, "scale is 0.0"),
    ({"scale": -1}, ValueError, "scale is -1"),
    ({"scale": math.inf}, ValueError, "scale is inf"),
    ({"deterministic": 1}, TypeError, r"deterministic is 1 \(int\)"),
    ({"backend": "fastest"}, ValueError, "backend is 'fastest'.*auto"),
    ({"backend": None}, TypeError, "backend is None"),
    ({"bakend": "auto"}, TypeError, "unexpected keyword argument 'bakend'; it accepts .*backend"),
]
BRANCHES: list[Bad] = [
    ({"segment_lengths": [4]}, ValueError, "segment_lengths has 1 entries.*dilation_rates has 2"),
    ({"segment_lengths": [4, 0]}, ValueError, r"segment_lengths\[1\] is 0"),
    ({"segment_lengths": [4, 8.0]}, TypeError, r"segment_lengths\[1\] is 8.0"),
    ({"segment_lengths": 4}, TypeError, "segment_lengths is 4"),
    ({"dilation_rates": [1, 9]}, ValueError, r"dilation_rates\[1\] is 9"),
    ({"head_offsets": "diagonal"}, ValueError, "head_offsets is 'diagonal'"),
    ({"head_offsets": [[0] * 4, [0, 1, 2, 0]]}, ValueError, r"head_offsets\[1\]\[2\] is 2"),
    ({"branch_heads": "some"}, ValueError, "branch_heads is 'some'"),
    ({"tail": "pad"}, ValueError, "tail is 'pad'"),
]
BLOCKS: list[Bad] = [
    ({"pattern": None}, ValueError, "neither given.*exactly one.*sparsity_ratio=0.1"),
    ({"sparsity_ratio": 0.1}, ValueError, "both.*exactly one"),
    ({"pattern": 0.1}, TypeError, r"pattern is 0.1 \(float\).*LocalWindow\(512\)"),
    ({"seed": 1}, ValueError, "seed is 1 with a pattern.*leave seed"),
    ({"block_size": 64}, ValueError, "block_size is 64 with a pattern"),
    ({"sparsity": "local"}, ValueError, "sparsity is 'local' with a pattern"),
    ({"pattern": None, "sparsity_ratio": 0.0}, ValueError, "sparsity_ratio is 0.0.*above 0"),
    ({"pattern": None, "sparsity_ratio": 1.5}, ValueError, "sparsity_ratio is 1.5.*at most 1"),
    ({"pattern": None, "sparsity_ratio": "0.1"}, TypeError, r"sparsity_ratio is '0.1' \(str\)"),
    ({"pattern": None, "sparsity_ratio": True}, TypeError, r"sparsity_ratio is True \(bool\)"),
    ({"pattern": None, "sparsity_ratio": 0.1, "sparsity": "most"}, ValueError, "sparsity is 'most'.*'random'.*'big_bird'"),
    ({"pattern": None, "sparsity_ratio": 0.1, "block_size": 32}, ValueError, "block_size is 32.*64 or 128"),
    ({"pattern": None, "sparsity_ratio": 0.1, "seed": -1}, ValueError, "seed is -1"),
]
# numbers that no layer can hold: tests/functional/test_absurd_numbers.py
PROJECTIONS: list[Bad] = [
    ({"embed_dim": 18}, ValueError, "embed_dim is 18 and num_heads is 4"),
    ({"embed_dim": 16.0}, TypeError, "embed_dim is 16.0"),
    ({"embed_dim": 0}, ValueError, "embed_dim is 0"),
    ({"embed_dim": 2048}, ValueError, "head_dim 512.*at most 256.*at least 8 heads"),
    ({"num_heads": 0}, ValueError, "num_heads is 0"),
    ({"num_kv_heads": 3}, ValueError, "num_kv_heads is 3.*divisor of num_heads = 4"),
    ({"num_kv_heads": 8}, ValueError, "num_kv_heads is 8"),
    ({"num_kv_heads": True}, TypeError, "num_kv_heads is True"),
    ({"embed_dim": 12, "rotary": True}, ValueError, "rotary=True with head_dim 3"),
    ({"rotary": 1}, TypeError, "rotary is 1"),
    ({"rotary_base": 1.0}, ValueError, "rotary_base is 1.0"),
    ({"rotary_base": "1e4"}, TypeError, "rotary_base is '1e4'"),
    ({"rotary_base": 500.0}, ValueError, "rotary_base is 500.0 and rotary is False"),
    ({"xpos_scale_base": 6.0}, ValueError, "xpos_scale_base is 6.0 and rotary is False.*use rotary=True"),
    ({"xpos_scale_base": "512"}, TypeError, "xpos_scale_base is '512'"),
    ({"gamma_init": math.nan}, ValueError, "gamma_init is nan"),
    ({"gamma_init": None}, TypeError, "gamma_init is None"),
    ({"layer_norm_eps": -1e-5}, ValueError, "layer_norm_eps is -1e-05"),
    ({"layer_norm": None}, TypeError, "layer_norm is None"),
    ({"bias": 0}, TypeError, "bias is 0"),
    ({"qk_norm": "yes"}, TypeError, "qk_norm is 'yes'"),
]
OTHERS: list[Bad] = [
    ({"mixture_grad": "none"}, ValueError, "mixture_grad is 'none'"),
    ({"mixture_grad": "detached", "sinks": True}, ValueError, "sinks=True with mixture_grad='detached'"),
    ({"precision": "fp4"}, ValueError, "precision is 'fp4'"),
    ({"num_heads": 4, "sinks": False}, ValueError, "num_heads is 4 without sinks"),
    ({"layout": "spiral"}, ValueError, "layout is 'spiral'"),
    ({"exchange": "mail"}, ValueError, "exchange is 'mail'"),
    ({"ranks_per_node": 0}, ValueError, "ranks_per_node is 0"),
    ({"head_steps": 0}, ValueError, "head_steps is 0"),
    ({"window": -1}, ValueError, "window is -1"),
    ({"timeout": -1}, ValueError, "timeout is -1"),
    # where 4 heads are known
    ({"head_offsets": [[0, 0], [0, 1]], "embed_dim": 16}, ValueError, "2 integers per branch for 4 heads"),
    ({"pattern": TopBlocks(1), "layout": "contiguous"}, ValueError, "chosen by content"),
    ({"pattern": PATTERN, "layout": "striped"}, ValueError, "layout is 'striped'.*balanced_layout"),
]


def make(kind: str, **settings: Any) -> torch.nn.Module:
    good: dict[str, Any] = {"segment_lengths": [4, 8], "dilation_rates": [1, 2]} if "Dilated" in kind else {}
    good |= {"pattern": PATTERN} if "BlockSparse" in kind else {}
    good |= {"embed_dim": 16, "num_heads": 4} if "Multihead" in kind else {}
    return getattr(modules, kind)(**good | settings)  # type: ignore[no-any-return]


def takes(kind: str, settings: dict[str, Any]) -> bool:
    if "num_heads" in settings and "sinks" in settings and "Multihead" in kind:
        return False
    return settings.keys() - {"bakend"} <= set(inspect.signature(getattr(modules, kind)).parameters)


@pytest.mark.parametrize(("settings", "error", "text"), [*ATTENTION, *BRANCHES, *BLOCKS, *PROJECTIONS, *OTHERS], ids=str)
def test_settings_that_cannot_work_are_refused_at_construction(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    kinds = [kind for kind in KINDS if takes(kind, settings)]
    assert kinds
    for kind in kinds:
        make(kind)
        with pytest.raises(error, match=text):
            make(kind, **settings)
