"""Kernels of decoding and dropout compile for GPUs, on a machine without one: the interpreter takes what the compiler refuses."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLACES = ("stretch", "round", "pages")


def compiled(kernel: Any, type_of: Callable[[str], str], constants: dict[str, Any], aligned: bool = False, capability: int = 90) -> str:
    """PTX; ``aligned``: pointers and strides are multiples of 16, as tensors' are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name) for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    even = [name for name in names if name not in constants and (name.endswith("_ptr") or name[:2] in ("k_", "v_", "q_"))]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in even} if aligned else {}
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4}).asm["ptx"]


def rows(dtype: str, heads: int, dot: bool, kept: int, place: str) -> None:
    from dilated_attention.engine.decode.triton import rows_kernel

    def type_of(name: str) -> str:
        if name in ("q_ptr", "k_ptr", "v_ptr"):
            return f"*{dtype}"
        if name.startswith("part"):
            return "*fp32"
        if name == "kept_ptr":
            return "*u8" if kept else f"*{dtype}"
        if name == "table_ptr":
            return "*i32" if place == "pages" else f"*{dtype}"
        return "*i32" if name.endswith("_ptr") else "fp32" if name == "scale_log2" else "i32"

    sizes = {"HEADS": heads, "ROWS": 16, "GROUP": heads, "D": 64, "BLOCK_D": 64, "KEYS": 64, "RUNS": 8, "KEPT": kept, "DOT": dot}
    ptx = compiled(rows_kernel, type_of, {**sizes, "PAGED": place == "pages", "WRAPS": place == "round"}, aligned=True)
    # keys and values 16 bytes at a time: without the alignment of strides decoding took four times as long
    assert sum("cp.async.cg.shared.global" in line or "ld.global.v4" in line for line in ptx.splitlines()) >= 2, "narrow loads"


def append(dtype: str, rotated: bool, place: str) -> None:
    from dilated_attention.engine.decode.triton import append_kernel

    def type_of(name: str) -> str:
        if name in ("q_cos_ptr", "q_sin_ptr", "k_cos_ptr", "k_sin_ptr"):
            return "*fp32" if rotated else f"*{dtype}"
        if name in ("positions_ptr", "table_ptr"):
            return "*i32" if name == "table_ptr" and place == "pages" else "*i64"
        return f"*{dtype}" if name.endswith("_ptr") else "i32"

    constants = {"D": 64, "BLOCK_D": 64, "ROTATED": rotated, "PAGED": place == "pages", "WRAPS": place == "round"}
    compiled(append_kernel, type_of, constants)


def words() -> None:
    from dilated_attention.backends.dropout_triton import _words_kernel as kernel

    # one kernel for all numbers
    assert all(x.do_not_specialize for x in kernel.params if not x.name.endswith("_ptr") and not x.is_constexpr)
    (block,) = (x.name for x in kernel.params if x.is_constexpr)
    for capability in (80, 90, 100):
        ptx = compiled(kernel, lambda name: "*i32" if name.endswith("_ptr") else "i32", {block: 512}, True, capability)
        assert "st.global" in ptx and "st.local" not in ptx


def test_kernels_compile(tmp_path: Path) -> None:
    """In a process of its own, since this one's kernels are the interpreter's."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "9 kernels" in done.stdout


if __name__ == "__main__":
    # each kind and each place; what reads 16 bytes at a time in all places
    for place in PLACES:
        rows("bf16", 1, True, 0, place)
    rows("fp32", 1, False, 128, "pages")
    rows("fp32", 4, True, 0, "round")
    for dtype, rotated, place in (("bf16", True, "pages"), ("bf16", False, "round"), ("fp32", True, "stretch")):
        append(dtype, rotated, place)
    words()
    print("9 kernels")
