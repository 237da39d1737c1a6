"""Models and adapters trained with this library's attention have it again when they are loaded, or a warning or an error says so."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from dilated_attention.integrations import _hf_refusals, _hf_settings
from dilated_attention.integrations.huggingface import configure, register
from dilated_attention.pattern import GlobalLocal, MaskFunction
from tests.helpers.scripts import run_script
from tests.integrations.test_huggingface import DECODER, LENGTHS, PATTERN, RATES, RELEASE

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")
modeling = pytest.importorskip("transformers.modeling_utils")

IDS = torch.randint(1, 61, (1, 50), generator=torch.Generator().manual_seed(1))
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Names as in a fresh process, with small segments; and every warning of this library an error unless a test expects it."""
    tables = (modeling.AttentionInterface._global_mapping, masking.AttentionMaskInterface._global_mapping, _hf_settings.REGISTERED)
    kept, ignored = [dict(table) for table in tables], set(_hf_refusals.WITHOUT_EFFECT)
    register(segment_lengths=LENGTHS, dilation_rates=RATES, pattern=PATTERN)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(attn_implementation|was trained with|Unexpected keyword)")
        yield
    for table, before in zip(tables, kept, strict=True):
        table.clear()
        table.update(before)
    _hf_refusals.WITHOUT_EFFECT.clear()
    _hf_refusals.WITHOUT_EFFECT.update(ignored)


def llama(name: str | None) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, attn_implementation=name)).eval()


def answers(model: Any) -> list[torch.Tensor]:
    """Logits and what is generated."""
    with torch.no_grad():
        generated = model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=5, do_sample=False)
        return [model(IDS).logits, generated]


def check_same(model: Any, expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(found, wanted) for found, wanted in zip(answers(model), expected, strict=True))


def saved_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("name", ["dilated", "block_sparse", "near"])
def test_a_loaded_model_computes_what_the_saved_one_did(name: str, tmp_path: Path) -> None:
    register("near", segment_lengths=[4, 64], dilation_rates=[1, 5])
    model = llama(name)
    expected = answers(model)
    model.save_pretrained(tmp_path)
    assert saved_config(tmp_path)["attn_implementation"] == name
    assert "dilated" not in (tmp_path / "generation_config.json").read_text()
    # other settings where it is loaded
    register(segment_lengths=[16], dilation_rates=[1], pattern=GlobalLocal(3, 1, block_size=64))
    register("near", segment_lengths=[16], dilation_rates=[1])
    for again in (load(tmp_path), transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()):
        assert again.config._attn_implementation == name
        check_same(again, expected)
    assert not torch.equal(answers(load(tmp_path, attn_implementation="sdpa"))[0], expected[0])
    # configs are rebuilt from to_dict here and there
    assert transformers.LlamaConfig(**again.config.to_dict())._attn_implementation == name


def test_a_ring_loads_as_a_ring(tmp_path: Path) -> None:
    model = llama("ring_dilated")
    expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.config._attn_implementation == "ring_dilated" and torch.equal(again(IDS).logits, expected)
    check_same(load(tmp_path, attn_implementation="dilated"), answers(llama("dilated")))


def test_a_pattern_that_no_config_can_save(tmp_path: Path) -> None:
    register("mine", pattern=MaskFunction(lambda b, h, q, k: k % 3 != 1))
    model = llama("mine")
    expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    assert saved_config(tmp_path)["dilated_attention"] == {}
    assert torch.equal(load(tmp_path)(IDS).logits, expected)


def test_a_model_switched_back_on_purpose_is_dense_without_a_warning(tmp_path: Path) -> None:
    model = llama("dilated")
    configure(model, segment_lengths=LENGTHS, dilation_rates=RATES)
    model.set_attn_implementation("sdpa")
    expected = answers(model)
    model.save_pretrained(tmp_path)
    assert saved_config(tmp_path)["attn_implementation"] is None
    again = load(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    check_same(again, expected)
    check_same(load(tmp_path, attn_implementation="dilated"), answers(llama("dilated")))


def test_a_model_that_is_not_ours_is_saved_as_before(tmp_path: Path) -> None:
    llama("eager").save_pretrained(tmp_path)
    assert not {"attn_implementation", "dilated_attention"} & set(saved_config(tmp_path))
    assert load(tmp_path).config._attn_implementation == "sdpa"


def test_a_folder_that_names_no_implementation_warns(tmp_path: Path) -> None:
    """As folders were saved before configs kept the implementation."""
    llama("dilated").save_pretrained(tmp_path)
    config = saved_config(tmp_path)
    del config["attn_implementation"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match='and no attn_implementation.*load with attn_implementation="dilated"'):
        assert load(tmp_path).config._attn_implementation == "sdpa"
    check_same(load(tmp_path, attn_implementation="dilated"), answers(llama("dilated")))


def test_settings_that_are_refused_do_not_break_a_config() -> None:
    model = llama("dilated")
    for told in ({"segments": [8]}, [8], {"segment_lengths": [8]}):
        model.config.dilated_attention = told
        assert "dilated_attention" in repr(model.config)


@pytest.mark.parametrize("names", ["dilated", {"": "dilated", "text_config": "sdpa"}, {"text_config": "dilated"}])
def test_configs_within_a_config_keep_theirs(names: Any, tmp_path: Path) -> None:
    vision = {name: DECODER[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    text = {**{name: value for name, value in DECODER.items() if value is not None}, "head_dim": 8}
    config = transformers.Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation=names)

    def implementations(model: Any) -> list[str]:
        configs = (model.config, model.config.text_config, model.config.vision_config)
        return ["sdpa" if each._attn_implementation is None else each._attn_implementation for each in configs]

    expected = implementations(model)
    assert "dilated" in expected
    model.save_pretrained(tmp_path)
    assert implementations(transformers.Gemma3ForConditionalGeneration.from_pretrained(tmp_path)) == expected


def test_checkpoints_of_the_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = llama("dilated")
    rows = [{"input_ids": row, "labels": row} for row in IDS.expand(2, -1)]
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="steps"
    )
    transformers.Trainer(model, options, train_dataset=rows).train()
    again = load(tmp_path / "checkpoint-1")
    assert again.config._attn_implementation == "dilated"
    check_same(again, answers(model.eval()))


# ---- adapters


def tuned(folder: Path, name: str | None, **settings: Any) -> list[torch.Tensor]:
    """A dense base model in ``folder / "base"`` and an adapter, trained with attention ``name``, in ``folder / "adapter"``; its answers."""
    peft = pytest.importorskip("peft")
    llama(None).save_pretrained(folder / "base")
    base = load(folder / "base", attn_implementation=name)
    if settings:
        configure(base, **settings)
    torch.manual_seed(2)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False))
    model.save_pretrained(folder / "adapter")
    return answers(model.eval())


@pytest.mark.parametrize("name", ["dilated", "block_sparse"])
def test_an_adapter_brings_its_attention(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    expected = tuned(tmp_path, name)
    register(segment_lengths=[16], dilation_rates=[1], pattern=GlobalLocal(3, 1, block_size=64))
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert again.get_base_model().config._attn_implementation == name
    check_same(again, expected)
    # saved again, unchanged
    again.save_pretrained(tmp_path / "second")
    second, first = (json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("second", "adapter"))
    assert second["dilated_attention"] == first["dilated_attention"] and first["dilated_attention"]["attn_implementation"] == name
    # what the caller asks for goes first, and is not silent
    with pytest.warns(UserWarning, match=f"trained with attn_implementation='{name}'; its base model has 'eager'"):
        dense = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", attn_implementation="eager")
    assert dense.get_base_model().config._attn_implementation == "eager"


DENSE_BASE = r"adapter '\w+' was trained with attn_implementation='dilated'; its base model has 'sdpa'.* Load the base model with attn_impl"


def test_an_adapter_on_a_dense_base_model_warns_of_one_argument(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    expected = tuned(tmp_path, "dilated", segment_lengths=[4, 16], dilation_rates=[1, 2])
    with pytest.warns(UserWarning, match=DENSE_BASE):
        model = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter").eval()
    # as the warning says
    model.get_base_model().set_attn_implementation("dilated")
    check_same(model, expected)
    check_same(
        peft.PeftModel.from_pretrained(load(tmp_path / "base", attn_implementation="dilated"), tmp_path / "adapter").eval(), expected
    )


def test_an_adapter_that_transformers_loads_by_itself(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    wanted = importlib.import_module("transformers.integrations.peft").MIN_PEFT_VERSION
    if Version(peft.__version__) < Version(wanted):
        pytest.skip(f"transformers {transformers.__version__} loads adapters with peft {wanted} or later, which is {peft.__version__} here")
    expected = tuned(tmp_path, "dilated", segment_lengths=[4, 16], dilation_rates=[1, 2])
    with pytest.warns(UserWarning, match=DENSE_BASE):
        load(tmp_path / "adapter")
    native = load(tmp_path / "adapter", attn_implementation="dilated")
    check_same(native, expected)
    native.save_pretrained(tmp_path / "native")
    check_same(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "native").eval(), expected)


def test_an_adapter_and_a_base_model_with_other_settings(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    tuned(tmp_path, "dilated", segment_lengths=[4, 16], dilation_rates=[1, 2])
    base = load(tmp_path / "base", attn_implementation="dilated")
    configure(base, segment_lengths=LENGTHS, dilation_rates=[1, 2])
    with pytest.warns(UserWarning, match=r"trained with segment_lengths=\[4, 16\]; its base model has segment_lengths=\[8, 32\]"):
        peft.PeftModel.from_pretrained(base, tmp_path / "adapter")


def test_a_dense_adapter_says_nothing(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    expected = tuned(tmp_path, "sdpa")
    assert "dilated_attention" not in json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    check_same(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval(), expected)
    # trained dilated, then switched back on purpose
    tuned(tmp_path, "dilated")
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    model.get_base_model().set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path / "adapter")
    check_same(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval(), answers(model))


# ---- other processes

WITHOUT = """
import sys, warnings
import transformers
try:
    transformers.AutoModelForCausalLM.from_pretrained("model")
    print("loaded")
except ValueError as error:
    print(error)
if "peft" in sys.argv:
    import peft
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        peft.AutoPeftModelForCausalLM.from_pretrained("adapter")
    print(*[warning.message for warning in found])
"""
WITH = """
import torch, transformers
from dilated_attention.integrations.huggingface import register
register()
ids, logits, generated = torch.load("expected.pt")
model = transformers.AutoModelForCausalLM.from_pretrained("model").eval()
with torch.no_grad():
    assert torch.equal(model(ids).logits, logits)
again = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
assert torch.equal(again, generated)
print("same", model.config._attn_implementation)
"""


def in_a_fresh_process(script: str, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has imported what this one has, and registered nothing."""
    model = llama("dilated")
    model.save_pretrained(tmp_path / "model")
    torch.save((IDS, *answers(model)), tmp_path / "expected.pt")
    (tmp_path / "with.py").write_text(WITH)
    monkeypatch.chdir(tmp_path)
    result = run_script(tmp_path / "with.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["same", "dilated"]


@pytest.mark.skipif(RELEASE < (5, 4), reason="older releases of transformers read no implementation from config.json")
def test_a_fresh_process_without_this_library(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    llama("dilated").save_pretrained(tmp_path / "model")
    tuned(tmp_path, "dilated")
    found = in_a_fresh_process(WITHOUT, tmp_path, "peft")
    assert 'Specified `attn_implementation="dilated"` is not supported' in found and "loaded" not in found
    assert "Unexpected keyword arguments ['dilated_attention']" in found
