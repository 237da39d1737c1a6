"""Grid positions, and the slide encoder's batches, settings and errors. What its weights compute is in test_torchscale.py."""

import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dilated_attention.functional.fused_layers import plain_layers
from dilated_attention.models import LongNetConfig
from dilated_attention.models.images.slide_config import SlideEncoderConfig, segment_lengths_of
from dilated_attention.models.images.slide_encoder import SlideEncoder
from dilated_attention.models.images.slides import collate_slides, grid_positions, tile_step, wrong_step


def tiny(**changes: Any) -> SlideEncoderConfig:
    fields = {"embed_dim": 32, "num_layers": 2, "num_heads": 4, "in_dim": 12, "grid_size": 20, "dropout": 0.0, "drop_path": 0.0}
    return SlideEncoderConfig.gigapath(**fields | changes)


def model_of(config: SlideEncoderConfig, **options: Any) -> SlideEncoder:
    torch.manual_seed(0)
    return SlideEncoder(config, **options)


def slide(num_tiles: int, seed: int, grid: int = 20, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    coords = torch.randint(grid * 256, (num_tiles, 2), generator=generator)
    return torch.randn(num_tiles, 12, generator=generator, dtype=dtype), coords


def test_positions_are_exact_to_the_far_corner() -> None:
    """That they are rows of Prov-GigaPath's table: test_torchscale.py."""
    # the grid's size and narrow integers change nothing
    omega = 10000.0 ** (-torch.arange(192, dtype=torch.float64) / 192)
    true = torch.cat([f(p * omega) for p in (998, 999) for f in (torch.sin, torch.cos)])
    torch.testing.assert_close(grid_positions(torch.tensor([[999 * 256 + 255.0, 998 * 256]]), 768)[0].double(), true, atol=1e-6, rtol=0)
    narrow = torch.tensor([[0, 100], [5, 127]], dtype=torch.int8)
    assert torch.equal(grid_positions(narrow, 32, grid_size=16), grid_positions(narrow.float(), 32, grid_size=1000))


@pytest.mark.parametrize(
    ("coords", "error", "text"),
    [
        (torch.tensor([[-1, 0]]), ValueError, "from cell -1 to cell 0"),
        (torch.tensor([[0, 256_000]]), ValueError, "raise grid_size"),
        (torch.tensor([[float("nan"), 0.0]]), ValueError, "a tile has NaN or infinite coords; expected pixels"),
        (torch.tensor([[4096, 0]]).half(), TypeError, "does not hold pixel coordinates"),
    ],
)
def test_coordinates_that_have_no_position(coords: torch.Tensor, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        grid_positions(coords, 32)


def test_segment_lengths_of_prov_gigapath() -> None:
    assert segment_lengths_of() == (1024, 5792, 32768, 185363, 1048576)
    assert segment_lengths_of(250_000) == (1024, 4870, 23170, 110217, 524288)
    assert segment_lengths_of(2**20, 256) == (1024, 11585, 131072, 1482910, 16777216)
    assert segment_lengths_of(8192, 256) == (1024,) * 5
    assert all(type(length) is int for length in segment_lengths_of())
    for sizes in ((256, 256), (0, 256), (1024.0, 256)):
        with pytest.raises((ValueError, TypeError)):
            segment_lengths_of(*sizes)


@pytest.mark.parametrize("global_pool", [False, True])
def test_slides_of_unequal_length_in_one_batch_equal_one_by_one(global_pool: bool) -> None:
    model = model_of(tiny(global_pool=global_pool, max_wsi_size=256 * 8), dtype=torch.float64).eval()
    slides = [slide(n, seed, dtype=torch.float64) for seed, n in enumerate((37, 1, 90, 64, 11))]
    tiles, coords, bounds = collate_slides(slides)
    assert bounds.tolist() == [0, 37, 38, 128, 192, 203]
    close: dict[str, Any] = {"atol": 1e-10, "rtol": 1e-8}
    packed, alone = model(tiles, coords, cu_seqlens=bounds), torch.cat([model(one[None], places[None]) for one, places in slides])
    results = [[x, *torch.autograd.grad(x.square().sum(), list(model.parameters()))] for x in (packed, alone)]
    torch.testing.assert_close(*results, **close)
    every = [torch.cat(each) for each in zip(*(model(one[None], at[None], all_layers=True) for one, at in slides), strict=True)]
    torch.testing.assert_close(model(tiles, coords, cu_seqlens=bounds, all_layers=True), every, **close)
    vectors = model.features(tiles, coords, cu_seqlens=bounds)
    torch.testing.assert_close(vectors, torch.cat([model.features(one[None], at[None]) for one, at in slides], 1), **close)
    if global_pool:
        pooled = torch.stack([model.norm(x.mean(0)) for x in vectors[0].split([37, 1, 90, 64, 11])])
        torch.testing.assert_close(pooled, packed, **close)
    equal = [slide(20, seed, dtype=torch.float64) for seed in range(3)]
    tiles, coords, bounds = collate_slides(equal)
    torch.testing.assert_close(model(*map(torch.stack, zip(*equal, strict=True))), model(tiles, coords, cu_seqlens=bounds), **close)
    # a slide without tiles is its class token alone
    batch = dict(zip(("tiles", "coords", "cu_seqlens"), collate_slides([equal[0], slide(0, 1, dtype=torch.float64)]), strict=True))
    if global_pool:
        with pytest.raises(ValueError, match="no tiles"):
            model(**batch)
    else:
        assert model(**batch).isfinite().all()


@pytest.mark.parametrize(
    ("global_pool", "changes"),
    [
        (False, {"mixture_grad": "exact"}),
        (True, {"num_classes": 3}),
        (False, {"class_names": ["benign", "tumour"]}),
    ],
)
def test_vectors_or_logits_of_a_head_are_those_of_the_saved_model(global_pool: bool, changes: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(tiny(global_pool=global_pool, **changes)).eval()
    tiles, coords, bounds = collate_slides([slide(n, n) for n in (20, 30)])
    out, vectors = model(tiles, coords, cu_seqlens=bounds), model.embed(tiles, coords, cu_seqlens=bounds)
    assert vectors.shape == model(tiles, coords, cu_seqlens=bounds, all_layers=True)[-1].shape == (2, 32)
    classes = len(changes.get("class_names", ())) or changes.get("num_classes")
    assert model.config.num_classes == classes and out.shape == (2, classes or 32)
    torch.testing.assert_close(out, vectors if model.head is None else vectors @ model.head.weight.T + model.head.bias)
    model.save_pretrained(tmp_path)
    again = SlideEncoder.from_pretrained(tmp_path)
    assert again.config == model.config
    torch.testing.assert_close(again(tiles, coords, cu_seqlens=bounds), out)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tiles": torch.zeros(1, 5, 11)}, "in_dim = 12"),
        ({"tiles": torch.zeros(5, 12)}, "expected .slides, tiles, in_dim."),
        ({"tiles": [[1.0]]}, "tiles and coords are list and Tensor"),
        ({"tiles": torch.zeros(1, 5, 12).long()}, r"tiles has dtype torch.int64; expected features of a floating dtype"),
        ({"coords": torch.zeros(1, 4, 2)}, "one pair of pixels for each tile"),
        ({"all_layers": "no"}, "all_layers is 'no' .*expected True or False"),
        ({"cu_seqlens": [0, 5]}, "as returned by collate_slides"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "rising bounds from 0 to the number of tiles, 5"),
        ({"cu_seqlens": torch.tensor([0, 6, 5])}, "rising bounds"),
        ({"tiles": torch.zeros(2, 5, 12), "coords": torch.zeros(2, 5, 2), "cu_seqlens": torch.tensor([0, 5])}, "packed slides are one row"),
    ],
)
def test_inputs_that_do_not_fit(change: dict[str, Any], text: str) -> None:
    batch = {"tiles": torch.zeros(1, 5, 12), "coords": torch.zeros(1, 5, 2)}
    with pytest.raises((ValueError, TypeError), match=text):
        model_of(tiny())(**batch | change)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"encoder": {"is_causal": True}}, "encoder.is_causal is True; a slide encoder needs False"),
        ({"encoder": {"attention": "ring_dilated"}}, "encoder.is_ring is True"),
        ({"encoder": {"embed_dim": 34, "num_heads": 1}}, "multiple of 4"),
        ({"encoder": 3}, "encoder is 3 .int.; expected a LongNetConfig"),
        ({"class_names": ("a", "b"), "num_classes": 3}, "class_names has 2 names and num_classes is 3"),
        ({"class_names": ("a", "a")}, "class_names is .*expected another name for each class"),
        ({"class_names": "ab"}, "expected a sequence of strings"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"pooling": "none", "num_classes": 2}, "pooling is 'none', global_pool is False and num_classes is 2"),
        ({"pooling": "mean"}, "pooling is 'mean'; expected one of 'none' or None"),
    ],
)
def test_configurations_that_cannot_be(fields: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        encoder = fields.get("encoder", {})
        if isinstance(encoder, dict):
            encoder = LongNetConfig(**tiny().encoder.to_dict() | encoder)
        SlideEncoderConfig(**fields | {"encoder": encoder})


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_slides_of_unequal_dtypes_collate_in_one_that_holds_both(kind: str) -> None:
    tensors = [slide(n, n) for n in (4, 7)]
    for first, second, wanted in (("<f2", "<f4", torch.float32), ("<f8", "<f2", torch.float64), (">f4", ">f2", torch.float32)):
        arrays = [
            (x.numpy().astype(dtype), at.numpy().astype(integer))
            for (x, at), dtype, integer in zip(tensors, (first, second), ("<u4", ">i8"), strict=True)
        ]
        slides: Any = arrays
        if kind == "tensor":
            slides = [(torch.tensor(x.astype(x.dtype.newbyteorder("="))), torch.tensor(at.astype("i8"))) for x, at in arrays]
        tiles, coords, bounds = collate_slides(slides)
        assert tiles.dtype is wanted and coords.dtype is torch.int64 and bounds.tolist() == [0, 4, 11]
        assert np.array_equal(tiles[0].double().numpy(), np.concatenate([x.astype("f8") for x, _ in arrays]))
        assert np.array_equal(coords[0].numpy(), np.concatenate([places for _, places in arrays]))


def test_labels_collate_beside_their_slides() -> None:
    slides = [slide(4, 0), slide(7, 1)]
    integers: tuple[Any, ...] = ((1, 0), (np.int64(1), np.int64(0)), (True, False), (torch.tensor(1), torch.tensor(0)))
    for labels, expected in (
        *((x, torch.tensor([1, 0])) for x in integers),
        ((1.0, 0.0), torch.tensor([1.0, 0.0])),
        (torch.eye(2), torch.eye(2)),
    ):
        tiles, _, _, found = collate_slides([(*one, label) for one, label in zip(slides, labels, strict=True)])
        assert found.dtype is expected.dtype and torch.equal(found, expected) and torch.equal(tiles, collate_slides(slides)[0])


T, C = torch.zeros(3, 12), torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("slides", "text"),
    [
        ([], "slides is empty"),
        ([5], "slides is .5. .*expected a list of .tiles, coords."),
        ([(T, torch.zeros(4, 2))], "slide 0 has tiles"),
        ([(T.to(x), C.to(x)) for x in ("cpu", "meta")], "tiles .* on cpu and on meta"),
        ([(T, C), (T[:, :11], C)], r"widths \[11, 12\]"),
        ([(T, C), ([[1.0] * 12], C)], "tiles of slide 1 is a list"),
        # beside others, where promotion would hide them
        ([(T, C), (T.long(), C)], "tiles of slide 1 has dtype torch.int64; expected features of a floating dtype"),
        ([(T, C), (T.numpy().astype(object), C)], "tiles of slide 1 has numpy's dtype object; expected floats"),
        ([(T, C), (T, C.half())], "coords of slide 1 has dtype torch.float16, which does not hold pixel coordinates"),
        ([(T, C), (T, C * float("nan"))], "slide 1 has NaN or infinite coords"),
        ([(T, C), (T / 0, C)], "slide 1 has 3 of 3 tiles with NaN or infinite features"),
        ([(T, C, 1), (T, C)], "slides have 2, 3 parts"),
        ([(T, C, "a"), (T, C, "b")], "expected numbers"),
        ([(T, C, torch.zeros(2)), (T, C, torch.zeros(3))], "expected numbers, or tensors of one shape"),
    ],
)
def test_slides_that_do_not_collate(slides: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        collate_slides(slides)


def grid_of(side: int, step: int = 256) -> torch.Tensor:
    return torch.cartesian_prod(torch.arange(side), torch.arange(side)) * step


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_features_of_any_floating_dtype(dtype: torch.dtype) -> None:
    model = model_of(tiny()).eval()
    tiles, coords = slide(40, 0)[0][None].to(dtype), grid_of(7)[None, :40]
    assert torch.equal(model(tiles, coords), model(tiles.float(), coords))
    assert model_of(tiny(), dtype=torch.bfloat16).eval()(tiles, coords).dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(tiles, coords), model(tiles.float(), coords))


def test_features_that_are_not_finite_are_refused() -> None:
    model = model_of(tiny())
    batch = collate_slides([(tiles, grid_of(7)[: len(tiles)]) for tiles in (slide(n, n)[0] for n in (20, 30))])
    batch[0][0, 24, 3], batch[0][0, 41, 0] = float("nan"), float("inf")
    for call in (model, model.embed, model.attention_map, model.attention_received):
        with pytest.raises(ValueError, match=r"slide 1 has 2 of 30 tiles .* features in torch\.float32, the first is tile 4"):
            call(*batch[:2], cu_seqlens=batch[2])
    with pytest.raises(ValueError, match="slide 0 has 2 of 50 tiles"):
        model(*batch[:2])
    # float64 features beyond float32's range
    with pytest.raises(ValueError, match="1 of 4 tiles with NaN or infinite features"):
        model(torch.tensor([[0.0] * 12] * 3 + [[1e300] * 12], dtype=torch.float64)[None], grid_of(2)[None])


def test_without_pooling_a_model_gives_vectors_of_tiles() -> None:
    model = model_of(tiny(pooling="none")).eval()
    tiles, coords, bounds = collate_slides([slide(n, n) for n in (40, 1, 23)])
    vectors = model.features(tiles, coords, cu_seqlens=bounds)
    assert model.norm is None and vectors.shape == (1, 64, 32) and torch.equal(model(tiles, coords, cu_seqlens=bounds), vectors)
    assert [x.shape for x in model(tiles, coords, cu_seqlens=bounds, all_layers=True)] == [vectors.shape] * 3


def contours(step: float) -> torch.Tensor:
    """Three pieces of tissue, each a grid of its own origin and shape, as CLAM and TRIDENT list them."""
    pieces = ((9, 4, 13.0, 7.0), (3, 12, 1000.0, 90.0), (1, 6, 70.0, 2500.0))
    return torch.cat([torch.cartesian_prod(torch.arange(w), torch.arange(h)) * step + torch.tensor([x, y]) for w, h, x, y in pieces])


def some(share: int) -> torch.Tensor:
    return grid_of(24)[torch.randperm(576, generator=torch.Generator().manual_seed(0))[:share]]


STEPS: dict[str, tuple[torch.Tensor, float | None]] = {
    "a sparse grid": (grid_of(16, 512), 512),
    "indices": (grid_of(16, 1), 1),
    "shares of the slide's side": (grid_of(16).float() / 100_000, 0.00256),
    "contours": (contours(512), 512),
    "one column": (torch.stack((torch.zeros(20), torch.arange(20) * 64.0), -1), 64),
    "two thirds of the tiles": (some(380), 256),
    "a tenth of the tiles": (some(57), None),
    "anywhere": (slide(200, 0)[1], None),
    "a tenth of a sparse grid": (2 * some(57), None),
    "few": (grid_of(2), None),
    "all the same": (torch.full((20, 2), 7), 0),
    "each twice": (torch.cat((grid_of(16), grid_of(16))), 0),
}


@pytest.mark.parametrize("coords", [[[0, 1]], torch.zeros(4, 3), torch.full((4, 2), float("nan"))])
def test_the_step_of_what_are_no_places_is_refused(coords: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"coords.*; expected"):
        tile_step(coords)


@pytest.mark.parametrize("case", STEPS)
def test_the_step_between_tiles(case: str) -> None:
    coords, wanted = STEPS[case]
    for places in (coords, coords[torch.randperm(len(coords), generator=torch.Generator().manual_seed(1))], coords.flip(1)):
        assert tile_step(places) == (None if wanted is None else pytest.approx(wanted, rel=1e-4))
    # scattered tiles that never touch are warned of
    is_sparse, bounds = case == "a tenth of a sparse grid", [0, len(coords)]
    text = "no two of the 57 tiles of slide 0 lie in neighbouring cells of 256 × 256 pixels"
    assert (text in (wrong_step(coords[None], bounds, 256) or "")) == is_sparse
    assert not (is_sparse and wrong_step(coords[None], bounds, 512)) and not wrong_step(coords[None, :0], [0, 0], 256)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16])
def test_integers_that_cannot_hold_the_tile_size_are_places(dtype: torch.dtype) -> None:
    coords = torch.tensor([[0, 9], [90, 3], [41, 77]])
    assert wrong_step(coords.to(dtype)[None], [0, 3], 256) == wrong_step(coords[None], [0, 3], 256) is not None


@pytest.mark.parametrize(
    ("step", "tile_size", "text"),
    [
        (1, 256, "1 pixels apart and tile_size is 256, so several tiles get one position.* tile_size=1, or multiply coords by 256$"),
        (224, 256, "several tiles get one position.* tile_size=224, or multiply coords by 1.14286$"),
        (512, 256, "512 pixels apart and tile_size is 256, so cells between them stay empty.* tile_size=512, or multiply coords by 0.5$"),
        (0.125, 256, "several tiles get one position; expected pixels at level 0: multiply coords by 2048$"),
        (0, 256, "the 256 tiles of slide 0 lie in 1 cells of 256 × 256 pixels, so several get one position"),
        (260, 256, None),
        (512, 512, None),
    ],
)
def test_tiles_whose_step_is_not_the_tile_size_are_warned_of_once(step: float, tile_size: int, text: str | None) -> None:
    model, tiles = model_of(tiny(grid_size=64, tile_size=tile_size)).eval(), torch.zeros(1, 256, 12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in (model, model.embed, model.attention_received):
            call(tiles, grid_of(16)[None] / 256 * step)
    assert len(caught) == (text is not None)
    if text is not None:
        assert re.search(text, str(caught[0].message)), caught[0].message


def test_each_slide_has_a_step_of_its_own() -> None:
    """Slides of a batch lie on each other, and packed slides follow one another: neither makes neighbours of their tiles."""
    model, few = model_of(tiny(grid_size=64)).eval(), STEPS["a tenth of the tiles"][0]
    tiles, coords, bounds = collate_slides([(torch.zeros(n * n, 12), grid_of(n)) for n in (5, 6)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tiles, coords, cu_seqlens=bounds)
        model(torch.zeros(3, 25, 12), grid_of(5).expand(3, 25, 2))
        model(torch.zeros(1, 57, 12), few[None])
    with pytest.warns(UserWarning, match="tiles of slide 1 are 1 pixels apart"):
        model(tiles, torch.cat((coords[:, :25], coords[:, 25:] // 256), 1), cu_seqlens=bounds)
    # indices of a small share of the tiles have no step
    with pytest.warns(UserWarning, match="the 57 tiles of slide 0 lie in 1 cells"):
        model_of(tiny(grid_size=64))(torch.zeros(1, 57, 12), few[None] // 256)


def weights_of(model: SlideEncoder, tiles: torch.Tensor, coords: torch.Tensor, layer: int) -> torch.Tensor:
    """(H, N, N) of one slide: which values reach which rows, by attending to the identity matrix a few columns at a time."""
    attention = model.encoder.blocks[layer].attention.attention
    caught: list[torch.Tensor] = []
    handle = attention.register_forward_pre_hook(lambda _, args, kwargs: caught.extend(args[:2]), with_kwargs=True)
    model(tiles[None], coords[None])
    handle.remove()
    q, k = caught
    N, D = q.shape[1], q.shape[3]
    identity = torch.nn.functional.pad(torch.eye(N), (0, -N % D))[None, :, None].expand(1, N, k.shape[2], -1)
    return torch.cat([attention(q, k, v)[0] for v in identity.split(D, -1)], -1)[..., :N].transpose(0, 1)


@pytest.mark.parametrize(("layer", "global_pool"), [(0, True), (-1, False), (-1, True)])
def test_attention_maps_and_what_tiles_receive_are_the_weights_of_the_block(layer: int, global_pool: bool) -> None:
    model = model_of(tiny(max_wsi_size=256 * 8, global_pool=global_pool)).eval()
    slides = [slide(n, seed) for seed, n in enumerate((90, 5, 64))]
    true = [weights_of(model, *one, layer) for one in slides]
    averaged = [x[:, 1:, 1:].mean(1) if global_pool else x[:, 0, 1:] for x in true]
    calls = (
        (model.attention_map, {}, [x[:, :1] for x in true]),
        (model.attention_map, {"query_rows": (0, 3, 5), "average_heads": True}, [x[:, [0, 3, 5]].mean(0) for x in true]),
        (model.attention_received, {"average_heads": False}, averaged),
        (model.attention_received, {}, [x.mean(0) for x in averaged]),
    )
    tiles, coords, bounds = collate_slides(slides)
    for call, options, expected in calls:
        packed = call(tiles, coords, layer=layer, cu_seqlens=bounds, **options)
        torch.testing.assert_close(packed, expected, atol=1e-6, rtol=1e-4)
        alone = call(slides[0][0][None], slides[0][1][None], layer=layer, **options)
        torch.testing.assert_close(alone[0], expected[0], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"query_rows": 6}, "slide 1 has places 0 to 5"), ({"query_rows": "class"}, "query_rows is 'class'"), ({"layer": 2}, "layer is 2")],
)
def test_maps_of_what_there_is_not(options: dict[str, Any], text: str) -> None:
    model = model_of(tiny()).eval()
    tiles, coords, bounds = collate_slides([slide(n, n) for n in (37, 5)])
    with pytest.raises(ValueError, match=text):
        model.attention_map(tiles, coords, cu_seqlens=bounds, **options)
    if "layer" in options:
        with pytest.raises(ValueError, match=text):
            model.attention_received(tiles, coords, cu_seqlens=bounds, **options)


@pytest.mark.slow
def test_a_compiled_model_refuses_tiles_outside_the_grid_too() -> None:
    model = model_of(tiny(num_layers=1)).eval()
    tiles, coords = (x[None] for x in slide(10, 1))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tiles, coords), model(tiles, coords))
    for wrong in (-300, 20 * 256):
        coords[0, 3] = wrong
        with pytest.raises(ValueError, match="coords reach from"):
            model(tiles, coords)
        with pytest.raises(RuntimeError, match="outside the grid"):
            compiled(tiles, coords)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="interprets kernels; tests/gpu/test_lengths.py compiles them")
def test_blocks_compile_ahead_what_they_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of a training step but the attention's, with the dtypes and constants of the launches."""
    from dilated_attention.backends.tiles.launch import NO_DEVICE, KernelLaunch

    started: set[Any] = set()
    launched: set[Any] = set()
    launch: Any = KernelLaunch.__call__

    def recorded(self: KernelLaunch, tensors: Any, device: int | None) -> None:
        (started if device == NO_DEVICE else launched).add((self.kernel.fn.__name__, self.dtypes, tuple(self.constants.items())))
        if device != NO_DEVICE:
            launch(self, tensors, 0)

    monkeypatch.setattr(KernelLaunch, "__call__", recorded)
    stack: Any = model_of(tiny(dropout=0.25, drop_path=0.1)).encoder.train()
    x = torch.randn(1, 24, 32, requires_grad=True)
    with plain_layers(True), torch.autocast("cpu", torch.bfloat16):
        for block in stack.blocks:
            block.compile_ahead(x)
        out = stack(x)
    with plain_layers(True):
        out.float().sum().backward()
    assert started == launched and len(started) == 10
