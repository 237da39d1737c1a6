"""Transformers models on this library's attention, tiny and random: against transformers' own sdpa, and against a literal restatement."""

import contextlib
import copy
import functools
import itertools
import pickle
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from dilated_attention import BackendUnavailable
from dilated_attention.distributed.sharding.layout import positions_of
from dilated_attention.integrations._hf_mask import mask_of_tensor
from dilated_attention.integrations.huggingface import KeyMask, configure, register, shard_inputs
from dilated_attention.pattern import DilatedPattern, GlobalLocal, LocalWindow, MaskFunction, TopBlocks
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
    tables = (modeling.AttentionInterface._global_mapping, masking.AttentionMaskInterface._global_mapping)
    before = [dict(table) for table in tables]
    register(segment_lengths=LENGTHS, dilation_rates=RATES, pattern=PATTERN)
    modeling.AttentionInterface.register("literal", literal)
    masking.AttentionMaskInterface.register("literal", every_pair)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*changes nothing in MistralConfig")
        yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)
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
    vars(module).update(attributes)
    return module


def attend(module: Any, *args: Any, name: str = "dilated", scaling: float = 0.5, **options: Any) -> torch.Tensor:
    """What transformers calls in a layer of this name."""
    out, weights = modeling.AttentionInterface._global_mapping[name](module, *args, scaling=scaling, **options)
    assert weights is None
    return out


def key_mask(*args: Any, **options: Any) -> KeyMask:
    """The mask that transformers makes for this name."""
    return masking.AttentionMaskInterface._global_mapping["dilated"](*args, **options)


def whole() -> Any:
    """A config of dense settings, of which one layer has no window."""
    config = transformers.PretrainedConfig()
    config.dilated_attention = {"segment_lengths": [4096], "dilation_rates": [1]}
    config.layer_types = HYBRID
    return config


def heads_of(length: int, keys: int | None = None) -> list[torch.Tensor]:
    """q (1, 4, length, 8), and k, v of two heads."""
    draw = torch.Generator().manual_seed(6)
    shapes = ((1, 4, length, 8), *[(1, 2, keys or length, 8)] * 2)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return ((q @ k.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def weights_of(*shape: int) -> torch.Tensor:
    """Of logits in the sum that is derived."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def results(
    model: Any, given: dict[str, Any], real: torch.Tensor | None = None, weights: torch.Tensor | None = None, call: Any = None
) -> dict[str, torch.Tensor]:
    """Logits of real positions, and the gradients of a weighted sum of them by the parameters' names."""
    logits = (model if call is None else call)(**given).logits
    weights = weights_of(*logits.shape) if weights is None else weights
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
}


@pytest.mark.skipif(RELEASE < PINNED, reason="older releases make a causal mask for is_causal=False, which is refused")
def test_a_decoder_that_sees_both_ways() -> None:
    """transformers lends config.is_causal the argument's value, and makes the mask from that."""
    model, ids = llama(), tokens()
    found, expected = (on(model, name)(ids, is_causal=False, attention_mask=padded("right")).logits for name in ("dilated", "literal"))
    torch.testing.assert_close(found[0], expected[0], atol=1e-10, rtol=0)
    assert (on(model, "dilated")(ids).logits[0] - found[0]).abs().max() > 1e-3


def test_settings_reach_the_kernels() -> None:
    model = llama()
    for changes, expected in (
        ({"segment_lengths": [6, 24], "dilation_rates": [2, 3], "branch_heads": "split"}, {"branch_heads": "split"}),
        ({"head_offsets": [[0, 1, 0, 1], [2, 1, 0, 0]], "branch_heads": None}, {"head_offsets": [[0, 1, 0, 1], [2, 1, 0, 0]]}),
    ):
        configure(model, **changes)
        LITERAL[0] = DilatedPattern([6, 24], [2, 3], **expected)
        check_equal(model, "dilated", "literal", 1e-10)
    configure(model, backend="flash4")
    with pytest.raises(BackendUnavailable, match="flash4"):
        model(tokens())
    register("local", pattern=LocalWindow((6, None)))
    for name, pattern in (("local", LocalWindow((6, None))), ("dilated", DilatedPattern(LENGTHS, RATES))):
        LITERAL[0] = pattern
        check_equal(llama(), name, "literal", 1e-10)


# ---- decoding


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("name", "kind"), [*(("dilated", kind) for kind in ("qwen3", "gemma2", "gpt_oss")), ("block_sparse", "llama")])
@torch.no_grad()
def test_any_cut_of_a_sequence_gives_the_logits_of_one_forward(name: str, kind: str, cache: str) -> None:
    """Chunks, then token by token: without padding by kernels that read one token's keys, with it by those of forwards."""
    model, ids = on(MODELS[kind](), name), tokens()
    for mask in (None, padded("left")):
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        past = transformers.DynamicCache(config=model.config)
        if cache == "static":
            past = transformers.StaticCache(config=model.config, max_cache_len=N + 7)
        found, start = [], 0
        for size in (17, 20, *[1] * (N - 37)):
            stop = start + size
            given = {"attention_mask": None if mask is None else mask[:, :stop], CACHE: past, "use_cache": True}
            found.append(model(ids[:, start:stop], **given).logits)
            start = stop
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        torch.testing.assert_close(torch.cat(found, 1)[real], expected[real], atol=1e-10, rtol=0)


@pytest.mark.parametrize(("name", "kind"), [("dilated", "gpt_oss"), ("block_sparse", "llama")])
def test_generation_with_a_cache_is_that_without(name: str, kind: str) -> None:
    model, ids = on(MODELS[kind](), name), tokens()
    for mask, options in (
        (padded("left"), {}),
        (torch.ones_like(ids), {"cache_implementation": "static"}),
        (torch.ones_like(ids), {"num_beams": 3}),
    ):
        call = functools.partial(model.generate, ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        beams = {key: value for key, value in options.items() if key == "num_beams"}
        assert torch.equal(call(**options), call(use_cache=False, **beams))


# ---- windows, packed documents, dropout


def test_sliding_layers_keep_their_window() -> None:
    """Mistral's, all of them, so that the model computes what it did (test_hf_families.py), and that is said once."""
    with pytest.warns(UserWarning, match=r"changes nothing in MistralConfig.*config.sliding_window = None"):
        on(mistral(), "dilated")(tokens())
    q, k, v = heads_of(12)
    module = layer(is_causal=True, config=whole())
    # the mask's and the layer's both hold
    for in_mask, in_layer, left in (((2, 0), None, 2), (None, 4, 3), ((2, 0), 6, 2), ((6, 0), 3, 2)):
        out = attend(module, q, k, v, KeyMask(12, 12, 0, 0, True, window=in_mask), sliding_window=in_layer)
        torch.testing.assert_close(out, dense(q, k, v, LocalWindow((left, 0)).dense_mask(12, 12, 1)), atol=1e-12, rtol=0)
    out = attend(layer(is_causal=False, config=whole()), q, k, v, None, sliding_window=4)
    torch.testing.assert_close(out, dense(q, k, v, LocalWindow(3).dense_mask(12, 12, 1)), atol=1e-12, rtol=0)


def positions_in(*documents: int) -> torch.Tensor:
    """(1, sum): positions that begin again with each document."""
    return torch.cat([torch.arange(n) for n in documents])[None]


def test_packed_documents_are_alone() -> None:
    """By position ids that begin again, in several rows, and by flash-attention's bounds."""
    ids, cuts = tokens(), ((20, 7, 23), (50,))
    positions = torch.cat([positions_in(*row) for row in cuts])
    # windows count within documents
    for name in ("block_sparse", "dilated"):
        model = on(qwen3(), name)
        expected = [torch.cat([model(part[None]).logits[0] for part in row.split(cut)]) for row, cut in zip(ids, cuts, strict=True)]
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
    # a function that tells batch entries apart takes one: packed rows become one, in which every entry would be the first
    register("entries", pattern=MaskFunction(lambda b, h, q, k: q - k <= 5 * (b + 1)))
    for given in (positions_in(20, 30).expand(2, -1), None):
        with pytest.raises(ValueError, match="the batch has 2 entries, which the function of MaskFunction"):
            on(model, "entries")(ids, position_ids=given, use_cache=False)
        model(ids[:1], position_ids=None if given is None else given[:1], use_cache=False)


ONES = torch.ones(1, N, dtype=torch.long)
# how documents are told, in N positions, and what stands beside them, from which transformers does not find them
HIDDEN: dict[str, dict[str, Any]] = {
    "a mask of ones": {"position_ids": positions_in(20, 7, 23), "attention_mask": ONES, "use_cache": False},
    "a cache": {"position_ids": positions_in(20, 30)},
    "a static cache": {"position_ids": positions_in(49, 1), "past_key_values": 60},
    "padding between": {"position_ids": positions_in(20, 5, 25), "attention_mask": (torch.arange(N) // 5 != 4).long()[None]},
    "a causal mask of pairs": {"position_ids": positions_in(20, 30), "attention_mask": torch.ones(N, N).tril().bool()[None, None]},
    "seq_idx": {"seq_idx": positions_in(20, 30) // 10 % 2, "use_cache": False},
    # of which transformers makes gpt-oss's masks without positions; other models' find them
    "nothing": {"position_ids": positions_in(20, 30), "use_cache": False},
}


@pytest.mark.parametrize("beside", HIDDEN)
@pytest.mark.parametrize("name", ["block_sparse", "ring_dilated"])
def test_documents_are_not_hidden(name: str, beside: str) -> None:
    given = dict(HIDDEN[beside])
    for kind in ("gpt_oss",) if beside == "nothing" else ("llama", "gemma2"):
        model = on(MODELS[kind](), name)
        if "past_key_values" in given:
            given["past_key_values"] = transformers.StaticCache(config=model.config, max_cache_len=60)
        with pytest.raises(ValueError, match=r"packed documents.*expected their bounds as cu_seq_lens_q"):
            model(tokens(1), **given)


def test_documents_are_not_hidden_by_what_came_before() -> None:
    """A document in the cache."""
    model, ids, ones = on(llama(), "dilated"), tokens(1), ONES[:, :40]
    for is_real in (ones, ones * (torch.arange(40) >= 20)):
        past = model(ids[:, :20], attention_mask=is_real[:, :20], position_ids=torch.arange(20)[None]).past_key_values
        call = functools.partial(model, ids[:, 20:40], attention_mask=is_real, position_ids=torch.arange(20)[None], past_key_values=past)
        # of the second, only padding is before it
        with pytest.raises(ValueError, match="packed documents") if is_real is ones else contextlib.nullcontext():
            call()


@pytest.mark.parametrize("name", ["dilated", "ring"])
def test_padding_tells_no_documents(name: str) -> None:
    """Positions of padding are anything; those of tokens may go on as if there were none, leave numbers out or begin late."""
    model, ids = on(llama(), name), tokens()
    hole = torch.ones(2, N, dtype=torch.long)
    hole[1, 20:30] = 0
    for mask in (padded("left"), padded("right"), hole):
        of_tokens = mask.cumsum(1) - 1
        for of_padding in (0, 1, N):
            positions = of_tokens.where(mask.bool(), of_padding)
            found, expected = (model(ids, attention_mask=mask, position_ids=x).logits for x in (positions, of_tokens.clamp(min=0)))
            assert torch.equal(found[mask.bool()], expected[mask.bool()])
    for positions in (torch.arange(N) + 3, torch.arange(N) * 2, torch.arange(N) + 9 * (torch.arange(N) >= 20)):
        model(ids, attention_mask=torch.ones_like(ids), position_ids=positions[None])


def test_dropout_in_training_only_and_autocast() -> None:
    model, ids = on(llama(attention_dropout=0.5), "dilated"), tokens()
    logits = []
    for training in (False, True, True, False):
        torch.manual_seed(5)
        logits.append(model.train(training)(ids).logits)
    assert torch.equal(logits[1], logits[2]) and torch.equal(logits[0], logits[3]) and (logits[0] - logits[1]).abs().max() > 1e-3
    # a layer that hands on its probability in evaluation, too
    q, k, v = heads_of(12)
    assert torch.equal(*(attend(layer(is_causal=True), q, k, v, None, dropout=p) for p in (0.5, 0.0)))
    model = llama().float()
    configure(model, segment_lengths=[4096], dilation_rates=[1])
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(*(on(model, name)(ids).logits for name in ("dilated", "sdpa")), atol=2e-2, rtol=0)


# ---- torch.compile


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("dilated", "gemma2"), ("block_sparse", "llama")])
def test_compiled_without_a_graph_break(name: str, kind: str) -> None:
    """Windows and softcaps; rings: ``on_a_ring``."""
    torch.compiler.reset()
    model = on(MODELS[kind](), name)
    # a backward is traced ahead once, which takes twice the time
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if kind == "gemma2" else "eager")
    found, expected = (results(model, inputs_of(model, padded("right")), call=each) for each in (compiled, model))
    assert error(found, expected) <= 1e-10


@pytest.mark.slow
def test_a_compiled_model_has_documents_and_new_settings_and_refuses_hidden_documents() -> None:
    """Position ids tell a compiled model of documents that it did not see when it was compiled."""
    torch.compiler.reset()
    model, ids = on(llama(num_hidden_layers=1), "dilated"), tokens()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for cut in (50, 21):
        given = {"input_ids": ids, "position_ids": positions_in(cut, N - cut).expand(2, -1), "use_cache": False}
        found, expected = (results(model, given, call=each) for each in (compiled, model))
        assert error(found, expected) <= 1e-12
    register(segment_lengths=[5], dilation_rates=[2])
    changed = compiled(**given).logits
    assert (changed.flatten(0, 1) - expected["logits"]).abs().max() > 1e-3
    torch.testing.assert_close(changed, model(**given).logits, atol=1e-10, rtol=0)
    for options in ({"segment_lengths": [6, 24], "dilation_rates": [2, 3]}, {"branch_heads": "split"}):
        configure(model, **options)
        torch.testing.assert_close(compiled(**given).logits, model(**given).logits, atol=1e-10, rtol=0)
    compiled(ids[:1], position_ids=torch.arange(N)[None], attention_mask=ONES)
    with pytest.raises(RuntimeError, match="packed documents"):
        compiled(ids[:1], position_ids=torch.arange(N)[None] % 20, attention_mask=ONES)


# ---- masks


def pairs(left: int | None, right: int | None, queries: int = N, keys: int = N) -> torch.Tensor:
    """(1, 1, queries, keys) bool; the last query is the last key."""
    return LocalWindow((left, right)).dense_mask(queries, keys, 1, query_offset=keys - queries)[None]


def added(seen: torch.Tensor, lowest: float = torch.finfo(torch.float64).min) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, lowest)


def check_same(model: Any, ours: str, mask: Any, **inputs: Any) -> None:
    """Logits of the rows that see a key, and their gradients, with a mask of four dimensions, as written out."""
    masks = mask.values() if isinstance(mask, dict) else [mask]
    real = torch.stack([(x if x.dtype is torch.bool else x == 0)[:, 0].any(-1).expand(2, N) for x in masks]).all(0)
    expected, found = (
        results(on(model, name), {"input_ids": tokens(), "attention_mask": mask, **inputs}, real) for name in ("literal", ours)
    )
    assert error(found, expected) <= 1e-6


LEFT, RIGHT = padded("left").bool()[:, None, None], padded("right").bool()[:, None, None]


@pytest.mark.parametrize(("kind", "ours"), [("llama", "dilated"), ("qwen2", "block_sparse"), ("bert", "dilated")])
def test_branches_and_patterns_narrow_a_mask_of_pairs(kind: str, ours: str) -> None:
    """Its causality and its padding; a layer with a window stays dense, and what a window means among branches is not known."""
    LITERAL[0] = DilatedPattern(LENGTHS, RATES) if ours == "dilated" else PATTERN
    model = MODELS[kind]()
    for seen in (pairs(None, 0) & LEFT, pairs(None, None) & LEFT, RIGHT):
        check_same(model, ours, seen)
    with pytest.raises(ValueError, match=r"keeps keys within \(3, .\) of a query, in a layer that has no window.*dense settings"):
        on(model, ours)(tokens(), attention_mask=pairs(3, 0 if kind != "bert" else 3))
    if kind == "qwen2":
        check_same(model, ours, {"full_attention": pairs(None, 0), "sliding_attention": pairs(2, 0)}, use_cache=False)


CAUSAL12, GRID12 = pairs(None, 0, 12, 12), torch.arange(12)
SEEN12 = CAUSAL12 & (GRID12 > 2)
# a row that sees nothing, but is seen: 0 as bool, and a mean of all values to sdpa as numbers
HOLE12 = CAUSAL12 & (GRID12 != 5)[:, None]


NUMBERS: dict[str, Any] = {
    "bool": lambda seen: seen,
    "lowest": added,
    "-inf": lambda seen: added(seen, -torch.inf),
    "float32": lambda seen: added(seen, torch.finfo(torch.float32).min).float(),
    "bfloat16": lambda seen: added(seen, torch.finfo(torch.float32).min).bfloat16(),
}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize(("queries", "room"), [(12, 0), (12, 3), (5, 0), (5, 3), (1, 0), (1, 3)])
def test_a_mask_of_pairs_alone_decides(queries: int, room: int, numbers: str) -> None:
    """Causal, a window within and beyond the layer's, both ways, two keys ahead; of a prompt, and from caches that grow or have room."""
    (q, k, v), is_whole = heads_of(queries, 12 + room), (queries, room) == (12, 0)
    bands = ((None, 0), (3, 0), (8, 0), *((None, None), (6, 6), (None, 2)) * is_whole)
    for (left, right), hidden, is_causal in itertools.product(bands, (0, 2), {True, not is_whole}):
        seen = torch.nn.functional.pad(pairs(left, right, queries, 12) & (hidden <= GRID12), (0, room))
        found = attend(layer(is_causal=is_causal, config=whole()), q, k, v, NUMBERS[numbers](seen), sliding_window=4)
        sees = seen[0, 0].any(-1)
        torch.testing.assert_close(found[:, sees], dense(q, k, v, seen)[:, sees], atol=1e-12, rtol=0)
        assert not found[:, ~sees].any()


def test_masks_that_a_layer_is_given() -> None:
    """Of keys; rows that see nothing, and transformers' own way of letting them see everything."""
    module, (q, k, v) = layer(is_causal=True, config=whole()), heads_of(12)
    out_of = functools.partial(attend, module, q, k, v)
    expected = dense(q, k, v, SEEN12)
    keys = (GRID12 > 2)[None]
    torch.testing.assert_close(out_of(keys)[:, 3:], expected[:, 3:], atol=1e-12, rtol=0)
    # a mask of keys leaves the layer its window
    near = dense(q, k, v, pairs(3, 0, 12, 12) & keys)
    torch.testing.assert_close(out_of(keys, sliding_window=4)[:, 3:], near[:, 3:], atol=1e-12, rtol=0)
    # rows of padding: which see nothing, or everything
    rows = SEEN12 & (GRID12 < 9)[:, None]
    torch.testing.assert_close(out_of(rows)[:, 3:9], expected[:, 3:9], atol=1e-12, rtol=0)
    assert not out_of(rows)[:, 9:].any() and not out_of(HOLE12)[:, 5].any()
    assert torch.equal(out_of(SEEN12 | ~SEEN12.any(-1, keepdim=True)), out_of(SEEN12))
    torch.compiler.reset()
    compiled = torch.compile(lambda *heads: attend(module, *heads, sliding_window=4), fullgraph=True, backend="eager")
    for heads in (heads_of(12), heads_of(1, 12)):
        torch.testing.assert_close(compiled(*heads, keys[:, None, None]), dense(*heads, keys), atol=1e-12, rtol=0)
    config = transformers.PretrainedConfig()
    of_branches = torch.compile(lambda *heads: attend(layer(is_causal=True, config=config), *heads), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="does not say where in the cache"):
        of_branches(*heads_of(1, 12), keys[:, None, None])


BAD_MASKS: list[tuple[Any, str]] = [
    *(
        (mask, "keeps other pairs")
        for mask in (
            added(HOLE12),
            SEEN12 & (GRID12[:, None] % 2 == GRID12 % 2),
            CAUSAL12 & (GRID12[:, None] // 6 == GRID12 // 6),
        )
    ),
    (added(SEEN12).clamp(min=-3), "holds values that are added"),
    (SEEN12.long(), "holds values that are added"),
    (torch.zeros(1, 1, 12, 12, requires_grad=True), "needs a gradient"),
    *((mask, "expected 12 keys' padding") for mask in (SEEN12.expand(1, 4, 12, 12), SEEN12[..., :-1])),
    (create_block_mask(lambda b, h, i, j: i >= j, None, None, 12, 12, device="cpu"), "attention_mask is a BlockMask"),
]
CAUSAL = KeyMask(12, 12, 0, 0, True)
# of a layer: its attributes, the mask, keys where not 12, options
BAD_LAYERS: list[tuple[dict[str, Any], Any, int, dict[str, Any], str]] = [
    *(({"is_causal": True, "config": "whole"}, mask, 12, {}, text) for mask, text in BAD_MASKS),
    ({"is_causal": True}, torch.arange(20)[None] < 12, 20, {}, r"does not say which of the keys are those of the 12 queries.*sdpa"),
    ({"is_causal": True}, CAUSAL, 12, {"is_causal": False}, "is_causal=False is given to a layer whose mask is causal"),
    ({"is_causal": True}, None, 12, {"output_attentions": True}, "the attention weights"),
    ({}, None, 12, {}, "does not say whether it is causal"),
    ({"is_causal": False}, None, 20, {}, "12 queries and 20 keys in a layer that is not causal"),
    ({"is_causal": True}, KeyMask(13, 13, 1, 0, True), 12, {}, "passes 12 keys, and its mask was made for 13"),
]


@pytest.mark.parametrize("index", range(len(BAD_LAYERS)))
def test_layers_and_masks_that_are_refused(index: int) -> None:
    attributes, mask, keys, options, text = BAD_LAYERS[index]
    with pytest.raises((ValueError, TypeError), match=text):
        attend(layer(**{**attributes, **({"config": whole()} if "config" in attributes else {})}), *heads_of(12, keys), mask, **options)


def test_mask_functions_of_every_version_of_transformers() -> None:
    """4.57 hands over ``cache_position``, 5.x lengths and offsets."""
    causal = masking.causal_mask_function
    old = key_mask(batch_size=2, cache_position=torch.arange(30, 34), kv_length=40, kv_offset=0, mask_function=causal)
    new = key_mask(2, 4, 40, 30, 0, causal)
    for mask in (old, new, key_mask(2, torch.arange(30, 34), 40, mask_function=causal)):
        assert (mask.num_keys, mask.num_filled, mask.query_offset, mask.is_causal, mask.padding) == (40, 34, 30, True, None)
    # made before the forward, as for a static cache, it stays what it is
    assert key_mask(2, 4, 40, 30, 0, causal, new) is new and new.to("cpu").contiguous().num_filled == 34

    # windows are counted as transformers counts them, and positions beyond a mask are padding
    for function in (masking.sliding_window_causal_mask_function(5), masking.sliding_window_bidirectional_mask_function(5)):
        window = key_mask(1, 12, 12, 0, 0, function).window
        seen = function(0, 0, torch.arange(12)[:, None], torch.arange(12))
        assert window is not None and torch.equal(LocalWindow(window).dense_mask(12, 12, 1)[0], seen)
    padding = key_mask(1, 4, 12, 8, 0, causal, torch.ones(1, 9, dtype=torch.bool)).padding
    assert padding is not None and padding.tolist() == [[False] * 9 + [True] * 3]
    # rows that see nothing see everything, where softmax needs it; as does the last row of a batch entry without padding
    pairs = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    pairs[0, 0, :, :2], pairs[0, 0, :2] = False, True
    made = mask_of_tensor(pairs, 2, 6, 6, True)
    assert made.is_causal and made.padding is not None and made.padding.tolist() == [[True] * 2 + [False] * 4, [False] * 6]

    def prefix(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return kv < 5

    two = masking.and_masks(masking.sliding_window_overlay(5), masking.sliding_window_causal_mask_function(7))
    other = r"keeps pairs by the mask function.*sdpa"
    for function, text in ((prefix, other), (masking.and_masks(causal, prefix), other), (two, "two windows, of 5 and 7")):
        with pytest.raises(ValueError, match=text):
            key_mask(2, 12, 12, 0, 0, function)
    # a model that adds the mask itself is told why; Doge reads its dtype, others its shape, or cut it
    for read in (lambda: torch.ones(3) + new, lambda: new.dtype, lambda: new.shape, lambda: new[:, :, :, :2]):  # type: ignore[operator, attr-defined, index]
        with pytest.raises((AttributeError, ValueError), match=r"of a KeyMask: this model .* attn_implementation=\"eager\""):
            read()
    assert not hasattr(new, "shape") and copy.deepcopy(new).num_keys == pickle.loads(pickle.dumps(new)).num_keys == 40


# ---- refusals


def test_values_shorter_than_keys() -> None:
    """As models without a mask of transformers' call it; one query of a cache sees all keys."""
    for queries, width in ((12, 5), (1, 5), (1, 8)):
        q, k, v = heads_of(queries, 12)
        seen = LocalWindow((None, 0)).dense_mask(queries, 12, 1, query_offset=12 - queries)
        out = attend(layer(is_causal=True, config=whole()), q, k, v[..., :width], None, is_causal=None)
        torch.testing.assert_close(out, dense(q, k, v[..., :width], seen), atol=1e-12, rtol=0)


def t5() -> Any:
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0)
    return seeded(transformers.T5EncoderModel, config, "eager")


def llama4() -> Any:
    more = {"head_dim": 8, "attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 48}
    return seeded(transformers.Llama4ForCausalLM, transformers.Llama4TextConfig(**DECODER, **more), "eager")


PREFIX = r"keeps other pairs in a longer sequence.*use_cache=False"


def decoding() -> Any:
    """A model that has read a chunk, whose next one is refused."""
    model = on(llama(), "block_sparse")
    configure(model, pattern=TopBlocks(density=0.5))
    return functools.partial(model, **{CACHE: model(tokens(), use_cache=True)[CACHE]})


@pytest.mark.parametrize(
    ("make", "given", "text"),
    [
        (t5, {}, "asks for position_bias"),
        (llama4, {}, "chunks of 16 positions"),
        (lambda: bert(is_decoder=True, add_cross_attention=True), {}, "a model with cross-attention"),
        (llama, {"sideways": 3}, r"not known whether it changes attention.*ignored=\('sideways',\)"),
        (decoding, {}, PREFIX),
    ],
)
def test_models_and_arguments_that_are_refused(make: Any, given: dict[str, Any], text: str) -> None:
    model = make()
    model = on(model, "dilated") if isinstance(model, nn.Module) else model
    with pytest.raises(ValueError, match=text):
        model(tokens(), **given)
    if make is llama:
        model(tokens(), **dict.fromkeys(given))
    if "sideways" in given:
        register(segment_lengths=LENGTHS, dilation_rates=RATES, ignored=("sideways",))
        model(tokens(), sideways=3)


BAD_REGISTRATIONS: list[tuple[str | None, dict[str, Any], str]] = [
    (None, {"segment_length": [4]}, "segment_length given; expected some of backend"),
    (None, {"segment_lengths": [4, 8], "dilation_rates": [1]}, "segment_lengths|dilation_rates"),
    (None, {"kind": "dilated"}, "without a name"),
    (None, {"layout": "spiral"}, "layout is 'spiral'"),
    (None, {"pattern": "nonsense"}, "spec is 'nonsense'"),
    (None, {"ignored": "position_bias"}, "ignored holds 'position_bias'"),
    ("sdpa", {}, "expected one without eager, sdpa"),
    ("wide", {"pattern": PATTERN, "segment_lengths": [4]}, "segment_lengths given for 'block_sparse'"),
    ("wide", {"kind": "round"}, "kind is 'round'"),
    ("dilated", {"kind": "block_sparse"}, "expected another name"),
]


@pytest.mark.parametrize(("name", "options", "text"), BAD_REGISTRATIONS)
def test_a_bad_registration_changes_nothing(name: str | None, options: dict[str, Any], text: str) -> None:
    def state() -> tuple[Any, ...]:
        return dict(modeling.AttentionInterface._global_mapping), attend(layer(is_causal=True), *heads_of(12), None).tolist()

    before = state()
    with pytest.raises((ValueError, TypeError), match=text):
        register(name, **options)
    assert before == state()


def test_settings_that_a_config_cannot_have() -> None:
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
    with pytest.raises(TypeError, match="model_or_config is a str; expected a model of transformers"):
        configure("x")
    never_asks = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match="BloomForCausalLM computes its attention itself"):
        configure(never_asks, segment_lengths=LENGTHS, dilation_rates=RATES)
    register()
    for name, told, text in (
        ("dilated", None, r"register\(segment_lengths=.*configure\(model, segment_lengths="),
        ("dilated", [8], "expected a dict"),
        ("dilated", {"segments": [8]}, "segments in config.dilated_attention"),
    ):
        on(model, name).config.dilated_attention = told
        with pytest.raises((ValueError, TypeError), match=text):
            model(tokens())


def test_a_missing_or_older_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # what importorskip returns is another object
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.56.3")
    with pytest.raises(ImportError, match=r"transformers is 4\.56\.3; expected 4\.57 or later"):
        register()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.0.dev0")
    register()
    # None stands for a package that is not there
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install \"dilated-attention\[hf\]\""):
        register()


# ---- sequences that processes share


def on_a_ring(rank: int, world: int) -> tuple[float, torch.Tensor, list[str]]:
    """How far a compiled model is off, an encoder's logits with padding, and what is refused."""
    register(segment_lengths=LENGTHS, dilation_rates=RATES)
    model = on(llama(num_hidden_layers=1), "ring_dilated")
    odd, inputs = (shard_inputs({"input_ids": tokens(2, n)}) for n in (49, 48))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    off = float((compiled(**odd).logits - model(**odd).logits).abs().max())
    # in a mask (B, 1, 1, n), as models make it that do not ask for one; one process alone has padding
    mine = slice(24 * rank, 24 * rank + 24)
    seen = padded("right", 48).bool()[:, None, None, mine]
    logits = on(bert(), "ring")(tokens(2, 48)[:, mine], attention_mask=seen, position_ids=torch.arange(48)[None, mine]).logits
    packed = {**inputs, "position_ids": inputs["position_ids"] % 10}
    found = []
    for call in (
        {"input_ids": tokens(2, 1), CACHE: model(**inputs, use_cache=True)[CACHE]},
        *({**inputs, "attention_mask": mask} for mask in (pairs(None, 0, 24, 24), pairs(None, 0, 48, 48), torch.ones(2, 1, 1, 24).bool())),
        *({**packed, **beside} for beside in ({"use_cache": False}, {"attention_mask": torch.ones(2, 24)}, {})),
        *([{**inputs, "position_ids": torch.arange(24).expand(2, -1)}] if rank else []),
    ):
        with pytest.raises(ValueError) as refusal:
            model(**call)
        found.append(str(refusal.value))
    return off, logits.detach(), found


def test_processes_share_compiled_models_and_padding_and_not_what_needs_the_whole() -> None:
    results = pool_of(2).run(on_a_ring)
    assert max(off for off, *_ in results) < 1e-10
    mask = padded("right", 48).bool()
    expected = bert()(tokens(2, 48), attention_mask=mask).logits
    torch.testing.assert_close(torch.cat([logits for _, logits, _ in results], 1)[mask], expected[mask], atol=1e-10, rtol=0)
    texts = [
        "1 queries at position 24 of 25 keys, from a cache",
        "attention_mask (1, 1, 24, 24) holds pairs of positions of one of 2 processes",
        "attention_mask (1, 1, 48, 48) holds pairs",
        "attention_mask (2, 1, 1, 24) holds pairs",
        "position_ids restart within the shard",
        *["position_ids begin again or seq_idx changes"] * 2,
        "position_ids of rank 1 begin at 0",
    ]
    for rank, (_, _, found) in enumerate(results):
        assert len(found) == 7 + rank and all(text in message for text, message in zip(texts, found, strict=False)), found


def cut_otherwise(rank: int, world: int) -> list[str]:
    """What models answer whose layers would compute something else from a part of the sequence."""
    register()
    size = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"max_position_embeddings": 40, "original_max_position_embeddings": 32}
    opt = {"vocab_size": 97, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "word_embed_proj_dim": 32}
    models = [
        transformers.Phi3ForCausalLM(transformers.Phi3Config(**size, **ids, **rope, rope_parameters=long | rope)),
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**size, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
        ),
        transformers.RobertaForMaskedLM(transformers.RobertaConfig(**size, **ids)),
        transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**size, num_key_value_heads=4, layer_types=["conv", "full_attention"])),
        transformers.OPTForCausalLM(transformers.OPTConfig(**opt, **ids)),
        transformers.EsmModel(transformers.EsmConfig(**size, **ids, mask_token_id=3, position_embedding_type="rotary", token_dropout=True)),
    ]
    found = []
    for model in models:
        # of OPT both processes have padding
        inputs = {"input_ids": tokens(2, 48), "attention_mask": torch.arange(48).expand(2, -1).remainder(24).ge(5).long()}
        if not isinstance(model, transformers.OPTForCausalLM):
            del inputs["attention_mask"]
        with pytest.raises(ValueError) as refusal:
            on(model, "ring")(**shard_inputs(inputs))
        found.append(str(refusal.value))
    with pytest.raises(ValueError, match="a sequence of 1 positions for 2 processes"):
        shard_inputs({"input_ids": tokens(2, 1)})
    ones = shard_inputs({"input_ids": tokens(2, 48), "attention_mask": torch.ones(2, 48, dtype=torch.long)})
    assert on(models[4], "ring")(**ones).logits.isfinite().all()
    # a model that is right on parts, after those that are not
    found.append(str(on(llama(), "ring")(**shard_inputs({"input_ids": tokens(2, 48)})).logits.shape[1]))
    return found


@pytest.mark.skipif(RELEASE < PINNED, reason="older releases call RoPE's settings otherwise")
def test_models_that_compute_something_else_from_a_part_are_refused_on_every_process() -> None:
    first, second = pool_of(2).run(cut_otherwise)
    assert first == second and first[-1] == "24"
    texts = (
        "phi3 turns queries and keys by the last position in sight (rope_type 'longrope'): expected context_parallel",
        "llama turns queries and keys by the last position in sight (rope_type 'dynamic')",
        "roberta numbers its positions by the tokens in sight",
        "lfm2 has layers that carry a state from position to position (conv): expected attention alone",
        "opt counts positions from the padding mask in sight",
        "esm scales embeddings by the share of masks in sight",
    )
    assert all(text in message for text, message in zip(texts, first, strict=False)), first


BESIDE = ("labels", "shift_labels", "attention_mask", "position_ids", "token_type_ids", "seq_idx")


def test_inputs_of_one_process() -> None:
    ids = tokens()
    assert set(shard_inputs({"input_ids": ids})) == {"input_ids", "position_ids"}
    inputs = shard_inputs({"input_ids": ids, "labels": ids})
    assert torch.equal(inputs["shift_labels"][:, :-1], ids[:, 1:]) and inputs["num_items_in_batch"] == 2 * (N - 1)
    # models name what they do not use as None
    embedded = shard_inputs({"input_ids": None, "inputs_embeds": torch.ones(2, N, 4), "labels": ids, "shift_labels": None})
    assert torch.equal(embedded["shift_labels"], inputs["shift_labels"]) and embedded["input_ids"] is None
    packed = torch.arange(N).expand(2, -1)
    for given, options, text in (
        ({"labels": ids}, {}, "expected input_ids or inputs_embeds"),
        ({"input_ids": ids, "attention_mask": packed // 20 + 1}, {}, r"holds other numbers than 0 and 1.*position_ids that begin again"),
        ({"input_ids": ids, "position_ids": packed % 20, "attention_mask": torch.ones_like(ids)}, {}, "packed documents are one row"),
        ({"input_ids": ids}, {"group": 1, "mesh": 1}, "group and mesh are both given"),
        *(({"input_ids": ids, name: ids[:, 2:]}, {}, f"{name} has shape .*expected a value for each position") for name in BESIDE),
        ({"input_ids": ids, "labels": ids.tolist()}, {}, r"labels is a list; .*torch\.tensor\(labels\)"),
        ({"input_ids": ids.tolist()}, {}, "input_ids is a list"),
        ({"input_ids": ids[0]}, {}, r"input_ids has shape .*use input_ids\[None\]"),
        ({"input_ids": ids.float()}, {}, "input_ids has dtype torch.float32"),
        ({"inputs_embeds": ids}, {}, "inputs_embeds has shape"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            shard_inputs(given, **options)
    assert shard_inputs({"input_ids": ids, "position_ids": packed[:1], "foo": 3})["foo"] == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dilated", "block_sparse"])
def test_on_a_gpu(name: str) -> None:
    """In bfloat16, against float64 on the CPU; and generation from a cache."""
    model, ids = llama(hidden_size=128, head_dim=32), tokens(2, 300)
    configure(model, segment_lengths=[64, 256], dilation_rates=[1, 3], pattern=GlobalLocal(40, 8))
    expected, model = on(model, name)(ids).logits, model.to("cuda", torch.bfloat16)
    given = {"input_ids": ids.cuda(), "attention_mask": torch.ones_like(ids).cuda()}
    torch.testing.assert_close(model(**given).logits.cpu().double(), expected, atol=5e-2, rtol=0)
    assert model.generate(**given, max_new_tokens=4, do_sample=False).shape == (2, 304)


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


def documents_on_a_ring(rank: int, world: int, kind: str, name: str, layout: str) -> dict[str, dict[str, torch.Tensor]]:
    register(segment_lengths=LENGTHS, dilation_rates=RATES, layout=layout)
    mine, found = positions_of(49, rank, world, layout, None), {}
    for way, told in TOLD.items():
        weights = weights_of(1, 49, VOCABULARY) * told.get("attention_mask", torch.ones(1, 49))[..., None]
        shard = shard_inputs({"input_ids": tokens(1, 49), **told}, layout=layout)
        found[way] = results(on(MODELS[kind](), name), shard, weights=weights[:, mine])
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "kind", "name", "layout", "rounding"),
    [
        (1, "llama", "ring_dilated", "contiguous", 1e-6),
        # windows and sinks, whose gradients sum over the processes; some are above 8
        (2, "gpt_oss", "ring", "zigzag", 4e-6),
        (3, "llama", "ring_dilated", "striped", 1e-6),
        # more processes than heads of keys; norms in float32
        (4, "gemma2", "ring_dilated", "zigzag", 2e-5),
    ],
)
def test_processes_share_documents_told_in_any_way(world: int, kind: str, name: str, layout: str, rounding: float) -> None:
    """Logits of tokens and all gradients are those of the documents one by one, to the float32 of rotary angles."""
    found = [documents_on_a_ring(0, 1, kind, name, layout)] if world == 1 else pool_of(world).run(documents_on_a_ring, kind, name, layout)
    if name == "ring":
        LITERAL[0] = DilatedPattern([4096], [1])
    model, ids, weights = on(MODELS[kind](), "literal"), tokens(1, 49), weights_of(1, 49, VOCABULARY)
    for way in TOLD:
        shares, whole = [each[way] for each in found], torch.empty(49, VOCABULARY, dtype=torch.float64)
        for rank, share in enumerate(shares):
            whole[positions_of(49, rank, world, layout, None)] = share["logits"]
        spans = ((3, 16), (19, 43)) if way == "padding" else ((0, 13), (13, 42), (42, 49))
        parts = [results(model, {"input_ids": ids[:, a:b]}, weights=weights[:, a:b]) for a, b in spans]
        assert {*parts[0]} == {"logits", *(name for name, _ in model.named_parameters())}
        for key in parts[0]:
            of_ranks = torch.cat([whole[a:b] for a, b in spans]) if key == "logits" else sum(share[key] for share in shares)
            of_parts = [part[key] for part in parts]
            expected, off = (torch.cat(of_parts), rounding / 10) if key == "logits" else (sum(of_parts), rounding)
            torch.testing.assert_close(of_ranks, expected, atol=off, rtol=0, msg=lambda m, k=way: f"{k}: {m}")
