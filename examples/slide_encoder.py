"""A whole-slide image encoder of Prov-GigaPath's shape on synthetic slides of real size: embed, look at its attention, fine-tune.

    python examples/slide_encoder.py                       # 5,308 tiles, a slide of middle size; a minute on 2 CPU cores, float32
    python examples/slide_encoder.py --tiles 5308 45681    # on a GPU, bfloat16; 45,681 tiles are a large slide

No data and no weights are downloaded: tiles' embeddings are smooth random functions of their place on the tissue, the model's weights are
random (``load_torchscale`` loads the released file). For each size: the slide's vector; what its class token attends to in the last layer,
drawn over the slide (``runs/slide_attention_N.png``); and fine-tuning on a batch of three unequal slides of that many tiles together (half
as many on a CPU), packed, without padding, to tell those with a lesion. Prints times and peak memory.
Last line: ``done: slides of … tiles, step of … s``
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from pathlib import Path
from typing import cast

# threads that wait for each other sleep instead of spinning
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from _memory import measured
from torch import nn

from dilated_attention import create_model
from dilated_attention.models import SlideEncoder, collate_slides

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = 256
WIDTH = 1536
Slide = tuple[torch.Tensor, torch.Tensor]


def make_slide(tiles: int, seed: int, lesion: bool) -> Slide:
    """(embeddings (L, 1536), pixels (L, 2)) of a piece of tissue of L tiles with a wavy outline, listed row by row."""
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
    return embeddings.to(DEVICE), (place * TILE).float().to(DEVICE)


def told(seconds: float, peak: float) -> str:
    return f"{seconds:.2f} s, peak {peak / 1e9:.2f} GB"


@torch.no_grad()
def embed(model: SlideEncoder, slide: Slide) -> tuple[torch.Tensor, torch.Tensor]:
    """(vector of a slide (E,), weights (L,) with which its class token attends to tiles in the last layer, the mean over heads)."""
    attention = model.encoder.blocks[-1].attention
    caught: list[torch.Tensor] = []
    hook = attention.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        vector = model(slide[0][None], slide[1][None])[0]
        hook.remove()
        weights = attention.attention_map(caught[0], query_rows="cls", average_heads=True)[0, 0]
    return vector.float(), weights[1:].float()


def draw(slide: Slide, weights: torch.Tensor, path: Path) -> None:
    from matplotlib.figure import Figure

    rows, columns = (slide[1] / TILE).long().cpu().T
    picture = torch.full((int(rows.max()) + 1, int(columns.max()) + 1), torch.nan)
    picture[rows, columns] = weights.cpu() * len(weights)
    panel = (figure := Figure(figsize=(6, 5), layout="constrained")).subplots()
    image = panel.imshow(picture, cmap="viridis", vmax=float(torch.quantile(weights.cpu() * len(weights), 0.99)))
    figure.colorbar(image, label="attention of the class token, 1 = even")
    panel.set(title=f"{len(weights):,} tiles, last layer, random weights", xticks=[], yticks=[])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, nargs="+", default=[5308])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1 if DEVICE == "cpu" else 10)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    torch.manual_seed(0)
    model = cast(SlideEncoder, create_model("gigapath-12l768d", num_layers=args.layers, device=DEVICE).eval())
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {DEVICE}, {'float32' if DEVICE == 'cpu' else 'bfloat16 autocast'}")
    for tiles in args.tiles:
        slide = make_slide(tiles, seed=7, lesion=True)
        (vector, weights), seconds, _, peak = measured(lambda slide=slide: embed(model, slide), DEVICE)
        print(f"{tiles} tiles: vector of norm {vector.norm():.2f} and the class token's attention in {told(seconds, peak)}", flush=True)
        if importlib.util.find_spec("matplotlib"):
            draw(slide, weights, args.out / f"slide_attention_{tiles}.png")
        seconds = fine_tune(model, tiles // 2 if DEVICE == "cpu" else tiles, args.steps)
    print(f"done: slides of {', '.join(map(str, args.tiles))} tiles, step of {seconds:.2f} s")


if __name__ == "__main__":
    main()
