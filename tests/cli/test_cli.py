"""``python -m dilated_attention``: ``info``, ``plan``, ``show`` of models, where ``bench`` points, refusals of all of them, exit codes."""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch

from dilated_attention import factory
from dilated_attention.cli import main, warmup
from dilated_attention.cli.common import count, size
from dilated_attention.factory import EXAMPLES, explain_backend
from dilated_attention.planning import plan_attention

Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture, line: str) -> str:
    assert main(line.split()) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("machine", sorted(EXAMPLES))
def test_info_answers_for_other_machines_and_json_does_not_depend_on_all(machine: str, capsys: Capture) -> None:
    line = f"info --for {machine} --json --head-dim 48 --causal"
    answer = json.loads(printed(capsys, line))
    assert answer["forward"] and answer == json.loads(printed(capsys, f"{line} --all"))
    assert {row["name"] for row in answer["backends"]} >= {"math", "flash4"}
    assert all(row["usable"] == (not row["reasons"]) for row in answer["backends"])


def test_on_a_cpu_the_gpu_backends_are_one_line(capsys: Capture) -> None:
    text = printed(capsys, "info --for cpu")
    explanation = explain_backend(hardware=EXAMPLES["cpu"])
    verdict, faster, empty, *rest = text.splitlines()
    assert "with gradients: forward and backward run on sdpa_cpu, the first that can by " in verdict
    assert (faster, empty) == ("faster: a CUDA GPU; info --for hopper shows what runs there.", "")
    usable = [line.text for line in explanation.lines() if line.mark != "✗"]
    refused = [line.text.split()[1] for line in explanation.lines() if line.mark == "✗"]
    assert rest[: len(usable) + 1] == [*usable, f"cannot: {', '.join(refused)}; --all shows every reason."]
    assert "✗" not in text and "not installed" not in text
    assert str(explanation) in printed(capsys, "info --for cpu --all")


@pytest.mark.parametrize("name", factory.presets.SEARCHED)
def test_names_that_people_search_for_are_answered_with_what_to_use(name: str, capsys: Capture) -> None:
    use = factory.presets.SEARCHED[name]
    assert printed(capsys, f"info {name}") == f"{name}: {use}\n" and json.loads(printed(capsys, f"info {name} --json")) == {name: use}
    assert "what to use for gigapath, titan, sft: info NAME" in printed(capsys, "info --for cpu")
    with pytest.raises(ValueError, match=re.escape(f"({name}: {use})")):
        factory.create_model(name.upper())
    # no hint where a name is not refused
    with pytest.raises(SystemExit):
        main(["warmup", "gigapath-12l768d", "--heads", "4"])
    assert "slide_encoder.pth" not in capsys.readouterr().err


def test_packages_that_would_be_preferred_are_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = EXAMPLES["hopper"]
    for packages, faster in ((frozenset({"triton"}), 'flash4; flash-attn-4 is not installed: pip install --pre "flash-attn-4[cu13]"'),
                             (hopper.packages, "")):  # fmt: skip
        machine = dataclasses.replace(hopper, packages=packages)
        monkeypatch.setattr(factory, "detect", lambda device=None, machine=machine: machine)
        text = printed(capsys, "info")
        assert faster in text if faster else "faster" not in text


def test_info_tells_who_takes_lists_of_blocks_and_who_decodes(capsys: Capture) -> None:
    text = printed(capsys, "info --for hopper --block-size 128 --head-dim 128")
    assert "forward and backward run on flash4, the first that can by the shipped table" in text
    text = printed(capsys, "info --for hopper --block-size 64 --head-dim 128")
    assert re.search("→ flash4 +forward only: its backward with head_dim 128 takes blocks of 64x128 or 128x128, not 64x64", text)
    assert "sdpa_cpu" in text.partition("\ncannot: ")[2]
    assert "takes no lists of blocks" in printed(capsys, "info --for hopper --block-size 64 --all")
    text = printed(capsys, "info --for hopper --decode sparse")
    assert "→ triton" in text and "✗ flash3" in text
    told = json.loads(printed(capsys, "info --for cpu --decode dense --json"))
    assert told["chosen"] == "torch" and [row["name"] for row in told["decoders"] if row["usable"]] == ["torch"]
    flags = "--causal --inference --key-padding-mask --window --dropout --deterministic"
    told = json.loads(printed(capsys, f"info --for cpu {flags} --json"))
    assert ", causal, forward, key_mask, window, dropout, deterministic on " in told["request"]


def test_show_tells_of_a_model(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = printed(capsys, "show longnet-125m --positions 32768 --memory 80")
    assert "162,160,896" in text and "32,768" in text and "a device with 80 GiB trains" in text
    # a CPU trains in float32
    here = json.loads(printed(capsys, "show longnet-tiny --positions 4096 --json"))
    assert (here["parameters"], here["activation_bytes"]) == (631_680, 4)


def test_bench_says_where_measuring_is(capsys: Capture) -> None:
    assert "python -m benchmarks speed" in printed(capsys, "bench speed --cases longnet-4096")


BRANCHES = "--segment-lengths 2048 8k --dilation-rates 1 4"


def test_plan_prints_what_the_function_says(capsys: Capture) -> None:
    line = (
        f"plan dilated --length 64k --gpu a100 --heads 8 --kv-heads 2 --head-dim 128 --causal --infer --dtype float16 --batch 2 {BRANCHES}"
    )
    plan = plan_attention(
        "dilated", num_positions=65536, num_heads=8, num_kv_heads=2, head_dim=128, is_causal=True, training=False, batch_size=2,
        dtype=torch.float16, segment_lengths=(2048, 8192), dilation_rates=(1, 4), gpu="a100",
    )  # fmt: skip
    assert printed(capsys, line) == f"{plan}\n"
    assert json.loads(printed(capsys, f"{line} --json")) == json.loads(json.dumps(plan.as_dict()))
    text = printed(capsys, "plan ring_block_sparse --length 64k --window 256 --world-size 2 --gpu h100 --layout contiguous")
    assert "on the wire" in text and "LocalWindow" in text


def test_several_lengths_make_a_table(capsys: Capture) -> None:
    line = "plan ring --length 64k 1M --world-size 4 --gpu h200 --memory 24"
    lines = printed(capsys, line).splitlines()
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["65,536", "1,048,576"] and all(row[-1] in ("yes", "no") for row in rows)
    assert any("the longest that does" in line for line in lines)
    assert [plan["num_positions"] for plan in json.loads(printed(capsys, f"{line} --json"))] == [65536, 2**20]
    table = printed(capsys, "plan longnet-tiny --length 8k 64k --gpu 4090 --infer --batch 2")
    assert "65,536" in table and "positions/s" not in table


DILATED = "show dilated --segment-lengths 16 32 --dilation-rates 1 2"
WARMUP = "warmup gigapath-12l768d"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("inform", "invalid choice"),
        # errors of functions are shown as they are
        ("info --for cpu --heads 8 --kv-heads 3", "error: num_kv_heads is 3; expected a divisor of num_heads = 8"),
        ("info --decode sparse --causal --dropout", "--causal, --dropout given, which --decode does not take; it takes --dtype, --for"),
        ("info titan --for cpu --heads 8 --decode dense --all", "--all, --decode, --for, --num-heads given, which titan does not take"),
        ("plan dense --length 0", "'0' is not a size"),
        ("plan dense --length=--", "argument --length: got '--'; expected a value"),
        ("plan ring_dilated --length 1k", "a dilated pattern needs --segment-lengths and --dilation-rates; e.g."),
        ("plan ring_block_sparse --length 1k", "a block-sparse pattern needs either --window or --density"),
        ("plan longnet-tiny --length 1k --infer --checkpoint", "--checkpoint and --infer are given"),
        ("plan dense --length 1k --memory 0", "is not a memory size"),
        ("recommend training --length 64 --parameters many", "'many' is not a number of parameters"),
        ("show titan", "(titan: attention(…, bias=Distance(coordinates, slopes))"),
        ("plan Prov-GigaPath --length 1k", "(gigapath: load_torchscale('slide_encoder.pth') loads"),
        ("show longnet-tiny --length 64", "unrecognized arguments"),
        (f"{DILATED} --head-offsets 0,x", "expected cyclic, blocked, zero, or for each branch one offset per head"),
        (f"{DILATED} --head-offsets cyclic blocked", "head_offsets"),
        (f"{DILATED} --image x.data", "Format 'data' is not supported"),
        (f"{DILATED} --image .", "--image is '.', a folder; expected a file"),
        ("show block_sparse --window 1 --density-kind local", "--density-kind given, which needs --density: drop --density-kind"),
        ("show block_sparse --density 0.1 --global-tokens 4", "--global-tokens given, which --density replaces: drop --global-tokens"),
        (f"{WARMUP} --heads 4", "--heads given, which gigapath-12l768d does not take; it takes none of these: drop --heads"),
        # numbers that no machine has
        (f"plan dense --gpu H200 --length {10**24}", "--length"),
        ("plan ring --gpu H200 --length 65536 --world-size 1000000000", "world_size"),
        (f"show block_sparse --window 128 --heads {2**31}", "--heads"),
        ("show block_sparse --density nan", "ratio"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_is_expected(line: str, said: str, capsys: Capture) -> None:
    began = time.process_time()
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    captured = capsys.readouterr()
    # before anything is computed
    assert time.process_time() - began < 5
    assert caught.value.code == 2 and captured.out == "" and said in captured.err.splitlines()[-1]


@pytest.mark.parametrize(("text", "number"), [("65536", 65536), ("64k", 65536), ("1M", 2**20), ("2G", 2**31)])
def test_sizes_are_powers_of_two(text: str, number: int) -> None:
    assert size(text) == count(text) == number and count("0") == 0


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5k", "١", "many"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="64k is 65536"):
        size(text)


def test_an_interrupt_ends_without_a_traceback(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(device: object = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(factory, "detect", interrupted)
    assert main(["info"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "interrupted\n"


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
def test_a_reader_that_has_gone_ends_it_without_a_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([sys.executable, "-m", "dilated_attention", "info"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.parametrize("command", ["info", "show", "plan", "recommend", "bench", "generate", "evaluate", "warmup"])
def test_every_command_explains_itself(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0 and f"dilated_attention {command}" in capsys.readouterr().out


@pytest.mark.parametrize("what", [f"{WARMUP} --train", "warmup dilated --segment-lengths 64 256 --dilation-rates 1 2"])
def test_warmup_needs_a_gpu(what: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(what.split()) == 1
    captured = capsys.readouterr()
    assert "compiles for this machine's GPU, and torch sees none" in captured.err and not captured.out


def test_warmup_of_no_kernel_prints_no_empty_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(warmup, "_run_call", lambda args, pattern: None)
    assert printed(capsys, "warmup dense").startswith("0 kernels in ")
