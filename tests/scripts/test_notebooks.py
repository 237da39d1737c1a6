"""docs/notebooks: stored without results, narrow, and they run. The build of the site (test_docs.py) checks their links and places."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Path:
    return request.param


def cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_stored_without_results_and_narrow(notebook: Path) -> None:
    """Results come from ``make docs``; in the repository they would be large, and soon those of another version."""
    for cell in cells(notebook):
        assert cell["outputs"] == [] and cell["execution_count"] is None, "jupyter nbconvert --clear-output --inplace removes them"
        assert all(len(line) <= 78 for line in "".join(cell["source"]).splitlines())


# steps of training, in a notebook and here: as many as what it asserts needs. ``make docs`` takes all
FEWER = {
    "finetune_transformers": {"fit(150, 256,": "fit(20, 256,", "fit(30, 4096,": "fit(4, 4096,", "max_new_tokens=80": "max_new_tokens=8"},
    "slide_heatmap": {"range(40)": "range(20)"},
}


@pytest.mark.slow
def test_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each cell without an error, and nothing on stderr, which a page would show. ``make docs`` runs them in a kernel."""
    plt = pytest.importorskip("matplotlib.pyplot")
    if notebook.stem == "finetune_transformers":
        pytest.importorskip("transformers")
    code, shown = "\n".join("".join(cell["source"]) for cell in cells(notebook)), list[int]()
    for many, few in FEWER[notebook.stem].items():
        assert code.count(many) == 1
        code = code.replace(many, few)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: shown.extend(plt.get_fignums()))
    with warnings.catch_warnings():
        exec(compile(code, str(notebook), "exec"), names := {"__name__": "notebook"})
    plt.close("all")
    assert capsys.readouterr().err == "" and len(shown) == (notebook.stem == "slide_heatmap")
    if shown:
        # (x, y) as users have them, row by row; the image has y downwards
        x, y = names["make_slide"](200, 0, False)[1].T
        assert (y.diff() >= 0).all() and (x.diff()[y.diff() == 0] > 0).all()
        names["coords"] = torch.tensor([[0.0, 0], [256, 0], [512, 0], [0, 256]])
        assert names["grid"](torch.arange(4.0)).nan_to_num(-1).tolist() == [[0, 1, 2], [3, -1, -1]]
