"""Transformers models on this library's attention, tiny and random: against transformers' own sdpa, and against a literal restatement."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dilated_attention.integrations import _hf_attend, _hf_settings
from dilated_attention.integrations._hf_mask import KeyMask, key_mask, mask_of_tensor
from dilated_attention.integrations.huggingface import configure, register, shard_inputs
from dilated_attention.pattern import BigBird, BlockPattern, Causal, DilatedPattern, GlobalLocal, LocalWindow, MaskFunction, TopBlocks
from tests.pool import pool_of

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")
modeling = pytest.importorskip("transformers.modeling_utils")

VOCABULARY, N = 61, 50
LENGTHS, RATES = [8, 32], [1, 3]
PATTERN = GlobalLocal(9, 4, block_size=64)
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
HYBRID = ["sliding_attention", "full_attention"]


def llama(**changes: Any) -> Any:
    return seeded(transformers.LlamaForCausalLM, transformers.LlamaConfig(**{**DECODER, **changes}))


def mistral(**changes: Any) -> Any:
    return seeded(transformers.MistralForCausalLM, transformers.MistralConfig(**{**DECODER, "sliding_window": 7, **changes}))


def qwen2(**changes: Any) -> Any:
    return seeded(transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**{**DECODER, **hybrid(), **changes}))


def qwen3(**changes: Any) -> Any:
    return seeded(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**{**DECODER, **hybrid(), "head_dim": 8, **changes}))


def hybrid() -> dict[str, Any]:
    return {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1, "layer_types": HYBRID}


def bert(**changes: Any) -> Any:
    shape = {name: value for name, value in DECODER.items() if name != "num_key_value_heads"}
    return seeded(transformers.BertForMaskedLM, transformers.BertConfig(**{**shape, **changes}))


def vit(**changes: Any) -> Any:
    shape = {name: DECODER[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    config = transformers.ViTConfig(**{**shape, "image_size": 24, "patch_size": 4, "num_labels": 5, **changes})
    return seeded(transformers.ViTForImageClassification, config)


def seeded(kind: Any, config: Any) -> Any:
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return kind(config).eval().double()


def tokens(rows: int = 2, length: int = N, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(side: str, length: int = N) -> torch.Tensor:
    """(2, length): the second row has 13 positions of padding."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, slice(None, 13) if side == "left" else slice(-13, None)] = 0
    return mask


def inputs_of(model: Any, mask: torch.Tensor | None = None) -> dict[str, Any]:
    if isinstance(model, transformers.ViTForImageClassification):
        return {"pixel_values": torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)}
    return {"input_ids": tokens(), "attention_mask": mask}


def on(model: Any, name: str) -> Any:
    model.set_attn_implementation(name)
    return model


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Names as in a fresh process, with small segments; and the restatement as ``"literal"``."""
    tables = (modeling.AttentionInterface._global_mapping, masking.AttentionMaskInterface._global_mapping, _hf_settings.REGISTERED)
    kept, ignored = [dict(table) for table in tables], set(_hf_attend._WITHOUT_EFFECT)
    register(segment_lengths=LENGTHS, dilation_rates=RATES, pattern=PATTERN)
    modeling.AttentionInterface.register("literal", literal)
    masking.AttentionMaskInterface.register("literal", every_pair)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*changes nothing in MistralConfig")
        yield
    for table, before in zip(tables, kept, strict=True):
        table.clear()
        table.update(before)
    _hf_attend._WITHOUT_EFFECT.clear()
    _hf_attend._WITHOUT_EFFECT.update(ignored)
    LITERAL[:] = [DilatedPattern(LENGTHS, RATES)]


# whose pairs "literal" computes
LITERAL: list[Any] = [DilatedPattern(LENGTHS, RATES)]


def every_pair(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Transformers' own mask, (B, 1, Nq, Nk) bool, written out in every case."""
    mask = masking.sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert mask is not None
    return mask


def literal(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Σ m e^s v / Σ m e^s over the pairs of the model's own mask, in a layer with a window with m = 1."""
    heads, (num_queries, num_keys) = query.shape[1], (query.shape[2], key.shape[2])
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    multiplicity = torch.ones(heads, num_keys, num_keys)
    if kwargs.get("sliding_window") is None:
        multiplicity = LITERAL[0].dense_mask(num_keys, num_keys, heads)
    weights = (query @ key.transpose(2, 3) * kwargs["scaling"]).exp() * multiplicity[:, num_keys - num_queries :]
    if mask is not None:
        weights = weights * mask
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights @ value / total, 0).transpose(1, 2), None


def gradients_of(model: Any, logits: torch.Tensor, real: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=logits.dtype)
    if real is not None:
        weight = weight * real[..., None]
    names, parameters = zip(*[(name, p) for name, p in model.named_parameters() if p.requires_grad], strict=True)
    return dict(zip(names, torch.autograd.grad((logits * weight).sum(), parameters, allow_unused=True), strict=True))


def check_equal(model: Any, ours: str, theirs: str, tolerance: float, mask: torch.Tensor | None = None) -> None:
    """Logits of real positions and gradients of all parameters, on two implementations."""
    inputs = inputs_of(model, mask)
    found = []
    for name in (theirs, ours):
        logits = on(model, name)(**inputs).logits
        found.append((logits if mask is None else logits[mask.bool()], gradients_of(model, logits, mask)))
    (expected, wanted), (logits, gradients) = found
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)
    for parameter in wanted:
        if wanted[parameter] is None:
            assert gradients[parameter] is None
            continue
        scale = max(1.0, wanted[parameter].abs().max().item())
        torch.testing.assert_close(gradients[parameter], wanted[parameter], atol=tolerance * scale, rtol=0, msg=lambda m, p=parameter: f"{p}: {m}")


MODELS = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "bert": bert, "vit": vit}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("ours", ["dilated", "ring_dilated", "block_sparse"])
def test_one_segment_of_everything_is_sdpa(kind: str, ours: str) -> None:
    """In float32, with and without padding; without torch.distributed a ring has one process."""
    model = MODELS[kind]().float()
    configure(model, segment_lengths=[4096], dilation_rates=[1], pattern=LocalWindow((None, None)))
    if kind == "vit":
        inputs = {name: x.float() for name, x in inputs_of(model).items()}
        expected, found = (on(model, name)(**inputs).logits for name in ("sdpa", ours))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        return
    for mask in (None, padded("right"), padded("left")):
        check_equal(model, ours, "sdpa", 1e-6, mask)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_dilated_layers_are_the_formula(kind: str, padding: str) -> None:
    check_equal(MODELS[kind](), "dilated", "literal", 1e-10, None if padding == "none" else padded(padding))


@pytest.mark.parametrize("kind", MODELS)
def test_block_sparse_layers_are_the_formula(kind: str) -> None:
    LITERAL[0] = PATTERN
    check_equal(MODELS[kind](), "block_sparse", "literal", 1e-10, padded("right"))


def test_settings_reach_the_kernels() -> None:
    model = llama()
    LITERAL[0] = DilatedPattern([6, 24], [2, 3], "zero", "split")
    configure(model, segment_lengths=[6, 24], dilation_rates=[2, 3], head_offsets="zero", branch_heads="split")
    check_equal(model, "dilated", "literal", 1e-10)
    offsets = [[0, 1, 0, 1], [2, 1, 0, 0]]
    LITERAL[0] = DilatedPattern([6, 24], [2, 3], offsets)
    configure(model, head_offsets=offsets, branch_heads=None)
    check_equal(model, "dilated", "literal", 1e-10)
    with pytest.raises(Exception, match="flash4"):
        configure(model, backend="flash4")
        model(tokens())


# ---- decoding


def greedy(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, steps: int) -> torch.Tensor:
    """By whole forwards without a cache."""
    for _ in range(steps):
        logits = model(ids, attention_mask=mask, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        mask = None if mask is None else torch.cat([mask, mask.new_ones(mask.shape[0], 1)], 1)
    return ids


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name, kind", [("dilated", "llama"), ("dilated", "mistral"), ("dilated", "qwen3"), ("block_sparse", "llama")])
def test_generation_with_a_cache_is_that_of_whole_forwards(name: str, kind: str, cache: str) -> None:
    model = on(MODELS[kind](), name)
    ids, steps = tokens(), 9
    for mask in (None, padded("left")):
        mask_or_ones = torch.ones_like(ids) if mask is None else mask
        expected = greedy(model, ids, mask, steps)
        settings = {} if cache == "dynamic" else {"cache_implementation": "static"}
        found = model.generate(ids, attention_mask=mask_or_ones, max_new_tokens=steps, do_sample=False, **settings)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_logits_of_chunks_and_steps_are_those_of_one_forward(kind: str, cache: str) -> None:
    """Prefill in chunks, then token by token; to 1e-10, where greedy choices could hide a difference."""
    model = on(MODELS[kind](), "dilated")
    ids, mask = tokens(), padded("left")
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    if cache == "static":
        past = transformers.StaticCache(config=model.config, max_cache_len=N + 7)
    else:
        past = transformers.DynamicCache(config=model.config)
    found, start = [], 0
    for size in (17, 20, *[1] * (N - 37)):
        stop = start + size
        outputs = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=past, use_cache=True)
        found.append(outputs.logits)
        start = stop
    real = mask.bool()
    torch.testing.assert_close(torch.cat(found, 1)[real], expected[real], atol=1e-10, rtol=0)


def test_beams_and_samples() -> None:
    model, ids = on(llama(), "dilated"), tokens()
    beams = [model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, num_beams=3, do_sample=False, use_cache=use) for use in (True, False)]
    assert torch.equal(*beams)
    on(model, "sdpa")
    samples = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=True)
    assert samples.shape == (2, N + 6)


@pytest.mark.parametrize("pattern", [BigBird(9, 4, 1), TopBlocks(density=0.5), TopBlocks(blocks=1)], ids=lambda pattern: type(pattern).__name__)
def test_patterns_of_the_whole_length_do_not_decode_from_a_cache(pattern: BlockPattern) -> None:
    model, ids = on(llama(), "block_sparse"), tokens()
    configure(model, pattern=pattern)
    with pytest.raises(ValueError, match=r"keeps other pairs of a longer sequence.*use_cache=False"):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3)
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, use_cache=False, do_sample=False)
    assert torch.equal(whole, greedy(model, ids, None, 3))


# ---- windows, packed documents, dropout


@pytest.mark.parametrize("name", ["dilated", "block_sparse"])
def test_sliding_layers_keep_their_window(name: str) -> None:
    """Mistral's, all of them: what the model computes does not change, and that is said once."""
    with pytest.warns(UserWarning, match=r"changes nothing in MistralConfig.*config.sliding_window = None"):
        check_equal(mistral(), name, "sdpa", 1e-10, padded("right"))
    spread = mistral(sliding_window=None)
    LITERAL[0] = DilatedPattern(LENGTHS, RATES) if name == "dilated" else PATTERN
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_equal(spread, name, "literal", 1e-10)


def test_a_window_of_the_mask_and_one_of_the_layer_both_hold() -> None:
    module = layer(is_causal=True)
    q, k, v = heads_of(12)
    for in_mask, in_layer, left in (((2, 0), None, 2), (None, 4, 3), ((2, 0), 6, 2), ((6, 0), 3, 2)):
        mask = KeyMask(12, 12, 0, 0, True, window=in_mask)
        out, _ = _hf_attend.attend("dilated", module, q, k, v, mask, scaling=0.5, sliding_window=in_layer)
        seen = LocalWindow((left, 0)).dense_mask(12, 12, 1)
        torch.testing.assert_close(out, dense(q, k, v, seen), atol=1e-12, rtol=0)
    module.is_causal = False
    out, _ = _hf_attend.attend("dilated", module, q, k, v, None, scaling=0.5, sliding_window=4)
    torch.testing.assert_close(out, dense(q, k, v, LocalWindow(3).dense_mask(12, 12, 1)), atol=1e-12, rtol=0)


def test_packed_documents_are_alone() -> None:
    """By position ids that begin again, in several rows, and by flash-attention's bounds."""
    model, ids = on(llama(), "dilated"), tokens()
    cuts = ((20, 7, 23), (50,))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in cuts])
    expected = [torch.cat([model(part[None]).logits[0] for part in row.split(list(cut))]) for row, cut in zip(ids, cuts, strict=True)]
    found = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-10, rtol=0)
    bounds = torch.tensor([0, 20, 27, 50], dtype=torch.int32)
    varlen = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.clone(), "max_length_q": 23, "max_length_k": 23}
    for use_cache in (False, True):
        found = model(ids[:1], position_ids=positions[:1], use_cache=use_cache, **varlen).logits
        torch.testing.assert_close(found[0], expected[0], atol=1e-10, rtol=0)
    with pytest.raises(ValueError, match="expected equal bounds"):
        model(ids[:1], position_ids=positions[:1], **{**varlen, "cu_seq_lens_k": torch.tensor([0, 20, 26, 50])})
    with pytest.raises(ValueError, match="batch size 1"):
        model(ids, **varlen)


def test_packed_windows_count_within_documents() -> None:
    check = qwen3()
    positions = torch.cat([torch.arange(30), torch.arange(20)])[None]
    ids = tokens(1)
    for name in ("dilated", "block_sparse"):
        model = on(check, name)
        expected = torch.cat([model(part).logits for part in ids.split([30, 20], 1)], 1)
        torch.testing.assert_close(model(ids, position_ids=positions, use_cache=False).logits, expected, atol=1e-10, rtol=0)


def test_dropout_in_training_only() -> None:
    model, ids = on(llama(attention_dropout=0.5), "dilated"), tokens()
    expected = model(ids).logits
    model.train()
    torch.manual_seed(5)
    first = model(ids).logits
    torch.manual_seed(5)
    assert torch.equal(model(ids).logits, first)
    assert (first - expected).abs().max() > 1e-3
    torch.testing.assert_close(model.eval()(ids).logits, expected, atol=0, rtol=0)
    # a layer that hands on its probability in evaluation, too
    q, k, v = heads_of(12)
    with_p, without = (_hf_attend.attend("dilated", layer(is_causal=True), q, k, v, None, dropout=p)[0] for p in (0.5, 0.0))
    assert torch.equal(with_p, without)


def test_activation_checkpointing_and_autocast() -> None:
    model, ids = on(llama(), "dilated"), tokens()
    expected = gradients_of(model, model(ids).logits)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = gradients_of(model, model(ids, use_cache=False).logits)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-10, rtol=0)
    model = llama().float()
    configure(model, segment_lengths=[4096], dilation_rates=[1])
    with torch.autocast("cpu", torch.bfloat16):
        exact, ours = (on(model, name)(ids).logits for name in ("sdpa", "dilated"))
    assert ours.dtype == exact.dtype
    torch.testing.assert_close(ours, exact, atol=2e-2, rtol=0)


# ---- torch.compile


@pytest.mark.parametrize("name, kind", [("dilated", "llama"), ("dilated", "qwen3"), ("block_sparse", "llama"), ("dilated", "bert")])
def test_compiled_without_a_graph_break(name: str, kind: str) -> None:
    torch.compiler.reset()
    model = on(MODELS[kind](), name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for mask in (None, padded("right")):
        inputs = inputs_of(model, mask)
        logits, expected = compiled(**inputs).logits, model(**inputs).logits
        torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
        for name, gradient in gradients_of(model, expected).items():
            torch.testing.assert_close(gradients_of(model, logits)[name] if False else gradient, gradient)
    found, wanted = gradients_of(model, logits), gradients_of(model, expected)
    for parameter, gradient in wanted.items():
        if gradient is not None:
            torch.testing.assert_close(found[parameter], gradient, atol=1e-8, rtol=1e-8)
