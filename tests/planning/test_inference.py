"""Plans of inference: memory traffic counted by hand, and generated tokens against measured steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.pattern import LocalWindow
from dilated_attention.planning import plan_model
from dilated_attention.planning.whole_models.model_memory import Run, moments_of

STEPS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-21-h200/decode.jsonl"
# the model of docs/decoding.md
MODEL: dict[str, Any] = {"vocab_size": 32768, "num_layers": 12, "embed_dim": 768, "num_heads": 12}
ATTENTION: dict[str, dict[str, Any]] = {
    "dense (triton)": {"attention": "dense"},
    "longnet 2K–32K": {},
}
# those of the stored run
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"attention": "dense"},
    "dilated": {},
    "block_sparse": {"attention": "block_sparse", "block_pattern": LocalWindow((1023, 0), block_size=128)},
}


def test_traffic_between_layers_is_what_a_hand_counts() -> None:
    run = Run(
        preset="llama-7b", overrides=(), batch_size=1, training=False, dtype=torch.bfloat16, casts=False, checkpoint_activations=False,
        on_gpu=True,
    )  # fmt: skip
    E, F, layers = 4096, 11008, 32
    # elements read and written per position: two norms, q k v and out, two additions, gate and up, SiLU times up in one pass, down
    norms, linear, additions = 2 * 2 * E, 4 * 2 * E, 2 * 3 * E
    feed_forward = 2 * (E + F) + 3 * F + (F + E)
    # the rotation of q and k: halves times sines and cosines to float32, their sums, joined, rounded
    rotation = 2 * (4 * (E // 2 * 2 + E // 2 * 4) + 2 * 3 * (E // 2) * 4 + 2 * E * 4 + E * 6)
    expected = layers * (2 * (norms + linear + additions + feed_forward) + rotation)
    short, long = (moments_of(run, n)[0][-1].moved for n in (32768, 65536))
    assert (long - short) / 32768 == pytest.approx(expected, rel=0.02)


def steps() -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in STEPS.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row.get("part") == "step" and row["model"] in ATTENTION and "ms" in row]


@pytest.mark.parametrize("row", steps(), ids=lambda row: f"{row['model']}-{row['batch']}-{row['context']}")
def test_generated_tokens_are_near_the_steps_they_were_fitted_to(row: dict[str, Any]) -> None:
    found = plan_model(
        "longnet-125m", num_positions=row["context"], batch_size=row["batch"], training=False, gpu="H200", find_longest=False,
        **MODEL, **ATTENTION[row["model"]],
    )  # fmt: skip
    assert found.decode_seconds is not None
    assert found.decode_seconds * 1e3 == pytest.approx(row["ms"], rel=0.35)
    assert "tokens/s" in str(found) and "generating" in str(found)


def other_steps() -> list[dict[str, Any]]:
    """Steps that no constant was fitted to."""
    groups = json.loads((STEPS.parent / "train-infer.json").read_text(encoding="utf-8"))["groups"]
    return [row | row["case"] for rows in groups.values() for row in rows if row["case"].get("task") == "decode" and "values" in row]


@pytest.mark.parametrize("row", other_steps(), ids=lambda row: f"{row['name']}-{row['B']}-{row['N']}")
def test_generated_tokens_are_near_what_another_model_took(row: dict[str, Any]) -> None:
    found = plan_model(
        row["model"], num_positions=row["N"], batch_size=row["B"], training=False, gpu="H200", find_longest=False,
        **KINDS[row["name"]],
    )  # fmt: skip
    assert found.decode_seconds is not None
    assert found.decode_seconds * 1e3 == pytest.approx(row["values"]["ms"], rel=0.35)


def test_only_models_that_generate_have_a_rate_of_tokens() -> None:
    assert plan_model("longnet-tiny", num_positions=4096, gpu="H200", find_longest=False).decode_seconds is None
    encoder = plan_model("gigapath-12l768d", num_positions=4096, gpu="H200", training=False, find_longest=False)
    assert encoder.decode_seconds is None and "positions/s" in str(encoder)
    shared = plan_model("longnet-tiny", num_positions=4096, gpu="H200", training=False, world_size=2, find_longest=False)
    assert shared.decode_seconds is None
