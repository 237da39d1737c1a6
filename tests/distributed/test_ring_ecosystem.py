"""Ring modules and models among PyTorch's own: FSDP2, DDP, checkpointing, compilation, autocast, meshes, copies. 2 and 4 processes.

Over gloo, and over NCCL where GPUs are there (pytest -m gpus). ``test_ring_modules.py`` has every module for itself.
"""

import dataclasses
import functools
import gc
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dilated_attention import (
    RingMultiheadDilatedAttention,
    shard_sequence,
    unshard_sequence,
)
from dilated_attention.distributed.comm.session import POLL
from dilated_attention.models import LongNetConfig, LongNetLM, average_gradients, sharded_cross_entropy
from dilated_attention.pattern import LocalWindow
from tests.helpers.machine import worlds
from tests.helpers.pool import Pool, here, patience
from tests.helpers.traffic import Traffic, traffic

# no multiple of anything: shards differ in length
N = 27
SHAPE: dict[str, Any] = {"embed_dim": 16, "num_heads": 4, "segment_lengths": [6, 24], "dilation_rates": [1, 3], "num_kv_heads": 2}
CONFIG = LongNetConfig(vocab_size=20, embed_dim=16, num_layers=2, num_heads=4, segment_lengths=(6, 24), dilation_rates=(1, 3))


def layer_of(kind: type[nn.Module], **settings: Any) -> Any:
    """Made on the CPU, where a seed gives the same weights everywhere."""
    torch.manual_seed(0)
    if kind is RingMultiheadDilatedAttention:
        settings["timeout"] = patience()
    return kind(**{**SHAPE, "rotary": True, "dtype": torch.float64, **settings}).to(here())


def draw(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(here())


def language_model(config: LongNetConfig = CONFIG, **spread: Any) -> LongNetLM:
    torch.manual_seed(0)
    return LongNetLM(config, **spread).to(here())


def batch(row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of one row of the mesh; the last ten positions do not count, so that ranks count unequally."""
    tokens = torch.randint(20, (2, N + 1), generator=torch.Generator().manual_seed(row))
    targets = tokens[:, 1:].clone()
    targets[:, -10:] = -100
    return tokens[:, :-1].to(here()), targets.to(here())


def loosely(tolerance: float) -> float:
    """A tolerance of float32, whose sums a GPU makes in other orders."""
    return tolerance if here().type == "cpu" else 10 * tolerance


@functools.cache
def expected_step(rows: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Each row's loss, and the gradient of their mean, on one process."""
    model = language_model()
    losses = [model(tokens, targets=targets) for tokens, targets in map(batch, range(rows))]
    (sum(losses) / rows).backward()  # type: ignore[union-attr]
    return [loss.item() for loss in losses], {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_gradients(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    names = []
    for name, parameter in model.named_parameters():
        name, grad = name.removeprefix("module."), parameter.grad
        assert grad is not None, name
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(whole, expected[name], atol=loosely(2e-6), rtol=1e-4)
        names.append(name)
    assert sorted(names) == sorted(expected)


Check = Callable[[Any], None]
CHECKS: dict[str, Check] = {}


def on_processes(check: Check) -> Check:
    CHECKS[check.__name__] = check
    return check


def parallel_step(mesh: Any, layout: str, wrap: Callable[[LongNetLM], nn.Module], seq_len: int | None) -> nn.Module:
    """One step on a mesh of dp × cp; the loss is checked, gradients are left to the caller."""
    losses, _ = expected_step(mesh["dp"].size())
    model = wrap(language_model(mesh=mesh["cp"], layout=layout))
    row = mesh["dp"].get_local_rank()
    tokens, targets = shard_sequence(mesh["cp"], batch(row), [1, 1], layout=layout)
    loss = model(tokens, targets=targets, seq_len=seq_len)
    # the whole row's loss, on each of its processes
    assert abs(loss.item() - losses[row]) < loosely(1e-6)
    loss.backward()
    return model


@on_processes
def fsdp2(mesh: Any) -> None:
    def wrap(model: LongNetLM) -> nn.Module:
        for block in model.decoder.blocks:
            fully_shard(block)
        return fully_shard(model)

    check_gradients(parallel_step(mesh, "zigzag", wrap, None), expected_step(mesh["dp"].size())[1])


@on_processes
def ddp(mesh: Any) -> None:
    check_gradients(parallel_step(mesh, "contiguous", DistributedDataParallel, N), expected_step(mesh["dp"].size())[1])


@on_processes
def mean_of_all_rows_targets(mesh: Any) -> None:
    """The loss over WORLD weighs every target alike, where rows count unequally too."""
    rank, world = dist.get_rank(), dist.get_world_size()
    hidden, weight = draw(world, 5, 8, dtype=torch.float32), draw(20, 8, seed=2, dtype=torch.float32).requires_grad_()
    targets = torch.arange(world * 5, device=here()).view(world, 5) % 20
    targets[world // 2, 1:] = -100
    loss = sharded_cross_entropy(hidden[rank], weight, targets[rank])
    expected = nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected)
    (grad,), (whole,) = torch.autograd.grad(loss, weight), torch.autograd.grad(expected, weight)
    dist.all_reduce(grad)
    torch.testing.assert_close(grad / world, whole)
    assert sharded_cross_entropy(hidden[rank], weight, torch.full_like(targets[rank], -100)) == 0


def step_of(layer: nn.Module, x: torch.Tensor, call: Callable[..., Any]) -> list[torch.Tensor]:
    """(out, dx, parameter gradients) of one step."""
    x = x.detach().requires_grad_()
    out = call(x)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])]


@on_processes
def activation_checkpointing(mesh: Any) -> None:
    layer = layer_of(RingMultiheadDilatedAttention, mesh=mesh["cp"])
    (x,) = shard_sequence(mesh["cp"], [draw(2, N, 16)], [1])

    def plain(x: torch.Tensor) -> torch.Tensor:
        return layer(x, is_causal=True, seq_len=N)[0]

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_ring = op is torch.ops.dilated_attention.ring_attention.default
        return CheckpointPolicy.MUST_SAVE if is_ring else CheckpointPolicy.PREFER_RECOMPUTE

    def moved(of: Traffic) -> int:
        return of.sent + of.received

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with traffic() as forward:
        plain(x)
    with traffic() as without:
        expected = step_of(layer, x, plain)
    with traffic() as full:
        recomputed = step_of(layer, x, lambda x: checkpoint(plain, x, use_reentrant=False))
    with traffic() as selective:
        kept = step_of(layer, x, lambda x: checkpoint(plain, x, use_reentrant=False, context_fn=contexts))
    assert moved(forward)
    assert moved(full) == moved(without) + moved(forward)
    assert moved(selective) == moved(without)
    for got in (recomputed, kept):
        assert all(map(torch.equal, got, expected))


@on_processes
def compiled_model_at_two_lengths(mesh: Any) -> None:
    """The second length is a symbol of the graph, which holds the loss and its sum over the processes too."""
    model = language_model(dataclasses.replace(CONFIG, num_layers=1), mesh=mesh["cp"])
    torch._dynamo.reset()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (N, N - 6):
        tokens, targets = shard_sequence(mesh["cp"], [x[:, :length] for x in batch(0)], [1, 1])
        losses = [call(tokens, targets=targets, seq_len=length) for call in (model, fast)]
        grads = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        torch.testing.assert_close(losses[1], losses[0])
        torch.testing.assert_close(grads[1], grads[0], atol=loosely(1e-5), rtol=1e-5)


@on_processes
def checkpoints_on_disk_fit_either_model(mesh: Any) -> None:
    tokens, _ = batch(0)
    alone = language_model()
    with tempfile.TemporaryDirectory() as folder:
        alone.save_pretrained(folder)
        spread = LongNetLM.from_pretrained(folder, mesh=mesh["cp"], layout="striped", device=here())
        spread.save_pretrained(folder)
        again = LongNetLM.from_pretrained(folder, device=here())
    (part,) = shard_sequence(mesh["cp"], [tokens], [1], layout="striped")
    (logits,) = unshard_sequence(mesh["cp"], [spread(part)], [1], layout="striped")
    torch.testing.assert_close(logits, alone(tokens), atol=1e-5, rtol=1e-5)
    assert torch.equal(again(tokens), alone(tokens))


@on_processes
def every_kind_of_attention_in_a_model(mesh: Any) -> None:
    """``attention="ring…"`` against the same kind on one process: loss and gradients, causal and not, checkpointed."""
    kinds: dict[str, dict[str, Any]] = {
        "ring_dilated": {"segment_lengths": (6, 24), "dilation_rates": (1, 3)},
        "ring": {},
        "ring_block_sparse": {"block_pattern": LocalWindow((9, 4))},
    }
    shape: dict[str, Any] = {"vocab_size": 20, "embed_dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "positions": "xpos"}
    tokens, targets = batch(0)
    for (kind, fields), is_causal in itertools.product(kinds.items(), (True, False)):
        config = LongNetConfig(**shape, **fields, attention=kind, is_causal=is_causal)
        alone = language_model(dataclasses.replace(config, attention=config.kind))
        spread = language_model(config, mesh=mesh["cp"], layout="zigzag", checkpoint_activations=True)
        loss = alone(tokens, targets=targets)
        loss.backward()
        got = spread(
            *shard_sequence(mesh["cp"], [tokens], [1], layout="zigzag"),
            targets=shard_sequence(mesh["cp"], [targets], [1], layout="zigzag")[0],
        )
        assert abs(got.item() - loss.item()) < loosely(1e-6), kind
        got.backward()
        average_gradients(spread, mesh=mesh["cp"])
        check_gradients(spread, {name: p.grad for name, p in alone.named_parameters() if p.grad is not None})
    # without a group it is that of all processes
    assert LongNetLM(config).ring.place()[1] == dist.get_world_size()
    with pytest.raises(ValueError, match="exchange is 'all_gather'"):
        LongNetLM(config, mesh=mesh["cp"], exchange="all_gather")


@on_processes
def groups_are_checked(mesh: Any) -> None:
    size = mesh["cp"].size()
    with pytest.raises(ValueError, match=f"spread over {size} processes, and generate runs on one"):
        language_model(mesh=mesh["cp"]).generate(torch.zeros(1, 3, dtype=torch.long, device=here()), 2)
    early = RingMultiheadDilatedAttention(**SHAPE).to(here())
    object.__setattr__(early.attention.ring, "before_init", True)
    with pytest.raises(RuntimeError, match=r"built before torch\.distributed\.init_process_group"):
        early(draw(1, 3, 16, dtype=torch.float32))


@functools.cache
def mesh_of(shape: tuple[int, int]) -> Any:
    return dist.init_device_mesh(here().type, shape, mesh_dim_names=("dp", "cp"))


def run_check(rank: int, world: int, name: str, shape: tuple[int, int]) -> None:
    CHECKS[name](mesh_of(shape))


MESHES = {"2 of 2": (1, 2), "2 of 4": (2, 2), "4 of 4": (1, 4)}


def cases() -> Iterator[Any]:
    for check, (where, shape) in itertools.product(CHECKS, MESHES.items()):
        world = shape[0] * shape[1]
        # each process compiles for seconds, so that runs on two
        on_cpus = (world,) if where == ("2 of 2" if check == "compiled_model_at_two_lengths" else "2 of 4") else ()
        for case in worlds(*on_cpus, gpus=(world,)):
            yield pytest.param(*case.values, check, shape, marks=case.marks, id=f"{check}-{where}{' GPUs' * ('GPU' in str(case.id))}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("pool", "name", "shape"), list(cases()))
def test_on_processes(pool: Pool, name: str, shape: tuple[int, int]) -> None:
    pool.run(run_check, name, shape, timeout=None if pool.on_gpus else 180)


# --- what only a GPU has ----------------------------------------------------------------------------------------------------------


def compiled_by_inductor(rank: int, world: int) -> None:
    """Forward and backward in bfloat16 through generated kernels, at two lengths; the second one is a symbol."""
    mesh = mesh_of((1, world))["cp"]
    torch.manual_seed(0)
    layer = RingMultiheadDilatedAttention(256, 4, [64, 512], [1, 4], mesh=mesh, rotary=True, qk_norm=True, timeout=patience())
    layer.to(here(), torch.bfloat16)
    torch._dynamo.reset()
    # over gloo this tries the test, and generated C++ would take minutes of that
    fast = torch.compile(layer, fullgraph=True, backend="inductor" if here().type == "cuda" else "aot_eager")
    for n in (512, 384):
        whole = torch.randn(2, n, 256, generator=torch.Generator().manual_seed(n)).to(here(), torch.bfloat16)
        (x,) = shard_sequence(mesh, [whole], [1])
        results = []
        for module in (layer, fast):
            leaf = x.detach().requires_grad_()
            out = module(leaf, is_causal=True, seq_len=n)[0]
            results.append([out, *torch.autograd.grad(out.float().sin().sum(), [leaf, *layer.parameters()])])
        for want, got in zip(*results, strict=True):
            assert got.dtype is torch.bfloat16
            assert (got.float() - want.float()).norm() <= 0.03 * want.float().norm() + 1e-3


@pytest.mark.parametrize("pool", worlds(gpus=(2,)))
def test_a_layer_compiled_by_inductor(pool: Pool) -> None:
    pool.run(compiled_by_inductor)


def held_after_steps(rank: int, world: int, steps: int) -> list[int]:
    """Bytes of this GPU that tensors hold after the third step of a layer and after the last one."""
    mesh = mesh_of((1, world))["cp"]
    torch.manual_seed(0)
    layer = RingMultiheadDilatedAttention(256, 4, [64, 512], [1, 4], mesh=mesh, rotary=True, timeout=patience())
    layer.to(here(), torch.bfloat16)
    (x,) = shard_sequence(mesh, [torch.randn(2, 512, 256, generator=torch.Generator().manual_seed(0)).to(here(), torch.bfloat16)], [1])
    # what tests before this one left to the collector
    gc.collect()
    held = []
    for _ in range(steps):
        step_of(layer, x, lambda x: layer(x, is_causal=True, seq_len=512)[0])
        if here().type == "cuda":
            # an exchange under way holds what it reads, and the host may be several steps ahead
            torch.cuda.synchronize()
            if len(held) in (2, steps - 1):
                # nor do the watching threads, ours and torch's, let go of an exchange before they have looked at it
                time.sleep(4 * POLL)
        held.append(torch.cuda.memory_allocated() if here().type == "cuda" else 0)
    return [held[2], held[-1]]


@pytest.mark.parametrize("pool", worlds(gpus=(2, 4)))
def test_steps_leave_no_memory_behind(pool: Pool) -> None:
    for early, late in pool.run(held_after_steps, 50):
        assert late <= early
