"""Fine-tunes a transformers model on sequences that processes share.

    python examples/hf_context_parallel.py                                        # tiny, one process, a few seconds on a CPU
    torchrun --nproc_per_node=4 examples/hf_context_parallel.py --model 1b --context 128k --liger --offload
    torchrun --nproc_per_node=2 examples/hf_context_parallel.py --model 1b --context 64k --liger --fsdp --sharing cp_size

The text is Python's language reference, byte by byte. ``--model`` is ``tiny``, ``1b`` (the shape of Llama 3.2 1B with random weights) or
the path of a checkpoint. All processes share each sequence unless ``--size`` says how many do. The saved model is a plain one.

``--sharing`` saves nothing and times steps of all processes: ``ours``, or what transformers brings instead, ``cp_size`` (FSDP2 and a ring
of torch's SDPA) or ``ulysses`` (``pip install deepspeed``, ZeRO stage 3).
Last line: ``done: … steps of … tokens on … processes, loss … to …, … tokens/s and … GiB a process; it writes …``, the time of a median
step after the first two.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# lengths differ from step to step
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from _text import DOCUMENT
from recipe.main import run_safely

from dilated_attention.integrations.huggingface import context_parallel
from dilated_attention.parsing import size

try:
    import transformers
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
    from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments
except ImportError as error:
    raise SystemExit(f'{error}: pip install "dilated-attention[hf]" accelerate') from None
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
    raise SystemExit(f"transformers is {transformers.__version__}; expected 5.23 or later: pip install --upgrade transformers")

TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_1B = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {**TINY, "num_key_value_heads": 2},
    "1b": {**LLAMA_1B, "num_key_value_heads": 8, "tie_word_embeddings": True},
}
WRAP = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
IS_GPU = torch.cuda.is_available()


def made(name: str, length: int) -> Any:
    if name not in SHAPES:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    torch.manual_seed(0)
    ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[name], **ids, max_position_embeddings=length), dtype=torch.float32)


class Clock(TrainerCallback):
    """Notes when each step began and ended on the device."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if IS_GPU:
            torch.cuda.synchronize()
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if IS_GPU:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)

    def rates(self, tokens: float) -> str:
        """``tokens``: of one process in a step."""
        rate = tokens / statistics.median(self.seconds[2:] or self.seconds)
        peak = f" and {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if IS_GPU else ""
        return f"{rate:,.0f} tokens/s{peak} a process"


def sharing_of(sharing: str | None, world_size: int) -> dict[str, Any]:
    """Returns the arguments of a trainer by which transformers shares sequences itself."""
    if sharing in (None, "ours"):
        return {}
    if sharing == "cp_size":
        return {"parallelism_config": ParallelismConfig(cp_size=world_size)}
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    config = {
        "zero_optimization": {"stage": 3}, "bf16": {"enabled": IS_GPU}, "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "seq_parallel_communication_data_type": "bf16",
    }  # fmt: skip
    return {"deepspeed": config, "parallelism_config": ParallelismConfig(sp_size=world_size, sp_backend="deepspeed", sp_handler=handler)}


def train(args: argparse.Namespace) -> None:
    text = torch.tensor(list(DOCUMENT.read_bytes()))
    rows = [{"input_ids": row, "labels": row} for row in text[: len(text) // args.context * args.context].view(-1, args.context)]
    if not rows:
        raise SystemExit(f"{DOCUMENT.name} has {len(text)} bytes; expected a --context up to that")
    if args.sharing == "ulysses":
        # which refuses batches without
        rows = [row | {"position_ids": torch.arange(args.context)} for row in rows]
    shards: dict[str, Any] = {"fsdp": True, "fsdp_config": WRAP} if args.fsdp else {}
    settings = TrainingArguments(
        output_dir=str(args.out), max_steps=args.steps, per_device_train_batch_size=1, learning_rate=args.lr, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=not IS_GPU, bf16=IS_GPU, disable_tqdm=True, ddp_find_unused_parameters=False,
        use_liger_kernel=args.liger,
        activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": False, "offload": args.offload},
        **shards, **sharing_of(args.sharing, int(os.environ.get("WORLD_SIZE", "1"))),
    )  # fmt: skip
    clock = Clock()
    trainer = Trainer(model=made(args.model, args.context + 64), args=settings, train_dataset=rows, callbacks=[clock])
    if args.sharing in (None, "ours"):
        context_parallel(trainer, size=args.size or settings.world_size)
    trainer.train()
    rates = clock.rates(args.context / (args.size or settings.world_size))
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    steps = f"{args.steps} steps of {args.context} tokens on {settings.world_size} processes, loss {losses[0]:.3f} to {losses[-1]:.3f}"
    written = f" by {args.sharing}"
    if args.sharing is None:
        trainer.save_model()
        if trainer.is_world_process_zero():
            # transformers' own attention, as the model had
            plain = AutoModelForCausalLM.from_pretrained(args.out).eval()
            prompt = rows[0]["input_ids"][None, :64]
            ids = plain.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0)
            written = f"; it writes {bytes(x % 256 for x in ids[0, 64:].tolist())!r}"
    if trainer.is_world_process_zero():
        print(f"done: {steps}, {rates}{written}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, 1b, or the path of a checkpoint")
    parser.add_argument("--context", type=size, help="tokens of a sequence")
    parser.add_argument("--size", type=size, help="processes that share a sequence; all of them unless given")
    parser.add_argument("--steps", type=size, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--liger", action="store_true", help="liger-kernel's Triton kernels, whose loss needs no logits; on a GPU")
    parser.add_argument("--offload", action="store_true", help="activation checkpoints in the host's memory; on a GPU")
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters over all processes")
    parser.add_argument("--sharing", choices=["ours", "cp_size", "ulysses"], help="time steps, shared by this")
    parser.add_argument("--out", type=Path, default=Path("runs/hf_context_parallel"))
    args = parser.parse_args()
    if (args.liger or args.offload or args.fsdp) and not IS_GPU:
        raise SystemExit("--liger, --offload or --fsdp without a GPU, for which these exist; expected a run without")
    args.context = args.context or (512 if args.model == "tiny" else 16384)
    train(args)
    return 0


if __name__ == "__main__":
    sys.exit(run_safely(main))
