"""A training step of Prov-GigaPath's slide encoder, 12 layers of 768, on one slide: over all GPUs of the run, and on one of them alone.

    torchrun --nproc-per-node 4 benchmarks/ring_slide.py --tiles 100000

Weights are random, bfloat16 by autocast; a step is the forward in training mode without dropout, the sum of the slide's vector, its
backward, and the mean of the parameters' gradients over the processes; no optimiser. Columns: the median time of a step of the slowest
process, and the peak of allocated memory (weights and gradients included) of the process that holds most. The slides' vectors are compared
first. FLASH3_LIBRARY (and FLASH3_CUDART) in the environment load FlashAttention-3's library.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _ring_world import World
from slide_encoder import slide

from dilated_attention import create_model, shard_sequence
from dilated_attention.backends.flash import flash3
from dilated_attention.models.sharded import average_gradients


def step_of(model: Any, x: tuple[torch.Tensor, ...], is_spread: bool) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(x[0].device.type, torch.bfloat16):
            loss = model(*x).float().sum()
        loss.backward()
        if is_spread:
            average_gradients(model)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, nargs="+", default=[100_000])
    parser.add_argument("--seconds", type=float, default=3.0, help="time of a measurement")
    args = parser.parse_args()
    if "FLASH3_LIBRARY" in os.environ:
        flash3.load_library(os.environ["FLASH3_LIBRARY"], os.environ.get("FLASH3_CUDART"))
    world = World(300)
    rates = {"dropout": 0.0, "drop_path": 0.0, "device": world.device}

    def model_of(**ring: Any) -> Any:
        torch.manual_seed(0)
        return create_model("gigapath-12l768d", **rates, **ring).train()

    for tiles in args.tiles:
        whole = slide(tiles, str(world.device))
        shard = tuple(shard_sequence(None, list(whole), [1, 1]))
        spread, alone = model_of(group=dist.group.WORLD), model_of()
        with torch.no_grad(), torch.autocast(world.device.type, torch.bfloat16):
            found, wanted = (model(*x).float() for model, x in ((spread, shard), (alone, whole)))
        error = float((found - wanted).norm() / wanted.norm())
        of_ring = world.measure(step_of(spread, shard, True), seconds=args.seconds)
        spread.zero_grad(set_to_none=True)
        of_one = world.measure(step_of(alone, whole, False), seconds=args.seconds, ranks=1)
        ratio = of_one["seconds"] / of_ring["seconds"]
        shown = [f"{1e3 * x['seconds']:.1f} ms {x['peak_bytes'] / 1e9:.2f} GB" for x in (of_ring, of_one)]
        world.say(f"{tiles:>8} tiles | {world.size} GPUs {shown[0]} | one GPU {shown[1]} | {ratio:.2f} times as fast | error {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
