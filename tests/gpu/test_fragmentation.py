"""200 random lengths, forward and backward, do not fragment torch's allocator with expandable segments: reserved ≤ 1.2 × peak in tensors.

Each kind in a process of its own, as the allocator reads its settings once. In torch's own setting tensors of varied lengths alone fragment
it, without any attention; benchmarks/fragmentation.py has the figures of every setting.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fragmentation.py"
KINDS = ("dense", "dilated, LongNet", "dilated, GigaPath", "detached, LongNet", "block-sparse")
BOUND = 1.2


def profile(kind: str, setting: str, allocator: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    path = os.pathsep.join([str(SCRIPT.parents[1]), *filter(None, [environment.get("PYTHONPATH")])])
    environment |= {"PYTORCH_ALLOC_CONF": allocator, "PYTHONPATH": path}
    command = [sys.executable, str(SCRIPT), "--here", "--kind", kind, "--setting", setting, "--count", "200"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    ratio = found["peak_reserved"] / found["peak_allocated"]
    print(f"{kind}: {found['peak_allocated'] / 2**20:,.0f} MiB in tensors, {found['peak_reserved'] / 2**20:,.0f} reserved: {ratio:.2f}")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_varied_lengths_do_not_fragment_expandable_segments(kind: str) -> None:
    found = profile(kind, "expandable", "expandable_segments:True")
    # of tensors that matter, so that the allocator's pages of 20 MiB for each stream do not
    assert found["peak_allocated"] > 2**30
    assert found["peak_reserved"] <= BOUND * found["peak_allocated"]
    assert found["retries"] == 0 and found["refused"] == 0
