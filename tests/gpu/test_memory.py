"""Profiles and errors of memory on a GPU: figures against torch's own, and a limit that is hit."""

import gc
import re
from collections.abc import Callable, Iterator

import pytest
import torch

from dilated_attention import attention, block_sparse_attention, dilated_attention
from dilated_attention.pattern import LocalWindow
from dilated_attention.profiling import profile_memory
from tests.helpers.gpu_memory import bare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.no_poison,
    pytest.mark.alone,
]

GIB = 2**30
LENGTHS, RATES = (2048, 8192, 32768), (1, 4, 16)


def leaves(length: int, heads: int = 16, dim: int = 64, batch: int = 1) -> list[torch.Tensor]:
    return [torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "dilated_attention": lambda q, k, v: dilated_attention(q, k, v, LENGTHS, RATES),
    "attention": lambda q, k, v: attention(q, k, v, is_causal=True),
    "block_sparse_attention": lambda q, k, v: block_sparse_attention(q, k, v, LocalWindow(1024)),
}


def step(call: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> None:
    out = call(*tensors)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


@pytest.mark.parametrize("name", CALLS)
def test_figures_are_torchs_own(name: str) -> None:
    tensors = leaves(65_536)
    # kernels are compiled and tables made before
    step(CALLS[name], tensors)
    with profile_memory() as profile:
        step(CALLS[name], tensors)
    assert profile.peak_allocated == torch.cuda.max_memory_allocated() and profile.peak_reserved == torch.cuda.max_memory_reserved()
    # what the replayed events say was alive at the peak, and what lay there before, is the allocator's own figure
    assert profile.allocated_before + sum(op.at_peak for op in profile.ops) == profile.peak_allocated
    assert (
        profile.fragmentation >= 1
        and profile.stats["retries"] == 0
        and profile.stats["refused"] == 0
        and profile.stats["device_allocs"] > 0
    )
    assert any(op.name.startswith("dilated_attention::") and op.name.endswith("_backward") and op.kept > 0 for op in profile.ops)
    plain = profile_memory(lambda: step(CALLS[name], tensors), ops=False)
    assert abs(plain.peak_allocated - profile.peak_allocated) <= 2**21 and plain.ops == ()
    print(profile, *profile.advice(), sep="\n")


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    """Allows this process so many bytes more than it holds."""

    def limit(size: int) -> None:
        bare()
        free, total = torch.cuda.mem_get_info()
        if free < size + GIB:
            pytest.skip(f"{free / GIB:.1f} GiB are free on this GPU and the test takes {size / GIB:.1f}: others hold the rest")
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    bare()


@pytest.mark.parametrize("name", ["dilated_attention", "attention"])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_limit_is_told_with_what_is_needed_and_free(name: str, pass_: str, limited: Callable[[int], None]) -> None:
    call = {"dilated_attention": lambda q, k, v: dilated_attention(q, k, v, (512, 2048), (1, 4)), "attention": CALLS["attention"]}[name]
    # as short rows as may be, so that dense attention of long ones takes no time
    heads, length = (16, 524_288) if name == "dilated_attention" else (128, 32_768)
    step(call, leaves(4096, heads))
    input_bytes = 3 * length * heads * 64 * 2
    # of the backward, q, k, v, out and their gradients are 8/3 of the inputs at least
    limited(input_bytes * (11 if pass_ == "forward" else 20) // 10)
    tensors = leaves(length, heads)
    with pytest.raises(torch.OutOfMemoryError) as found:
        step(call, tensors)
    said = str(found.value)
    tensors.clear()
    assert re.match(rf"the {pass_} of dilated_attention needs at least [\d.]+ GiB \(q, k, v .*; free [\d.]+ [GM]iB\. Call", said), said
    assert "CUDA out of memory" in said


def test_no_memory_is_kept_once_the_error_is_gone(limited: Callable[[int], None]) -> None:
    tensors = leaves(262_144)
    limited(GIB // 4)
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        dilated_attention(*tensors, LENGTHS, (1, 1, 1))
    gc.disable()
    try:
        assert torch.cuda.memory_allocated() <= before + 2**21
    finally:
        gc.enable()
