"""benchmarks/torchscale_parity.py without the sources that it compares with: what it refuses, and what stands in for their packages."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_torchscale_sources")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give --torchscale PATH, --gigapath PATH or both"),
        (
            ["--torchscale", "no/such"],
            "there is no torchscale/component/dilated_attention.py in it; git clone https://github.com/microsoft",
        ),
        (["--gigapath", "no/such"], "there is no gigapath/slide_encoder.py in it; git clone https://github.com/prov-gigapath"),
        (["--gigapath", ".", "--tiles", "101", "--grid", "10"], "do not fit on a grid of 10"),
    ],
)
def test_wrong_arguments_exit_with_2_and_say_what_to_do(
    sources: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    script = importlib.import_module("torchscale_parity")
    monkeypatch.setattr(sys, "argv", ["torchscale_parity.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert text in err
    assert out == ""


def test_what_is_imported_is_gone_afterwards(sources: ModuleType, tmp_path: Path) -> None:
    files = {
        "torchscale/__init__.py": "",
        "torchscale/component/__init__.py": "",
        "torchscale/component/multihead_attention.py": "from fairscale.nn import wrap\nflash_attn_func = None\n",
        "torchscale/component/dilated_attention.py": "from timm.models.layers import drop_path\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sources.find(str(tmp_path), sources.TORCHSCALE) == tmp_path.resolve()
    before, path = set(sys.modules), list(sys.path)
    with sources.imported(tmp_path) as load:
        assert load("torchscale.component.dilated_attention").drop_path(3, 0.5, False) == 3
        assert load("torchscale.component.multihead_attention").flash_attn_func is sources.flash_attn_func
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] in {"torchscale", "timm", "fairscale", "utils"}}
    assert sys.path == path


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_stands_in_for_flash_attn(sources: ModuleType, is_causal: bool) -> None:
    q, k, v = (torch.randn(2, 7, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out, lse = sources.flash_attn_func(q, k, v, 0.0, None, None, is_causal)
    true = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=is_causal)
    torch.testing.assert_close(out, true.transpose(1, 2))
    assert not lse.requires_grad
    scores = torch.einsum("bhd,bjhd->bhj", q[:, -1], k) / 2
    torch.testing.assert_close(lse[..., -1], scores.logsumexp(-1))
    with pytest.raises(ValueError, match="neither bias nor dropout"):
        sources.flash_attn_func(q, k, v, 0.1)
