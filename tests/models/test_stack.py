"""Encoder and decoder: the kinds of attention, norms, drop path, checkpointing, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dilated_attention.models import LongNetConfig, LongNetDecoder, LongNetEncoder, LongNetLM
from dilated_attention.models.blocks import DropPath
from dilated_attention.pattern import LocalWindow, MaskFunction

SHAPE: dict[str, Any] = {"vocab_size": 17, "embed_dim": 16, "num_layers": 2, "num_heads": 4}
DILATED: dict[str, Any] = {"segment_lengths": (8, 32), "dilation_rates": (1, 4)}
KINDS: dict[str, dict[str, Any]] = {
    "dilated": DILATED,
    "dense": {"attention": "dense"},
    "block_sparse": {"attention": "block_sparse", "block_pattern": LocalWindow((11, 11))},
}
STYLES: dict[str, dict[str, Any]] = {
    "magneto": {},
    "llama": {
        "norm": "rms_norm",
        "ffn": "swiglu",
        "qk_norm": True,
        "sub_norm": False,
        "bias": False,
        "num_kv_heads": 2,
        "tie_embeddings": False,
    },
    "plain": {"positions": "none", "sub_norm": False, "final_norm": False, "scale_embedding": False, "ffn": "relu"},
}


def reference(model: LongNetLM, tokens: torch.Tensor) -> torch.Tensor:
    """Logits written down part by part, with attention from the dense multiplicities; float64, without rotation."""
    config = model.config
    x = model.embedding.weight[tokens] * (config.embed_dim**0.5 if config.scale_embedding else 1.0)
    n, heads = tokens.shape[1], config.num_heads
    m = config.pattern.dense_mask(n, n, heads).double()
    if config.is_causal:
        m = m * torch.ones(n, n).tril()
    for block in model.decoder.blocks:
        inner = block.attention_norm(x)
        q, k, v = (
            linear(inner).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            for linear in (block.attention.q_proj, block.attention.k_proj, block.attention.v_proj)
        )
        if config.qk_norm:
            q, k = block.attention.q_norm(q), block.attention.k_norm(k)
        k, v = (y.repeat_interleave(heads // y.shape[1], dim=1) for y in (k, v))
        weights = m * (q @ k.mT / config.head_dim**0.5).exp()
        out = (weights @ v / weights.sum(-1, keepdim=True).clamp_min(1e-300)).transpose(1, 2).flatten(2)
        out = block.attention.inner_attn_ln(out) if config.sub_norm else out
        x = x + block.attention.out_proj(out)
        inner, ffn = block.ffn_norm(x), block.ffn
        inner = F.silu(ffn.gate(inner)) * ffn.up(inner) if config.ffn == "swiglu" else getattr(F, config.ffn)(ffn.up(inner))
        x = x + ffn.down(ffn.norm(inner) if config.sub_norm else inner)
    x = model.decoder.norm(x) if config.final_norm else x
    return x @ (model.embedding.weight if config.tie_embeddings else model.output.weight).T


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_formula_of_the_parts(kind: str, style: str, is_causal: bool) -> None:
    torch.manual_seed(0)
    changes = {**STYLES[style], "positions": "none", "is_causal": is_causal}
    model = LongNetLM(LongNetConfig(**SHAPE, **KINDS[kind], **changes), dtype=torch.float64).eval()
    tokens = torch.randint(17, (2, 37))
    torch.testing.assert_close(model(tokens), reference(model, tokens), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("positions", ["rotary", "none"])
def test_only_the_future_is_hidden_from_a_decoder_and_nothing_from_an_encoder(positions: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 24, 16)
    changed = x.clone()
    changed[:, 12] += 1
    for kind in KINDS:
        config = LongNetConfig(**{**SHAPE, **KINDS[kind], "positions": positions, "is_causal": False})
        encoder = LongNetEncoder(config).eval()
        assert (encoder(x) != encoder(changed)).any(-1)[0, 8], kind
        decoder = LongNetDecoder(LongNetConfig(**{**config.to_dict(), "is_causal": True})).eval()
        assert (decoder(x) == decoder(changed)).all(-1)[0, :12].all(), kind


def test_a_configuration_goes_to_json_and_back() -> None:
    for kind in KINDS.values():
        config = LongNetConfig(**SHAPE, **kind)
        assert LongNetConfig.from_dict(config.to_dict()) == config
    held = MaskFunction(lambda b, h, i, j: i >= j)
    config = LongNetConfig(**SHAPE, attention="block_sparse", block_pattern=held)
    with pytest.raises(ValueError, match=r"block_pattern is .* cannot be written to a file"):
        config.to_dict()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"segment_lengths": (), "dilation_rates": ()}, ValueError, "segment_lengths is empty"),
        ({"attention": "sparse"}, ValueError, "attention is 'sparse'"),
        ({"attention": "dense"}, ValueError, "segment_lengths is given and attention is 'dense'"),
        ({"block_pattern": LocalWindow(3)}, ValueError, "block_pattern is given and attention is 'dilated'"),
        ({"attention": "ring_block_sparse", "segment_lengths": (), "dilation_rates": ()}, ValueError, "block_pattern is None"),
        ({"attention": "dense", "segment_lengths": (), "dilation_rates": (), "tail": "zero_keys"}, ValueError, "tail is 'zero_keys'"),
        ({"norm": "batch_norm"}, ValueError, "norm is 'batch_norm'"),
        ({"positions": "alibi"}, ValueError, "positions is 'alibi'"),
        ({"bias": 1}, TypeError, "bias"),
        ({"drop_path": 1.5}, ValueError, "drop_path is 1.5"),
        ({"vocab_size": 0}, ValueError, "vocab_size is 0"),
        ({"embed_dim": 18, "positions": "none"}, ValueError, "embed_dim is 18 and num_heads is 4"),
    ],
)
def test_a_model_that_cannot_be_is_refused(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LongNetConfig(**{**SHAPE, **DILATED, **changes})


def test_encoder_and_decoder_do_not_take_each_others_configuration() -> None:
    config = LongNetConfig(**SHAPE, **DILATED)
    with pytest.raises(ValueError, match="is_causal is True; LongNetEncoder needs False: set it, or use LongNetDecoder"):
        LongNetEncoder(config)
    with pytest.raises(ValueError, match="LongNetLM needs the number of its tokens"):
        LongNetLM(LongNetConfig(**{**SHAPE, **DILATED, "vocab_size": None}))
    masked = LongNetLM(LongNetConfig(**SHAPE, **DILATED, is_causal=False))
    with pytest.raises(ValueError, match="generate needs is_causal=True"):
        masked.generate(torch.zeros(1, 3, dtype=torch.int64), 2)


def test_drop_path_drops_whole_samples_and_documents_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    drop = DropPath(0.25)
    dropped = drop(torch.ones(4000, 2, 3))
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert (dropped == dropped[:, :1, :1]).all()
    assert abs(dropped.mean().item() - 1) < 0.05
    bounds = torch.tensor([0, 3, 3, 10, 50], dtype=torch.int32)
    seen = set()
    for _ in range(200):
        packed = drop(torch.ones(1, 50, 2), bounds)[0, :, 0]
        parts = [packed[a:b] for a, b in zip(bounds.tolist(), bounds.tolist()[1:], strict=False) if b > a]
        assert all((part == part[0]).all() for part in parts)
        seen.add(tuple(part[0].item() > 0 for part in parts))
    assert len(seen) == 8
    drop.eval()
    assert torch.equal(drop(torch.ones(2, 2, 2)), torch.ones(2, 2, 2))


def test_drop_path_grows_with_depth() -> None:
    config = LongNetConfig(**{**SHAPE, **DILATED, "num_layers": 5, "drop_path": 0.4})
    rates = [block.drop_path.p for block in LongNetDecoder(config).blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_checkpointed_activations_change_no_gradient() -> None:
    config = LongNetConfig(**SHAPE, **DILATED, dropout=0.1, drop_path=0.1)
    tokens = torch.randint(17, (2, 40), generator=torch.Generator().manual_seed(1))
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = LongNetLM(config, checkpoint_activations=checkpointed)
        torch.manual_seed(2)
        model(tokens, targets=tokens).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_all_layers_are_what_enters_and_leaves_the_blocks() -> None:
    torch.manual_seed(0)
    encoder = LongNetEncoder(LongNetConfig(**SHAPE, **DILATED, is_causal=False)).eval()
    x = torch.randn(1, 20, 16)
    out, states = encoder(x, all_layers=True)
    assert len(states) == 3
    torch.testing.assert_close(states[0], x)
    torch.testing.assert_close(encoder.blocks[1](states[1]), states[2])
    torch.testing.assert_close(encoder.norm(states[2]), out)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_saves_and_loads(kind: str, tmp_path: Path) -> None:
    model = LongNetLM(LongNetConfig(**SHAPE, **KINDS[kind], **STYLES["llama"])).eval()
    model.save_pretrained(tmp_path)
    loaded = LongNetLM.from_pretrained(tmp_path)
    tokens = torch.randint(17, (1, 19))
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))


@pytest.mark.slow
def test_a_stack_compiles_in_one_graph() -> None:
    torch.manual_seed(0)
    model = LongNetLM(LongNetConfig(**SHAPE, **DILATED, drop_path=0.2), checkpoint_activations=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    tokens = torch.randint(17, (2, 24))
    compiled(tokens, targets=tokens).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
