"""Families of transformers models on every registered name: logits and all gradients are the formula's, the dense ones' loss is eager's.

The formula is written out in float64 (``test_huggingface.literal``), and what the names compute is that to 1e-10: with padding and packed
documents, rings as one process. transformers' eager attention takes its softmax in float32, so that dense settings, under activation
checkpointing, are eager's to 1e-6. Several processes and compiled models: test_huggingface; LoRA and FSDP2:
test_hf_context_parallel. docs/huggingface.md has a table of the families.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dilated_attention.integrations.huggingface import register
from dilated_attention.pattern import DilatedPattern, LocalWindow
from tests.integrations.test_huggingface import (  # noqa: F401  the fixture is used by every test
    DECODER,
    LENGTHS,
    LITERAL,
    PATTERN,
    RATES,
    N,
    bert,
    error,
    gemma2,
    gpt_oss,
    inputs_of,
    llama,
    mistral,
    model_of,
    on,
    padded,
    positions_in,
    qwen2,
    qwen3,
    registered,
    results,
    seeded,
    tokens,
    vit,
    weights_of,
)

transformers = pytest.importorskip("transformers")

DENSE: dict[str, Any] = {"segment_lengths": [4096], "dilation_rates": [1], "pattern": LocalWindow((None, None))}
# names, and what they keep as every test registers them
NAMES = {
    "dilated": DilatedPattern(LENGTHS, RATES),
    "block_sparse": PATTERN,
    "ring_dilated": DilatedPattern(LENGTHS, RATES),
    "ring": DilatedPattern([4096], [1]),
}
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


@pytest.mark.parametrize("variant", ["left", "right", "packed"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", [*FAMILIES, "vit"])
def test_one_process(family: str, name: str, variant: str) -> None:
    """Without torch.distributed a ring has one process."""
    LITERAL[0] = NAMES[name]
    # transformers finds packed documents in decoders alone, and images have no padding
    is_packed = variant == "packed" and family != "vit" and FAMILIES[family].is_causal
    model: Any = vit() if family == "vit" else FAMILIES[family].make()
    if not is_packed:
        mask = None if variant == "packed" or family == "vit" else padded(variant)
        found, expected = (results(on(model, which), inputs_of(model, mask), mask) for which in (name, "literal"))
        assert error(found, expected) <= TOLERANCE
        return
    # three documents in one row, whose positions begin again
    given: dict[str, Any] = {"input_ids": tokens(1), "position_ids": positions_in(13, 30, 7), "use_cache": False}
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
    register(**DENSE)
    LITERAL[0] = NAMES["ring"]
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


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_the_way_out_that_an_error_names_is_the_models_own(family: str) -> None:
    """Gemma 2 and gpt-oss have no sdpa, and only ``"ring_dilated"`` has the settings of ``"dilated"``."""
    register("ring_of_mine", kind="ring_dilated", segment_lengths=[8], dilation_rates=[1])
    model = FAMILIES[family].make()
    ways_out = {"ring": r'with attn_implementation="sdpa" \(or "eager" where the model has no "sdpa"\)$'}
    ways_out |= {
        "ring_dilated": 'with attn_implementation="dilated"$',
        "ring_of_mine": "with a name that has kind='dilated' and the same branches$",
    }
    for name, way_out in ways_out.items():
        with pytest.raises(ValueError, match=f"from a cache.*{way_out}"):
            on(model, name).generate(tokens(1), max_new_tokens=2, pad_token_id=0)
    for name in ("eager", "dilated"):
        assert on(model, name).generate(tokens(1), max_new_tokens=2, pad_token_id=0).shape == (1, N + 2)
