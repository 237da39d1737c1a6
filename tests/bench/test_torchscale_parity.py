"""Comparison with users' own copies of TorchScale and Prov-GigaPath, without them: what is refused, and what stands in for packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import copies as torchscale
from benchmarks.__main__ import main
from benchmarks.report import Row


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "expected --torchscale PATH, --gigapath PATH or both"),
        (
            ["--torchscale", "no/such"],
            2,
            "there is no torchscale/component/dilated_attention.py in it; git clone https://github.com/microsoft",
        ),
        (["--gigapath", "no/such"], 2, "there is no gigapath/slide_encoder.py in it; git clone https://github.com/prov-gigapath"),
        (["--gigapath", ".", "--tiles", "101", "--grid", "10"], 2, "do not fit on a grid of 10"),
    ],
)
def test_wrong_arguments_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    command = ["train-infer", "--tasks", "parity", "--output", str(tmp_path), *arguments]
    try:
        found = main(command)
    except SystemExit as ended:
        found = int(str(ended.code))
    assert found == code and text in capsys.readouterr().err


def test_what_is_imported_is_gone_afterwards(tmp_path: Path) -> None:
    files = {
        "torchscale/__init__.py": "",
        "torchscale/component/__init__.py": "",
        "torchscale/component/multihead_attention.py": "from fairscale.nn import wrap\nflash_attn_func = None\n",
        "torchscale/component/dilated_attention.py": "from timm.models.layers import drop_path\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert torchscale.find(tmp_path, torchscale.TORCHSCALE) == tmp_path.resolve()
    before, path = set(sys.modules), list(sys.path)
    with torchscale.imported(tmp_path):
        assert torchscale.load("torchscale.component.dilated_attention").drop_path is torchscale.drop_path
        assert torchscale.load("torchscale.component.multihead_attention").flash_attn_func.func is torchscale.flash_attn_func
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] in {"torchscale", "timm", "fairscale", "utils"}}
    assert sys.path == path


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_stands_in_for_flash_attn(is_causal: bool) -> None:
    leaves = [torch.randn(2, 7, 3, 8, requires_grad=True) for _ in range(3)]
    out, lse = torchscale.flash_attn_func("sdpa_cpu", *leaves, 0.0, None, None, is_causal)
    true = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), is_causal=is_causal).transpose(1, 2)
    torch.testing.assert_close(out, true)
    assert not lse.requires_grad
    scores = torch.einsum("bhd,bjhd->bhj", leaves[0][:, -1], leaves[1]) * 8**-0.5
    torch.testing.assert_close(lse[..., -1], scores.logsumexp(-1))
    dout = torch.randn_like(out)
    for mine, theirs in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(true, leaves, dout), strict=True):
        torch.testing.assert_close(mine, theirs)
    with pytest.raises(ValueError, match="has neither"):
        torchscale.flash_attn_func("sdpa_cpu", *leaves, 0.1)


def test_samples_that_are_dropped_are_dropped_whole() -> None:
    torch.manual_seed(0)
    kept = torchscale.drop_path(torch.ones(64, 2, 3), 0.2, True)
    assert {tuple(x.unique().tolist()) for x in kept} == {(0.0,), (1.25,)}
    assert torch.equal(torchscale.drop_path(torch.ones(2, 2), 0.25, False), torch.ones(2, 2))


@pytest.mark.parametrize(("note", "code"), [("wrong: output differs by 1.0e-03", 1), ("", 0)])
def test_a_difference_is_the_exit_code(note: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(name="encoder", case={"task": "parity"}, errors={"output": 1e-3}, note=note)
    monkeypatch.setattr(torchscale, "check_parity", lambda options: None)
    monkeypatch.setattr(torchscale, "measure_parity", lambda options: [row])
    assert main(["train-infer", "--tasks", "parity", "--output", str(tmp_path)]) == code
