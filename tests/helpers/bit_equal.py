"""Fingerprints of outputs and gradients of many random calls, through public names alone: equal before and after a change of the inside.

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
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dilated_attention import (
    block_sparse_attention,
    block_sparse_dilated_attention,
    create_attention,
    create_model,
    decode_attention,
    ring_attention,
    ring_block_sparse_attention,
    ring_dilated_attention,
    shard_sequence,
)
from dilated_attention.pattern import Axial, BigBird, DilatedBlocks, GlobalLocal, LocalWindow, RandomBlocks, Strided, TopBlocks
from dilated_attention.testing import Space, inputs, random_case, results
from dilated_attention.testing.check import call

WORLD = 3


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for x in tensors:
        if x is not None:
            x = x.detach().cpu()
            found.update(f"{tuple(x.shape)} {x.dtype}".encode())
            found.update(x.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:24]


def dtype_of(index: int, device: str) -> torch.dtype:
    return (
        (torch.bfloat16, torch.float16, torch.float32)[index % 3]
        if device == "cuda"
        else (torch.float32, torch.bfloat16, torch.float64)[index % 3]
    )


def tensors(rng: random.Random, dtype: torch.dtype, device: str, batch: int = 1) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v as leaves, and dout."""
    generator = torch.Generator().manual_seed(rng.randint(0, 2**30))
    N, H, group, D = rng.choice([1, 17, 64, 130, 257]), rng.choice([2, 4]), rng.choice([1, 2]), rng.choice([8, 16, 64])
    shapes = (batch, N, H, D), (batch, N, H // group, D), (batch, N, H // group, D), (batch, N, H, D)
    q, k, v, dout = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v)], dout


def block_pattern(rng: random.Random) -> Any:
    made = [
        lambda: LocalWindow((rng.randint(0, 90), rng.randint(0, 9))),
        lambda: GlobalLocal(rng.randint(1, 40), rng.randint(0, 60)),
        lambda: BigBird(rng.randint(1, 30), rng.randint(1, 30), 1, rng.randint(0, 9)),
        lambda: Strided(rng.randint(1, 3), 1),
        lambda: DilatedBlocks(rng.randint(1, 2), 3),
        lambda: Axial(rng.randint(5, 40)),
        lambda: RandomBlocks(0.4, rng.randint(0, 9)),
        lambda: TopBlocks(2),
    ]
    pattern = rng.choice(made)()
    return pattern if isinstance(pattern, TopBlocks) or rng.random() < 0.6 else pattern | LocalWindow(rng.randint(0, 9))


def gradients(function: Callable[..., Any], leaves: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor | None]:
    out, lse = function(*leaves)
    return [out, lse, *torch.autograd.grad(out, leaves, dout, allow_unused=True)]


def dilated(index: int, device: str) -> Any:
    case = random_case(index, Space(max_length=70 if device == "cpu" else 400))
    x = inputs(case, dtype_of(index, device), device)
    options = {} if index % 4 else {"backend": "math"}
    return results(call, case, x, **options).values()


def block_sparse(index: int, device: str) -> Any:
    rng = random.Random(index)
    leaves, dout = tensors(rng, dtype_of(index, device), device, rng.choice([1, 2]))
    pattern = block_pattern(rng)
    options: dict[str, Any] = {"is_causal": rng.random() < 0.5}
    if rng.random() < 0.3:
        options["key_padding_mask"] = torch.rand(dout.shape[:2], generator=torch.Generator().manual_seed(index)).to(device) < 0.2
    return gradients(lambda q, k, v: block_sparse_attention(q, k, v, pattern, return_lse=True, **options), leaves, dout)


def block_dilated(index: int, device: str) -> Any:
    rng = random.Random(index)
    leaves, dout = tensors(rng, dtype_of(index, device), device)
    window = LocalWindow(rng.randint(0, 30))
    causal = rng.random() < 0.5
    return gradients(
        lambda q, k, v: block_sparse_dilated_attention(q, k, v, [32, 128], [2, 4], window, is_causal=causal, return_lse=True), leaves, dout
    )


def decode(index: int, device: str) -> Any:
    rng = random.Random(index)
    with torch.no_grad():
        (q, k, v), _ = tensors(rng, dtype_of(index, device), device, 3)
        positions = torch.tensor([rng.randint(0, k.shape[1] - 1) for _ in range(3)], device=device)
        window = rng.choice([None, 9])
        return decode_attention(q[:, :1], k, v, positions, window=window, return_lse=True)


def module(index: int, device: str) -> Any:
    rng = random.Random(index)
    torch.manual_seed(index)
    kind = ("multihead_dilated", "multihead_block_sparse")[index % 2]
    own = {"segment_lengths": [16, 64], "dilation_rates": [1, 2]} if kind == "multihead_dilated" else {"pattern": LocalWindow(20)}
    layer = create_attention(kind, embed_dim=32, num_heads=4, layer_norm=rng.random() < 0.5, qk_norm=rng.random() < 0.5, **own).to(device)
    x = torch.randn(2, rng.choice([1, 33, 64]), 32, device=device, requires_grad=True)
    out, _ = layer(x, is_causal=rng.random() < 0.5)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], allow_unused=True)]


def model(index: int, device: str) -> Any:
    torch.manual_seed(index)
    made = create_model("longnet-tiny", num_layers=2, device=device)
    tokens = torch.randint(250, (1, 65 + index), device=device)
    loss = made(tokens[:, :-1], targets=tokens[:, 1:])
    return [loss, *torch.autograd.grad(loss, list(made.parameters()), allow_unused=True)]


def _rank(rank: int, folder: str, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found = {}
    for index in range(count):
        rng = random.Random(index)
        leaves, dout = tensors(rng, torch.float32, "cpu")
        N, layout, causal = dout.shape[1], rng.choice(["contiguous", "zigzag", "striped"]), rng.random() < 0.5
        q, k, v, g = shard_sequence(None, [*(x.detach() for x in leaves), dout], [1] * 4, layout=layout)
        parts = [x.requires_grad_() for x in (q, k, v)]
        options: dict[str, Any] = {"is_causal": causal, "layout": layout, "seq_len": N, "return_lse": True}
        kinds = {
            "dense": lambda q, k, v, o=options: ring_attention(q, k, v, **o),
            "dilated": lambda q, k, v, o=options: ring_dilated_attention(q, k, v, [16, 64, 300], [1, 2, 4], **o),
            "blocks": lambda q, k, v, o=options: ring_block_sparse_attention(q, k, v, LocalWindow(40), **o),
        }
        if layout == "striped":
            # every process would need every block
            del kinds["blocks"]
        for kind, function in kinds.items():
            found[f"ring {kind} {index}"] = digest(gradients(function, parts, g))
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def rings(count: int) -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, count), nprocs=WORLD)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD)]
    for name in ranks[0]:
        yield name, " ".join(rank[name] for rank in ranks)


KINDS = {
    "dilated": (dilated, 6),
    "block": (block_sparse, 3),
    "block_dilated": (block_dilated, 1),
    "decode": (decode, 1),
    "module": (module, 1),
}
KINDS["model"] = (model, 0)


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
        found |= dict(rings(max(3, count // 2)))
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
