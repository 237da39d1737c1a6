"""Print the table of docs/backends.md from what backends declare: python docs/tables.py. tests/scripts/test_docs.py compares the two."""

from __future__ import annotations

import torch

from dilated_attention.backends import NESTED, NESTED_FACTS, Facts, registry

SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


def capabilities() -> str:
    """One row a backend, in the order of registration."""
    rows = [
        "| backend | device | dtypes | head dim | padding | window | dropout | backward | repeats | blocks |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, facts in [*((name, registry.get(name).facts) for name in registry.names()), (NESTED, NESTED_FACTS)]:
        rows.append(f"| `{name}` | {' | '.join(_row(facts))} |")
    return "\n".join(rows)


def _row(facts: Facts) -> list[str]:
    return [
        _devices(facts),
        ", ".join(short for dtype, short in SHORT.items() if dtype in facts.dtypes)
        + (", computes fp8" if "native" not in facts.precisions else ""),
        _head_dims(facts),
        *(_yes(able) for able in (facts.key_mask, facts.window, facts.dropout, facts.backward, facts.backward and facts.deterministic)),
        "only" if facts.blocks_only else _yes(bool(facts.block_sizes)),
    ]


def _devices(facts: Facts) -> str:
    if "cuda" not in facts.devices:
        return ", ".join(sorted(facts.devices)).upper()
    if len(facts.devices) > 1:
        return "any"
    if facts.capabilities is None:
        return "CUDA"
    low, high = (f"sm_{major}{minor}" for major, minor in facts.capabilities)
    return low if low == high else f"{low}–{high}"


def _head_dims(facts: Facts) -> str:
    if facts.head_dims is not None:
        return ", ".join(map(str, sorted(facts.head_dims)))
    if facts.head_dim_multiple > 1:
        return f"multiples of {facts.head_dim_multiple} to {facts.max_head_dim}"
    return f"to {facts.max_head_dim}"


def _yes(able: bool) -> str:
    return "yes" if able else "–"


if __name__ == "__main__":
    print(capabilities())
