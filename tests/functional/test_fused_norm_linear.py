"""Norm, activation and linear layers that keep little for the backward: against the layers one by one, in every dtype and on every path."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention.functional import fused_layers, fused_norm_linear, fused_norm_linear_torch
from dilated_attention.functional.fused_layers import linear_layers, plain_layers
from dilated_attention.functional.residual_dropout import add_dropped, add_dropped_op, keep_mask, threshold_of
from dilated_attention.models import LongNetConfig, LongNetEncoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACTIVATIONS = ("none", "gelu", "relu", "silu", "swiglu")
NORMS = ("none", "layer", "rms")
RECIPES = [pair for pair in itertools.product(ACTIVATIONS, NORMS) if pair != ("none", "none")]


class Layers(nn.Module):
    """A norm and two linear layers, as a block has them."""

    def __init__(self, norm: str, K: int = 24, widths: tuple[int, ...] = (16, 40), *, bias: bool = True, **factory: Any) -> None:
        super().__init__()
        makers: dict[str, Callable[..., nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
        self.norm = makers[norm](K, eps=1e-5, **factory) if norm in makers else None
        self.linears = nn.ModuleList(nn.Linear(K, width, bias=bias, **factory) for width in widths)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)

    def forward(self, x: torch.Tensor, activation: str = "none", gate: torch.Tensor | None = None) -> list[torch.Tensor]:
        return linear_layers(x, tuple(self.linears), norm=self.norm, activation=None if activation == "none" else activation, gate=gate)


def results(layers: nn.Module, x: torch.Tensor, activation: str, *, plain: bool, autocast: torch.dtype | None = None) -> list[torch.Tensor]:
    """Outputs, the gradients of x and gate, those of the parameters."""
    generator = torch.Generator().manual_seed(1)
    x = x.detach().clone().requires_grad_()
    gate = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x).requires_grad_() if activation == "swiglu" else None
    with torch.autocast(DEVICE, autocast, enabled=autocast is not None):
        if plain:
            with plain_layers():
                ys = layers(x, activation, gate)
        else:
            ys = layers(x, activation, gate)
    dys = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in ys]
    leaves = [x, *([] if gate is None else [gate]), *layers.parameters()]
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, leaves, dys)]


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The worst relative error; what is 0 but for rounding, as a key bias's gradient, counts by the largest of all."""
    assert len(found) == len(expected)
    floor = 1e-3 * max(float(b.detach().double().norm()) for b in expected) + 1e-30
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape
        worst = max(worst, float((a.double() - b.double()).detach().norm()) / max(float(b.detach().double().norm()), floor))
    return worst


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The Triton kernels, interpreted where there is no GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(fused_norm_linear, "_fused", lambda x: x.dtype is not torch.float64)
    monkeypatch.setattr("dilated_attention.functional.residual_dropout.has_kernels", lambda x: x.dtype is not torch.float64)
    yield


@pytest.mark.parametrize(("activation", "norm"), RECIPES)
def test_gradients_are_those_of_the_formula(activation: str, norm: str) -> None:
    """gradcheck in float64 through the op, chunks of rows included."""
    torch.manual_seed(0)
    layers = Layers(norm, 6, (4, 5), dtype=torch.float64, device=DEVICE)
    x = torch.randn(2, 3, 6, dtype=torch.float64, device=DEVICE, requires_grad=True)
    gate = torch.randn_like(x, requires_grad=True) if activation == "swiglu" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_norm_linear_torch, "_CHUNK_ROWS", 4)
        assert torch.autograd.gradcheck(lambda x, gate, *_: tuple(layers(x, activation, gate)), (x, gate, *layers.parameters()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("activation", "norm"), RECIPES)
def test_equal_to_the_layers_one_by_one(activation: str, norm: str, bias: bool) -> None:
    torch.manual_seed(0)
    layers = Layers(norm, bias=bias, device=DEVICE)
    x = torch.randn(2, 700, 24, device=DEVICE)
    found = results(layers, x, activation, plain=False)
    assert error(found, results(layers, x, activation, plain=True)) < 5e-6


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize(("activation", "norm"), RECIPES)
def test_no_worse_in_bfloat16(activation: str, norm: str, autocast: bool) -> None:
    """Against float64: rounding once loses no more than rounding after each layer, dtypes are those of the plain layers."""
    torch.manual_seed(0)
    layers = Layers(norm, device=DEVICE, dtype=torch.float32 if autocast else torch.bfloat16)
    x = torch.randn(300, 24, device=DEVICE, dtype=torch.bfloat16).to(torch.float32 if autocast else torch.bfloat16)
    low = torch.bfloat16 if autocast else None
    found = results(layers, x, activation, plain=False, autocast=low)
    plain = results(layers, x, activation, plain=True, autocast=low)
    exact = results(layers.double(), x.double(), activation, plain=True)
    for mine, theirs, true in zip(found, plain, exact, strict=True):
        assert mine.dtype is theirs.dtype
        scale = true.norm()
        assert (mine.double() - true).norm() / scale <= 1.2 * (theirs.double() - true).norm() / scale + 2e-3


@pytest.mark.parametrize("K", [24, 48, 1100])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_equal_plain_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, norm: str, K: int) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    layers = Layers(norm, K, (5, 8), device=DEVICE)
    # a mean far from 0 and rows that do not fill a tile
    x = torch.randn(7 if K > 1000 else 99, K, device=DEVICE) + 3
    for activation in ACTIVATIONS:
        both = []
        for fused in (False, True):
            monkeypatch.setattr(fused_norm_linear, "_fused", lambda x, fused=fused: fused)
            both.append(results(layers, x, activation, plain=False, autocast=None if dtype is torch.float32 else dtype))
        assert error(both[1], both[0]) < (5e-6 if dtype is torch.float32 else 2e-2), activation


def test_kernels_of_frozen_parts(kernels: None) -> None:
    """Only what is asked for: frozen layers, a frozen norm, an input without a gradient; an output that nothing used."""
    torch.manual_seed(0)
    x = torch.randn(33, 24, device=DEVICE)
    for frozen in ((), ("norm",), ("linears",), ("norm", "linears"), ("linears.0.bias", "linears.1.bias"), ("x",), ("x", "norm")):
        layers = Layers("layer", device=DEVICE)
        for name, parameter in layers.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(frozen)))
        grads = []
        for plain in (False, True):
            leaf = x.clone().requires_grad_("x" not in frozen)
            leaves = [t for t in (leaf, *layers.parameters()) if t.requires_grad]
            if plain:
                with plain_layers():
                    used = layers(leaf)[0]
            else:
                used = layers(leaf)[0]
            grads.append(torch.autograd.grad(used.square().sum(), leaves, allow_unused=True))
        for found, expected in zip(*grads, strict=True):
            torch.testing.assert_close(found, torch.zeros_like(found) if expected is None else expected, rtol=1e-4, atol=1e-4)


def test_no_rows(kernels: None) -> None:
    layers = Layers("layer", device=DEVICE)
    x = torch.randn(0, 24, device=DEVICE, requires_grad=True)
    ys = layers(x)
    assert [y.shape for y in ys] == [(0, 16), (0, 40)]
    sum(y.sum() for y in ys).backward()
    assert all(p.grad is not None and not p.grad.any() for p in layers.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_opcheck(norm: str) -> None:
    layers = Layers(norm, 8, (4, 6), device=DEVICE)
    x, gate = (torch.randn(3, 8, device=DEVICE, requires_grad=True) for _ in range(2))
    scale = None if layers.norm is None else layers.norm.weight
    shift = layers.norm.bias if norm == "layer" else None
    weights, biases = [linear.weight for linear in layers.linears], [linear.bias for linear in layers.linears]
    torch.library.opcheck(
        fused_norm_linear.norm_linear_op, (x, gate, scale, shift, weights, biases, "swiglu", norm, 1e-5, torch.float32, False)
    )
    if norm != "none":
        arguments = (x, None, scale, shift, weights, biases, "none", norm, 1e-5, torch.bfloat16, True)
        torch.library.opcheck(fused_norm_linear.norm_linear_op, arguments, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_opcheck_of_dropout() -> None:
    x, y = (torch.randn(3, 8, device=DEVICE, requires_grad=True) for _ in range(2))
    path = torch.rand(3, device=DEVICE)
    seed = torch.tensor(5, device=DEVICE)
    torch.library.opcheck(add_dropped_op, (x, y, seed, path, 0.3, torch.float32))
    torch.library.opcheck(add_dropped_op, (None, x, seed, path, 0.3, torch.float32))


def config(**changes: Any) -> LongNetConfig:
    values: dict[str, Any] = {"embed_dim": 32, "num_layers": 2, "num_heads": 4, "segment_lengths": (16, 64), "dilation_rates": (1, 2),
                              "is_causal": False, "dropout": 0.0, "positions": "none"}  # fmt: skip
    return LongNetConfig(**values | changes)


def gradients(model: nn.Module, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    y = model(x, **options)
    grads = torch.autograd.grad(y, [x, *model.parameters()], torch.linspace(-1, 1, y.numel(), device=x.device).view_as(y).to(y.dtype))
    return [y.detach(), *grads]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ffn": "swiglu", "norm": "rms_norm", "qk_norm": True, "bias": False},
        {"sub_norm": False, "positions": "rotary"},
        {"ffn": "relu", "positions": "rotary"},
    ],
    ids=str,
)
def test_a_stack_equals_its_plain_layers(changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = LongNetEncoder(config(**changes)).to(DEVICE)
    x = torch.randn(2, 50, 32, device=DEVICE)
    found = gradients(model, x)
    with plain_layers():
        expected = gradients(model, x)
    assert error(found, expected) < 5e-6
    if changes.get("positions") != "rotary":
        torch._dynamo.reset()
        # its blocks are alike, and compile alike
        block = model.blocks[0]
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        # on a GPU the attention's sums may come in another order
        assert error(gradients(compiled, x), gradients(block, x)) <= (0 if DEVICE == "cpu" else 5e-6)
    model.checkpoint_activations = True
    assert error(gradients(model, x), found) < 1e-6


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of what autograd keeps, each storage once, without parameters."""
    storages: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in own:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    del y
    return sum(storages.values())


@pytest.mark.parametrize(("dropout", "autocast"), [(0.0, False), (0.25, False), (0.25, True)])
def test_what_a_block_keeps(dropout: float, autocast: bool) -> None:
    """x, q, k, v, out, x between the halves, and four times as much inside the feed-forward layer: 10 of (N, E), in 16 bits under autocast.
    Plain layers keep more than 20, and masks."""
    torch.manual_seed(0)
    N, E, M = 640, 64, 3
    shape = {"embed_dim": E, "num_layers": M, "segment_lengths": (64, 256), "dropout": dropout, "drop_path": dropout, "final_norm": False}
    model = LongNetEncoder(config(**shape)).to(DEVICE)
    x = torch.randn(1, N, E, device=DEVICE, requires_grad=True)
    unit = N * E * (2 if autocast else 4)
    # lse of 4 heads, statistics of four norms, seeds
    small = N * 4 * (4 + 4 * 2) + 1024
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        assert saved_bytes(model, x) <= M * (10 * unit + small)
        with plain_layers():
            assert saved_bytes(model, x) > M * 20 * unit


def test_what_is_no_plain_layer_is_called() -> None:
    """A hook, a replaced layer, a parametrisation, an instance's own forward: all run, and the result is that of the plain layers."""
    torch.manual_seed(0)
    x = torch.randn(1, 40, 32)

    def hooked(model: LongNetEncoder) -> list[str]:
        calls: list[str] = []
        block = model.blocks[0]
        for name, module in block.named_modules():
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
        return calls

    model = LongNetEncoder(config())
    expected = gradients(model, x)
    calls = hooked(model)
    assert error(gradients(model, x), expected) < 5e-6
    assert set(calls) == {name for name, _ in model.blocks[0].named_modules()}

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = LongNetEncoder(config())
    block = model.blocks[0]
    doubled = Doubled(32, block.ffn.up.out_features)
    doubled.load_state_dict(block.ffn.up.state_dict())
    block.ffn.up = doubled
    with plain_layers():
        expected = gradients(model, x)
    found = gradients(model, x)
    assert error(found, expected) < 5e-6
    block.ffn.up = nn.Linear(32, block.ffn.up.out_features)
    block.ffn.up.load_state_dict(doubled.state_dict())
    assert error([gradients(model, x)[0]], [found[0]]) > 1e-3

    nn.utils.parametrizations.weight_norm(block.attention.q_proj)
    block.attention.v_proj.forward = lambda x: torch.zeros_like(x)
    with plain_layers():
        expected = gradients_of_some(model, x)
    assert error(gradients_of_some(model, x), expected) < 5e-6
    block.ffn = nn.Identity()
    block.attention_norm = nn.Identity()
    with plain_layers():
        expected = gradients_of_some(model, x)
    assert error(gradients_of_some(model, x), expected) < 5e-6


def gradients_of_some(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.detach().requires_grad_()
    y = model(leaf)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaf)]


def test_mixed_dtypes_are_left_to_torch() -> None:
    """float32 norms of a bfloat16 model, float64 under autocast: what the plain layers do, refusals included."""
    layers = Layers("layer").to(torch.bfloat16)
    layers.norm.float()
    with pytest.raises(RuntimeError, match="type"):
        layers(torch.randn(3, 24))
    wide = Layers("layer", dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(3, 24, dtype=torch.float64)
        found = wide(x)
        with plain_layers():
            expected = wide(x)
    assert error(found, expected) == 0


def test_inference_calls_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "norm_linear", None)
    with torch.no_grad():
        Layers("layer")(torch.randn(3, 24))
    with pytest.raises(TypeError):
        Layers("layer")(torch.randn(3, 24))


def test_a_dispatch_mode_sees_one_operation() -> None:
    """As selective activation checkpointing needs it; in eager mode there is no op, which takes less of Python's time."""
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **kwargs or {})

    layers = Layers("layer")
    x = torch.randn(3, 24, requires_grad=True)
    with Watch():
        layers(add_dropped(x, x, dropout=0.5))
    assert {"dilated_attention.norm_linear.default", "dilated_attention.add_dropped.default"} <= set(seen)
    assert not any("layer_norm" in name for name in seen)


def test_on_meta() -> None:
    layers = Layers("layer", device="meta")
    ys = layers(torch.empty(3, 24, device="meta", requires_grad=True))
    assert [y.shape for y in ys] == [(3, 16), (3, 40)]
    sum(y.sum() for y in ys).backward()


def test_second_derivatives_are_refused() -> None:
    layers = Layers("layer")
    x = torch.randn(3, 24, requires_grad=True)
    (grad,) = torch.autograd.grad(layers(x)[0].sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


def test_flops_are_counted() -> None:
    """As many as torch counts for the layers one by one; the counter's hooks on modules would have those called, so without modules."""
    x, w, v = (torch.randn(rows, 24, requires_grad=True) for rows in (3, 8, 5))
    counted = []
    for lean_ones in (True, False):
        for leaf in (x, x.detach()):
            with FlopCounterMode(display=False) as counter:
                z = leaf if lean_ones else F.rms_norm(leaf, (24,))
                ys = fused_norm_linear.norm_linear(z, [w, v], [], norm="rms") if lean_ones else [F.linear(z, w), F.linear(z, v)]
                sum(y.sum() for y in ys).backward()
            counted.append(counter.get_total_flops())
    # three products for each layer, two without a gradient of x
    assert counted == [3 * 2 * 3 * 24 * 13, 2 * 2 * 3 * 24 * 13] * 2


# dropout and drop path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dropout_and_its_backward_take_one_mask(kernels: None, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, y = (torch.randn(3, 70, 50, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(2))
    path = torch.tensor([0.0, 1.25, 1.25], device=DEVICE)
    for factors in (None, path, path[:, None].expand(3, 70)):
        out = add_dropped(x, y, dropout=0.25, path=factors)
        grad = torch.randn_like(out)
        dx, dy = torch.autograd.grad(out, (x, y), grad)
        assert torch.equal(dx, grad)
        scale = torch.ones(3, device=DEVICE) if factors is None else path
        change = out - x
        kept = change.abs() > 1e-3 * y.abs()
        expected = (grad.double() * scale.view(3, 1, 1) / 0.75).to(dtype)
        torch.testing.assert_close(dy[kept], expected[kept])
        assert not dy[~kept & (y.abs() > 1e-2) & (x.abs() < 1)].any()
        share = (dy[1:] != 0).float().mean().item()
        assert abs(share - 0.75) < 5 * (0.25 * 0.75 / dy[1:].numel()) ** 0.5


def test_kernel_and_torch_draw_one_mask(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.rand(5, 777, device=DEVICE) + 1
    for seed in (0, 1, 2**62 - 1, 1234567890123):
        found = add_dropped_op(None, y, torch.tensor(seed, device=DEVICE), None, 0.3, torch.float32)
        monkeypatch.setattr("dilated_attention.functional.residual_dropout.has_kernels", lambda x: False)
        monkeypatch.setattr("dilated_attention.functional.residual_dropout._CHUNK", 1000)
        expected = add_dropped_op(None, y, torch.tensor(seed, device=DEVICE), None, 0.3, torch.float32)
        monkeypatch.undo()
        torch.testing.assert_close(found, expected)
        monkeypatch.setattr("dilated_attention.functional.residual_dropout.has_kernels", lambda x: True)


def test_masks_are_random() -> None:
    """Shares of kept elements, of kept neighbours, and of agreement between seeds that follow each other, within five deviations."""
    p, n = 0.25, 2**20
    threshold = threshold_of(p)
    masks = [keep_mask(torch.tensor(seed), 0, n, threshold).double() for seed in (0, 1, 2, 2**40)]
    deviation = (p * (1 - p) / n) ** 0.5
    for mask in masks:
        assert abs(mask.mean() - (1 - p)) < 5 * deviation
        for lag in (1, 2, 3, 64, 768, 2**16):
            correlation = ((mask[lag:] - (1 - p)) * (mask[:-lag] - (1 - p))).mean() / (p * (1 - p))
            assert abs(correlation) < 5 / n**0.5 * 1.1
    for a, b in itertools.combinations(masks, 2):
        assert abs(((a - (1 - p)) * (b - (1 - p))).mean() / (p * (1 - p))) < 5 / n**0.5 * 1.1


def test_dropout_repeats_under_a_seed_and_a_checkpoint() -> None:
    model = LongNetEncoder(config(dropout=0.3, drop_path=0.4)).to(DEVICE)
    x = torch.randn(4, 30, 32, device=DEVICE)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(11)
        return gradients(model, x)

    first = run()
    assert error(run(), first) == 0
    model.checkpoint_activations = True
    assert error(run(), first) < 1e-6
    torch.manual_seed(12)
    assert error(gradients(model, x)[:1], first[:1]) > 1e-2
    model.eval()
    with plain_layers():
        expected = gradients(model, x)
    assert error(gradients(model, x), expected) < 5e-6


def test_drop_path_of_packed_documents() -> None:
    """A dropped document leaves a block as it came."""
    torch.manual_seed(0)
    model = LongNetEncoder(config(num_layers=2, drop_path=0.5, final_norm=False)).to(DEVICE)
    cu_seqlens = torch.tensor([0, 7, 20, 50], dtype=torch.int32, device=DEVICE)
    block = model.blocks[1]
    x = torch.randn(1, 50, 32, device=DEVICE)
    same = set()
    for seed in range(24):
        torch.manual_seed(seed)
        y = block(x, cu_seqlens=cu_seqlens)
        unchanged = tuple(bool(torch.equal(a, b)) for a, b in zip(x.tensor_split((7, 20), 1), y.tensor_split((7, 20), 1), strict=True))
        same.add(unchanged)
    # both halves of the block are dropped for a document in a quarter of the draws
    assert len(same) > 2


def test_checkpoint_around_a_layer(kernels: None) -> None:
    layers = Layers("layer", device=DEVICE)
    x = torch.randn(50, 24, device=DEVICE, requires_grad=True)
    direct = torch.autograd.grad(sum(y.square().sum() for y in layers(x)), x)
    again = torch.autograd.grad(sum(y.square().sum() for y in checkpoint(layers, x, use_reentrant=False)), x)
    torch.testing.assert_close(direct, again)


@pytest.mark.gpu
@pytest.mark.no_poison
def test_memory_of_an_encoder_on_a_gpu() -> None:
    """10 units of (N, E) a block at bfloat16, counted by the allocator, at GigaPath's shape and 8,192 tiles."""
    N, E, M = 8192, 768, 4
    model = LongNetEncoder(
        config(embed_dim=E, num_layers=M, num_heads=16, ffn_dim=4 * E, segment_lengths=(1024, 5792), dropout=0.25, final_norm=False),
        device="cuda",
        dtype=torch.bfloat16,
    )
    x = torch.randn(1, N, E, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = model(x)
    kept = torch.cuda.memory_allocated() - before
    assert kept <= M * 10.3 * N * E * 2, kept / (M * N * E * 2)
    y.sum().backward()


@pytest.mark.gpu
@pytest.mark.no_poison
@pytest.mark.parametrize("K", [768, 1000, 3072, 4096])
def test_kernels_at_size(K: int) -> None:
    torch.manual_seed(0)
    layers = Layers("layer", K, (256, 128), device="cuda")
    x = torch.randn(5000, K, device="cuda")
    for activation in ("none", "gelu", "swiglu"):
        found = results(layers, x, activation, plain=False, autocast=torch.bfloat16)
        plain = results(layers, x, activation, plain=True, autocast=torch.bfloat16)
        exact = results(layers.double(), x.double(), activation, plain=True)
        layers.float()
        for mine, theirs, true in zip(found, plain, exact, strict=True):
            assert (mine.double() - true).norm() <= 1.2 * (theirs.double() - true).norm() + 1e-3 * true.norm(), activation


@pytest.mark.gpu
@pytest.mark.no_poison
def test_a_graph_draws_new_masks() -> None:
    """The seed is drawn on the device: each replay of a captured step has its own."""
    y = torch.ones(1000, 64, device="cuda")
    x = torch.zeros_like(y)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        add_dropped(x, y, dropout=0.5)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = add_dropped(x, y, dropout=0.5)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


def test_gelu_is_the_exact_one(kernels: None) -> None:
    x = torch.linspace(-9, 9, 4096, device=DEVICE).view(-1, 1).repeat(1, 3)
    (found,) = fused_norm_linear.norm_linear(x, [torch.eye(3, device=DEVICE)], [], activation="gelu")
    torch.testing.assert_close(found, F.gelu(x), rtol=1e-5, atol=1e-6)


def test_gelu_of_16_bit_inputs_is_the_exact_one_within_their_rounding(kernels: None) -> None:
    """Values and gradients; far out on the left, too, where what is left of x is small."""
    x = torch.linspace(-6, 9, 4096, device=DEVICE).bfloat16().view(-1, 1).repeat(1, 3).requires_grad_()
    eye = torch.eye(3, device=DEVICE, dtype=torch.bfloat16)
    (found,) = fused_norm_linear.norm_linear(x, [eye], [], activation="gelu")
    wide = x.detach().double().requires_grad_()
    expected = F.gelu(wide)
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=1e-6)
    (dx,) = torch.autograd.grad(found, x, torch.ones_like(found))
    (true,) = torch.autograd.grad(expected, wide, torch.ones_like(expected))
    torch.testing.assert_close(dx.double(), true, rtol=2**-7, atol=1e-6)


def test_results_may_be_changed_in_place() -> None:
    """They are tensors of their own, no views of a function's output."""
    torch.manual_seed(0)
    x = torch.randn(1, 40, 32, device=DEVICE)
    model = LongNetEncoder(config()).to(DEVICE)

    def grads() -> list[torch.Tensor | None]:
        out, _ = model.blocks[0].attention(x)
        out += x
        out = model.blocks[0].ffn(out).mul_(2)
        return list(torch.autograd.grad(out.square().sum(), list(model.blocks[0].attention.parameters())))

    found = grads()
    with plain_layers():
        expected = grads()
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_torch_func_takes_the_plain_layers() -> None:
    layer = LongNetEncoder(config()).blocks[0].ffn
    x = torch.randn(5, 32)
    jacobian = torch.func.jacrev(layer)(x[:1])
    assert jacobian.shape == (1, 32, 1, 32)
