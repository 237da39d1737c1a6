"""Slides and images that processes share, against one process with the whole of them, in float64: outputs and all gradients."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dilated_attention import create_model, local_positions, shard_sequence
from dilated_attention.distributed import RingError
from dilated_attention.distributed.sharding.layout import LAYOUTS
from dilated_attention.models import LongViT, SlideEncoder, SlideEncoderConfig, VisionConfig, collate_slides
from dilated_attention.models.images.vision import POOLINGS
from dilated_attention.models.loss import average_gradients, sharded_mean
from dilated_attention.modules import RingSettings
from tests.helpers.pool import pool_of

pytestmark = pytest.mark.distributed

F64 = torch.float64
SEGMENTS = {"segment_lengths": (4, 7, 32), "dilation_rates": (1, 2, 4)}


def slide_config(**changes: Any) -> SlideEncoderConfig:
    config = SlideEncoderConfig.gigapath(embed_dim=16, num_layers=2, num_heads=4, in_dim=6, grid_size=20, dropout=0.0, drop_path=0.0)
    encoder = {name: changes.pop(name) for name in ("drop_path", "dropout", "attention_dropout") if name in changes}
    return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, **SEGMENTS, **encoder), **changes)


def vision_config(**changes: Any) -> VisionConfig:
    config = VisionConfig.longvit(24, patch_size=4, embed_dim=16, num_layers=2, num_heads=4, **changes)
    return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, **SEGMENTS))


def model_of(kind: Any, config: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(config, dtype=F64, **options)


def slide(num_tiles: int, batch: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tiles = torch.randn(batch, num_tiles, 6, generator=generator, dtype=F64)
    return tiles, torch.randint(20 * 256, (batch, num_tiles, 2), generator=generator)


def images_of(height: int, width: int) -> torch.Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0), dtype=F64)


def loss_of(out: Any) -> torch.Tensor:
    """A loss whose gradient differs from element to element."""
    parts = out if isinstance(out, list) else [out]
    return torch.stack([(part * torch.arange(1, part.numel() + 1, dtype=F64).view(part.shape).sin()).sum() for part in parts]).sum()


def check_equal(alone: nn.Module, spread: nn.Module, expected: Any, got: Any, what: str, least: int = 26) -> None:
    """Outputs on every process, and gradients after the mean over processes; ``least``: parameters that have one."""
    for mine, true in zip(*(x if isinstance(x, list) else [x] for x in (got, expected)), strict=True):
        torch.testing.assert_close(mine, true, atol=1e-10, rtol=1e-10, msg=lambda text: f"{what}: {text}")
    loss_of(expected).backward()
    loss_of(got).backward()
    check_gradients(alone, spread, what, least)


def check_gradients(alone: nn.Module, spread: nn.Module, what: str, least: int = 26) -> None:
    average_gradients(spread)
    moved = 0
    for (name, mine), true in zip(spread.named_parameters(), alone.parameters(), strict=True):
        assert (mine.grad is None) == (true.grad is None), f"{what}: {name}"
        # the encoder's last norm, which all_layers does without, has none
        if true.grad is not None:
            torch.testing.assert_close(mine.grad, true.grad, atol=1e-10, rtol=1e-10, msg=lambda text, name=name: f"{what}, {name}: {text}")
            moved += bool(true.grad.abs().max() > 0)
    # one tile or patch alone has no gradient of queries and keys
    assert moved >= least
    spread.zero_grad()
    alone.zero_grad()


# (global_pool, tiles, checkpointed): tiles that 2, 3, 4, 6 processes or runs divide with each remainder
CASES = ((False, 23, False), (True, 36, True), (True, 30, False), (False, 31, True))


def slides_are_those_of_one_process(rank: int, world: int, layout: str) -> None:
    for global_pool, num_tiles, checkpointed in CASES:
        what = f"rank {rank}, {layout}, {num_tiles} tiles, global_pool={global_pool}"
        config = slide_config(global_pool=global_pool)
        alone = model_of(SlideEncoder, config)
        # the exchange by heads needs a number of processes that divides four heads
        place: dict[str, Any] = {"group": dist.group.WORLD, "layout": layout, "exchange": "all_to_all" if world == 2 else "auto"}
        spread = model_of(SlideEncoder, config, **place, checkpoint_activations=checkpointed)
        whole = slide(num_tiles, batch=2)
        shard = shard_sequence(None, whole, [1, 1], layout=layout)
        assert shard[0].shape[1] < num_tiles
        check_equal(alone, spread, alone(*whole), spread(*shard), what)
        check_equal(alone, spread, alone(*whole, all_layers=True), spread(*shard, seq_len=num_tiles, all_layers=True), f"{what}, layers")
        # gradients of the tiles themselves, for a tile encoder that trains along: a shard's are W times its own, too
        leaves = [x.clone().requires_grad_() for x in (whole[0], shard[0])]
        loss_of(alone(leaves[0], whole[1])).backward()
        loss_of(spread(leaves[1], shard[1])).backward()
        true = shard_sequence(None, [leaves[0].grad], [1], layout=layout)[0]
        torch.testing.assert_close(leaves[1].grad, true * world, atol=1e-10, rtol=1e-10)


def packed_slides_are_those_of_one_process(rank: int, world: int, layout: str) -> None:
    for global_pool, lengths in ((False, (13, 0, 1, 17)), (True, (5, 21, 2)), (False, (2,)), (True, (1,)), (False, (0,))):
        config = slide_config(global_pool=global_pool)
        alone = model_of(SlideEncoder, config)
        spread = model_of(SlideEncoder, config, group=dist.group.WORLD, layout=layout)
        tiles, coords, bounds = collate_slides([tuple(x[0] for x in slide(n, seed=n)) for n in lengths])
        shard = shard_sequence(None, [tiles, coords], [1, 1], layout=layout)
        for options in ({}, {"seq_len": sum(lengths)}):
            expected, got = alone(tiles, coords, cu_seqlens=bounds), spread(*shard, cu_seqlens=bounds, **options)
            assert got.shape == (len(lengths), 16)
            check_equal(alone, spread, expected, got, f"{layout}, {lengths}", least=1)


def images_are_those_of_one_process(rank: int, world: int, layout: str) -> None:
    # the learned grid, another one, and fewer patches than processes need
    sizes = ((24, 24), (20, 28), (4, 4))
    # each pooling with each size in one layout or another
    for index, pooling in enumerate(POOLINGS):
        height, width = sizes[(index + LAYOUTS.index(layout)) % 3]
        what = f"rank {rank}, {layout}, {pooling}, {height} × {width}"
        config = vision_config(pooling=pooling, num_classes=None if pooling == "none" else 3)
        alone = model_of(LongViT, config)
        spread = model_of(LongViT, config, group=dist.group.WORLD, layout=layout)
        for model in (alone, spread):
            if model.head is not None:
                with torch.no_grad():
                    torch.manual_seed(1)
                    model.head.weight.normal_()
        images = images_of(height, width)
        expected, got = alone(images), spread(images)
        if pooling != "none":
            check_equal(alone, spread, expected, got, what)
            continue
        places = local_positions(None, expected.shape[1], layout=layout)
        torch.testing.assert_close(got, expected[:, places], atol=1e-10, rtol=1e-10)
        expected.square().mean().backward()
        loss = sharded_mean(got.square().sum(), torch.tensor(got.numel()))
        torch.testing.assert_close(loss, expected.square().mean(), atol=1e-10, rtol=1e-10)
        loss.backward()
        check_gradients(alone, spread, what)


def presets_take_a_mesh(rank: int, world: int) -> None:
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    options: dict[str, Any] = {"mesh": mesh, "layout": "zigzag", "exchange": "all_gather", "ranks_per_node": 1, "timeout": 20.0}
    for name in ("gigapath-12l768d", "longvit-1024", "longnet-tiny"):
        made = create_model(name, device="meta", num_layers=1, **options)
        rings = {part.ring for part in made.modules() if hasattr(part, "ring")}
        assert rings == {RingSettings.of(options)} and made.ring.place() == (rank, world)


def drop_path_is_the_first_processs(rank: int, world: int) -> None:
    """Processes with unequal generators drop what rank 0's generator says: whole samples, whole packed slides."""
    config = slide_config(drop_path=0.5)
    alone = model_of(SlideEncoder, config)
    for layout, checkpointed in (("contiguous", True), ("striped", False)):
        spread = model_of(SlideEncoder, config, group=dist.group.WORLD, layout=layout, checkpoint_activations=checkpointed)
        whole = slide(17, batch=6)
        packed = collate_slides([tuple(x[0] for x in slide(n, seed=n)) for n in (4, 9, 1, 12, 3)])
        seen = []
        for seed in range(2):
            for tiles, coords, bounds in ((*whole, None), packed):
                torch.manual_seed(seed)
                expected = alone(tiles, coords, cu_seqlens=bounds)
                torch.manual_seed(seed if rank == 0 else 100 + rank)
                got = spread(*shard_sequence(None, [tiles, coords], [1, 1], layout=layout), cu_seqlens=bounds)
                seen.append(expected.detach()[0, 0].item())
                check_equal(alone, spread, expected, got, f"{layout}, seed {seed}")
        assert len(set(seen)) > 2


MADE = (functools.partial(SlideEncoder, slide_config()), functools.partial(LongViT, vision_config()))


def wrong_use_is_refused(rank: int, world: int) -> None:
    group = dist.group.WORLD
    spread = model_of(SlideEncoder, slide_config(), group=group, timeout=20.0)
    tiles, coords = slide(11)
    shard = shard_sequence(None, [tiles, coords], [1, 1])
    # images of unequal size: refused on all, at the first call of a kind on a group
    view = model_of(LongViT, vision_config(), group=dist.new_group(), timeout=20.0)
    pooled = model_of(SlideEncoder, slide_config(global_pool=True), group=group)
    mesh = dist.init_device_mesh("cpu", (world,))
    # every process raises, none waits
    for call, text in (
        (lambda: spread(*slide(12 if rank else 11)), f"a contiguous sequence of {12 * world - 1} has .*: cut it by shard_sequence"),
        (lambda: spread(*shard, seq_len=11 + world), f"a contiguous sequence of {11 + world + 1} has"),
        (lambda: spread(*shard, cu_seqlens=torch.tensor([0, 5 + rank, 11], dtype=torch.int32)), "cu_seqlens"),
        (
            lambda: spread(*shard, cu_seqlens=torch.tensor([0, 5, 10], dtype=torch.int32)),
            r"\[0, 5, 10\]; expected rising bounds .* tiles, 11",
        ),
        (lambda: spread(*(x.expand(rank + 1, -1, -1) for x in shard)), "slides"),
        (lambda: pooled(*slide(0)), "a slide has no tiles, and global_pool=True"),
        (lambda: spread.attention_map(*shard), "computed by one process; load the weights without a ring"),
        (lambda: spread.features(*shard), "vectors of tiles are given by one; load the weights without group and mesh"),
        (lambda: view(images_of(24, 24 + 4 * rank)), "ranks disagree on seq_len: rank 0 has 36, rank 1 has 42"),
        *((lambda kind=kind: kind(group=group, mesh=mesh), "group and mesh are both given") for kind in MADE),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    # a tile outside the grid: its process raises, and the others do not wait for it without end
    spread = model_of(SlideEncoder, slide_config(), group=dist.new_group(), timeout=2.0)
    with pytest.raises(*((RingError,) if rank else (ValueError,)), match="0" if rank else "reach from cell"):
        spread(shard[0], shard[1] + (rank == 0) * 20 * 256)


IN_LAYOUTS = [slides_are_those_of_one_process, packed_slides_are_those_of_one_process, images_are_those_of_one_process]
ON_PROCESSES = [presets_take_a_mesh, drop_path_is_the_first_processs, wrong_use_is_refused]


# each layout in one world; contiguous shards of two processes are in test_on_processes
@pytest.mark.parametrize(("world", "layout"), [(3, "contiguous"), (2, "zigzag"), (3, "striped")])
@pytest.mark.parametrize("check", IN_LAYOUTS)
def test_in_every_layout(check: Any, layout: str, world: int) -> None:
    pool_of(world).run(check, layout, timeout=120)


@pytest.mark.parametrize("check", ON_PROCESSES)
def test_on_processes(check: Any) -> None:
    pool_of(3).run(check, timeout=120)
