"""Families of transformers models on every registered name, with dense settings: logits, loss and all gradients are eager's.

transformers' eager attention takes its softmax in float32, so that it can show this to 1e-6 only. The attention written out in float64
(``test_huggingface.literal``) is eager to that, and what the names compute is the former to 1e-10: on one process and on 2, 3, 4 and 8,
with padding and packed documents, under activation checkpointing. Compiled: test_huggingface; LoRA and FSDP2:
test_hf_context_parallel. docs/huggingface.md has a table of the families.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention.distributed.sharding.layout import positions_of
from dilated_attention.integrations.huggingface import register, shard_inputs
from dilated_attention.pattern import DilatedPattern, LocalWindow
from tests.helpers.pool import patience, pool_of
from tests.integrations.test_huggingface import (  # noqa: F401  the fixture is used by every test
    DECODER,
    LENGTHS,
    LITERAL,
    RATES,
    N,
    asks,
    bert,
    error,
    every_pair,
    gemma2,
    gpt_oss,
    literal,
    llama,
    masking,
    mistral,
    model_of,
    modeling,
    on,
    padded,
    qwen2,
    qwen3,
    registered,
    results,
    seeded,
    tokens,
    weights_of,
)

transformers = pytest.importorskip("transformers")

DENSE: dict[str, Any] = {"segment_lengths": [4096], "dilation_rates": [1], "pattern": LocalWindow((None, None))}
NAMES = ("dilated", "block_sparse", "ring_dilated", "ring")
TOLERANCE = 1e-10
EAGER_TOLERANCE = 2e-6
BOUNDS = (0, 13, 43, 50)


def gemma3() -> Any:
    more = {"head_dim": 8, "sliding_window": 11, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}
    return seeded(transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**{**DECODER, **more}))


phi3 = functools.partial(model_of, "Phi3", {"sliding_window": 11})


def modernbert() -> Any:
    shape = {name: value for name, value in DECODER.items() if name != "num_key_value_heads"}
    more = {"local_attention": 10, "global_attn_every_n_layers": 2, "reference_compile": False}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    config = transformers.ModernBertConfig(**{**shape, **more, **special})
    return seeded(transformers.ModernBertForMaskedLM, config)


@dataclass(frozen=True)
class Family:
    """Models whose layers ask for the same.

    Args:
        tells_positions: its masks are made from position_ids, so that transformers finds packed documents in them.
        rounding: of processes; norms that compute in float32 whatever the model's dtype sum their gradients in it.
    """

    make: Callable[[], Any]
    is_causal: bool = True
    tells_positions: bool = True
    rounding: float = TOLERANCE


FAMILIES = {
    "llama": Family(llama),
    "mistral": Family(mistral),
    "phi3": Family(phi3),
    "qwen2": Family(qwen2),
    "qwen3": Family(qwen3),
    "gemma2": Family(gemma2, rounding=EAGER_TOLERANCE),
    "gemma3": Family(gemma3, rounding=EAGER_TOLERANCE),
    "gpt_oss": Family(gpt_oss, tells_positions=False),
    # in training, too, it computes the same
    "bert": Family(functools.partial(bert, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), is_causal=False),
    "modernbert": Family(modernbert, is_causal=False),
}


@pytest.fixture(autouse=True)
def dense(registered: None) -> None:  # noqa: F811
    register_dense()


def register_dense(**options: Any) -> None:
    """The names with dense settings, and ``"literal"``, also in a process that has no fixtures."""
    register(**DENSE, **options)
    modeling.AttentionInterface.register("literal", literal)
    masking.AttentionMaskInterface.register("literal", every_pair)
    LITERAL[0] = DilatedPattern([4096], [1])


def inputs(variant: str) -> dict[str, Any]:
    if variant == "packed":
        # three documents in one row, whose positions begin again
        positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(BOUNDS)])
        return {"input_ids": tokens(1), "position_ids": positions[None], "use_cache": False}
    return {"input_ids": tokens(), "attention_mask": padded("right") if variant == "padded" else None}


@pytest.mark.parametrize("variant", ["padded", "packed"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_process(family: str, name: str, variant: str) -> None:
    """Without torch.distributed a ring has one process."""
    if variant == "packed" and not FAMILIES[family].is_causal:
        # transformers finds packed documents in decoders alone
        variant = "plain"
    model, given = FAMILIES[family].make(), inputs(variant)
    if variant != "packed":
        expected = results(on(model, "literal"), given, given.get("attention_mask"))
        assert error(results(on(model, name), given, given.get("attention_mask")), expected) <= TOLERANCE
        return
    weights = weights_of(1, N, model.config.vocab_size)
    # the documents one by one
    on(model, "literal")
    parts = [results(model, {"input_ids": given["input_ids"][:, a:b]}, weights=weights[:, a:b]) for a, b in itertools.pairwise(BOUNDS)]
    expected = {key: (torch.cat if key == "logits" else torch.stack)([part[key] for part in parts]) for key in parts[0]}
    expected = {key: x if key == "logits" else x.sum(0) for key, x in expected.items()}
    if name.startswith("ring") or not FAMILIES[family].tells_positions:
        # positions of a shard may begin again because it is one: the bounds of the whole say what is packed
        bounds = torch.tensor(BOUNDS, dtype=torch.int32)
        given |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 30, "max_length_k": 30}
    assert error(results(on(model, name), given, weights=weights), expected) <= FAMILIES[family].rounding


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_and_activation_checkpointing(family: str) -> None:
    """transformers computes its losses in float32, as its eager attention its softmax."""
    model, ids = FAMILIES[family].make(), tokens()
    found = []
    for name, checkpointed in (("eager", False), ("literal", False), *((name, True) for name in NAMES)):
        on(model, name).train()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        found.append({"loss": loss.detach()[None], **{key: p.grad for key, p in model.named_parameters()}})
    assert max(error(each, found[0]) for each in found[1:]) <= EAGER_TOLERANCE


# ---- processes


def shared_call(vocab_size: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Inputs of 49 positions and the weights of their logits in the sum that is derived."""
    return {"input_ids": tokens(2, 49), "attention_mask": padded("right", 49)}, weights_of(2, 49, vocab_size)


SETTINGS = {"dense": DENSE, "dilated": {"segment_lengths": LENGTHS, "dilation_rates": RATES}}


def expected_of(family: str, settings: str) -> dict[str, torch.Tensor]:
    """What one process computes."""
    LITERAL[0] = DilatedPattern(SETTINGS[settings]["segment_lengths"], SETTINGS[settings]["dilation_rates"])
    model = FAMILIES[family].make()
    whole, weights = shared_call(model.config.vocab_size)
    return results(on(model, "literal"), whole, whole["attention_mask"], weights)


def errors_on_a_ring(rank: int, world: int, wanted: dict[str, dict[str, torch.Tensor]], settings: str, layout: str) -> dict[str, float]:
    """Of this rank's logits, and of the gradients' sums over the ranks."""
    register(**SETTINGS[settings], layout=layout, timeout=patience())
    errors = {}
    for family, expected in wanted.items():
        model = FAMILIES[family].make()
        whole, weights = shared_call(model.config.vocab_size)
        mine = positions_of(49, rank, world, layout, None)
        shard = shard_inputs(whole, layout=layout)
        real = whole["attention_mask"][:, mine]
        kept = torch.zeros(2, 49, dtype=torch.bool)
        kept[:, mine] = True
        # a zero more, since all of a rank's rows may be padding
        expected["logits"] = _with_zero(expected["logits"][kept[whole["attention_mask"].bool()]])
        errors[family] = 0.0
        for attention in ("ring_dilated", "ring") if settings == "dense" else ("ring_dilated",):
            found = results(on(model, attention), shard, real, weights[:, mine])
            for name in sorted(found.keys() - {"logits"}):
                dist.all_reduce(found[name])
            errors[family] = max(errors[family], error({**found, "logits": _with_zero(found["logits"])}, expected))
    return errors


def _with_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.flatten(), x.new_zeros(1)])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "layout", "settings"),
    [(2, "contiguous", "dense"), (3, "zigzag", "dilated"), (4, "striped", "dense"), (8, "contiguous", "dilated")],
)
def test_processes_share_a_sequence(world: int, layout: str, settings: str) -> None:
    """49 positions, with 2 heads of keys for up to 8 processes. Two processes run every family, 3 and 4 a half of them each."""
    some = {2: list(FAMILIES), 3: list(FAMILIES)[::2], 4: list(FAMILIES)[1::2], 8: ["gpt_oss"]}[world]
    families = tuple(name for name in some if asks(FAMILIES[name].make()))
    wanted = {family: expected_of(family, settings) for family in families}
    for errors in pool_of(world).run(errors_on_a_ring, wanted, settings, layout):
        assert errors.keys() == set(families) and all(errors[family] <= FAMILIES[family].rounding for family in families), errors
