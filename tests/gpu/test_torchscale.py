"""Loaded weights on a GPU: against the float64 restatement of what TorchScale computes, and packed slides against single ones."""

import pytest
import torch

from dilated_attention.integrations.torchscale import load_torchscale
from dilated_attention.models.images.slides import collate_slides
from tests.helpers import torchscale_reference as reference
from tests.helpers.torchscale_reference import Maker, Shape, double

pytestmark = [pytest.mark.gpu, pytest.mark.no_poison]

HEADS, SEGMENTS, RATES, GRID = 16, (64, 181, 512, 2048), (1, 2, 4, 16), 40
SHAPE = Shape(HEADS, SEGMENTS, RATES)
# 181 is not a multiple of 2: with more tiles TorchScale shifts, and so the restatement
LENGTHS = (170, 64, 1, 100)


def weights() -> dict[str, torch.Tensor]:
    # head dimension 48, Prov-GigaPath's
    maker = Maker(HEADS * 48)
    maker.slide_encoder(96, 2, ffn=1024)
    return maker.weights


def slide(num_tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tiles)
    coords = torch.randint(GRID * 256, (num_tiles, 2), generator=generator)
    return torch.randn(num_tiles, 96, generator=generator), coords


def model_of(**options: object) -> torch.nn.Module:
    settings = {"num_heads": HEADS, "segment_lengths": SEGMENTS, "dilation_rates": RATES, "grid_size": GRID}
    return load_torchscale(weights(), **settings, device="cuda", **options)


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-4), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)])
@pytest.mark.parametrize("packed", [False, True])
def test_slides_are_those_of_the_restatement(dtype: torch.dtype | None, tolerance: float, packed: bool) -> None:
    """float32, and a float32 model under autocast, as Prov-GigaPath runs. Class tokens are norms' outputs, of size 1."""
    exact = double(weights())
    slides = [slide(n) for n in LENGTHS]
    true = torch.cat([reference.slide_encoder(exact, t.double()[None], c.double()[None], SHAPE, grid=GRID)[0] for t, c in slides])
    model = model_of()
    with torch.no_grad(), torch.autocast("cuda", dtype=dtype or torch.float16, enabled=dtype is not None):
        if packed:
            found = model(*(x.cuda() for x in collate_slides(slides)[:2]), cu_seqlens=collate_slides(slides)[2].cuda())
        else:
            found = torch.cat([model(t[None].cuda(), c[None].cuda()) for t, c in slides])
    error = (found.double().cpu() - true).norm() / true.norm()
    assert error < tolerance


def test_gradients_in_float32() -> None:
    exact = {name: value.requires_grad_() for name, value in double(weights()).items()}
    tiles, coords = slide(150)
    reference.slide_encoder(exact, tiles.double()[None], coords.double()[None], SHAPE, grid=GRID)[0].square().sum().backward()
    model = model_of()
    model(tiles[None].cuda(), coords[None].cuda()).square().sum().backward()
    pairs = {
        "tile_embedding.weight": "patch_embed.proj.weight",
        "encoder.blocks.0.attention.q_proj.weight": "encoder.layers.0.self_attn.q_proj.weight",
        "encoder.blocks.1.ffn.down.weight": "encoder.layers.1.ffn.fc2.weight",
    }
    for mine, theirs in pairs.items():
        difference = model.get_parameter(mine).grad.double().cpu() - exact[theirs].grad
        assert difference.norm() < 1e-4 * exact[theirs].grad.norm()


def test_a_long_slide_runs_and_its_map_sums_to_at_most_one() -> None:
    settings = {"dtype": torch.bfloat16, "grid_size": 400}
    model = load_torchscale(weights(), device="cuda", **settings)
    assert model.config.encoder.segment_lengths == (1024, 5792, 32768, 185363, 1048576)
    coords = torch.stack((torch.arange(45_681) // 400, torch.arange(45_681) % 400), dim=-1)[None].cuda() * 256
    tiles = torch.randn(1, 45_681, 96, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        assert model(tiles, coords).isfinite().all()
    heat = model.attention_map(tiles, coords, average_heads=True)
    assert heat.shape == (1, 1, 45_682)
    assert 0 < float(heat.sum()) <= 1 + 1e-3
