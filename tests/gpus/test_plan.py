"""Planned peak memory of spread sequences against what two GPUs take. Needs 2 GPUs."""

from typing import Any

import pytest

from dilated_attention import ring_attention, ring_block_sparse_attention, ring_dilated_attention
from dilated_attention.planning import plan_attention
from tests.gpu.test_plan import WINDOW, called
from tests.helpers.gpu_memory import peak_of
from tests.helpers.machine import ON_CPU, worlds
from tests.helpers.pool import Pool, here, patience

RINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ring": (ring_attention, {"layout": "zigzag"}),
    "ring_dilated": (ring_dilated_attention, {"layout": "contiguous", "segment_lengths": (2048, 2**18), "dilation_rates": (1, 16)}),
    # with as many key heads as query heads, branches within ranks are computed apart from those that cross them
    "ring_dilated, apart": (ring_dilated_attention, {"layout": "contiguous", "segment_lengths": (2048, 2**18), "dilation_rates": (1, 16)}),
    "ring_block_sparse": (ring_block_sparse_attention, {"layout": "contiguous", "pattern": WINDOW}),
}


def peaks(rank: int, world: int, kind: str, training: bool, n: int) -> tuple[int, int, str]:
    """(bytes planned, bytes taken or 0 without a GPU, the plan)."""
    function, options = RINGS[kind]
    kv_heads = 16 if "apart" in kind else 4

    def call() -> Any:
        shape = (1, n // world, 16, 128)
        return called(function, shape, kv_heads, training, here(), seq_len=n, timeout=patience(), **options)

    found = 0
    if here().type == "cuda":
        found = peak_of(call)
    else:
        call()
    shape = {"num_positions": n, "num_heads": 16, "num_kv_heads": kv_heads, "head_dim": 128, "world_size": world}
    plan = plan_attention(kind.split(",")[0], training=training, find_longest=False, **shape, **options)
    # lists of blocks are kept from call to call, and were there before
    return plan.peak - dict(plan.memory.forward).get("lists of blocks", 0), found, str(plan.memory)


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("kind", RINGS)
@pytest.mark.parametrize("pool", worlds(gpus=(2,)))
def test_planned_peaks_are_what_gpus_take(pool: Pool, kind: str, training: bool) -> None:
    n = 512 if ON_CPU else 2**16 if kind == "ring" else 2**18
    # planned for the rank that needs the most
    planned, found, text = max(pool.run(peaks, kind, training, n), key=lambda x: x[1])
    assert planned > 0
    assert ON_CPU or 0.85 * found <= planned <= 1.15 * found, f"took {found / 2**20:.0f} MiB\n{text}"
