"""examples/pretrained_patterns.py: equal pairs, patterns that take effect, losses before and after tuning."""

import json
from pathlib import Path

import pytest
import torch

from dilated_attention.pattern import TopBlocks
from tests.helpers.scripts import load, run_script

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
SCRIPT = Path(__file__).parents[2] / "examples" / "pretrained_patterns.py"
LENGTH, HEADS = 512, 4


script = load(SCRIPT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of bytes with its tokenizer, in a folder."""
    folder = tmp_path_factory.mktemp("models") / "bytes"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytes_only = tokenizers.Tokenizer(tokenizers.models.BPE({x: i for i, x in enumerate(alphabet)}, []))
    bytes_only.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_only).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=2,
        max_position_embeddings=LENGTH, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "share"), [(name, 0.25) for name in script.METHODS])
def test_patterns_keep_equally_many_pairs(name: str, share: float) -> None:
    """The counts are those of dense masks, written out."""
    n, heads = 2048, 2
    pattern = script.solve(script.METHODS[name], n, heads, share)
    if isinstance(pattern, TopBlocks):
        draw = torch.Generator().manual_seed(1)
        pattern = pattern.choose(*(torch.randn(1, n, heads, 8, generator=draw) for _ in range(2)), is_causal=True)
    pairs = int(pattern.dense_mask(n, n, heads, is_causal=True).sum()) / (heads * n * (n + 1) / 2)
    assert pairs == pytest.approx(share, rel=script.TOLERANCE)


@pytest.mark.slow
def test_the_script_measures_before_and_after_tuning(model: Path, tmp_path: Path) -> None:
    texts, output = tmp_path / "texts", tmp_path / "quality.json"
    texts.mkdir()
    for i in range(8):
        words = " ".join(f"word {chr(97 + (i + j) % 26)}" for j in range(200))
        (texts / f"{i}.txt").write_text(f"Chapter {i} has its own words. {words}")
    (texts / "table.txt").write_text(" ".join(str(i) for i in range(1000)))
    how = f"--length {LENGTH} --densities 60 10 --methods window top-blocks --tuning 100 --lr 0.003".split()
    result = run_script(SCRIPT, "--model", str(model), "--texts", str(texts), "--output", str(output), *how)
    assert result.returncode == 0, result.stderr
    # what cannot be equal is refused
    assert "top-blocks 10 %: none keeps 10 % of the pairs of 512 positions; the nearest keeps" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("done: best at 10 %: window, ")
    rows = json.loads(output.read_text())["rows"]
    methods = [("dense", 100), ("window", 60), ("top-blocks", 60), ("window", 10)]
    assert [(row["name"], row["density"], row["tuned"]) for row in rows] == [(*m, tuned) for tuned in (False, True) for m in methods]
    assert all(row["us_per_token"] > 0 and len(row["passages"]) == 3 and 0 <= row["digits_pct"] <= 100 for row in rows)
    # no method runs dense in silence
    assert len({row["bits_per_byte"] for row in rows[:4]}) == 4
    # weights were trained on texts much like those scored
    assert all(after["bits_per_byte"] < 0.9 * before["bits_per_byte"] for before, after in zip(rows[:4], rows[4:], strict=True))
