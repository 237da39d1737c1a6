"""benchmarks/: who is wrong gets no time, cases and results are what they say, and each suite runs in its smallest form."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import contenders, copies, speed
from benchmarks.__main__ import main
from benchmarks.case import FAMILIES, Case, case_names, dense_pattern, geometric, make_case, new_lengths, pairs, small
from benchmarks.contenders import Contender, contender
from benchmarks.report import Results, Row, slower
from benchmarks.truth import BOUNDS, wrong
from dilated_attention.pattern import DilatedPattern, RandomBlocks
from tests.helpers.scripts import run_script

CPU = torch.device("cpu")
PATTERN = DilatedPattern((7, 16, 40), (1, 3, 4))
BLOCKED = DilatedPattern((7, 16, 40), (1, 3, 4), "blocked", tail="zero_keys")
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "detached": {"pattern": BLOCKED, "mixture_grad": "detached"},
    "random": {"padding": ("random", 0.3), "pattern": None, "batch_size": 2},
    "dropout": {"dropout_p": 0.2, "batch_size": 2},
    "documents": {"bounds": (0, 11, 12, 37), "pattern": BLOCKED},
    "window": {"window": (5, 0), "pattern": None, "is_causal": True},
    "rectangle": {"queries": 9, "is_causal": True},
    "grouped": {"num_kv_heads": 2, "is_causal": True},
    # of which a part of the rows is compared
    "blocks": {"pattern": RandomBlocks(0.5, own_block=True, block_size=64), "num_positions": 600, "is_causal": True},
}


def make(**options: Any) -> tuple[Case, str]:
    mixture = options.pop("mixture_grad", "exact")
    shape: dict[str, Any] = {"name": "", "num_positions": 37, "num_heads": 6, "head_dim": 4, "dtype": torch.float64, "pattern": PATTERN}
    return Case(**shape | options), mixture


@pytest.mark.parametrize("name", OPTIONS)
def test_the_truth_is_what_this_library_computes(name: str) -> None:
    """Which is the definition: engine/test_oracle.py. A thousandth off in any result is seen."""
    case, mixture = make(**OPTIONS[name])
    one = contenders.ours("", **({"mixture_grad": mixture} if isinstance(case.pattern, DilatedPattern) else {}))
    call = one.make(case)
    errors = one.errors(case, call, gradients=True)
    assert set(errors) == {"out", "dq", "dk", "dv"} and max(errors.values()) < 1e-10, errors
    assert wrong(errors, BOUNDS[torch.float64]) == ""
    # the same keys with a larger gradient
    errors = one.errors(case, lambda q, k, v: call(q, k + 0.001 * (k - k.detach()), v), gradients=True, rows=5)
    assert errors["dk"] == pytest.approx(0.001, rel=1e-3)
    assert wrong(errors, BOUNDS[torch.float64]).startswith("wrong: dk off by 1.0e-03")
    assert wrong({"out": math.nan}, 1e-3).startswith("wrong: out off by nan")


def test_pairs_are_counted() -> None:
    case, _ = make(window=(5, 2), pattern=None, batch_size=2)
    assert pairs(case, dense_pattern(case)) == 2 * 6 * sum(1 for i in range(37) for j in range(37) if i - 5 <= j <= i + 2)


def test_names_are_cases() -> None:
    case = make_case("longnet-32768-full-x2-d128", CPU, torch.bfloat16)
    assert (case.num_positions, case.is_causal, case.batch_size, case.head_dim, case.num_heads) == (32768, False, 2, 128, 12)
    assert make_case("option-documents", CPU, torch.float32).bounds[-1] == 131_072
    assert case_names(["giga*"], [64, 128]) == ["gigapath-64", "gigapath-128"] and "blocks10-32768" in case_names()
    with pytest.raises(ValueError, match=r"there is no case 'gigapat-10'; expected FAMILY-LENGTH.*gigapath"):
        make_case("gigapat-10", CPU, torch.float32)
    for name, family in FAMILIES.items():
        assert make_case(case_names([f"{name}*"])[0], CPU, torch.float32, is_small=True).num_positions <= 512
        assert [contender(one).name for one in family.contenders] == list(family.contenders)
    # rates of all lengths are powers of four, so that results can be compared by length
    assert geometric(2**16) == DilatedPattern((2048, 8192, 32768, 131072), (1, 4, 16, 64))
    assert geometric(1000) == DilatedPattern((125, 500, 2000), (1, 4, 16)) and small(None) is None
    lengths = list(new_lengths(case, 27))
    assert len(set(lengths)) == 27 and 32768 not in lengths and all(13_000 < n < 52_500 for n in lengths)


def test_who_is_wrong_gets_no_time() -> None:
    def broken(case: Case) -> Any:
        return lambda q, k, v: contenders.our_call(case, case.pattern, q, k, v).roll(1, 1)

    case = make_case("gigapath-5308", CPU, torch.float32, is_small=True)
    names = [contender("ours"), Contender(name="broken", make=broken), *map(contender, ("torchscale", "ours flash4"))]
    rows = speed.measure(names, case, passes=["forward", "both"], seconds=0.001)
    notes = {row.name: row.note for row in rows if not row.values}
    assert notes["broken"].startswith("wrong: out off by") and "--torchscale PATH" in notes["torchscale"] and "cuda" in notes["ours flash4"]
    timed = {(row.name, row.case["pass"]): row.values for row in rows if row.values}
    assert set(timed) == {("ours", "forward"), ("ours", "both")}
    for (_, which), values in timed.items():
        assert all(values[key] > 0 for key in ("ms", "called", "host"))
        flops = speed.FLOPS[which] * pairs(case, case.branches) * case.head_dim
        assert values["tflops"] == pytest.approx(flops / values["ms"] / 1e9, rel=1e-6)


def test_results_are_written_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["speed", "--cases", "gigapath-200", "--contenders", "ours", "torch sdpa", "--passes", "forward", "--seconds", "0.001"]
    assert main([*command, "--output", str(tmp_path / "a")]) == 0
    text = capsys.readouterr().out
    assert "gigapath-200" in text or "**forward**" in text
    path = tmp_path / "a" / "speed.json"
    first = json.loads(path.read_text())
    assert (tmp_path / "a" / "speed.md").read_text().startswith("## speed")
    # what was a thousand times as fast then is slower now; other people's code is not blamed
    for rows in first["groups"].values():
        for row in rows:
            row["values"] = {key: value / 1000 if row["name"] == "ours" else value for key, value in row["values"].items()}
    path.write_text(json.dumps(first))
    assert main([*command, "--output", str(tmp_path / "b"), "--against", str(tmp_path / "a")]) == 1
    assert "ours, forward:" in capsys.readouterr().out
    path.write_text("{}")
    assert main([*command, "--output", str(tmp_path / "b"), "--against", str(tmp_path / "a")]) == 2
    assert "is no result of a suite" in capsys.readouterr().err


def rows_of(**times: float) -> list[Row]:
    return [Row(name=name, case={"pass": "forward"}, values={"called": ms}) for name, ms in times.items()]


@pytest.mark.parametrize(
    ("now", "is_slower"),
    [({"ours": 13.0, "torch": 4.0}, True), ({"ours": 13.0, "torch": 5.2}, False), ({"torch": 4.0}, True)],
)
def test_slower_is_by_itself_and_beside_others(now: dict[str, float], is_slower: bool) -> None:
    then = Results("speed", {}, {"a": rows_of(ours=10.0, torch=4.0)})
    assert bool(slower("a", rows_of(**now), then, 0.2)) == is_slower


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["extreme", "--lengths", "1k", "--heads", "1"],
        ["train-infer", "--tasks", "decode", "slides", "--slides", "2", "--tiles", "60", "--contexts", "1k"],
        ["scaling", "--cases", "gigapath-195", "dense-32", "packed-*", "--heads", "2", "2", "16", "--lengths-vary"],
    ],
    ids=lambda command: command[0],
)
def test_every_suite_runs(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--output", str(tmp_path), "--seconds", "0.001", "--size", "small"]) == 0
    rows = Results.load(tmp_path / f"{command[0]}.json").rows
    assert rows and not [row for row in rows if row.note.startswith(("wrong", "raised"))]
    assert {key for row in rows for key in row.values}
    assert all({"first_ms", "new_ms"} <= row.values.keys() for row in rows if row.case.get("task") == "slides")


PROCESSES = """
import torch
from benchmarks.__main__ import main
from benchmarks.scaling import Ranks
from benchmarks.timing import Refused

ranks = Ranks(torch.device("cpu"))

def refuse(error):
    if ranks.rank == 1:
        raise error

for error in (Refused("no"), KeyError("bug")):
    try:
        ranks.everywhere(lambda: refuse(error))
    except (Refused, RuntimeError) as told:
        print(f"{type(told).__name__}: {told}")
sys.exit(main(["scaling", "--cases", "gigapath-195", "--heads", "2", "2", "16", "--seconds", "0.001", "--output", sys.argv[1]]))
"""


@pytest.mark.distributed
def test_processes_measure_and_fail_together(tmp_path: Path) -> None:
    file = tmp_path / "both.py"
    # benchmarks are not installed: the script finds them in the repository
    file.write_text(f"import sys\nsys.path.insert(1, {str(Path(__file__).parents[2])!r})\n{PROCESSES}")
    result = run_script(file, str(tmp_path), processes=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Refused: process 1: no") == 2 and result.stdout.count("RuntimeError: process 1: KeyError: 'bug'") == 2
    rows = {(row.name, row.case["pass"]): row for row in Results.load(tmp_path / "scaling.json").rows}
    assert {name for name, _ in rows} == {"one process", "kernel", "ring"}
    assert not [row.note for row in rows.values() if row.note]
    ring = rows["ring", "both"]
    assert ring.case["N"] == 390 and set(ring.errors) == {"out", "dq", "dk", "dv"}
    whole = rows["one process", "both"].values["called"]
    assert ring.values["efficiency"] == pytest.approx(whole / 2 / ring.values["called"], rel=1e-3)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("speed --device tpu", "--device tpu"),
        ("speed --cases longnet-64-x0", "there is no case 'longnet-64-x0'"),
        ("speed --seconds nan", "nan is not a finite number above 0"),
        ("speed --output file", "is a file; expected a folder"),
        ("speed --torchscale file", "there is no torchscale/component/dilated_attention.py in it; git clone"),
        ("scaling --cases nope", "no case has such a name"),
        ("extreme --memory-gib 0", "0 is not a finite number above 0"),
        ("train-infer --tasks parity", "expected --torchscale PATH, --gigapath PATH or both"),
        ("train-infer --tasks parity --gigapath no/such", "there is no gigapath/slide_encoder.py in it; git clone"),
        ("train-infer --tasks parity --gigapath . --tiles 101 --grid 10", "do not fit on a grid of 10"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    try:
        code: int | str | None = main(command.split())
    except SystemExit as end:
        code = end.code
    assert code == 2 and said in capsys.readouterr().err


def test_the_search_ends_by_memory_and_one_process_refuses_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["extreme", "--kinds", "dilated", "--passes", "forward", "--memory-gib", "0.04", "--output", str(tmp_path)]) == 0
    *fits, last = Results.load(tmp_path / "extreme.json").rows
    assert fits and last.note == "out of memory" and all(row.values["bytes_per_token"] > 0 for row in fits)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["extreme"]) == 2 and "start it without torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(("note", "code"), [("wrong: output differs by 1.0e-03", 1), ("", 0)])
def test_a_difference_is_the_exit_code(note: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(name="encoder", case={"task": "parity"}, errors={"output": 1e-3}, note=note)
    monkeypatch.setattr(copies, "check_parity", lambda options: None)
    monkeypatch.setattr(copies, "measure_parity", lambda options: [row])
    assert main(["train-infer", "--tasks", "parity", "--output", str(tmp_path)]) == code
