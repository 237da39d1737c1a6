"""The language model: causal to the bit, exact in loss and generation, the same after a round trip through files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dilated_attention import dilated_attention
from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.models.blocks import magneto_gain
from dilated_attention.models.loss import chunked_cross_entropy

CONFIG = LongNetConfig(
    vocab_size=50, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, segment_lengths=(8, 24), dilation_rates=(1, 3)
)


def model(**changes: object) -> LongNetLM:
    torch.manual_seed(1)
    return LongNetLM(LongNetConfig(**{**CONFIG.to_dict(), **changes})).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("ffn", ["gelu", "swiglu"])
def test_a_later_token_changes_no_earlier_logit(ffn: str) -> None:
    lm = model(ffn=ffn)
    tokens = torch.randint(50, (2, 61))
    before = lm(tokens)
    for position in (1, 23, 24, 60):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 50
        after = lm(changed)
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.equal(after[:, position], before[:, position])


def test_packed_documents_are_as_if_alone() -> None:
    lm = model()
    tokens = torch.randint(50, (1, 50))
    packed = lm(tokens, cu_seqlens=torch.tensor([0, 17, 50], dtype=torch.int32))
    torch.testing.assert_close(packed[:, :17], lm(tokens[:, :17]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed[:, 17:], lm(tokens[:, 17:]), atol=1e-5, rtol=1e-5)


def test_forward_is_the_formula_of_its_parts() -> None:
    """One layer by hand: pre-norm, attention with its sub-LayerNorm, feed-forward with its own, tied output."""
    lm = model(num_layers=1)
    tokens = torch.randint(50, (1, 30))
    block = lm.decoder.blocks[0]
    x = lm.embedding.weight[tokens] * math.sqrt(32)
    a, h = block.attention, F.layer_norm(x, (32,), block.attention_norm.weight, block.attention_norm.bias)
    q, k, v = (p(h).unflatten(-1, (-1, 8)) for p in (a.q_proj, a.k_proj, a.v_proj))
    angles = torch.arange(30)[:, None] * 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotate(y: torch.Tensor) -> torch.Tensor:
        first, second = y[..., :4], y[..., 4:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    attended = dilated_attention(rotate(q), rotate(k), v, (8, 24), (1, 3), is_causal=True, backend="math")
    x = x + a.out_proj(a.inner_attn_ln(attended.flatten(-2)))
    ffn = block.ffn
    x = x + ffn.down(ffn.norm(F.gelu(ffn.up(block.ffn_norm(x)))))
    expected = lm.decoder.norm(x) @ lm.embedding.weight.T
    torch.testing.assert_close(lm(tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_loss_in_chunks_is_the_whole_cross_entropy(chunk: int | None, device: str) -> None:
    hidden = torch.randn(2, 40, 16, dtype=torch.float64, device=device, requires_grad=True)
    # 50 is not a multiple of 8: on a GPU the weight gets six rows of zeros, which must not take part
    weight = torch.randn(50, 16, dtype=torch.float64, device=device, requires_grad=True)
    targets = torch.randint(50, (2, 40), device=device)
    targets[0, 5] = -100
    loss = chunked_cross_entropy(hidden, weight, targets, chunk=chunk)
    whole = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())
    # float64, as its tensors
    torch.testing.assert_close(loss, whole, atol=1e-13, rtol=1e-13)
    for got, want in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(whole, (hidden, weight)), strict=True):
        torch.testing.assert_close(got, want, atol=1e-13, rtol=1e-13)
    assert chunked_cross_entropy(hidden, weight, torch.full_like(targets, -100), chunk=chunk) == 0
    with torch.autocast(device, torch.bfloat16):
        rounded = chunked_cross_entropy(hidden.float(), weight.float(), targets, chunk=chunk)
    torch.testing.assert_close(rounded.double(), whole, atol=0.05, rtol=0)


def test_model_loss_is_that_of_its_logits() -> None:
    lm = model()
    tokens = torch.randint(50, (2, 33))
    expected = F.cross_entropy(lm(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(lm(tokens[:, :-1], targets=tokens[:, 1:]), expected)


def test_greedy_generation_is_the_full_forward_at_every_step() -> None:
    lm = model()
    prompt = torch.randint(50, (2, 20))
    written = lm.generate(prompt, 60, temperature=0.0)
    expected = prompt
    with torch.no_grad():
        for _ in range(60):
            expected = torch.cat([expected, lm(expected)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(written, expected)


def test_sampling_follows_its_generator_and_top_k() -> None:
    lm = model()
    prompt = torch.randint(50, (1, 5))

    def draw(seed: int, **options: object) -> torch.Tensor:
        return lm.generate(prompt, 20, generator=torch.Generator().manual_seed(seed), **options)  # type: ignore[arg-type]

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(draw(1, top_k=1), lm.generate(prompt, 20, temperature=0.0))
    for bad in ({"temperature": -1.0}, {"top_k": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            draw(1, **bad)


def test_saved_and_loaded_model_gives_equal_logits(tmp_path: Path) -> None:
    lm = model(head_offsets=[[0, 0, 0, 0], [2, 1, 0, 1]])
    lm.save_pretrained(tmp_path / "a" / "b")
    loaded = LongNetLM.from_pretrained(tmp_path / "a" / "b")
    assert loaded.config == lm.config
    assert not loaded.training
    tokens = torch.randint(50, (1, 40))
    assert torch.equal(loaded(tokens), lm(tokens))
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert LongNetLM.from_pretrained(tmp_path / "a" / "b", dtype=torch.bfloat16).embedding.weight.dtype is torch.bfloat16
    with pytest.raises(FileNotFoundError, match="written by save_pretrained"):
        LongNetLM.from_pretrained(tmp_path)


def test_a_model_with_weights_tied_by_hand_is_saved_whole(tmp_path: Path) -> None:
    lm = model(tie_embeddings=False)
    assert lm.output is not None
    lm.output.weight = lm.embedding.weight
    lm.decoder.blocks[0].attention.q_proj.weight = torch.nn.Parameter(torch.randn(32, 32).T)
    lm.save_pretrained(tmp_path)
    tokens = torch.randint(50, (1, 40))
    assert torch.equal(LongNetLM.from_pretrained(tmp_path)(tokens), lm(tokens))


def test_config_round_trip_and_refusals(tmp_path: Path) -> None:
    CONFIG.save(tmp_path / "config.json")
    assert LongNetConfig.load(tmp_path / "config.json") == CONFIG
    values = CONFIG.to_dict()
    assert json.loads(json.dumps(values)) == values
    with pytest.raises(ValueError, match="unknown keys segment_length"):
        LongNetConfig.from_dict({**values, "segment_length": [1]})
    with pytest.raises(ValueError, match="configuration has no embed_dim, num_layers; LongNetConfig needs it"):
        LongNetConfig.from_dict({name: value for name, value in values.items() if name not in ("embed_dim", "num_layers")})
    with pytest.raises(TypeError, match=r"configuration is \[1\] \(list\)"):
        LongNetConfig.from_dict([1])  # type: ignore[arg-type]
    for changes, text in (
        ({"vocab_size": 0}, "vocab_size"),
        ({"embed_dim": 30}, "embed_dim is 30 and num_heads is 4"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3"),
        ({"ffn": "tanh"}, "ffn is 'tanh'"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"rotary_base": float("nan")}, "rotary_base is nan"),
        ({"dilation_rates": (1, 25)}, "dilation_rates"),
        ({"positions": "none", "rotary_base": 500.0}, "rotary_base is 500.0 and positions is 'none'"),
        ({"positions": "none", "xpos_scale_base": 50.0}, "xpos_scale_base is 50.0 and positions is 'none'"),
        ({"xpos_scale_base": 50.0}, "positions is 'rotary', which has none; leave it out, or use positions='xpos'"),
    ):
        with pytest.raises(ValueError, match=text):
            LongNetConfig(**{**values, **changes})


@pytest.mark.parametrize(
    ("tokens", "error"), [(torch.zeros(3, dtype=torch.long), ValueError), (torch.zeros(1, 3), TypeError), ([[1]], TypeError)]
)
def test_bad_tokens_are_refused(tokens: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="tokens"):
        model()(tokens)


def test_a_model_on_one_process_knows_its_length() -> None:
    tokens = torch.zeros(1, 6, dtype=torch.long)
    assert torch.equal(model()(tokens, seq_len=6), model()(tokens))
    with pytest.raises(ValueError, match="seq_len is 12 and there are 6 positions"):
        model()(tokens, seq_len=12)


def test_initial_loss_is_near_uniform_and_training_lowers_it() -> None:
    lm = model(vocab_size=50).train()
    tokens = (torch.arange(200) % 7)[None]
    first = lm(tokens[:, :-1], targets=tokens[:, 1:])
    assert abs(first.item() - math.log(50)) < 1.5
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
    for _ in range(20):
        loss = lm(tokens[:, :-1], targets=tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5 * first.item()


def test_magneto_gain_reaches_the_weights() -> None:
    lm = model(embed_dim=128, num_heads=4, num_kv_heads=4)
    block = lm.decoder.blocks[0]
    gain = magneto_gain(2)
    assert gain == pytest.approx(math.sqrt(math.log(4)))
    xavier = math.sqrt(2 / 256)
    assert block.attention.q_proj.weight.std().item() == pytest.approx(xavier, rel=0.05)
    assert block.attention.v_proj.weight.std().item() == pytest.approx(xavier * gain, rel=0.05)
    assert block.ffn.up.weight.std().item() == pytest.approx(math.sqrt(2 / (128 + 512)) * gain, rel=0.05)


def test_targets_may_be_as_narrow_as_tokens() -> None:
    lm, tokens = model(), torch.randint(50, (2, 30))
    assert torch.equal(lm(tokens.int(), targets=tokens.int()), lm(tokens, targets=tokens))
