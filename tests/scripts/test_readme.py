"""README's figures are those of the results; the program of docs/ring.md runs; a public forge runs targets of the Makefile.

Other code, links and names: test_docs.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scripts import run_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ring.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
PROGRAMS = [code for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S) if "torchrun" in code]


@pytest.mark.parametrize("code", PROGRAMS)
def test_the_program_for_several_processes_runs(code: str, tmp_path: Path) -> None:
    """On four processes, at a length that two CPU cores have time for."""
    file = tmp_path / "train.py"
    file.write_text(code.replace("100_00", "2_00"), encoding="utf-8")
    result = run_script(file, processes=4)
    assert result.returncode == 0, result.stderr
    # not by lines: unbuffered processes write a line and its end apart, so two lines can come as one
    losses = dict(re.findall(r"process (\d+): loss (\d+\.\d{3})", result.stdout))
    assert sorted(losses) == ["0", "1", "2", "3"], result.stdout
    assert len(set(losses.values())) == 1, result.stdout


def test_the_readme_is_short_and_the_page_has_a_program() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 130
    assert len(PROGRAMS) == 1


def test_continuous_integration_runs_targets_of_the_makefile() -> None:
    workflow, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in (".github/workflows/ci.yml", "Makefile"))
    runs = re.findall(r"run: (.*)", workflow)
    assert "make test" in runs
    assert all(re.fullmatch(r"make [\w-]+", run) and f"\n{run.split()[1]}:" in makefile for run in runs), runs


def rows_of(file: str) -> list[dict[str, Any]]:
    return [row for rows in json.loads((RESULTS / file).read_text(encoding="utf-8"))["groups"].values() for row in rows]


def of_suite(file: str) -> dict[tuple[str, str, str], dict[str, float]]:
    """Values by (first word of the group, contender, pass); contenders that were refused have none."""
    groups = json.loads((RESULTS / file).read_text(encoding="utf-8"))["groups"].items()
    found = [(label.split()[0], row) for label, rows in groups for row in rows if "values" in row]
    return {(label, row["name"], row["case"]["pass"]): row["values"] for label, row in found}


def test_every_figure_is_that_of_its_results() -> None:
    short = of_suite("2026-11-25-h200/short/speed.json")
    million = of_suite("2026-11-25-h200/million/speed.json")
    blocks = of_suite("2026-11-25-h200/blocks/speed.json")
    extreme = of_suite("2026-11-25-h200/extreme/extreme.json")["dilated", "dilated", "forward"]
    slides = {row["name"]: row["values"] for row in rows_of("2026-11-25-h200/slides/train-infer.json")}
    ours, original = slides["ours, bf16 autocast"], slides["original, sdpa_flash in place of flash-attn"]
    of_one = [row for row in rows_of("2026-11-25-h200/decode/train-infer.json") if row["case"]["B"] == 1]
    steps = {(row["name"], row["case"]["N"]): row["values"]["tokens_per_s"] for row in of_one}
    called = {
        (name, which): short["gigapath-10001", name, which]["called"] for name in ("equal", "torchscale") for which in ("forward", "both")
    }
    full, causal = ("longnet-1048576-full", "longnet-1048576")
    expected = [
        [f"{called[name, which]:.2f}" for name in ("equal", "torchscale") for which in ("forward", "both")],
        [f"{million[case, 'ours', 'forward']['called']:.1f}" for case in (full, causal)]
        + [f"{million[case, 'floor', 'forward']['ms']:.1f}" for case in (full, causal)],
        [
            f"{blocks['blocks10-32768', 'attention', which]['called'] / blocks['blocks10-32768', 'blocks', which]['called']:.1f}"
            for which in ("forward", "backward")
        ],
        ["268,435,456", f"{extreme['ms'] / 1000:.2f}", f"{extreme['bytes_per_token']:.0f}"],
        [figure for row in (ours, original) for figure in (f"{row['ms']:.0f}", f"{row['peak_bytes'] / 1e9:.1f}")],
        [f"{steps[model, context]:,.0f}" for model in ("dilated", "dense") for context in (65_536, 1_048_576)],
    ]
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Figures")[2].partition("\n## ")[0]
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")][2:]
    assert len(cells) == len(expected)
    for cell, figures in zip(cells, expected, strict=True):
        assert re.findall(r"(?<![\w-])\d[\d,.]*\d|(?<![\w-])\d", cell) == figures, cell
