"""Bounds of packed documents: a call computes with what the tensor holds then, however it was written, and its backward with the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from dilated_attention import attention_map, attention_received, block_sparse_attention
from dilated_attention.engine.ops import bounds as packed
from dilated_attention.models import LongNetLM
from dilated_attention.models.config import LongNetConfig
from dilated_attention.pattern import TopBlocks
from tests.helpers.pool import pool_of
from tests.helpers.transform_cases import functions

N = 256
Call = Callable[..., torch.Tensor]
# those of rings are told the whole length
CALLS: dict[str, Call] = {
    name: partial(call, seq_len=N) if "ring" in name else call for name, (call, _) in functions().items() if name.islower()
}
CALLS |= {
    name: partial(CALLS[name.partition(" ")[2]], mixture_grad="detached")
    for name in ("detached dilated_attention", "detached ring_dilated_attention")
}
CALLS["top_blocks"] = lambda q, k, v, **o: block_sparse_attention(q, k, v, TopBlocks(blocks=1), **o)
MAPS: dict[str, Call] = {
    "attention_map": lambda q, k, v, **o: attention_map(q, k, query_rows=[0, 100, 200], **o),
    "attention_received": lambda q, k, v, **o: attention_received(q, k, **o),
}


def compiled(call: Call) -> Call:
    torch.compiler.reset()
    return torch.compile(lambda q, k, v, cu_seqlens: call(q, k, v, cu_seqlens=cu_seqlens), backend="aot_eager", fullgraph=True)


FORMS: dict[str, Callable[[Call], Call]] = {"eager": lambda call: call, "compiled": compiled}


def fresh(*middles: int) -> torch.Tensor:
    return torch.tensor([0, *middles, N], dtype=torch.int32)


def numpy_writes() -> tuple[torch.Tensor, Callable[[int], None]]:
    buffer = np.array([0, 100, N], dtype=np.int32)
    return torch.from_numpy(buffer), lambda middle: buffer.__setitem__(1, middle)


def writes_of(view: Callable[[torch.Tensor], Any]) -> Callable[[], tuple[torch.Tensor, Callable[[int], None]]]:
    def make() -> tuple[torch.Tensor, Callable[[int], None]]:
        cu = fresh(100)
        return cu, lambda middle: view(cu).__setitem__(1, middle)

    return make


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, N, 2, 8, generator=generator).requires_grad_() for _ in range(3)]


def result(call: Call, cu: torch.Tensor, between: Callable[[], None] = lambda: None) -> torch.Tensor:
    """Output and gradients, with something in between."""
    x = inputs()
    out = call(*x, cu_seqlens=cu)
    between()
    return torch.cat([out, *torch.autograd.grad(out.square().sum(), x)]).detach()


@pytest.mark.parametrize(
    ("name", "form", "writes"),
    [(name, form, numpy_writes) for name in CALLS for form in FORMS]
    + [("attention", "eager", writes) for writes in map(writes_of, (lambda x: x.data, torch.from_dlpack, lambda x: x))],
)
def test_a_tensor_written_anew_is_read_anew_and_the_backward_has_the_forwards_bounds(
    name: str, form: str, writes: Callable[[], tuple[torch.Tensor, Callable[[int], None]]]
) -> None:
    call = FORMS[form](CALLS[name])
    cu, write = writes()
    at_100, at_37 = result(CALLS[name], fresh(100)), result(CALLS[name], fresh(37))
    assert not torch.equal(at_100, at_37)
    assert torch.equal(result(call, cu), at_100)
    write(37)
    assert torch.equal(result(call, cu), at_37)
    # the batch's buffer is filled anew before the backward
    assert torch.equal(result(call, cu, lambda: write(100)), at_37)
    assert torch.equal(result(call, cu), at_100)


@pytest.mark.parametrize("name", MAPS)
def test_maps_read_a_tensor_anew(name: str) -> None:
    cu, write = numpy_writes()
    x = [x.detach() for x in inputs()]
    for middle in (100, 37, 200):
        write(middle)
        assert torch.equal(MAPS[name](*x, cu_seqlens=cu), MAPS[name](*x, cu_seqlens=fresh(middle)))


@pytest.mark.parametrize("checkpoints", [False, True], ids=["saved", "recomputed"])
def test_a_models_step_has_one_batchs_bounds(checkpoints: bool) -> None:
    config = LongNetConfig(vocab_size=16, embed_dim=16, num_layers=2, num_heads=2, segment_lengths=(64, 128), dilation_rates=(1, 2))
    torch.manual_seed(0)
    model = LongNetLM(config, checkpoint_activations=checkpoints)
    tokens = torch.randint(16, (1, N))

    def gradient(cu: torch.Tensor, between: Callable[[], None] = lambda: None) -> torch.Tensor:
        model.zero_grad()
        loss = model(tokens, targets=tokens, cu_seqlens=cu)
        between()
        loss.backward()
        return torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])

    cu, write = numpy_writes()
    wanted = gradient(fresh(100))
    assert torch.equal(gradient(cu, lambda: write(37)), wanted)
    assert torch.equal(gradient(cu, lambda: write(100)), gradient(fresh(37)))


def _steps_of_a_ring(rank: int, world: int, name: str) -> list[bool]:
    rows = slice(rank * N // world, (rank + 1) * N // world)

    def step(cu: torch.Tensor, between: Callable[[], None] = lambda: None) -> torch.Tensor:
        x = [x.detach()[:, rows].clone().requires_grad_() for x in inputs()]
        out = CALLS[name](*x, cu_seqlens=cu)
        between()
        return torch.cat([out, *torch.autograd.grad(out.square().sum(), x)]).detach()

    cu, write = numpy_writes()
    at_100, at_37 = step(fresh(100)), step(fresh(37))
    first = torch.equal(step(cu, lambda: write(37)), at_100)
    return [first, torch.equal(step(cu, lambda: write(100)), at_37), torch.equal(step(cu), at_100)]


@pytest.mark.parametrize("name", [name for name in CALLS if "ring" in name])
def test_two_ranks_read_a_tensor_anew(name: str) -> None:
    assert pool_of(2).run(_steps_of_a_ring, name) == [[True, True, True]] * 2


class Counted(torch.Tensor):
    """Counts how often its values are copied to the host."""

    waits = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counted.waits += func is torch.Tensor.to
        return super().__torch_function__(func, types, args, kwargs)


def on_gpu(*middles: int) -> torch.Tensor:
    """Bounds that count as those on a GPU do here, where there may be none."""
    return fresh(*middles).as_subclass(Counted)


def test_the_host_waits_once_for_a_version_of_a_tensor_on_a_gpu() -> None:
    one, before = on_gpu(7), Counted.waits
    assert [packed.remembered(one).tolist() for _ in range(3)] == [[0, 7, N]] * 3
    assert Counted.waits == before + 1
    one[1] = 9
    assert packed.remembered(one).tolist() == [0, 9, N]
    one.set_(on_gpu(3, 5))
    assert packed.remembered(one).tolist() == [0, 3, 5, N]
    assert Counted.waits == before + 3
    with torch.inference_mode():
        other = on_gpu(5)
        other[1] = 6
    assert [packed.remembered(other).tolist() for _ in range(2)] == [[0, 6, N]] * 2
    assert Counted.waits == before + 5
    del one
    assert [packed.remembered(on_gpu(i)).tolist()[1] for i in range(200)] == list(range(200))


def test_a_write_on_a_gpu_that_torch_does_not_see_fails_an_assertion() -> None:
    one = on_gpu(7)
    packed.remembered(one)
    one.data[1] = 9
    with pytest.raises(RuntimeError, match="cu_seqlens was written where torch does not see it"):
        packed.remembered(one)
