"""Settings that make a model fit which does not: each is planned, none is a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

Settings = dict[str, int | bool]
_MOST_PROCESSES = 64
_SHOWN = 2


def fitting(
    peak_with: Callable[[dict[str, int], bool], int], sizes: dict[str, int], checkpointed: bool, training: bool, budget: int
) -> tuple[tuple[Settings, int], ...]:
    """Returns at most two (settings, peak) that fit in ``budget`` bytes, with the fewest processes.

    Args:
        peak_with: returns the peak bytes of one process for sizes (``world_size``, ``weight_shards``, …) and whether activations are
            checkpointed.
        sizes, checkpointed, training: of the plan that does not fit.
    """
    present = max(sizes["world_size"], sizes["weight_shards"])
    processes = present
    while processes <= max(present, _MOST_PROCESSES):
        found: list[tuple[Settings, int]] = []
        for settings in _settings(processes, sizes, checkpointed, training):
            if any(given.items() <= settings.items() for given, _ in found):
                # it fits with fewer of these
                continue
            changed = sizes | {name: int(value) for name, value in settings.items() if name in sizes}
            peak = peak_with(changed, checkpointed or "checkpoint_activations" in settings)
            if peak <= budget:
                found.append((settings, peak))
            if len(found) == _SHOWN:
                break
        if found:
            return tuple(found)
        processes *= 2
    return ()


def _settings(processes: int, sizes: dict[str, int], checkpointed: bool, training: bool) -> Iterator[Settings]:
    """Yields settings for a number of processes, those of fewer changes first."""
    checkpoint: Settings = {"checkpoint_activations": True} if training and not checkpointed else {}
    shards: Settings = {"weight_shards": processes} if processes > sizes["weight_shards"] else {}
    # a language model generates from a cache that processes do not share
    world: Settings = {"world_size": processes} if training and processes > sizes["world_size"] else {}
    seen: list[Settings] = [{}]
    for settings in (checkpoint, shards, world, shards | checkpoint, world | shards, world | checkpoint, world | shards | checkpoint):
        if settings not in seen and (processes == max(sizes["world_size"], sizes["weight_shards"]) or settings.keys() - checkpoint.keys()):
            seen.append(settings)
            yield settings
