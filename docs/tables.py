"""Print the table of docs/backends.md from what backends declare: python docs/tables.py. tests/scripts/test_docs.py compares the two."""

from __future__ import annotations

import torch

from dilated_attention.backends import Capabilities, registry

SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


def capabilities() -> str:
    """One row a backend, in the order of registration."""
    rows = [
        "| backend | device | dtypes | head dim | padding | window | dropout | backward | repeats | blocks |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows += [f"| `{name}` | {' | '.join(_row(registry.get(name).capabilities))} |" for name in registry.names()]
    return "\n".join(rows)


def _row(declared: Capabilities) -> list[str]:
    return [
        _devices(declared),
        ", ".join(short for dtype, short in SHORT.items() if dtype in declared.dtypes)
        + (", computes fp8" if "native" not in declared.precisions else ""),
        _head_dims(declared),
        *(
            _yes(able)
            for able in (
                declared.key_mask,
                declared.window,
                declared.dropout,
                declared.backward,
                declared.backward and declared.deterministic,
            )
        ),
        "only" if declared.blocks_only else _yes(bool(declared.block_sizes)),
    ]


def _devices(declared: Capabilities) -> str:
    if declared.devices != {"cuda"}:
        return "any" if "meta" in declared.devices else ", ".join(sorted(declared.devices)).upper()
    if declared.compute_capabilities is None:
        return "CUDA"
    low, high = (f"sm_{major}{minor}" for major, minor in declared.compute_capabilities)
    return low if low == high else f"{low}–{high}"


def _head_dims(declared: Capabilities) -> str:
    if declared.head_dim_multiple > 1:
        return f"multiples of {declared.head_dim_multiple} to {declared.max_head_dim}"
    return f"to {declared.max_head_dim}"


def _yes(able: bool) -> str:
    return "yes" if able else "–"


if __name__ == "__main__":
    print(capabilities())
