"""Measured preference: tables order and nothing more, each for its own hardware; the sweep that makes them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilated_attention import dilated_attention, explain_backend
from dilated_attention.backends import AttentionRequest, Hardware, Registry, detect, registry, tuning_table
from dilated_attention.backends.tuning_table import PreferenceError, Timing, TuningRow, TuningTable
from dilated_attention.cli import main
from dilated_attention.factory import EXAMPLES, tune

CPU = detect("cpu")
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DILATED_ATTENTION_CACHE", str(tmp_path))
    tuning_table.refresh()
    yield tmp_path
    tuning_table.refresh()


def row(
    *names: str, which: str = "forward", dtype: str = "float32", head_dim: int = 64, length: int = 1024, causal: bool = False
) -> TuningRow:
    timings = tuple(Timing(name, float(i + 1), 1.0 / (i + 1)) for i, name in enumerate(names))
    return TuningRow(which=which, dtype=dtype, head_dim=head_dim, length=length, causal=causal, timings=timings)


def write(*rows: TuningRow, hardware: Hardware = CPU, path: Path | None = None) -> Path:
    environment = tuning_table.environment(hardware)
    table = TuningTable(architecture=hardware.architecture, environment=environment, date="2026-01-02", source="a test", rows=rows)
    path = path or tuning_table.cache_path(hardware)
    tuning_table.save(table, path)
    tuning_table.refresh()
    return path


def ask(**wanted: object) -> AttentionRequest:
    return AttentionRequest(**({"hardware": CPU, "dtype": F32, "head_dim": 64, "length": 1024} | wanted))  # type: ignore[arg-type]


def test_measured_order_is_taken_and_only_for_its_kind_of_call() -> None:
    write(row("math", "sdpa_cpu"))
    assert registry.order(ask())[:2] == ("math", "sdpa_cpu")
    assert registry.select(ask()).name == "math"
    others = (
        {"causal": True},
        {"needs_grad": True},
        {"dtype": BF16},
        {"dtype": torch.float64},
        {"key_mask": True},
        {"window": True},
        {"precision": "fp8"},
    )
    for other in others:
        assert registry.order(ask(**other))[0] == "sdpa_cpu", other
    # a forward is as deterministic as it is; a gradient was timed without
    assert registry.order(ask(deterministic=True))[0] == "math"
    write(row("math", "sdpa_cpu", which="backward"))
    assert registry.order(ask(needs_grad=True))[0] == "math"
    assert registry.order(ask(needs_grad=True, deterministic=True))[0] == "sdpa_cpu"


def test_a_table_orders_and_why_not_decides() -> None:
    write(row("flash4", "of a later release", "math"))
    assert registry.order(ask())[:3] == ("flash4", "math", "sdpa_cpu")
    assert sorted(registry.order(ask())) == sorted(registry.names())
    assert registry.select(ask()).name == "math"
    fresh = Registry()
    fresh.register(registry.get("sdpa_cpu"))
    assert fresh.order(ask()) == ("sdpa_cpu",)


def test_head_dims_round_up_and_lengths_go_to_the_nearest_by_ratio() -> None:
    rows = [row("math", head_dim=d, length=n) for d in (32, 64, 128) for n in (256, 1024, 8192)]
    table = TuningTable(architecture="cpu", environment={}, date="", source="", rows=tuple(rows))

    def found(head_dim: int, length: int) -> tuple[int, int]:
        taken = table.row_for(ask(head_dim=head_dim, length=length))
        assert taken is not None
        return taken.head_dim, taken.length

    assert [found(d, 256)[0] for d in (1, 32, 33, 64, 65, 128, 129, 999)] == [32, 32, 64, 64, 128, 128, 128, 128]
    # 512 and 2896 lie in the middle, by ratio: the longer
    assert [found(32, n)[1] for n in (1, 256, 511, 512, 1024, 2800, 2900, 10**6)] == [256, 256, 256, 1024, 1024, 1024, 8192, 8192]
    assert found(64, 0) == (64, 8192)


def test_an_answer_changes_with_refresh_and_not_before(cache: Path) -> None:
    assert registry.select(ask()).name == "sdpa_cpu"
    environment = tuning_table.environment(CPU)
    table = TuningTable(architecture="cpu", environment=environment, date="2026-01-02", source="", rows=(row("math"),))
    tuning_table.save(table, tuning_table.cache_path(CPU))
    assert registry.select(ask()).name == "sdpa_cpu"
    assert registry.order(ask(head_dim=32))[0] == "sdpa_cpu"
    tuning_table.refresh()
    assert registry.select(ask()).name == "math"
    # what is read stays read
    tuning_table.cache_path(CPU).unlink()
    assert registry.order(ask(head_dim=32))[0] == "math"


def test_round_trip_through_a_readable_file(cache: Path) -> None:
    path = write(row("math", "sdpa_cpu"), row("sdpa_cpu", causal=True))
    assert path.parent == cache
    assert path.name == f"preference-{tuning_table.fingerprint(CPU)}.json"
    table = tuning_table.load(path)
    assert table is not None
    assert table.rows == (row("math", "sdpa_cpu"), row("sdpa_cpu", causal=True))
    text = path.read_text()
    assert json.loads(text)["environment"]["versions"][0] == f"torch {torch.__version__}"
    assert sum('"pass"' in line for line in text.splitlines()) == 2
    assert [file.name for file in cache.iterdir()] == [path.name]


def test_a_table_of_other_versions_is_ignored_and_says_so(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = replace(CPU, versions=("torch 2.0.0",))
    path = write(row("math"), hardware=older)
    assert path != tuning_table.cache_path(CPU)
    with caplog.at_level("INFO", logger="dilated_attention"):
        assert registry.order(ask())[0] == "sdpa_cpu"
        assert registry.order(ask(head_dim=8))[0] == "sdpa_cpu"
    assert [path.name in line and "bench --tune" in line for line in caplog.messages] == [True]
    # the same file, named outright
    caplog.clear()
    monkeypatch.setenv("DILATED_ATTENTION_CACHE", str(path))
    tuning_table.refresh()
    with caplog.at_level("INFO", logger="dilated_attention"):
        assert registry.order(ask())[0] == "sdpa_cpu"
    [line] = caplog.messages
    assert "torch 2.0.0" in line
    assert f"torch {torch.__version__}" in line
    assert str(path) in line


def test_a_table_of_a_later_format_is_ignored_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    path = write(row("math"))
    path.write_text(json.dumps({"format": 99}))
    tuning_table.refresh()
    with caplog.at_level("INFO", logger="dilated_attention"):
        assert registry.order(ask())[0] == "sdpa_cpu"
    assert "format 99, this release reads 1" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda content: "{", "not JSON"),
        (lambda content: "[]", "holds a list"),
        (lambda content: json.dumps(content | {"date": 3}), "date is 3, expected str"),
        (lambda content: json.dumps(content | {"rows": [3]}), "row 0 is 3"),
        (lambda content: json.dumps(content | {"rows": [content["rows"][0] | {"pass": "sideways"}]}), "expected pass, dtype"),
        (lambda content: json.dumps(content | {"rows": [content["rows"][0] | {"length": 0}]}), "length ≥ 1"),
        (lambda content: json.dumps(content | {"rows": [content["rows"][0] | {"timings": [["math", "fast", 1]]}]}), "row 0"),
    ],
)
def test_a_spoilt_file_is_refused_with_its_name_and_a_way_out(spoil: object, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(row("math"))
    path.write_text(spoil(json.loads(path.read_text())))  # type: ignore[operator]
    tuning_table.refresh()
    with pytest.raises(PreferenceError, match="delete it, or replace it with python -m dilated_attention bench --tune") as caught:
        explain_backend(device="cpu")
    assert str(path) in str(caught.value)
    assert text in str(caught.value)
    q = torch.randn(1, 8, 2, 8)
    with pytest.raises(PreferenceError):
        dilated_attention(q, q, q, [4], [1])
    assert main(["info"]) == 1
    assert str(path) in capsys.readouterr().err
    # gone is gone, without a refresh
    path.unlink()
    dilated_attention(q, q, q, [4], [1])


def test_records_of_other_machines_are_not_ordered_by_this_ones_file() -> None:
    write(row("math"))
    for hardware in (
        EXAMPLES["cpu"],
        replace(CPU, versions=()),
        replace(CPU, name="another"),
        replace(CPU, packages=frozenset({"xformers"})),
    ):
        assert registry.order(ask(hardware=hardware))[0] == "sdpa_cpu", hardware
    for hardware in EXAMPLES.values():
        explanation = explain_backend(hardware=hardware)
        assert "measured here" not in str(explanation)


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = f"preference-{tuning_table.fingerprint(CPU)}.json"
    assert tuning_table.cache_path(CPU) == tmp_path / name
    monkeypatch.setenv("DILATED_ATTENTION_CACHE", str(tmp_path / "mine.json"))
    assert tuning_table.cache_path(CPU) == tmp_path / "mine.json"
    monkeypatch.delenv("DILATED_ATTENTION_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tuning_table.cache_path(CPU) == tmp_path / "xdg" / "dilated_attention" / name
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tuning_table.cache_path(CPU) == tmp_path / "home" / ".cache" / "dilated_attention" / name


def test_import_reads_no_table_and_needs_no_triton(cache: Path) -> None:
    write(row("math")).write_text("{")
    code = "import sys; sys.modules['triton'] = None; import dilated_attention as da; assert 'triton' in da.list_backends()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_shipped_tables_load_and_name_backends_that_exist() -> None:
    for path in tuning_table._SHIPPED.glob("*.json"):
        table = tuning_table.shipped(path.stem)
        assert table is not None
        assert table.architecture == path.stem
        assert table.rows
        assert table.source
        for entry in table.rows:
            assert set(entry.names) <= set(registry.names())
            rates = [timing.tflops for timing in entry.timings]
            assert rates == sorted(rates, reverse=True)


def test_the_shipped_table_speaks_for_its_architecture_on_any_machine() -> None:
    hopper = ask(hardware=EXAMPLES["hopper"], dtype=BF16)
    shipped = tuning_table.shipped("sm90")
    assert shipped is not None
    entry = shipped.row_for(hopper)
    assert entry is not None
    order = registry.order(hopper)[: len(entry.names)]
    assert sorted(order) == sorted(entry.names)
    rate = {timing.backend: timing.tflops for timing in entry.timings}
    # by rate, but for those of one machine that another might turn round
    assert all(rate[b] <= rate[a] * 1.031 for i, a in enumerate(order) for b in order[i + 1 :])
    causal = ask(hardware=EXAMPLES["hopper"], dtype=BF16, head_dim=128, causal=True, length=2048)
    assert registry.order(causal)[:2] == ("flash3", "flash4"), "625 against 555 TFLOP/s"
    assert registry.ranking(hopper).basis_of(entry.names[0]) == f"shipped table ({shipped.source}, {shipped.date})"
    # refused gradients stay refused, whatever the table says of the head dim that stands for this one
    assert registry.select(ask(hardware=EXAMPLES["hopper"], dtype=BF16, head_dim=48, needs_grad=True)).name != "flash4"
    assert registry.ranking(ask(hardware=EXAMPLES["ampere"], dtype=BF16)).bases[0][1] == "architecture order"
    before = [registry.select(replace(hopper, length=2**i)).name for i in range(18)]
    tuning_table.refresh()
    assert [registry.select(replace(hopper, length=2**i)).name for i in range(18)] == before


def test_what_was_measured_here_goes_before_what_was_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_table, "_SHIPPED", tmp_path / "shipped")
    write(row("flash2", "math", "flash3", dtype="half"), hardware=EXAMPLES["hopper"], path=tmp_path / "shipped" / "sm90.json")
    mine = replace(EXAMPLES["hopper"], versions=("torch 2.13.0",))
    write(row("sdpa_flash", "math", dtype="half"), hardware=mine)
    request = ask(hardware=mine, dtype=BF16)
    assert registry.order(request)[:5] == ("sdpa_flash", "math", "flash2", "flash3", "flash4")
    ranking = registry.ranking(request)
    assert ranking.basis_of("math").startswith("measured here (")
    assert ranking.basis_of("flash3") == "shipped table (a test, 2026-01-02)"
    assert ranking.basis_of("flash4") == "architecture order"
    assert ranking.basis_of("sdpa_cpu") == "order of registration"
    assert registry.order(replace(request, hardware=EXAMPLES["hopper"]))[:3] == ("flash2", "math", "flash3")


def test_the_explanation_says_what_made_the_order() -> None:
    assert "order: architecture order" in str(explain_backend(device="cpu"))
    path = write(row("math", "sdpa_cpu"))
    explanation = explain_backend(device="cpu", dtype=F32)
    assert explanation.forward_basis == f"measured here ({path}, 2026-01-02)"
    assert explanation.backward_basis == "architecture order"
    assert f"order: forward measured here ({path}, 2026-01-02) · backward architecture order" in str(explanation)
    assert explanation.as_dict()["forward_basis"] == explanation.forward_basis
    assert explain_backend(device="cpu", backend="math").forward_basis == "asked for by name"
    with pytest.raises(ValueError, match="length is -1"):
        explain_backend(length=-1)


@pytest.mark.slow
def test_tuning_from_the_command_line_to_the_choice(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--tune", "--device", "cpu", "--head-dims", "16", "--lengths", "32", "--seconds", "60"]
    assert main(command) == 0
    captured = capsys.readouterr()
    [path] = cache.glob("*.json")
    assert f"written to {path}" in captured.out
    assert "[4/4" in captured.err
    table = tuning_table.load(path)
    assert table is not None
    assert len(table.rows) == 8
    assert all(set(entry.names) == {"sdpa_cpu", "math"} for entry in table.rows)
    for entry in table.rows:
        times = [timing.ms or 0.0 for timing in entry.timings]
        assert times == sorted(times)
        assert times[0] > 0
    explanation = explain_backend(device="cpu", dtype=F32, length=32)
    assert explanation.forward_basis.startswith(f"measured here ({path}, 20")
    assert explanation.backward_basis == explanation.forward_basis
    assert main(["info", "--for", "cpu"]) == 0
    assert "measured here" not in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert main(["info"]) == 0
        assert f"preference: measured here ({path}" in capsys.readouterr().out


def test_tuning_into_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "mine.json"
    small = ["--device", "cpu", "--head-dims", "8", "--lengths", "16", "--dtypes", "float32", "--backends", "math"]
    assert main(["bench", "--tune", *small, "--output", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["file"] == str(path)
    assert [entry["timings"][0][0] for entry in answer["rows"]] == ["math"] * 4
    assert registry.order(ask(head_dim=8))[0] == "sdpa_cpu"
    monkeypatch.setenv("DILATED_ATTENTION_CACHE", str(path))
    tuning_table.refresh()
    assert registry.order(ask(head_dim=8))[0] == "math"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--seconds", "0"], 2, "'0' is not a number above 0"),
        (["--backends", "flash9"], 2, "--backends has flash9; expected some of flash4"),
        (["--backends", "flash4"], 1, "nothing was measured"),
        (["--device", "abacus"], 2, "--device is 'abacus'"),
    ],
)
def test_a_sweep_that_cannot_be_is_an_error(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    try:
        found = main(["bench", "--tune", "--device", "cpu", "--head-dims", "8", "--lengths", "16", *arguments])
    except SystemExit as ended:
        found = ended.code
    assert found == code
    assert text in capsys.readouterr().err
    assert not list(cache.iterdir())


def test_a_wrong_backend_has_no_place_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = registry.get("sdpa_cpu")
    backward, said = fast.backward, []

    def wrong(*args: object) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = backward(*args)  # type: ignore[arg-type]
        dk[0, 7] *= 2
        return dq, dk, dv

    monkeypatch.setattr(fast, "backward", wrong)
    sweep = replace(tune.default_sweep(CPU), head_dims=(16,), lengths=(32,), dtypes=("float32",))
    table = tune.measure(sweep, device="cpu", progress=said.append)
    names = {entry.which: set(entry.names) for entry in table.rows}
    assert names == {"forward": {"sdpa_cpu", "math"}, "backward": {"math"}}
    assert [line.split(":")[0] for line in said if "wrong" in line] == [
        "sdpa_cpu left out of backward float32 head_dim 16 full",
        "sdpa_cpu left out of backward float32 head_dim 16 causal",
    ]


def test_a_kernel_that_fails_or_returns_nan_does_not_end_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, said = registry.get("sdpa_cpu"), []

    def refuse(*args: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(fast, "backward", refuse)
    monkeypatch.setattr(
        fast, "forward", lambda q, k, v, options: (torch.full_like(q, torch.nan), q.new_zeros(q.shape[0], q.shape[2], q.shape[1]))
    )
    sweep = replace(tune.default_sweep(CPU), head_dims=(16,), lengths=(32,), dtypes=("float32",))
    table = tune.measure(sweep, device="cpu", progress=said.append)
    assert {name for entry in table.rows for name in entry.names} == {"math"}
    assert any("no kernel image" in line for line in said)
    assert any("wrong by inf" in line for line in said)


def test_shapes_of_a_sweep_stay_within_memory_and_launch_limits() -> None:
    for sweep in (tune.default_sweep(CPU), tune.default_sweep(EXAMPLES["hopper"])):
        for length, dtype, head_dim, _ in sweep.points():
            problems, rows, heads, dim = shape = sweep.shape(dtype, length, head_dim)
            assert (rows, dim) == (length, head_dim)
            assert 1 <= problems <= 65_535
            assert 1 <= heads <= 8
            assert math.prod(shape) <= sweep.max_elements
    points = tune.default_sweep(EXAMPLES["hopper"]).points()
    assert len(points) == len(set(points)) == 9 * 2 * 7 * 2
    # the first third knows every head dim and dtype at long, middling and short lengths
    assert len({(dtype, head_dim) for _, dtype, head_dim, _ in points[:84]}) == 14
    assert {length for length, *_ in points[:84]} == {65536, 8192, 1024}


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_tuning_on_a_gpu_finds_the_flash_kernel_faster_than_plain_products() -> None:
    sweep = replace(tune.default_sweep(detect("cuda")), head_dims=(64,), lengths=(2048,), backends=("sdpa_flash", "sdpa_efficient", "math"))
    table = tune.measure(sweep, device="cuda")
    half = [entry for entry in table.rows if entry.dtype == "half"]
    assert len(half) == 4
    assert all(entry.names[0] == "sdpa_flash" for entry in half)
    assert all(entry.names[-1] == "math" for entry in table.rows)


def _spoilt_tables() -> list[tuple[str, bytes]]:
    """Every field × every wrong kind of value, and files that are no JSON: (what, bytes)."""
    good = {
        "format": 1,
        "architecture": "cpu",
        "environment": tuning_table.environment(CPU),
        "date": "2026-01-02",
        "source": "a test",
        "rows": [tuning_table.as_dict(row("math", "sdpa_cpu"))],
    }
    huge = 10**400
    head = {
        "format": (None, True, 1.5, "1", [], {}, float("nan")),
        "architecture": (None, True, 3, huge, [], {}),
        "environment": (None, True, 3, huge, [], "x"),
        "date": (None, False, 3, huge, [], {}),
        "source": (None, False, 3, huge, [], {}),
        "rows": (None, True, 3, huge, {}, "rows", [None], [3], [[]], ["row"], [{}]),
    }
    wrong = (None, True, False, 0, -1, 1.5, huge, -huge, float("nan"), float("inf"), -float("inf"), "", "x", [], {}, [[]])
    of_row = dict.fromkeys(("pass", "dtype", "head_dim", "length", "timings"), wrong)
    of_row["causal"] = of_row["blocks"] = tuple(x for x in wrong if not isinstance(x, bool))
    of_row["timings"] = tuple(x for x in wrong if x != [])
    of_timing = {0: (None, True, 3, huge, [], {}), 2: (*(x for x in wrong if x != 1.5), "1", 0.0)}
    of_timing[1] = tuple(x for x in of_timing[2] if x is not None)
    tables: list[tuple[str, object]] = [
        (f"{name} {str(value)[:20]}", good | {name: value}) for name, values in head.items() for value in values
    ]
    tables += [(f"without {name}", {key: value for key, value in good.items() if key != name}) for name in good]
    first: dict[str, object] = good["rows"][0]  # type: ignore[index]
    tables += [
        (f"row's {name} {str(value)[:20]}", good | {"rows": [first | {name: value}]}) for name, values in of_row.items() for value in values
    ]
    for place, values in of_timing.items():
        for value in values:
            timing: list[object] = ["math", 1.0, 2.0]
            timing[place] = value
            tables.append((f"timing's {place} {str(value)[:20]}", good | {"rows": [first | {"timings": [timing]}]}))
    tables += [(f"timing of {n}", good | {"rows": [first | {"timings": [["math", 1.0, 2.0, 3.0][:n]]}]}) for n in (0, 1, 2, 4)]
    text = json.dumps(good)
    found = [(what, json.dumps(table).encode()) for what, table in tables]
    found += [(f"cut after {n}", text[:n].encode()) for n in range(0, len(text), 7)]
    found += [
        ("not UTF-8", text.encode("utf-16")),
        ("latin-1", text.replace("a test", "é").encode("latin-1")),
        ("zeros", b"\0" * 100),
        ("nested 100,000 deep", b"[" * 100_000),
        (
            "nested in its environment",
            text.replace('"environment": {', '"environment": {"x": ' + "[" * 50_000 + "]" * 50_000 + ", ").encode(),
        ),
        ("a number of 10,000 digits", text.replace("1024", "1" * 10_000).encode()),
        ("null", b"null"),
        ("a string", b'"x"'),
    ]
    return found


def test_every_bad_file_is_a_preference_error_with_its_path(cache: Path) -> None:
    path = tuning_table.cache_path(CPU)
    q = torch.randn(1, 8, 2, 8)
    tables = _spoilt_tables()
    assert len(tables) > 200
    for what, content in tables:
        path.write_bytes(content)
        tuning_table.refresh()
        with pytest.raises(PreferenceError) as caught:
            dilated_attention(q, q, q, [4], [1])
        assert str(path) in str(caught.value), what
        assert len(str(caught.value)) < 1000, what


def test_a_preference_file_that_cannot_be_read_is_a_preference_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuning_table.cache_path(CPU)
    path.mkdir()
    with pytest.raises(PreferenceError, match="it is not a regular file") as caught:
        tuning_table.measured_here(CPU)
    assert str(path) in str(caught.value)
    path.rmdir()
    # nobody writes to it: reading would wait for ever
    os.mkfifo(path)
    tuning_table.refresh()
    with pytest.raises(PreferenceError, match="it is not a regular file"):
        tuning_table.measured_here(CPU)
    path.unlink()
    write(row("math"))

    def refuse(*_: object, **__: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    # root may read everything, so permissions alone refuse nothing in a container
    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(PreferenceError, match="it cannot be read") as caught:
        tuning_table.measured_here(CPU)
    assert str(path) in str(caught.value)
    monkeypatch.undo()
    with path.open("wb") as file:
        file.truncate(2**40)
    monkeypatch.setenv("DILATED_ATTENTION_CACHE", str(cache))
    tuning_table.refresh()
    with pytest.raises(PreferenceError, match="1,099,511,627,776 bytes"):
        tuning_table.measured_here(CPU)
