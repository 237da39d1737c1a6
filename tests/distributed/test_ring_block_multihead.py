"""The multi-head modules of blocks, alone and with branches, on a shared sequence: against those of one process, gradients too."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from dilated_attention import (
    MultiheadBlockSparseAttention,
    MultiheadBlockSparseDilatedAttention,
    RingMultiheadBlockSparseAttention,
    RingMultiheadBlockSparseDilatedAttention,
    balanced_layout,
    create_attention,
    shard_sequence,
)
from dilated_attention.modules.projections import RingMultihead
from dilated_attention.pattern import BigBird, LocalWindow, TopBlocks
from tests.helpers.pool import here, patience, pool_of

# no multiple of a block
N = 333
SHARED = LocalWindow(40, block_size=64)
PER_HEAD = BigBird(30, 3, 1, block_size=64)
DOCUMENTS = torch.tensor([0, 90, 90, N], dtype=torch.int32)
PADDING = torch.arange(N)[None] >= torch.tensor([[N], [N - 70]])
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped_heads": {"num_kv_heads": 2, "qk_norm": True, "rotary": True},
    "xpos": {"rotary": True, "xpos_scale_base": 50.0, "bias": False},
    "dropout": {"dropout": 0.3, "num_kv_heads": 2},
    "head_steps": {"head_steps": 2, "layer_norm": False, "scale": 0.4, "gamma_init": 2.0},
}
# of one process, of several, and their further settings
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "blocks": (MultiheadBlockSparseAttention, RingMultiheadBlockSparseAttention, {}),
    "union": (
        MultiheadBlockSparseDilatedAttention,
        RingMultiheadBlockSparseDilatedAttention,
        {"segment_lengths": [48, 2**40], "dilation_rates": [1, 3]},
    ),
}
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "padding": {"key_padding_mask": PADDING},
    "documents": {"cu_seqlens": DOCUMENTS, "is_causal": True},
}


def make_layer(kind: Any, pattern: Any = SHARED, **settings: Any) -> Any:
    torch.manual_seed(0)
    if issubclass(kind, RingMultihead):
        settings["timeout"] = patience()
    # made on the CPU, where a seed gives the same weights everywhere
    return kind(16, 4, pattern=pattern, **{"dtype": torch.float64, **settings}).to(here())


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(here())


def equal_to_one_process(rank: int, world: int, setting: str, kind: str = "blocks") -> None:
    of_one, of_several, more = KINDS[kind]
    group, settings = dist.group.WORLD, SETTINGS[setting] | more
    alone_settings = {name: value for name, value in settings.items() if name != "head_steps"}
    padding = PADDING.to(here())
    for index, (call, options) in enumerate(CALLS.items()):
        options = {name: x.to(here()) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        pattern = (SHARED, PER_HEAD)[(index + len(setting)) % 2]
        layout = ("contiguous", "zigzag", balanced_layout(pattern, N, world, 4, is_causal=True))[index]
        alone = make_layer(of_one, pattern, **alone_settings)
        spread = make_layer(of_several, pattern, group=group, layout=layout, **settings)
        rows = 1 if call == "documents" else 2
        x, value, dout = draw(rows, N, 16), draw(rows, N, 16, seed=2), draw(rows, N, 16, seed=3)
        x.requires_grad_()
        # equal seeds on all processes, and on one, draw equal dropout
        torch.manual_seed(index)
        expected = alone(x, None, value, **options)[0]
        grads = torch.autograd.grad(expected, [x, *alone.parameters()], dout)
        wanted = shard_sequence(group, [expected, grads[0]], [1, 1], layout=layout)
        part, dpart, value, mask = (t.detach() for t in shard_sequence(group, [x, dout, value, padding], [1] * 4, layout=layout))
        given = {**options, "key_padding_mask": mask} if call == "padding" else options
        torch.manual_seed(index)
        got, weights = spread(part.requires_grad_(), None, value, seq_len=N if call == "causal" else None, **given)
        assert weights is None
        shares = torch.autograd.grad(got, [part, *spread.parameters()], dpart)
        torch.testing.assert_close([got, shares[0]], wanted, atol=1e-10, rtol=1e-8)
        for share, whole in zip(shares[1:], grads[1:], strict=True):
            share = share.contiguous()
            dist.all_reduce(share)
            torch.testing.assert_close(share, whole, atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_processes_give_what_one_gives(kind: str, setting: str) -> None:
    """A setting of one kind on two processes, of the other kind on three."""
    world = 2 + (list(SETTINGS).index(setting) + list(KINDS).index(kind)) % 2
    pool_of(world).run(equal_to_one_process, setting, kind)


def in_the_ecosystem(rank: int, world: int, kind: str = "blocks") -> None:
    of_one, of_several, more = KINDS[kind]
    alone, spread = make_layer(of_one, rotary=True, **more), make_layer(of_several, rotary=True, **more)
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.add_(draw(*parameter.shape) / 4)
    assert spread.load_state_dict(alone.state_dict(), strict=True) and alone.load_state_dict(spread.state_dict(), strict=True)
    x, want = shard_sequence(None, [draw(2, N, 16), alone(draw(2, N, 16), is_causal=True)[0]], [1, 1])
    for module in (spread, copy.deepcopy(spread), pickle.loads(pickle.dumps(spread))):
        torch.testing.assert_close(module(x, is_causal=True, seq_len=N)[0], want, atol=1e-10, rtol=1e-8)
    torch._dynamo.reset()
    fast = torch.compile(spread, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fast(x, is_causal=True, seq_len=N)[0], want, atol=1e-10, rtol=1e-8)
    with pytest.raises(Exception, match=r"seq_len is None inside torch\.compile"):
        fast(x, is_causal=True)
    # refused on every process, none waits
    with pytest.raises(ValueError, match=f"a contiguous sequence of {N + world} has"):
        spread(x, seq_len=N + world)
    with pytest.raises(ValueError, match="rows and k has"):
        spread(x, x[:, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_copies_compilation_and_refusals_on_processes(kind: str) -> None:
    pool_of(2).run(in_the_ecosystem, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_one_process_is_the_multihead_module_to_the_bit(layout: str, kind: str) -> None:
    of_one, of_several, more = KINDS[kind]
    x, results = draw(2, N, 16).requires_grad_(), []
    settings: dict[str, Any] = {"rotary": True, "num_kv_heads": 2, "dropout": 0.2}
    for make, where in ((of_one, {}), (of_several, {"layout": layout})):
        module = make_layer(make, **settings, **more, **where)
        torch.manual_seed(3)
        out = module(x, is_causal=True)[0]
        results.append([out, *torch.autograd.grad(out.sin().sum(), [x, *module.parameters()])])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("kind", "name"), [("blocks", "block_sparse"), ("union", "block_sparse_dilated")])
def test_by_its_kind_and_its_repr(kind: str, name: str) -> None:
    settings: dict[str, Any] = {"embed_dim": 16, "num_heads": 4, "sparsity_ratio": 0.3, "sparsity": "local", "rotary": True}
    of_one, of_several, more = KINDS[kind]
    assert type(create_attention(f"multihead_{name}", **settings, **more)) is of_one
    layer = create_attention(f"ring_multihead_{name}", **settings, **more)
    assert type(layer) is of_several
    out, _ = layer(torch.zeros(1, 200, 16), is_causal=True)
    assert out.shape == (1, 200, 16)
    text = repr(layer)
    assert "rotary_base=10000.0" in text and f"{type(layer.attention).__name__}(" in text and "one process" in text


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_work_is_refused_at_construction(kind: str) -> None:
    _, of_several, more = KINDS[kind]
    for settings, text in (
        ({"layout": "striped"}, "layout is 'striped'"),
        ({"pattern": TopBlocks(1)}, "chosen by content"),
        ({"pattern": None}, "neither given"),
        ({"head_steps": 0}, "head_steps is 0"),
        ({"timeout": 0}, "timeout is 0"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3"),
        ({"xpos_scale_base": 512.0}, "use rotary=True"),
    ):
        with pytest.raises(ValueError, match=text):
            of_several(16, 4, **{"pattern": SHARED, **more, **settings})


def test_offsets_of_branches_are_one_for_each_head() -> None:
    for make in KINDS["union"][:2]:
        with pytest.raises(ValueError, match="2 integers per branch for 4 heads"):
            make(16, 4, [16], [1], SHARED, head_offsets=[[0, 0]])
