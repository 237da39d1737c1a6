"""The adapters of libraries against stand-ins with their published signatures: flash-attn 2, FlashAttention-3 and xformers.

A stand-in computes in plain torch, so a swapped argument, a wrong window or a lost gradient shows as a wrong number.
"""

import itertools
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilated_attention import DilatedPattern
from dilated_attention.backends import Mask, Options, registry
from dilated_attention.backends import hardware as hardware_module
from dilated_attention.backends.base import ALL_FLOATS
from dilated_attention.backends.flash import flash3
from dilated_attention.backends.flash import xformers as xformers_module
from dilated_attention.testing import Case, Space, check_backend, measure

MATH = registry.get("math")


WINDOW = Case(pattern=DilatedPattern((2**62,), (1,)), window=(3, 2), num_queries=20, query_offset=9, num_keys=40, head_dim=16)


def put_on_cpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From now on this backend runs on CPUs, in any dtype."""
    backend = registry.get(name)
    can = replace(backend.capabilities, devices=frozenset({"cpu"}), dtypes=ALL_FLOATS, package=None, compute_capabilities=None)
    monkeypatch.setattr(backend, "capabilities", can)
    registry.cached.clear()


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Any case by this backend is its definition."""

    def check(name: str, dtype: torch.dtype = torch.float64) -> None:
        put_on_cpu(monkeypatch, name)
        report = check_backend(name, device="cpu", dtypes=[dtype], cases=40, space=Space.of_backend(name))
        assert report.cases > 30
        if dtype is not torch.float32:
            # the plan's band counts from the first query and key, flash-attn's windows from the last ones
            assert all(result.passes for result in measure(WINDOW, name, dtype))

    return check


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
    assert given["deterministic"] is torch.are_deterministic_algorithms_enabled() and given["softmax_lse"].is_contiguous()
    tensors = [given[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse")]
    for name, share in zip(("dq", "dk", "dv"), MATH.backward(*tensors, options_of(given)), strict=True):
        given[name].copy_(share)


def test_flash2_is_reached_as_meant(check: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    vars(interface).update(_flash_attn_forward=flash2_forward, _flash_attn_backward=flash2_backward)
    vars(package).update(flash_attn_interface=interface)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    check("flash2")
    torch.use_deterministic_algorithms(True)
    try:
        check("flash2")
    finally:
        torch.use_deterministic_algorithms(False)


# --- FlashAttention-3 -------------------------------------------------------------------------------------------------------------


class Flash3Ops:
    """``torch.ops.flash_attn_3`` in plain torch; what it returns is another Python object than what it wrote to."""

    packed = 0

    def fwd(self, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, ...]:
        queries, keys = rest[4:6]
        assert len(rest) == 31
        out = torch.empty_like(q) if rest[3] is None else rest[3]
        lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]))
        tensors = (q, k, v, out, lse)
        for rows, seen in self._problems(queries, keys, rest[9:11]):
            q_, k_, v_, out_, lse_ = (x if queries is None else x[None] for x in tensors)
            options = _options(rest[20:24], q_[:, rows], k_[:, seen])
            out_[:, rows], lse_[:, :, rows] = MATH.forward(q_[:, rows], k_[:, seen], v_[:, seen], options)
        return out.view_as(out), lse

    def bwd(self, *given: Any) -> None:
        tensors, (queries, keys) = given[:9], given[9:11]
        assert len(given) == 22 and given[5].is_contiguous() and given[19:] == (0.0, False, 0)
        for rows, seen in self._problems(queries, keys, given[13:15]):
            dout, q, k, v, out, lse, dq, dk, dv = (x if queries is None else x[None] for x in tensors)
            of_rows = dout[:, rows], q[:, rows], k[:, seen], v[:, seen], out[:, rows], lse[:, :, rows]
            dq[:, rows], dk[:, seen], dv[:, seen] = MATH.backward(*of_rows, _options(given[15:19], q[:, rows], k[:, seen]))

    def _problems(self, queries: Any, keys: Any, most: Any) -> list[tuple[slice, slice]]:
        if queries is None:
            return [(slice(None), slice(None))]
        Flash3Ops.packed += 1
        ranges = [[slice(a, b) for a, b in itertools.pairwise(x.tolist())] for x in (queries, keys)]
        assert tuple(most) == tuple(max(part.stop - part.start for part in side) for side in ranges)
        return list(zip(*ranges, strict=True))


def _options(given: Any, q: torch.Tensor, k: torch.Tensor) -> Options:
    names = ("softmax_scale", "causal", "window_size_left", "window_size_right")
    return options_of({"dropout_p": 0.0, "alibi_slopes": None, "softcap": 0.0, "q": q, "k": k} | dict(zip(names, given, strict=True)))


def test_flash3_is_reached_as_meant(check: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, and documents of one launch, too."""
    monkeypatch.setattr(flash3, "_ops", Flash3Ops)
    check("flash3")
    case = Case(pattern=DilatedPattern((2**62,), (1,)), num_queries=120, num_keys=120, heads=4, kv_heads=2, bounds=(0, 30, 90, 120))
    for is_causal in (False, True):
        assert all(result.passes for result in measure(replace(case, is_causal=is_causal), "flash3", torch.float64))
    # in one launch each
    assert Flash3Ops.packed == 4


# --- xformers ---------------------------------------------------------------------------------------------------------------------


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


def test_xformers_gets_what_its_interface_takes(check: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of xformers.ops.fmha that computes in plain torch from the arguments that the real one takes."""
    stand_in, taken = _xformers_stand_in()
    for kernels, dtype in ((stand_in.cutlass, torch.float32), (stand_in.flash, torch.bfloat16)):
        taken.clear()
        monkeypatch.setattr(xformers_module, "_fmha", lambda dtype, kernels=kernels: (stand_in, kernels))
        check("xformers", dtype)
        assert set(taken) == {kernels.BwOp}


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
