"""Transformers models on this library's attention, tiny and random: against transformers' own sdpa, and against a literal restatement."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention

from dilated_attention import BackendUnavailable
from dilated_attention.distributed.sharding.layout import positions_of
from dilated_attention.integrations import _hf_attend, _hf_refusals, _hf_settings
from dilated_attention.integrations._hf_mask import KeyMask, key_mask
from dilated_attention.integrations.huggingface import configure, register, shard_inputs
from dilated_attention.pattern import BigBird, BlockPattern, Causal, DilatedPattern, GlobalLocal, LocalWindow, MaskFunction, TopBlocks
from tests.helpers.pool import pool_of

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")
modeling = pytest.importorskip("transformers.modeling_utils")

RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
# the one that CI has; what older ones lack is skipped by name, and later ones have all
PINNED = (5, 23)
# the argument and the output that hold a cache: renamed in 5.24, and the old name goes in 5.40
CACHE = "cache" if RELEASE >= (5, 24) else "past_key_values"
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


def model_of(kind: str, more: dict[str, Any], name: str = "sdpa", **changes: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**DECODER, **more, **changes})
    return seeded(getattr(transformers, f"{kind}ForCausalLM"), config, name)


QWEN = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1, "layer_types": HYBRID}
# caps that are low enough to change every score
GEMMA = {"head_dim": 8, "sliding_window": 11, "attn_logit_softcapping": 0.7, "query_pre_attn_scalar": 8}
llama = functools.partial(model_of, "Llama", {})
mistral = functools.partial(model_of, "Mistral", {"sliding_window": 7})
qwen2 = functools.partial(model_of, "Qwen2", QWEN)
qwen3 = functools.partial(model_of, "Qwen3", {**QWEN, "head_dim": 8})
gemma2 = functools.partial(model_of, "Gemma2", GEMMA, "eager")


def gpt_oss(**changes: Any) -> Any:
    """Its sinks are drawn, and its layers have windows in turns."""
    more = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "sliding_window": 11, **changes}
    config = transformers.GptOssConfig(**{**DECODER, **more})
    # torch's grouped products take no float64
    config._experts_implementation = "eager"
    model = seeded(transformers.GptOssForCausalLM, config, "eager")
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def bert(**changes: Any) -> Any:
    shape = {name: value for name, value in DECODER.items() if name != "num_key_value_heads"}
    return seeded(transformers.BertForMaskedLM, transformers.BertConfig(**{**shape, **changes}))


def vit(**changes: Any) -> Any:
    shape = {name: DECODER[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    config = transformers.ViTConfig(**{**shape, "image_size": 24, "patch_size": 4, "num_labels": 5, **changes})
    return seeded(transformers.ViTForImageClassification, config)


def seeded(kind: Any, config: Any, name: str = "sdpa") -> Any:
    config._attn_implementation = name
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


def asks(model: Any) -> bool:
    """Whether a model asks for an implementation by name, as all of these do in later releases."""
    return RELEASE >= PINNED or model._can_set_attn_implementation()


def on(model: Any, name: str) -> Any:
    if not asks(model):
        pytest.skip(f"{type(model).__name__} computes its attention itself in transformers {transformers.__version__}")
    model.set_attn_implementation(name)
    return model


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Names as in a fresh process, with small segments; and the restatement as ``"literal"``."""
    tables = (modeling.AttentionInterface._global_mapping, masking.AttentionMaskInterface._global_mapping, _hf_settings.REGISTERED)
    kept, ignored = [dict(table) for table in tables], set(_hf_refusals.WITHOUT_EFFECT)
    register(segment_lengths=LENGTHS, dilation_rates=RATES, pattern=PATTERN)
    modeling.AttentionInterface.register("literal", literal)
    masking.AttentionMaskInterface.register("literal", every_pair)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*changes nothing in MistralConfig")
        yield
    for table, before in zip(tables, kept, strict=True):
        table.clear()
        table.update(before)
    _hf_refusals.WITHOUT_EFFECT.clear()
    _hf_refusals.WITHOUT_EFFECT.update(ignored)
    LITERAL[:] = [DilatedPattern(LENGTHS, RATES)]


# whose pairs "literal" computes
LITERAL: list[Any] = [DilatedPattern(LENGTHS, RATES)]


def every_pair(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Transformers' own mask, (B, 1, Nq, Nk) bool, written out in every case."""
    mask = masking.sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert mask is not None
    return mask


def literal(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Σ m e^s v / Σ m e^s over the pairs of the model's own mask, in a layer with a window with m = 1."""
    heads, (num_queries, num_keys) = query.shape[1], (query.shape[2], key.shape[2])
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    multiplicity = torch.ones(heads, num_keys, num_keys)
    if kwargs.get("sliding_window") is None:
        multiplicity = LITERAL[0].dense_mask(num_keys, num_keys, heads)
    scores = query @ key.transpose(2, 3) * kwargs["scaling"]
    if kwargs.get("softcap") is not None:
        scores = kwargs["softcap"] * (scores / kwargs["softcap"]).tanh()
    weights = scores.exp() * multiplicity[:, num_keys - num_queries :]
    if mask is not None:
        weights = weights * mask
    total = weights.sum(-1, keepdim=True)
    if kwargs.get("s_aux") is not None:
        total = total + kwargs["s_aux"].exp()[:, None, None]
    return (weights @ value / torch.where(total > 0, total, 1)).transpose(1, 2), None


def layer(**attributes: Any) -> Any:
    """A layer as attention functions see it."""
    module = nn.Module().eval()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def heads_of(length: int, keys: int | None = None) -> list[torch.Tensor]:
    """q (1, 4, length, 8), and k, v of two heads."""
    draw = torch.Generator().manual_seed(6)
    shapes = ((1, 4, length, 8), *[(1, 2, keys or length, 8)] * 2)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return ((q @ k.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def results(
    model: Any, given: dict[str, Any], real: torch.Tensor | None = None, weights: torch.Tensor | None = None, call: Any = None
) -> dict[str, torch.Tensor]:
    """Logits of real positions, and the gradients of a weighted sum of them by the parameters' names."""
    logits = (model if call is None else call)(**given).logits
    if weights is None:
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=logits.dtype)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = (logits * weights if real is None else logits * weights * real[..., None]).sum()
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    gradients = {name: grad for name, grad in zip(parameters, found, strict=True) if grad is not None}
    return {"logits": logits.detach().flatten(0, -2) if real is None else logits.detach()[real.bool()], **gradients}


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest error, of a gradient relative where it is above 1; a missing result is an error."""
    assert found.keys() == expected.keys() and any("proj" in name or "query" in name or "Wqkv" in name for name in found)
    sizes = {name: 1.0 if name == "logits" else max(1.0, float(wanted.abs().max())) for name, wanted in expected.items()}
    return max(float((found[name] - wanted).abs().max()) / sizes[name] for name, wanted in expected.items())


def check_equal(model: Any, ours: str, theirs: str, tolerance: float, mask: torch.Tensor | None = None) -> None:
    """Logits of real positions and gradients of all parameters, on two implementations."""
    expected, found = (results(on(model, name), inputs_of(model, mask), mask) for name in (theirs, ours))
    assert error(found, expected) <= tolerance


MODELS = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gpt_oss": gpt_oss,
    "bert": bert,
    "vit": vit,
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("ours", ["dilated", "ring_dilated", "block_sparse"])
def test_layers_are_the_formula(kind: str, ours: str) -> None:
    if ours == "block_sparse":
        LITERAL[0] = PATTERN
    for mask in (None,) if kind == "vit" else (None, padded("left"), padded("right")):
        check_equal(MODELS[kind](), ours, "literal", 1e-10, mask)


@pytest.mark.skipif(RELEASE < PINNED, reason="older releases make a causal mask for is_causal=False, which is refused")
def test_a_decoder_that_sees_both_ways() -> None:
    """transformers lends config.is_causal the argument's value, and makes the mask from that."""
    model, ids = llama(), tokens()
    for settings in ({"segment_lengths": [4096], "dilation_rates": [1]}, {"segment_lengths": LENGTHS, "dilation_rates": RATES}):
        configure(model, **settings)
        LITERAL[0] = DilatedPattern(**settings)
        found, expected = (on(model, name)(ids, is_causal=False, attention_mask=padded("right")).logits for name in ("dilated", "literal"))
        torch.testing.assert_close(found[0], expected[0], atol=1e-10, rtol=0)
        assert (on(model, "dilated")(ids).logits[0] - found[0]).abs().max() > 1e-3


def test_settings_reach_the_kernels() -> None:
    model = llama()
    LITERAL[0] = DilatedPattern([6, 24], [2, 3], branch_heads="split")
    configure(model, segment_lengths=[6, 24], dilation_rates=[2, 3], branch_heads="split")
    check_equal(model, "dilated", "literal", 1e-10)
    offsets = [[0, 1, 0, 1], [2, 1, 0, 0]]
    LITERAL[0] = DilatedPattern([6, 24], [2, 3], offsets)
    configure(model, head_offsets=offsets, branch_heads=None)
    check_equal(model, "dilated", "literal", 1e-10)
    configure(model, backend="flash4")
    with pytest.raises(BackendUnavailable, match="flash4"):
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
@pytest.mark.parametrize(
    "name, kind", [("dilated", "llama"), ("dilated", "mistral"), ("dilated", "qwen3"), ("dilated", "gpt_oss"), ("block_sparse", "llama")]
)
def test_generation_with_a_cache_is_that_of_whole_forwards(name: str, kind: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without padding by kernels that read one token's keys, with it by those of forwards."""
    model = on(MODELS[kind](), name)
    ids, steps, seen = tokens(), 9, []
    decode = _hf_attend.decode_attention
    monkeypatch.setattr(_hf_attend, "decode_attention", lambda *args, **settings: seen.append(1) or decode(*args, **settings))
    for mask in (None, padded("left")):
        mask_or_ones = torch.ones_like(ids) if mask is None else mask
        expected = greedy(model, ids, mask, steps)
        settings = {} if cache == "dynamic" else {"cache_implementation": "static"}
        found = model.generate(ids, attention_mask=mask_or_ones, max_new_tokens=steps, do_sample=False, **settings)
        assert torch.equal(found, expected)
        if mask is None:
            # the first token comes of the prompt
            assert len(seen) == (steps - 1) * model.config.num_hidden_layers


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_logits_of_chunks_and_steps_are_those_of_one_forward(kind: str, cache: str) -> None:
    """Prefill in chunks, then token by token; to 1e-10, where greedy choices could hide a difference."""
    model = on(MODELS[kind](), "dilated")
    ids, mask = tokens(), None if kind == "qwen3" else padded("left")
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    if cache == "static":
        past = transformers.StaticCache(config=model.config, max_cache_len=N + 7)
    else:
        past = transformers.DynamicCache(config=model.config)
    found, start = [], 0
    for size in (17, 20, *[1] * (N - 37)):
        stop = start + size
        so_far = None if mask is None else mask[:, :stop]
        with torch.set_grad_enabled(mask is not None):
            found.append(model(ids[:, start:stop], attention_mask=so_far, **{CACHE: past}, use_cache=True).logits)
        start = stop
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(torch.cat(found, 1)[real], expected[real], atol=1e-10, rtol=0)


def test_beams() -> None:
    model, ids = on(llama(), "dilated"), tokens()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    assert torch.equal(*(model.generate(ids, **options, use_cache=use) for use in (True, False)))


@pytest.mark.parametrize(
    "pattern", [BigBird(9, 4, 1), TopBlocks(density=0.5), TopBlocks(blocks=1)], ids=lambda pattern: type(pattern).__name__
)
def test_patterns_of_the_whole_length_do_not_decode_from_a_cache(pattern: BlockPattern) -> None:
    model, ids = on(llama(), "block_sparse"), tokens()
    configure(model, pattern=pattern)
    with pytest.raises(ValueError, match=r"keeps other pairs in a longer sequence.*use_cache=False"):
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
    module = layer(is_causal=True, config=whole())
    module.config.layer_types = HYBRID
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
    ids, cuts = tokens(), ((20, 7, 23), (50,))
    positions = torch.cat([positions_in(*row) for row in cuts])
    # qwen3's windows count within documents; llama's last
    for kind, name in (("qwen3", "dilated"), ("qwen3", "block_sparse"), ("llama", "dilated")):
        model = on(MODELS[kind](), name)
        expected = [torch.cat([model(part[None]).logits[0] for part in row.split(cut)]) for row, cut in zip(ids, cuts, strict=True)]
        found = model(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(found, torch.stack(expected), atol=1e-10, rtol=0)
    bounds = torch.tensor([0, 20, 27, 50], dtype=torch.int32)
    varlen = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.clone(), "max_length_q": 23, "max_length_k": 23}
    for use_cache in (False, True):
        found = model(ids[:1], position_ids=positions[:1], use_cache=use_cache, **varlen).logits
        torch.testing.assert_close(found[0], expected[0], atol=1e-10, rtol=0)
    # transformers looks for documents where there is no cache, and a model in eval() makes one by default
    with pytest.raises(ValueError, match=r"position_ids begin again .* expected their bounds as cu_seq_lens_q.* use_cache=False"):
        model(ids[:1], position_ids=positions[:1])
    with pytest.raises(ValueError, match="expected equal bounds"):
        model(ids[:1], position_ids=positions[:1], **{**varlen, "cu_seq_lens_k": torch.tensor([0, 20, 26, 50])})
    with pytest.raises(ValueError, match="batch size 1"):
        model(ids, **varlen)


def test_a_pattern_that_tells_batch_entries_apart_takes_one() -> None:
    """Rows that are packed with documents become one row, in which every entry would be the first."""
    register("entries", pattern=MaskFunction(lambda b, h, q, k: q - k <= 5 * (b + 1)))
    model, ids, packed = on(llama(), "entries"), tokens(), torch.cat([torch.arange(20), torch.arange(30)]).expand(2, -1)
    for positions in (packed, None):
        with pytest.raises(ValueError, match="the batch has 2 entries, which the function of MaskFunction"):
            model(ids, position_ids=positions, use_cache=False)
        assert model(ids[:1], position_ids=None if positions is None else positions[:1], use_cache=False).logits.isfinite().all()


def positions_in(*documents: int, start: int = 0) -> torch.Tensor:
    """(1, sum): positions that begin again with each document."""
    return torch.cat([torch.arange(n) + start for n in documents])[None]


ONES = torch.ones(1, N, dtype=torch.long)
# how documents are told, in N positions, and what stands beside them, from which transformers does not find them
HIDDEN: dict[str, dict[str, Any]] = {
    "a mask of ones": {"position_ids": positions_in(20, 7, 23), "attention_mask": ONES, "use_cache": False},
    "a cache": {"position_ids": positions_in(20, 30)},
    "a static cache": {"position_ids": positions_in(49, 1), "past_key_values": 60},
    "padding behind": {"position_ids": positions_in(20, 20, 10), "attention_mask": (torch.arange(N) < 40).long()[None]},
    "padding between": {"position_ids": positions_in(20, 5, 25), "attention_mask": (torch.arange(N) // 5 != 4).long()[None]},
    "a causal mask of pairs": {"position_ids": positions_in(20, 30), "attention_mask": torch.ones(N, N).tril().bool()[None, None]},
    "positions from 2": {"position_ids": positions_in(20, 30, start=2), "attention_mask": ONES},
    "one token each": {"position_ids": torch.zeros(1, N, dtype=torch.long), "attention_mask": ONES},
    "seq_idx": {"seq_idx": positions_in(20, 30) // 10 % 2, "use_cache": False},
    # of which transformers makes gpt-oss's masks without positions; other models' find them
    "nothing": {"position_ids": positions_in(20, 30), "use_cache": False},
}


@pytest.mark.parametrize("beside", HIDDEN)
@pytest.mark.parametrize("name", ["dilated", "block_sparse", "ring_dilated", "ring"])
def test_documents_are_not_hidden(name: str, beside: str) -> None:
    given = dict(HIDDEN[beside])
    for kind in ("gpt_oss",) if beside == "nothing" else ("llama", "gpt_oss", "gemma2"):
        model = on(MODELS[kind](), name)
        if "past_key_values" in given:
            given["past_key_values"] = transformers.StaticCache(config=model.config, max_cache_len=60)
        with pytest.raises(ValueError, match=r"packed documents.*expected their bounds as cu_seq_lens_q"):
            model(tokens(1), **given)


def test_a_document_after_another_in_a_cache_is_not_hidden() -> None:
    model, ids, ones = on(llama(), "dilated"), tokens(1), ONES[:, :40]
    for is_real in (ones, ones * (torch.arange(40) >= 20)):
        past = model(ids[:, :20], attention_mask=is_real[:, :20], position_ids=torch.arange(20)[None]).past_key_values
        call = {"attention_mask": is_real, "position_ids": torch.arange(20)[None], "past_key_values": past}
        if bool(is_real.all()):
            with pytest.raises(ValueError, match="packed documents"):
                model(ids[:, 20:40], **call)
        else:
            # only padding before it
            model(ids[:, 20:40], **call)


def test_documents_are_not_hidden_from_later_layers_of_a_hybrid_model() -> None:
    """Its first layer is a convolution, so that attention begins in the second."""
    config = transformers.Lfm2Config(**{**DECODER, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False})
    with pytest.raises(ValueError, match="packed documents"):
        on(seeded(transformers.Lfm2ForCausalLM, config), "dilated")(tokens(1), **HIDDEN["a mask of ones"])


@pytest.mark.parametrize("name", ["dilated", "ring"])
def test_padding_tells_no_documents(name: str) -> None:
    """Positions of padding are anything; those of tokens may go on as if there were none, leave numbers out or begin late."""
    model, ids = on(llama(), name), tokens()
    left, right, hole = padded("left"), padded("right"), torch.ones(2, N, dtype=torch.long)
    hole[1, 20:30] = 0
    for mask in (left, right, hole):
        of_tokens = mask.cumsum(1) - 1
        for of_padding in (0, 1, N):
            positions = torch.where(mask.bool(), of_tokens, of_padding)
            found, expected = (model(ids, attention_mask=mask, position_ids=x).logits for x in (positions, of_tokens.clamp(min=0)))
            assert torch.equal(found[mask.bool()], expected[mask.bool()])
    for positions in (torch.arange(N) + 3, torch.arange(N) * 2, torch.where(torch.arange(N) < 20, 0, 9) + torch.arange(N)):
        model(ids, attention_mask=torch.ones_like(ids), position_ids=positions[None])


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


def test_autocast() -> None:
    model = llama().float()
    configure(model, segment_lengths=[4096], dilation_rates=[1])
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(*(on(model, name)(tokens()).logits for name in ("dilated", "sdpa")), atol=2e-2, rtol=0)


# ---- torch.compile


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kind",
    [
        *[("dilated", kind) for kind in ("llama", "qwen3", "gemma2", "gpt_oss")],
        *[(name, "llama") for name in ("block_sparse", "ring_dilated", "ring")],
    ],
)
def test_compiled_without_a_graph_break(name: str, kind: str) -> None:
    torch.compiler.reset()
    model = on(MODELS[kind](), name)
    inputs = inputs_of(model, padded("right"))
    # the experts of gpt-oss break graphs of their own
    compiled = torch.compile(model, fullgraph=kind != "gpt_oss", backend="aot_eager" if name == "dilated" else "eager")
    found, expected = (results(model, inputs, call=each) for each in (compiled, model))
    assert error(found, expected) <= 1e-10


@pytest.mark.slow
def test_compiled_training_with_documents_and_new_settings() -> None:
    """Position ids tell a compiled model of documents that it did not see when it was compiled."""
    torch.compiler.reset()
    model, ids = on(llama(num_hidden_layers=1), "dilated"), tokens()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for cut in (50, 21):
        positions = torch.cat([torch.arange(cut), torch.arange(N - cut)]).expand(2, -1)
        given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        found, expected = (results(model, given, call=each) for each in (compiled, model))
        assert error(found, expected) <= 1e-12
    register(segment_lengths=[5], dilation_rates=[2])
    changed = compiled(**given).logits
    assert (changed.flatten(0, 1) - expected["logits"]).abs().max() > 1e-3
    torch.testing.assert_close(changed, model(**given).logits, atol=1e-10, rtol=0)


@pytest.mark.slow
def test_a_compiled_model_refuses_hidden_documents() -> None:
    torch.compiler.reset()
    compiled = torch.compile(on(llama(num_hidden_layers=1), "dilated"), fullgraph=True)
    positions = torch.arange(N)[None]
    compiled(tokens(1), position_ids=positions, attention_mask=ONES)
    with pytest.raises(RuntimeError, match="packed documents"):
        compiled(tokens(1), position_ids=positions % 20, attention_mask=ONES)


# ---- masks


def pairs(left: int | None, right: int | None, queries: int = N, keys: int = N) -> torch.Tensor:
    """(1, 1, queries, keys) bool; the last query is the last key."""
    return LocalWindow((left, right)).dense_mask(queries, keys, 1, query_offset=keys - queries)[None]


def added(seen: torch.Tensor, lowest: float = torch.finfo(torch.float64).min) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, lowest)


def check_same(model: Any, ours: str, theirs: str, mask: Any, expected_mask: Any = None, **inputs: Any) -> None:
    """Logits of the rows that see a key, and their gradients, with a mask of four dimensions."""
    expected_mask = mask if expected_mask is None else expected_mask
    masks = mask.values() if isinstance(mask, dict) else [mask]
    real = torch.stack([(x if x.dtype is torch.bool else x == 0)[:, 0].any(-1).expand(2, N) for x in masks]).all(0)
    expected, found = (
        results(on(model, name), {"input_ids": tokens(), "attention_mask": each, **inputs}, real)
        for name, each in ((theirs, expected_mask), (ours, mask))
    )
    assert error(found, expected) <= 1e-6


PAIRS = {
    "causal": (None, 0),
    "causal and its window": (3, 0),
    "causal and another window": (8, 0),
    "both ways": (None, None),
    "a window both ways": (6, 6),
    "two keys ahead": (None, 2),
}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "gemma2", "gpt_oss", "bert"])
@pytest.mark.parametrize("ours", ["dilated", "ring", "block_sparse"])
def test_a_mask_of_pairs_alone_decides(kind: str, ours: str) -> None:
    """As in sdpa: neither causality nor the layer's window is added. transformers computes sinks and caps only in eager."""
    model = MODELS[kind](**({} if kind in ("llama", "bert") else {"sliding_window": 4}))
    configure(model, segment_lengths=[4096], dilation_rates=[1], pattern=LocalWindow((None, None)))
    theirs = "eager" if kind in ("gemma2", "gpt_oss") else "sdpa"
    # eager adds bools to scores, and Gemma's softmax is float32
    as_theirs = {"sdpa": lambda seen: seen, "eager": lambda seen: added(seen, torch.finfo(torch.float32).min)}[theirs]
    for index, (left, right) in enumerate(PAIRS.values()):
        seen = pairs(left, right) & padded("left" if index % 2 else "right").bool()[:, None, None]
        check_same(model, ours, theirs, seen if index % 3 else added(seen), as_theirs(seen))
    # one row for both, and keys alone, which every query sees
    for seen in (
        pairs(None, 0),
        pairs(None, 0) & padded("left")[1].bool(),
        padded("right").bool()[:, None, None],
        pairs(None, 0).any(2, True),
    ):
        check_same(model, ours, theirs, seen, as_theirs(seen))
    if kind in ("qwen2", "gemma2", "gpt_oss"):
        masks = {"full_attention": pairs(None, 0), "sliding_attention": pairs(2, 0)}
        check_same(model, ours, theirs, masks, {each: as_theirs(seen) for each, seen in masks.items()}, use_cache=False)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "bert"])
@pytest.mark.parametrize("ours", ["dilated", "block_sparse"])
def test_branches_and_patterns_narrow_a_mask_of_pairs(kind: str, ours: str) -> None:
    """Its causality and its padding; a layer with a window stays dense, and what a window means among branches is not known."""
    LITERAL[0] = DilatedPattern(LENGTHS, RATES) if ours == "dilated" else PATTERN
    model = MODELS[kind]()
    for left, right in ((None, 0), (None, None)):
        check_same(model, ours, "literal", pairs(left, right) & padded("left").bool()[:, None, None])
    check_same(model, ours, "literal", padded("right").bool()[:, None, None])
    with pytest.raises(ValueError, match=r"keeps keys within \(3, .\) of a query, in a layer that has no window.*dense settings"):
        on(model, ours)(tokens(), attention_mask=pairs(3, 0 if kind == "llama" else 3))
    if kind == "qwen2":
        check_same(model, ours, "literal", {"full_attention": pairs(None, 0), "sliding_attention": pairs(2, 0)}, use_cache=False)


@pytest.mark.parametrize("kind", ["llama", "mistral", "branches"])
@pytest.mark.parametrize("room", [0, 14])
def test_masks_of_pairs_with_a_cache(kind: str, room: int) -> None:
    """A prompt, a chunk and single tokens, from a cache that grows and one with room; its layers are equally long, as one mask needs."""
    model, ids = llama() if kind == "branches" else MODELS[kind](), tokens()
    LITERAL[0] = DilatedPattern([4096], [1])
    if kind == "branches":
        LITERAL[0] = DilatedPattern(LENGTHS, RATES)
    configure(model, segment_lengths=LITERAL[0].segment_lengths, dilation_rates=LITERAL[0].dilation_rates)
    config = copy.deepcopy(model.config)
    config.sliding_window = None
    # transformers 4.53
    of_old = {"max_batch_size": 2, "device": "cpu", "dtype": torch.float64}

    def logits_of(name: str, seen: torch.Tensor) -> torch.Tensor:
        past = transformers.StaticCache(config=config, max_cache_len=N + room, **of_old) if room else transformers.DynamicCache()
        mask, logits = torch.nn.functional.pad(seen.expand(2, 1, N, N), (0, room)), []
        for start, end in ((0, 30), (30, 48), (48, 49), (49, 50)):
            rows = mask[:, :, start:end, : None if room else end]
            logits.append(on(model, name)(ids[:, start:end], attention_mask=rows, past_key_values=past).logits)
        return torch.cat(logits, 1)[seen.any(-1)[:, 0].expand(2, N)]

    for seen in (pairs(None, 0), pairs(None, 0) & padded("left").bool()[:, None, None], pairs(8, 0)):
        if kind == "branches" and (room or not bool(seen[0, 0, -1, 0])):
            with pytest.raises(ValueError, match=r"keeps keys within \(8, 0\)|does not say where in the cache the queries are"):
                logits_of("dilated", seen)
        else:
            torch.testing.assert_close(logits_of("dilated", seen), logits_of("literal", seen), atol=1e-10, rtol=0)


def test_masks_that_a_layer_is_given() -> None:
    """Of keys, of pairs, as bool or to be added; rows that see nothing, and transformers' own way of letting them see everything."""
    module, (q, k, v) = layer(is_causal=True, config=whole()), heads_of(12)
    # one of its layers has no window
    module.config.layer_types = HYBRID

    def out_of(mask: torch.Tensor, sliding_window: int | None = None) -> torch.Tensor:
        return _hf_attend.attend("dilated", module, q, k, v, mask, scaling=0.5, sliding_window=sliding_window)[0]

    keys = torch.arange(12) > 2
    seen = pairs(None, 0, 12, 12) & keys
    causal, near, masked = (
        added(seen),
        pairs(3, 0, 12, 12) & keys,
        torch.zeros(1, 1, 12, 12).masked_fill(~seen, torch.finfo(torch.float32).min),
    )
    for mask in (
        keys[None],
        seen,
        causal,
        causal.clamp(min=-torch.inf),
        added(seen, -torch.inf),
        masked,
        masked.bfloat16(),
        masked.bfloat16().half(),
    ):
        torch.testing.assert_close(out_of(mask)[:, 3:], dense(q, k, v, seen)[:, 3:], atol=1e-12, rtol=0)
        assert not out_of(mask)[:, :3].any()
    # a mask of keys leaves the layer its window
    torch.testing.assert_close(out_of(keys[None], 4)[:, 3:], dense(q, k, v, near)[:, 3:], atol=1e-12, rtol=0)
    # rows of padding: which see nothing, or everything
    rows = seen & (torch.arange(12) < 9)[:, None]
    torch.testing.assert_close(out_of(rows)[:, 3:9], dense(q, k, v, seen)[:, 3:9], atol=1e-12, rtol=0)
    assert not out_of(rows)[:, 9:].any()
    assert torch.equal(out_of(seen | ~seen.any(-1, keepdim=True)), out_of(seen))
    # a row that sees nothing, but is seen: 0 as bool, and a mean of all values to sdpa as numbers
    rows = pairs(None, 0, 12, 12) & (torch.arange(12) != 5)[:, None]
    assert not out_of(rows)[:, 5].any()
    grid = torch.arange(12)
    for wrong, text in (
        (added(rows), "keeps other pairs"),
        (causal.clamp(min=-3), "holds values that are added"),
        (causal.masked_fill(~seen, torch.nan), "holds values that are added"),
        (seen.long(), "holds values that are added"),
        (torch.zeros(1, 1, 12, 12, requires_grad=True), "needs a gradient"),
        (torch.rand(1, 1, 12, 12) < 0.5, "keeps other pairs"),
        (seen & (grid % 2 == grid[:, None] % 2), "keeps other pairs"),
        (seen | (grid == 4), "keeps other pairs"),
        (seen & (grid != grid[:, None]), "keeps other pairs"),
        (pairs(None, 0, 12, 12) & (grid // 6 == grid[:, None] // 6), "keeps other pairs"),
        (seen.expand(1, 4, 12, 12), "expected 12 keys' padding"),
        (seen.expand(2, 1, 12, 12), "expected 12 keys' padding"),
        (seen[..., :-1], "expected 12 keys' padding"),
        (torch.ones(4), "expected 12 keys' padding"),
    ):
        with pytest.raises(ValueError, match=text):
            out_of(wrong)
    with pytest.raises(ValueError, match=r"does not say which of the keys are those of the 12 queries.*sdpa"):
        _hf_attend.attend("dilated", module, q, *heads_of(12, 20)[1:], torch.arange(20)[None] < 12)
    blocks = flex_attention.create_block_mask(lambda b, h, i, j: i >= j, None, None, 12, 12, device="cpu")
    with pytest.raises(TypeError, match="attention_mask is a BlockMask"):
        out_of(blocks)


def test_compiled_layers_take_masks_of_keys() -> None:
    torch.compiler.reset()
    config = whole()

    def out_of(*heads: torch.Tensor) -> torch.Tensor:
        *tensors, mask = heads
        return _hf_attend.attend("dilated", layer(is_causal=True, config=config), *tensors, mask, scaling=0.5, sliding_window=4)[0]

    compiled = torch.compile(out_of, fullgraph=True, backend="eager")
    mask = (torch.arange(12) > 2)[None, None, None]
    for heads in (heads_of(12), heads_of(1, 12)):
        torch.testing.assert_close(compiled(*heads, mask), dense(*heads, mask), atol=1e-12, rtol=0)
    config.dilated_attention = {"segment_lengths": LENGTHS, "dilation_rates": RATES}

    def of_branches(*heads: torch.Tensor) -> torch.Tensor:
        return _hf_attend.attend("dilated", layer(is_causal=True, config=config), *heads, mask)[0]

    with pytest.raises(Exception, match="does not say where in the cache"):
        torch.compile(of_branches, fullgraph=True, backend="eager")(*heads_of(1, 12))


def whole() -> Any:
    config = transformers.PretrainedConfig()
    config.dilated_attention = {"segment_lengths": [4096], "dilation_rates": [1]}
    return config


def test_mask_functions_of_every_version_of_transformers() -> None:
    """4.57 hands over ``cache_position``, 5.x lengths and offsets."""
    old = key_mask(batch_size=2, cache_position=torch.arange(30, 34), kv_length=40, kv_offset=0, mask_function=masking.causal_mask_function)
    new = key_mask(2, 4, 40, 30, 0, masking.causal_mask_function)
    by_place = key_mask(2, torch.arange(30, 34), 40, mask_function=masking.causal_mask_function)
    for mask in (old, new, by_place):
        assert (mask.num_keys, mask.num_filled, mask.query_offset, mask.is_causal, mask.padding) == (40, 34, 30, True, None)
    # made before the forward, as for a static cache, it stays what it is
    assert key_mask(2, 4, 40, 30, 0, masking.causal_mask_function, new) is new
    assert new.to("cpu").contiguous().num_filled == 34


# ---- refusals


def test_models_whose_attention_has_more_than_kernels_have() -> None:
    t5 = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0)
    with pytest.raises(ValueError, match="asks for position_bias"):
        on(seeded(transformers.T5EncoderModel, t5, "eager"), "dilated")(tokens())
    chunks = transformers.Llama4TextConfig(**DECODER, head_dim=8, attention_chunk_size=16, num_local_experts=2, intermediate_size_mlp=48)
    with pytest.raises(ValueError, match="chunks of 16 positions"):
        on(seeded(transformers.Llama4ForCausalLM, chunks, "eager"), "dilated")(tokens())


def test_cross_attention() -> None:
    crossed = on(bert(is_decoder=True, add_cross_attention=True), "dilated")
    bart = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4
    )
    for model in (crossed, on(seeded(transformers.BartModel, bart), "dilated")):
        with pytest.raises(ValueError, match="a model with cross-attention"):
            model(tokens())


def test_arguments_of_layers() -> None:
    model, ids = on(llama(), "dilated"), tokens()
    for argument, value, text in (
        ("head_mask", torch.ones(4), "a factor on every head"),
        ("position_bias", torch.zeros(1, 4, N, N), "a bias added"),
        ("sinks", torch.zeros(4), "sinks that the model computes"),
        ("sideways", 3, r"not known whether it changes attention.*ignored=\('sideways',\)"),
    ):
        with pytest.raises(ValueError, match=text):
            model(ids, **{argument: value})
        model(ids, **{argument: None})
    register(segment_lengths=LENGTHS, dilation_rates=RATES, ignored=("sideways",))
    model(ids, sideways=3)
    q, k, v = heads_of(12)
    for module, mask, options, text in (
        (
            layer(is_causal=True),
            KeyMask(12, 12, 0, 0, True),
            {"is_causal": False},
            "is_causal=False is given to a layer whose mask is causal",
        ),
        (layer(is_causal=True), None, {"output_attentions": True}, "the attention weights"),
        (layer(), None, {}, "does not say whether it is causal"),
        (layer(is_causal=False), torch.ones(1, 20), {}, "12 queries and 20 keys in a layer that is not causal"),
        (layer(is_causal=True), KeyMask(13, 13, 1, 0, True), {}, "passes 12 keys, and its mask was made for 13"),
    ):
        keys = heads_of(1, 20)[1:] if isinstance(mask, torch.Tensor) else (k, v)
        with pytest.raises(ValueError, match=text):
            _hf_attend.attend("dilated", module, q, *keys, mask if isinstance(mask, KeyMask) else None, **options)


def test_values_shorter_than_keys() -> None:
    for queries in (12, 1):
        q, k, v = heads_of(queries, 12)
        v = v[..., :5]
        # as models without a mask of transformers' call it; one query of a cache sees all keys
        module = layer(is_causal=True, config=whole())
        out, weights = _hf_attend.attend("dilated", module, q, k, v, None, scaling=0.5, is_causal=None)
        expected = dense(q, k, v, Causal().dense_mask(queries, 12, 1, query_offset=12 - queries))
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
        assert weights is None


def test_mask_functions_of_others() -> None:
    def prefix(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return kv < 5

    causal = masking.causal_mask_function
    for function in (prefix, masking.or_masks(causal, prefix), masking.and_masks(causal, prefix)):
        with pytest.raises(ValueError, match=r"keeps pairs by the mask function.*sdpa"):
            key_mask(2, 12, 12, 0, 0, function)
    both = masking.and_masks(masking.sliding_window_overlay(5), masking.sliding_window_causal_mask_function(7))
    with pytest.raises(ValueError, match="two windows, of 5 and 7"):
        key_mask(2, 12, 12, 0, 0, both)


# ---- registering, configuring, saving


def test_names_of_ones_own() -> None:
    register("wide", segment_lengths=[4096], dilation_rates=[1])
    register("local", pattern=LocalWindow((6, None)))
    model, ids = llama(), tokens()
    torch.testing.assert_close(on(model, "wide")(ids).logits, on(model, "sdpa")(ids).logits, atol=1e-10, rtol=0)
    LITERAL[0] = LocalWindow((6, None))
    check_equal(model, "local", "literal", 1e-10)
    LITERAL[0] = DilatedPattern(LENGTHS, RATES)
    check_equal(model, "dilated", "literal", 1e-10)


BAD_REGISTRATIONS: list[tuple[str | None, dict[str, Any], str]] = [
    (None, {"segment_length": [4]}, "segment_length given; expected some of backend"),
    (None, {"segment_lengths": [4, 8], "dilation_rates": [1]}, "segment_lengths|dilation_rates"),
    (None, {"kind": "dilated"}, "without a name"),
    (None, {"backend": "nonsense"}, "nonsense"),
    (None, {"layout": "spiral"}, "layout is 'spiral'"),
    (None, {"timeout": -1}, "timeout is -1"),
    (None, {"pattern": "nonsense"}, "spec is 'nonsense'"),
    (None, {"deterministic": 1}, "deterministic"),
    (None, {"ignored": "position_bias"}, "ignored holds 'position_bias'"),
    ("sdpa", {}, "expected one without eager, sdpa"),
    ("my_flash", {}, "expected one without"),
    ("wide", {"pattern": PATTERN, "segment_lengths": [4]}, "segment_lengths given for 'block_sparse'"),
    ("wide", {"kind": "round"}, "kind is 'round'"),
    ("dilated", {"kind": "block_sparse"}, "expected another name"),
    ("wide", {"layout": "zigzag"}, "layout given for 'dilated'"),
]


@pytest.mark.parametrize(("name", "options", "text"), BAD_REGISTRATIONS)
def test_a_bad_registration_changes_nothing(name: str | None, options: dict[str, Any], text: str) -> None:
    before = dict(_hf_settings.REGISTERED)
    with pytest.raises((ValueError, TypeError), match=text):
        register(name, **options)
    assert before == _hf_settings.REGISTERED


@pytest.mark.parametrize(
    ("name", "told", "text"),
    [
        ("dilated", None, r"register\(segment_lengths=.*configure\(model, segment_lengths="),
        ("block_sparse", None, r"register\(pattern="),
        ("dilated", [8], "expected a dict"),
        ("dilated", {"segments": [8]}, "segments in config.dilated_attention"),
    ],
)
def test_a_name_without_settings_says_how_to_give_them(name: str, told: Any, text: str) -> None:
    register()
    model = on(llama(), name)
    model.config.dilated_attention = told
    assert "dilated_attention" in repr(model.config)
    with pytest.raises((ValueError, TypeError), match=text):
        model(tokens())


def test_what_no_config_can_save() -> None:
    model = llama()
    for options, text in (
        ({"pattern": MaskFunction(lambda b, h, q, k: k <= q)}, "holds a Python function"),
        ({"group": object()}, "group in a model's config"),
        ({"segments": [8]}, "segments given"),
        ({"segment_lengths": [8], "dilation_rates": [9]}, "dilation_rates|segment_lengths"),
    ):
        with pytest.raises(ValueError, match=text):
            configure(model, **options)
        assert not hasattr(model.config, "dilated_attention")


def test_models_that_never_ask_for_an_implementation() -> None:
    model = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match="BloomForCausalLM computes its attention itself"):
        configure(model, segment_lengths=LENGTHS, dilation_rates=RATES)


def test_an_older_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older than the extra's, which pip would not install."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    oldest = re.search(r'^hf = \["transformers>=(\d+)\.(\d+)"\]$', text, re.MULTILINE)
    assert oldest is not None
    major, minor = (int(part) for part in oldest.groups())
    # what importorskip returns is another object
    monkeypatch.setattr(sys.modules["transformers"], "__version__", f"{major}.{minor - 1}.3")
    with pytest.raises(ImportError, match=rf"transformers is {major}\.{minor - 1}\.3; expected {major}\.{minor} or later"):
        register()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", f"{major}.{minor}.0.dev0")
    register()


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("transformers", "dilated_attention.integrations"))]:
        monkeypatch.delitem(sys.modules, name)
    # None stands for a package that is not there
    monkeypatch.setitem(sys.modules, "transformers", None)
    alone = importlib.import_module("dilated_attention.integrations.huggingface")
    assert alone.register is not register
    with pytest.raises(ImportError, match=r"pip install \"dilated-attention\[hf\]\""):
        alone.register()


# ---- sequences that processes share


# documents of 13, 29 and 7 tokens in 49 positions, or with 3 of padding between and behind
TOLD: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": positions_in(13, 29, 7)},
    "a mask of ones": {"position_ids": positions_in(13, 29, 7), "attention_mask": torch.ones(1, 49, dtype=torch.long)},
    "seq_idx": {"seq_idx": torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([13, 29, 7]))[None]},
    "bounds": {f"cu_seq_lens_{x}": torch.tensor([0, 13, 42, 49]) for x in "qk"},
    "padding": {
        "position_ids": torch.tensor([*[1] * 3, *range(13), *[0] * 3, *range(24), *[5] * 6])[None],
        "attention_mask": torch.tensor([*[0] * 3, *[1] * 13, *[0] * 3, *[1] * 24, *[0] * 6])[None],
    },
}


def documents_on_a_ring(rank: int, world: int, name: str, layout: str) -> dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    register(segment_lengths=LENGTHS, dilation_rates=RATES, layout=layout)
    results = {}
    for kind, told in TOLD.items():
        model = on(llama(), name)
        shard = shard_inputs({"input_ids": tokens(1, 49), **told}, layout=layout)
        mine = positions_of(49, rank, world, layout, None)
        logits = model(**shard).logits
        weights = torch.randn(1, 49, VOCABULARY, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        real = told.get("attention_mask", torch.ones(1, 49))
        (logits * (weights * real[..., None])[:, mine]).sum().backward()
        results[kind] = logits.detach(), {name: p.grad for name, p in model.named_parameters()}
    return results


@pytest.mark.parametrize(
    ("world", "name", "layout"),
    [(1, "ring", "zigzag"), (2, "ring", "zigzag"), (2, "ring_dilated", "contiguous"), (3, "ring_dilated", "striped")],
)
def test_processes_share_documents_told_in_any_way(world: int, name: str, layout: str) -> None:
    """Logits of tokens and all gradients are those of the documents one by one, to the float32 of rotary angles."""
    results = [documents_on_a_ring(0, 1, name, layout)] if world == 1 else pool_of(world).run(documents_on_a_ring, name, layout)
    weights = torch.randn(1, 49, VOCABULARY, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for kind in TOLD:
        model = on(llama(), "dilated" if name == "ring_dilated" else "sdpa")
        whole = torch.empty(1, 49, VOCABULARY, dtype=torch.float64)
        for rank, result in enumerate(results):
            whole[:, positions_of(49, rank, world, layout, None)] = result[kind][0]
        total = 0.0
        for begin, end in ((3, 16), (19, 43)) if kind == "padding" else ((0, 13), (13, 42), (42, 49)):
            logits = model(tokens(1, 49)[:, begin:end]).logits
            torch.testing.assert_close(whole[:, begin:end], logits.detach(), atol=1e-7, rtol=0, msg=lambda m, k=kind: f"{k}: {m}")
            total = total + (logits * weights[:, begin:end]).sum()
        total.backward()
        for parameter, p in model.named_parameters():
            found = sum(gradients[parameter] for gradients in (result[kind][1] for result in results))
            torch.testing.assert_close(found, p.grad, atol=1e-6, rtol=0, msg=lambda m, k=kind: f"{k}: {m}")


def compiled_on_a_ring(rank: int, world: int) -> float:
    register(segment_lengths=LENGTHS, dilation_rates=RATES)
    model, inputs = on(llama(num_hidden_layers=1), "ring_dilated"), shard_inputs({"input_ids": tokens(2, 49)})
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    return float((compiled(**inputs).logits - model(**inputs).logits).abs().max())


def test_a_compiled_model_shares_a_sequence() -> None:
    assert max(pool_of(2).run(compiled_on_a_ring)) < 1e-10


def refused_on_a_ring(rank: int, world: int) -> list[str]:
    register(segment_lengths=LENGTHS, dilation_rates=RATES)
    model, inputs = on(llama(), "ring_dilated"), shard_inputs({"input_ids": tokens(2, 48)})
    found = []

    def refused(**arguments: Any) -> None:
        try:
            model(**arguments)
        except ValueError as error:
            found.append(str(error))

    refused(input_ids=tokens(2, 1), **{CACHE: model(**inputs, use_cache=True)[CACHE]})
    if rank == 1:
        refused(**{**inputs, "position_ids": torch.arange(24).expand(2, -1)})
    for seen in (pairs(None, 0, 24, 24), pairs(None, 0, 48, 48), torch.ones(2, 1, 1, 24, dtype=torch.bool)):
        refused(**{**inputs, "attention_mask": seen})
    # packed documents by positions alone
    for beside in ({"use_cache": False}, {"attention_mask": torch.ones(2, 24)}, {}):
        refused(**{**inputs, "position_ids": inputs["position_ids"] % 10, **beside})
    return found


def test_what_a_shared_sequence_cannot_have() -> None:
    first, second = pool_of(2).run(refused_on_a_ring)
    texts = [
        "1 queries at position 24 of 25 keys, from a cache",
        "position_ids of rank 1 begin at 0",
        "attention_mask (1, 1, 24, 24) holds pairs of positions of one of 2 processes",
        "attention_mask (1, 1, 48, 48) holds pairs",
        "attention_mask (2, 1, 1, 24) holds pairs",
        "position_ids restart within the shard",
    ]
    texts += ["position_ids begin again or seq_idx changes"] * 2
    for found, expected in ((first, [texts[0], *texts[2:]]), (second, texts)):
        assert len(found) == len(expected)
        assert all(text in message for text, message in zip(expected, found, strict=True)), found


def encoder_on_a_ring(rank: int, world: int) -> torch.Tensor:
    register()
    mine = slice(24 * rank, 24 * rank + 24)
    seen = padded("right", 48).bool()[:, None, None, mine]
    logits: torch.Tensor = on(bert(), "ring")(tokens(2, 48)[:, mine], attention_mask=seen, position_ids=torch.arange(48)[None, mine]).logits
    return logits.detach()


def test_one_process_alone_has_padding() -> None:
    """In a mask (B, 1, 1, n), as models make it that do not ask for one."""
    mask = padded("right", 48).bool()
    expected = bert()(tokens(2, 48), attention_mask=mask).logits
    torch.testing.assert_close(torch.cat(pool_of(2).run(encoder_on_a_ring), 1)[mask], expected[mask], atol=1e-10, rtol=0)


def test_inputs_of_one_process() -> None:
    ids = tokens()
    assert set(shard_inputs({"input_ids": ids})) == {"input_ids", "position_ids"}
    inputs = shard_inputs({"input_ids": ids, "labels": ids})
    assert torch.equal(inputs["shift_labels"][:, :-1], ids[:, 1:]) and inputs["num_items_in_batch"] == 2 * (N - 1)
    with pytest.raises(ValueError, match="expected input_ids or inputs_embeds"):
        shard_inputs({"labels": ids})
    with pytest.raises(ValueError, match=r"holds other numbers than 0 and 1.*position_ids that begin again"):
        shard_inputs({"input_ids": ids, "attention_mask": torch.arange(N).expand(2, -1) // 20 + 1})
    with pytest.raises(ValueError, match="packed documents are one row"):
        shard_inputs({"input_ids": ids, "position_ids": torch.arange(N).expand(2, -1) % 20, "attention_mask": torch.ones_like(ids)})
    with pytest.raises(ValueError, match="group and mesh are both given"):
        shard_inputs({"input_ids": ids}, group=1, mesh=1)


def test_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    first, _, ring = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    names: dict[str, Any] = {"shard_inputs": shard_inputs}
    exec(compile(first, "docs/huggingface.md", "exec"), names)
    assert names["more"].shape == (1, 708)
    # one process needs no group
    exec(compile(ring.replace("dist.init_process_group()", ""), "docs/huggingface.md", "exec"), names)
    assert names["loss"].item() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dilated", "block_sparse"])
def test_on_a_gpu(name: str) -> None:
    """In bfloat16, against float64 on the CPU; and generation from a cache."""
    model, ids = llama(hidden_size=128, head_dim=32), tokens(2, 300)
    configure(model, segment_lengths=[64, 256], dilation_rates=[1, 3], pattern=GlobalLocal(40, 8))
    expected = on(model, name)(ids).logits
    model = model.to("cuda", torch.bfloat16)
    found = model(ids.cuda(), attention_mask=torch.ones_like(ids).cuda()).logits
    torch.testing.assert_close(found.cpu().double(), expected, atol=5e-2, rtol=0)
    generated = model.generate(ids.cuda(), attention_mask=torch.ones_like(ids).cuda(), max_new_tokens=4, do_sample=False)
    assert generated.shape == (2, 304)


def test_a_model_that_adds_the_mask_itself_is_told_why() -> None:
    mask = KeyMask(num_keys=3, num_filled=3, query_offset=0, key_offset=0, is_causal=True)
    with pytest.raises(ValueError, match="this model computes its attention itself"):
        torch.ones(3) + mask  # type: ignore[operator]
    # Doge reads its dtype, others its shape, or cut it
    for read in (lambda: mask.dtype, lambda: mask.shape, lambda: mask[:, :, :, :2]):  # type: ignore[attr-defined, index]
        with pytest.raises((AttributeError, ValueError), match=r"of a KeyMask: this model .* attn_implementation=\"eager\""):
            read()
    assert not hasattr(mask, "shape") and copy.deepcopy(mask).num_keys == pickle.loads(pickle.dumps(mask)).num_keys == 3
