"""Models loaded by ``from_torchscale`` and ``load_torchscale`` beside the code that their weights come from, on the CPU in float32.

    python benchmarks/torchscale_parity.py --torchscale ~/torchscale --gigapath ~/prov-gigapath
    python benchmarks/torchscale_parity.py --gigapath ~/prov-gigapath --weights slide_encoder.pth --tiles 5308

Those sources are never part of this repository: give the folders of your own clones; needed are torch, numpy and einops, none of
flash-attn, fairscale, timm or a GPU. Weights are random unless --weights is Prov-GigaPath's file. Each row is the greatest difference of
the outputs, over the greatest output, and that of all weights' gradients, over the greatest gradient of each. A row past 1e-5 (gradients
1e-4) is marked and makes the exit status 1, but for rows where TorchScale shifts its segments, which are expected to differ.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _torchscale_sources import GIGAPATH, LONGVIT, TORCHSCALE, find, imported
from torch import nn

from dilated_attention.integrations.torchscale import from_torchscale, load_torchscale

TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
# positions, heads, segment lengths, dilation rates, causal
CASES = [
    (256, 8, (64, 128, 256), (1, 2, 4), False),
    (307, 8, (64, 128, 512), (1, 2, 4), False),
    (307, 16, (64, 128, 512), (1, 4, 16), True),
    (211, 3, (32, 64, 1024), (1, 8, 16), False),
    (128, 5, (24, 48), (3, 4), False),
    (97, 12, (1000, 2000), (1, 8), True),
    (13, 4, (16, 32), (1, 16), False),
    (500, 16, (1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16), False),
    (2100, 16, (1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16), False),
    # r does not divide w, and there are several segments: TorchScale's shifts
    (120, 6, (50, 100), (4, 6), False),
]


class Table:
    def __init__(self) -> None:
        self.failed = False

    def row(self, label: str, theirs: torch.Tensor, ours: torch.Tensor, gradients: float | None = None, note: str = "") -> None:
        error = relative(theirs, ours)
        bad = not (error <= TOLERANCE and (gradients is None or gradients <= GRADIENT_TOLERANCE))
        if bad and not note:
            self.failed, note = True, "DIFFERS"
        print(f"{label:72} {error:9.1e} {'' if gradients is None else f'{gradients:9.1e}':9} {note}", flush=True)


def relative(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    return float((theirs - ours).detach().abs().max() / theirs.detach().abs().max())


def gradient_error(theirs: nn.Module, ours: nn.Module, reload: Callable[[], nn.Module]) -> float:
    """Greatest relative difference of gradients. Theirs are put in the place of their weights and loaded as weights are."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    worst = 0.0
    for (name, mine), true in zip(ours.named_parameters(), reload().parameters(), strict=True):
        # without zero keys softmax does not see a bias of all keys: its gradient is rounding only
        if "k_proj.bias" not in name:
            worst = max(worst, float((mine.grad - true).abs().max() / true.abs().max().clamp(min=1e-12)))
    return worst


def randomise(module: nn.Module) -> nn.Module:
    """Other norms than ones and biases than zeros, so that a swapped pair shows."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(std=0.2).add_(1.0 if name.endswith("weight") else 0.0)
    return module.eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Their constructors print, and our warning of a shift is a note in the table."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def compare_sequences(load: Any, table: Table) -> None:
    longnet, config = load("torchscale.model.LongNet"), load("torchscale.architecture.config")
    for N, heads, segments, rates, causal in CASES:
        role, width = "decoder" if causal else "encoder", heads * 8
        fields = {f"{role}_embed_dim": width, f"{role}_attention_heads": heads, f"{role}_ffn_embed_dim": 2 * width, f"{role}_layers": 2}
        branches = {"flash_attention": True, "segment_length": str(list(segments)), "dilated_ratio": str(list(rates))}
        torch.manual_seed(N)
        with quiet():
            if causal:
                args = config.DecoderConfig(**fields, **branches, vocab_size=31, xpos_rel_pos=True, no_scale_embedding=False)
                theirs = randomise(longnet.LongNetDecoder(args, embed_tokens=nn.Embedding(31, width)))
                x: Any = torch.randint(31, (2, N))
                expected = theirs(x)[0]
            else:
                theirs = randomise(longnet.LongNetEncoder(config.EncoderConfig(**fields, **branches)))
                x = torch.randn(2, N, width)
                expected = theirs(None, token_embeddings=x)["encoder_out"]
            ours = from_torchscale(theirs)
            found = ours(x)
        weights = torch.randn_like(expected)
        (expected * weights).sum().backward()
        (found * weights).sum().backward()
        is_shifted = any(w < N and w % r for w, r in zip(segments, rates, strict=True))
        label = f"{role}{' with XPOS' if causal else ''}: N {N}, {heads} heads, w {list(segments)}, r {list(rates)}"
        error = gradient_error(theirs, ours, lambda theirs=theirs: from_torchscale(theirs))
        table.row(label, expected, found, error, "expected: TorchScale shifts" if is_shifted else "")


def compare_longvit(load: Any, table: Table) -> None:
    longvit = load("longvit")
    for image_size, shape in ((1024, (1024, 1024)), (1024, (512, 768)), (256, (256, 256))):
        torch.manual_seed(0)
        with quiet():
            theirs = randomise(longvit.LongViT(img_size=image_size, patch_size=32, embed_dim=384, depth=2, num_heads=16))
            images = torch.randn(1, 3, *shape)
            with torch.no_grad():
                expected, found = theirs(images), from_torchscale(theirs)(images)
        table.row(f"LongViT of {image_size} pixels, 2 of 12 layers, on {shape[0]} × {shape[1]}", expected, found)


def compare_slides(load: Any, table: Table, tiles: int, grid: int, weights: str | None) -> None:
    module = load("gigapath.slide_encoder")
    original = module.LongNetViT.get_optimal_segment_length
    # with numpy ≥ 2 its text has np.int64(1024) in it, which its own parser does not know
    module.LongNetViT.get_optimal_segment_length = lambda *sizes: re.sub(r"np\.int64\((\d+)\)", r"\1", original(*sizes))
    for global_pool in (False, True):
        torch.manual_seed(0)
        with quiet():
            theirs = randomise(module.gigapath_slide_enc12l768d(slide_ngrids=grid, global_pool=global_pool))
            settings: dict[str, Any] = {"grid_size": grid, "global_pool": global_pool}
            if weights is not None:
                ours = load_torchscale(weights, **settings)
                state = torch.load(weights, map_location="cpu", weights_only=True)["model"]
                theirs.load_state_dict(state, strict=False)
            else:
                ours = from_torchscale(theirs)
            assert ours.config.encoder.segment_lengths == tuple(theirs.encoder.args.segment_length)
            x = torch.randn(1, tiles, 1536)
            cells = torch.randperm(grid * grid)[:tiles]
            coords = (torch.stack((cells // grid, cells % grid), dim=-1) * 256.0)[None]
            with torch.no_grad():
                start = time.perf_counter()
                expected = theirs(x, coords)[0]
                between = time.perf_counter()
                found = ours(x, coords)
                end = time.perf_counter()
                states, ours_states = theirs(x, coords, all_layer_embed=True), ours(x, coords, all_layers=True)
        label = f"slide encoder 12l768d, {tiles} tiles, {'mean' if global_pool else 'class token'}"
        table.row(f"{label} ({between - start:.1f} s, ours {end - between:.1f} s)", expected, found)
        table.row(f"{label}, all layers", torch.stack(states), torch.stack(ours_states))
    with quiet():
        theirs = randomise(module.LongNetViT(embed_dim=384, depth=3, slide_ngrids=grid, max_wsi_size=250_000))
        ours = from_torchscale(theirs)
        x, coords = torch.randn(1, 300, 1536), torch.randint(grid * 256, (1, 300, 2)).float()
        expected, found = theirs(x, coords)[0], ours(x, coords)
    (expected.square().sum()).backward()
    (found.square().sum()).backward()
    error = gradient_error(theirs, ours, lambda: from_torchscale(theirs))
    table.row(f"slide encoder 3l384d, max_wsi_size 250000, w {list(ours.config.encoder.segment_lengths)}", expected, found, error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchscale", metavar="PATH", help="folder of your clone of TorchScale: encoder, decoder, LongViT")
    parser.add_argument("--gigapath", metavar="PATH", help="folder of your clone of Prov-GigaPath: slide encoder")
    parser.add_argument("--weights", metavar="FILE", help="Prov-GigaPath's slide_encoder.pth, in place of random weights")
    parser.add_argument("--tiles", type=int, default=1201, help="tiles of a slide (1201)")
    parser.add_argument("--grid", type=int, default=100, help="cells of the grid's side; theirs keeps a row for each cell (100)")
    options = parser.parse_args()
    if options.torchscale is None and options.gigapath is None:
        parser.error("give --torchscale PATH, --gigapath PATH or both; git clone https://github.com/microsoft/torchscale")
    if options.tiles > options.grid**2:
        parser.error(f"--tiles {options.tiles} do not fit on a grid of {options.grid} × {options.grid}: raise --grid")
    table = Table()
    try:
        torchscale = None if options.torchscale is None else find(options.torchscale, TORCHSCALE)
        gigapath = None if options.gigapath is None else find(options.gigapath, GIGAPATH)
    except ValueError as error:
        parser.error(str(error))
    print(f"{'':72} {'outputs':>9} {'gradients':>9}")
    if torchscale is not None:
        longvit = (torchscale / LONGVIT).parent
        with imported(torchscale, *([longvit] if longvit.is_dir() else [])) as load:
            compare_sequences(load, table)
            if longvit.is_dir():
                compare_longvit(load, table)
    if gigapath is not None:
        # its package puts its own copy of TorchScale on the path
        with imported(gigapath, Path(gigapath, "gigapath")) as load:
            compare_slides(load, table, options.tiles, options.grid, options.weights)
    return int(table.failed)


if __name__ == "__main__":
    sys.exit(main())
