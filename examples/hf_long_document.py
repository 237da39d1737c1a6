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

import functools
import math
import os
import sys
import tempfile
from typing import Any

# threads that wait for each other sleep instead of spinning: five times faster where the cores are shared with other work
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from _text import document_parser, read_document, train_on_document
from recipe.costs import measured
from recipe.main import run_safely

from dilated_attention.integrations.huggingface import configure, register
from dilated_attention.parsing import size

try:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(f'{error}: pip install "dilated-attention[hf]"') from None

# the near in full, and with every doubling of the rate four times as far: a rate of 8 divides 8 heads' offsets evenly
SEGMENTS, RATES = [512, 2048, 8192, 32768], [1, 2, 4, 8]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def llama(attention: str, length: int) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    ids: dict[str, Any] = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    named: dict[str, Any] = {"attn_implementation": attention}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **ids, **named, max_position_embeddings=length))
    model.to(DEVICE)
    # plain lists in the config, saved with the model
    configure(model, segment_lengths=SEGMENTS, dilation_rates=RATES)
    return model


def loss_of(model: Any, text: torch.Tensor) -> torch.Tensor:
    """Nats per byte of texts (B, N + 1)."""
    text = text.to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        loss: torch.Tensor = model(text, labels=text, use_cache=False).loss
    return loss


def main() -> int:
    parser = document_parser(__doc__, 32768, 75)
    parser.add_argument("--write", type=size, default=120, help="bytes to generate")
    args = parser.parse_args()
    beginning, end = read_document(args)
    register()
    print(f"{args.context} bytes of {args.document.name}, {DEVICE}")
    print(f"{'attention':<10} {'steps':>6} {'seconds':>8} {'MiB':>6} {'bits/byte':>10}")
    found = {}
    for name in ("sdpa", "dilated"):
        model = llama(name, args.context + args.write)
        steps = train_on_document(model, functools.partial(loss_of, model), beginning, args)
        model.eval()
        with torch.no_grad():
            loss_of(model, end[:, :1025])
            loss, seconds, before, peak = measured(functools.partial(loss_of, model, end), DEVICE)
        found[name] = seconds, loss.item() / math.log(2)
        print(f"{name:<10} {steps:6d} {seconds:8.2f} {(peak - before) / 2**20:6.0f} {found[name][1]:10.3f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        restored: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="dilated")
        restored.to(DEVICE).eval()
    prompt = end[:, :-1].to(DEVICE)
    torch.manual_seed(0)
    written, seconds, *_ = measured(
        lambda: restored.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=args.write, do_sample=True, temperature=0.7
        ),
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
