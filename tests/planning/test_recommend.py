"""``recommend``: every use case on every kind of machine; what is recommended is built and run, and what is cited is there."""

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
from dilated_attention.pattern import DilatedPattern, GlobalLocal
from dilated_attention.planning import plan_model, recommend

DOCS = Path(__file__).parents[2]
MACHINES = ("cpu", "V100", "A100", "H100", "H200")
LENGTHS = {"short-sequences": (700, 8191), "torchscale": (10_001, 200_000)}
# use case → other arguments that it is asked with
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


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """One process, which is a group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("use_case", EXTRA)
def test_every_use_case_is_answered_on_every_machine(use_case: str, mesh: Any) -> None:
    """With reasons, pages that exist, and a line that runs; further arguments on one machine each, which are different ones."""
    ran = set()
    for i, extra in enumerate(EXTRA[use_case]):
        for j, machine in enumerate(MACHINES if i == 0 else MACHINES[i + 1 : i + 2], i):
            length = LENGTHS.get(use_case, (4096, 2**17))[j % 2]
            answer = recommend(use_case, length, gpu=machine, memory=24 if machine == "cpu" else None, **extra)
            assert answer.use_case == use_case and answer.forward is not None
            assert (answer.segment_lengths != ()) == (answer.kind in ("dilated", "ring_dilated"))
            assert answer.settings[0].name == "kind" and answer.settings[0].value == answer.kind
            assert len({setting.name for setting in answer.settings}) == len(answer.settings)
            for setting in answer.settings:
                assert len(setting.reason) > 20 and setting.value
                if setting.source != "computed":
                    page, heading = setting.source.split(", ", 1)
                    assert re.search(rf"^#+ {re.escape(heading)}$", (DOCS / page).read_text(), re.MULTILINE), setting.source
            assert answer.setting("dtype").value in str(answer)
            assert json.loads(json.dumps(answer.as_dict()))["code"] == answer.code
            if answer.code not in ran and use_case != "huggingface":
                ran.add(answer.code)
                run_on_meta(answer.code, mesh)


def run_on_meta(code: str, mesh: Any) -> None:
    """Every argument of the line is accepted at its full width, without memory, of one layer."""
    made = []

    def model(preset: str, **config: Any) -> None:
        made.append(dilated_attention.create_model(preset, **config | {"device": "meta", "num_layers": 1}))

    def attention(kind: str, **config: Any) -> None:
        made.append(dilated_attention.create_attention(kind, **config, **({"device": "meta"} if "embed_dim" in config else {})))

    exec(code.partition(" = ")[2], {"create_model": model, "create_attention": attention, "mesh": mesh, "GlobalLocal": GlobalLocal})
    assert len(made) == 1


def test_lines_for_transformers_run() -> None:
    transformers = pytest.importorskip("transformers")
    integration = pytest.importorskip("dilated_attention.integrations.huggingface")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=2**17
    )
    model, ids = transformers.LlamaForCausalLM(config), torch.randint(50, (1, 300))
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
    asked = recommend("training", 2**20, gpu="H200", attention="dense")
    assert asked.kind == "dense" and asked.setting("kind").reason.startswith("requested")
    with pytest.raises(KeyError, match="no setting is called 'branches'; the settings are kind"):
        asked.setting("branches")


@pytest.mark.parametrize(("length", "heads"), [(8192, 12), (2**17 + 1, 40), (2**20, 4)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_branches_grow_to_the_whole_sequence_nest_and_reach_every_position(length: int, heads: int, is_causal: bool) -> None:
    answer = recommend("training" if is_causal else "encoder", length, gpu="H200", heads=heads)
    pattern = DilatedPattern(answer.segment_lengths, answer.dilation_rates)
    assert pattern.branches[0] == (2048, 1)
    assert pattern.segment_lengths[-1] >= length > pattern.segment_lengths[-2]
    for (w, r), (w_next, r_next) in itertools.pairwise(pattern.branches):
        assert w_next % w == 0 and r_next % r == 0 and w_next > w
    assert max(pattern.dilation_rates) <= max(heads, 8)
    if heads >= 8:
        # some head takes every position in every branch
        assert all(len(set(row)) == rate for row, rate in zip(pattern.offsets(heads), pattern.dilation_rates, strict=True))
    assert answer.keys_per_query == pattern.keys_per_query(length, heads, is_causal=is_causal)
    assert ("leave positions out" in answer.setting("branches").reason) == (heads < 8)


def made_by(answer: Any) -> dict[str, Any]:
    """The arguments of ``create_model`` in an answer's code."""
    made: dict[str, Any] = {}
    exec(answer.code, {"create_model": lambda preset, **config: made.update(config, preset=preset), "mesh": {"cp": None}})
    return {name: value for name, value in made.items() if name not in ("mesh", "layout")}


@pytest.mark.parametrize("parameters", [1.3e8, 1.3e9, 7e9])
def test_models_have_about_as_many_parameters_as_asked_for(parameters: float) -> None:
    for shape in ({}, {"heads": 24, "head_dim": 64}):
        made = made_by(recommend("long-context", 2**17, gpu="H200", parameters=parameters, **shape))
        model = dilated_attention.create_model(**made, device="meta")
        assert 0.9 < sum(p.numel() for p in model.parameters()) / parameters < 1.1
        assert not shape or (model.config.num_heads, model.config.head_dim) == (24, 64)


# (arguments, whether it fits, kind, (setting, text that it begins with or that its reason holds))
STEPS: list[tuple[dict[str, Any], bool, str, tuple[tuple[str, str], ...]]] = [
    (
        {"length": 2**16, "parameters": 7e9},
        False,
        "dilated",
        (("memory", "the optimizer alone do not fit"), ("checkpoint_activations", "True")),
    ),
    ({"length": 2**20, "parameters": 1.3e9}, False, "dilated", (("memory", "positions would fit"),)),
    ({"length": 2**16, "parameters": 7e9, "gpus": 8}, True, "ring_dilated", (("mesh", "1 × 8"), ("layout", '"contiguous"'))),
    # as many sequences as GPUs that fit: nothing is shared
    ({"length": 2**14, "parameters": 1.3e9, "gpus": 8, "batch": 8}, True, "dilated", (("mesh", "8 × 1"),)),
    # causal dense attention is balanced by zigzag
    ({"length": 2**16, "parameters": 7e9, "gpus": 8, "attention": "dense"}, True, "ring", (("layout", '"zigzag"'),)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "fits", "kind", "told"), STEPS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_steps_are_spread_so_that_they_fit(asked: dict[str, Any], fits: bool, kind: str, told: tuple[tuple[str, str], ...]) -> None:
    answer = recommend("training", gpu="H200", **asked)
    assert (answer.fits, answer.kind) == (fits, kind) and answer.memory is not None
    gpus = asked.get("gpus", 1)
    sharing = int(answer.setting("mesh").value.split()[2]) if gpus > 1 else 1
    planned = plan_model(**made_by(answer), num_positions=asked["length"], gpu="H200", weight_shards=gpus, world_size=sharing)
    assert (answer.memory, answer.fits) == (planned.peak, planned.fits)
    for name, text in told:
        assert answer.setting(name).value.startswith(text) or text in answer.setting(name).reason


def test_caches_decide_how_far_segments_reach() -> None:
    few, many, most = (recommend("serving", 2**17, gpu="H200", users=users, parameters=1.3e9) for users in (2, 64, 400))
    assert few.fits and many.fits and most.fits and few.segment_lengths[-1] == 2**17 and most.kind == "block_sparse"
    assert 8192 <= many.segment_lengths[-1] < 2**17 and "No segment is longer" in many.setting("branches").reason
    # keys and values in 16 bits of every layer and the longest segment's positions, beside the weights
    model = dilated_attention.create_model(**made_by(many), device="meta")
    row = 2 * 2 * model.config.num_layers * model.config.num_kv_heads * model.config.head_dim
    assert many.memory == 2 * sum(p.numel() for p in model.parameters()) + 64 * row * many.segment_lengths[-1]
    assert model.config.num_kv_heads == 4 and "PagedKVCache" in many.setting("KV cache").value
    # the pairs of so many blocks are not listed
    assert recommend("serving", 2**30, gpu="cpu", users=400).kind == "block_sparse"


@pytest.mark.parametrize(
    ("machine", "dtype", "forward"),
    [("cpu", "float32", "sdpa_cpu"), ("V100", "float16", "sdpa_efficient"), ("A100", "bfloat16", "flash2"), ("H200", "bfloat16", "flash3")],
)
def test_the_machine_decides_dtype_and_backend(machine: str, dtype: str, forward: str) -> None:
    answer = recommend("training", 2**16, gpu=machine)
    assert answer.setting("dtype").value == dtype and answer.forward == forward


def test_a_head_dim_that_kernels_refuse_is_told_of() -> None:
    answer = recommend("training", 2**16, gpu="H200", head_dim=48)
    assert answer.setting("head dim").value == "48; better 64 or 128" and answer.backward != "flash4"


@pytest.mark.parametrize(
    ("use_case", "length", "options", "said"),
    [
        ("tuning", 100, {}, "use_case"),
        ("training", 100, {"head_dim": 300}, "head_dim is 300; expected an integer ≤ 256"),
        ("training", 100, {"parameters": 1e10}, "use 'large-training'"),
        ("large-training", 100, {}, "for more than 7,000,000,000"),
        ("short-sequences", 8192, {}, "for fewer than 8,192"),
        ("training", 100, {"users": 4}, "users given, which 'training' does not use"),
        ("training", 100, {"attention": "linear"}, "attention"),
        ("training", 100, {"memory": -1.0}, "memory is -1.0"),
        ("training", 100, {"parameters": float("nan")}, "parameters is nan"),
    ],
)
def test_what_cannot_be_recommended_is_refused(use_case: str, length: int, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        recommend(use_case, length, **options)


@pytest.mark.slow
def test_the_command_prints_what_the_function_answers(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["recommend", "encoder", "--length", "64k", "--parameters", "100M", "--gpu", "NVIDIA H200", "--heads", "32"]
    answer = recommend("encoder", 2**16, parameters=1e8, gpu="H200", heads=32)
    assert main(line) == 0
    assert capsys.readouterr().out == f"{answer}\n"
    assert max(map(len, str(answer).split("\n\n")[1].splitlines())) <= 118
    assert main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(answer.as_dict()))
