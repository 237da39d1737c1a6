"""Calls of lengths that were not before: they wait for nothing, compile nothing, and are as right as the others."""

import json
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dilated_attention import attention, block_sparse_attention, create_model, dilated_attention
from dilated_attention.cli import main
from dilated_attention.pattern import BigBird

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

BRANCHES: Any = ([1024, 5792, 32768, 185363], [1, 2, 4, 8])
TORCHSCALE: Any = {"head_offsets": "blocked", "tail": "zero_keys", "mixture_grad": "detached"}


def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    padding = torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device)
    padding[:, -7:] = True
    return dilated_attention(q, k, v, *BRANCHES, key_padding_mask=padding)


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "dilated": lambda q, k, v: dilated_attention(q, k, v, *BRANCHES),
    "torchscale": lambda q, k, v: dilated_attention(q, k, v, *BRANCHES, **TORCHSCALE),
    "causal": lambda q, k, v: dilated_attention(q, k, v, *BRANCHES, is_causal=True),
    "padded": padded,
    "dense": lambda q, k, v: attention(q, k, v, is_causal=True),
    "window": lambda q, k, v: attention(q, k, v, window=(512, 0)),
    "sinks": lambda q, k, v: attention(q, k, v, is_causal=True, sinks=torch.zeros(q.shape[2], device=q.device)),
    "bigbird": lambda q, k, v: block_sparse_attention(q, k, v, BigBird(512, 64, 3)),
}


def gradients(call: Callable[..., torch.Tensor], num_positions: int) -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.randn(1, num_positions, 16, 48, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    return torch.autograd.grad(call(q, k, v).sum(), (q, k, v))


def variants() -> dict[str, int]:
    """Returns the number of compiled variants of every Triton kernel of the package."""
    device = torch.cuda.current_device()
    kernels = {
        f"{name}.{attribute}": kernel
        for name, module in list(sys.modules.items())
        if name.startswith("dilated_attention") and module is not None
        for attribute, kernel in vars(module).items()
        if hasattr(kernel, "device_caches")
    }
    return {name: len(kernel.device_caches[device][0]) for name, kernel in kernels.items() if device in kernel.device_caches}


@contextmanager
def nothing_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CALLS)
def test_new_lengths_compile_nothing_and_wait_for_nothing(name: str) -> None:
    rng = random.Random(name)
    # multiples of every size of blocks, and none
    for num_positions in (8192, 5001, 3008, 9999, 12_345):
        gradients(CALLS[name], num_positions)
    before = variants()
    for _ in range(12):
        num_positions = rng.randrange(3000, 13_000)
        with nothing_waits():
            gradients(CALLS[name], num_positions)
    assert variants() == before


@pytest.mark.parametrize("name", ["dilated", "torchscale", "dense", "bigbird"])
def test_a_kind_of_call_has_few_variants(name: str) -> None:
    """A head dimension that no other test uses: its kernels are compiled here."""
    before = variants()
    for num_positions in (4096, 4099, 5008, 2049, 777, 10_000):
        q, k, v = (torch.randn(1, num_positions, 6, 40, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
        CALLS[name](q, k, v).sum().backward()
    grown = {kernel: count - before.get(kernel, 0) for kernel, count in variants().items()}
    assert max(grown.values()) <= 2, grown


@pytest.mark.parametrize("name", [name for name in CALLS if name != "bigbird"])
def test_a_first_call_compiles_ahead_what_it_launches(name: str) -> None:
    """With a number of heads and a head dimension that no other test uses. What was compiled ahead and not launched stays a future."""
    from dilated_attention.backends.tiles import launch

    before = set(launch._compiled)
    q, k, v = (torch.randn(1, 3001, 6, 24, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
    out = CALLS[name](q, k, v)
    # the forward starts the backward's kernels
    started = set(launch._compiled)
    out.sum().backward()
    assert set(launch._compiled) == started
    compiled = {key[0].__name__: kernel for key, kernel in launch._compiled.items() if key not in before}
    assert not [kernel for kernel, made in compiled.items() if isinstance(made, Future)]


def test_kernels_of_lists_are_compiled_for_lengths_that_fill_the_last_block_and_others() -> None:
    """With a head dimension that no other test uses."""
    from dilated_attention.backends.tiles import launch

    def run(num_positions: int) -> None:
        q, k, v = (torch.randn(1, num_positions, 4, 56, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
        block_sparse_attention(q, k, v, BigBird(512, 64, 3), backend="triton").sum().backward()

    run(4096)
    launch.finish()
    before = variants()
    run(4001)
    assert variants() == before


def test_a_slide_encoder_compiles_ahead_what_it_launches() -> None:
    from dilated_attention.backends.tiles import launch

    before = set(launch._compiled)
    model = create_model("gigapath-12l768d", num_layers=2, embed_dim=640, device="cuda").train()
    with torch.autocast("cuda", torch.bfloat16):
        out = model(torch.randn(1, 3001, 1536, device="cuda"), torch.zeros(1, 3001, 2, device="cuda"))
    out.float().sum().backward()
    compiled = {key[0].__name__: kernel for key, kernel in launch._compiled.items() if key not in before}
    assert compiled and not [kernel for kernel, made in compiled.items() if isinstance(made, Future)]


def test_warmup_lists_what_it_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    """With a head dimension that no other test uses; kernels may be cached on disk."""
    line = "warmup dilated --heads 6 --head-dim 56 --segment-lengths 1024 8192 --dilation-rates 1 4 --json"
    assert main(line.split()) == 0
    kernels = {row["kernel"] for row in json.loads(capsys.readouterr().out)["kernels"]}
    assert {"forward_kernel", "merge_kernel", "key_kernel", "query_kernel", "sum_kernel"} <= kernels
