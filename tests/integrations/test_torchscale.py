"""Loaded weights of TorchScale, Prov-GigaPath and LongViT compute what tests/helpers/torchscale_reference.py says that those compute."""

import argparse
import copy
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dilated_attention import MultiheadDilatedAttention
from dilated_attention.integrations.torchscale import from_torchscale, load_torchscale
from dilated_attention.models import LongNetDecoder, LongNetEncoder, LongNetLM
from dilated_attention.models.images.vision import LongViT, resized_positions
from tests.helpers import torchscale_reference as reference
from tests.helpers.torchscale_reference import Maker, Shape, double

CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
STACK: dict[str, Any] = {"num_heads": 4, "segment_lengths": [16], "dilation_rates": [2]}
BRANCHES: dict[str, Any] = {"segment_lengths": [16, 64], "dilation_rates": [1, 4]}
CASES = [
    (37, 4, (8, 16, 64), (1, 2, 4)),
    (50, 3, (8, 32), (1, 8)),
    (61, 16, (16, 32, 128), (1, 4, 16)),
    (48, 5, (12, 24), (3, 4)),
    (101, 2, (1000,), (8,)),
    (7, 4, (8, 16), (1, 16)),
    (1, 4, (8, 16), (1, 2)),
    (29, 3, (4, 28, 64), (2, 4, 7)),
]


def made(maker: Maker) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """float32 weights, and the same as float64 leaves."""
    return maker.weights, {name: value.requires_grad_() for name, value in double(maker.weights).items()}


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attention_of(heads: int, **kwargs: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    maker = Maker(heads * 8)
    maker.attention("", **kwargs)
    return made(maker)


@pytest.mark.parametrize(("num_positions", "heads", "segments", "rates"), CASES)
@pytest.mark.parametrize("causal", [False, True])
def test_attention(num_positions: int, heads: int, segments: tuple[int, ...], rates: tuple[int, ...], causal: bool) -> None:
    weights, exact = attention_of(heads, head_dim=8 if causal else None)
    shape = Shape(heads, segments, rates, causal, 512.0 if causal else None)
    assert not reference.is_shifted(shape, num_positions)
    layer = load_torchscale(weights, num_heads=heads, segment_lengths=list(segments), dilation_rates=list(rates))
    assert isinstance(layer, MultiheadDilatedAttention)
    assert not layer.training
    x = normal(2, num_positions, heads * 8).requires_grad_()
    x_exact = x.detach().double().requires_grad_()
    out, _ = layer(x, is_causal=causal)
    true = reference.attention(exact, "", x_exact, shape)
    torch.testing.assert_close(out.double(), true, **CLOSE)
    grad = normal(*out.shape, seed=2)
    out.backward(grad)
    true.backward(grad.double())
    torch.testing.assert_close(x.grad.double(), x_exact.grad, atol=3e-5, rtol=1e-4)
    for name in ("v_proj.weight", "out_proj.bias", "inner_attn_ln.weight", "q_proj.weight", "k_proj.bias"):
        mine = layer.get_parameter(name).grad
        if causal and name[0] in "qk":
            # rows of q and k stand in the order of halves here, of neighbours there
            mine = mine.unflatten(0, (heads, 2, 4)).transpose(1, 2).flatten(0, 2)
        torch.testing.assert_close(mine.double(), exact[name].grad, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("subln", "last_norm"), [(True, True), (True, False), (False, True), (False, False)])
def test_encoder(subln: bool, last_norm: bool) -> None:
    maker = Maker(48)
    maker.layers("", 2, ffn=80, subln=subln, last_norm=last_norm)
    weights, exact = made(maker)
    settings: dict[str, Any] = {"kind": "encoder", "num_heads": 6, "segment_lengths": "[8, 32, 100]", "dilation_rates": "[1,2,4]"}
    if not (subln or last_norm):
        with pytest.raises(ValueError, match="post-norm"):
            load_torchscale(weights, **settings)
        settings["is_pre_norm"] = True
    model, x = load_torchscale(weights, **settings), normal(2, 45, 48)
    assert (model.config.sub_norm, model.config.final_norm, model.config.inner_dim) == (subln, last_norm, 80)
    torch.testing.assert_close(model(x).double(), reference.encoder(exact, x.double(), Shape(6, (8, 32, 100), (1, 2, 4))), **CLOSE)
    # a plain encoder is dense
    dense = load_torchscale(weights, kind="encoder", num_heads=6, attention="dense", is_pre_norm=True)
    torch.testing.assert_close(dense(x).double(), reference.encoder(exact, x.double(), Shape(6, (45,), (1,))), **CLOSE)


def language_model(tied: bool, head_dim: int | None = 8) -> Maker:
    maker = Maker(32)
    maker.layers("", 2, ffn=64, head_dim=head_dim)
    maker.tensor("embed_tokens.weight", 19, 32)
    maker.tensor("output_projection.weight", 19, 32)
    if tied:
        maker.weights["output_projection.weight"] = maker.weights["embed_tokens.weight"]
    return maker


@pytest.mark.parametrize(("tied", "prefix"), [(True, "decoder."), (False, "")])
def test_language_model_with_xpos(tied: bool, prefix: str) -> None:
    weights, exact = made(language_model(tied))
    shape = Shape(4, (16, 64), (1, 4), True, 256.0, embed_scale=32**0.5)
    named, kind = {prefix + name: value for name, value in weights.items()}, None if prefix else "decoder"
    model = load_torchscale(named, kind=kind, **STACK | BRANCHES, scale_embedding=True, xpos_scale_base=256.0)
    assert isinstance(model, LongNetLM) and (model.output is None) is tied
    tokens, targets = (torch.randint(19, (2, 53), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    logits = reference.language_model(exact, tokens, shape)
    torch.testing.assert_close(model(tokens).double(), logits, **CLOSE)
    # the gradients of the whole model, through the permutation of rows
    model(tokens, targets=targets).backward()
    nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    mine = model.decoder.blocks[0].attention.q_proj.weight.grad.unflatten(0, (4, 2, 4)).transpose(1, 2).flatten(0, 2)
    torch.testing.assert_close(mine.double(), exact["layers.0.self_attn.q_proj.weight"].grad, **CLOSE)


def test_an_encoder_with_tokens_is_a_language_model_both_ways() -> None:
    weights, exact = made(language_model(False, None))
    model = load_torchscale(weights, kind="encoder", **STACK)
    tokens = torch.arange(19)[None]
    assert not model.config.is_causal
    torch.testing.assert_close(model(tokens).double(), reference.language_model(exact, tokens, Shape(4, (16,), (2,))), **CLOSE)
    without = load_torchscale(weights, kind="encoder", **STACK, ignore=["embed_tokens", "output_projection"])
    assert isinstance(without, LongNetEncoder)


# slides


def slide_weights(layers: int = 2) -> Maker:
    maker = Maker(32)
    maker.slide_encoder(20, layers, ffn=64)
    return maker


def slide(num_tiles: int, seed: int, grid: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tiles, 20, generator=generator), torch.rand(num_tiles, 2, generator=generator) * grid * 256


SLIDE: dict[str, Any] = {"num_heads": 4, "segment_lengths": [8, 16, 64], "dilation_rates": [1, 2, 4], "grid_size": 12}
SLIDE_SHAPE = Shape(4, (8, 16, 64), (1, 2, 4))


@pytest.mark.parametrize("global_pool", [False, True])
def test_slide_encoder(global_pool: bool, tmp_path: Path) -> None:
    """From a dict, and from a file with the table of positions."""
    weights, exact = made(slide_weights())
    batch = tiles, coords = [torch.stack(x) for x in zip(slide(43, 1), slide(43, 2), strict=True)]
    result, *states = reference.slide_encoder(exact, tiles.double(), coords.double(), SLIDE_SHAPE, grid=12, global_pool=global_pool)
    model = load_torchscale({"model": weights}, **SLIDE, global_pool=global_pool)
    torch.testing.assert_close(model(*batch).double(), result, **CLOSE)
    torch.testing.assert_close([x.double() for x in model(*batch, all_layers=True)], states, **CLOSE)
    file = tmp_path / "slide_encoder.pth"
    torch.save({"model": weights | {"pos_embed": reference.grid_table(12, 32).float()[None]}, "epoch": 3, "optimizer": {"state": {}}}, file)
    assert torch.equal(load_torchscale(file, **SLIDE, global_pool=global_pool, ignore=["pos_embed"])(*batch), model(*batch))
    with pytest.raises(ValueError, match=r"1 of \d+ weights have no place in this model: pos_embed; leave them out with ignore="):
        load_torchscale(file, **SLIDE)
    # a new head
    headed = load_torchscale(weights, **SLIDE, global_pool=global_pool, num_classes=3)
    assert headed(*batch).shape == (2, 3) and headed.head.weight.std() > 0 and not headed.head.bias.any()
    assert torch.equal(headed.embed(*batch), model(*batch))


# LongViT


def longvit_weights(prefix: str, **norms: str) -> Maker:
    maker = Maker(32)
    maker.longvit(4, 6, 2, ffn=64, prefix=prefix)
    for name in norms.values():
        maker.norm(name)
    return maker


VIT: dict[str, Any] = {"num_heads": 4, "segment_lengths": [8, 64], "dilation_rates": [1, 4]}


def patches(exact: dict[str, torch.Tensor], prefix: str, images: torch.Tensor) -> torch.Tensor:
    inner = {name.removeprefix(prefix): value for name, value in exact.items()}
    return reference.longvit(inner, images.double(), Shape(4, (8, 64), (1, 4)))


def test_longvit_as_a_bare_backbone_or_a_classifier() -> None:
    weights, exact = made(longvit_weights(""))
    model, images = load_torchscale(weights, **VIT), normal(2, 3, 24, 24)
    assert isinstance(model, LongViT) and (model.config.image_size, model.config.pooling) == (24, "none")
    torch.testing.assert_close(model(images).double(), patches(exact, "", images), **CLOSE)
    maker = longvit_weights("model.", norm="fc_norm")
    maker.linear("head", 5, 32)
    weights, exact = made(maker)
    model = load_torchscale({f"module.{name}": value for name, value in weights.items()}, **VIT)
    pooled = reference.norm(exact, "fc_norm", patches(exact, "model.", images).mean(1), 1e-5)
    torch.testing.assert_close(model(images).double(), reference.linear(exact, "head", pooled), **CLOSE)
    # what an epsilon changes is below the tolerance
    assert model.config.norm_eps == 1e-5


def test_longvit_as_its_pretraining_writes_it() -> None:
    backbone, exact = made(longvit_weights("backbone.", norm="backbone.norm"))
    head = {"head.mlp.0.weight": normal(4, 4), "head.last_layer.weight_g": normal(4, 1)}
    saved = {"student": {f"module.{name}": value for name, value in (backbone | head).items()}, "teacher": backbone | head, "epoch": 1}
    with pytest.raises(ValueError, match="part='teacher'"):
        load_torchscale(saved, **VIT)
    images = normal(1, 3, 24, 24)
    true = reference.norm(exact, "backbone.norm", patches(exact, "backbone.", images), 1e-6).mean(1)
    for part in ("teacher", "student"):
        model = load_torchscale(saved, part=part, **VIT)
        torch.testing.assert_close(model(images).double(), true, **CLOSE)
        assert model.config.norm_eps == 1e-6
    fresh = load_torchscale(backbone, num_classes=7, image_size=48, **VIT)
    assert (fresh.config.pooling, fresh.config.image_size, fresh.config.grid) == ("mean_norm", 48, 12)
    assert fresh(normal(1, 3, 48, 48)).shape == (1, 7)
    torch.testing.assert_close(fresh.positions, resized_positions(backbone["backbone.pos_embed"], 12))


# options that change no result of these tests: below the tolerance, in training or at another length
RATES: dict[str, Any] = {"drop_path": 0.2, "layer_norm_eps": 1e-3, "mixture_grad": "exact"}


@pytest.mark.parametrize(
    ("maker", "settings", "options"),
    [
        (lambda: language_model(False), STACK | {"kind": "decoder"}, RATES | {"dropout": 0.3, "attention_dropout": 0.4}),
        (slide_weights, SLIDE, RATES | {"dropout": 0.3, "norm_eps": 1e-4, "tile_size": 512}),
        (lambda: longvit_weights("model.", norm="fc_norm"), VIT, RATES | {"norm_eps": 1e-4}),
    ],
    ids=["decoder", "slides", "longvit"],
)
def test_options_reach_the_configuration(maker: Any, settings: dict[str, Any], options: dict[str, Any]) -> None:
    config = load_torchscale(maker().weights, **settings, **options).config
    found = {name: getattr(config if hasattr(config, name) else config.encoder, name) for name in options}
    assert found == options


# errors


def encoder_weights() -> dict[str, torch.Tensor]:
    maker = Maker(32)
    maker.layers("", 1, ffn=64)
    return maker.weights


ENCODER: dict[str, Any] = {"kind": "encoder", **STACK}


def with_more(**ndims: int) -> dict[str, torch.Tensor]:
    return encoder_weights() | {name.replace("__", "."): torch.zeros([2] * ndim) for name, ndim in ndims.items()}


def lacking(part: str) -> dict[str, Any]:
    return {name: value for name, value in encoder_weights().items() if part not in name}


def xpos_weights(**changes: Any) -> dict[str, Any]:
    return {**attention_of(4, head_dim=8)[0], **changes}


BAD: list[tuple[Any, dict[str, Any], str]] = [
    # what a model here cannot do
    *(
        (with_more(**{name: 2}), ENCODER, text)
        for name, text in (
            ("layers__0__ffn__A__fc1__weight", "multiway"),
            ("layers__1__moe_layer__gate__wg__weight", "mixture-of-experts"),
            ("layers__0__encoder_attn__q_proj__weight", "attends to an encoder's output"),
            ("embed_positions__weight", "start at 2"),
            ("layers__0__flat_param_0", "FSDP"),
        )
    ),
    (with_more(pooler__weight=2, mask_token=1), ENCODER, "2 of .* mask_token, pooler.weight; .*ignore="),
    # settings that are missing or wrong
    *(
        (encoder_weights(), ENCODER | change, text)
        for change, text in (
            ({"num_heads": None}, "num_heads is not given"),
            ({"num_heads": 5}, "must be a multiple of num_heads"),
            ({"segment_lengths": None}, "segment_lengths is not given"),
            ({"segment_lengths": "__import__('os').getcwd()"}, "expected integers in brackets"),
            ({"dilation_rates": [1, 2]}, "dilation_rates has 2"),
            ({"attention": "dense"}, "leave segment_lengths"),
            ({"attention": "sparse"}, "expected one of 'dilated', 'dense'"),
            ({"activation": "tanh"}, "activation is 'tanh'"),
            ({"scale_embedding": True}, "no embed_tokens"),
            ({"ignore": ["nothing"]}, "no weight's name starts"),
            ({"kind": None}, "kind='encoder' or kind='decoder'"),
            ({"kind": "retnet"}, "kind is 'retnet'"),
            ({"image_size": 3}, "image_size"),
            ({"xpos_scale_base": 256.0}, r"xpos_scale_base is 256\.0 and positions is 'none'"),
        )
    ),
    # weights that are missing, cut, doubled or left beside
    (lacking("fc2.bias"), ENCODER, r"no layers\.0\.ffn\.fc2\.bias"),
    (lacking("inner_attn_ln"), ENCODER, "expected both or none"),
    ({k: v for k, v in encoder_weights().items() if k[:10] != "layer_norm"}, ENCODER | {"kind": "decoder"}, "normalise after each layer"),
    (encoder_weights() | {"layer_norm.bias": torch.zeros(32).double()}, ENCODER, r"float32, torch\.float64; say which with dtype="),
    (encoder_weights() | {"layer_norm.weight": torch.zeros(3)}, ENCODER, r"layer_norm\.weight has shape \(3,\), for \(32,\)"),
    (encoder_weights() | {"embed_tokens.weight": torch.zeros(9, 32)}, ENCODER | {"kind": "decoder"}, r"ignore=\['embed_tokens'\]"),
    ({"weight": torch.zeros(2)}, {}, "not weights of TorchScale"),
    (3, {}, "source is a int"),
    (xpos_weights(), STACK | {"num_heads": 2}, "check num_heads"),
    (attention_of(4)[0], STACK | {"xpos_scale_base": 256.0}, r"xpos_scale_base is 256\.0 and these weights have no xpos\.scale"),
    (xpos_weights(**{"k_proj.weight": torch.cat([xpos_weights()["k_proj.weight"]] * 2)}), STACK, "shape"),
    (xpos_weights(**{"_orig_mod.k_proj.bias": torch.zeros(32)}), STACK, "occurs twice"),
    ({"model": xpos_weights(), "k_proj.bias": torch.zeros(32)}, STACK, "weights under 'model' and also"),
    ({name: value.to(torch.int8) for name, value in attention_of(4)[0].items()}, STACK, "hold integers"),
]


@pytest.mark.parametrize("index", range(len(BAD)))
def test_weights_and_settings_that_are_missing_or_wrong_are_refused_by_name(index: int) -> None:
    weights, settings, text = BAD[index]
    with pytest.raises((ValueError, TypeError), match=text):
        load_torchscale(weights, **settings)


def test_an_encoder_is_no_decoder() -> None:
    weights = encoder_weights()
    theirs, ours = ({prefix + name: value for name, value in weights.items()} for prefix in ("encoder.", "decoder."))
    for names, kind in ((theirs, "decoder"), (ours, "encoder")):
        with pytest.raises(ValueError, match=rf"kind is '{kind}' and the names of these weights start with"):
            load_torchscale(names, kind=kind, **STACK)
    # of a file with both, the one that is asked for
    both = {**{name: value + 1 for name, value in theirs.items()}, **ours}
    found = load_torchscale(both, kind="decoder", ignore=["encoder."], **STACK)
    assert torch.equal(found.norm.weight, weights["layer_norm.weight"])
    with pytest.raises(ValueError, match=r"have no place in this model: encoder\."):
        load_torchscale(both, kind="decoder", **STACK)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("unpickling ran code",))


@pytest.mark.parametrize("other", [argparse.Namespace(encoder_layers=1), Bomb()])
def test_a_file_with_more_than_tensors_is_not_unpickled(tmp_path: Path, other: Any) -> None:
    torch.save({"model": encoder_weights(), "args": other}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"more than tensors.*weights_only=False") as caught:
        load_torchscale(tmp_path / "checkpoint.pt", kind="encoder", **STACK)
    assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
    with pytest.raises(FileNotFoundError, match="not a file"):
        load_torchscale(tmp_path / "nothing.pt")


def test_weights_of_a_safetensors_file_are_copied_and_trainable(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    weights = encoder_weights()
    before = copy.deepcopy(weights)
    safetensors.save_file(weights, tmp_path / "weights.safetensors")
    model = load_torchscale(str(tmp_path / "weights.safetensors"), **ENCODER, dtype=torch.bfloat16)
    assert model.blocks[0].ffn.up.weight.dtype is torch.bfloat16
    model = load_torchscale(weights, **ENCODER, drop_path=0.1, dropout=0.2)
    assert (model.config.dropout, model.config.drop_path) == (0.2, 0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.requires_grad
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in weights.items())


def test_where_torchscale_shifts_its_segments_a_warning_says_that_ours_differs() -> None:
    weights, exact = attention_of(4)
    shape = Shape(4, (9, 64), (2, 4))
    layer, x = load_torchscale(weights, num_heads=4, segment_lengths=[9, 64], dilation_rates=[2, 4]), normal(1, 40, 32)
    assert reference.is_shifted(shape, 40)
    with pytest.warns(UserWarning, match="40 positions in segments of 9 with dilation rate 2"):
        out, _ = layer(x)
    true = reference.attention(exact, "", x.double(), shape)
    # the first segment is where both say the same
    torch.testing.assert_close(out[:, :9].double(), true[:, :9], **CLOSE)
    assert (out.double() - true).abs().max() > 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x[:, :9])
        # every document by itself is short enough
        layer(x[:, :18], cu_seqlens=torch.tensor([0, 9, 18], dtype=torch.int32))


# modules, without TorchScale: the names and attributes that its modules have


class Stub(nn.Module):
    """A module with the weights and attributes given."""

    def __init__(self, weights: dict[str, torch.Tensor], **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)
        for name, value in weights.items():
            owner: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, Stub({}))
                owner = getattr(owner, part)
            owner.register_parameter(last, nn.Parameter(value))


def arguments(**changes: Any) -> SimpleNamespace:
    values = {
        "segment_length": [16, 64],
        "dilated_ratio": "[1, 4]",
        "layernorm_eps": 1e-5,
        "activation_fn": "gelu",
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "drop_path_rate": 0.2,
        "multiway": False,
        "deepnorm": False,
    }
    return SimpleNamespace(**values | changes)


def dressed(stack: Any, args: SimpleNamespace, **layer: Any) -> Any:
    """A stub of a stack with what one of TorchScale's has beside weights."""
    stack.args, stack.embed_scale = args, 1.0
    first = stack.layers
    inner = nn.ModuleList([getattr(first, name) for name in sorted(first._modules, key=int)])
    stack.layers = inner
    inner[0].normalize_before = True
    for name, value in layer.items():
        setattr(inner[0], name, value)
    inner[0].self_attn.num_heads = 4
    inner[0].self_attn.gathering = None
    return stack


def stack_stub(weights: dict[str, torch.Tensor], args: SimpleNamespace, **layer: Any) -> Any:
    return dressed(Stub(weights), args, **layer)


def test_from_a_module() -> None:
    weights = encoder_weights()
    for changes, told in (
        ({}, {}),
        (
            {"layernorm_eps": 1e-3, "attention_dropout": 0.3, "activation_fn": "relu"},
            {"layer_norm_eps": 1e-3, "attention_dropout": 0.3, "activation": "relu"},
        ),
    ):
        model = from_torchscale(stack_stub(weights, arguments(**changes)))
        expected = load_torchscale(weights, **ENCODER | BRANCHES, **{"dropout": 0.1, "drop_path": 0.2}, **told)
        assert model.config == expected.config and all(map(torch.equal, model.parameters(), expected.parameters()))
    wrapped = nn.Module()
    wrapped.module = stack_stub(weights, arguments(), encoder_attn=None)
    assert isinstance(from_torchscale(wrapped, mixture_grad="exact"), LongNetDecoder)
    # TorchScale's arguments name a base of XPOS whether or not there is XPOS
    assert from_torchscale(stack_stub(weights, arguments(xpos_scale_base=256))).config.positions == "none"
    for name in ("multiway", "deepnorm", "moe_freq", "rel_pos_buckets", "layernorm_embedding", "activation_dropout"):
        with pytest.raises(ValueError, match=f"args.{name} is"):
            from_torchscale(stack_stub(weights, arguments(**{name: 1})))
    stack = stack_stub(weights, arguments())
    stack.layers[0].normalize_before = False
    for module, text in (
        (stack, "normalize_before is False"),
        (nn.Linear(2, 2), "expected TorchScale's"),
        (weights, "use load_torchscale"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            from_torchscale(module)


def test_from_a_module_around_a_stack() -> None:
    """Its own settings and the stack's are those that loading its weights is given."""
    slides, images = slide_weights().weights, longvit_weights("model.", norm="fc_norm").weights
    own: dict[str, Any] = {"tile_size": 512, "global_pool": True}
    foreign = Stub(slides, slide_ngrids=30, **own)
    dressed(foreign.encoder, arguments(layernorm_eps=1e-3))
    foreign.norm.eps = 1e-4
    common: dict[str, Any] = {"num_heads": 4, **BRANCHES, "drop_path": 0.2, "layer_norm_eps": 1e-3, "norm_eps": 1e-4}
    assert from_torchscale(foreign).config == load_torchscale(slides, **common, **own, grid_size=30, dropout=0.1).config
    foreign = Stub(images)
    dressed(foreign.model.encoder, arguments(layernorm_eps=1e-3, dropout=0.0))
    foreign.fc_norm.eps = 1e-4
    assert from_torchscale(foreign).config == load_torchscale(images, **common).config
    foreign.model.encoder.args.dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout of Stub is not 0\.0"):
        from_torchscale(foreign)
    weights = attention_of(4)[0]
    foreign = Stub(weights, args=arguments(layernorm_eps=1e-3), num_heads=4, gathering=None, dropout=0.3)
    layer = from_torchscale(foreign, mixture_grad="exact")
    assert (layer.inner_attn_ln.eps, layer.attention.dropout, layer.attention.pattern.branches) == (1e-3, 0.3, ((16, 1), (64, 4)))
    assert layer.attention.mixture_grad == "exact"
    with pytest.raises(TypeError, match="is not dilated; load the encoder or decoder around it"):
        from_torchscale(Stub(weights, args=arguments(), num_heads=4))
