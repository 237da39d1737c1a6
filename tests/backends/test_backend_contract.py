"""What every backend promises the engine, and the traps of the libraries behind them, each of which somebody has met."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dilated_attention
from dilated_attention.backends import AttentionRequest, Options, detect, registry
from dilated_attention.backends.base import placed
from dilated_attention.pattern import DilatedPattern
from dilated_attention.testing import Case, measure

MATH = registry.get("math")
PACKAGE = Path(dilated_attention.__file__).parent


def backends(device: str, dtype: torch.dtype, **wanted: Any) -> list[str]:
    request = AttentionRequest(hardware=detect(device), dtype=dtype, needs_grad=True, **{"head_dim": 64} | wanted)
    return [name for name, reasons in registry.table(request) if not reasons]


def problem(device: str, dtype: torch.dtype, L: int = 40, S: int = 40) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(3)
    shapes = ((3, L, 4, 64), (3, S, 2, 64), (3, S, 2, 64))
    return tuple(torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes)


def test_parts_with_the_whole_softmax_add_up_to_its_gradient_and_an_idle_row_gives_nothing(device: str) -> None:
    """Backward of two halves of the keys with the whole's out and lse: exactly the whole backward; a row whose lse is +inf has no part."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    q, k, v = problem(device, dtype, L=64, S=96)
    dout, idle = torch.randn_like(q), torch.tensor([5], device=device)
    names = backends(device, dtype)
    assert names
    for name in names:
        backend, options = registry.get(name), Options(scale=0.125)
        out, lse = backend.forward(q, k, v, options)
        dq, *whole = backend.backward(dout.index_fill(1, idle, 0), q, k, v, out, lse, options)
        tensors = out, lse.index_fill(2, idle, torch.inf), options
        halves = [backend.backward(dout, q, k[:, half], v[:, half], *tensors) for half in (slice(0, 30), slice(30, 96))]
        assert all((half[0][:, 5] == 0).all() for half in halves), name
        parts = [halves[0][0].float() + halves[1][0].float(), *(torch.cat(x, 1) for x in zip(*(half[1:] for half in halves), strict=True))]
        for got, want in zip(parts, (dq, *whole), strict=True):
            torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)


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


def test_gradients_of_a_head_that_many_query_heads_read_are_summed_in_float32(device: str) -> None:
    case = Case(pattern=DilatedPattern((2**62,), (1,)), num_queries=192, num_keys=192, heads=64, kv_heads=1, head_dim=16, is_causal=True)
    for name in backends(device, torch.bfloat16, head_dim=16, num_heads=64, num_kv_heads=1, causal=True):
        assert [result for result in measure(case, name, torch.bfloat16, device) if not result.passes] == [], name


# FlashAttention-4 through torch is broken on 2.11–2.13, and a library has no business with global kernel switches
SWITCHES = {"activate_flash_attention_impl", "use_deterministic_algorithms", "enable_flash_sdp", "enable_cudnn_sdp", "enable_math_sdp"}
SWITCHES |= {"set_float32_matmul_precision", "sdpa_kernel", "allow_tf32"}


def launches(node: ast.AST, guarded: bool = False) -> Iterator[tuple[int, bool]]:
    """(line, whether it lies in a ``with`` that sets the device) of each ``kernel[grid](…)``."""
    if isinstance(node, ast.With):
        guarded = guarded or any(word in ast.unparse(item) for item in node.items for word in ("on_device(", "cuda.device"))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and ast.unparse(node.func.value).endswith("kernel"):
        yield node.lineno, guarded
    for child in ast.iter_child_nodes(node):
        yield from launches(child, guarded)


def test_every_kernel_is_launched_on_its_tensors_device() -> None:
    found = [
        (f"{path.relative_to(PACKAGE)}:{line}", guarded)
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, guarded in launches(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(found) >= 11
    assert [place for place, guarded in found if not guarded] == []


@pytest.mark.slow
def test_no_process_wide_switch_of_torch_no_pickle_and_no_eval_in_the_package() -> None:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Attribute, ast.Name)):
                assert (node.attr if isinstance(node, ast.Attribute) else node.id) not in SWITCHES, file
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), file
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] + ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
                assert not {"pickle", "marshal", "shelve"} & set(names), file


def test_a_backend_whose_method_takes_other_parameters_is_refused_when_it_is_registered() -> None:
    kind = type("Renamed", (type(MATH),), {"name": "renamed", "forward": lambda self, q, k, v, opts: (q, k)})
    with pytest.raises(
        TypeError, match=r"Renamed.forward takes \(self, q, k, v, opts\); expected .* \(self, q, k, v, options, keys, out\)"
    ):
        registry.register(kind())
    assert "renamed" not in registry.names()
