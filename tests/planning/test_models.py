"""``plan_model``: what training and generating take, against steps on a CPU, hand counts and what an H200 measured."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dilated_attention import profile_memory
from dilated_attention.factory import create_model
from dilated_attention.pattern import LocalWindow, geometric_branches
from dilated_attention.planning import plan_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-21-h200"
# attention by the names of a stored run
ATTENTION: dict[str, dict[str, Any]] = {
    "dense": {"attention": "dense"}, "dilated": {},
    "block_sparse": {"attention": "block_sparse", "block_pattern": LocalWindow((1023, 0), block_size=128)},
}  # fmt: skip


def tiny(num_positions: int = 65536, **options: Any) -> Any:
    return plan_model("longnet-tiny", num_positions=num_positions, **{"gpu": "H200", "find_longest": False} | options)


def test_a_models_plan_has_what_training_needs() -> None:
    found = tiny(find_longest=True)
    terms = dict(found.terms)
    assert terms["weights"] == 4 * found.parameters and terms["optimizer's moments"] == 8 * found.parameters
    assert found.peak == sum(terms.values()) and found.fits
    assert tiny(found.longest).fits and not tiny(found.longest + 1).fits
    assert json.loads(json.dumps(found.as_dict()))["peak"] == found.peak and "estimate" in str(found)
    # lists are taken as create_model takes them
    assert tiny(segment_lengths=[512, 2048], dilation_rates=[1, 4]).peak == tiny(segment_lengths=(512, 2048), dilation_rates=(1, 4)).peak


def test_flops_are_those_of_the_weights_and_of_the_pairs() -> None:
    """6 per matrix parameter and position, of which a table that is only looked up has none, and 12·E per pair of a layer and head."""
    for tied in (True, False):
        found, model = tiny(4096, tie_embeddings=tied), create_model("longnet-tiny", device="meta", tie_embeddings=tied)
        config = model.config
        weights = found.parameters - (0 if tied else config.vocab_size * config.embed_dim)
        attended = 12 * config.embed_dim * config.num_layers * config.pattern.pairs(4096, is_causal=True)
        assert found.flops == pytest.approx(6 * weights * 4096 + attended, rel=0.05)
        assert 4096 * model.summary().training_flops(4096) == pytest.approx(6 * weights * 4096 + attended, rel=1e-3)


def test_integers_of_numpy_are_planned_as_pythons() -> None:
    asked = {"num_positions": 2**40, "batch_size": 16, "weight_shards": 2}
    plan = tiny(**{name: np.int64(number) for name, number in asked.items()})
    assert plan.flops > 2**63 and json.dumps(plan.as_dict()) == json.dumps(tiny(**asked).as_dict())


def test_layers_that_differ_add_up() -> None:
    """Each kind of attention for half of the layers: half of its pairs, time and cache, and the memory of the one that needs most."""
    window, dense = ATTENTION["block_sparse"], ATTENTION["dense"]
    for options in ({"training": True}, {"training": False}):
        mixed, *alone = (tiny(4096, num_layers=4, **options, **x) for x in ({"attention": [window, dense]}, window, dense))
        assert 2 * mixed.flops == pytest.approx(sum(x.flops for x in alone))
        assert max(x.peak for x in alone) >= mixed.peak >= min(x.peak for x in alone)
        if not options["training"]:
            cached = [dict(x.terms)["keys and values of the cache"] for x in (mixed, *alone)]
            assert 2 * cached[0] == cached[1] + cached[2]
            assert 2 * mixed.decode_seconds == pytest.approx(sum(x.decode_seconds for x in alone), rel=0.3)
        elif mixed.seconds is not None:
            assert 2 * mixed.seconds == pytest.approx(sum(x.seconds for x in alone), rel=0.1)


def test_checkpointing_sharding_and_sharing_a_sequence_save_memory() -> None:
    plain = tiny(2**18)
    assert tiny(2**18, checkpoint_activations=True).peak < 0.7 * plain.peak
    spread = tiny(2**20, world_size=4)
    assert spread.peak == pytest.approx(plain.peak, rel=0.1) and spread.exchange.bytes.forward_received == 0
    sharded = tiny(2**18, weight_shards=4)
    assert dict(sharded.terms)["weights"] == dict(plain.terms)["weights"] // 4 and "two unsharded blocks" in dict(sharded.terms)


def test_generating_needs_the_cache_and_one_stretch_of_the_prompt() -> None:
    short, long = (tiny(n, training=False) for n in (2**16, 2**24))
    # branches reach 8192 positions back, so that the cache of any longer sequence is as large
    assert dict(short.terms)["keys and values of the cache"] == dict(long.terms)["keys and values of the cache"] > 0
    assert short.peak == long.peak


def test_what_a_model_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="preset is 'gpt-5'"):
        plan_model("gpt-5", num_positions=64)
    with pytest.raises(TypeError, match="does not know"):
        tiny(colour="red")
    with pytest.raises(ValueError, match="autocast is True"):
        tiny(autocast=True, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.no_poison
@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 2},
        {"num_layers": 2, "checkpoint_activations": True},
        {"num_layers": 4, "mixture_grad": "detached"},
    ],
    ids=str,
)
def test_a_step_on_a_cpu_takes_what_is_planned(options: dict[str, Any]) -> None:
    model: Any = create_model("longnet-tiny", **options)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(n: int) -> None:
        tokens = torch.randint(256, (1, n))
        optimizer.zero_grad()
        model(tokens, targets=tokens).backward()
        optimizer.step()

    # the moments are there from the first step on
    step(256)
    taken = profile_memory(step, 4096, device="cpu").peak_allocated
    plan = tiny(4096, gpu="cpu", **options)
    beside = sum(size for what, size in plan.terms if what in ("weights", "optimizer's moments"))
    assert plan.peak - beside == pytest.approx(taken, rel=0.15), str(plan)


@pytest.mark.parametrize("preset", ["longnet-50m", "mixed-50m", "longnet-125m", "llama-1b"])
def test_checkpointed_models_take_what_their_summary_says(preset: str) -> None:
    """Both counted the input of a block that is computed again twice, and plans the first one's again as the tokens' embeddings."""
    plan = plan_model(preset, num_positions=2**20, gpu="H200", checkpoint_activations=True, find_longest=False)
    summary = dataclasses.replace(create_model(preset, device="meta").summary((2**20,), memory=2**40), activation_bytes=2)
    assert plan.peak == pytest.approx(summary.as_dict()["lengths"][0]["training_bytes_checkpointed"], rel=0.015)


def test_a_genome_model_takes_what_an_h200_took() -> None:
    """Blocks keep inputs of 16 bits there: 32.1 GiB (docs/genome.md), with Muon, which has one moment; 12 GiB more were planned."""
    lengths, rates = geometric_branches(2**20, 2048)
    shape: dict[str, Any] = {"vocab_size": 5, "kmer": 6, "tie_embeddings": False, "embed_dim": 512, "num_layers": 12, "num_heads": 8}
    shape |= {"segment_lengths": lengths, "dilation_rates": rates}
    plan = plan_model("longnet-50m", num_positions=2**20, gpu="H200", checkpoint_activations=True, find_longest=False, **shape)
    summary = dataclasses.replace(create_model("longnet-50m", device="meta", **shape).summary((2**20,), memory=2**40), activation_bytes=2)
    for found in (plan.peak, summary.as_dict()["lengths"][0]["training_bytes_checkpointed"]):
        assert found / 2**30 == pytest.approx(32.1, rel=0.05)


@pytest.mark.parametrize("preset", ["longvit-4096", "gigapath-12l768d", "llama-1b", "gpt2-124m"])
def test_parameters_are_those_of_the_model_that_is_made(preset: str) -> None:
    found = plan_model(preset, num_positions=512, gpu="H100", find_longest=False)
    assert found.parameters == sum(p.numel() for p in create_model(preset, device="meta").parameters())
    assert found.peak > 16 * found.parameters


# steps of an H200: slides of 2026-11-25 (README), models of bytes at two sequences of 32,768 of 2026-11-30
_WINDOW: dict[str, Any] = {"attention": "block_sparse", "block_pattern": LocalWindow((1023, 0))}
_LONGNET: dict[str, Any] = {"segment_lengths": (2048, 8192, 32768), "dilation_rates": (1, 4, 16)}


@pytest.mark.parametrize(
    ("preset", "length", "changes", "ms"),
    [
        ("gigapath-12l768d", 45681, {}, 163),
        ("gigapath-12l768d", 45681, {"checkpoint_activations": True}, 235),
        ("longnet-50m", 32768, {"attention": [_WINDOW]}, 59.9),
        ("longnet-50m", 32768, {"attention": [_WINDOW] * 3 + [{"attention": "dense"}]}, 87.5),
        ("longnet-50m", 32768, _LONGNET, 65.1),
    ],
)
def test_planned_steps_take_what_an_h200_took(preset: str, length: int, changes: dict[str, Any], ms: float) -> None:
    bytes_model = {"embed_dim": 512, "num_heads": 8, "batch_size": 2} if preset == "longnet-50m" else {}
    plan = plan_model(preset, num_positions=length, gpu="H200", find_longest=False, **bytes_model, **changes)
    assert plan.seconds is not None and plan.seconds * 1e3 == pytest.approx(ms, rel=0.1)


def slides() -> list[dict[str, Any]]:
    lines = map(json.loads, (RESULTS / "slide-encoder.jsonl").read_text().splitlines())
    ours = [row for row in lines if row["what"].startswith("ours, bf16 autocast") and row["dropout"]]
    return list({(row["tiles"], row["what"]): row for row in ours if not row["plain"] and not row["compiled"]}.values())


@pytest.mark.slow
@pytest.mark.parametrize("row", slides(), ids=lambda row: f"{row['tiles']} {row['what']}")
def test_planned_peaks_of_a_model_are_what_an_h200_took(row: dict[str, Any]) -> None:
    # those steps had no optimizer
    casts, again = row["autocast"] != "None", row.get("checkpoint_activations", False)
    plan = plan_model(
        "gigapath-12l768d", num_positions=row["tiles"], gpu="H200", autocast=casts, checkpoint_activations=again, find_longest=False
    )
    assert plan.peak - dict(plan.terms)["optimizer's moments"] == pytest.approx(row["peak_bytes"], rel=0.15)


def steps() -> list[Any]:
    """(attention, batch, positions, ms, the model) of generated tokens; constants were fitted to another run."""
    groups = json.loads((RESULTS / "train-infer.json").read_text(encoding="utf-8"))["groups"]
    others = [row for rows in groups.values() for row in rows if row["case"].get("task") == "decode" and "values" in row]
    cases = [(row | row["case"], row) for row in others]
    return [(case["name"], case["B"], case["N"], row["values"]["ms"], case["model"]) for case, row in cases]


@pytest.mark.parametrize("step", steps(), ids=lambda step: f"{step[0]}-{step[1]}-{step[2]}-{step[4]}")
def test_generated_tokens_are_near_what_an_h200_took(step: Any) -> None:
    name, batch, positions, ms, preset = step
    found = plan_model(preset, num_positions=positions, batch_size=batch, training=False, gpu="H200", find_longest=False, **ATTENTION[name])
    assert found.decode_seconds is not None and "tokens/s" in str(found) and "generating" in str(found)
    assert found.decode_seconds * 1e3 == pytest.approx(ms, rel=0.35)


def test_only_models_that_generate_have_a_rate_of_tokens() -> None:
    assert tiny(4096).decode_seconds is None
    encoder = plan_model("gigapath-12l768d", num_positions=4096, gpu="H200", training=False, find_longest=False)
    assert encoder.decode_seconds is None and "positions/s" in str(encoder)
    assert tiny(4096, training=False, world_size=2).decode_seconds is None
