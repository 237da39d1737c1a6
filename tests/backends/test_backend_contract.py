"""What every backend promises the engine, and the traps of the libraries behind them, each of which somebody has met."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import dilated_attention
from dilated_attention.backends import AttentionRequest, Bounds, Hardware, Mask, Options, detect, registry
from dilated_attention.backends.base import placed
from dilated_attention.backends.flash import flash3
from dilated_attention.backends.mask_convert import window_sizes
from dilated_attention.backends.torch_ops.flex import _BLOCK, _band_block_mask
from dilated_attention.backends.torch_ops.math import band_mask

MATH = registry.get("math")
PACKAGE = Path(dilated_attention.__file__).parent
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu]),
]
HOPPER = Hardware(
    device_type="cuda",
    capability=(9, 0),
    torch_version=(2, 11),
    cudnn_version=91900,
    packages=frozenset({"flash-attn-4", "flash-attn-3", "flash-attn-2", "triton"}),
)


def backends(device: str, dtype: torch.dtype, **wanted: bool) -> list[str]:
    request = AttentionRequest(hardware=detect(device), dtype=dtype, head_dim=64, needs_grad=True, **wanted)
    return [name for name, reasons in registry.table(request) if not reasons]


def problem(device: str, dtype: torch.dtype, L: int = 40, S: int = 40) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(3)
    shapes = ((3, L, 4, 64), (3, S, 2, 64), (3, S, 2, 64))
    return tuple(torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lse_is_natural_and_float32_and_minus_inf_without_keys(device: str, dtype: torch.dtype) -> None:
    q, k, v = problem(device, dtype)
    padding = torch.zeros(3, 40, dtype=torch.bool, device=device)
    padding[0] = True
    padding[1, :7] = True
    names = backends(device, dtype, key_mask=True)
    assert names
    for name, causal in itertools.product(names, (False, True)):
        options = Options(scale=0.1, causal=causal, mask=Mask(padding))
        out, lse = registry.get(name).forward(q, k, v, options)
        assert lse.dtype is torch.float32, name
        assert lse.shape == (3, 4, 40), name
        scores = torch.einsum("plgd,psgd->pgls", q.double(), k.double().repeat_interleave(2, 2)) * 0.1
        scores = scores.masked_fill(padding[:, None, None, :], -torch.inf)
        if causal:
            scores = scores.masked_fill(~band_mask((None, 0), 40, 40, q.device), -torch.inf)
        expected = scores.logsumexp(-1)
        empty = expected == -torch.inf
        assert torch.equal(lse == -torch.inf, empty), name
        assert empty[0].all()
        assert empty[1, :, :7].all() == causal
        assert (lse - expected)[~empty].abs().max() < 1e-4, name
        assert (out.transpose(1, 2)[empty] == 0).all(), name


@pytest.mark.parametrize("device", DEVICES)
def test_backward_with_lse_of_plus_inf_gives_that_row_nothing(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = problem(device, dtype)
    names = backends(device, dtype)
    assert names
    for name in names:
        backend = registry.get(name)
        options = Options(scale=0.1)
        out, lse = backend.forward(q, k, v, options)
        dout = torch.randn_like(q)
        lse = lse.clone()
        lse[:, :, 5] = torch.inf
        dq, dk, dv = backend.backward(dout, q, k, v, out, lse, options)
        assert (dq[:, 5] == 0).all(), name
        rest = [i for i in range(40) if i != 5]
        part = [x[:, rest] for x in (dout, q, out)]
        _, dk_rest, dv_rest = backend.backward(part[0], part[1], k, v, part[2], lse[:, :, rest], options)
        tolerance = 1e-5 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(dk.float(), dk_rest.float(), atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(dv.float(), dv_rest.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_parts_with_the_whole_softmax_add_up_to_its_gradient(device: str) -> None:
    """Backward of two halves of the keys with the whole's out and lse: exactly the whole backward, on every backend."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = problem(device, dtype, L=64, S=96)
    dout = torch.randn_like(q)
    for name in backends(device, dtype):
        backend, options = registry.get(name), Options(scale=0.125)
        out, lse = backend.forward(q, k, v, options)
        whole = backend.backward(dout, q, k, v, out, lse, options)
        halves = [backend.backward(dout, q, k[:, half], v[:, half], out, lse, options) for half in (slice(0, 30), slice(30, 96))]
        parts = (
            halves[0][0].float() + halves[1][0].float(),
            torch.cat([halves[0][1], halves[1][1]], 1),
            torch.cat([halves[0][2], halves[1][2]], 1),
        )
        for got, want in zip(parts, whole, strict=True):
            tolerance = 1e-5 if dtype is torch.float32 else 3e-2
            torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_results_go_to_views_or_are_copied_there(device: str) -> None:
    """Views of every third row and another order of heads: what is in them afterwards is what a launch without views returns."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tolerance = 1e-6 if dtype is torch.float32 else 3e-2
    q, k, v = problem(device, dtype, L=24, S=24)
    dout, options = torch.randn_like(q), Options(scale=0.1, causal=True)

    def view(x: torch.Tensor) -> torch.Tensor:
        P, N, *rest = x.shape
        return x.new_full((P, 3 * N, *rest), 7.0)[:, 1::3]

    for name in backends(device, dtype):
        backend = registry.get(name)
        plain = backend.forward(q, k, v, options)
        views: tuple[torch.Tensor | None, ...] = (view(q), torch.full_like(plain[1].transpose(1, 2), 7.0).transpose(1, 2))
        found = backend.forward(q, k, v, options, out=views)
        if backend.capabilities.writes_views:
            assert found[0] is views[0], name
        # the library's own lse is copied where it cannot write rows of these strides
        assert all(x is y for x, y in zip(placed(found, views), views, strict=True))
        for one, other in zip(views, plain, strict=True):
            assert one is not None and torch.equal(one, other), name
        plain_grads = backend.backward(dout, q, k, v, *plain, options)
        for some in ((view(q), view(k), view(v)), (view(q), None, None)):
            shares = placed(backend.backward(dout, q, k, v, *plain, options, grads=some), some)
            assert all(one is other for one, other in zip(shares, some, strict=True) if other is not None)
            for one, other in zip(shares, plain_grads, strict=True):
                torch.testing.assert_close(one.float(), other.float(), atol=tolerance, rtol=tolerance)


class _Flash3Ops:
    """``torch.ops.flash_attn_3`` in plain torch; what it returns is another Python object than what it wrote to."""

    def fwd(self, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, ...]:
        (queries, keys), options = rest[4:6], Options(*rest[20:22])
        assert len(rest) == 31 and rest[22:24] == (-1, -1)
        out = torch.empty_like(q) if rest[3] is None else rest[3]
        lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]))
        tensors = (q, k, v, out, lse)
        for rows, seen in self._problems(queries, keys):
            q_, k_, v_, out_, lse_ = (x if queries is None else x[None] for x in tensors)
            out_[:, rows], lse_[:, :, rows] = MATH.forward(q_[:, rows], k_[:, seen], v_[:, seen], options)
        return out.view_as(out), lse

    def bwd(self, *given: Any) -> None:
        tensors, (queries, keys), options = given[:9], given[9:11], Options(*given[15:17])
        assert len(given) == 22 and given[5].is_contiguous() and given[17:] == (-1, -1, 0.0, False, 0)
        for rows, seen in self._problems(queries, keys):
            dout, q, k, v, out, lse, dq, dk, dv = (x if queries is None else x[None] for x in tensors)
            of_rows = dout[:, rows], q[:, rows], k[:, seen], v[:, seen], out[:, rows], lse[:, :, rows]
            dq[:, rows], dk[:, seen], dv[:, seen] = MATH.backward(*of_rows, options)

    def _problems(self, queries: Any, keys: Any) -> list[tuple[slice, slice]]:
        if queries is None:
            return [(slice(None), slice(None))]
        ranges = ([slice(a, b) for a, b in itertools.pairwise(x.tolist())] for x in (queries, keys))
        return list(zip(*ranges, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_views", [False, True])
def test_flash3_is_reached_as_meant(causal: bool, packed: bool, with_views: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash3, "_ops", _Flash3Ops)
    backend, options = registry.get("flash3"), Options(scale=0.1, causal=causal)
    q, k, v = problem("cpu", torch.float32)
    keys = None
    if packed:
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
        starts = torch.tensor([0, 30, 90, 120], dtype=torch.int32)
        keys = Bounds(starts, starts, 60, 60)
    dout = torch.randn_like(q)
    views: tuple[torch.Tensor | None, ...] = (torch.empty_like(q), None) if with_views else (None, None)
    grad_views: tuple[torch.Tensor | None, ...] = (torch.empty_like(q), torch.empty_like(k), None) if with_views else (None,) * 3
    out, lse = backend.forward(q, k, v, options, keys, out=views)
    grads = backend.backward(dout, q, k, v, out, lse, options, keys, grads=grad_views)
    assert not with_views or all(x is y for x, y in zip((out, *grads[:2]), (views[0], *grad_views[:2]), strict=True))
    # sequence by sequence, in plain torch
    ranges = [slice(0, 30), slice(30, 90), slice(90, 120)] if packed else [slice(None)]
    for rows in ranges:
        tensors = [x[:, rows] for x in (q, k, v)]
        expected = MATH.forward(*tensors, options)
        torch.testing.assert_close((out[:, rows], lse[:, :, rows]), expected)
        shares = MATH.backward(dout[:, rows], *tensors, *expected, options)
        torch.testing.assert_close(tuple(x[:, rows] for x in grads), shares)


def test_cpu_op_is_never_handed_what_kills_or_fools_it() -> None:
    q, k, v = problem("cpu", torch.float32)
    backend = registry.get("sdpa_cpu")
    with pytest.raises(AssertionError):
        backend.forward(q, k[:, :0], v[:, :0], Options(scale=0.1))
    with pytest.raises(AssertionError):
        backend.forward(q.transpose(1, 3).contiguous().transpose(1, 3), k, v, Options(scale=0.1))
    # through the door both are handled: no keys in a document, and a last stride that is not 1
    x = torch.randn(1, 64, 2, 12).transpose(1, 3)
    assert x.stride(-1) != 1
    got = dilated_attention.dilated_attention(x, x, x, [5], [2], cu_seqlens=torch.tensor([0, 0, 12], dtype=torch.int32))
    copy = x.contiguous()
    assert torch.equal(got, dilated_attention.dilated_attention(copy, copy, copy, [5], [2]))


@pytest.mark.slow
def test_no_process_wide_switch_of_torch_is_ever_flipped() -> None:
    """FlashAttention-4 through torch is broken on 2.11–2.13, and a library has no business with global kernel switches."""
    forbidden = {
        "activate_flash_attention_impl",
        "use_deterministic_algorithms",
        "enable_flash_sdp",
        "enable_cudnn_sdp",
        "enable_math_sdp",
        "set_float32_matmul_precision",
        "sdpa_kernel",
    }
    # torch's context_parallel, measured on a kernel named by the user, inside a with statement
    competitor = PACKAGE / "bench" / "workloads" / "sharded_contenders.py"
    for file in {*PACKAGE.rglob("*.py")} - {competitor}:
        tree = ast.parse(file.read_text())
        names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        assert not names & forbidden, (file, names & forbidden)
        assert "allow_tf32" not in names, file


def test_no_pickle_and_no_eval_in_the_package() -> None:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), file
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] + ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
                assert not {"pickle", "marshal", "shelve"} & set(names), file


def test_cudnn_gets_no_mask_and_no_deterministic_gradient_before_9_25() -> None:
    cudnn = registry.get("sdpa_cudnn")
    base = {"dtype": torch.bfloat16, "head_dim": 64}
    assert cudnn.reasons_against(AttentionRequest(hardware=HOPPER, needs_grad=True, **base)) == []
    assert cudnn.reasons_against(AttentionRequest(hardware=HOPPER, key_mask=True, **base)) == ["takes no key_padding_mask"]
    [reason] = cudnn.reasons_against(AttentionRequest(hardware=HOPPER, needs_grad=True, deterministic=True, **base))
    assert "9.25" in reason
    newer = Hardware(device_type="cuda", capability=(9, 0), cudnn_version=92600)
    assert cudnn.reasons_against(AttentionRequest(hardware=newer, needs_grad=True, deterministic=True, **base)) == []


def test_efficient_refuses_extents_of_32_bits() -> None:
    efficient = registry.get("sdpa_efficient")
    fits = AttentionRequest(hardware=HOPPER, dtype=torch.float32, head_dim=64, extent=2**31 - 1)
    assert efficient.reasons_against(fits) == []
    [reason] = efficient.reasons_against(AttentionRequest(hardware=HOPPER, dtype=torch.float32, head_dim=64, extent=2**31))
    assert str(2**31) in reason


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_flash4_backward_on_hopper_only_where_it_was_measured_right(head_dim: int) -> None:
    """4.0.0b36 on an H200, every multiple of 8: gradients wrong at these head dims, the forward right at all."""
    wrong = {8, 16, 40, 48, 72, 80, 104, 112}
    flash4 = registry.get("flash4")
    assert flash4.reasons_against(AttentionRequest(hardware=HOPPER, dtype=torch.bfloat16, head_dim=head_dim)) == []
    reasons = flash4.reasons_against(AttentionRequest(hardware=HOPPER, dtype=torch.bfloat16, head_dim=head_dim, needs_grad=True))
    assert (reasons == []) == (head_dim not in wrong)
    assert all("wrong gradients" in reason for reason in reasons)


@pytest.mark.parametrize("band", [(None, 0), (0, 0), (-5, 3), (-200, None), (-130, 140), (None, None), (100, 300)])
@pytest.mark.parametrize(("L", "S"), [(1, 1), (128, 128), (300, 300), (257, 640)])
def test_flex_block_lists_say_what_the_band_says(band: tuple[int | None, int | None], L: int, S: int) -> None:
    mask = band_mask(band, L, S, torch.device("cpu"))
    blocks = _band_block_mask(band, L, S, "cpu")
    rows, columns = -(-L // _BLOCK), -(-S // _BLOCK)
    padded = torch.zeros(rows * _BLOCK, columns * _BLOCK, dtype=torch.bool)
    padded[:L, :S] = mask
    tiles = padded.view(rows, _BLOCK, columns, _BLOCK).transpose(1, 2)
    any_pair, every_pair = tiles.flatten(2).any(-1), tiles.flatten(2).all(-1)

    def listed(count: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        dense = torch.zeros(rows, columns, dtype=torch.bool)
        for row in range(rows):
            dense[row, indices[0, 0, row, : count[0, 0, row]].long()] = True
        return dense

    partial, full = listed(blocks.kv_num_blocks, blocks.kv_indices), listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not (partial & full).any()
    assert torch.equal(full, every_pair)
    # a block that the corners admit may still hold no pair, and is then masked: visited blocks are a superset
    assert not (any_pair & ~(partial | full)).any()


@pytest.mark.parametrize(
    ("L", "S", "left", "right", "shift"), [(10, 10, 3, 2, 0), (10, 15, 3, 2, 3), (7, 12, 5, 0, 5), (10, 10, 20, 20, 0)]
)
def test_window_sizes_count_from_the_bottom_right_diagonal(L: int, S: int, left: int, right: int, shift: int) -> None:
    """flash-attn's kernels align the diagonal with the last query and key; the plan's band counts from the first ones."""
    q, k = torch.empty(1, L, 1, 1), torch.empty(1, S, 1, 1)
    band = (shift - left, shift + right)
    fa_left, fa_right = window_sizes(Options(scale=1.0, mask=Mask(band=band)), q.shape[1], k.shape[1])
    distance = torch.arange(S)[None, :] - torch.arange(L)[:, None] - (S - L)
    theirs = (distance >= -fa_left) & (distance <= fa_right)
    assert torch.equal(theirs, band_mask(band, L, S, torch.device("cpu")))


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (
            lambda self, q, k, v, opts: (q, k),
            r"Renamed.forward takes \(self, q, k, v, opts\); expected .* \(self, q, k, v, options, keys, out\)",
        ),
        (lambda self, q, k, v: (q, k), "Renamed.forward takes"),
        (lambda self, q, k, v, options, extra: (q, k), "Renamed.forward takes"),
    ],
    ids=["another name", "one too few", "one too many"],
)
def test_a_backend_whose_method_takes_other_parameters_is_refused_when_it_is_registered(method: Any, text: str) -> None:
    kind = type("Renamed", (type(registry.get("math")),), {"name": "renamed", "forward": method})
    with pytest.raises(TypeError, match=text):
        registry.register(kind())
    assert "renamed" not in registry.names()
