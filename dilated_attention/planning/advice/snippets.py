"""Generates code to paste: the call that creates what was chosen, and the lines that precede it."""

from __future__ import annotations

from typing import Any

from dilated_attention.pattern import GlobalLocal
from dilated_attention.planning.advice.rules import Mesh


class _Text(str):
    """Source code that is inserted verbatim."""

    __repr__ = str.__str__


def mesh_options(base: str, is_causal: bool) -> dict[str, Any]:
    """Returns the options for a sequence shared by several processes; ``mesh`` is the variable that ``processes`` creates."""
    return {"mesh": _Text('mesh["cp"]'), "layout": "zigzag" if base == "dense" and is_causal else "contiguous"}


def imports(function: str, base: str) -> list[str]:
    """Returns the import lines of the library function, and of the pattern that ``call_text`` writes for a kind."""
    lines = [f"from dilated_attention import {function}"] if function else []
    return lines + (["from dilated_attention.pattern import GlobalLocal"] if base == "block_sparse" else [])


def processes(mesh: Mesh, is_cuda: bool) -> list[str]:
    """Returns the lines that start the processes of several GPUs and arrange them in a mesh."""
    count = mesh.data * mesh.context
    if count == 1:
        return []
    device = "cuda" if is_cuda else "cpu"
    return [
        "import torch.distributed as dist",
        f"dist.init_process_group()  # torchrun --nproc_per_node={count}" if count <= 8 else "dist.init_process_group()",
        f'mesh = dist.init_device_mesh("{device}", ({mesh.data}, {mesh.context}), mesh_dim_names=("dp", "cp"))',
    ]


def call_text(function: str, name: str, arguments: dict[str, Any], *, bound: str | None = None) -> str:
    """Returns ``model = create_model(name, argument=…)``; ``bound`` replaces the variable name."""
    variable = {"create_model": "model = ", "create_attention": "attention = "}.get(function, "") if bound is None else bound
    listed = [repr(name), *(f"{key}={shown(value)}" for key, value in arguments.items())]
    return f"{variable}{function}({', '.join(listed)})".replace("'", '"')


def shown(value: Any) -> str:
    """Returns a value as source code."""
    return f"GlobalLocal({value.window}, {value.global_tokens})" if isinstance(value, GlobalLocal) else repr(value)
