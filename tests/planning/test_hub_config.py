"""Plans of transformers models from their config.json: parameters against transformers' own count, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dilated_attention.pattern import DilatedPattern
from dilated_attention.planning import plan_model
from dilated_attention.planning.whole_models.hub_config import read_hub_config

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2: dict[str, Any] = {"vocab_size": 97, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
LLAMA = {"model_type": "llama", **BASE}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Llama", BASE),
        ("Llama", {**BASE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("Mistral", BASE),
        ("Qwen2", BASE),
        ("Qwen2", {**BASE, "tie_word_embeddings": True}),
        ("Qwen3", {**BASE, "head_dim": 16}),
        ("GPT2", GPT2),
        ("GPT2", {**GPT2, "n_inner": 100}),
    ],
)
def test_parameters_are_transformers_own_count(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**fields)
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)
    config.save_pretrained(tmp_path)
    found = plan_model(read_hub_config(tmp_path / "config.json"), num_positions=128, gpu="H100", find_longest=False)
    assert found.parameters == model.num_parameters()
    assert dict(found.terms)["weights"] == 4 * found.parameters


def write(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))
    return path


def test_attention_is_what_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, **LLAMA)
    dense = plan_model(read_hub_config(path), num_positions=65536, gpu="H100", find_longest=False)
    dilated = plan_model(read_hub_config(path, DilatedPattern((2048, 8192), (1, 4))), num_positions=65536, gpu="H100", find_longest=False)
    assert dense.flops > 5 * dilated.flops and dense.seconds is not None and dilated.seconds is not None
    assert dense.seconds > dilated.seconds and dense.parameters == dilated.parameters


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({**LLAMA, "model_type": "gpt_oss"}, "model_type is 'gpt_oss'; expected one of llama, mistral, qwen2, qwen3, gpt2"),
        (BASE, "has no 'model_type'"),
        ({**LLAMA, "hidden_size": ...}, "has no 'hidden_size'"),
        ({**LLAMA, "model_type": "mistral", "num_key_value_heads": ...}, "has no 'num_key_value_heads'"),
        ({**LLAMA, "num_hidden_layers": "3"}, "num_hidden_layers is '3'; expected a whole number"),
        ({**LLAMA, "head_dim": 32}, r"head_dim is 32 with 4 heads and hidden_size 64.* plan dense --heads 4 --kv-heads 2 --head-dim 32"),
    ],
)
def test_what_the_planner_has_no_blocks_for(fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        read_hub_config(write(tmp_path, **fields))


def test_files_that_are_no_config(tmp_path: Path) -> None:
    for content, text in (("{", "cannot be read"), ("[1]", "holds a list")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=text):
            read_hub_config(tmp_path / "config.json")
    path = write(tmp_path, model_type="gpt2", **GPT2)
    with pytest.raises(ValueError, match="num_positions is 129; expected at most 128"):
        plan_model(read_hub_config(path), num_positions=129, gpu="H100")
    assert plan_model(read_hub_config(path), num_positions=64, gpu="H100").longest == 128
