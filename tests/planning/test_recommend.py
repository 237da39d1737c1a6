"""``recommend``: every use case on every kind of machine, what is recommended is built and run, and what is cited is there."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dilated_attention
from dilated_attention.cli import main
from dilated_attention.factory import EXAMPLES
from dilated_attention.models import PagedKVCache
from dilated_attention.models.summary import USABLE
from dilated_attention.pattern import GlobalLocal
from dilated_attention.planning import advice, find_gpu, plan_model
from dilated_attention.planning.advice import USE_CASES, branches, recommend
from dilated_attention.planning.plans import Recommendation

DOCS = Path(__file__).parents[2]
MACHINES = ("cpu", "V100", "A100", "H100", "H200")
LENGTHS = {"short-sequences": (700, 8191), "torchscale": (10_001, 200_000)}
EXTRA: dict[str, list[dict[str, Any]]] = {
    "training": [
        {},
        {"parameters": 1.3e9, "gpus": 8},
        {"gpus": 4, "heads": 8},
        {"attention": "block_sparse", "parameters": 4e8, "gpus": 2},
    ],
    "large-training": [{"parameters": 1.3e10, "gpus": 8}, {"parameters": 7e10, "gpus": 64, "batch": 8, "attention": "dense"}],
    "long-context": [{}, {"parameters": 7e9, "attention": "dense"}],
    "serving": [{}, {"users": 3, "gpus": 2, "attention": "dilated"}],
    "short-sequences": [{}, {"parameters": 1.3e8, "batch": 8}],
    "encoder": [{}, {"parameters": 5e7}],
    "torchscale": [{}],
    "huggingface": [{}, {"gpus": 2}, {"attention": "block_sparse"}],
}


@functools.lru_cache(maxsize=1024)
def _asked(use_case: str, length: int, machine: str, extra: tuple[tuple[str, Any], ...]) -> Recommendation:
    return recommend(use_case, length, gpu=machine, memory=24 if machine == "cpu" else None, **dict(extra))


def _answers(use_case: str, extra: dict[str, Any]) -> Iterator[Recommendation]:
    """Of a use case's first arguments on every machine, and of each of its others on two, which are different ones: both lengths each."""
    i = EXTRA[use_case].index(extra)
    machines = MACHINES if i == 0 else (MACHINES * 2)[2 * i : 2 * i + 2]
    for machine, length in zip(machines, itertools.cycle(LENGTHS.get(use_case, (4096, 2**17))), strict=False):
        yield _asked(use_case, length, machine, tuple(extra.items()))


@pytest.mark.slow
@pytest.mark.parametrize("use_case", list(USE_CASES))
def test_every_use_case_is_answered_on_every_machine(use_case: str, mesh: Any) -> None:
    """With reasons, pages that exist, figures that stand on them, and a line that runs: in one test, so that one process makes the answers,
    whose traces of models take a minute in all."""
    for extra in EXTRA[use_case]:
        _has_reasons(use_case, extra)
        _cites_what_exists(use_case, extra)
        if use_case != "huggingface":
            _runs(use_case, extra, mesh)


def _has_reasons(use_case: str, extra: dict[str, Any]) -> None:
    for answer in _answers(use_case, extra):
        assert answer.use_case == use_case and answer.forward is not None
        assert answer.keys_per_query is not None and answer.dense_keys_per_query is not None
        assert (answer.segment_lengths != ()) == (answer.kind in ("dilated", "ring_dilated"))
        assert answer.settings[0].name == "kind" and answer.settings[0].value == answer.kind
        assert len({setting.name for setting in answer.settings}) == len(answer.settings)
        assert all(len(setting.reason) > 20 and setting.value for setting in answer.settings)
        assert answer.setting("dtype").value in str(answer)
        told = json.loads(json.dumps(answer.as_dict()))
        assert told["code"] == answer.code and told["settings"][0]["name"] == "kind"


def _cites_what_exists(use_case: str, extra: dict[str, Any]) -> None:
    for setting in {setting for answer in _answers(use_case, extra) for setting in answer.settings}:
        if setting.source != "computed":
            page, heading = setting.source.split(", ", 1)
            assert re.search(rf"^#+ {re.escape(heading)}$", (DOCS / page).read_text(), re.MULTILINE), setting.source


# of the page and heading, the figures that reasons cite
FIGURES = {
    "docs/performance.md, Short sequences": ("0.62", "0.70", "1.24", "2.02", "0.98", "0.589", "0.363"),
    "docs/performance.md, Against the arithmetic floor": ("17.41", "48.57"),
    "docs/decoding.md, Measured": ("20,790", "2,274", "1,125", "107", "1,120", "16,637"),
    "docs/block_sparse.md, Performance": ("468",),
    "docs/torchscale.md, What is the same": ("5.3e-7",),
    "docs/slide_encoder.md, NVIDIA H200": ("0.6", "0.9", "0.12", "11.9", "163", "235", "4.2"),
    "docs/ring.md, Figures": ("0.95", "0.98", "0.92", "0.41", "0.87", "1.00", "0.90"),
}


def test_figures_of_the_reasons_stand_on_their_pages() -> None:
    told = Path(advice.__file__).read_text()
    for place, figures in FIGURES.items():
        page, heading = place.split(", ", 1)
        text = (DOCS / page).read_text()
        assert place in told and re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE), place
        for figure in figures:
            assert all(re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d])", where) for where in (text, told)), (place, figure)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """One process, which is a group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    finally:
        dist.destroy_process_group()


def _reduced(config: dict[str, Any], most: int = 256) -> dict[str, Any]:
    """The same arguments for a sequence of ``most`` positions: segments and rates that are left of those, at least one."""
    if "segment_lengths" in config:
        w = [min(length, most) for length in config["segment_lengths"]]
        r = [min(rate, 16) for rate in config["dilation_rates"]]
        config |= {"segment_lengths": w, "dilation_rates": r}
    if "embed_dim" in config:
        config |= {"embed_dim": config["num_heads"] * 8}
    return config


def _runs(use_case: str, extra: dict[str, Any], mesh: Any) -> None:
    """Every argument of the line is accepted at its full width, without memory; with small sizes it computes something."""
    ran = set()
    for answer in _answers(use_case, extra):
        if answer.code in ran:
            continue
        ran.add(answer.code)
        made: dict[str, tuple[str, str, dict[str, Any]]] = {}

        def model(preset: str, made: dict[str, Any] = made, **config: Any) -> Any:
            made["line"] = ("model", preset, config)
            return dilated_attention.create_model(preset, **(config | {"device": "meta", "num_layers": 1}))

        def attention(kind: str, made: dict[str, Any] = made, **config: Any) -> Any:
            made["line"] = ("attention", kind, config)
            return dilated_attention.create_attention(kind, **config, **({"device": "meta"} if "embed_dim" in config else {}))

        exec(answer.code, {"create_model": model, "create_attention": attention, "mesh": mesh, "GlobalLocal": GlobalLocal})
        _run_small(*made["line"])


def _run_small(what: str, name: str, config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    if what == "model" and name.startswith("gigapath"):
        encoder = dilated_attention.create_model(name, **config, num_layers=1)
        assert encoder(torch.randn(1, 50, 1536), torch.randint(0, 9, (1, 50, 2)) * 256).shape == (1, 768)
        return
    if what == "model":
        small = dilated_attention.create_model(
            name, **_reduced({"embed_dim": 256, "num_heads": 32, "ffn_dim": None} | config) | {"num_layers": 1, "vocab_size": 50}
        )
        tokens = torch.randint(50, (1, 96))
        loss = small(tokens, targets=tokens, **({"seq_len": 96} if "mesh" in config else {}))
        loss.backward()
        assert loss.isfinite()
        return
    layer = dilated_attention.create_attention(name, **_reduced(config))
    if name == "ring":
        q = torch.randn(1, 64, 2, 8, requires_grad=True)
        out = layer(q, q, q, is_causal=True, seq_len=64)
    else:
        x = torch.randn(1, 300, config["embed_dim"])
        out = layer(x, is_causal=True, **({"seq_len": 300} if "mesh" in config else {}))[0]
        assert out.shape == x.shape
    out.sum().backward()
    assert out.isfinite().all()


def test_lines_for_transformers_run() -> None:
    transformers = pytest.importorskip("transformers")
    integration = pytest.importorskip("dilated_attention.integrations.huggingface")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=2**17
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(50, (1, 300))
    for length, attention, expected in ((2048, None, "sdpa"), (2**16, None, "dilated"), (2**16, "block_sparse", "block_sparse")):
        answer = recommend("huggingface", length, gpu="A100", attention=attention)
        for line in (*answer.setup, answer.code):
            exec(line, {"model": model, "register": integration.register, "GlobalLocal": GlobalLocal})
        assert model.config._attn_implementation == expected
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert loss.isfinite()
    shared = recommend("huggingface", 2**16, gpu="A100", gpus=2)
    assert shared.code == 'model.set_attn_implementation("ring_dilated")' and 'mesh=mesh["cp"]' in shared.setup[-1]


def test_short_sequences_are_dense_and_long_ones_dilated() -> None:
    kinds = {n: recommend("training", n, gpu="H200").kind for n in (100, 4096, 8191, 8192, 2**20)}
    assert kinds == {100: "dense", 4096: "dense", 8191: "dense", 8192: "dilated", 2**20: "dilated"}
    assert ("cuDNN's dense attention took 0.62 of their time forward and 0.70 forward + backward") in recommend(
        "training", 4096, gpu="H200"
    ).setting("kind").reason
    asked = recommend("training", 2**20, gpu="H200", attention="dense")
    assert asked.kind == "dense" and asked.setting("kind").reason.startswith("requested")
    with pytest.raises(KeyError, match="no setting is called 'branches'; the settings are kind"):
        asked.setting("branches")


@pytest.mark.parametrize(("length", "heads"), [(8192, 12), (10_000, 16), (2**17 + 1, 40), (2**20, 4), (3 * 10**6, 32)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_branches_grow_to_the_whole_sequence_nest_and_reach_every_position(length: int, heads: int, is_causal: bool) -> None:
    pattern = branches(length, heads)
    assert pattern.segment_lengths[0] == 2048 and pattern.dilation_rates[0] == 1
    assert pattern.segment_lengths[-1] >= length > pattern.segment_lengths[-2]
    for (w, r), (w_next, r_next) in itertools.pairwise(pattern.branches):
        assert w_next % w == 0 and r_next % r == 0 and w_next > w
    assert max(pattern.dilation_rates) <= max(heads, 8)
    if heads >= 8:
        # some head takes every position in every branch
        assert all(len(set(row)) == rate for row, rate in zip(pattern.offsets(heads), pattern.dilation_rates, strict=True))
    answer = recommend("training" if is_causal else "encoder", length, gpu="H200", heads=heads)
    assert answer.segment_lengths == pattern.segment_lengths
    assert answer.keys_per_query == pattern.keys_per_query(length, heads, is_causal=is_causal)
    assert ("leave positions out" in answer.setting("branches").reason) == (heads < 8)


@pytest.mark.parametrize("parameters", [1.3e8, 3.5e8, 1.3e9, 7e9, 1.3e10, 7e10])
def test_models_have_about_as_many_parameters_as_asked_for(parameters: float) -> None:
    for shape in ({}, {"heads": 24, "head_dim": 64}):
        made = made_by(recommend("long-context", 2**17, gpu="H200", parameters=parameters, **shape))
        model = dilated_attention.create_model(**made, device="meta")
        assert 0.9 < sum(p.numel() for p in model.parameters()) / parameters < 1.1
        assert not shape or (model.config.num_heads, model.config.head_dim) == (24, 64)


def made_by(answer: Recommendation) -> dict[str, Any]:
    """The arguments of ``create_model`` in an answer's code."""
    made: dict[str, Any] = {}
    exec(answer.code, {"create_model": lambda preset, **config: made.update(config, preset=preset), "mesh": {"cp": None}})
    return {name: value for name, value in made.items() if name not in ("mesh", "layout")}


@pytest.mark.slow
def test_steps_are_spread_so_that_they_fit() -> None:
    one = recommend("training", 2**16, gpu="H200", parameters=7e9)
    assert one.fits is False and one.memory is not None and "the optimizer alone do not fit" in one.setting("memory").reason
    long = recommend("training", 2**20, gpu="H200", parameters=1.3e9)
    assert long.fits is False and "positions would fit" in long.setting("memory").reason
    assert one.setting("checkpoint_activations").value == "True"
    eight = recommend("training", 2**16, gpu="H200", parameters=7e9, gpus=8)
    assert eight.fits and eight.kind == "ring_dilated" and eight.setting("mesh").value.startswith("1 × 8")
    assert eight.setting("layout").value == '"contiguous"'
    # as many sequences as GPUs that fit: nothing is shared
    side_by_side = recommend("training", 16384, gpu="H200", parameters=1.3e9, gpus=8, batch=8)
    assert side_by_side.kind == "dilated" and side_by_side.setting("mesh").value.startswith("8 × 1")
    # causal dense attention is balanced by zigzag
    dense = recommend("training", 2**16, gpu="H200", parameters=7e9, gpus=8, attention="dense")
    assert dense.kind == "ring" and dense.setting("layout").value == '"zigzag"' and 'layout="zigzag"' in dense.code
    # a sequence too short to be shared
    short = recommend("training", 4096, gpu="H200", parameters=1.3e9, gpus=8)
    assert short.kind == "dense" and "give at least 8 sequences" in short.setting("mesh").reason
    for answer in (one, eight, side_by_side, dense, short):
        assert answer.memory is not None
        assert answer.fits == (answer.memory <= USABLE * find_gpu("H200").memory)


@pytest.mark.slow
def test_memory_is_what_the_planner_says_of_the_model_that_is_made() -> None:
    answer = recommend("training", 2**15, gpu="H100", parameters=1.3e8, gpus=2)
    assert answer.setting("mesh").value.startswith("1 × 2")
    planned = plan_model(**made_by(answer), num_positions=2**15, gpu="H100", weight_shards=2, world_size=2)
    assert answer.memory == planned.peak and answer.fits == planned.fits


def test_caches_decide_how_far_segments_reach() -> None:
    few = recommend("serving", 2**17, gpu="H200", users=2, parameters=1.3e9)
    many = recommend("serving", 2**17, gpu="H200", users=64, parameters=1.3e9)
    most = recommend("serving", 2**17, gpu="H200", users=400, parameters=1.3e9)
    assert few.segment_lengths[-1] == 2**17 and few.fits
    assert 8192 <= many.segment_lengths[-1] < 2**17 and many.fits and "No segment is longer" in many.setting("branches").reason
    assert most.kind == "block_sparse" and most.fits
    # keys and values in 16 bits of every layer and the longest segment's positions, beside the weights
    model = dilated_attention.create_model(**made_by(many), device="meta")
    config, longest = model.config, many.segment_lengths[-1]
    assert config.num_kv_heads == 4 and many.memory is not None
    row = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert many.memory == 2 * sum(p.numel() for p in model.parameters()) + 64 * row * longest
    assert PagedKVCache.__name__ in many.setting("KV cache").value


@pytest.mark.parametrize(
    ("machine", "dtype", "forward"),
    [("cpu", "float32", "sdpa_cpu"), ("V100", "float16", "sdpa_efficient"), ("A100", "bfloat16", "flash2"), ("H200", "bfloat16", "flash3")],
)
def test_the_machine_decides_dtype_and_backend(machine: str, dtype: str, forward: str) -> None:
    answer = recommend("training", 2**16, gpu=machine)
    assert answer.setting("dtype").value == dtype and answer.forward == forward
    hardware = EXAMPLES["cpu" if machine == "cpu" else "hopper"]
    if machine != "cpu":
        hardware = dataclasses.replace(hardware, capability=find_gpu(machine).capability, name=find_gpu(machine).name)
    explained = dilated_attention.explain_backend(hardware=hardware, dtype=getattr(torch, dtype), num_heads=16, is_causal=True, length=2048)
    assert (answer.forward, answer.backward) == (explained.forward, explained.backward)


def test_a_head_dim_that_kernels_refuse_is_told_of() -> None:
    answer = recommend("training", 2**16, gpu="H200", head_dim=48)
    assert answer.setting("head dim").value == "48; better 64 or 128" and answer.backward != "flash4"
    with pytest.raises(ValueError, match="head_dim is 300; expected an integer ≤ 256"):
        recommend("training", 2**16, gpu="H200", head_dim=300)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tuning", 100), "use_case"),
        (("training", 0), "length"),
        (("training", 100, "parameters", 1e10), "use 'large-training'"),
        (("large-training", 100), "for more than 7,000,000,000"),
        (("short-sequences", 8192), "for fewer than 8,192"),
        (("training", 100, "users", 4), "users given, which 'training' does not use"),
        (("torchscale", 100, "heads", 4), "heads given"),
        (("encoder", 100, "causal", True), "causal given"),
        (("training", 100, "attention", "linear"), "attention"),
        (("training", 100, "gpu", "H9000"), "H9000"),
        (("training", 100, "memory", -1.0), "memory is -1.0"),
        (("training", 100, "parameters", float("nan")), "parameters is nan"),
    ],
)
def test_what_cannot_be_recommended_is_refused(arguments: tuple[Any, ...], said: str) -> None:
    use_case, length, *option = arguments
    with pytest.raises(ValueError, match=re.escape(said)):
        recommend(use_case, length, **dict([option] if option else []))


@pytest.mark.slow
def test_the_command_prints_what_the_function_answers(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["recommend", "training", "--length", "1M", "--parameters", "7B", "--gpus", "4", "--gpu", "NVIDIA H200", "--heads", "32"]
    answer = recommend("training", 2**20, parameters=7e9, gpus=4, gpu="H200", heads=32)
    assert main(line) == 0
    assert capsys.readouterr().out == f"{answer}\n"
    assert max(map(len, str(answer).split("\n\n")[1].splitlines())) <= 118
    assert main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(answer.as_dict()))
