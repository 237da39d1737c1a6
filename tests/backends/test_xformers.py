"""The xformers adapter: its requests, why an installed xformers may be unusable, and its calls against a stand-in of its interface.

The stand-in computes in plain torch, so a swapped argument or a wrong window shows as a wrong number.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dilated_attention.backends import AttentionRequest, Hardware, Mask, Options, registry
from dilated_attention.backends import hardware as hardware_module
from dilated_attention.backends.flash import xformers as xformers_module


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
