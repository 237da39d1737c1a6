"""Bounds of packed documents: a call computes with what the tensor holds then, however it was written, and its backward with the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from dilated_attention import attention_map, attention_received, block_sparse_attention
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
for _name in ("dilated_attention", "ring_dilated_attention"):
    CALLS[f"detached {_name}"] = partial(CALLS[_name], mixture_grad="detached")
CALLS["top_blocks"] = lambda q, k, v, **o: block_sparse_attention(q, k, v, TopBlocks(blocks=1), **o)
# without gradients
MAPS: dict[str, Call] = {
    "attention_map": lambda q, k, v, **o: attention_map(q, k, query_rows=[0, 100, 200], **o),
    "attention_received": lambda q, k, v, **o: attention_received(q, k, **o),
}


def fresh(*middles: int) -> torch.Tensor:
    return torch.tensor([0, *middles, N], dtype=torch.int32)


def shared_with_numpy() -> tuple[torch.Tensor, Any]:
    """A tensor, and what it is written through."""
    buffer = np.array([0, 100, N], dtype=np.int32)
    return torch.from_numpy(buffer), buffer


def result(call: Call, cu: torch.Tensor, between: Callable[[], None] = lambda: None, rows: slice = slice(None)) -> torch.Tensor:
    """Output and gradients, with something in between."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(1, N, 2, 8, generator=generator)[:, rows].clone().requires_grad_() for _ in range(3)]
    out = call(*x, cu_seqlens=cu)
    between()
    return torch.cat([out, *torch.autograd.grad(out.square().sum(), x)]).detach() if out.requires_grad else out


def check(call: Call, reference: Call, cu: torch.Tensor, buffer: Any, **options: Any) -> None:
    at_100, at_37 = (result(reference, fresh(middle), **options) for middle in (100, 37))
    assert not torch.equal(at_100, at_37)
    assert torch.equal(result(call, cu, **options), at_100)
    buffer[1] = 37
    assert torch.equal(result(call, cu, **options), at_37)
    # the batch's buffer is filled anew before the backward
    assert torch.equal(result(call, cu, lambda: buffer.__setitem__(1, 100), **options), at_37)
    assert torch.equal(result(call, cu, **options), at_100)


@pytest.mark.parametrize("name", {**CALLS, **MAPS})
def test_a_tensor_written_anew_is_read_anew_and_the_backward_has_the_forwards_bounds(name: str) -> None:
    call = {**CALLS, **MAPS}[name]
    check(call, call, *shared_with_numpy())


@pytest.mark.parametrize("name", CALLS)
def test_also_in_compiled_code(name: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, v, cu_seqlens: CALLS[name](q, k, v, cu_seqlens=cu_seqlens), backend="aot_eager", fullgraph=True)
    check(compiled, CALLS[name], *shared_with_numpy())


def test_a_models_step_has_one_batchs_bounds_where_blocks_are_computed_again() -> None:
    config = LongNetConfig(vocab_size=16, embed_dim=16, num_layers=2, num_heads=2, segment_lengths=(64, 128), dilation_rates=(1, 2))
    torch.manual_seed(0)
    model = LongNetLM(config, checkpoint_activations=True)
    tokens = torch.randint(16, (1, N))

    def gradient(cu: torch.Tensor, between: Callable[[], None] = lambda: None) -> torch.Tensor:
        loss = model(tokens, targets=tokens, cu_seqlens=cu)
        between()
        return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))])

    cu, buffer = shared_with_numpy()
    expected = gradient(fresh(100))
    assert torch.equal(gradient(cu, lambda: buffer.__setitem__(1, 37)), expected)


def _steps_of_a_ring(rank: int, world: int, name: str) -> None:
    check(CALLS[name], CALLS[name], *shared_with_numpy(), rows=slice(rank * N // world, (rank + 1) * N // world))


@pytest.mark.parametrize("name", [name for name in CALLS if "ring" in name])
def test_two_ranks_read_a_tensor_anew(name: str) -> None:
    pool_of(2).run(_steps_of_a_ring, name)
