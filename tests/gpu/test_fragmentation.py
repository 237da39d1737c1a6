"""200 random lengths, forward and backward, do not fragment torch's allocator with expandable segments: reserved ≤ 1.2 × peak in tensors.

Each kind in a process of its own, as the allocator reads its settings once. In torch's own setting tensors of varied lengths alone fragment
it, without any attention; `bench memory --parts fragmentation` measures every setting.
"""

from __future__ import annotations

import pytest
import torch

from dilated_attention.bench.workloads import fragmentation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

KINDS = ("dense", "dilated, LongNet", "dilated, GigaPath", "detached, LongNet", "block-sparse")
BOUND = 1.2


@pytest.mark.parametrize("kind", KINDS)
def test_varied_lengths_do_not_fragment_expandable_segments(kind: str) -> None:
    (row,) = fragmentation.measure(kind, ["expandable"], 200, 131_072, torch.device("cuda"))
    found = row.values
    # of tensors that matter, so that the allocator's pages of 20 MiB for each stream do not
    assert found["peak_allocated"] > 2**30
    assert found["peak_reserved"] <= BOUND * found["peak_allocated"]
    assert found["retries"] == 0 and found["refused"] == 0
