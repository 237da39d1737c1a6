"""Fingerprints of outputs and gradients of many random calls, through public functions: equal before and after a change of the inside.

    python -m tests.helpers.bit_equal save before.json      # in the old tree
    python -m tests.helpers.bit_equal compare before.json   # in the new one; exit code 1 and the names of the calls that differ

With ``--device cuda`` on a GPU, ``--count`` calls of each kind. One thread and no TRITON_INTERPRET on a CPU, so that runs repeat.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dilated_attention import create_attention, create_model, decode_attention
from dilated_attention.pattern import LocalWindow
from dilated_attention.testing import Space, call, inputs, random_case, results
from tests.helpers import ring_cases
from tests.helpers.pool import pool_of


def digest(tensors: Iterable[torch.Tensor | None]) -> str:
    found = hashlib.sha256()
    for x in tensors:
        if x is not None:
            x = x.detach().cpu()
            found.update(f"{tuple(x.shape)} {x.dtype}".encode())
            found.update(x.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:24]


def attend(index: int, device: str, space: Space) -> Any:
    """Branches, windows, blocks, and both."""
    case = random_case(index, space)
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if device == "cuda" else (torch.float32, torch.bfloat16, torch.float64)
    return results(call, case, inputs(case, dtypes[index % 3], device), **{} if index % 4 else {"backend": "math"}).values()


def decode(index: int, device: str) -> Any:
    rng = random.Random(index)
    N, H, D = rng.choice([1, 17, 64, 130, 257]), rng.choice([2, 4]), rng.choice([8, 16, 64])
    q, k, v = (torch.randn(3, n, h, D).to(device) for n, h in ((1, H), (N, H // 2), (N, H // 2)))
    positions = torch.tensor([rng.randint(0, N - 1) for _ in range(3)], device=device)
    return decode_attention(q, k, v, positions, window=rng.choice([None, 9]), return_lse=True)


def module(index: int, device: str) -> Any:
    rng = random.Random(index)
    patterns: Any = ({"segment_lengths": [16, 64], "dilation_rates": [1, 2]}, {"pattern": LocalWindow(20)})
    options = {name: rng.random() < 0.5 for name in ("layer_norm", "qk_norm")} | patterns[index % 2]
    layer = create_attention(("multihead_dilated", "multihead_block_sparse")[index % 2], embed_dim=32, num_heads=4, **options).to(device)
    x = torch.randn(2, rng.choice([1, 33, 64]), 32, device=device, requires_grad=True)
    out, _ = layer(x, is_causal=rng.random() < 0.5)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], allow_unused=True)]


def model(index: int, device: str) -> Any:
    made = create_model("longnet-tiny", num_layers=2, device=device)
    tokens = torch.randint(250, (1, 65 + index), device=device)
    loss = made(tokens[:, :-1], targets=tokens[:, 1:])
    return [loss, *torch.autograd.grad(loss, list(made.parameters()), allow_unused=True)]


# with how many calls for one of the others
KINDS: dict[str, tuple[Any, int]] = {
    "branches": (lambda index, device: attend(index, device, Space(max_length=70 if device == "cpu" else 400)), 6),
    "blocks": (lambda index, device: attend(index, device, Space(max_length=300, blocks=True)), 4),
    "decode": (decode, 1),
    "module": (module, 1),
    "model": (model, 0),
}


def everything(device: str, count: int) -> dict[str, str]:
    """Calls by name, with their fingerprint, or the error that they end with."""
    found = {}
    for kind, (function, share) in KINDS.items():
        for index in range(max(3, count * share)):
            try:
                torch.manual_seed(index)
                found[f"{kind} {index}"] = digest(function(index, device))
            except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
                found[f"{kind} {index}"] = f"{type(error).__name__}: {error}"[:300]
    if device == "cpu":
        ranks = pool_of(3).run(ring_cases.run, [ring_cases.draw(3, seed) for seed in range(max(3, 2 * count))], torch.float32)
        for index, parts in enumerate(zip(*ranks, strict=True)):
            found[f"ring {index}"] = " ".join(digest(x for result in part for x in result.values()) for part in parts)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["save", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = everything(args.device, args.count)
    errors = sum(": " in value for value in found.values())
    if args.what == "save":
        args.file.write_text(json.dumps(found, indent=0))
        print(f"{len(found)} calls, {errors} of them refused")
        return 0
    before = json.loads(args.file.read_text())
    different = [name for name in {**before, **found} if before.get(name) != found.get(name)]
    print(f"{len(found)} calls, {errors} of them refused, {len(different)} different: {', '.join(different[:20])}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
