"""A whole-slide image encoder of Prov-GigaPath's shape on synthetic slides of real size: embed, look at its attention, fine-tune.

    python examples/slide_encoder.py                       # 5,308 tiles, a slide of middle size; a minute on 2 CPU cores, float32
    python examples/slide_encoder.py --tiles 5308 45681    # on a GPU, bfloat16; 45,681 tiles are a large slide
    python examples/slide_encoder.py --orders              # the attention again with the tiles in other orders, and correlations

Your own features: examples/slide_features.py. Here no data and no weights are downloaded: tiles' embeddings are smooth random functions of
their place on the tissue, the model's weights are random (``load_torchscale`` loads the released file). For each size: the slide's vector;
what its class token attends to in the last layer, drawn over the slide (``runs/slide_attention_N.png``); and fine-tuning on a batch of
three unequal slides of that many tiles together (half as many on a CPU), packed, without padding, to find those with a lesion. Prints times
and peak memory.
Last line: ``done: slides of … tiles, step of … s``
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import sys
import textwrap
from pathlib import Path

# threads that wait for each other sleep instead of spinning
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from recipe.costs import measured
from recipe.main import can_draw, run_safely
from torch import nn

from dilated_attention import create_model
from dilated_attention.models import SlideEncoder, collate_slides, tile_step
from dilated_attention.parsing import size

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = 256
WIDTH = 1536
Slide = tuple[torch.Tensor, torch.Tensor]


def make_slide(tiles: int, seed: int, lesion: bool) -> Slide:
    """(embeddings (L, 1536), pixels x, y (L, 2)) of a piece of tissue of L tiles with a wavy outline, listed row by row."""
    generator = torch.Generator().manual_seed(seed)
    side = math.ceil(math.sqrt(2 * tiles))
    place = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    unit = place / side * 2 - 1
    angle = torch.atan2(unit[:, 0], unit[:, 1])
    inside = (unit.norm(dim=1) / (1 + 0.2 * torch.sin(3 * angle + seed))).argsort()[:tiles].sort().values
    place, unit = place[inside], unit[inside]
    waves = torch.randn(2, 24, generator=generator) * 3
    field = torch.cat((torch.sin(unit @ waves), torch.cos(unit @ waves)), dim=1) @ torch.randn(48, WIDTH, generator=generator) / 5
    embeddings = field + 0.5 * torch.randn(tiles, WIDTH, generator=generator)
    if lesion:
        spot = unit[torch.randint(tiles, (), generator=generator)]
        embeddings[(unit - spot).norm(dim=1) < 0.3] += 1.5 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(99))
    return embeddings.to(DEVICE), (place.flip(1) * TILE).float().to(DEVICE)


def told(seconds: float, peak: float) -> str:
    return f"{seconds:.2f} s, peak {peak / 1e9:.2f} GB"


@torch.no_grad()
def embed(model: SlideEncoder, slide: Slide) -> tuple[torch.Tensor, torch.Tensor]:
    """(vector of a slide (E,), weights (L,) with which its class token attends to tiles in the last layer, the mean over heads)."""
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        vector = model.embed(slide[0][None], slide[1][None])[0]
        weights = model.attention_received(slide[0][None], slide[1][None])[0]
    return vector.float(), weights.float()


def by_order(model: SlideEncoder, slide: Slide) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Attention (L,) of the tiles as given, computed row by row, column by column and shuffled; and how that of two orders correlates."""
    x, y = slide[1].double().T
    orders = {
        "row by row": torch.argsort(y * (x.max() + 1) + x),
        "column by column": torch.argsort(x * (y.max() + 1) + y),
        "shuffled": torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device),
    }
    found = {}
    for name, order in orders.items():
        found[name] = torch.empty_like(x, dtype=torch.float32)
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            found[name][order] = model.attention_received(slide[0][order][None], slide[1][order][None])[0].float()
    pairs = itertools.combinations(found, 2)
    return found, {f"{a} and {b}": float(torch.corrcoef(torch.stack((found[a], found[b])))[0, 1]) for a, b in pairs}


def draw(
    coords: torch.Tensor, panels: dict[str, torch.Tensor], title: str, path: Path, photo: Path | None = None, tile_size: int = TILE
) -> None:
    """Draws weights (L,) of tiles at coords (L, 2), a panel each, in shares: 1 is a tile's share if all had the same. Needs matplotlib.

    ``tile_size`` counts where coords do not say how far tiles are apart.
    """
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    x, y = coords.double().cpu().T
    step = tile_step(coords) or tile_size
    columns, rows = (((axis - axis.min()) / step).round().long() for axis in (x, y))
    shares = {name: weights.float().cpu() * len(weights) for name, weights in panels.items()}
    # one scale for all; a few tiles stand out by far, and would leave the others in one colour
    high = float(torch.cat(list(shares.values())).quantile(0.98))
    count = len(panels) + (photo is not None)
    width = 1.2 + 3.6 * count
    # a line of a title is not wider than the figure, and makes it higher
    lines = textwrap.wrap(title, int(10 * width))
    figure = Figure(figsize=(width, 4.0 + 0.2 * len(lines)), layout="constrained")
    places = list(figure.subplots(1, count, squeeze=False)[0])
    if photo is not None:
        places[0].imshow(imread(photo))
        places[0].set(title="tissue")
    for place, (name, values) in zip(places[count - len(panels) :], shares.items(), strict=True):
        picture = torch.full((int(rows.max()) + 1, int(columns.max()) + 1), torch.nan)
        picture[rows, columns] = values
        image = place.imshow(picture, cmap="viridis", vmin=0, vmax=high, interpolation="nearest")
        place.set(title=textwrap.fill(name, 34))
    for place in places:
        place.set(xticks=[], yticks=[])
    figure.colorbar(image, ax=places, extend="max", label="attention of the slide to a tile, 1 = even share")
    figure.suptitle("\n".join(lines), fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def fine_tune(model: SlideEncoder, tiles: int, steps: int) -> float:
    """Seconds of the last step of training on three slides of ``tiles`` tiles together, the first and the last with a lesion."""
    sizes = [tiles * 55 // 100, tiles * 30 // 100, tiles - tiles * 55 // 100 - tiles * 30 // 100]
    labels = torch.tensor([1, 0, 1], device=DEVICE)
    packed, coords, cu_seqlens = collate_slides([make_slide(size, seed, seed != 1) for seed, size in enumerate(sizes)])
    head = nn.Linear(model.config.encoder.embed_dim, 2, device=DEVICE)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-4, weight_decay=0.05)
    model.train()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = nn.functional.cross_entropy(head(model(packed, coords, cu_seqlens=cu_seqlens)).float(), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    seconds = 0.0
    for i in range(steps):
        loss, seconds, _, peak = measured(step, DEVICE)
        print(f"  step {i + 1} on slides of {sizes} tiles: loss {loss:.3f}, {told(seconds, peak)}", flush=True)
    model.eval()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=size, nargs="+", default=[5308])
    parser.add_argument("--layers", type=size, default=12)
    parser.add_argument("--steps", type=size, default=1 if DEVICE == "cpu" else 10)
    parser.add_argument("--orders", action="store_true", help="attention with tiles in three orders, and how they correlate")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    torch.manual_seed(0)
    model: SlideEncoder = create_model("gigapath-12l768d", num_layers=args.layers, device=DEVICE).eval()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {DEVICE}, {'float32' if DEVICE == 'cpu' else 'bfloat16 autocast'}")
    for tiles in args.tiles:
        slide = make_slide(tiles, seed=7, lesion=True)
        (vector, weights), seconds, _, peak = measured(functools.partial(embed, model, slide), DEVICE)
        print(f"{tiles} tiles: vector of norm {vector.norm():.2f} and the class token's attention in {told(seconds, peak)}", flush=True)
        panels = {"row by row": weights}
        if args.orders:
            panels, correlations = by_order(model, slide)
            for pair, value in correlations.items():
                print(f"  attention with tiles {pair}: correlation {value:.4f}")
        if can_draw():
            draw(slide[1], panels, f"{tiles:,} tiles, last layer, random weights", args.out / f"slide_attention_{tiles}.png")
        seconds = fine_tune(model, tiles // 2 if DEVICE == "cpu" else tiles, args.steps)
    print(f"done: slides of {', '.join(map(str, args.tiles))} tiles, step of {seconds:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(run_safely(main))
