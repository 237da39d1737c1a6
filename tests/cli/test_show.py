"""``show`` of patterns: figures against the definition, drawings against the mask, pictures against the pixels."""

import json
import sys
from pathlib import Path

import pytest
import torch

from dilated_attention.cli import main
from dilated_attention.pattern import BigBird, DilatedPattern, GlobalLocal, LocalWindow, Pattern, with_sparsity
from dilated_attention.pattern.base import cell_pairs, cell_size, cell_sizes

Capture = pytest.CaptureFixture[str]
DILATED = "dilated --segment-lengths 16 32 --dilation-rates 1 2"


def shown(capsys: Capture, line: str) -> str:
    assert main(["show", *line.split()]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("pattern", "num_positions", "cell"),
    [
        (DilatedPattern((5, 256), (2, 4), branch_heads="split"), 1100, 100),
        (BigBird(100, 70, 2, seed=3, block_size=64), 1400, 128),
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
    assert torch.equal(cell_pairs(pattern, num_positions, 3, cell, is_causal=is_causal), expected)
    assert cell_sizes(num_positions, cell).sum() == num_positions**2


def test_cells_of_long_patterns() -> None:
    window, longnet = LocalWindow(128), DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
    assert [cell_size(window, *of) for of in ((64, 100), (1024, 256), (2048, 256))] == [1, 4, 128]
    with pytest.raises(ValueError, match="cell is 100; expected a multiple of the pattern's blocks, 128 × 128"):
        cell_pairs(window, 2048, 1, 100)
    # without a mask; no segment is longer than a cell
    cells = cell_pairs(longnet, 2**20, 2, 2**15)
    assert cells.sum() == longnet.pairs(2**20, 2)
    assert torch.equal(cells, torch.diag_embed(cells.diagonal(dim1=1, dim2=2)))


def test_the_drawing_has_a_character_a_pair_and_tells(capsys: Capture) -> None:
    lines = shown(capsys, "dilated --segment-lengths 4 8 --dilation-rates 1 2 --length 16 --heads 3").splitlines()
    mask = DilatedPattern((4, 8), (1, 2)).dense_mask(16, 16, 2).tolist()
    # heads of one offset are drawn once
    assert (lines[0], lines[18]) == ("   head 0, 2", "   head 1")
    for head, start in ((0, 1), (1, 19)):
        assert [row[3:] for row in lines[start : start + 16]] == ["".join("·▒█"[m] for m in row) for row in mask[head]]
    assert "· 0  ▒ 1  █ 2" in "\n".join(lines)
    text = shown(capsys, f"{DILATED} --length 64 --heads 2")
    assert "3,072 pairs, 37.500% of the 8,192 of dense attention; 24.0 keys per query and head" in text
    assert "segments of 32, rate 2: 1,024 pairs, 8.0 keys per query and head" in text


@pytest.mark.parametrize("width", [24, 300])
def test_the_drawing_keeps_to_its_width_and_says_what_a_character_stands_for(
    width: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = shown(capsys, "dilated --segment-lengths 512 4k --dilation-rates 1 8 --length 4k --heads 1 --causal").splitlines()
    drawn = lines[1 : lines.index("")]
    assert max(map(len, lines)) <= width
    cell = 4096 // len(drawn)
    assert f"a character stands for {cell:,} × {cell:,} positions" in " ".join(lines)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ("block_sparse --window all 0", LocalWindow((None, 0))),
        ("block_sparse --window 5 --global-tokens 3 --block-size 64", GlobalLocal(5, 3, block_size=64)),
        ("block_sparse --window 5 --random-blocks 1 --seed 4", BigBird(5, 0, 1, 4)),
        ("block_sparse --density 0.25 --density-kind local", with_sparsity(0.25, "local")),
        (f"{DILATED} --head-offsets 0,0 1,0", DilatedPattern((16, 32), (1, 2), ((0, 0), (1, 0)))),
        (f"{DILATED} --head-offsets blocked", DilatedPattern((16, 32), (1, 2), "blocked")),
        (f"{DILATED} --branch-heads split", DilatedPattern((16, 32), (1, 2), branch_heads="split")),
    ],
)
def test_figures_are_those_of_the_pattern_that_arguments_make(arguments: str, pattern: Pattern, is_causal: bool, capsys: Capture) -> None:
    told = json.loads(shown(capsys, f"{arguments} --length 300 --heads 2 --json{' --causal' * is_causal}"))
    pairs, dense = pattern.pairs(300, 2, is_causal=is_causal), 2 * (300 * 301 // 2 if is_causal else 300**2)
    assert (told["pattern"], told["pairs"], told["dense_pairs"], told["density"]) == (repr(pattern), pairs, dense, pairs / dense)
    # each branch's figures: test_the_drawing_has_a_character_a_pair_and_tells
    assert ("branches" in told) == ("dilated" in arguments) and sum(x["pairs"] for x in told.get("branches", ())) in (0, pairs)


@pytest.mark.parametrize(
    ("arguments", "width"),
    [
        (f"{DILATED} --length 64 --heads 2", 888),
        ("block_sparse --window 256 --length 4k --heads 1 --causal", 552),
    ],
)
def test_pictures(arguments: str, width: int, tmp_path: Path, capsys: Capture) -> None:
    image, path = pytest.importorskip("matplotlib.image"), tmp_path / "pattern.png"
    assert json.loads(shown(capsys, f"{arguments} --image {path} --json"))["image"] == str(path)
    pixels = image.imread(path)
    assert pixels.shape[:2] == (468, width)
    # blue where pairs are, on white
    assert 0.005 < (pixels[..., 2] - pixels[..., 0] > 0.2).mean() < 0.7


def test_a_picture_that_cannot_be_made_exits_with_1(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for blocked, path, said in (
        (False, "nowhere/x.png", "nowhere/x.png"),
        (True, str(tmp_path / "x.png"), 'pip install "dilated-attention[plot]"'),
    ):
        for name in ("matplotlib.colors", "matplotlib.figure") if blocked else ():
            monkeypatch.setitem(sys.modules, name, None)
        assert main(["show", *DILATED.split(), "--image", path]) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and said in captured.err
    assert not list(tmp_path.iterdir())
