"""A model whose config says its attention has it again when it is loaded; where the config does not, training says so."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.integrations.huggingface import configure, register
from dilated_attention.pattern import GlobalLocal, MaskFunction
from tests.integrations.test_huggingface import (  # noqa: F401  the fixture is used by every test
    DECODER,
    LENGTHS,
    PATTERN,
    RATES,
    RELEASE,
    registered,
)

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(RELEASE < (5, 4), reason="older releases of transformers read no implementation from config.json")

IDS = torch.randint(1, 61, (1, 50), generator=torch.Generator().manual_seed(1))
NOT_NAMED = r"trained with attention 'dilated', which its config does not name.* configure\(model\)"


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


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("name", ["dilated", "block_sparse", "near", "ring_dilated"])
def test_a_loaded_model_computes_what_the_saved_one_did(name: str, tmp_path: Path) -> None:
    register("near", segment_lengths=[4, 64], dilation_rates=[1, 5])
    model = llama(name)
    expected = [model(IDS).logits] if name == "ring_dilated" else answers(model)
    configure(model)
    model.save_pretrained(tmp_path / "first")
    saved = json.loads((tmp_path / "first" / "config.json").read_text())
    assert saved["attn_implementation"] == name
    assert "dilated" not in (tmp_path / "first" / "generation_config.json").read_text()
    # other settings where it is loaded, and saved once more
    register(segment_lengths=[16], dilation_rates=[1], pattern=GlobalLocal(3, 1, block_size=64))
    register("near", segment_lengths=[16], dilation_rates=[1])
    again = load(tmp_path / "first")
    configure(again)
    again.save_pretrained(tmp_path / "second")
    assert json.loads((tmp_path / "second" / "config.json").read_text())["dilated_attention"] == saved["dilated_attention"]
    for folder in ("first", "second"):
        again = load(tmp_path / folder)
        assert again.config._attn_implementation == name
        assert torch.equal(again(IDS).logits, expected[0])
        if name != "ring_dilated":
            check_same(again, expected)
    dense = load(tmp_path / "first", attn_implementation="sdpa")
    assert not torch.equal(answers(dense)[0], expected[0])
    # switched back on purpose
    dense.set_attn_implementation("sdpa")
    configure(dense)
    dense.save_pretrained(tmp_path / "dense")
    assert load(tmp_path / "dense").config._attn_implementation == "sdpa"


def test_a_pattern_that_no_config_can_save(tmp_path: Path) -> None:
    register("mine", pattern=MaskFunction(lambda b, h, q, k: k % 3 != 1))
    model = llama("mine")
    expected = model(IDS).logits
    configure(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(IDS).logits, expected)


def test_a_later_call_adds_to_what_was_said(tmp_path: Path) -> None:
    model = llama("dilated")
    configure(model, segment_lengths=LENGTHS, dilation_rates=RATES, pattern=PATTERN)
    assert model.config.dilated_attention == {"segment_lengths": LENGTHS, "dilation_rates": RATES, "pattern": PATTERN.spec()}
    model.save_pretrained(tmp_path)
    register()
    for name in ("dilated", "block_sparse"):
        model.set_attn_implementation(name)
        assert torch.equal(load(tmp_path, attn_implementation=name)(IDS).logits, model(IDS).logits)
    configure(model.config, tail="mask", pattern=None)
    assert model.config.dilated_attention == {"segment_lengths": LENGTHS, "dilation_rates": RATES, "tail": "mask"}


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
    configure(model)
    model.save_pretrained(tmp_path)
    assert implementations(transformers.Gemma3ForConditionalGeneration.from_pretrained(tmp_path)) == expected


def test_training_a_model_whose_config_does_not_name_its_attention_warns(tmp_path: Path) -> None:
    """The Trainer's checkpoints hold what the config says."""
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row, "labels": row} for row in IDS.expand(2, -1)]
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="steps"
    )
    model = llama("dilated")
    with pytest.warns(UserWarning, match=NOT_NAMED):
        model.train()(IDS, labels=IDS)
    configure(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*trained with attention")
        transformers.Trainer(model, options, train_dataset=rows).train()
    check_same(load(tmp_path / "checkpoint-1"), answers(model.eval()))


def test_an_adapter_is_trained_and_loaded_on_a_base_model_of_its_attention(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    llama(None).save_pretrained(tmp_path / "base")
    torch.manual_seed(2)
    model = peft.get_peft_model(
        load(tmp_path / "base", attn_implementation="dilated"), peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)
    )
    with pytest.warns(UserWarning, match="of an adapter, load the base model with attn_implementation='dilated'"):
        model.train()(input_ids=IDS, labels=IDS)
    expected = answers(model.eval())
    model.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", attn_implementation="dilated").eval()
    check_same(again, expected)
    merged = again.merge_and_unload()
    configure(merged)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(load(tmp_path / "merged")(IDS).logits, expected[0], atol=1e-5, rtol=0)
