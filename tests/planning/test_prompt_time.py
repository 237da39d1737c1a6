"""Plans of prompts: against every prompt that was measured on an H200, and the launches against those of a prefill in chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.backends import registry
from dilated_attention.bench.models.language import Shape
from dilated_attention.engine.decode.keys import row_keys
from dilated_attention.models import KVCache, LongNetConfig, LongNetLM
from dilated_attention.models.generation import prefill
from dilated_attention.planning import plan_model
from dilated_attention.planning.estimate.gpus import GPUS
from dilated_attention.planning.estimate.problem import make_problem
from dilated_attention.planning.whole_models import model_time

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# the constants of model_time.py come from these rows, so they say nothing about it
FITTED = {("dense", 1024), ("dilated", 1024), ("block_sparse", 1024), ("block_sparse", 131072)}


def prompts() -> list[dict[str, Any]]:
    groups = json.loads((RESULTS / "2026-11-21-h200" / "train-infer.json").read_text(encoding="utf-8"))["groups"]
    rows = [row | row["case"] for rows in groups.values() for row in rows if row["case"].get("task") == "prefill" and "values" in row]
    return [row for row in rows if (row["name"], row["N"]) not in FITTED]


@pytest.mark.parametrize("row", prompts(), ids=lambda row: f"{row['name']}-{row['N']}-{row['B']}")
def test_prompts_are_near_what_an_h200_took(row: dict[str, Any]) -> None:
    found = plan_model(
        row["model"], num_positions=row["N"], batch_size=row["B"], training=False, gpu="H200", find_longest=False,
        **Shape(row["model"]).kind(row["name"]),
    )  # fmt: skip
    assert found.seconds is not None
    assert found.seconds * 1e3 == pytest.approx(row["values"]["ms"], rel=0.35)


def test_a_long_prompt_is_near_what_an_h200_took() -> None:
    rows = [json.loads(line) for line in (RESULTS / "2026-11-21-h200/decode.jsonl").read_text(encoding="utf-8").splitlines()]
    (row,) = [row for row in rows if row.get("part") == "prefill"]
    found = plan_model(
        "longnet-125m", num_positions=row["length"], training=False, gpu="H200", find_longest=False,
        vocab_size=32768, num_layers=12, embed_dim=768, num_heads=12,
    )  # fmt: skip
    assert found.seconds == pytest.approx(row["seconds"], rel=0.25)
    assert "tokens/s of the prompt" in str(found) and "CPU" in found.time_source


def test_launches_are_those_of_a_prefill_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LongNetConfig(vocab_size=16, num_layers=2, embed_dim=64, num_heads=4, segment_lengths=(16, 32, 128), dilation_rates=(1, 2, 4))
    model = LongNetLM(config, backend="math").eval()
    calls = 0
    math = registry.get("math")
    forward = type(math).forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(math), "forward", counted)
    cache = KVCache(config, 1, 160)
    keys = row_keys(config.pattern, 4, 4, 160, "cpu")
    problem = make_problem(
        "dilated", num_positions=160, num_heads=4, head_dim=16, dtype=torch.bfloat16, is_causal=True, training=False,
        pattern=config.pattern, gpu=GPUS["H200 SXM"],
    )  # fmt: skip
    found = []
    for start in range(0, 160, 24):
        count = min(24, 160 - start)
        calls = 0
        prefill(model, torch.zeros(1, count, dtype=torch.int64), cache)
        launches, _ = model_time._launches(problem, keys.before(start)[2], count)
        assert calls == config.num_layers * launches, start
        found.append(launches)
    # later chunks cut segments, which the first does not
    assert max(found) > found[0]


def test_of_many_chunks_a_sample_gives_the_time_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(samples: int) -> float:
        monkeypatch.setattr(model_time, "_SAMPLED", samples)
        found = plan_model("longnet-125m", num_positions=8192 * 101 + 5, training=False, gpu="H200", find_longest=False)
        assert found.seconds is not None
        return found.seconds

    assert seconds(16) == pytest.approx(seconds(256), rel=0.05)
