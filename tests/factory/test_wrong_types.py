"""Values of a wrong type: each is refused by name with what is expected, as a ValueError or TypeError of this library."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from dilated_attention import (
    DilatedPattern,
    attention_map,
    create_attention,
    create_model,
    dilated_attention,
    explain_backend,
    plan_attention,
    profile_memory,
)
from dilated_attention.integrations.huggingface import register, shard_inputs
from dilated_attention.models import (
    Block,
    FeedForward,
    KVCache,
    LongNetConfig,
    LongNetDecoder,
    LongNetEncoder,
    Sampling,
    average_gradients,
    evaluate,
    generate_stream,
    other_strand,
)
from dilated_attention.pattern import Document, LocalWindow, TopBlocks, pattern_from_spec

VECTOR, ARRAY, META = torch.tensor([8, 16]), np.array([8, 16]), torch.tensor([8, 16], device="meta")
SPARSE, Q = VECTOR.to_sparse(), torch.zeros(1, 8, 2, 4)
# of which == gives no bool
MANY = (VECTOR, ARRAY, SPARSE, META)
DENSE: dict[str, Any] = {"embed_dim": 8, "num_layers": 1, "num_heads": 2, "attention": "dense"}
SMALL: dict[str, Any] = {"num_layers": 1, "embed_dim": 32, "num_heads": 2, "device": "cpu"}
LAYER: dict[str, Any] = {"embed_dim": 32, "num_heads": 4, "pattern": LocalWindow(8)}
PLAN: dict[str, Any] = {"num_positions": 64, "num_heads": 4, "head_dim": 16, "gpu": "H200"}
LM: Any = create_model("longnet-tiny", **SMALL)
CALLS: list[tuple[str, Any, dict[str, Any]]] = [
    *((name, make, {name: wrong}) for name, wrongs in {
        "dtype": ("float16", torch.int32, torch.complex64, int), "device": (True, "gpu", 1.5, []),
    }.items() for wrong in wrongs for make in (
        lambda **given: create_model("longnet-tiny", **SMALL | given),
        lambda **given: create_model("gigapath-12l768d", num_layers=1, **given),
        lambda **given: create_attention("multihead_block_sparse", **LAYER, **given),
    )),
    *((name, lambda **given: create_attention("block_sparse", pattern=LocalWindow(8), **given), {name: wrong})
      for name in ("seed", "block_size", "sparsity") for wrong in MANY),
    # where it has no effect
    *(("tail", call, {"tail": wrong}) for wrong in MANY for call in (
        lambda **given: attention_map(Q, Q, query_rows=[0], pattern=LocalWindow(4), **given),
        lambda **given: LongNetConfig(**DENSE, **given),
    )),
    *(("segment_lengths", LongNetConfig, DENSE | {"segment_lengths": wrong}) for wrong in (None, 3, {}, "x")),
    *((name, call, {name: wrong}) for wrong in (SPARSE, META) for name, call in (
        ("segment_lengths", lambda **given: dilated_attention(Q, Q, Q, dilation_rates=[1, 1], **given)), ("lengths", Document),
    )),
    ("attention_mask", LM, {"tokens": torch.zeros(1, 2, dtype=torch.int64), "attention_mask": SPARSE}),
    *(("config", kind, {"config": wrong}) for kind in (Block, FeedForward, LongNetDecoder, LongNetEncoder) for wrong in (None, "x")),
    ("model.config", evaluate, {"model": None, "records": []}),
    ("inputs", shard_inputs, {"inputs": None}),
    ("ignored", lambda **given: register("of_test", segment_lengths=[8], dilation_rates=[1], **given), {"ignored": 5}),
    ("ignored", lambda **given: register("of_test", segment_lengths=[8], dilation_rates=[1], **given), {"ignored": [1]}),
    ("encoder", lambda **given: create_model("gigapath-12l768d", num_layers=1, **given), {"encoder": None}),
    ("block_pattern", lambda **given: create_model("longnet-tiny", **SMALL, **given), {"block_pattern": ARRAY}),
    *(("length", lambda **given: explain_backend(pattern=DilatedPattern([8], [1]), num_positions=64, **given), {"length": wrong})
      for wrong in (VECTOR, "", [], False)),
    *((name, lambda **given: plan_attention("dense", **PLAN, **given), {name: wrong}) for name in ("layout", "exchange") for wrong in MANY),
    ("device", explain_backend, {"device": 2**80}),
    ("device", profile_memory, {"device": True}),
    *(("ops", profile_memory, {"ops": wrong}) for wrong in (VECTOR, "no", 0)),
    *(("lengths", create_model("longnet-tiny", device="meta").summary, {"lengths": wrong}) for wrong in (8, b"ab")),
    ("spec", pattern_from_spec, {"spec": None}),
    ("generator", Sampling, {"generator": 5}),
    ("sampling", lambda **given: generate_stream(LM, torch.zeros(1, 3, dtype=torch.int64), 2, **given), {"sampling": VECTOR}),
    *((name, lambda **given: KVCache(LM.config, 1, 64, **given), {name: wrong})
      for name, wrong in (("dtype", VECTOR), ("dtype", "float16"), ("device", True))),
    ("seq_len", LM.decoder, {"x": torch.zeros(1, 8, 32), "seq_len": "8"}),
    ("symbols", other_strand, {"symbols": torch.tensor(3)}),
    ("seq_len", LM.decoder, {"x": torch.zeros(1, 8, 32), "seq_len": VECTOR}),
    ("is_causal", lambda **given: LocalWindow(8).resolved(64, 1, **given), {"is_causal": VECTOR}),
    ("blocks", TopBlocks, {"blocks": 2**62}),
    ("module", average_gradients, {"module": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "given"), CALLS, ids=lambda x: str(x) if isinstance(x, str) else "")
def test_a_wrong_type_is_refused_by_name(name: str, call: Any, given: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"(?s)^{re.escape(name)}(\[0\])? (is|holds) .*(expected|leave|take)"):
        call(**given)


def test_vectors_and_numbers_of_numpy_are_taken() -> None:
    plan = plan_attention("dilated", **PLAN, segment_lengths=ARRAY, dilation_rates=np.array([1, 2]))
    assert plan == plan_attention("dilated", **PLAN, segment_lengths=[8, 16], dilation_rates=[1, 2])
    one = np.array(40)
    assert LocalWindow(8).pairs(one) == LocalWindow(8).pairs(40)  # type: ignore[arg-type]
    create_attention("block_sparse", pattern=LocalWindow(8), seed=np.int64(0), block_size=np.int64(128))
