"""A transformers Llama reads one long document: with its own dense attention (sdpa), and with ``attn_implementation="dilated"``.

    python examples/hf_long_document.py                         # 32,768 bytes; about three minutes on 2 CPU cores
    python examples/hf_long_document.py --context 128k           # on a GPU; --document book.txt for a text of your own

Two models of bytes with equal random weights are trained for the same time, one on each implementation: on short windows of the document's
beginning, then on longer ones, and last on ones as long as what is read. Then each reads the document's end, which is new to it, in one
piece, and the dilated one writes on from there by ``generate()``, from its cache. A row of the table: steps of training, time and peak
memory of reading, and the loss. The model is saved and loaded: its config carries the segments.
Last line: ``done: dilated reads … bytes … times as fast as sdpa, at … bits per byte to …``
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

# threads that wait for each other sleep instead of spinning: five times faster where the cores are shared with other work
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from _memory import measured
from _text import random_windows
from recipe.main import run_safely

from dilated_attention.integrations.huggingface import configure, register
from dilated_attention.parsing import size

try:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(f'{error}: pip install "dilated-attention[hf]"') from None

# a real text in one piece on any machine with Python: its language reference, 757,011 bytes in 3.11
DOCUMENT = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
# the near in full, and with every doubling of the rate four times as far: a rate of 8 divides 8 heads' offsets evenly
SEGMENTS, RATES = [512, 2048, 8192, 32768], [1, 2, 4, 8]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def llama(attention: str, length: int) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    ids = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(**sizes, **ids, max_position_embeddings=length, attn_implementation=attention)
    model = LlamaForCausalLM(config).to(DEVICE)
    # plain lists in the config, saved with the model
    configure(model, segment_lengths=SEGMENTS, dilation_rates=RATES)
    return model


def loss_of(model: Any, text: torch.Tensor) -> torch.Tensor:
    """Nats per byte of texts (B, N + 1)."""
    text = text.to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        loss: torch.Tensor = model(text, labels=text, use_cache=False).loss
    return loss


def train(model: Any, text: torch.Tensor, args: argparse.Namespace) -> int:
    """Steps in ``--train-seconds``. Lengths follow the clock, so that both models meet long windows for an equal time."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    generator = torch.Generator().manual_seed(0)
    start, step = time.perf_counter(), 0
    while (done := max((time.perf_counter() - start) / args.train_seconds, step / args.steps)) < 1:
        length = min(args.context, 1024 if done < 0.5 else 4096 if done < 0.75 else args.context)
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min(1.0, (step + 1) / 20, 0.1 + 2 * (1 - done))
        loss = loss_of(model, random_windows(text, length, max(1, 2048 // length), generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--context", type=size, default=32768, help="bytes of the document's end that are read")
    parser.add_argument("--train-seconds", type=float, default=75, help="of each of the two models")
    parser.add_argument("--steps", type=size, default=10**9, help="of training, at most")
    parser.add_argument("--write", type=size, default=120, help="bytes to generate")
    args = parser.parse_args()
    text = torch.frombuffer(bytearray(args.document.read_bytes()), dtype=torch.uint8)
    if len(text) < 3 * args.context:
        raise SystemExit(f"{args.document} has {len(text)} bytes; expected at least three times --context, {3 * args.context}")
    register()
    beginning, end = text[: -args.context - 1], text[None, -args.context - 1 :].long()
    print(f"{args.context} bytes of {args.document.name}, {DEVICE}")
    print(f"{'attention':<10} {'steps':>6} {'seconds':>8} {'MiB':>6} {'bits/byte':>10}")
    found = {}
    for name in ("sdpa", "dilated"):
        model = llama(name, args.context + args.write)
        steps = train(model, beginning, args)
        model.eval()
        with torch.no_grad():
            loss_of(model, end[:, :1025])
            loss, seconds, before, peak = measured(lambda model=model: loss_of(model, end).item(), DEVICE)
        found[name] = seconds, loss / math.log(2)
        print(f"{name:<10} {steps:6d} {seconds:8.2f} {(peak - before) / 2**20:6.0f} {found[name][1]:10.3f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="dilated").to(DEVICE).eval()
    prompt = end[:, :-1].to(DEVICE)
    torch.manual_seed(0)
    written, seconds, *_ = measured(
        lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=args.write, do_sample=True, temperature=0.7),
        DEVICE,
    )
    print(f"\nit writes on, {args.write} bytes in {seconds:.1f} s: {bytes(written[0, prompt.shape[1] :].tolist())!r}")
    (dense, bits_dense), (dilated, bits) = found["sdpa"], found["dilated"]
    print(
        f"done: dilated reads {args.context} bytes {dense / dilated:.1f} times as fast as sdpa, at {bits:.3f} bits per byte to "
        f"{bits_dense:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_safely(main))
