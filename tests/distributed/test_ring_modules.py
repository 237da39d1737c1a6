"""Every module of spread sequences against its twin of one process: results and gradients, weights, copies, compilation, layouts.

Over gloo in float64, and over NCCL where GPUs are there (pytest -m gpus) in bfloat16, too.
"""

import copy
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

from dilated_attention import (
    DilatedAttention,
    RingAttention,
    RingDilatedAttention,
    balanced_layout,
    create_attention,
    ring_attention,
    shard_sequence,
)
from dilated_attention.backends import registry
from dilated_attention.distributed import Layout, ring_pass
from dilated_attention.models import LongNetConfig, LongNetLM, average_gradients
from dilated_attention.modules import set_layout
from dilated_attention.pattern import BigBird, LocalWindow
from dilated_attention.testing import largest, max_error
from tests.helpers.machine import worlds
from tests.helpers.pool import Pool, here, patience, pool_of

# no multiple of a block
N, HEADS, D = 333, 4, 32
BRANCHES: dict[str, Any] = {"segment_lengths": [48, 2**40], "dilation_rates": [1, 3]}
WINDOW, PER_HEAD = LocalWindow(40, block_size=64), BigBird(30, 3, 1, block_size=64)
BLOCKS: dict[str, Any] = {"pattern": WINDOW}
KINDS: dict[str, dict[str, Any]] = {
    "ring": {},
    "ring_dilated": BRANCHES,
    "ring_block_sparse": BLOCKS,
    "ring_block_sparse_dilated": BRANCHES | BLOCKS,
    "ring_multihead_dilated": BRANCHES,
    "ring_multihead_block_sparse": BLOCKS,
    "ring_multihead_block_sparse_dilated": BRANCHES | BLOCKS,
}
# of modules with projections
SETTINGS: dict[str, dict[str, Any]] = {
    "grouped heads": {"num_kv_heads": 2, "qk_norm": True, "rotary": True},
    "xpos": {"rotary": True, "xpos_scale_base": 50.0, "bias": False},
    "dropout": {"dropout": 0.3, "num_kv_heads": 2},
    "no norm": {"layer_norm": False, "scale": 0.4, "gamma_init": 2.0},
}
CALLS = ("causal", "padding", "documents")


def make(kind: str, *, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """The module of several processes, or of one where ``kind`` has no ring; made on the CPU, where a seed gives the same weights."""
    torch.manual_seed(0)
    settings = KINDS[kind if kind.startswith("ring") else f"ring_{kind}"] | settings
    if "multihead" in kind:
        settings |= {"embed_dim": HEADS * D, "num_heads": HEADS}
    if kind.startswith("ring"):
        settings["timeout"] = patience()
    return create_attention(kind, **settings).to(here(), dtype)


def of_one(kind: str, **settings: Any) -> Any:
    """The twin of one process."""
    settings.pop("head_steps", None)
    return DilatedAttention([2**62], [1], head_offsets="zero") if kind == "ring" else make(kind.removeprefix("ring_"), **settings)


def tensors(kind: str, batch: int, dtype: torch.dtype, count: int = 3) -> list[torch.Tensor]:
    """Two inputs or three, and dout."""
    rng = torch.Generator().manual_seed(1)
    shape = (batch, N, HEADS * D) if "multihead" in kind else (batch, N, HEADS, D)
    made = [torch.randn(shape, generator=rng, dtype=torch.float64).to(here(), dtype) for _ in range(4)]
    return [made[0], made[2], made[3]] if "multihead" in kind else made


def step(module: nn.Module, given: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """(out, gradients of the inputs, gradients of the parameters)."""
    *leaves, dout = (x.detach().requires_grad_() for x in given)
    # equal seeds on all processes, and on one, draw equal dropout
    torch.manual_seed(7)
    # a query and a value, whose keys are the query's
    out = module(leaves[0], None, leaves[1], **options) if len(leaves) == 2 else module(*leaves, **options)
    out = out[0] if isinstance(out, tuple) else out
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *module.parameters()], dout)]


def errors(rank: int, world: int, kind: str, settings: dict[str, Any], dtype: torch.dtype) -> list[tuple[str, float, float]]:
    """(what, error, bound) of this rank's rows and of the parameters, in three calls of three layouts."""
    report = []
    for index, what in enumerate(CALLS):
        pattern = (WINDOW, PER_HEAD)[(index + len(settings)) % 2]
        changes = settings | ({"pattern": pattern} if "block" in kind else {})
        named = "zigzag" if world % 2 else "contiguous"
        layout = (named, "zigzag", balanced_layout(pattern if "block" in kind else None, N, world, HEADS, is_causal=True))[index]
        alone, ring = of_one(kind, dtype=dtype, **changes), make(kind, dtype=dtype, layout=layout, **changes)
        if kind != "ring":
            ring.load_state_dict(alone.state_dict())
        given = tensors(kind, 1 if what == "documents" else 2, dtype)
        options: dict[str, Any] = {"is_causal": what != "padding"}
        padding = (torch.arange(N)[None] >= torch.tensor([[N], [N - 70]])).to(here())
        if what == "documents":
            options["cu_seqlens"] = torch.tensor([0, 90, 90, N], dtype=torch.int32, device=here())
        of_mask = {"key_padding_mask": padding} if what == "padding" else {}
        narrow = step(alone, given, **options, **of_mask)
        truth = step(copy.deepcopy(alone).double(), [x.double() for x in given], **options, **of_mask)
        *parts, mask = shard_sequence(None, [*given, padding], [1] * (len(given) + 1), layout=layout)
        found = step(ring, parts, **options, **({"key_padding_mask": mask} if of_mask else {}), seq_len=N if index else None)
        for number, (x, same, true) in enumerate(zip(found, narrow, truth, strict=True)):
            # each rank's share of a gradient is rounded once
            bound = 1e-9 * max(1.0, largest(true))
            if dtype is not torch.float64:
                bound = 2 * max_error(same, true) + (1 + world / 2) * torch.finfo(dtype).eps * largest(true)
            if number < len(given):
                (true,) = shard_sequence(None, [true], [1], layout=layout)
            else:
                x = x.double().contiguous()
                dist.all_reduce(x)
            report.append((f"result {number} of {what}", max_error(x, true), bound))
    return report


# projections are those of one class, whatever lies between them
CASES = [(kind, {}) for kind in KINDS] + [("ring_multihead_dilated", settings) for settings in SETTINGS.values()]
CASES += [("ring_multihead_block_sparse", SETTINGS["grouped heads"]), ("ring_multihead_block_sparse_dilated", SETTINGS["dropout"])]
CASES += [("ring_multihead_block_sparse_dilated", {"head_steps": 2})]


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=str)
@pytest.mark.parametrize("pool", worlds(2, gpus=(2, 3)))
def test_processes_give_what_one_gives(pool: Pool, kind: str, settings: dict[str, Any]) -> None:
    for dtype in (torch.float64, torch.bfloat16) if pool.on_gpus and not settings else (torch.float64,):
        for rank, report in enumerate(pool.run(errors, kind, settings, dtype)):
            for what, error, bound in report:
                assert error <= bound, f"rank {rank} of {pool.world}: E({what}) = {error:.3g} > {bound:.3g} in {dtype}"


def in_the_ecosystem(rank: int, world: int, kind: str) -> None:
    """Copies, also another process's, compilation, bfloat16."""
    ring = make(kind, layout="contiguous", **({"rotary": True} if "multihead" in kind else {}))
    given = tensors(kind, 2, torch.float64)
    parts = shard_sequence(None, given, [1] * len(given))
    expected = step(ring, parts, is_causal=True, seq_len=N)
    # a module that another process pickled works out positions by this one's rank
    received: list[Any] = [ring]
    dist.broadcast_object_list(received, src=0)
    for module in (copy.deepcopy(ring), received[0].to(here())):
        torch.testing.assert_close(step(module, parts, is_causal=True, seq_len=N), expected, atol=1e-12, rtol=1e-10)
    torch._dynamo.reset()
    fast = torch.compile(ring, fullgraph=True, backend="aot_eager")
    for got, true in zip(step(fast, parts, is_causal=True, seq_len=N), expected, strict=True):
        torch.testing.assert_close(got, true, atol=1e-12, rtol=1e-10)
    if "multihead" in kind:
        with pytest.raises(Exception, match=r"seq_len is None inside torch\.compile"):
            fast(parts[0], is_causal=True)
    else:
        # without rotary positions the op itself asks for the length
        torch.testing.assert_close(step(fast, parts, is_causal=True)[0], expected[0])
    half = step(copy.deepcopy(ring).bfloat16(), [x.bfloat16() for x in parts], seq_len=N)
    assert {x.dtype for x in half} == {torch.bfloat16}


# each of the three ops, and both ways to make a module
@pytest.mark.parametrize("kind", ["ring_dilated", "ring_block_sparse", "ring_multihead_block_sparse_dilated"])
@pytest.mark.parametrize("pool", worlds(2, gpus=(2,)))
def test_copies_and_compilation(pool: Pool, kind: str) -> None:
    pool.run(in_the_ecosystem, kind)


# --- construction -----------------------------------------------------------------------------------------------------------------


def test_reprs_say_where_the_sequence_lies() -> None:
    assert repr(RingAttention(window=3)) == "RingAttention(layout='zigzag', one process, window=3)"
    text = repr(RingDilatedAttention([4], [1], layout="striped", exchange="2d", ranks_per_node=2, backend="math"))
    assert "layout='striped', exchange='2d', ranks_per_node=2, one process, backend='math'" in text
    assert repr(make("ring_block_sparse")).startswith("RingBlockSparseAttention(LocalWindow(")
    assert "block_pattern=LocalWindow(" in repr(make("ring_block_sparse_dilated"))
    sparse = {"sparsity_ratio": 0.3, "sparsity": "local"}
    text = repr(create_attention("ring_multihead_block_sparse_dilated", embed_dim=16, num_heads=4, rotary=True, **sparse, **BRANCHES))
    assert "rotary_base=10000.0" in text and "RingBlockSparseDilatedAttention(" in text and "one process" in text


# --- layouts ----------------------------------------------------------------------------------------------------------------------


def test_modules_show_a_layout_in_short_and_refuse_what_is_none() -> None:
    layout = Layout(64, (((0, 16), (16, 64)),))
    layer = RingDilatedAttention([8, 32], [1, 4], layout=layout)
    assert layer.ring.layout == layout.name and "layout='runs:64:0-16,16-64'" in repr(layer)
    many = Layout(64, (tuple((i, i + 1) for i in range(0, 64, 2)), tuple((i, i + 1) for i in range(1, 64, 2))))
    set_layout(layer, many)
    assert "… (64 runs, hash" in repr(layer)
    x = torch.zeros(1, 64, 2, 8)
    with pytest.raises(ValueError, match="layout is for 64 positions on 2 processes, the sequence has 64 on 1; make one for them"):
        layer(x, x, x)
    with pytest.raises(TypeError, match=r"layout is 'zigzag' \(str\); expected a Layout"):
        set_layout(layer, "zigzag")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"module is a Linear without a ring.*pass group= or mesh="):
        set_layout(torch.nn.Linear(2, 2), layout)


CONFIG = LongNetConfig(
    vocab_size=20, embed_dim=16, num_layers=2, num_heads=4, segment_lengths=(8, 32), dilation_rates=(1, 4), drop_path=0.0, is_causal=True
)


def packed_steps(rank: int, world: int) -> list[float]:
    """Errors of the loss and of all gradients of a model that gets another layout for each batch of packed documents."""
    models = []
    for options in ({}, {"group": dist.group.WORLD, "checkpoint_activations": True, "timeout": patience()}):
        torch.manual_seed(0)
        models.append(LongNetLM(CONFIG, dtype=torch.float64, **options))
    (alone, spread), found = models, []
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        bounds = torch.tensor([0, *sorted(torch.randint(1, 64, (5,), generator=rng).tolist()), 64], dtype=torch.int32)
        tokens = torch.randint(20, (1, 65), generator=rng)
        expected = alone(tokens[:, :-1], targets=tokens[:, 1:], cu_seqlens=bounds)
        layout = balanced_layout(CONFIG.pattern, 64, world, 4, is_causal=True, cu_seqlens=bounds)
        set_layout(spread, layout)
        mine = shard_sequence(None, [tokens[:, :-1], tokens[:, 1:]], [1, 1], layout=layout)
        loss = spread(mine[0], targets=mine[1], cu_seqlens=bounds, seq_len=64 if seed else None)
        found.append(float((loss - expected).abs()))
        expected.backward()
        loss.backward()
        average_gradients(spread)
        pairs = zip(alone.parameters(), spread.parameters(), strict=True)
        found += [float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None]
        for model in models:
            model.zero_grad()
    return found


def test_a_model_gets_another_layout_for_each_batch() -> None:
    for found in pool_of(3).run(packed_steps):
        # the loss is float32
        assert len(found) > 20 and max(found) < 1e-6


def test_setups_are_forgotten_where_they_are_too_many_or_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_pass, "_setups", {})
    monkeypatch.setattr(ring_pass, "MAX_CACHED_BYTES", 100)
    monkeypatch.setattr(ring_pass, "MOST_SETUPS", 3)
    kept = []
    for kind, nbytes in enumerate((60, 40, 1, 30, 30, 30, 0)):
        one = ring_pass.RingSetup(steps=(), nbytes=nbytes, exchanges=False, terms=())
        assert all(ring_pass.cached_setup(kind, lambda one=one: one) is one for _ in range(2))
        kept.append([*ring_pass._setups])
    assert kept == [[0], [0, 1], [2], [2, 3], [2, 3, 4], [5], [5, 6]]


def test_former_exchanges_run_as_auto_and_say_so_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_told", set())
    q = torch.randn(1, 8, 2, 8)
    with caplog.at_level("INFO", "dilated_attention"):
        outs = [ring_attention(q, q, q, exchange=way, window=window) for way in ("auto", "ring", "2d") for window in (None, 3, 4)]
    told = [line for line in caplog.messages if "runs as 'auto'" in line]
    assert [line.split(" runs")[0] for line in told] == ["ring: exchange='ring'", "ring: exchange='2d'"]
    assert all(torch.equal(a, b) for a, b in zip(outs, outs[:3] * 3, strict=True))
