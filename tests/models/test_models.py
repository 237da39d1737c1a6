"""Encoder, decoder and language model: the formula of their parts, losses, drop path, checkpointing, files; configurations."""

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils.checkpoint import CheckpointPolicy as POLICIES
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from dilated_attention.models import LongNetConfig, LongNetDecoder, LongNetEncoder, LongNetLM, sharded_cross_entropy
from dilated_attention.models.blocks import DropPath
from dilated_attention.modules import RingSettings, projections
from dilated_attention.pattern import LocalWindow, MaskFunction
from dilated_attention.pattern.blocks.base import OBJECT

SHAPE: dict[str, Any] = {"vocab_size": 17, "embed_dim": 16, "num_layers": 2, "num_heads": 4}
DILATED: dict[str, Any] = {"segment_lengths": (8, 32), "dilation_rates": (1, 4)}
NO_BRANCHES: dict[str, Any] = {"segment_lengths": (), "dilation_rates": ()}
KINDS: dict[str, dict[str, Any]] = {
    "dilated": DILATED,
    "dense": {"attention": "dense"},
    "block_sparse": {"attention": "block_sparse", "block_pattern": LocalWindow((11, 11))},
    # three layers take two entries in turn
    "mixed": {
        "num_layers": 3,
        "attention": (
            {"attention": "block_sparse", "block_pattern": LocalWindow((11, 11))},
            {"attention": "dilated", **DILATED, "head_offsets": ((0, 0, 0, 0), (3, 1, 2, 0)), "positions": "none"},
        ),
    },
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


def config_of(**changes: Any) -> LongNetConfig:
    return LongNetConfig(**{**SHAPE, **DILATED, **changes})


def model(**changes: Any) -> LongNetLM:
    torch.manual_seed(1)
    return LongNetLM(config_of(**changes)).eval()


def tokens_of(*shape: int) -> torch.Tensor:
    return torch.randint(17, shape, generator=torch.Generator().manual_seed(1))


def reference(model: LongNetLM, tokens: torch.Tensor) -> torch.Tensor:
    """Logits written down part by part, with attention from the dense multiplicities; float64."""
    config = model.config
    x = model.embedding.weight[tokens] * (config.embed_dim**0.5 if config.scale_embedding else 1.0)
    n, heads, dim = tokens.shape[1], config.num_heads, config.head_dim
    seen = torch.ones(n, n).tril() if config.is_causal else torch.ones(n, n)
    angles = torch.arange(n)[:, None] * 10000.0 ** -(torch.arange(0, dim, 2).double() / dim)

    def rotate(y: torch.Tensor) -> torch.Tensor:
        first, second = y.chunk(2, -1)
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)

    entries = [{}] if isinstance(config.attention, str) else config.attention
    for depth, block in enumerate(model.decoder.blocks):
        layer = replace(config, **entries[depth % len(entries)])
        m = layer.pattern.dense_mask(n, n, heads).double() * seen
        inner, a = block.attention_norm(x), block.attention
        q, k, v = (linear(inner).unflatten(-1, (-1, dim)).transpose(1, 2) for linear in (a.q_proj, a.k_proj, a.v_proj))
        if config.qk_norm:
            q, k = a.q_norm(q), a.k_norm(k)
        if layer.positions == "rotary":
            q, k = rotate(q), rotate(k)
        k, v = (y.repeat_interleave(heads // y.shape[1], dim=1) for y in (k, v))
        weights = m * (q @ k.mT / dim**0.5).exp()
        out = (weights @ v / weights.sum(-1, keepdim=True).clamp_min(1e-300)).transpose(1, 2).flatten(2)
        x = x + a.out_proj(a.inner_attn_ln(out) if config.sub_norm else out)
        inner, ffn = block.ffn_norm(x), block.ffn
        inner = F.silu(ffn.gate(inner)) * ffn.up(inner) if config.ffn == "swiglu" else getattr(F, config.ffn)(ffn.up(inner))
        x = x + ffn.down(ffn.norm(inner) if config.sub_norm else inner)
    x = model.decoder.norm(x) if config.final_norm else x
    return x @ (model.embedding.weight if config.tie_embeddings else model.output.weight).T


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_formula_of_the_parts_and_losses_those_of_logits(kind: str, style: str, is_causal: bool, tmp_path: Path) -> None:
    config = LongNetConfig(**SHAPE | KINDS[kind] | STYLES[style], is_causal=is_causal)
    torch.manual_seed(0)
    lm, tokens = LongNetLM(config, dtype=torch.float64).eval(), tokens_of(2, 37)
    logits = lm(tokens)
    torch.testing.assert_close(logits, reference(lm, tokens), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(lm(tokens, targets=tokens), F.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
    assert torch.equal(lm(tokens.int(), targets=tokens.int()), lm(tokens, targets=tokens))
    parts = [tokens[:1, :17], tokens[:1, 17:]]
    packed = lm(tokens[:1], cu_seqlens=torch.tensor([0, 17, 37], dtype=torch.int32))
    torch.testing.assert_close(packed, torch.cat([lm(part) for part in parts], 1), atol=1e-10, rtol=1e-10)
    lm.save_pretrained(tmp_path / "a" / "b")
    loaded = LongNetLM.from_pretrained(tmp_path / "a" / "b")
    assert loaded.config == config and not loaded.training and all(parameter.requires_grad for parameter in loaded.parameters())
    torch.testing.assert_close(loaded(tokens), logits, atol=1e-12, rtol=0)
    assert LongNetLM.from_pretrained(tmp_path / "a" / "b", dtype=torch.bfloat16).embedding.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("ring", [None, RingSettings.of({})])
def test_layers_that_rotate_alike_share_their_tables(ring: RingSettings | None, recomputes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    stack = LongNetDecoder(config_of(num_layers=5), ring=ring, checkpoint_activations=recomputes)
    # a layer that somebody has changed
    stack.blocks[3].attention.rotary_base = 500.0
    x, bounds = torch.randn(1, 37, 16), torch.tensor([0, 17, 37], dtype=torch.int32)
    made: list[float] = []
    real = projections.rotary_tables
    monkeypatch.setattr(projections, "rotary_tables", lambda *a: made.append(a[4]) or real(*a))
    for cu_seqlens in (None, bounds):
        out = stack(x, cu_seqlens=cu_seqlens)
        out.sum().backward()
        # one table of each kind; a checkpointed block keeps none, and makes it twice
        assert (len(made) == 10) if recomputes else (made == [10000.0, 500.0])
        grads = [parameter.grad for parameter in stack.parameters()]
        y, made[:], _ = x, [], stack.zero_grad()
        for block in stack.blocks:
            y = block(y, cu_seqlens=cu_seqlens, seq_len=None if ring is None else 37)
        stack.norm(y).sum().backward()
        assert len(made) == 5 and torch.equal(stack.norm(y), out)
        assert all(torch.equal(a, p.grad) for a, p in zip(grads, stack.parameters(), strict=True))
        made[:], _ = [], stack.zero_grad()


def keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> POLICIES:
    """A policy that finds what was multiplied again by its order."""
    return POLICIES.MUST_SAVE if op is torch.ops.aten.mul.Tensor else POLICIES.PREFER_RECOMPUTE


def test_hooks_between_layers_may_change_rows_and_checkpoint_blocks() -> None:
    """What hooks do to a block is computed as by blocks that are called one by one: each has tables of its own rows, made again."""
    torch.manual_seed(3)
    stack, x = LongNetDecoder(config_of(num_layers=3)), torch.randn(1, 20, 16)
    want = stack(x)
    for block in stack.blocks:
        composable_checkpoint(block, context_fn=functools.partial(create_selective_checkpoint_contexts, keep_products))
    grads = [torch.autograd.grad(y.sum(), [*stack.parameters()]) for y in (want, stack(x))]
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
    stack = LongNetDecoder(config_of(num_layers=3))
    for change in (lambda y: y[:, :10], lambda y: torch.cat([y, y], 1)):
        handle = stack.blocks[0].register_forward_hook(lambda block, given, y, change=change: change(y))
        out = stack(x)
        handle.remove()
        y = change(stack.blocks[0](x))
        for block in stack.blocks[1:]:
            y = block(y)
        assert torch.equal(out, stack.norm(y))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_loss_in_chunks_is_the_whole_cross_entropy(chunk: int | None, device: str) -> None:
    hidden = torch.randn(2, 40, 16, dtype=torch.float64, device=device, requires_grad=True)
    # 50 is not a multiple of 8: on a GPU the weight gets six rows of zeros, which must not take part
    weight = torch.randn(50, 16, dtype=torch.float64, device=device, requires_grad=True)
    targets = torch.randint(50, (2, 40), device=device)
    targets[0, 5] = -100
    loss = sharded_cross_entropy(hidden, weight, targets, chunk=chunk)
    whole = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())
    # float64, as its tensors
    torch.testing.assert_close(loss, whole, atol=1e-13, rtol=1e-13)
    for got, want in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(whole, (hidden, weight)), strict=True):
        torch.testing.assert_close(got, want, atol=1e-13, rtol=1e-13)
    assert sharded_cross_entropy(hidden, weight, torch.full_like(targets, -100), chunk=chunk) == 0
    with torch.autocast(device, torch.bfloat16):
        rounded = sharded_cross_entropy(hidden.float(), weight.float(), targets, chunk=chunk)
    torch.testing.assert_close(rounded.double(), whole, atol=0.05, rtol=0)


def test_a_model_with_weights_tied_by_hand_is_saved_whole(tmp_path: Path) -> None:
    lm, tokens = model(tie_embeddings=False, head_offsets=[[0, 0, 0, 0], [2, 1, 0, 1]]), tokens_of(1, 40)
    assert lm.output is not None
    lm.output.weight = lm.embedding.weight
    lm.decoder.blocks[0].attention.q_proj.weight = torch.nn.Parameter(torch.randn(16, 16).T)
    lm.save_pretrained(tmp_path)
    torch.testing.assert_close(LongNetLM.from_pretrained(tmp_path)(tokens), lm(tokens))


def test_a_configuration_goes_to_json_and_back(tmp_path: Path) -> None:
    for kind in KINDS.values():
        config = LongNetConfig(**SHAPE | kind)
        config.save(tmp_path / "config.json")
        values = config.to_dict()
        assert LongNetConfig.from_dict(values) == LongNetConfig.load(tmp_path / "config.json") == config
        assert json.loads(json.dumps(values)) == values
    # the last one is the mixed one; patterns are written as their specs
    assert values["attention"][0]["block_pattern"] == LocalWindow((11, 11)).spec() and hash(config) == hash(LongNetConfig.from_dict(values))
    with pytest.raises(ValueError, match="names a function or a tensor of one process"):
        LongNetConfig.from_dict({**values, "attention": [{"attention": "block_sparse", "block_pattern": f'"{OBJECT}1"'}]})
    with pytest.raises(ValueError, match="unknown keys segment_length"):
        LongNetConfig.from_dict({**values, "segment_length": [1]})
    with pytest.raises(ValueError, match="configuration has no embed_dim, num_layers; LongNetConfig needs it"):
        LongNetConfig.from_dict({name: value for name, value in values.items() if name not in ("embed_dim", "num_layers")})
    with pytest.raises(TypeError, match=r"configuration is \[1\] \(list\)"):
        LongNetConfig.from_dict([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"block_pattern is .* cannot be written to a file"):
        LongNetConfig(**SHAPE, attention="block_sparse", block_pattern=MaskFunction(lambda b, h, i, j: i >= j) | LocalWindow(3)).to_dict()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (NO_BRANCHES, "segment_lengths is empty"),
        ({"attention": "sparse"}, "attention is 'sparse'"),
        ({"attention": "dense"}, r"segment_lengths is \(8, 32\) and attention is 'dense', which has none; .* use attention='dilated'"),
        ({"attention": "ring_block_sparse", **NO_BRANCHES}, "block_pattern is None"),
        ({"attention": [], **NO_BRANCHES}, "attention has 0 entries and num_layers is 2; expected 1 to 2, which layers take in turn"),
        ({"attention": [DILATED, DILATED]}, "segment_lengths is .* which has none; leave it out"),
        ({"attention": [DILATED, {"attention": "sparse"}], **NO_BRANCHES}, r"attention\[1\]\['attention'\] is 'sparse'; expected"),
        ({"attention": [DILATED, {}], **NO_BRANCHES}, r"attention\[1\]: attention is 'dilated' and segment_lengths is empty"),
        (
            {"attention": [DILATED | {"window": 8}], **NO_BRANCHES},
            r"attention\[0\] has 'window'; expected some of attention, segment_lengths",
        ),
        (
            {"attention": [DILATED, DILATED | {"positions": "xpos"}], **NO_BRANCHES},
            r"attention\[1\]\['positions'\] is 'xpos'; expected one of 'none', 'rotary'",
        ),
        (
            {"attention": [DILATED | {"positions": "rotary"}], "positions": "none", **NO_BRANCHES},
            r"attention\[0\]\['positions'\] is 'rotary'; expected",
        ),
        *(
            (
                {"attention": [{"attention": "dense", name: number}], **NO_BRANCHES},
                rf"attention\[0\]: {name} is .* which has none; leave it out",
            )
            for name in ("segment_lengths", "dilation_rates")
            for number in (torch.tensor(8), np.array(8), np.int64(8))
        ),
        ({"attention": [{"attention": "dense", "tail": "zero_keys"}], **NO_BRANCHES}, r"attention\[0\]: tail is 'zero_keys' and attention"),
        ({"norm": "batch_norm"}, "norm is 'batch_norm'"),
        ({"bias": 1}, "bias"),
        ({"drop_path": 1.5}, "drop_path is 1.5"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"embed_dim": 18, "positions": "none"}, "embed_dim is 18 and num_heads is 4"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3"),
        ({"dilation_rates": (1, 33)}, "dilation_rates"),
        ({"rotary_base": float("nan")}, "rotary_base is nan"),
        ({"positions": "none", "rotary_base": 500.0}, "rotary_base is 500.0 and positions is 'none'.* use positions='rotary' or 'xpos'"),
        ({"xpos_scale_base": 50.0}, "positions is 'rotary', which has none; leave it out, or use positions='xpos'"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError if "bias" in changes else ValueError, match=text):
        config_of(**changes)


@pytest.mark.parametrize("options", [{"layout": "nonsense"}, {"timeout": -5}, {"exchange": 1j}, {"ranks_per_node": "two"}], ids=str)
def test_options_of_processes_are_checked_on_one_process(options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{next(iter(options))} is"):
        LongNetLM(config_of(), **options)


def test_what_a_model_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no one pattern; ask config\.layers\[i\]\.pattern"):
        _ = LongNetConfig(**SHAPE | KINDS["mixed"]).pattern
    with pytest.raises(TypeError, match=r"attention\[0\] is 'dense' \(str\); expected a dict such as"):
        config_of(attention=["dense"], **NO_BRANCHES)
    with pytest.raises(ValueError, match="is_causal is True; LongNetEncoder needs False: set it, or use LongNetDecoder"):
        LongNetEncoder(config_of())
    with pytest.raises(ValueError, match="LongNetLM needs the number of its tokens"):
        LongNetLM(config_of(vocab_size=None))
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'colour'; it accepts backend, group"):
        LongNetLM(config_of(), colour="red")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="generate needs is_causal=True"):
        model(is_causal=False).generate(tokens_of(1, 3), 2)
    assert torch.equal(model()(tokens_of(1, 6), seq_len=6), model()(tokens_of(1, 6)))
    with pytest.raises(ValueError, match="seq_len is 12 and there are 6 positions"):
        model()(tokens_of(1, 6), seq_len=12)
    sparse, nested = (
        torch.ones(1, 3, dtype=torch.long).to_sparse(),
        torch.nested.nested_tensor([torch.ones(3, dtype=torch.long)], layout=torch.jagged),
    )
    for tokens, error in (
        (torch.zeros(3, dtype=torch.long), ValueError), (torch.zeros(1, 3), TypeError), ([[1]], TypeError), (sparse, TypeError),
        (nested, TypeError),
    ):  # fmt: skip
        for call in (model(), model().hidden):
            with pytest.raises(error, match=r"tokens.*; expected"):
                call(tokens)


def test_drop_path_drops_whole_samples_and_documents_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    drop = DropPath(0.25)
    dropped = drop(torch.ones(4000, 2, 3))
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert (dropped == dropped[:, :1, :1]).all()
    assert abs(dropped.mean().item() - 1) < 0.05
    # some have no rows
    sizes = torch.arange(100) % 4
    packed = drop(torch.ones(1, 150, 2), F.pad(sizes.cumsum(0), (1, 0)).int())[0, :, 0]
    parts = [set(part.tolist()) for part in packed.split(sizes.tolist()) if len(part)]
    assert all(len(part) == 1 for part in parts) and len(set.union(*parts)) == 2
    drop.eval()
    assert torch.equal(drop(torch.ones(2, 2, 2)), torch.ones(2, 2, 2))
    rates = [block.drop_path.p for block in LongNetDecoder(config_of(num_layers=5, drop_path=0.4)).blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("sub_norm", [True, False])
def test_initial_weights_know_the_number_of_layers(sub_norm: bool) -> None:
    """MAGNETO's gain sqrt(log 2M); without its norms, what writes to the stream is divided by sqrt(2M), as in GPT-2."""
    torch.manual_seed(0)
    block = LongNetDecoder(config_of(num_layers=5, embed_dim=256, sub_norm=sub_norm)).blocks[0]
    written = math.sqrt(math.log(10)) if sub_norm else 1 / math.sqrt(10)
    inner = math.sqrt(math.log(10)) if sub_norm else 1.0
    for linear, gain in (
        (block.attention.out_proj, written),
        (block.ffn.down, written),
        (block.attention.v_proj, inner),
        (block.ffn.up, inner),
    ):
        assert linear.weight.std().item() == pytest.approx(gain * math.sqrt(2 / sum(linear.weight.shape)), rel=0.05)


@pytest.mark.slow
def test_checkpointed_and_compiled_stacks_have_the_same_gradients() -> None:
    grads, tokens = [], tokens_of(2, 24)
    for checkpointed, compiled in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        lm = LongNetLM(config_of(dropout=0.1, drop_path=0.1), checkpoint_activations=checkpointed)
        call = torch.compile(lm, backend="aot_eager", fullgraph=True) if compiled else lm
        torch.manual_seed(2)
        call(tokens, targets=tokens).backward()
        grads.append([parameter.grad for parameter in lm.parameters()])
    torch.testing.assert_close(grads[1], grads[0])
    assert all(grad is not None for grad in grads[2])
