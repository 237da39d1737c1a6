"""The benchmarks' harness: right first, fair turns, files that are continued, tables from files alone."""

from __future__ import annotations

import argparse
import functools
import json
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.bench import Group, Results, Row, Session, Suite, run
from dilated_attention.bench.measure import contest as measuring
from dilated_attention.bench.measure.contest import measure
from dilated_attention.bench.measure.limits import Refused, attempt
from dilated_attention.bench.measure.timing import Timing, interleaved, summary
from dilated_attention.bench.report.rows import machine
from dilated_attention.bench.report.tables import across, compared, failures, figure, listing
from dilated_attention.bench.workloads.contenders import DENSE, MODULES, MULTIHEAD, STANDARD, Contender, dense_pattern
from dilated_attention.bench.workloads.problem import Problem, geometric
from dilated_attention.cli import main
from dilated_attention.parsing import size

CPU = torch.device("cpu")
TINY = Problem(num_positions=96, num_heads=2, head_dim=16)


def session(**options: Any) -> Session:
    return Session(device=CPU, full=False, dtypes=(torch.float32,), seconds=0.01, options=argparse.Namespace(**options))


class Counted(Suite):
    """Three groups; it counts how often each was measured."""

    name = "counted"
    about = "groups that count"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: BaseException | None = None

    def groups(self, session: Session) -> Sequence[Group]:
        return [Group(label, functools.partial(self._measure, label)) for label in ("a", "b", "c")]

    def _measure(self, label: str) -> list[Row]:
        self.calls.append(label)
        if label == "b" and self.fails is not None:
            raise self.fails
        return [Row(name="one", case={"N": 1024 * len(self.calls)}, values={"ms": 1.5})]

    def tables(self, results: Results) -> list[Any]:
        return [*across(results.rows, "N", "ms", title="time"), *failures(results)]


def test_what_a_file_holds_is_not_measured_again(tmp_path: Path) -> None:
    suite = Counted()
    suite.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(suite, session(), output=tmp_path)
    assert list(Results.load(tmp_path / "counted.json").groups) == ["a"]
    suite.fails = None
    outcome = run(suite, session(), output=tmp_path)
    assert suite.calls == ["a", "b", "b", "c"]
    assert outcome.measured == 2
    assert [path.name for path in outcome.written] == ["counted.json", "counted.md"]
    assert "| one |" in (tmp_path / "counted.md").read_text()
    assert run(suite, session(), output=tmp_path).measured == 0
    assert run(suite, session(), output=tmp_path, fresh=True).measured == 3


def test_a_file_of_other_hardware_versions_or_settings_is_not_continued(tmp_path: Path) -> None:
    run(Counted(), session(), output=tmp_path)
    path = tmp_path / "counted.json"
    whole = json.loads(path.read_text())
    for section, key, value in (("hardware", "device", "an abacus"), ("versions", "torch", "0.1"), ("settings", "size", "full")):
        changed = json.loads(json.dumps(whole))
        (changed["machine"][section] if section in changed["machine"] else changed["settings"])[key] = value
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=f"made with other {section}: {key} '{value}' there.*--fresh"):
            run(Counted(), session(), output=tmp_path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a benchmark result"):
        run(Counted(), session(), output=tmp_path)


def one_row(name: str, ms: float) -> Row:
    return Row(name=name, case={"N": 1024}, values={"ms": ms})


def test_two_runs_into_one_folder_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    """The second begins and ends while the first measures: other groups, and other rows of the same group."""

    class Lengths(Counted):
        def __init__(self, labels: str, meanwhile: Suite | None = None) -> None:
            super().__init__()
            self.labels, self.meanwhile = labels, meanwhile

        def groups(self, session: Session) -> Sequence[Group]:
            return [Group(label, functools.partial(self._measure, label)) for label in self.labels]

        def _measure(self, label: str) -> list[Row]:
            if label == "b" and self.meanwhile is not None:
                run(self.meanwhile, session(), output=tmp_path)
            return [one_row(f"{label} of {self.labels}", 1.5)]

    first = run(Lengths("abc", Lengths("bde")), session(), output=tmp_path)
    found = {label: sorted(row.name for row in rows) for label, rows in Results.load(tmp_path / "counted.json").groups.items()}
    every = {"a": ["a of abc"], "b": ["b of abc", "b of bde"], "c": ["c of abc"], "d": ["d of bde"], "e": ["e of bde"]}
    assert found == every
    assert {row.name for row in first.together.rows} == {name for names in every.values() for name in names}
    # its own are what it is judged by
    assert sorted(first.results.groups) == ["a", "b", "c"]
    markdown = (tmp_path / "counted.md").read_text()
    assert all(name in markdown for names in every.values() for name in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counted.json", "counted.md"]


def test_a_fresh_run_drops_what_was_there_and_keeps_what_comes_meanwhile(tmp_path: Path) -> None:
    here, path = machine(CPU), tmp_path / "s.json"
    Results("s", here, {}, {"old": [one_row("x", 1.0)], "both": [one_row("x", 1.0), one_row("y", 1.0)]}, path).save()
    another = Results.open(path, "s", here, {})
    fresh = Results.open(path, "s", here, {}, fresh=True)
    fresh.add("both", [one_row("x", 2.0)])
    assert Results.load(path).groups == {"both": [one_row("x", 2.0)]}
    another.add("new", [one_row("x", 3.0)])
    fresh.add("last", [one_row("x", 4.0)])
    # what the other has read before comes back with it or not, its new group stays, and so do the fresh rows
    assert Results.load(path).groups == {"both": [one_row("x", 2.0)], "new": [one_row("x", 3.0)], "last": [one_row("x", 4.0)]}
    # of other settings, or none of ours: replaced, whatever it holds
    for spoilt in (Results("s", here, {"size": "full"}, {"old": []}, path).text(), "[]", "{", "[" * 10_000):
        path.write_text(spoilt)
        fresh = Results.open(path, "s", here, {}, fresh=True)
        fresh.add("new", [one_row("x", 1.0)])
        fresh.add("more", [])
        assert Results.load(path).groups == {"new": [one_row("x", 1.0)], "more": []}


def test_a_run_of_other_settings_meanwhile_is_an_error_and_not_a_loss(tmp_path: Path) -> None:
    here, path = machine(CPU), tmp_path / "s.json"
    first, second = Results.open(path, "s", here, {"size": "full"}), Results.open(path, "s", here, {"size": "small"})
    first.add("a", [one_row("x", 1.0)])
    with pytest.raises(ValueError, match=r"made with other settings: size 'full' there, 'small' here; .*another --output"):
        second.add("a", [one_row("x", 2.0)])
    assert Results.load(path).settings == {"size": "full"}


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: [whole],
        lambda whole: whole | {"groups": []},
        lambda whole: whole | {"groups": {"a": [{"name": 1, "case": {}}]}},
        lambda whole: whole | {"groups": {"a": [{"name": "x", "case": []}]}},
        lambda whole: whole | {"machine": {}},
        lambda whole: whole | {"machine": whole["machine"] | {"hardware": {}}},
        lambda whole: whole | {"machine": whole["machine"] | {"versions": 1}},
        lambda whole: whole | {"settings": None},
    ],
)
def test_a_file_of_another_form_is_named(change: Any, tmp_path: Path) -> None:
    path = tmp_path / "counted.json"
    run(Counted(), session(), output=tmp_path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=r"counted\.json is not a benchmark result of schema 1 .*--fresh replaces it"):
        run(Counted(), session(), output=tmp_path)


def test_a_time_limit_leaves_groups_for_the_next_run(tmp_path: Path) -> None:
    suite = Counted()
    outcome = run(suite, session(), output=tmp_path, minutes=0.0)
    assert (suite.calls, outcome.left_out) == ([], ["a", "b", "c"])
    assert run(suite, session(), output=tmp_path, minutes=5.0).left_out == []


def test_out_of_memory_of_a_group_is_a_row_and_other_errors_are_not(tmp_path: Path) -> None:
    suite = Counted()
    suite.fails = torch.OutOfMemoryError("CUDA out of memory")
    rows = run(suite, session(), output=tmp_path).results.groups["b"]
    assert [row.note for row in rows] == ["out of memory"]
    assert "| b | out of memory |" in (tmp_path / "counted.md").read_text()
    suite.fails = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        run(suite, session(), output=tmp_path, fresh=True)


def test_a_wrong_contender_has_no_speed() -> None:
    def leaky(problem: Problem) -> Any:
        right = STANDARD.make(problem)
        # what a kernel that forgets the scale gives
        return lambda q, k, v: right(q * 1.5, k, v)

    rows = measure([Contender(name="leaky", what="", make=leaky, pattern=dense_pattern), STANDARD], TINY, seconds=0.01)
    assert [row.name for row in rows if row.note] == ["leaky"]
    assert rows[0].note.startswith("wrong: out off by")
    assert not rows[0].values
    assert {(row.name, row.case["pass"]) for row in rows[1:]} == {("standard", which) for which in ("forward", "backward", "both")}


def test_a_wrong_gradient_alone_has_no_speed_either() -> None:
    def detached(problem: Problem) -> Any:
        right = STANDARD.make(problem)
        return lambda q, k, v: right(q, k.detach() + 0.5 * (k - k.detach()), v)

    (row,) = measure([Contender(name="biased", what="", make=detached, pattern=dense_pattern)], TINY, seconds=0.01)
    assert row.note.startswith("wrong: dk off by")


def test_one_contender_at_a_time_holds_graphs_of_a_backward() -> None:
    made: list[tuple[str, weakref.ref[torch.Tensor]]] = []

    def watched(name: str) -> Contender:
        def make(problem: Problem) -> Any:
            right = STANDARD.make(problem)

            def attend(*qkv: torch.Tensor) -> torch.Tensor:
                assert not [other for other, out in made if other != name and out() is not None]
                out: torch.Tensor = right(*qkv)
                made.append((name, weakref.ref(out)))
                return out

            return attend

        return Contender(name=name, what="", make=make, pattern=dense_pattern)

    rows = measure([watched("one"), watched("two")], TINY, passes=("backward",), seconds=0.001)
    assert [(row.name, row.note) for row in rows] == [("one", ""), ("two", "")] and len(made) > 8


@pytest.mark.slow
def test_what_fits_alone_only_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    together = measuring.interleaved

    def crowded(functions: Any, *arguments: Any, **options: Any) -> dict[str, Timing]:
        if len(functions) > 1 or "neighbour" in functions:
            raise torch.OutOfMemoryError("out of memory")
        return together(functions, *arguments, **options)

    monkeypatch.setattr(measuring, "interleaved", crowded)
    neighbour = Contender(name="neighbour", what="", make=STANDARD.make, pattern=dense_pattern)
    rows = measure([STANDARD, neighbour], TINY, passes=("forward", "both"), seconds=0.01)
    found = {(row.name, row.case["pass"]): row for row in rows}
    for which in ("forward", "both"):
        assert found["standard", which].values["ms"] > 0
        assert found["neighbour", which].note == "out of memory" and not found["neighbour", which].values
    assert len(rows) == 4


@pytest.mark.parametrize("is_causal", [False, True])
def test_every_contender_that_can_is_right_and_timed(is_causal: bool) -> None:
    problem = Problem(num_positions=200, num_heads=4, head_dim=16, batch_size=2, is_causal=is_causal)
    rows = measure([*DENSE, *MODULES, *MULTIHEAD], problem, passes=("both",), seconds=0.001)
    assert not [row for row in rows if row.note.startswith("wrong")]
    found = {row.name: row for row in rows if row.values}
    needed = {"standard", "torch sdpa", "sdpa_cpu", *(contender.name for contender in MODULES), "MultiheadDilatedAttention"}
    assert needed <= set(found)
    for name, row in found.items():
        assert 0 < row.values["low_ms"] <= row.values["ms"] <= row.values["high_ms"], name
        if "tflops" in row.values:
            pairs = next(c for c in (*DENSE, *MODULES, *MULTIHEAD) if c.name == name).pairs(problem)
            assert pairs is not None
            assert row.values["tflops"] == pytest.approx(14 * pairs * 16 / row.values["ms"] / 1e9)


def test_turns_are_fair() -> None:
    order: list[str] = []

    def slow() -> None:
        order.append("slow")
        time.sleep(0.06)

    def fast() -> None:
        order.append("fast")
        time.sleep(0.055)

    times = interleaved({"slow": lambda: slow, "fast": lambda: fast}, CPU, seconds=0.2, most=4)
    # a call of each first, then turn by turn
    assert order[2:] == ["slow", "fast"] * (len(order[2:]) // 2)
    assert times["slow"]["samples"] == times["fast"]["samples"] >= 3
    # a busy machine wakes sleepers late, never early
    assert times["slow"]["ms"] >= 59 and times["fast"]["ms"] >= 54
    assert summary([3.0, 1.0, 2.0])["ms"] == 2.0


def test_refusals_become_notes() -> None:
    def refuse() -> None:
        raise Refused("no such shape\nsecond line")

    assert attempt(refuse) == (None, "no such shape")
    rows = measure([contender for contender in DENSE if contender.name in ("flash4", "flash3_fp8")], TINY, seconds=0.01)
    assert all("runs on cuda, not on cpu" in row.note for row in rows)
    assert len(rows) == 2


def test_tables_say_why_a_figure_is_missing() -> None:
    rows = [
        Row(name="a", case={"N": 1024}, values={"ms": 2.0}),
        Row(name="a", case={"N": 2048}, note="out of memory"),
        Row(name="b", case={"N": 1024}, values={"ms": 1.0}),
        Row(name="c", case={"N": 1024}, note="runs on cuda"),
        Row(name="d", case={"N": 1024}, note="runs on cuda"),
    ]
    columns = {"N": ("N", 1.0), "s": ("ms", 1e-3), "×": ("times", 1.0), "no": ("none", 1.0)}
    (table,) = listing(compared(rows, "ms", "a", "N"), columns, title="t")
    assert table.columns == ("", "N", "s", "×", "")
    assert table.rows[:3] == [
        ["a", "1,024", "0.002", "1", ""], ["a", "2,048", "–", "–", "out of memory"], ["b", "1,024", "0.001", "2", ""]]  # fmt: skip
    (table,) = across(rows, "N", "ms", title="t")
    assert table.rows == [["a", "2", "out of memory"], ["b", "1", "–"]]
    assert table.markdown().splitlines()[2] == "| N | 1024 | 2048 |"
    assert [figure(x) for x in (0, 1234.5, 12.345, 0.00001)] == ["0", "1,234", "12.3", "1.0e-05"]


def test_rows_and_machines_survive_their_file(tmp_path: Path) -> None:
    here = machine(CPU)
    assert here["hardware"]["threads"] == torch.get_num_threads()
    results = Results("s", here, {"a": [1, 2]}, path=tmp_path / "s.json")
    row = Row(name="x", case={"N": 1, "causal": True}, values={"ms": 1.23456789, "peak_bytes": 123456789}, errors={"out": 1e-9}, note="n")
    results.add("g", [row])
    results.add("empty", [])
    back = Results.load(tmp_path / "s.json")
    assert back.machine == here and back.settings == {"a": [1, 2]}
    assert back.groups["g"][0].values == {"ms": 1.2346, "peak_bytes": 123456789}
    assert back.groups["g"][0].key == row.key
    assert back.groups["empty"] == []


def test_sizes_and_branches() -> None:
    assert [size(text) for text in ("512", "64k", "1M", "2g")] == [512, 65536, 2**20, 2**31]
    for text in ("", "k", "0", "-1", "1.5k", "1e3"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
            size(text)
    assert geometric(2**17) == ((2048, 8192, 32768, 131072), (1, 4, 16, 64))
    assert geometric(1000)[0][-1] >= 1000


@pytest.mark.slow
def test_the_command_line_measures_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "speed", "--output", str(tmp_path), "--seconds", "0.001", "--lengths", "64", "--masks", "full"]
    command += ["--contenders", "standard", "DilatedAttention"]
    assert main(command) == 0
    first = capsys.readouterr()
    assert "DilatedAttention" in first.out and "speed 1/" in first.err
    assert main([*command, "--json"]) == 0
    again = capsys.readouterr()
    assert again.err == ""
    assert json.loads(again.out)["rows"][0]["values"]["ms"] > 0
    assert main([*command, "--dtypes", "bfloat16", "--fresh", "--minutes", "0"]) == 0
    assert "--minutes ran out before" in capsys.readouterr().err
    for bad, text in ((["--device", "cuda:99"], "--device is 'cuda:99'"), (["--seconds", "0"], "--seconds: '0' is not a number above 0")):
        with pytest.raises(SystemExit) as caught:
            main([*command, *bad])
        assert caught.value.code == 2
        assert text in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_gpu_is_timed_by_events_and_its_memory_counted() -> None:
    problem = Problem(num_positions=2048, num_heads=4, head_dim=64, batch_size=2, dtype=torch.bfloat16, device=torch.device("cuda"))
    rows = measure([*DENSE, *MODULES, *MULTIHEAD], problem, seconds=0.05, memory=True)
    assert not [row for row in rows if row.note.startswith("wrong")]
    found = {(row.name, row.case["pass"]): row.values for row in rows if row.values}
    assert found["standard", "forward"]["peak_bytes"] > found["sdpa_cudnn", "forward"]["peak_bytes"] >= problem.bytes // 3
    assert 0 < found["standard", "forward"]["ms"] < found["standard", "both"]["ms"] < 1000
