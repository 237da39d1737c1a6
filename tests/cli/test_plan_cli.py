"""``python -m dilated_attention plan``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dilated_attention.cli import main
from dilated_attention.planning import plan_attention

BRANCHES = ["--segment-lengths", "2048", "8k", "--dilation-rates", "1", "4"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_a_kind_at_one_length(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "dilated", "--length", "1M", "--gpu", "H200", *BRANCHES)
    assert "1,048,576 positions" in text and "12 heads of 64" in text and "H200 SXM" in text
    for word in ("pairs", "FLOPs", "peak memory", "time", "(an estimate)", "shipped table", "the longest that does"):
        assert word in text


def test_json_is_what_the_function_says(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "dilated",
        "--length",
        "64k",
        "--gpu",
        "a100",
        "--heads",
        "8",
        "--kv-heads",
        "2",
        "--head-dim",
        "128",
        "--causal",
        "--infer",
    ]
    found = json.loads(run(capsys, *arguments, "--dtype", "float16", "--batch", "2", *BRANCHES, "--json"))
    import torch

    plan = plan_attention(
        "dilated", num_positions=65536, num_heads=8, num_kv_heads=2, head_dim=128, is_causal=True, training=False, batch_size=2,
        dtype=torch.float16, segment_lengths=(2048, 8192), dilation_rates=(1, 4), gpu="a100",
    )  # fmt: skip
    assert found == json.loads(json.dumps(plan.as_dict()))


def test_several_lengths_make_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ring", "--length", "64k", "1M", "--world-size", "4", "--gpu", "h200", "--memory", "24"]
    lines = run(capsys, *arguments).splitlines()
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["65,536", "1,048,576"] and all(row[-1] in ("yes", "no") for row in rows)
    assert any(line.startswith("the longest that fits") for line in lines)
    found: list[dict[str, Any]] = json.loads(run(capsys, *arguments, "--json"))
    assert [plan["num_positions"] for plan in found] == [65536, 2**20]


@pytest.mark.slow
def test_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "longnet-tiny", "--length", "64k", "--gpu", "4090", "--checkpoint")
    assert "activations checkpointed" in text and "optimizer's moments" in text
    table = run(capsys, "longnet-tiny", "--length", "8k", "64k", "--gpu", "4090", "--infer", "--batch", "2")
    assert "in the forward" in table and "65,536" in table


def test_a_block_pattern_and_its_wire(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(
        capsys, "ring_block_sparse", "--length", "64k", "--window", "256", "--world-size", "2", "--gpu", "h100", "--layout", "contiguous"
    )
    assert "on the wire" in text and "LocalWindow" in text


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["dense"], 2, "--length"),
        (["dense", "--length", "0"], 2, "'0' is not a size"),
        (["sparse", "--length", "1k"], 2, "argument what: invalid choice: 'sparse' (choose from "),
        (
            ["longnet-tiny", "--length", "1k", "--window", "4"],
            2,
            "--window given, which longnet-tiny does not take; it takes --checkpoint, --weight-shards: drop --window",
        ),
        (["dilated", "--length", "1k"], 2, "--segment-lengths"),
        (["dense", "--length", "1k", "--window", "5"], 2, "--window given, which dense does not take"),
        (["ring_dilated", "--length", "1k"], 2, "a dilated pattern needs --segment-lengths and --dilation-rates; e.g."),
        (["ring_block_sparse", "--length", "1k"], 2, "a block-sparse pattern needs either --window or --density"),
        (
            ["dense", "--length", "1k", "--world-size", "4"],
            2,
            ("world_size is 4 and kind is 'dense', which one process computes; take one of ring"),
        ),
        (["dense", "--length", "1k", "--kv-heads", "5"], 2, "num_kv_heads is 5; expected a divisor of num_heads = 12"),
        (["dense", "--length", "1k", "--checkpoint"], 2, "--checkpoint given, which dense does not take"),
        (["longnet-tiny", "--length", "1k", "--heads", "4"], 2, "--heads given, which longnet-tiny does not take"),
        (["dense", "--length", "1k", "--train", "--infer"], 2, "not allowed with"),
        (["dense", "--length", "1k", "--memory", "0"], 2, "is not a memory size"),
        (["dense", "--length", "1k", "--gpu", "H300"], 2, "known are"),
        (["dense", "--length", "1k", "--head-dim", "512", "--gpu", "h200"], 2, "head_dim is 512; expected an integer ≤ 256"),
    ],
)
def test_what_cannot_be_planned_is_told_on_stderr(arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["plan", *arguments]) == code
    except SystemExit as exit_:
        assert exit_.code == code
    captured = capsys.readouterr()
    assert text in captured.err and captured.out == ""
