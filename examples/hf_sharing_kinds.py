"""Trains one step on what people bring, its sequence shared by two processes, and says whether the loss is the right one.

    for sharing in ours cp_size ulysses; do for kind in plain window sinks packing left-padding odd; do
        torchrun --nproc_per_node 2 examples/hf_sharing_kinds.py --sharing $sharing --kind $kind
    done; done

Models are tiny, with weights so large that another mask is another loss. The right loss is that of transformers' eager attention on one
process, with a mask of pairs made here. ``--sharing`` is that of hf_context_parallel.py; ``cp_size`` needs GPUs.
Last line: ``done: packing by cp_size: ignored: loss 6.875, right 6.761, of a model that ignores it 6.861``; or ``refused:`` and the error.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from typing import Any

import torch
from hf_context_parallel import IS_GPU, WRAP, sharing_of
from recipe.main import run_safely

from dilated_attention.integrations.huggingface import context_parallel

try:
    from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MistralConfig, Trainer, TrainingArguments
except ImportError as error:
    raise SystemExit(f'{error}: pip install "dilated-attention[hf]" accelerate') from None

KINDS = ("plain", "window", "sinks", "packing", "left-padding", "odd")
WINDOW, STARTS, PADDING = 64, (0, 200, 350), 100
SHAPE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.0,
    "layer_types": ["full_attention"] * 2,
}
# of bfloat16
NEAR = 0.02


def model_of(kind: str) -> Any:
    config: Any = LlamaConfig(**SHAPE)
    if kind == "window":
        config = MistralConfig(**SHAPE, sliding_window=WINDOW)
    if kind == "sinks":
        config = GptOssConfig(**SHAPE, **EXPERTS, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    torch.manual_seed(0)
    # transformers has gpt-oss without SDPA
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if kind == "sinks" else "sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(mean=8.0)
            elif parameter.ndim >= 2 and "expert" not in name:
                parameter.mul_(10)
    return model


def row_of(kind: str) -> dict[str, torch.Tensor]:
    length = 511 if kind == "odd" else 512
    # few kinds of tokens, so that changes of attention do not average out
    ids = torch.randint(1, 4 if kind in ("sinks", "left-padding") else 256, (length,), generator=torch.Generator().manual_seed(2))
    row = {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(length)}
    if kind == "packing":
        for start in STARTS:
            row["position_ids"][start:] = torch.arange(length - start)
            row["labels"][start] = -100
    if kind == "left-padding":
        row["attention_mask"] = (torch.arange(length) >= PADDING).long()
        row["input_ids"][:PADDING] = 0
        # nothing before the first token predicts it
        row["labels"][: PADDING + 1] = -100
    return row


@torch.no_grad()
def loss_of(model: Any, kind: str, row: dict[str, torch.Tensor]) -> float:
    """The loss on one process, of the pairs that ``kind`` leaves."""
    positions = torch.arange(len(row["input_ids"]))
    query, key = positions[:, None], positions
    seen = key <= query
    if kind == "window":
        seen &= query - key < WINDOW
    if kind == "packing":
        starts = torch.tensor(STARTS[1:])
        seen &= torch.bucketize(query, starts, right=True) == torch.bucketize(key, starts, right=True)
    if kind == "left-padding":
        # a padded query sees itself, so that no row is empty
        seen &= (key >= PADDING) | (query == key)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    told = {name: row[name][None] for name in ("input_ids", "labels", "position_ids")}
    return model(**told, attention_mask=mask, use_cache=False).loss.item()


def expected(kind: str, row: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Returns the right loss and that of a model that ignores the kind."""
    model = model_of(kind).eval()
    model.set_attn_implementation("eager")
    right = loss_of(model, kind, row)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.fill_(-1e4)
    return right, loss_of(model, "plain", row)


def loss_of_trainer(kind: str, sharing: str, row: dict[str, torch.Tensor]) -> float:
    # before settings that let ZeRO's stage 3 shard whatever is made
    model = model_of(kind)
    shards: dict[str, Any] = {"fsdp": True, "fsdp_config": WRAP} if sharing == "cp_size" else {}
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=1, per_device_train_batch_size=1, learning_rate=1e-9, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=not IS_GPU, bf16=IS_GPU, disable_tqdm=True,
        **shards, **sharing_of(sharing, 2),
    )  # fmt: skip
    trainer = Trainer(model=model, args=settings, train_dataset=[row] * 4)
    if sharing == "ours":
        context_parallel(trainer, size=2)
    trainer.train()
    return next(log["loss"] for log in trainer.state.log_history if "loss" in log)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--sharing", choices=["ours", "cp_size", "ulysses"], default="ours")
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "2":
        raise SystemExit(f"got {os.environ.get('WORLD_SIZE', '1')} processes; expected 2: torchrun --nproc_per_node 2")
    row = row_of(args.kind)
    right, without = expected(args.kind, row)
    try:
        loss = loss_of_trainer(args.kind, args.sharing, row)
    except Exception as error:  # noqa: BLE001 - any error is the answer
        print(f"done: {args.kind} by {args.sharing}: refused: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
        # the other process may wait in a collective
        os._exit(1)
    verdict = "right" if abs(loss - right) <= NEAR else "ignored" if abs(loss - without) <= NEAR else "wrong"
    if os.environ["RANK"] == "0":
        ignoring = f"loss {loss:.3f}, right {right:.3f}, of a model that ignores it {without:.3f}"
        print(f"done: {args.kind} by {args.sharing}: {verdict}: {ignoring}", flush=True)
    # the model and its hooks hold each other, and the group; gloo's threads must end before the interpreter does
    gc.collect()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(run_safely(main))
