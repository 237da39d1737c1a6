"""Equality of models with TorchScale's and Prov-GigaPath's own code, float32 on the CPU: of outputs, and of all weights' gradients."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks import copies
from benchmarks.report import Row
from dilated_attention.integrations.torchscale import from_torchscale, load_torchscale
from dilated_attention.parsing import UsageError

# the greatest difference allowed, over the greatest value
BOUNDS = {"output": 1e-5, "gradient": 1e-4}
# positions, heads, segment lengths, dilation rates, causal
CASES: list[tuple[int, int, tuple[int, ...], tuple[int, ...], bool]] = [
    (256, 8, (64, 128, 256), (1, 2, 4), False),
    (307, 16, (64, 128, 512), (1, 4, 16), True),
    (211, 3, (32, 64, 1024), (1, 8, 16), False),
    (128, 5, (24, 48), (3, 4), False),
    (97, 12, (1000, 2000), (1, 8), True),
    (13, 4, (16, 32), (1, 16), False),
    (2100, 16, (1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16), False),
]
Model = tuple[str, Callable[[], nn.Module], tuple[torch.Tensor, ...], dict[str, Any]]


def check(options: argparse.Namespace) -> None:
    """Raises UsageError where nothing can be compared."""
    if options.torchscale is None and options.gigapath is None:
        where = copies.URLS[copies.TORCHSCALE]
        raise UsageError(f"--tasks parity compares with nothing; expected --torchscale PATH, --gigapath PATH or both: git clone {where}")
    if max(options.tiles or [0]) > options.grid**2:
        raise UsageError(f"--tiles {max(options.tiles)} do not fit on a grid of {options.grid} × {options.grid}: raise --grid")
    for path, inside in ((options.torchscale, copies.TORCHSCALE), (options.gigapath, copies.GIGAPATH)):
        if path is not None:
            copies.find(path, inside)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each model. A difference beyond ``BOUNDS`` is a note that begins with "wrong"."""
    torch.manual_seed(0)
    if options.torchscale is not None:
        folder = copies.find(options.torchscale, copies.TORCHSCALE)
        with copies.imported(folder, (folder / copies.LONGVIT).parent):
            yield from (_compared(*model) for model in _torchscale())
            if (folder / copies.LONGVIT).is_file():
                yield from (_compared(*model) for model in _longvit())
    if options.gigapath is not None:
        folder = copies.find(options.gigapath, copies.GIGAPATH)
        # its package puts its own copy of TorchScale on the path
        with copies.imported(folder, folder / "gigapath"):
            yield from (_compared(*model) for model in _gigapath(options))


def _torchscale() -> Iterator[Model]:
    """Yields (label, make theirs, inputs, what else ``_compared`` takes)."""
    longnet, config = copies.load("torchscale.model.LongNet"), copies.load("torchscale.architecture.config")
    for N, heads, segments, rates, causal in CASES:
        role, width = "decoder" if causal else "encoder", heads * 8
        sizes = {"embed_dim": width, "attention_heads": heads, "ffn_embed_dim": 2 * width, "layers": 2}
        fields: dict[str, Any] = {f"{role}_{name}": value for name, value in sizes.items()}
        fields |= {"flash_attention": True, "segment_length": str(list(segments)), "dilated_ratio": str(list(rates))}
        label = f"{role}{' with XPOS' if causal else ''}: N {N}, {heads} heads, w {list(segments)}, r {list(rates)}"
        if causal:
            args = config.DecoderConfig(**fields, vocab_size=31, xpos_rel_pos=True, no_scale_embedding=False)
            inputs, how = torch.randint(31, (2, N)), {}
            make = lambda args=args, width=width: longnet.LongNetDecoder(args, embed_tokens=nn.Embedding(31, width))  # noqa: E731
        else:
            inputs, how = torch.randn(2, N, width), {"call": lambda theirs, x: theirs(None, token_embeddings=x)["encoder_out"]}
            make = lambda fields=fields: longnet.LongNetEncoder(config.EncoderConfig(**fields))  # noqa: E731
        yield label, make, (inputs,), {"gradients": True} | how


def _longvit() -> Iterator[Model]:
    module = copies.load("longvit")
    for height, width in ((1024, 1024), (512, 768)):
        label = f"LongViT of 1024 pixels, 2 of 12 layers, on {height} × {width}"
        make = lambda: module.LongViT(img_size=1024, patch_size=32, embed_dim=384, depth=2, num_heads=16)  # noqa: E731
        yield label, make, (torch.randn(1, 3, height, width),), {}


def _gigapath(options: argparse.Namespace) -> Iterator[Model]:
    """Weights are random unless ``options.weights`` is Prov-GigaPath's file."""
    module, grid, weights = copies.load("gigapath.slide_encoder"), options.grid, options.weights
    tiles = (options.tiles or [1201])[0]
    for pooled in (False, True):
        cells = torch.randperm(grid * grid)[:tiles]
        x = torch.randn(1, tiles, 1536), (torch.stack((cells // grid, cells % grid), dim=-1) * 256.0)[None]
        make = lambda pooled=pooled: module.gigapath_slide_enc12l768d(slide_ngrids=grid, global_pool=pooled)  # noqa: E731
        how = {} if weights is None else {"weights": weights, "grid_size": grid, "global_pool": pooled}
        yield f"slide encoder 12l768d, {tiles} tiles, {'mean' if pooled else 'class token'}", make, x, how
    make = lambda: module.LongNetViT(embed_dim=384, depth=3, slide_ngrids=grid, max_wsi_size=250_000)  # noqa: E731
    x = torch.randn(1, 300, 1536), torch.randint(grid * 256, (1, 300, 2)).float()
    yield "slide encoder 3l384d, max_wsi_size 250000", make, x, {"gradients": True}


def _compared(label: str, make: Callable[[], nn.Module], inputs: tuple[torch.Tensor, ...], how: dict[str, Any]) -> Row:
    gradients, call, weights = (how.pop(name, None) for name in ("gradients", "call", "weights"))
    theirs = make().eval()
    with torch.no_grad():
        # norms get other weights than ones and biases other values than zeros, so that a swapped pair shows
        for name, parameter in theirs.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(std=0.2).add_(1.0 if name.endswith("weight") else 0.0)
    if weights is not None:
        theirs.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True)["model"], strict=False)
    ours: Any = from_torchscale(theirs) if weights is None else load_torchscale(weights, **how)
    with torch.set_grad_enabled(bool(gradients)):
        expected, result = call(theirs, *inputs) if call else theirs(*inputs), ours(*inputs)
    expected = expected if isinstance(expected, torch.Tensor) else expected[0]
    errors = {"output": float((expected - result).detach().abs().max() / expected.detach().abs().max())}
    if gradients:
        factors = torch.randn_like(expected)
        (expected * factors).sum().backward()
        (result * factors).sum().backward()
        errors["gradient"] = _gradient_error(theirs, ours)
    beyond = [f"{name} differs by {error:.1e}" for name, error in errors.items() if not error <= BOUNDS[name]]
    return Row(name=label, case={"task": "parity"}, errors=errors, note=f"wrong: {', '.join(beyond)}" if beyond else "")


def _gradient_error(theirs: nn.Module, ours: nn.Module) -> float:
    """Returns the greatest relative difference of gradients. Theirs take the place of their weights, and are loaded as weights are."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    worst = 0.0
    for (name, mine), true in zip(ours.named_parameters(), from_torchscale(theirs).parameters(), strict=True):
        # without zero keys softmax does not see a bias of all keys: its gradient is rounding only
        if "k_proj.bias" not in name:
            assert mine.grad is not None
            worst = max(worst, float((mine.grad - true).abs().max() / true.abs().max().clamp(min=1e-12)))
    return worst
