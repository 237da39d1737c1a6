"""Ring modules and models among PyTorch's own: FSDP2, DDP, checkpointing, compilation, autocast, meshes, copies. 2 and 4 processes.

The checks take the world and the devices that they find: ``gpus/test_ecosystem.py`` runs them on GPUs.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import itertools
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dilated_attention import (
    DilatedAttention,
    MultiheadDilatedAttention,
    RingAttention,
    RingDilatedAttention,
    RingMultiheadDilatedAttention,
    attention,
    create_attention,
    shard_sequence,
    unshard_sequence,
)
from dilated_attention.distributed.comm.p2p import Wire
from dilated_attention.models import LongNetConfig, LongNetLM, average_gradients, sharded_cross_entropy
from dilated_attention.pattern import LocalWindow
from tests.helpers.pool import here, patience, pool_of

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
def gradients_averaged_by_hand(mesh: Any) -> None:
    model = parallel_step(mesh, "striped", lambda model: model, None)
    average_gradients(model)
    check_gradients(model, expected_step(mesh["dp"].size())[1])


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


@contextmanager
def counted_exchanges() -> Iterator[list[str]]:
    """What was sent and received in the block: one entry a ``Wire.start``."""
    started: list[str] = []
    start = Wire.start

    def counting(self: Wire, sends: Any, receives: Any, what: str, *args: Any, **kwargs: Any) -> Any:
        started.append(what)
        return start(self, sends, receives, what, *args, **kwargs)

    Wire.start = counting  # type: ignore[method-assign]
    try:
        yield started
    finally:
        Wire.start = start  # type: ignore[method-assign]


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

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with counted_exchanges() as forward:
        plain(x)
    with counted_exchanges() as without:
        expected = step_of(layer, x, plain)
    with counted_exchanges() as full:
        recomputed = step_of(layer, x, lambda x: checkpoint(plain, x, use_reentrant=False))
    with counted_exchanges() as selective:
        kept = step_of(layer, x, lambda x: checkpoint(plain, x, use_reentrant=False, context_fn=contexts))
    assert forward
    assert len(full) == len(without) + len(forward)
    assert selective == without
    for got in (recomputed, kept):
        assert all(map(torch.equal, got, expected))


@on_processes
def compiled(mesh: Any) -> None:
    layer = layer_of(RingMultiheadDilatedAttention, mesh=mesh["cp"], layout="zigzag", qk_norm=True)
    (x,) = shard_sequence(mesh["cp"], [draw(2, N, 16)], [1], layout="zigzag")
    expected = step_of(layer, x, lambda x: layer(x, is_causal=True, seq_len=N)[0])
    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for got, want in zip(step_of(layer, x, lambda x: fast(x, is_causal=True, seq_len=N)[0]), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)
    with pytest.raises(Exception, match=r"seq_len is None inside torch\.compile"):
        fast(x, is_causal=True)
    inner = torch.compile(layer.attention, fullgraph=True, backend="aot_eager")
    q, k, v = shard_sequence(mesh["cp"], [draw(2, N, heads, 8, seed=heads) for heads in (4, 2, 2)], [1] * 3, layout="zigzag")
    # without rotary positions the op itself asks for the length
    torch.testing.assert_close(inner(q, k, v, is_causal=True), layer.attention(q, k, v, is_causal=True))


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
def autocast(mesh: Any) -> None:
    layer = layer_of(RingMultiheadDilatedAttention, mesh=mesh["cp"], dtype=torch.float32)
    (x,) = shard_sequence(mesh["cp"], [draw(2, N, 16, dtype=torch.float32)], [1])
    wide, *expected = step_of(layer, x, lambda x: layer(x, is_causal=True, seq_len=N)[0])

    def narrow(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(here().type, torch.bfloat16):
            return layer(x, is_causal=True, seq_len=N)[0]

    out, *grads = step_of(layer, x, narrow)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), wide, atol=0.05, rtol=0.05)
    for got, want in zip(grads, expected, strict=True):
        assert got.dtype is torch.float32
        assert (got - want).norm() <= 0.05 * want.norm() + 0.05


@on_processes
def shards_of_each_layout(mesh: Any) -> None:
    """Both rows of the mesh at once, on different sequences, against one process: results, gradients, masks, packed documents."""
    row = mesh["dp"].get_local_rank()
    documents = torch.tensor([0, 10, 10, N], dtype=torch.int32, device=here())
    padding = (torch.arange(N)[None] >= torch.tensor([[N], [N - 7]])).to(here())
    for layout in ("contiguous", "zigzag", "striped"):
        alone, spread = layer_of(MultiheadDilatedAttention), layer_of(RingMultiheadDilatedAttention, mesh=mesh["cp"], layout=layout)
        for options in ({"is_causal": True}, {"key_padding_mask": padding}, {"cu_seqlens": documents, "is_causal": True}):
            rows = 1 if "cu_seqlens" in options else 2
            x, dout = draw(rows, N, 16, seed=row + 5).requires_grad_(), draw(rows, N, 16, seed=row + 7)
            expected = alone(x, **options)[0]
            grads = torch.autograd.grad(expected, [x, *alone.parameters()], dout)
            wanted = shard_sequence(mesh["cp"], [expected, grads[0]], [1, 1], layout=layout)
            part, dpart, mask = (t.detach() for t in shard_sequence(mesh["cp"], [x, dout, padding], [1, 1, 1], layout=layout))
            given = {**options, "key_padding_mask": mask} if "key_padding_mask" in options else options
            got = spread(part.requires_grad_(), **given)[0]
            shares = torch.autograd.grad(got, [part, *spread.parameters()], dpart)
            torch.testing.assert_close([got, shares[0]], wanted, atol=1e-10, rtol=1e-8)
            for share, whole in zip(shares[1:], grads[1:], strict=True):
                share = share.contiguous()
                dist.all_reduce(share, group=mesh["cp"].get_group())
                torch.testing.assert_close(share, whole, atol=1e-9, rtol=1e-8)


@on_processes
def dense(mesh: Any) -> None:
    q, k, v = (draw(2, N, heads, 8, seed=heads) for heads in (4, 2, 1))
    v = draw(2, N, 2, 8, seed=9)
    layer = RingAttention(mesh=mesh["cp"], window=(9, 4), scale=0.3, timeout=patience())
    part = shard_sequence(mesh["cp"], [q, k, v], [1] * 3, layout="zigzag")
    (want,) = shard_sequence(mesh["cp"], [attention(q, k, v, is_causal=True, window=(9, 4), scale=0.3)], [1], layout="zigzag")
    torch.testing.assert_close(layer(*part, is_causal=True), want, atol=1e-10, rtol=1e-8)


@on_processes
def weights_copies_and_pickles(mesh: Any) -> None:
    alone = layer_of(MultiheadDilatedAttention)
    torch.manual_seed(dist.get_rank() + 100)
    spread = RingMultiheadDilatedAttention(**SHAPE, rotary=True, dtype=torch.float64, mesh=mesh["cp"]).to(here())
    assert spread.load_state_dict(alone.state_dict(), strict=True)
    assert alone.load_state_dict(spread.state_dict(), strict=True)
    (x, want) = shard_sequence(mesh["cp"], [draw(2, N, 16), alone(draw(2, N, 16))[0]], [1, 1])
    buffer = io.BytesIO()
    torch.save(spread, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(spread), pickle.loads(pickle.dumps(spread)), torch.load(buffer, weights_only=False)]
    # a module that another process pickled works out positions by this one's rank
    received: list[Any] = [spread]
    dist.broadcast_object_list(received, group_src=0, group=mesh["cp"].get_group())
    # it comes with its tensors on the other one's GPU
    received[0].to(here())
    for module in (spread, *twins, *received):
        torch.testing.assert_close(module(x, seq_len=N)[0], want, atol=1e-10, rtol=1e-8)


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


@contextmanager
def shared_folder() -> Iterator[str]:
    """One folder for all processes, which the first one makes and removes."""
    with tempfile.TemporaryDirectory() as mine:
        names = [mine]
        dist.broadcast_object_list(names, src=0)
        yield names[0]
        dist.barrier()


@on_processes
def distributed_checkpoint(mesh: Any) -> None:
    """What FSDP2 shards, saved by all processes and loaded into other weights: the next steps are the same; and on one process."""
    row = mesh["dp"].get_local_rank()
    tokens, targets = shard_sequence(mesh["cp"], batch(row), [1, 1], layout="zigzag")

    def started(shift: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = language_model(mesh=mesh["cp"], layout="zigzag")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(shift)
        for block in model.decoder.blocks:
            fully_shard(block)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = model(tokens, targets=targets, seq_len=N)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    saved = started(0.0)
    step(*saved)
    with shared_folder() as folder:
        dcp.save(state(*saved), checkpoint_id=folder)
        alone = language_model()
        dcp.load({"model": alone.state_dict()}, checkpoint_id=folder)
        loaded = started(0.1)
        before = step(*loaded)
        found = state(*loaded)
        dcp.load(found, checkpoint_id=folder)
    set_state_dict(*loaded, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    with torch.no_grad():
        of_one = float(alone(batch(row)[0], targets=batch(row)[1]))
    first, again = ([step(*which) for _ in range(3)] for which in (saved, loaded))
    assert again == pytest.approx(first, abs=loosely(1e-6)) and abs(of_one - first[0]) < loosely(1e-6)
    assert abs(before - first[0]) > 1e-3 and first[2] < first[0]


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
    with pytest.raises(ValueError, match=r"the mesh has 2 axes \('dp', 'cp'\)"):
        RingAttention(mesh=mesh)
    with pytest.raises(ValueError, match="group and mesh are both given"):
        RingAttention(mesh=mesh["cp"], group=dist.group.WORLD)
    size = mesh["cp"].size()
    with pytest.raises(ValueError, match=f"spread over {size} processes, and generate runs on one"):
        language_model(mesh=mesh["cp"]).generate(torch.zeros(1, 3, dtype=torch.long, device=here()), 2)
    layer = layer_of(RingMultiheadDilatedAttention, mesh=mesh["cp"])
    # rows that are no shard of seq_len: refused on every process, none waits
    with pytest.raises(ValueError, match=f"a contiguous sequence of {N + size} has"):
        layer(shard_sequence(mesh["cp"], [draw(1, N, 16)], [1])[0], seq_len=N + size)
    early = RingMultiheadDilatedAttention(**SHAPE).to(here())
    object.__setattr__(early.attention.ring, "before_init", True)
    with pytest.raises(RuntimeError, match=r"built before torch\.distributed\.init_process_group"):
        early(draw(1, 3, 16, dtype=torch.float32))


@functools.cache
def mesh_of(shape: tuple[int, int]) -> Any:
    return dist.init_device_mesh(here().type, shape, mesh_dim_names=("dp", "cp"))


def run_check(rank: int, world: int, name: str, shape: tuple[int, int]) -> None:
    CHECKS[name](mesh_of(shape))


SHAPES = {"2 of 4": (2, 2), "4 of 4": (1, 4)}
# each process compiles for seconds: the layer runs on a group that is a part of the world, the model on two processes; a distributed
# checkpoint is about sharded parameters and rows, a kind of attention about neither
ON_ONE_MESH = {
    "compiled": "2 of 4",
    "compiled_model_at_two_lengths": "2 of 2",
    "distributed_checkpoint": "2 of 4",
    "every_kind_of_attention_in_a_model": "4 of 4",
}
CASES = [
    pytest.param(check, shape, id=f"{check}-{where}")
    for check in CHECKS
    for where, shape in {**SHAPES, "2 of 2": (1, 2)}.items()
    if (ON_ONE_MESH[check] == where if check in ON_ONE_MESH else where in SHAPES)
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_on_processes(name: str, shape: tuple[int, int]) -> None:
    pool_of(shape[0] * shape[1]).run(run_check, name, shape, timeout=180)


MODULES: list[tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = [
    (lambda: DilatedAttention([6, 24], [1, 3], dropout=0.2), lambda: RingDilatedAttention([6, 24], [1, 3], dropout=0.2)),
    (lambda: DilatedAttention([2**62], [1], head_offsets="zero"), lambda: RingAttention(layout="striped")),
]


@pytest.mark.parametrize(("make_alone", "make_ring"), MODULES, ids=["dilated", "dense"])
def test_one_process_is_the_other_module_to_the_bit(make_alone: Any, make_ring: Any) -> None:
    inputs = [draw(2, N, heads, 8, seed=i).requires_grad_() for i, heads in enumerate((4, 2, 2))]
    results = []
    for make in (make_alone, make_ring):
        torch.manual_seed(3)
        out = make()(*inputs, is_causal=True)
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_one_process_is_the_multihead_module_to_the_bit(layout: str) -> None:
    x = draw(2, N, 16).requires_grad_()
    results = []
    for module in (layer_of(MultiheadDilatedAttention), layer_of(RingMultiheadDilatedAttention, layout=layout)):
        out = module(x, is_causal=True)[0]
        results.append([out, *torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])])
    assert all(map(torch.equal, *results))


def test_what_cannot_work_is_refused_at_construction() -> None:
    for settings, text in (
        ({"layout": "diagonal"}, "layout is 'diagonal'"),
        ({"exchange": "pigeon"}, "exchange is 'pigeon'"),
        ({"timeout": 0}, "timeout is 0"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"group": object()}, "torch.distributed is not initialised"),
    ):
        for kind, needed in (
            ("ring", {}),
            ("ring_dilated", {"segment_lengths": [4], "dilation_rates": [1]}),
            ("ring_multihead_dilated", SHAPE),
        ):
            with pytest.raises(ValueError, match=re.escape(text)):
                create_attention(kind, **needed, **settings)  # type: ignore[arg-type]


def test_reprs_say_where_the_sequence_lies() -> None:
    assert repr(RingAttention(window=3)) == "RingAttention(layout='zigzag', one process, window=3)"
    text = repr(RingDilatedAttention([4], [1], layout="striped", exchange="2d", ranks_per_node=2, backend="math"))
    assert "layout='striped', exchange='2d', ranks_per_node=2, one process, backend='math'" in text
