"""docs/training.md, command by command in the order of the page, in small: a reader who does the same gets what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dilated_attention import cli
from tests.helpers.scripts import log_of, run_script
from tests.scripts.test_docs import blocks
from tests.scripts.test_examples import run, torchrun, write_text
from tests.scripts.test_genome import SMALL as SMALL_GENOME
from tests.scripts.test_genome import write_fasta

ROOT = Path(__file__).resolve().parents[2]
# the page's settings in small; a name that the page does not have fails
SMALL = {"context": "256", "minutes": "0.015", "validations": "1"}
SHAPE = "layers = 1\nembed-dim = 32\nheads = 2\n"


def code(language: str) -> str:
    return "".join(block.code for block in blocks(ROOT / "docs" / "training.md") if block.language == language)


@pytest.mark.slow
@pytest.mark.distributed
def test_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    write_text(tmp_path).rename(tmp_path / "book.txt")
    write_fasta(tmp_path).rename(tmp_path / "my.fa.gz")
    settings = code("toml")
    for name, small in SMALL.items():
        settings, count = re.subn(rf"^{name} = .*$", f"{name} = {small}", settings, flags=re.M)
        assert count == 1, name
    (tmp_path / "run.toml").write_text(settings + SHAPE)
    printed = []
    for line in re.sub(r"\\\n\s*", "", code("bash")).splitlines():
        words = [str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(line)]
        launch, words = (torchrun(2), words[2:]) if words[0] == "torchrun" else ([], words[1:])
        if "train_genome" in line:
            words += SMALL_GENOME
            words[words.index("--minutes") + 1] = "0.015"
        if "evaluate" in line:
            words[words.index("--context") + 1] = "256"
        if words[0] == "-m":
            assert cli.main(words[2:]) == 0
            printed.append(capfd.readouterr().out)
            continue
        # by torchrun itself, the one example that is
        result = run(*launch, *words) if launch else run_script(Path(words[0]), *words[1:], quick=True)
        assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"
        printed.append(result.stdout)
    text, genome, resumed, again, evaluated, generated, two, one = printed
    assert "\ndone: validation " in text and "\ndone: held-out " in genome
    assert all("going on with" in output for output in (resumed, again, one)) and "context 256" in two
    assert "bits per byte" in evaluated and len(generated.encode()) >= 200
    # only the first rank reports
    assert log_of(tmp_path / "runs" / "two") and two.count("done: validation") == 1
