"""README's figures are those of the results; the program of docs/ring.md runs; a public forge runs targets of the Makefile.

Other code, links and names: test_docs.py.
"""

import json
import re
from pathlib import Path

import pytest

from tests.helpers.scripts import run_script

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "2026-11-30-h200x2"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = [
    code for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "ring.md").read_text(encoding="utf-8"), re.S) if "torchrun" in code
]


@pytest.mark.parametrize("code", PROGRAMS)
def test_the_program_for_several_processes_runs(code: str, tmp_path: Path) -> None:
    """On four processes, at a length that two CPU cores have time for."""
    file = tmp_path / "train.py"
    file.write_text(code.replace("100_00", "2_00"), encoding="utf-8")
    result = run_script(file, processes=4)
    assert result.returncode == 0, result.stderr
    # not by lines: unbuffered processes write a line and its end apart, so two lines can come as one
    losses = dict(re.findall(r"process (\d+): loss (\d+\.\d{3})", result.stdout))
    assert sorted(losses) == ["0", "1", "2", "3"] and len(set(losses.values())) == 1, result.stdout


def test_the_readme_is_short_the_page_has_a_program_and_a_forge_runs_the_makefile() -> None:
    assert README.count("\n") <= 110 and len(PROGRAMS) == 1
    workflow, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in (".github/workflows/ci.yml", "Makefile"))
    runs = re.findall(r"run: make ([\w-]+)", workflow)
    assert "test" in runs and all(f"\n{target}:" in makefile for target in runs)


def value(suite: str, name: str, key: str, **case: object) -> float:
    groups = json.loads((RESULTS / f"{suite}.json").read_text(encoding="utf-8"))["groups"].values()
    rows = [row for group in groups for row in group if row["name"] == name and case.items() <= row["case"].items() and "values" in row]
    (row,) = rows
    return float(row["values"][key])


def test_every_figure_is_that_of_its_results() -> None:
    passes, decode, slides = ("forward", "both"), "decode/train-infer", "slides/train-infer"
    encoders, varying = ("ours, bf16 autocast", "original, sdpa_flash in place of flash-attn"), {"case": "gigapath-10001", "pass": "both"}
    shared = json.loads((RESULTS / "sharing.json").read_text(encoding="utf-8"))["rows"]
    expected = [
        [f"{value(slides, name, key):,.0f}" for name in encoders for key in ("tokens_per_s", "worst_ms")],
        [f"{value(f'{folder}/train-infer', encoders[0], 'first_ms') / 1000:.1f}" for folder in ("first", "again")],
        [cell for row in shared for cell in (f"{row['tokens_per_s']:,}", str(row["peak_gib"]))],
        [f"{value('varying/speed', name, 'new_ms', **varying):.2f}" for name in ("ours", "torch cudnn", "torch flash")],
        [f"{value('short/speed', name, 'called', **{'pass': x}):.2f}" for name in ("equal", "torchscale") for x in passes],
        [
            f"{value(slides, name, key) / unit:.{digits}f}"
            for name in encoders
            for key, unit, digits in (("called", 1, 0), ("peak_bytes", 1e9, 1))
        ],
        [
            f"{value('million/speed', name, 'called', causal=causal, **{'pass': 'forward'}):.1f}"
            for name in ("ours", "floor")
            for causal in (False, True)
        ],
        [
            f"{value('blocks/speed', 'attention', 'called', **{'pass': x}) / value('blocks/speed', 'ours', 'called', **{'pass': x}):.1f}"
            for x in ("forward", "backward")
        ],
        [
            "268,435,456",
            f"{value('extreme/extreme', 'dilated', 'ms', **{'pass': 'forward'}) / 1000:.2f}",
            f"{value('extreme/extreme', 'dilated', 'bytes_per_token', **{'pass': 'forward'}):.0f}",
        ],
        [f"{value(decode, name, 'tokens_per_s', N=N, B=1):,.0f}" for name in ("dilated", "dense") for N in (2**16, 2**20)],
    ]
    cells = [line.split("|")[2] for line in README.partition("## Figures")[2].partition("\n## ")[0].splitlines() if line.startswith("|")][
        2:
    ]
    assert [re.findall(r"(?<![\w-])\d[\d,.]*\d|(?<![\w-])\d", cell) for cell in cells] == expected
