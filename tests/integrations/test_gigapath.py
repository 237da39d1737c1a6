"""The stand-in for gigapath.slide_encoder, called as pipelines call the original."""

from pathlib import Path

import pytest
import torch

from dilated_attention.integrations import gigapath
from dilated_attention.integrations.torchscale import load_torchscale
from tests.helpers import torchscale_reference as reference
from tests.helpers.torchscale_reference import Maker

SMALL = "gigapath_slide_enc2l64d"


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Maker, str]:
    """Weights of a small model of the family, and their file."""
    monkeypatch.setitem(gigapath._ARCHITECTURES, SMALL, (64, 2))
    maker = Maker(64)
    maker.slide_encoder(20, 2, ffn=256)
    torch.save({"model": maker.weights | {"pos_embed": reference.grid_table(12, 64).float()[None]}}, tmp_path / "slide_encoder.pth")
    return maker, str(tmp_path / "slide_encoder.pth")


@pytest.mark.parametrize("global_pool", [False, True])
def test_it_answers_as_the_original(weights: tuple[Maker, str], global_pool: bool) -> None:
    """With a list; what the loaded weights compute is in test_torchscale.py."""
    shape = {"max_wsi_size": 250_000, "global_pool": global_pool}
    model = gigapath.create_model(weights[1], SMALL, 20, slide_ngrids=12, **shape)
    # as the original: whoever does not train it says so
    assert model.training
    loaded = load_torchscale(weights[1], ignore=["pos_embed"], grid_size=12, dropout=0.25, drop_path=0.1, **shape)
    assert model.config == loaded.config
    batch = torch.randn(2, 43, 20), torch.rand(2, 43, 2) * 12 * 256
    (vectors,), states = model.eval()(*batch), model(*batch, all_layer_embed=True)
    assert torch.equal(vectors, loaded(*batch)) and isinstance(states, list)
    assert all(map(torch.equal, states, loaded(*batch, all_layers=True))) and len(states) == 3


def test_random_weights_only_where_they_are_asked_for(weights: tuple[Maker, str]) -> None:
    _, file = weights
    assert gigapath.create_model("", SMALL, 20)(torch.randn(1, 3, 20), torch.zeros(1, 3, 2))[0].shape == (1, 64)
    with pytest.raises(FileNotFoundError, match="no-such"):
        gigapath.create_model("no-such.pth", SMALL, 20)
    for arch, in_chans, layers in (("gigapath_slide_enc12l768d", 20, "12 of 768"), (SMALL, 1536, "2 of 64")):
        with pytest.raises(ValueError, match=f"2 layers of width 64 on 20 channels; {arch} with in_chans={in_chans} has {layers}"):
            gigapath.create_model(file, arch, in_chans)
    for name, options in (("in_chans", {"in_chans": -1}), ("slide_ngrids", {"slide_ngrids": 0}), ("drop_path_rate", {"drop_path_rate": 2})):
        with pytest.raises(ValueError, match=f"{name} is"):
            gigapath.create_model("", SMALL, **{"in_chans": 20} | options)
    with pytest.raises(ValueError, match="model_arch"):
        gigapath.create_model(file, "gigapath_slide_enc", 20)


def test_an_encoder_within_the_originals_classification_head(weights: tuple[Maker, str]) -> None:
    """As the original's fine-tuning saves it."""
    made = weights[0].weights
    held = {f"slide_encoder.{name}": value for name, value in made.items()} | {"classifier.0.weight": torch.zeros(2, 64)}
    options = {"grid_size": 12, "dropout": 0.25, "drop_path": 0.1}
    assert all(
        map(
            torch.equal, load_torchscale(held, ignore=["classifier"], **options).parameters(), load_torchscale(made, **options).parameters()
        )
    )
    with pytest.raises(ValueError, match=r"no place in this model: classifier\.0\.weight; leave them out with ignore="):
        load_torchscale(held, **options)


def test_the_released_file_is_downloaded(weights: tuple[Maker, str], monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked = []
    monkeypatch.setattr(hub, "hf_hub_download", lambda *where, **how: asked.append((where, how)) or weights[1])
    model = gigapath.create_model("hf_hub:prov-gigapath/prov-gigapath", SMALL, 20, "folder")
    assert asked == [(("prov-gigapath/prov-gigapath", "slide_encoder.pth"), {"local_dir": "folder"})]
    assert torch.equal(model.class_token, weights[0].weights["cls_token"][0, 0])
