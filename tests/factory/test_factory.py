"""create_attention, create_model and the presets."""

import dataclasses
from typing import Any

import pytest
import torch

from dilated_attention import (
    create_attention,
    create_model,
    explain_backend,
)
from dilated_attention.factory import ATTENTION_PRESETS, KINDS, MODEL_PRESETS
from dilated_attention.factory.create import MODELS
from dilated_attention.models.summary import training_bytes
from dilated_attention.pattern import LocalWindow, RandomBlocks, geometric_branches

SMALL = {"segment_lengths": [8, 16], "dilation_rates": [1, 2]}


def test_kinds_make_their_modules() -> None:
    of_kinds = {f"{m}{kind}" for m in ("", "multihead_") for kind in ("dilated", "block_sparse", "block_sparse_dilated")}
    assert set(KINDS) == of_kinds | {f"ring_{kind}" for kind in of_kinds} | {"ring"}
    # test_net.py makes one of each
    assert all(module.__name__.lower() == f"{kind.replace('_', '')}attention" for kind, module in KINDS.items())
    assert type(create_attention("ring_dilated", **SMALL)) is KINDS["ring_dilated"]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: create_attention("ringed", **SMALL), ValueError, "kind is 'ringed'; expected one of 'dilated', 'multihead_dilated'"),
        (lambda: create_attention("dilated", segment_length=[8], dilation_rates=[1]), TypeError, "got segment_length, which it does not"),
        (lambda: create_attention("dilated", segment_lengths=[8]), TypeError, "lacks dilation_rates"),
        (lambda: create_model("longnet-huge"), ValueError, "preset is 'longnet-huge'; expected one of 'longnet-tiny'"),
        (lambda: create_model("longnet-tiny", layers=2), TypeError, "got layers, which it does not know; it accepts vocab_size"),
        (lambda: create_model("longnet-tiny", checkpoint_activations="no"), TypeError, "checkpoint_activations is 'no'"),
        (lambda: create_model("longnet-tiny", segment_lengths=3), TypeError, "segment_lengths is 3"),
        (lambda: create_model(10**5000), TypeError, r"preset is about 2\*\*16609"),  # type: ignore[arg-type]
        (lambda: explain_backend(block_masks="bits"), ValueError, "block_size"),
        (lambda: explain_backend(block_size=32), ValueError, "64 or 128"),
    ],
)
def test_what_cannot_be_made_is_refused_with_a_way_out(call: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()  # type: ignore[operator]


def test_model_presets_build_and_take_overrides() -> None:
    # GPT-2's 124,439,808 without its table of 1,024 positions
    known = {"gpt2-124m": 124_439_808 - 1024 * 768, "llama-7b": 6_738_415_616}
    for name in MODEL_PRESETS:
        model = create_model(name, device="meta")
        assert type(model) is MODELS[type(MODEL_PRESETS[name])] and model.num_parameters == known.get(name, model.num_parameters)
        assert f"{model.num_parameters:,}" in str(model.summary((1024,), memory=2**30))
    # what examples/compare_attention.py trained: in 10 layers two are dense
    kinds = [layer.kind for layer in MODEL_PRESETS["mixed-50m"].layers]
    assert kinds == (["block_sparse"] * 3 + ["dense"]) * 2 + ["block_sparse"] * 2
    assert [layer.kind for layer in create_model("mixed-15m", num_layers=2, device="meta").config.layers] == ["block_sparse"] * 2
    with pytest.raises(ValueError, match="num_layers is 0"):
        create_model("mixed-15m", num_layers=0)
    # a base was refused that the caller had not given
    assert create_model("llama-1b", positions="none", device="meta").config.rotary_base == 10_000
    with pytest.raises(ValueError, match=r"rotary_base is 2\.0 and positions is 'none', which has none"):
        create_model("llama-1b", positions="none", rotary_base=2.0, device="meta")
    model = create_model("longnet-tiny", num_layers=1, embed_dim=32, backend="math", dtype=torch.float64)
    assert model.config == dataclasses.replace(MODEL_PRESETS["longnet-tiny"], num_layers=1, embed_dim=32)
    assert next(model.parameters()).dtype is torch.float64


def test_branches_follow_the_context() -> None:
    def branches(preset: str, **overrides: Any) -> Any:
        config = create_model(preset, device="meta", **overrides).config
        stack = getattr(config, "encoder", config)
        return stack.segment_lengths, stack.dilation_rates

    assert branches("longnet-15m") == geometric_branches(32768)
    assert branches("longnet-15m", context_length=2**20) == geometric_branches(2**20, 2048)
    assert branches("longnet-tiny", context_length=16_384, num_layers=1) == ((512, 2048, 8192, 16_384), (1, 4, 16, 32))
    assert branches("gigapath-12l768d", context_length=100_000) == ((1024, 4096, 16_384, 65_536, 100_000), (1, 4, 16, 64, 97))
    for overrides, text in (
        ({"attention": "dense"}, "context_length is 4096 and attention is 'dense', which has no branches"),
        ({"dilation_rates": (1,)}, "context_length and dilation_rates are given"),
    ):
        with pytest.raises(ValueError, match=text):
            branches("longnet-tiny", context_length=4096, **overrides)
    with pytest.raises(ValueError, match="context_length is 0; expected an integer ≥ 1"):
        branches("longnet-tiny", context_length=0)


def test_another_kind_of_attention_takes_the_former_kinds_fields_away() -> None:
    dense = create_model("longnet-tiny", attention="dense")
    assert (dense.config.segment_lengths, dense.config.kind) == ((), "dense")
    assert create_model("longnet-tiny", attention="dilated").config == MODEL_PRESETS["longnet-tiny"]
    window = create_model("longnet-tiny", attention="block_sparse", block_pattern=LocalWindow((63, 0)), num_layers=1)
    assert window(torch.zeros(1, 100, dtype=torch.int64)).shape == (1, 100, 256)
    with pytest.raises(ValueError, match="attention is 'sparse'"):
        create_model("longnet-tiny", attention="sparse")
    mixed = create_model("longnet-tiny", attention=[{"attention": "dense"}, {"segment_lengths": [64], "dilation_rates": [2]}])
    assert [layer.kind for layer in mixed.config.layers] == ["dense", "dilated", "dense"] and not mixed.config.segment_lengths
    pairs = [layer.pattern.pairs(300, 4, is_causal=True) for layer in mixed.config.layers]
    assert mixed.summary((300,)).keys_per_query(300) == pytest.approx(sum(pairs) / (3 * 300 * 4))
    assert "attention: dense, every key; dilated, DilatedPattern" in str(mixed.summary())
    entries = [{"attention": "dense"}, {"attention": "dense", "positions": "none"}]
    assert "dense, every key; dense, every key, without positions, in turn" in str(
        create_model("longnet-tiny", attention=entries).summary()
    )
    with pytest.raises(ValueError, match="which has no branches that could follow it"):
        create_model("longnet-tiny", context_length=4096, attention=[{"attention": "dense"}])


def test_overrides_reach_the_encoder_within() -> None:
    slide = create_model("gigapath-12l768d", num_layers=1, embed_dim=64, in_dim=8, mixture_grad="exact")
    assert (slide.config.encoder.num_layers, slide.config.encoder.embed_dim, slide.config.in_dim) == (1, 64, 8)
    assert slide.config.encoder.segment_lengths == (1024, 5792, 32768, 185363, 1048576)
    with pytest.raises(TypeError, match="got layers, which it does not know; it accepts encoder, in_dim"):
        create_model("gigapath-12l768d", layers=1)
    # the shape of the released weights
    assert create_model("gigapath-12l768d", device="meta").num_parameters == 86_330_880


def test_summary_counts_the_pairs_of_equal_layers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, pairs = [], LocalWindow.pairs
    monkeypatch.setattr(LocalWindow, "pairs", lambda pattern, *args, **options: counted.append(1) or pairs(pattern, *args, **options))
    entries = [{"attention": "block_sparse", "block_pattern": LocalWindow((63, 0))}] * 6
    summary = create_model("longnet-tiny", num_layers=6, attention=entries, device="meta").summary((300,))
    assert summary.keys_per_query(300) == pairs(LocalWindow((63, 0)), 300, is_causal=True) / 300 and len(counted) == 1


def test_summary_counts_what_the_model_has() -> None:
    model = create_model("longnet-tiny")
    summary = model.summary((300, 4096), memory=2**30)
    assert summary.num_parameters == sum(p.numel() for p in model.parameters())
    assert summary.embedding_parameters == 256 * 128
    mask = model.config.pattern.dense_mask(300, 300, 4) * torch.ones(300, 300, dtype=torch.int64).tril()
    assert summary.keys_per_query(300) == pytest.approx(mask.sum().item() / (4 * 300))
    assert summary.cache_bytes(10**6) == 3 * 2 * 128 * 2 * 8192
    told = summary.as_dict()
    assert [row["positions"] for row in told["lengths"]] == [300, 4096]
    assert 0 < told["fits"]["kept"] < told["fits"]["checkpointed"]
    assert f"{model.num_parameters:,}" in str(summary)
    # none where decoding is refused; else the cache's own: test_generation.py
    drawn = create_model("longnet-tiny", attention="block_sparse", block_pattern=RandomBlocks(0.5, seed=1), device="meta").summary((300,))
    assert drawn.cache_bytes(300) is None and "cache_bytes" not in drawn.as_dict()["lengths"][0]
    # the largest length that fits does, and one more does not
    fits = told["fits"]["kept"]
    rows = dataclasses.replace(summary, lengths=(fits, fits + 1)).as_dict()["lengths"]
    assert rows[0]["training_bytes"] <= 0.9 * summary.memory < rows[1]["training_bytes"]
    # branches' outputs, saved for a detached gradient: of every layer, or at the peak of the one that is computed again
    outputs = int(2 * 128 * sum(1 / rate for rate in model.config.dilation_rates))
    for is_less, layers in ((False, 3), (True, 1)):
        exact, detached = (
            training_bytes(dataclasses.replace(model.config, mixture_grad=grad), 2, checkpoint_activations=is_less)
            for grad in ("exact", "detached")
        )
        assert detached - exact == layers * outputs


def test_attention_presets_are_the_published_settings() -> None:
    gigapath = ATTENTION_PRESETS["gigapath"]
    assert (gigapath.pattern.head_offsets, gigapath.pattern.tail, gigapath.mixture_grad) == ("blocked", "zero_keys", "detached")
    assert gigapath.embed_dim // gigapath.num_heads == 48
    assert ATTENTION_PRESETS["longvit"].embed_dim // ATTENTION_PRESETS["longvit"].num_heads == 24
    assert ATTENTION_PRESETS["longnet"].pattern.dilation_rates == (1, 2, 4, 6, 12)
