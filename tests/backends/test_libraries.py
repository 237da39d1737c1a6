"""The adapters of libraries against stand-ins with their published signatures: flash-attn 2, FlashAttention-3 and xformers.

A stand-in computes in plain torch, so a swapped argument, a wrong window or a lost gradient shows as a wrong number.
"""

from __future__ import annotations

import itertools
import sys
import types
from dataclasses import replace
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilated_attention.backends import AttentionRequest, Bounds, Hardware, Mask, Options, registry
from dilated_attention.backends import hardware as hardware_module
from dilated_attention.backends.base import band_mask, window_sizes
from dilated_attention.backends.flash import flash3
from dilated_attention.backends.flash import xformers as xformers_module

MATH = registry.get("math")


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


# --- flash-attn 2.8 ---------------------------------------------------------------------------------------------------------------


def signature(names: str) -> Signature:
    return Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names.split()])


SETTINGS = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
FORWARD = signature(f"q k v {SETTINGS} return_softmax")
BACKWARD = signature(f"dout q k v out softmax_lse dq dk dv {SETTINGS} deterministic")


def options_of(given: dict[str, Any]) -> Options:
    assert given["dropout_p"] == 0.0 and given["alibi_slopes"] is None
    left, right, scale, softcap = (given[name] for name in ("window_size_left", "window_size_right", "softmax_scale", "softcap"))
    if given["causal"] or (left, right) == (-1, -1):
        assert (left, right) == (-1, -1)
        return Options(scale=scale, causal=given["causal"], softcap=softcap)
    diagonal = given["k"].shape[1] - given["q"].shape[1]
    band = (None if left < 0 else diagonal - left, None if right < 0 else diagonal + right)
    return Options(scale=scale, mask=Mask(band=band), softcap=softcap)


def flash2_forward(*args: Any, **named: Any) -> tuple[Any, ...]:
    given = FORWARD.bind(*args, **named).arguments
    assert given["return_softmax"] is False
    out, lse = MATH.forward(given["q"], given["k"], given["v"], options_of(given))
    # the kernel's own convention for a row without keys
    return out, lse.masked_fill(lse == -torch.inf, torch.inf), None, None


def flash2_backward(*args: Any, **named: Any) -> None:
    given = BACKWARD.bind(*args, **named).arguments
    assert given["deterministic"] is True and given["softmax_lse"].is_contiguous()
    tensors = [given[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse")]
    for name, share in zip(("dq", "dk", "dv"), MATH.backward(*tensors, options_of(given)), strict=True):
        given[name].copy_(share)


@pytest.mark.parametrize(
    "options", [Options(scale=0.2), Options(scale=0.2, causal=True, softcap=0.4), Options(scale=0.2, mask=Mask(band=(-3, 6)))]
)
def test_flash2_is_reached_as_meant(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    vars(interface).update(_flash_attn_forward=flash2_forward, _flash_attn_backward=flash2_backward)
    vars(package).update(flash_attn_interface=interface)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    num_keys = 9 if options.causal else 12
    q, dout = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 4, 16)
    k, v = torch.randn(2, num_keys, 2, 16), torch.randn(2, num_keys, 2, 16)
    backend, expected = registry.get("flash2"), MATH.forward(q, k, v, options)
    out, lse = backend.forward(q, k, v, options)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    apart = lse.transpose(1, 2).contiguous().transpose(1, 2)
    grads = backend.backward(dout, q, k, v, out, apart, replace(options, deterministic=True))
    assert all(map(torch.equal, grads, MATH.backward(dout, q, k, v, out, lse, options)))


# --- FlashAttention-3 -------------------------------------------------------------------------------------------------------------


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
    q, k, v = (torch.randn(3, 40, heads, 64) for heads in (4, 2, 2))
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


# --- xformers ---------------------------------------------------------------------------------------------------------------------


def test_xformers_computes_windows_in_half_precision_alone() -> None:
    hardware = Hardware(device_type="cuda", capability=(9, 0), packages=frozenset({"xformers"}))
    xformers = registry.get("xformers")
    for dtype, reasons in ((torch.bfloat16, 0), (torch.float16, 0), (torch.float32, 1)):
        for needs_grad in (False, True):
            request = AttentionRequest(hardware=hardware, dtype=dtype, head_dim=64, window=True, needs_grad=needs_grad)
            assert len(xformers.reasons_against(request)) == reasons
            assert xformers.reasons_against(replace(request, window=False)) == []


def test_a_package_that_is_installed_and_fails_is_refused_with_the_cause() -> None:
    cause = "its library does not load (libcudart.so.12: cannot open shared object file)"
    hardware = Hardware(device_type="cuda", capability=(9, 0), unusable=(("xformers", cause),))
    [reason] = registry.get("xformers").reasons_against(AttentionRequest(hardware=hardware, dtype=torch.bfloat16, head_dim=64))
    assert reason == f"xformers is installed and cannot be used: {cause}"


@pytest.mark.parametrize("fails", ["library", "import"])
def test_what_is_wrong_with_xformers_is_found_by_importing_it(fails: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ops = tmp_path / "xformers" / "ops"
    ops.mkdir(parents=True)
    (tmp_path / "xformers" / "__init__.py").write_text("")
    (tmp_path / "xformers" / "_cpp_lib.py").write_text(
        "_cpp_library_load_exception = Exception('general')\n"
        "_cpp_library_load_exception.__cause__ = OSError('Could not load this library')\n"
        "_cpp_library_load_exception.__cause__.__context__ = OSError('libcudart.so.12: no such file')\n"
    )
    (ops / "__init__.py").write_text("")
    (ops / "fmha.py").write_text("" if fails == "library" else "import flash_attn_that_is_another_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    why = hardware_module._why_xformers_fails()
    for name in [name for name in sys.modules if name.partition(".")[0] == "xformers"]:
        del sys.modules[name]
    assert ("libcudart.so.12: no such file" if fails == "library" else "flash_attn_that_is_another_package") in why
    assert ("LD_LIBRARY_PATH" if fails == "library" else "uninstall") in why


def test_xformers_gets_what_its_interface_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of xformers.ops.fmha that computes in plain torch from the arguments that the real one takes."""
    stand_in, taken = _xformers_stand_in()
    monkeypatch.setattr(xformers_module, "_fmha", lambda dtype: (stand_in, stand_in.cutlass if dtype is torch.float32 else stand_in.flash))
    backend, math = registry.get("xformers"), registry.get("math")
    for dtype, L, S, G, K, causal, band in [
        (torch.float32, 5, 5, 2, 2, False, None),
        (torch.float32, 40, 70, 4, 2, True, None),
        (torch.bfloat16, 33, 33, 4, 1, True, None),
        (torch.bfloat16, 33, 50, 2, 2, False, (15, 19)),
        (torch.bfloat16, 33, 50, 2, 2, False, (10, None)),
    ]:
        torch.manual_seed(0)
        q, dout = (torch.randn(2, L, G, 16, dtype=dtype) for _ in range(2))
        k, v = (torch.randn(2, S, K, 16, dtype=dtype) for _ in range(2))
        options = Options(scale=0.3, causal=causal, mask=Mask(band=band))
        out, lse = backend.forward(q, k, v, options)
        expected = math.forward(q, k, v, options)
        bound = 1e-5 if dtype is torch.float32 else 2e-2
        assert lse.shape == (2, G, L)
        assert (out - expected[0]).abs().max() <= bound and (lse - expected[1]).abs().max() <= bound
        grads = backend.backward(dout, q, k, v, *expected, options)
        for got, right in zip(grads, math.backward(dout, q, k, v, *expected, options), strict=True):
            assert got.shape == right.shape and (got - right).abs().max() <= 5 * bound
        assert taken.pop() is (stand_in.cutlass.BwOp if dtype is torch.float32 else stand_in.flash.BwOp)


def _xformers_stand_in() -> tuple[SimpleNamespace, list[object]]:
    taken: list[object] = []
    math = registry.get("math")

    def options(bias: object, q: torch.Tensor, k: torch.Tensor, scale: float) -> Options:
        diagonal = k.shape[1] - q.shape[1]
        if isinstance(bias, tuple):
            return Options(scale=scale, mask=Mask(band=(diagonal - bias[0], diagonal + bias[1])))
        return Options(scale=scale, causal=bias == "causal")

    def forward(q, k, v, bias, *, scale, op):  # type: ignore[no-untyped-def]
        assert q.shape[2:] == k.shape[2:] == v.shape[2:], "xformers broadcasts no heads"
        out, lse = math.forward(q, k, v, options(bias, q, k, scale))
        # CUTLASS pads rows to a multiple of 32
        return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf) if op is cutlass.FwOp else lse

    def backward(dout, out, lse, q, k, v, bias, *, scale, op):  # type: ignore[no-untyped-def]
        taken.append(op)
        assert out.is_contiguous() and lse.is_contiguous() and q.shape[2:] == k.shape[2:] == v.shape[2:]
        return math.backward(dout, q, k, v, out, lse, options(bias, q, k, scale))

    flash, cutlass = (SimpleNamespace(FwOp=object(), BwOp=object()) for _ in range(2))
    masks = SimpleNamespace(LowerTriangularFromBottomRightMask=lambda: "causal", LocalAttentionFromBottomRightMask=lambda *sides: sides)
    stand_in = SimpleNamespace(
        memory_efficient_attention_forward_requires_grad=forward, memory_efficient_attention_backward=backward,
        attn_bias=masks, flash=flash, cutlass=cutlass,
    )  # fmt: skip
    return stand_in, taken
