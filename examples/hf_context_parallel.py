"""Fine-tunes a transformers model on sequences that processes share, or finds the longest that one GPU trains on.

    python examples/hf_context_parallel.py                                        # tiny, one process, a few seconds on a CPU
    torchrun --nproc_per_node=4 examples/hf_context_parallel.py --model 1b --context 128k --liger --offload
    python examples/hf_context_parallel.py --longest --model 1b --out build/longest.json        # one GPU, about four minutes
    torchrun --nproc_per_node=2 examples/hf_context_parallel.py --model 1b --context 64k --liger --fsdp --sharing cp_size

The text is Python's language reference, byte by byte. ``--model`` is ``tiny``, ``1b`` (the shape of Llama 3.2 1B with random weights) or
the path of a checkpoint. All processes share each sequence unless ``--size`` says how many do. The saved model is a plain one.

``--sharing`` saves nothing and times steps of all processes: ``ours``, or what transformers brings instead, ``cp_size`` (FSDP2 and a ring
of torch's SDPA) or ``ulysses`` (``pip install deepspeed``, ZeRO stage 3).
Last line: ``done: … steps of … tokens on … processes, loss … to …, … tokens/s and … GiB a process; it writes …``, the time of a median
step after the first two.

``--longest`` trains on one device with all options (``pip install liger-kernel``), with each of them switched off in turn, and with none:
tokens a second and peak memory of a step at two lengths, the longest sequence by the straight line through the two peaks, and one step at
95 % of it, on packed documents, since one document of a million tokens takes minutes. Last line:
``done: the longest sequence, of all options, has … tokens``
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

# lengths differ from step to step
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from _memory import measured
from recipe.main import run_safely

from dilated_attention.integrations.huggingface import context_parallel
from dilated_attention.parsing import size

try:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
    from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments
    from transformers.integrations.liger import apply_liger_kernel
except ImportError as error:
    raise SystemExit(f'{error}: pip install "dilated-attention[hf]" accelerate') from None

DOCUMENT = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_1B = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
SHAPES = {"tiny": {**TINY, "num_key_value_heads": 2}, "1b": {**LLAMA_1B, "num_key_value_heads": 8, "tie_word_embeddings": True}}
# of the one step at full length
DOCUMENT_LENGTH = 16384
OPTIONS = ("liger", "offload")
WRAP = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
IS_GPU = torch.cuda.is_available()


def made(name: str, length: int, dtype: torch.dtype = torch.float32) -> Any:
    if name not in SHAPES:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[name], **ids, max_position_embeddings=length), dtype=dtype)


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
    settings = TrainingArguments(
        output_dir=str(args.out), max_steps=args.steps, per_device_train_batch_size=1, learning_rate=args.lr, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=not IS_GPU, bf16=IS_GPU, disable_tqdm=True, ddp_find_unused_parameters=False,
        use_liger_kernel=args.liger,
        activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": False, "offload": args.offload},
        **({"fsdp": True, "fsdp_config": WRAP} if args.fsdp else {}), **sharing_of(args.sharing, int(os.environ.get("WORLD_SIZE", "1"))),
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
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def step(model: Any, optimizer: Any, ids: torch.Tensor, document: int) -> None:
    positions = torch.arange(ids.shape[1], device=ids.device)[None] % document
    model(input_ids=ids, labels=ids, position_ids=positions).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def attempt(model: Any, optimizer: Any, length: int, document: int, times: int = 1) -> dict[str, float] | None:
    """Seconds and peak bytes of the last of some steps; None if memory does not suffice."""
    ids = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(0)).to(model.device)
    try:
        for _ in range(times):
            _, seconds, _, peak = measured(lambda: step(model, optimizer, ids, document), model.device)
        return {"tokens": length, "seconds": seconds, "tokens a second": length / seconds, "peak GiB": peak / 2**30}
    except torch.OutOfMemoryError:
        return None
    finally:
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if IS_GPU:
            torch.cuda.empty_cache()
            # blocks of pinned memory of another length
            getattr(torch._C, "_host_emptyCache", lambda: None)()


def limit_of_host(model: Any, free: float) -> int:
    """The longest sequence whose checkpoints, a pinned block of a power of two for each layer, fit in 70 % of the host's memory."""
    block = 0.7 * free / model.config.num_hidden_layers
    return int(2 ** int(torch.tensor(block).log2()) / (model.config.hidden_size * model.dtype.itemsize))


def longest(args: argparse.Namespace) -> None:
    end = time.perf_counter() + 60 * args.minutes
    device = torch.device("cuda" if IS_GPU else "cpu")
    total = args.memory_gib or (torch.cuda.get_device_properties(device).total_memory / 2**30 - 2 if IS_GPU else 4.0)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    described = {"device": torch.cuda.get_device_name() if IS_GPU else "cpu", "torch": torch.__version__, "model": args.model, "GiB": total}
    found: dict[str, Any] = {}
    off = [(), *((name,) for name in OPTIONS), OPTIONS]
    for without in off:
        options = {name: name not in without for name in OPTIONS}
        name = "all options" if not without else "none" if len(without) > 1 else f"without {without[0]}"
        model = made(args.model, 2**21, torch.bfloat16 if IS_GPU else torch.float32).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        model.activation_checkpointing_enable({"use_reentrant": False}, offload=options["offload"] and IS_GPU)
        if options["liger"] and IS_GPU:
            apply_liger_kernel(model, None)
        handle = context_parallel(Accelerator(cpu=not IS_GPU), model, size=1)
        points = [attempt(model, optimizer, length, 2**30, times=2) for length in (args.context, 2 * args.context)]
        row = found[name] = {"measured": points}
        if None not in points:
            first, second = points
            slope = (second["peak GiB"] - first["peak GiB"]) / args.context
            length = int((total - second["peak GiB"]) / slope) + 2 * args.context if slope > 0 else 0
            row["limit"], row["longest by the line"] = "device memory", length
            if options["offload"] and IS_GPU and limit_of_host(model, free) < length:
                row["limit"], length = "host memory", limit_of_host(model, free)
            aim = min(int(0.95 * length), args.most) // 64 * 64
            while aim > 2 * args.context and aim / second["tokens a second"] < end - time.perf_counter():
                row["one step"] = attempt(model, optimizer, aim, DOCUMENT_LENGTH)
                if row["one step"] is not None:
                    break
                aim = aim * 9 // 10 // 64 * 64
        handle.remove()
        del model, optimizer, handle
        print(f"{name:<22} {json.dumps(row)}", flush=True)
        # after each, so that a run that is stopped leaves what it found
        args.out.write_text(json.dumps(described | {"rows": found}, indent=1))
    best = found["all options"].get("one step") or found["all options"]["measured"][-1] or {"tokens": 0}
    print(f"done: the longest sequence, of all options, has {best['tokens']:,} tokens")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, 1b, or the path of a checkpoint")
    parser.add_argument("--context", type=size, help="tokens; with --longest, the shorter of the two lengths that are measured")
    parser.add_argument("--size", type=size, help="processes that share a sequence; all of them unless given")
    parser.add_argument("--steps", type=size, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--liger", action="store_true", help="liger-kernel's Triton kernels, whose loss needs no logits; on a GPU")
    parser.add_argument("--offload", action="store_true", help="activation checkpoints in the host's memory; on a GPU")
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters over all processes")
    parser.add_argument("--sharing", choices=["ours", "cp_size", "ulysses"], help="time steps, shared by this")
    parser.add_argument("--longest", action="store_true", help="find the longest sequence on one device")
    parser.add_argument("--minutes", type=float, default=3.5, help="of --longest, after which no long step begins")
    parser.add_argument("--memory-gib", type=float, help="of --longest, where the device does not say")
    parser.add_argument("--most", type=size, default=2**21, help="of --longest, tokens of the longest step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if (args.liger or args.offload or args.fsdp) and not IS_GPU:
        raise SystemExit("--liger, --offload or --fsdp without a GPU, for which these exist; expected a run without")
    args.context = args.context or (512 if args.model == "tiny" else 16384)
    args.out = args.out or Path("build/longest.json" if args.longest else "runs/hf_context_parallel")
    longest(args) if args.longest else train(args)
    return 0


if __name__ == "__main__":
    sys.exit(run_safely(main))
