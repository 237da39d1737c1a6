"""Norm, activation, linear layers and dropout that keep little for the backward: against the layers one by one, in every dtype."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from dilated_attention.functional import fused_layers
from dilated_attention.functional.fused_layers import add_dropped, linear_layers, plain_layers
from dilated_attention.models import LongNetConfig, LongNetEncoder, blocks
from dilated_attention.pattern import LocalWindow
from tests.helpers.forms import Looks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# where there is a GPU, its suite runs these tests on it
pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")
ACTIVATIONS = (None, "gelu", "relu", "silu", "swiglu")
RECIPES = [pair for pair in itertools.product(ACTIVATIONS, ("none", "layer", "rms")) if pair != (None, "none")]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels, interpreted where there is no GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(fused_layers, "_forced", True)


class Layers(nn.Module):
    """A norm and two linear layers, as a block has them."""

    def __init__(self, norm: str, K: int = 24, widths: tuple[int, ...] = (16, 40), *, bias: bool = True, **factory: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        factory = {"device": DEVICE} | factory
        makers: dict[str, Callable[..., nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
        self.norm = makers[norm](K, eps=1e-5, **factory) if norm in makers else None
        self.linears = nn.ModuleList(nn.Linear(K, width, bias=bias, **factory) for width in widths)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)

    def forward(self, x: torch.Tensor, activation: str | None = None, gate: torch.Tensor | None = None) -> list[torch.Tensor]:
        return linear_layers(x, tuple(self.linears), norm=self.norm, activation=activation, gate=gate)


def results(layers: nn.Module, x: torch.Tensor, activation: str | None, forced: bool, low: torch.dtype | None = None) -> list[torch.Tensor]:
    """Outputs, the gradients of x and gate, those of the parameters that need one; ``low``: under autocast."""
    generator = torch.Generator().manual_seed(1)
    x = x.detach().clone().requires_grad_()
    gate = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x).requires_grad_() if activation == "swiglu" else None
    with torch.autocast(DEVICE, low, enabled=low is not None), plain_layers(forced=forced):
        ys = layers(x, activation, gate)
    dys = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in ys]
    leaves = [x, *([] if gate is None else [gate]), *layers.parameters()]
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, leaves, dys)]


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The worst relative error; what is 0 but for rounding, as a key bias's gradient, counts by the largest of all."""
    floor = 1e-3 * max(float(b.detach().double().norm()) for b in expected) + 1e-30
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape
        worst = max(worst, float((a.double() - b.double()).detach().norm()) / max(float(b.detach().double().norm()), floor))
    return worst


@pytest.mark.parametrize(("rows", "K", "bias"), [(99, 24, True), (99, 24, False), (7, 1100, True), (0, 24, True)])
@pytest.mark.parametrize(("activation", "norm"), RECIPES)
def test_equal_to_the_layers_one_by_one(activation: str | None, norm: str, rows: int, K: int, bias: bool) -> None:
    layers = Layers(norm, K, bias=bias)
    # a mean far from 0, both tails of an activation, and rows that do not fill a tile
    x = 2 * torch.randn(1, rows, K, device=DEVICE) + 3
    x[..., ::3] -= 6
    assert error(results(layers, x, activation, True), results(layers, x, activation, False)) < 5e-6


@pytest.mark.parametrize("K", [24] if DEVICE == "cpu" else [24, 768, 1000, 3072, 4096])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize(("activation", "norm"), RECIPES)
def test_no_worse_in_bfloat16(activation: str | None, norm: str, autocast: bool, K: int) -> None:
    """Against float64: rounding once loses no more than rounding after each layer; dtypes are those of the plain layers."""
    kind = torch.float32 if autocast else torch.bfloat16
    layers, x = Layers(norm, K, dtype=kind), torch.randn(300, K, device=DEVICE).bfloat16().to(kind)
    found, plain = (results(layers, x, activation, forced, torch.bfloat16 if autocast else None) for forced in (True, False))
    # Triton's interpreter truncates to bfloat16
    slack = 2e-3 if DEVICE == "cuda" else 1e-2
    for mine, theirs, true in zip(found, plain, results(layers.double(), x.double(), activation, False), strict=True):
        assert mine.dtype is theirs.dtype
        assert (mine.double() - true).norm() <= 1.2 * (theirs.double() - true).norm() + slack * true.norm()


@pytest.mark.parametrize(
    "frozen", [(), ("norm",), ("linears",), ("norm", "linears"), ("linears.0.bias", "linears.1.bias"), ("x",), ("x", "norm")]
)
def test_frozen_parts_and_unused_outputs(frozen: tuple[str, ...]) -> None:
    layers, grads = Layers("layer"), []
    x = torch.randn(33, 24, device=DEVICE)
    for name, parameter in layers.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen or "-"))
    for forced in (True, False):
        leaf = x.clone().requires_grad_("x" not in frozen)
        leaves = [t for t in (leaf, *layers.parameters()) if t.requires_grad]
        with plain_layers(forced=forced):
            grads.append(torch.autograd.grad(layers(leaf)[0].square().sum(), leaves, allow_unused=True))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, torch.zeros_like(found) if expected is None else expected, rtol=1e-4, atol=1e-4)


def config(**changes: Any) -> LongNetConfig:
    values: dict[str, Any] = {"embed_dim": 32, "num_layers": 2, "num_heads": 4, "segment_lengths": (16, 64), "dilation_rates": (1, 2),
                              "is_causal": False, "dropout": 0.0, "positions": "none"}  # fmt: skip
    return LongNetConfig(**values | changes)


def gradients(model: nn.Module, x: torch.Tensor, forced: bool = True) -> list[torch.Tensor]:
    """The output, and the gradients of x and of what it is computed from."""
    x = x.detach().clone().requires_grad_()
    with plain_layers(forced=forced):
        y = model(x)
        dy = torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y).to(y)
        leaves = [leaf for leaf in (x, *model.parameters()) if leaf.requires_grad]
        grads = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    return [y.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"ffn": "swiglu", "norm": "rms_norm", "qk_norm": True, "bias": False}, {"sub_norm": False}], ids=str
)
def test_dropout_repeats_under_a_seed_and_a_checkpoint_compiled_too(changes: dict[str, Any]) -> None:
    x = torch.randn(4, 30, 32, device=DEVICE)
    model = LongNetEncoder(config(dropout=0.3, drop_path=0.4, **changes)).to(DEVICE)

    def run(seed: int, layer: nn.Module = model) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return gradients(layer, x)

    first = run(11)
    assert error(run(11), first) == 0 and error(run(12)[:1], first[:1]) > 1e-2
    torch._dynamo.reset()
    # its blocks are alike, and compile alike
    block = model.blocks[0]
    assert error(run(11, torch.compile(block, fullgraph=True, backend="aot_eager")), run(11, block)) < 5e-6
    model.checkpoint_activations = True
    assert error(run(11), first) < 1e-6
    model.eval()
    assert error(gradients(model, x), gradients(model, x, forced=False)) < 1e-5
    if not changes:
        torch._dynamo.reset()
        assert error(gradients(torch.compile(block, fullgraph=True, backend="inductor"), x), gradients(block, x)) < 2e-5


@pytest.mark.parametrize(("dropout", "autocast"), [(0.0, False), (0.25, False), (0.25, True)])
def test_what_a_block_keeps(dropout: float, autocast: bool) -> None:
    """x, q, k, v, out, x between the halves, and four times as much inside the feed-forward layer: 10 of (N, E); under autocast in 16 bits,
    with the weights. Plain layers keep more than 20, and masks."""
    N, E, M = 320, 64, 3
    shape = {"embed_dim": E, "num_layers": M, "segment_lengths": (64, 256), "dropout": dropout, "drop_path": dropout, "final_norm": False}
    model = LongNetEncoder(config(**shape)).to(DEVICE)
    x = torch.randn(1, N, E, device=DEVICE, requires_grad=True)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def saved() -> int:
        storages: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with saved_tensors_hooks(pack, lambda t: t), torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            y = model(x)
        del y
        return sum(size for place, size in storages.items() if place not in own)

    # lse of 4 heads, statistics of four norms, seeds
    unit, small = N * E * (2 if autocast else 4), N * 4 * (4 + 4 * 2) + 1024
    weights = autocast * 2 * sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert saved() <= M * (10 * unit + small) + weights
    with plain_layers():
        assert saved() > M * 20 * unit


@pytest.mark.parametrize("positions", ["rotary", "xpos"])
def test_a_checkpointed_block_keeps_no_table_of_its_rotation(positions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[weakref.ref[torch.Tensor]] = []
    turn = blocks.turn

    def watched(x: torch.Tensor, table: Any, *args: Any) -> torch.Tensor:
        tables.extend(map(weakref.ref, table))
        return turn(x, table, *args)

    monkeypatch.setattr(blocks, "turn", watched)
    model = LongNetEncoder(config(positions=positions)).to(DEVICE)
    model.checkpoint_activations = True
    y = model(torch.randn(1, 40, 32, device=DEVICE, requires_grad=True))
    assert tables and all(table() is None for table in tables)
    y.sum().backward()


def test_other_dtypes_and_transforms_are_those_of_the_plain_layers() -> None:
    """float32 norms of a bfloat16 model, float64 under autocast: what the plain layers do, refusals included."""
    layers, x = Layers("layer"), torch.randn(3, 24, device=DEVICE)
    jacobian = torch.func.jacrev(lambda x: layers(add_dropped(x, x, path=torch.ones(3, device=DEVICE)))[0])(x)
    assert jacobian.shape == (3, 16, 3, 24)
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(layers(forward_ad.make_dual(x, x))[0]).tangent is not None
    with torch.autocast(DEVICE, torch.bfloat16):
        assert Layers("layer", dtype=torch.float64)(x.double())[0].dtype is torch.float64
    layers.to(torch.bfloat16)
    layers.norm.float()
    with pytest.raises(RuntimeError, match="type"):
        layers(x)


def test_a_dispatch_mode_sees_the_kernels() -> None:
    """As selective activation checkpointing needs it; in eager mode there is no op, which takes less of Python's time."""
    seen: list[str] = []
    layers, x = Layers("rms"), torch.randn(3, 24, device=DEVICE, requires_grad=True)
    with Looks(lambda func, _: seen.append(str(func))):
        add_dropped(x, x, dropout=0.5)
        sum(y.sum() for y in layers(x)).backward()
    assert {f"dilated_attention.{name}.default" for name in ("prepare", "prepare_backward", "add_dropped")} <= set(seen)


@pytest.mark.parametrize("what", ["layers", "none", "rotary", "xpos"])
def test_second_derivatives_are_refused_with_a_way_out_and_gradients_are_mapped(what: str) -> None:
    torch.manual_seed(0)
    if what == "layers":
        layers, x = Layers("layer"), torch.randn(5, 24, device=DEVICE, requires_grad=True)
        call, leaves = lambda: add_dropped(layers(x)[0], torch.ones(5, 16, device=DEVICE), dropout=0.5), [x, layers.linears[0].weight]
    else:
        block = LongNetEncoder(config(positions=what)).to(DEVICE).blocks[0]
        x = torch.randn(1, 12, 32, device=DEVICE, requires_grad=True)
        call, leaves = lambda: block(x), [x, *block.parameters()]
    with pytest.raises(NotImplementedError, match=r"no second derivative.*plain_layers"):
        torch.autograd.grad(call().sum(), x, create_graph=True)
    y = call()
    dys = torch.randn(3, *y.shape, device=DEVICE)
    mapped = torch.func.vmap(lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True))(dys)
    each = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in dys]
    assert error(list(mapped), [torch.stack(grads) for grads in zip(*each, strict=True)]) < 2e-5
    if what == "layers":
        with plain_layers():
            (grad,) = torch.autograd.grad(layers(x)[0].square().sum(), x, create_graph=True)
        grad.sum().backward()


def test_results_may_be_changed_in_place() -> None:
    """They are tensors of their own, no views of a function's output."""
    torch.manual_seed(0)
    block, x = LongNetEncoder(config()).to(DEVICE).blocks[0], torch.randn(1, 40, 32, device=DEVICE)
    changed = []
    for forced in (True, False):
        with plain_layers(forced=forced):
            out, _ = block.attention(x)
            out += x
            out = block.ffn(out).mul_(2)
        changed.append([*torch.autograd.grad(out.square().sum(), list(block.attention.parameters()))])
    assert error(*changed) < 1e-4


def kept(seed: int, count: int, p: float) -> torch.Tensor:
    """Which elements SplitMix64 (Steele, Lea, Flood 2014) keeps, as Python's integers compute it."""
    mask, word = [], 2**64 - 1
    for i in range(1, count + 1):
        x = seed + i * 0x9E3779B97F4A7C15 & word
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ x >> 27) * 0x94D049BB133111EB & word
        mask.append((x ^ x >> 31) >> 33 >= int(p * 2**31))
    return torch.tensor(mask, device=DEVICE)


@pytest.mark.parametrize("seed", [0, 1, 2**62 - 1, 1234567890123])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_and_its_backward_take_one_mask(seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (torch.randn(3, 7, 37, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(2))
    mask, path = kept(seed, y.numel(), 0.25).view(y.shape), torch.tensor([0.0, 1.25, 1.25], device=DEVICE)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(seed, device=DEVICE))
    for factors in (None, path, path[:, None].expand(3, 7)):
        out = add_dropped(x, y, dropout=0.25, path=factors)
        dx, dy = torch.autograd.grad(out, (x, y), grad := torch.randn_like(out))
        scale = mask / 0.75 * (1 if factors is None else path[:, None, None])
        assert torch.equal(dx, grad)
        torch.testing.assert_close(dy, (grad.double() * scale).to(dtype))
        torch.testing.assert_close(out, (x.double() + y.double() * scale).to(dtype))


BLOCKS: dict[str, dict[str, Any]] = {
    "training": {},
    "autocast": {"autocast": True, "num_kv_heads": 2},
    "bfloat16": {"dtype": torch.bfloat16, "ffn": "relu"},
    "evaluation": {"train": False, "norm": "rms_norm", "bias": False},
    "documents": {"cu_seqlens": (0, 7, 20, 50), "autocast": True},
    "TorchScale's": {"mixture_grad": "detached", "head_offsets": "blocked", "tail": "zero_keys", "attention_dropout": 0.2},
    "blocks": {"attention": "block_sparse", "block_pattern": LocalWindow(16), "segment_lengths": (), "dilation_rates": ()},
    "checkpointed": {"checkpoint": True, "autocast": True},
    "no sub_norm": {"sub_norm": False},
    # what it does not compute
    "qk_norm": {"qk_norm": True},
    "rotary": {"positions": "rotary", "num_kv_heads": 2, "checkpoint": True},
    "rotary documents": {"positions": "rotary", "cu_seqlens": (0, 7, 20, 50), "dtype": torch.bfloat16},
    "xpos": {"positions": "xpos", "autocast": True},
    "frozen norms": {"frozen": ("norm",)},
    "frozen attention": {"frozen": ("attention", "tile"), "autocast": True},
    "frozen all but the last": {"frozen": ("blocks.0", "attention", "up", "ffn_norm", "x")},
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_in_one_function_equals_its_layers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and all gradients, which are the same tensors' and bit-equal on a CPU."""
    changes = {"dropout": 0.2, "drop_path": 0.3} | BLOCKS[kind]
    autocast, packed, frozen = changes.pop("autocast", False), changes.pop("cu_seqlens", None), changes.pop("frozen", ())
    dtype, train, checkpoint = changes.pop("dtype", None), changes.pop("train", True), changes.pop("checkpoint", False)
    # what one block leaves to the other
    layers = 2 if frozen or checkpoint else 1
    torch.manual_seed(0)
    model = LongNetEncoder(config(num_layers=layers, **changes), device=DEVICE, dtype=dtype).train(train)
    model.checkpoint_activations = checkpoint
    for name, parameter in model.named_parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
        parameter.requires_grad_(not any(part in name for part in frozen))
    x = torch.randn(2 if packed is None else 1, 50, 32, device=DEVICE, dtype=dtype).requires_grad_("x" not in frozen)
    cu_seqlens = None if packed is None else torch.tensor(packed, dtype=torch.int32, device=DEVICE)
    leaves, real = [leaf for leaf in (x, *model.parameters()) if leaf.requires_grad], fused_layers.fused_block
    done, found = [], []
    for block in (lambda *args: done.append(real(*args)) or done[-1], lambda *args: None):
        monkeypatch.setattr(blocks, "fused_block", block)
        torch.manual_seed(5)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            y = model(x, cu_seqlens=cu_seqlens)
        dy = torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y).to(y)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, dy, allow_unused=True)])
    assert [grad is None for grad in found[0]] == [grad is None for grad in found[1]]
    one, apart = ([grad for grad in grads if grad is not None] for grads in found)
    assert sum(y is not None for y in done) == (0 if kind == "qk_norm" else layers)
    assert DEVICE != "cpu" or all(map(torch.equal, one, apart))
    assert error(one, apart) < (1e-5 if dtype is None and not autocast else 0.05)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hooked": lambda block: block.ffn.up.register_forward_hook(lambda module, x, y: 2 * y),
    "subclassed": lambda block: setattr(block.ffn, "up", Doubled(32, block.ffn.up.out_features, device=DEVICE)),
    "its own forward": lambda block: setattr(block.attention.v_proj, "forward", lambda x: torch.zeros_like(x)),
    "replaced": lambda block: setattr(block, "attention_norm", nn.Identity()),
    "hooked attention": lambda block: block.attention.attention.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:])),
    "hooked dropout": lambda block: block.dropout.register_forward_hook(lambda module, x, y: 2 * y),
    "gradient hook": lambda block: block.ffn.register_full_backward_hook(lambda module, dx, dy: tuple(2 * grad for grad in dx)),
    "swapped feed-forward layer": lambda block: setattr(block, "ffn", nn.Sequential(nn.Linear(32, 32, device=DEVICE))),
    "one bias": lambda block: setattr(block.attention.q_proj, "bias", None),
    "float64": lambda block: block.double(),
    "other weights": lambda block: block.ffn.up.weight.data.mul_(2),
    "frozen": lambda block: block.ffn.up.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_sees_at_its_next_call_what_was_changed(change: str) -> None:
    """What is no plain layer is called; nothing that a call has looked up stands for the next one."""
    torch.manual_seed(0)
    block, x = LongNetEncoder(config()).to(DEVICE).blocks[0], torch.randn(1, 40, 32, device=DEVICE)
    before = gradients(block, x)
    CHANGES[change](block)
    found, expected = (gradients(block, x.to(block.ffn_norm.weight.dtype), forced) for forced in (True, False))
    assert error(found, expected) < 1e-4
    assert len(found) != len(before) or change == "float64" or any(error([a], [b]) > 1e-3 for a, b in zip(found, before, strict=True))
