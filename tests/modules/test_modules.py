"""The modules: against the float64 reference on their own projected tensors, as citizens of torch.nn, and with blocks."""

import contextlib
import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from dilated_attention import DilatedPattern, create_attention, modules, shard_sequence
from dilated_attention.backends import registry
from dilated_attention.engine.reference import reference_attention
from dilated_attention.functional.fused_layers import plain_layers
from dilated_attention.modules import DilatedAttention, MultiheadDilatedAttention, RingMultiheadDilatedAttention
from dilated_attention.modules.rotary import rotary_tables, rotate, xpos_max_length
from dilated_attention.pattern import BlockPattern, BlockTensor, GlobalLocal, LocalWindow, Sparsity, TopBlocks
from tests.helpers.pool import pool_of

LENGTHS, RATES = [4, 8], [1, 2]
DOCUMENTS = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
PADDING = torch.arange(14)[None].repeat(2, 1) >= torch.tensor([[14], [9]])


def make_layer(**settings: Any) -> MultiheadDilatedAttention:
    torch.manual_seed(0)
    settings = {"embed_dim": 16, "num_heads": 4, "segment_lengths": LENGTHS, "dilation_rates": RATES, "dtype": torch.float64} | settings
    layer = MultiheadDilatedAttention(**settings)
    with torch.no_grad():
        # biases and norms off their initial values, where a missing one would not show
        for parameter in layer.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) / 4)
    return layer


def make_x(batch: int = 2, length: int = 14, dim: int = 16, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rotated(x: torch.Tensor, positions: torch.Tensor, base: float, growth: float = 0.0) -> torch.Tensor:
    """Rotary embedding as multiplication by e^{i·angle} of complex numbers: an independent form of the same thing; ``growth``: of XPOS."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous())
    frequency = torch.tensor([base ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    zeta = (torch.arange(half, dtype=torch.float64) / half + 0.4) / 1.4
    places = positions[:, None, None].double()
    turned = pairs * torch.exp(1j * places * frequency) * zeta ** (places * growth)
    return torch.cat([turned.real, turned.imag], dim=-1)


def expected(layer: MultiheadDilatedAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """The layer written down once more, with the reference in the middle."""

    def heads(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return (x @ linear.weight.T + (0 if linear.bias is None else linear.bias)).reshape(*x.shape[:2], -1, layer.head_dim)

    def rms(norm: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        assert norm.eps is not None
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight

    q, k, v = heads(layer.q_proj, query), heads(layer.k_proj, key), heads(layer.v_proj, value)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms(layer.q_norm, q), rms(layer.k_norm, k)
    if layer.rotary:
        documents = options.get("cu_seqlens")
        offset = options.get("query_offset", 0)
        q_positions, k_positions = torch.arange(offset, offset + q.shape[1]), torch.arange(k.shape[1])
        if documents is not None:
            q_positions = k_positions = torch.cat([torch.arange(int(n)) for n in documents.diff()])
        growth = 0.0 if layer.xpos_scale_base is None else 1 / layer.xpos_scale_base
        q, k = rotated(q, q_positions, layer.rotary_base, growth), rotated(k, k_positions, layer.rotary_base, -growth)
    attention = layer.attention
    settings: dict[str, Any] = {"scale": attention.scale, "mixture_grad": attention.mixture_grad, "sinks": attention.sinks}
    out, _ = reference_attention(q, k, v, attention.pattern, **settings, **options)
    out = out.reshape(*query.shape[:2], -1)
    if layer.inner_attn_ln is not None:
        norm = layer.inner_attn_ln
        centred = out - out.mean(-1, keepdim=True)
        out = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias
    return out @ layer.out_proj.weight.T + (0 if layer.out_proj.bias is None else layer.out_proj.bias)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped_heads": {"num_kv_heads": 2, "sinks": True},
    "one_kv_head": {"num_kv_heads": 1, "rotary": True},
    "bare": {"bias": False, "layer_norm": False},
    "rotary": {"rotary": True, "rotary_base": 500.0},
    "xpos": {"rotary": True, "xpos_scale_base": 6.0},
    "qk_norm": {"qk_norm": True, "rotary": True, "layer_norm_eps": 1e-2},
    "blocked": {"head_offsets": "blocked", "tail": "zero_keys", "mixture_grad": "detached"},
    "lists": {"head_offsets": [[0, 0, 0, 0], [1, 0, 0, 1]], "scale": 0.9},
    "split": {"branch_heads": "split", "deterministic": True, "backend": "math"},
}
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "padding": {"key_padding_mask": PADDING},
    "documents": {"cu_seqlens": DOCUMENTS, "is_causal": True},
    "offset": {"query_offset": 9, "is_causal": True},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_multihead_output_and_gradients_equal_the_reference(setting: str, call: str) -> None:
    layer, options = make_layer(**SETTINGS[setting]), CALLS[call]
    memory = make_x(1 if call == "documents" else 2).requires_grad_()
    value = make_x(memory.shape[0], seed=2).requires_grad_()
    query = make_x(memory.shape[0], 3, seed=3).requires_grad_() if call == "offset" else memory
    ours, weights = layer(query, memory, value, **options)
    theirs = expected(layer, query, memory, value, **options)
    assert weights is None
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    sources = [query, memory, value, *layer.parameters()] if call == "offset" else [memory, value, *layer.parameters()]
    for mine, other in zip(*(torch.autograd.grad(out.sin().sum(), sources) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-9)


ROTARY: list[dict[str, Any]] = [{"rotary": True, "num_kv_heads": 2, "qk_norm": True}, SETTINGS["xpos"]]


@pytest.mark.parametrize("settings", ROTARY, ids=str)
def test_rotary_positions_restart_in_each_packed_document(settings: dict[str, Any]) -> None:
    """Scores would be equal without it, but half precision rounds a vector as if its document stood alone only with it."""
    layer, x, seen = make_layer(**settings), make_x(1), []
    layer.attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[:2]))
    layer(x, cu_seqlens=DOCUMENTS)
    layer(x[:, 5:])
    for packed, alone in zip(*seen, strict=True):
        torch.testing.assert_close(packed[:, 5:], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotation_keeps_its_accuracy_at_far_positions(dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 2**16 + 3, 2**20 + 7, 2**24 + 1, 10**9 + 1])
    x = torch.randn(1, 6, 2, 32, generator=torch.Generator().manual_seed(0), dtype=dtype)
    ours = MultiheadDilatedAttention(64, 2, [4], [1], rotary=True).rotate(x, x, positions, None)[0]
    assert ours.dtype is dtype
    torch.testing.assert_close(ours.double(), rotated(x.double(), positions, 10000.0), rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "base"), [((2, 37, 3, 16), None), ((1, 130, 5, 24), 60.0), ((3, 1, 1, 6), None), ((2, 0, 2, 8), None)])
def test_the_rotation_kernel_is_the_formula(shape: tuple[int, ...], base: float | None, dtype: torch.dtype) -> None:
    """Its gradient, a batch of them and the second derivative, too; interpreted where there is no GPU."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator().manual_seed(0)
    # rows that are not side by side; one position is contiguous even so
    B, N, *heads = shape
    x, dy, ddx = (torch.randn(N, B, *heads, generator=draw).to(device, dtype).transpose(0, 1).requires_grad_() for _ in range(3))
    _, table = rotary_tables(torch.arange(shape[1], device=device), None, shape[1], shape[3], 500.0, base, dtype)
    found = []
    for forced in (True, False):
        with plain_layers(forced=forced):
            out = rotate(x, table)
            assert not shape[1] or ("Rotation" in type(out.grad_fn).__name__) is forced
            (dx,) = torch.autograd.grad(out, x, dy, create_graph=True)
            batch = torch.autograd.grad(rotate(x, table), x, torch.stack((dy, ddx)), is_grads_batched=True)
            found.append([out, dx, *torch.autograd.grad(dx, dy, ddx), *batch])
    for kernel, formula in zip(*found, strict=True):
        torch.testing.assert_close(kernel, formula, rtol=0, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "base"),
    # of XPOS; with the last one the documents' lengths are read, and scores that the causal mask hides are infinite
    [("causal", None), ("documents", 6.0), ("documents", 0.01)],
)
def test_the_multihead_module_compiles_to_one_graph(call: str, base: float | None) -> None:
    torch._dynamo.reset()
    layer = make_layer(rotary=True, qk_norm=True, num_kv_heads=2, dropout=0.3, xpos_scale_base=base)
    x, counter, results = make_x(1 if call == "documents" else 2).requires_grad_(), CompileCounterWithBackend("aot_eager"), []
    for function in (layer, torch.compile(layer, backend=counter, fullgraph=True)):
        torch.manual_seed(2)
        out = function(x, **CALLS[call])[0]
        results.append((out, *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])))
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-9, atol=1e-10)
    assert counter.frame_count == 1


@pytest.mark.parametrize("settings", ROTARY, ids=str)
def test_an_exported_layer_runs_at_other_lengths(settings: dict[str, Any]) -> None:
    layer = make_layer(**settings).eval()
    program = torch.export.export(layer, (make_x(),), dynamic_shapes={"query": {1: torch.export.Dim("length", min=2, max=4096)}})
    other = make_x(2, 33)
    torch.testing.assert_close(program.module()(other)[0], layer(other)[0], rtol=1e-12, atol=1e-12)


def test_an_exported_layer_reads_document_bounds_when_it_runs() -> None:
    layer, x = make_layer(rotary=True), make_x(1)
    program = torch.export.export(layer, (x,), {"cu_seqlens": DOCUMENTS})
    other = {"cu_seqlens": torch.tensor([0, 2, 11, 14], dtype=torch.int32)}
    torch.testing.assert_close(program.module()(x, **other)[0], layer(x, **other)[0], rtol=1e-12, atol=1e-12)


def test_an_export_to_onnx_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it goes without the package onnxscript: the export that torch's exporter begins with, both ways."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    for strict in (False, True):
        with pytest.raises(Exception, match=r"torch.onnx.export is not supported.*torch.export.export"):
            torch.export.export(make_layer().eval(), (make_x(),), strict=strict)


def test_a_layer_on_meta_is_built_then_filled_as_if_built_at_once() -> None:
    settings = {"qk_norm": True, "num_kv_heads": 2, "gamma_init": 1.5, "sinks": True}
    layer = MultiheadDilatedAttention(16, 4, LENGTHS, RATES, device="meta", **settings)
    shape = layer(torch.empty(2, 14, 16, device="meta"))[0]
    assert all(parameter.is_meta for parameter in layer.parameters()) and shape.is_meta and shape.shape == (2, 14, 16)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, math.nan)
    torch.manual_seed(4)
    layer.reset_parameters()
    built = MultiheadDilatedAttention(16, 4, LENGTHS, RATES, **settings)
    torch.manual_seed(4)
    built.reset_parameters()
    for (name, ours), (_, theirs) in zip(layer.named_parameters(), built.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("settings", [{}, {"qk_norm": True, "rotary": True}], ids=str)
def test_autocast_runs_a_float32_layer_in_bfloat16(settings: dict[str, Any]) -> None:
    layer, x = make_layer(dtype=torch.float32, **settings), make_x(dtype=torch.float32)
    exact = layer(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)[0]
        out.float().square().sum().backward()
    assert out.dtype is torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype is torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
    error = (out.float() - exact).norm() / exact.norm()
    assert 0 < error < 0.02
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"query has dtype torch.float64 .* torch.float32; convert"):
        layer(x.double())


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backend_is_asked_for_determinism_where_the_layer_asks(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, select = [], registry.select
    monkeypatch.setattr(registry, "select", lambda request, name: asked.append(request.deterministic) or select(request, name))
    make_layer(deterministic=deterministic)(make_x())
    assert set(asked) == {deterministic}


def test_initial_values_are_magnetos() -> None:
    torch.manual_seed(0)
    gamma = math.sqrt(math.log(24))
    layer = MultiheadDilatedAttention(512, 8, LENGTHS, RATES, num_kv_heads=2, gamma_init=gamma, qk_norm=True)
    for name, gain, rows in (("q_proj", 1, 512), ("k_proj", 1, 128), ("v_proj", gamma, 128), ("out_proj", gamma, 512)):
        linear, std = getattr(layer, name), gain * math.sqrt(2 / (512 + rows))
        # 65,536 or more draws: the standard error of a standard deviation is below 0.3 %
        assert linear.weight.std().item() == pytest.approx(std, rel=0.015), name
        # normal, not uniform: a uniform one has kurtosis 1.8
        assert ((linear.weight / std) ** 4).mean().item() == pytest.approx(3, rel=0.1)
        assert not linear.bias.any()
    for norm in (layer.inner_attn_ln, layer.q_norm, layer.k_norm):
        assert norm is not None and bool((norm.weight == 1).all())


def test_repr_shows_the_branches_and_what_is_not_default() -> None:
    assert repr(DilatedAttention([2048, 4096], (1, 2))) == "DilatedAttention(segment_lengths=[2048, 4096], dilation_rates=[1, 2])"
    shown = repr(DilatedAttention([4], [2], scale=0.5, dropout=0.1, head_offsets="zero", backend="math"))
    assert "scale=0.5, dropout=0.1, head_offsets='zero', backend='math'" in shown
    shown = repr(make_layer(num_kv_heads=2, rotary=True, xpos_scale_base=6.0, scale=0.5, tail="zero_keys"))
    assert "embed_dim=16, num_heads=4, num_kv_heads=2, rotary_base=10000.0, xpos_scale_base=6.0" in shown
    assert "(attention): DilatedAttention(segment_lengths=[4, 8], dilation_rates=[1, 2], scale=0.5, tail='zero_keys'" in shown


def test_the_pattern_is_the_one_asked_for_and_cannot_be_replaced() -> None:
    module = DilatedAttention([4, 8], [1, 2], head_offsets="blocked", tail="zero_keys")
    assert module.pattern == DilatedPattern((4, 8), (1, 2), "blocked", "all", "zero_keys")
    with pytest.raises(AttributeError):
        module.pattern = DilatedPattern((4,), (1,))


X = make_x()
# (inputs, options, error, text): a layer's own, and of the function's some, which rotation meets first
BAD_CALLS: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((X,), {"need_weights": True}, ValueError, "need_weights=True.*never materialised"),
    ((X,), {"need_weights": torch.ones(2)}, TypeError, "need_weights is .*expected True or False"),
    ((X,), {"attn_mask": torch.zeros(14, 14)}, ValueError, "attn_mask is given.*is_causal=True or key_padding_mask"),
    ((X[0],), {}, ValueError, r"query has shape \(14, 16\).*embed_dim = 16"),
    (([1.0],), {}, TypeError, "query is a list"),
    ((torch.nested.nested_tensor([torch.zeros(3, 16)]),), {}, TypeError, "query is a nested tensor; concatenate sequences"),
    ((X, X.to_sparse()), {}, TypeError, r"key is a sparse tensor .*convert it with .to_dense\(\)"),
    ((X.long(),), {}, ValueError, "query has dtype torch.int64"),
    ((X.half(),), {}, ValueError, r"query has dtype torch.float16 and the module's parameters torch.float\d\d; convert either"),
    ((X, X.to("meta")), {}, ValueError, r"key is on meta and the module's parameters on cpu; move either with .to\(device\)"),
    ((X, X[:1]), {}, ValueError, "one batch size"),
    ((X, X, X[:, :7]), {}, ValueError, "one sequence length"),
    ((X, X[:, :7]), {}, ValueError, "query_offset is 0 and q has 14 rows.*of 7 keys"),
    ((X,), {"cu_seqlens": DOCUMENTS}, ValueError, "cu_seqlens with batch size 2"),
    ((X[:1],), {"cu_seqlens": DOCUMENTS + 1}, ValueError, r"cu_seqlens is \[1, 6, 6, 15\]"),
]


@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize(("inputs", "options", "error", "text"), BAD_CALLS, ids=[case[3][:32] for case in BAD_CALLS])
def test_calls_that_cannot_work_are_refused(
    inputs: tuple[Any, ...], options: dict[str, Any], error: type[Exception], text: str, rotary: bool
) -> None:
    with pytest.raises(error, match=text):
        make_layer(rotary=rotary)(*inputs, **options)


def test_an_empty_sequence_gives_an_empty_result() -> None:
    x = make_x(2, 0).requires_grad_()
    out, _ = make_layer(rotary=True)(x, is_causal=True)
    out.sum().backward()
    assert out.shape == x.shape and x.grad is not None and x.grad.shape == x.shape


MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
}
FIRST_CALLS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "compile": lambda module, q: torch.compile(module, backend="eager")(q, q, q),
    "grad": lambda module, q: torch.func.grad(lambda x: module(x, x, x).sum())(q),
    "vmap": lambda module, q: torch.func.vmap(lambda x: module(x, x, x))(q[None]),
}


@pytest.mark.parametrize("call", [*MODES, *FIRST_CALLS])
def test_sinks_that_a_first_call_makes_are_trained_like_any(call: str) -> None:
    q = torch.randn(1, 40, 2, 8, generator=torch.Generator().manual_seed(0))
    module = DilatedAttention([16], [2], sinks=True)
    with MODES.get(call, contextlib.nullcontext)():
        FIRST_CALLS.get(call, lambda module, q: module(q, q, q))(module, q)
    module(q, q, q).square().sum().backward()
    other = DilatedAttention([16], [2], sinks=True, num_heads=2)
    other(q, q, q).square().sum().backward()
    assert type(module.sinks) is torch.nn.Parameter and module.sinks.dtype is torch.float32 and module.sinks.device == q.device
    assert torch.equal(module.sinks.grad, other.sinks.grad)


# --- XPOS, whose factors grow and shrink with the distance --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_longest_sequence_of_xpos_fits_its_dtype_and_longer_ones_are_refused(dtype: torch.dtype) -> None:
    longest = xpos_max_length(0.5, dtype)
    layer = make_layer(rotary=True, xpos_scale_base=0.5, dtype=dtype)
    for length in (longest, longest - 1):
        # the rotation may lengthen one component by √2
        q = torch.full((1, length, 4, 4), 7.5, dtype=dtype)
        assert all(bool(x.isfinite().all()) for x in layer.rotate(q, q, torch.arange(length), None))
    x = make_x(1, longest + 1).to(dtype)
    with pytest.raises(ValueError, match=rf"the sequence has {longest + 1} positions.*{dtype} beyond {longest}: use a larger"):
        layer(x)
    # packed, the documents count
    fits = torch.tensor([0, 4, longest + 1], dtype=torch.int32)
    assert bool(layer(x, cu_seqlens=fits, is_causal=True)[0].isfinite().all())
    with pytest.raises(ValueError, match=rf"a document has {longest + 1} positions.*beyond {longest}"):
        layer(x, cu_seqlens=torch.tensor([0, longest + 1], dtype=torch.int32))


def test_the_documented_limits_of_xpos_are_these() -> None:
    assert [xpos_max_length(512.0, dtype) for dtype in (torch.float16, torch.bfloat16)] == [6798, 70251]


def test_half_precision_factors_are_rounded_once() -> None:
    layer, x = make_layer(**ROTARY[1], dtype=torch.bfloat16), make_x().bfloat16()
    q, k, _ = layer.project(x, x, x)
    wide = make_layer(**ROTARY[1]).rotate(q.double(), k.double(), torch.arange(14), None)
    for got, want in zip(layer.rotate(q, k, torch.arange(14), None), wide, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)


def refused_by_the_whole_length(rank: int, world: int) -> None:
    (part,) = shard_sequence(dist.group.WORLD, [make_x()], [1])
    with pytest.raises(ValueError, match="the sequence has 14 positions"):
        RingMultiheadDilatedAttention(16, 4, LENGTHS, RATES, rotary=True, xpos_scale_base=0.01, dtype=torch.float64)(part)


def test_all_processes_refuse_alike() -> None:
    """What they compute: tests/distributed/test_ring_modules.py."""
    pool_of(2).run(refused_by_the_whole_length)


# --- in torch's own layers -------------------------------------------------------------------------------------------------------------


def expected_in_torch(module: nn.Module, x: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """What torch's modules compute, written down once more (norm last)."""
    for layer in getattr(module, "layers", [module]):
        x = layer.norm1(x + layer.self_attn(x, key_padding_mask=mask, is_causal=causal)[0])
        if hasattr(layer, "multihead_attn"):
            memory = make_x(2, 5, seed=9)
            x = layer.norm2(x + layer.multihead_attn(x, memory, memory, need_weights=False)[0])
        last = layer.norm3 if hasattr(layer, "norm3") else layer.norm2
        x = last(x + layer.linear2(torch.relu(layer.linear1(x))))
    return x


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("place", ["encoder_layer", "encoder", "decoder_layer"])
@pytest.mark.parametrize("kind", [name for name in modules.__all__ if "Multihead" in name])
def test_every_kind_serves_in_torchs_own_layers(kind: str, place: str, training: bool) -> None:
    """Of one process, rings too."""
    settings: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    is_decoder = place == "decoder_layer"
    module: Any = (nn.TransformerDecoderLayer if is_decoder else nn.TransformerEncoderLayer)(16, 4, 32, **settings)
    blocks = {"pattern": LocalWindow(3, block_size=64)} if "Block" in kind else {}
    branches = (LENGTHS, RATES) if "Dilated" in kind else ()
    module.self_attn = getattr(modules, kind)(16, 4, *branches, **blocks, rotary=True, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"forward\(\) got return_lse, and a layer returns"):
        module.self_attn(make_x(), return_lse=True)
    if place == "encoder":
        module = nn.TransformerEncoder(module, 2, enable_nested_tensor=False)
    side, memory = "tgt_" if is_decoder else "src_", [make_x(2, 5, seed=9)] * is_decoder
    names = (f"{side}key_padding_mask", "tgt_is_causal" if is_decoder else "is_causal", "mask" if place == "encoder" else f"{side}mask")

    def call(x: torch.Tensor, *options: Any) -> Any:
        """padding, is_causal, mask"""
        return module(x, *memory, **dict(zip(names, options, strict=False)))

    module.train(training)
    x = make_x().requires_grad_()
    for mask, causal in ((None, False), (None, True), (PADDING, False), (PADDING, True)):
        # without gradients torch's layers try their fast path
        with torch.set_grad_enabled(training):
            found = call(x, mask, causal)
        torch.testing.assert_close(found, expected_in_torch(module, x, mask, causal), rtol=1e-12, atol=1e-12)
    if training:
        found.sum().backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
    # masks that mean more than padding
    with pytest.raises(ValueError, match=r"key_padding_mask has dtype torch.float32 and values other than 0 and -inf"):
        call(x, PADDING * -1e9, False)
    with pytest.raises(ValueError, match=r"attn_mask is given.*is_causal=True"):
        call(x, None, True, nn.Transformer.generate_square_subsequent_mask(14, dtype=torch.float64))


def test_padding_of_torchs_layers_compiles() -> None:
    layer = make_layer().eval()
    floating = torch.zeros(2, 14, dtype=torch.float64).masked_fill(PADDING, -math.inf)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(make_x(), key_padding_mask=floating)[0], layer(make_x(), key_padding_mask=PADDING)[0])
    with pytest.raises(RuntimeError, match="values other than 0 and -inf"):
        compiled(make_x(), key_padding_mask=floating + 1)


# --- blocks ------------------------------------------------------------------------------------------------------------------------------

KINDS = ["block_sparse", "block_sparse_dilated", "multihead_block_sparse", "multihead_block_sparse_dilated"]


def make(kind: str, **settings: Any) -> Any:
    settings |= {"segment_lengths": [16], "dilation_rates": [3]} if "dilated" in kind else {}
    return create_attention(kind, **settings, **({"embed_dim": 16, "num_heads": 4} if "multihead" in kind else {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sparsity_ratio_is_the_density(kind: str) -> None:
    layer = make(kind, sparsity_ratio=0.25, sparsity="big_bird", seed=3, block_size=(64, 128))
    assert repr(Sparsity(0.25, "big_bird", 3, block_size=(64, 128))) in repr(layer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "pattern",
    [GlobalLocal(20, 3, block_size=64), TopBlocks(1, block_size=64), BlockTensor(torch.eye(2, dtype=torch.bool), block_size=64)],
    ids=repr,
)
def test_copies_and_pickles_compute_the_same_on_parameters_of_their_own(pattern: BlockPattern, kind: str) -> None:
    torch.manual_seed(0)
    layer = make(kind, pattern=pattern)
    inputs = (torch.randn(1, 90, 16),) if kind.startswith("multihead") else (torch.randn(1, 90, 4, 4), *torch.randn(2, 1, 90, 2, 4))
    expected = layer(*inputs)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        # a pattern that holds a tensor is that of an object
        assert pattern.holds_objects or repr(other) == repr(layer)
        assert torch.equal(other(*inputs)[0], expected[0])
        for parameter in other.parameters():
            parameter.data.add_(1.0)
    assert torch.equal(layer(*inputs)[0], expected[0])
    assert repr(pattern) in repr(layer)
    assert "dilated" not in kind or "segment_lengths=[16], dilation_rates=[3]" in repr(layer)
