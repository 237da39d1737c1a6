"""``show`` of patterns: figures against the definition, drawings against the mask, pictures against the pixels."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.cli import main
from dilated_attention.cli.show import drawing
from dilated_attention.pattern import BigBird, DilatedPattern, GlobalLocal, LocalWindow, Pattern, with_sparsity
from dilated_attention.pattern.dilated import distinct_pairs
from dilated_attention.pattern.drawing import cell_pairs, cell_size, cell_sizes

DILATED = ["show", "dilated", "--segment-lengths", "16", "32", "--dilation-rates", "1", "2"]
PATTERNS = [
    (DilatedPattern((16, 32), (1, 2)), 64, 4),
    (DilatedPattern((7, 12, 30), (2, 5, 3), "zero"), 53, 2),
    (DilatedPattern((8, 8, 8), (1, 1, 2), "blocked"), 20, 3),
    (DilatedPattern((4, 16), (1, 4), branch_heads="split"), 40, 3),
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("pattern", "num_positions", "num_heads"), PATTERNS)
def test_figures_are_those_of_the_mask(pattern: DilatedPattern, num_positions: int, num_heads: int, is_causal: bool) -> None:
    mask = pattern.dense_mask(num_positions, num_positions, num_heads, is_causal=is_causal)
    expected = tuple(int((mask >= least).sum()) for least in (1, 2))
    assert distinct_pairs(pattern, num_positions, num_heads, is_causal=is_causal) == expected


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("pattern", "num_positions", "cell"),
    [
        (DilatedPattern((16, 700, 2000), (1, 3, 8)), 1500, 64),
        (DilatedPattern((5, 256), (2, 4), branch_heads="split"), 1100, 100),
        (BigBird(100, 70, 2, seed=3, block_size=64), 1400, 128),
        (GlobalLocal((200, 0), 10, block_size=(64, 128)), 1300, 128),
        (with_sparsity(0.2, block_size=64), 1088, 64),
        (LocalWindow(3), 50, 7),
    ],
)
def test_cells_count_the_pairs_of_the_mask(pattern: Pattern, num_positions: int, cell: int, is_causal: bool) -> None:
    mask = pattern.dense_mask(num_positions, num_positions, 3, is_causal=is_causal).long()
    cells = -(-num_positions // cell)
    expected = torch.zeros(3, cells, cells, dtype=torch.int64)
    for i in range(cells):
        for j in range(cells):
            expected[:, i, j] = mask[:, i * cell : (i + 1) * cell, j * cell : (j + 1) * cell].sum((1, 2))
    found = cell_pairs(pattern, num_positions, 3, cell, is_causal=is_causal)
    assert torch.equal(found, expected)
    assert found.sum() == pattern.pairs(num_positions, 3, is_causal=is_causal)
    assert cell_sizes(num_positions, cell).sum() == num_positions**2


def test_cells_of_a_long_block_pattern_are_whole_blocks() -> None:
    pattern = LocalWindow(128)
    assert cell_size(pattern, 64, 100) == 1
    assert cell_size(pattern, 1024, 256) == 4
    assert cell_size(pattern, 2048, 256) == 128
    with pytest.raises(ValueError, match="cell is 100; expected a multiple of the pattern's blocks, 128 × 128"):
        cell_pairs(pattern, 2048, 1, 100)


def test_a_million_positions_are_counted_without_a_mask() -> None:
    longnet = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
    cells = cell_pairs(longnet, 2**20, 2, 2**15)
    assert cells.sum() == longnet.pairs(2**20, 2)
    # no segment is longer than a cell
    assert torch.equal(cells, torch.diag_embed(cells.diagonal(dim1=1, dim2=2)))
    assert distinct_pairs(longnet, 2**20, 2)[0] == 32 * distinct_pairs(longnet, 2**15, 2)[0]


def test_the_drawing_has_a_character_a_pair() -> None:
    pattern = DilatedPattern((4, 8), (1, 2))
    lines = drawing(pattern, 16, 2, heads=(0, 1), width=60)
    mask = pattern.dense_mask(16, 16, 2).tolist()
    assert lines[0].split("head") == ["   ", " 0             ", " 1"]
    for i, line in enumerate(lines[2:18]):
        panels = line[3:].split("   ")
        assert panels == ["".join("·▒█"[m] for m in mask[head][i]) for head in (0, 1)]
    assert "· 0  ▒ 1  █ 2" in lines[-1]
    assert max(map(len, lines[:18])) <= 60


def test_heads_that_attend_alike_are_drawn_once_and_panels_wrap() -> None:
    pattern = DilatedPattern((4, 8), (1, 2))
    lines = drawing(pattern, 32, 4, heads=(0, 1, 2, 3), width=50)
    titles = [line.strip() for line in lines if "head" in line]
    assert titles == ["head 0, 2", "head 1, 3"]
    several = drawing(DilatedPattern((4,) * 6, (1,) * 6), 8, 1, heads=(0,), width=50)
    assert "█ 4 or more" in several[-1] and "█" in several[2] and "▓ 3" in several[-1]


def test_the_drawing_keeps_to_its_width_and_says_what_a_character_stands_for() -> None:
    for width in (24, 40, 100, 300):
        lines = drawing(DilatedPattern((512, 4096), (1, 8)), 4096, 2, heads=(0,), width=width, is_causal=True)
        drawn = lines[2 : lines.index("")]
        assert max(map(len, drawn)) <= width
        cell = 4096 // len(drawn)
        assert any(f"a character stands for {cell:,} × {cell:,} positions" in line for line in lines)


def test_show_dilated_draws_and_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DILATED, "--length", "64", "--heads", "2", "--head", "1", "--width", "80"]) == 0
    text = capsys.readouterr().out
    assert "head 1" in text and "head 0" not in text
    assert "3,072 pairs, 37.500% of the 8,192 of dense attention; 24.0 keys per query and head" in text
    assert "2,560 different pairs (31.250%), of which 512 are reached by several branches" in text
    assert "segments of 32, rate 2: 1,024 pairs, 8.0 keys per query and head" in text


def test_show_gives_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    offsets = ["--head-offsets", "0,0", "1,0", "--causal"]
    assert main([*DILATED, "--length", "1k", "--heads", "2", *offsets, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    pattern = DilatedPattern((16, 32), (1, 2), ((0, 0), (1, 0)))
    mask = pattern.dense_mask(1024, 1024, 2, is_causal=True)
    assert told["pairs"] == int(mask.sum()) and told["dense_pairs"] == 1024 * 1025
    assert told["distinct_pairs"] == int((mask > 0).sum()) and told["pairs_of_several_branches"] == int((mask > 1).sum())
    assert told["density"] == told["pairs"] / told["dense_pairs"]
    assert [row["pairs"] for row in told["branches"]] == list(pattern.branch_pairs(1024, 2, is_causal=True))
    assert sum(row["keys_per_query"] for row in told["branches"]) == pytest.approx(told["keys_per_query"])
    assert main(["show", "block_sparse", "--window", "100", "0", "--global-tokens", "7", "--length", "300", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["pairs"] == int(GlobalLocal((100, 0), 7).dense_mask(300, 300, 4).sum()) and "branches" not in told


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--window", "5"], repr(LocalWindow(5))),
        (["--window", "all", "0"], repr(LocalWindow((None, 0)))),
        (["--window", "5", "--global-tokens", "3", "--block-size", "64"], repr(GlobalLocal(5, 3, block_size=64))),
        (["--window", "5", "--random-blocks", "1", "--seed", "4"], repr(BigBird(5, 0, 1, 4))),
        (["--density", "0.25", "--density-kind", "local"], repr(with_sparsity(0.25, "local"))),
    ],
)
def test_block_patterns_of_arguments(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "block_sparse", *arguments, "--length", "256", "--heads", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pattern"] == expected


@pytest.mark.parametrize(
    ("arguments", "width"),
    [
        ([*DILATED[1:], "--length", "64", "--heads", "2"], 888),
        ([*DILATED[1:], "--length", "4k", "--heads", "1", "--causal"], 552),
        (["block_sparse", "--window", "256", "--length", "4k", "--heads", "1"], 552),
    ],
)
def test_pictures(arguments: list[str], width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "pattern.png"
    assert main(["show", *arguments, "--image", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["image"] == str(path)
    pixels = image.imread(path)
    assert pixels.shape[:2] == (468, width)
    # blue where pairs are, on white
    assert 0.005 < (pixels[..., 2] - pixels[..., 0] > 0.2).mean() < 0.7


def test_a_picture_without_matplotlib_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for length in ("64", "4k"):
        assert main([*DILATED, "--length", length, "--image", str(tmp_path / "x.png")]) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and 'pip install "dilated-attention[plot]"' in captured.err
    assert not list(tmp_path.iterdir())


def test_a_picture_in_a_folder_that_is_not_there_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main([*DILATED, "--image", "nowhere/x.png"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "nowhere/x.png" in captured.err
