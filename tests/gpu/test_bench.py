"""Suites of benchmarks on a GPU, in their small sizes: memory by torch's counts, limits by its allocator, kernels compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dilated_attention.bench import Results, Row
from dilated_attention.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def rows_of(folder: Path, suite: str, *options: str) -> list[Row]:
    command = [
        "bench",
        suite,
        "--device",
        "cuda",
        "--size",
        "small",
        "--seconds",
        "0.02",
        "--output",
        str(folder),
        "--quiet",
        *options,
    ]
    assert main(command) == 0
    return list(Results.load(folder / f"{suite}.json").rows)


def test_peaks_of_attention_are_as_predicted(tmp_path: Path) -> None:
    given = (
        "--lengths",
        "16k",
        "--contenders",
        "standard",
        "torch sdpa",
        "DilatedAttention",
        "BlockSparseAttention window",
    )
    rows = [row for row in rows_of(tmp_path, "memory", *given) if row.values]
    assert len(rows) == 8
    for row in rows:
        assert abs(row.values["off"]) < 0.1, row


def test_the_search_recovers_from_out_of_memory(tmp_path: Path) -> None:
    given = ("--memory-gib", "0.5", "--first", "4k", "--kinds", "dilated", "block-sparse")
    before = torch.cuda.memory_allocated()
    rows = rows_of(tmp_path, "extreme", *given)
    # tables of offsets are kept for the next call
    assert torch.cuda.memory_allocated() <= before + 2**20
    for kind in ("dilated", "block-sparse"):
        for which in ("forward", "both"):
            mine = [row for row in rows if row.name == kind and row.case["pass"] == which]
            longest = max(row.case["N"] for row in mine if row.values)
            # the plan of a call that ran under the limit
            assert all(abs(row.values["off"]) < 0.1 for row in mine if row.values), mine
            assert min(row.case["N"] for row in mine if row.note) > longest
            assert {row.note for row in mine} == {"", "out of memory"}


@pytest.mark.alone
def test_an_unchanged_module_is_not_blamed(tmp_path: Path) -> None:
    # a call that takes the GPU longer than its host, whose times differ by half from one run to the next
    given = ("--lengths", "16k", "--heads", "32", "--head-dim", "64", "--contenders", "torch sdpa", "DilatedAttention")
    rows_of(tmp_path, "speed", *given)
    assert rows_of(tmp_path / "again", "speed", *given, "--against", str(tmp_path))
