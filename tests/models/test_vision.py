"""LongViT's positions, poolings, settings and errors. What its weights compute is in test_torchscale.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dilated_attention.models.images.vision import POOLINGS, LongViT, VisionConfig, longvit_segment_lengths, resized_positions


def tiny(**changes: Any) -> VisionConfig:
    return VisionConfig.longvit(**{"image_size": 48, "patch_size": 8, "embed_dim": 32, "num_layers": 1, "num_heads": 4} | changes)


def model_of(**changes: Any) -> LongViT:
    torch.manual_seed(0)
    return LongViT(tiny(**changes)).eval()


IMAGES = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))


def test_settings_of_longvit() -> None:
    assert longvit_segment_lengths(1024) == longvit_segment_lengths(512) == (64, 128, 256, 512, 1024)
    config = VisionConfig.longvit(4096).encoder
    assert config.segment_lengths == (1024, 2048, 4096, 8192, 16384)
    assert (config.final_norm, config.tail, config.head_offsets, config.mixture_grad) == (False, "zero_keys", "blocked", "detached")


@pytest.mark.parametrize(("pooling", "num_classes"), [*((pooling, None) for pooling in POOLINGS), ("mean_norm", 5), ("class_token", 5)])
def test_poolings_and_heads_are_those_of_the_saved_model(pooling: str, num_classes: int | None, tmp_path: Path) -> None:
    model = model_of(pooling=pooling, num_classes=num_classes)
    patches, out = model.features(IMAGES), model(IMAGES)
    assert patches.shape == (2, 37 if pooling == "class_token" else 36, 32)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (32,), eps=1e-5)

    true = {"mean_norm": norm(patches.mean(1)), "norm_mean": norm(patches).mean(1), "class_token": norm(patches[:, 0]), "none": patches}
    torch.testing.assert_close(out, true[pooling] if model.head is None else model.head(true[pooling]))
    model.save_pretrained(tmp_path)
    again = LongViT.from_pretrained(tmp_path)
    assert again.config == model.config
    torch.testing.assert_close(again(IMAGES), out)


def bicubic(at: torch.Tensor, size: int) -> torch.Tensor:
    """(len(at), size) weights of cubic convolution with a = −3/4 (Keys 1981, Eq. 4) around places ``at``, the border repeated."""
    weights = torch.zeros(len(at), size)
    for row, place in enumerate(at.tolist()):
        for k in range(int(place // 1) - 1, int(place // 1) + 3):
            d = abs(place - k)
            value = 1.25 * d**3 - 2.25 * d**2 + 1 if d <= 1 else -0.75 * (d**3 - 5 * d**2 + 8 * d - 4)
            weights[row, min(max(k, 0), size - 1)] += value
    return weights


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (12, 12), (4, 9)])
def test_patches_are_rows_of_the_image_and_positions_those_of_their_grid(rows: int, columns: int) -> None:
    """Position and pixels of patch (row, column) meet in token row · columns + column."""
    model, seen = model_of(pooling="none"), []
    model.encoder.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    image = torch.zeros(1, 3, 8 * rows, 8 * columns)
    image[:, :, 8:16, 24:32] = 1.0
    model(image)
    found = (seen[0][0] - model.patch_embedding.bias).detach()
    patch = 1 * columns + 3
    found[patch] -= model.patch_embedding.weight.sum((1, 2, 3)).detach()
    learned = model.positions.detach().unflatten(1, (6, 6))[0]
    if (rows, columns) == (6, 6):
        torch.testing.assert_close(found, learned.flatten(0, 1))
        return
    # LongViT's scale puts the centre of patch i of n at (i + 1/2)·6/(n + 0.1) − 1/2
    along_rows, along_columns = (bicubic((torch.arange(n) + 0.5) * 6 / (n + 0.1) - 0.5, 6) for n in (rows, columns))
    expected = torch.einsum("ia,jb,abe->ije", along_rows, along_columns, learned).flatten(0, 1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_compiled_an_exported_and_a_mapped_model_compute_the_same() -> None:
    """Of images of another size than the learned positions, too."""
    torch._dynamo.reset()
    model, images = model_of(num_classes=3), IMAGES[..., :24, :40]
    graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    parameters = dict(model.named_parameters())
    results = [(out := call(images), *torch.autograd.grad(out.sin().sum(), list(parameters.values()))) for call in (model, graph)]
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(torch.export.export(model, (IMAGES,)).module()(IMAGES), model(IMAGES))

    def loss(parameters: dict[str, torch.Tensor], image: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (image[None],)).sin().sum()

    # the gradients of each image sum to those of the batch
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, images)
    torch.testing.assert_close([grad.sum(0) for grad in each.values()], list(results[0][1:]), atol=1e-5, rtol=1e-4)
    assert not torch.equal(each["head.weight"][0], each["head.weight"][1])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"image_size": 50}, "multiple of 8"),
        ({"pooling": "max"}, "pooling is 'max'"),
        ({"pooling": "none", "num_classes": 3}, "a class describes a whole image"),
        ({"norm_eps": 0.0}, "norm_eps"),
        (torch.zeros(1, 4, 48, 48), "3 channels"),
        (torch.zeros(1, 3, 48, 50), "multiples of patch_size = 8"),
        ([0], "list"),
    ],
)
def test_settings_and_images_that_do_not_fit(given: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        tiny(**given) if isinstance(given, dict) else model_of()(given)


def test_positions_of_another_image_size_keep_their_dtype_and_are_square() -> None:
    assert resized_positions(torch.zeros(1, 36, 4).bfloat16(), 12).dtype is torch.bfloat16
    with pytest.raises(ValueError, match="square image"):
        resized_positions(torch.zeros(1, 35, 4), 6)
