"""Grid positions, and the slide encoder's batches, settings and errors. What its weights compute is in test_torchscale.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.models import LongNetConfig
from dilated_attention.models.images.positions import grid_positions, sincos_table
from dilated_attention.models.images.slide_config import SlideEncoderConfig, segment_lengths_of
from dilated_attention.models.images.slide_encoder import SlideEncoder
from dilated_attention.models.images.slides import collate_slides
from tests.helpers import torchscale_reference as reference


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


# positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float64])
def test_positions_are_rows_of_prov_gigapaths_table(dtype: torch.dtype) -> None:
    grid, dim = 9, 24
    table = reference.grid_table(grid, dim)
    cells = torch.cartesian_prod(torch.arange(grid), torch.arange(grid))
    coords = (cells * 100 + torch.tensor([0, 99])).to(dtype)
    found = grid_positions(coords[None], dim, tile_size=100, grid_size=grid, dtype=torch.float64)[0]
    torch.testing.assert_close(found, table[1:], atol=1e-12, rtol=0)
    found = grid_positions(coords[None], dim, tile_size=100, grid_size=grid)
    torch.testing.assert_close(found[0], table[1:].float(), atol=1e-6, rtol=0)


def test_the_far_corner_of_the_grid_is_exact_in_float32() -> None:
    coords = torch.tensor([[999 * 256 + 255.0, 998 * 256]])
    omega = 10000.0 ** (-torch.arange(192, dtype=torch.float64) / 192)
    true = torch.cat([f(p * omega) for p in (998, 999) for f in (torch.sin, torch.cos)])
    torch.testing.assert_close(grid_positions(coords, 768)[0].double(), true, atol=1e-6, rtol=0)


def test_the_size_of_the_grid_moves_no_tile() -> None:
    coords = torch.tensor([[300, 4000]])
    assert torch.equal(grid_positions(coords, 32, grid_size=16), grid_positions(coords, 32, grid_size=1000))


@pytest.mark.parametrize(
    ("coords", "settings", "error", "text"),
    [
        (torch.tensor([[-1, 0]]), {}, ValueError, "from cell -1 to cell 0"),
        (torch.tensor([[0, 256_000]]), {}, ValueError, "raise grid_size"),
        (torch.tensor([[float("nan"), 0.0]]), {}, ValueError, "from cell -9"),
        (torch.tensor([[4096, 0]]).half(), {}, TypeError, "does not hold pixel coordinates"),
        (torch.tensor([4096, 0, 1]), {}, ValueError, r"coords is \(3,\)"),
        (torch.tensor([[0, 0]]), {"embed_dim": 30}, ValueError, "multiple of 4"),
        (torch.tensor([[0, 0]]), {"tile_size": 0}, ValueError, "tile_size"),
    ],
)
def test_coordinates_that_have_no_position(coords: torch.Tensor, settings: dict[str, int], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        grid_positions(coords, **{"embed_dim": 32} | settings)


def test_an_odd_table_is_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        sincos_table(4, 3)


# segment lengths


def test_segment_lengths_of_prov_gigapath() -> None:
    assert segment_lengths_of() == (1024, 5792, 32768, 185363, 1048576)
    assert segment_lengths_of(250_000) == (1024, 4870, 23170, 110217, 524288)
    assert segment_lengths_of(2**20, 256) == (1024, 11585, 131072, 1482910, 16777216)
    assert segment_lengths_of(8192, 256) == (1024,) * 5
    assert all(type(length) is int for length in segment_lengths_of())
    for sizes in ((256, 256), (0, 256), (1024.0, 256)):
        with pytest.raises((ValueError, TypeError)):
            segment_lengths_of(*sizes)


def test_the_preset_is_the_released_model() -> None:
    model = SlideEncoder(SlideEncoderConfig.gigapath(), device="meta")
    encoder = model.config.encoder
    assert (encoder.embed_dim, encoder.num_layers, encoder.num_heads, encoder.inner_dim) == (768, 12, 16, 3072)
    # what Prov-GigaPath prints of its LongNet; and the tile embedding, class token and norm
    assert sum(p.numel() for p in model.encoder.parameters()) == 85_148_160
    assert model.num_parameters == 85_148_160 + 1536 * 768 + 768 + 768 + 2 * 768
    shapes = [tuple(p.shape) for p in model.encoder.blocks[0].parameters()]
    assert shapes.count((768, 768)) == 4
    assert [tuple(p.shape) for p in model.encoder.norm.parameters()] == [(768,), (768,)]


# batches


@pytest.mark.parametrize("global_pool", [False, True])
def test_slides_of_unequal_length_in_one_batch_equal_one_by_one(global_pool: bool) -> None:
    config = tiny(global_pool=global_pool, max_wsi_size=256 * 8)
    model = model_of(config).eval()
    slides = [slide(n, seed) for seed, n in enumerate((37, 1, 90, 64, 11))]
    tiles, coords, bounds = collate_slides(slides)
    assert bounds.tolist() == [0, 37, 38, 128, 192, 203]
    together = model(tiles, coords, cu_seqlens=bounds)
    every = model(tiles, coords, cu_seqlens=bounds, all_layers=True)
    for index, (one, places) in enumerate(slides):
        torch.testing.assert_close(together[index], model(one[None], places[None])[0], atol=1e-6, rtol=1e-6)
        for mine, alone in zip(every, model(one[None], places[None], all_layers=True), strict=True):
            torch.testing.assert_close(mine[index], alone[0], atol=1e-6, rtol=1e-6)


def test_gradients_of_a_batch_are_those_of_its_slides() -> None:
    model = model_of(tiny(max_wsi_size=256 * 8), dtype=torch.float64).eval()
    slides = [slide(n, seed, dtype=torch.float64) for seed, n in enumerate((37, 5, 64))]
    tiles, coords, bounds = collate_slides(slides)
    model(tiles, coords, cu_seqlens=bounds).square().sum().backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for one, places in slides:
        model(one[None], places[None]).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, atol=1e-10, rtol=1e-8)
    assert together["class_token"].abs().max() > 0


def test_equal_slides_in_a_plain_batch() -> None:
    model = model_of(tiny()).eval()
    slides = [slide(20, seed) for seed in range(3)]
    batch = model(*(torch.stack(x) for x in zip(*slides, strict=True)))
    packed = model(*collate_slides(slides)[:2], cu_seqlens=collate_slides(slides)[2])
    torch.testing.assert_close(batch, packed, atol=1e-6, rtol=1e-6)


def test_a_slide_without_tiles_is_its_class_token_alone() -> None:
    slides = [slide(4, 0), slide(0, 1), slide(3, 2)]
    tiles, coords, bounds = collate_slides(slides)
    out = model_of(tiny()).eval()(tiles, coords, cu_seqlens=bounds)
    assert out.isfinite().all()
    with pytest.raises(ValueError, match="no tiles"):
        model_of(tiny(global_pool=True))(tiles, coords, cu_seqlens=bounds)


def test_dropout_and_drop_path_act_in_training_only() -> None:
    model = model_of(tiny(dropout=0.3, drop_path=0.5))
    batch = [x[None] for x in slide(30, 0)]
    assert not torch.equal(model(*batch), model(*batch))
    model.eval()
    assert torch.equal(model(*batch), model(*batch))


def test_checkpointed_activations_change_nothing() -> None:
    batch = [x[None] for x in slide(30, 0)]
    grads = []
    for checkpointed in (False, True):
        model = model_of(tiny(), checkpoint_activations=checkpointed)
        model(*batch).sum().backward()
        grads.append(model.tile_embedding.weight.grad)
    assert torch.equal(*grads)


def test_save_and_load(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = model_of(tiny(mixture_grad="exact", global_pool=True)).eval()
    model.save_pretrained(tmp_path)
    again = SlideEncoder.from_pretrained(tmp_path)
    assert again.config == model.config
    batch = [x[None] for x in slide(30, 0)]
    assert torch.equal(again(*batch), model(*batch))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tiles": torch.zeros(1, 5, 11)}, "in_dim = 12"),
        ({"tiles": torch.zeros(5, 12)}, "expected .slides, tiles, in_dim."),
        ({"coords": torch.zeros(1, 4, 2)}, "one pair of pixels for each tile"),
        ({"coords": torch.full((1, 5, 2), 1e9)}, "raise grid_size"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "rising bounds from 0 to the number of tiles, 5"),
        ({"cu_seqlens": torch.tensor([0, 6, 5])}, "rising bounds"),
        ({"cu_seqlens": torch.tensor([5])}, "rising bounds"),
        ({"tiles": torch.zeros(2, 5, 12), "coords": torch.zeros(2, 5, 2), "cu_seqlens": torch.tensor([0, 5])}, "packed slides are one row"),
    ],
)
def test_tensors_that_do_not_fit(change: dict[str, torch.Tensor], text: str) -> None:
    batch = {"tiles": torch.zeros(1, 5, 12), "coords": torch.zeros(1, 5, 2)}
    with pytest.raises(ValueError, match=text):
        model_of(tiny())(**batch | change)


def test_things_that_are_no_tensors() -> None:
    model = model_of(tiny())
    with pytest.raises(TypeError, match="list and Tensor"):
        model([[1.0]], torch.zeros(1, 1, 2))
    with pytest.raises(TypeError, match="as returned by collate_slides"):
        model(torch.zeros(1, 5, 12), torch.zeros(1, 5, 2), cu_seqlens=[0, 5])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"is_causal": True}, "encoder.is_causal is True"),
        ({"vocab_size": 9}, "encoder.vocab_size is 9"),
        ({"attention": "ring_dilated"}, "encoder.is_ring is True"),
        ({"embed_dim": 34, "num_heads": 1}, "multiple of 4"),
    ],
)
def test_encoders_that_are_none_of_a_slide(fields: dict[str, Any], text: str) -> None:
    shape = {"embed_dim": 32, "num_layers": 1, "num_heads": 4, "segment_lengths": (8,), "dilation_rates": (1,), "is_causal": False}
    with pytest.raises(ValueError, match=text):
        SlideEncoderConfig(encoder=LongNetConfig(**shape | fields))
    with pytest.raises(TypeError, match="expected a LongNetConfig"):
        SlideEncoderConfig(encoder=3)


@pytest.mark.parametrize(
    ("slides", "text"),
    [
        ([], "slides is empty"),
        ([(torch.zeros(3, 12), torch.zeros(4, 2))], "slide 0 has tiles"),
        ([(torch.zeros(3, 12), torch.zeros(3, 2)), (torch.zeros(3, 12).half(), torch.zeros(3, 2))], "tiles of these slides have different"),
    ],
)
def test_slides_that_do_not_collate(slides: list[tuple[torch.Tensor, torch.Tensor]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        collate_slides(slides)


# attention maps


def weights_of(model: SlideEncoder, tiles: torch.Tensor, coords: torch.Tensor, layer: int) -> torch.Tensor:
    """(H, N, N) of one slide: which values reach which rows, by attending to the identity matrix a few columns at a time."""
    attention = model.encoder.blocks[layer].attention
    caught: list[torch.Tensor] = []
    handle = attention.attention.register_forward_pre_hook(lambda _, args, kwargs: caught.extend(args[:2]), with_kwargs=True)
    model(tiles[None], coords[None])
    handle.remove()
    q, k = caught
    N, D = q.shape[1], q.shape[3]
    columns = []
    for first in range(0, N, D):
        v = torch.zeros_like(k)
        for d in range(min(D, N - first)):
            v[0, first + d, :, d] = 1.0
        columns.append(attention.attention(q, k, v)[0, :, :, : min(D, N - first)])
    return torch.cat(columns, dim=-1).transpose(0, 1)


@pytest.mark.parametrize("layer", [0, 1, -1])
def test_the_map_of_class_token_and_tiles(layer: int) -> None:
    model = model_of(tiny(max_wsi_size=256 * 8)).eval()
    tiles, coords = slide(90, 0)
    true = weights_of(model, tiles, coords, layer)
    rows = model.attention_map(tiles[None], coords[None], layer=layer, query_rows=[0, 5, 90])[0]
    torch.testing.assert_close(rows, true[:, [0, 5, 90]], atol=1e-6, rtol=1e-4)
    heat = model.attention_map(tiles[None], coords[None], layer=layer, average_heads=True)
    torch.testing.assert_close(heat[0, 0], true[:, 0].mean(0), atol=1e-6, rtol=1e-4)


def test_maps_of_a_batch_are_those_of_its_slides() -> None:
    model = model_of(tiny(max_wsi_size=256 * 8)).eval()
    slides = [slide(n, seed) for seed, n in enumerate((37, 5, 64))]
    tiles, coords, bounds = collate_slides(slides)
    for rows in ("cls", [0, 3]):
        together = model.attention_map(tiles, coords, cu_seqlens=bounds, query_rows=rows)
        for mine, (one, places) in zip(together, slides, strict=True):
            torch.testing.assert_close(mine, model.attention_map(one[None], places[None], query_rows=rows)[0], atol=1e-6, rtol=1e-4)
    with pytest.raises(ValueError, match="slide 1 has places 0 to 5"):
        model.attention_map(tiles, coords, cu_seqlens=bounds, query_rows=6)
    with pytest.raises(ValueError, match="query_rows is 'class'"):
        model.attention_map(tiles, coords, cu_seqlens=bounds, query_rows="class")
    with pytest.raises(ValueError, match="layer is 2"):
        model.attention_map(tiles, coords, cu_seqlens=bounds, layer=2)


@pytest.mark.slow
def test_a_compiled_model_refuses_tiles_outside_the_grid_too() -> None:
    model = model_of(tiny()).eval()
    tiles, coords = (x[None] for x in slide(10, 1))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tiles, coords), model(tiles, coords))
    for wrong in (-300, 20 * 256):
        coords[0, 3] = wrong
        with pytest.raises(ValueError, match="coords reach from"):
            model(tiles, coords)
        with pytest.raises(RuntimeError, match="outside the grid"):
            compiled(tiles, coords)


def test_coordinates_of_a_narrow_integer() -> None:
    coords = torch.tensor([[0, 100], [5, 127]], dtype=torch.int8)
    torch.testing.assert_close(grid_positions(coords, 8), grid_positions(coords.float(), 8))
