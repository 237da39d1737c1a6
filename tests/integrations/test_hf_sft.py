"""TRL's ``SFTTrainer`` under ``context_parallel``: processes that share sequences take the steps that one process takes on its batches."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.integrations.huggingface import context_parallel
from tests.helpers.pool import patience, pool_of
from tests.integrations.test_hf_context_parallel import ARGUMENTS, launched
from tests.integrations.test_huggingface import PINNED, RELEASE, llama, registered, tokens  # noqa: F401  a fixture that each test uses

trl = pytest.importorskip("trl", reason="needs trl")
datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(RELEASE < PINNED, reason="context_parallel refuses older releases of transformers"),
]
# TRL computes log-probabilities in float32, and sums them position by position
TOLERANCE = 1e-7
# what is trained on, and the trainer's settings
KINDS: dict[str, dict[str, Any]] = {
    "packing": {"packing": True, "max_length": 49, "per_device_train_batch_size": 1},
    "completion": {"completion_only_loss": True, "loss_type": "dft"},
    "lora": {},
}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(64)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), eos_token="w1", pad_token="w2")


def rows(count: int, kind: str) -> Any:
    """Tokens of several lengths, with marks of what is learned where the kind has them."""
    samples = []
    for index, row in enumerate(tokens(count, 47)):
        ids = row[: 47 - 5 * (index % 3)].tolist()
        mark = [int(place > 9 + index and place % 7 > 1) for place in range(len(ids))]
        samples.append({"input_ids": ids} | ({"completion_mask": mark} if kind == "completion" else {}))
    return datasets.Dataset.from_list(samples)


def tuned(rank: int, world: int, folder: str, kind: str, size: int | None = None) -> dict[str, Any]:
    """Losses and metrics by step, of the evaluation, and the weights, of a training with ``size`` processes to a sequence."""
    with launched(rank, world):
        settings = {**ARGUMENTS, "bf16": False, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, **KINDS[kind]}
        settings.pop("include_num_input_tokens_seen")
        config = trl.SFTConfig(output_dir=folder, eval_strategy="steps", eval_steps=3, **settings)
        more: dict[str, Any] = {}
        if kind == "lora":
            import peft

            torch.manual_seed(0)
            more["peft_config"] = peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            more["compute_metrics"] = lambda found: {"mean": float(found.predictions.mean())}
        trainer = trl.SFTTrainer(
            llama(), config, train_dataset=rows(12, kind), eval_dataset=rows(3, kind), processing_class=tokenizer(), **more
        )
        if size is not None:
            context_parallel(trainer, size=size, timeout=patience())
        trainer.train()
        known = ("loss", "eval_loss", "mean_token_accuracy", "entropy", "num_tokens", "eval_mean_token_accuracy", "eval_mean")
        logs = [{name: entry[name] for name in known if name in entry} for entry in trainer.state.log_history]
        return {"logs": [entry for entry in logs if entry], "weights": dict(trainer.model.state_dict())}


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_take_the_steps_of_one(kind: str, tmp_path: Path) -> None:
    expected = tuned(0, 1, str(tmp_path / "alone"), kind)
    assert len(expected["logs"]) >= 4
    for found in pool_of(2).run(tuned, str(tmp_path), kind, 2, timeout=240):
        assert max(float((found["weights"][name] - x).abs().max()) for name, x in expected["weights"].items()) < TOLERANCE
        for mine, true in zip(found["logs"], expected["logs"], strict=True):
            assert mine == pytest.approx(true, rel=1e-6, abs=1e-6)


def test_trainers_of_preferences_are_refused(tmp_path: Path) -> None:
    import peft

    pairs = datasets.Dataset.from_list([{"prompt": "w3 w4", "chosen": "w5 w6", "rejected": "w7"}] * 2)
    config = trl.DPOConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False)
    with launched(0, 1):
        # with an adapter the reference is the model itself, else TRL looks for a checkpoint
        adapter = peft.LoraConfig(r=2, target_modules=["q_proj"])
        trainer = trl.DPOTrainer(llama(), args=config, train_dataset=pairs, processing_class=tokenizer(), peft_config=adapter)
        with pytest.raises(ValueError, match=r"DPOTrainer has its own compute_loss .* SFTTrainer"):
            context_parallel(trainer, size=1)
