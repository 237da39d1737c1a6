"""Shipped rates order backends and nothing more, each for its own architecture; an order that a user sets goes before them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilated_attention import explain_backend
from dilated_attention.backends import AttentionRequest, Registry, rates, registry
from dilated_attention.backends.rates import RateKind, RateRow, RateTable
from dilated_attention.factory import EXAMPLES

HOPPER, AMPERE = EXAMPLES["hopper"], EXAMPLES["ampere"]
F32, BF16 = torch.float32, torch.bfloat16


def ask(**wanted: object) -> AttentionRequest:
    return AttentionRequest(**({"hardware": HOPPER, "dtype": BF16, "head_dim": 64, "length": 2048} | wanted))  # type: ignore[arg-type]


@pytest.fixture
def fresh() -> Registry:
    """A registry without orders."""
    made = Registry()
    for name in registry.names():
        made.register(registry.get(name))
    return made


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[RateTable]:
    """Hopper's rates: of long and short forwards in half precision alone."""
    rows = [
        RateRow(64, 2048, {"math": 3.0, "flash2": 1.0, "of a later release": 0.5}),
        RateRow(64, 16384, {"flash2": 3.0, "sdpa_cudnn": 2.0, "math": 1.0}),
    ]
    made = RateTable("a GPU", "2026-01-02", "a test", {RateKind("forward", "half", causal=False, blocks=False): rows})
    monkeypatch.setattr(rates, "table_of", lambda architecture: made if architecture == "sm90" else None)
    yield made


def test_rates_order_their_kind_of_call_alone(table: RateTable, fresh: Registry) -> None:
    assert fresh.order(ask())[:3] == ("math", "flash2", "flash4")
    # reasons decide
    bare = ask(hardware=replace(HOPPER, packages=frozenset()), length=16384)
    assert fresh.order(bare)[0] == "flash2" and fresh.select(bare).name == "math"
    assert sorted(fresh.order(ask())) == sorted(registry.names())
    assert rates.rate_of("math", ask()) == 3.0 and rates.rate_of("flash4", ask()) is None
    for other in (
        {"causal": True},
        {"needs_grad": True},
        {"dtype": F32},
        {"dtype": torch.float64},
        {"key_mask": True},
        {"window": True},
        {"dropout": True},
        {"precision": "fp8"},
        {"blocks": (128, 128)},
        {"hardware": AMPERE},
    ):
        assert fresh.order(ask(**other))[0] == "flash4", other
        assert rates.rate_of("math", ask(**other)) is None
    # a forward is as deterministic as it is; a gradient was timed without
    assert fresh.order(ask(deterministic=True))[0] == "math"


def test_head_dims_round_up_and_lengths_go_to_the_nearest_by_ratio() -> None:
    rows = [RateRow(d, n, {"math": d * 1e6 + n}) for d in (32, 64, 128) for n in (256, 1024, 8192)]
    kinds = RateTable("", "", "", {RateKind("forward", "half", causal=False, blocks=False): rows})

    def row(head_dim: int, length: int) -> tuple[int, ...]:
        return tuple(map(int, divmod(kinds.tflops(ask(head_dim=head_dim, length=length))["math"], 1e6)))

    assert [row(d, 256)[0] for d in (1, 32, 33, 64, 65, 128, 129, 999)] == [32, 32, 64, 64, 128, 128, 128, 128]
    # 512 and 2896 lie in the middle, by ratio: the longer
    assert [row(32, n)[1] for n in (1, 256, 511, 512, 1024, 2800, 2900, 10**6)] == [256, 256, 256, 1024, 1024, 1024, 8192, 8192]
    assert row(64, 0) == (64, 8192)
    # a row that lacks a backend does not put it last
    rows.append(RateRow(64, 65536, {"flex": 1.0}))
    assert kinds.tflops(ask(head_dim=64, length=10**5)) == {"math": 64 * 1e6 + 8192, "flex": 1.0}


def test_shipped_tables_name_backends_that_exist() -> None:
    files = list((Path(rates.__file__).parent / "shipped").glob("*.json"))
    assert files
    for path in files:
        table = rates.table_of(path.stem)
        assert table is not None and table.rows and table.source and table.device and table.date
        for kind, rows in table.rows.items():
            assert kind.pass_name in ("forward", "backward") and kind.dtype_class in ("half", "float32")
            assert {type(kind.causal), type(kind.blocks), type(kind.window)} == {bool}
            for row in rows:
                assert row.head_dim >= 1 and row.length >= 1 and set(row.tflops) <= set(registry.names())
                assert list(row.tflops.values()) == sorted(row.tflops.values(), reverse=True) and min(row.tflops.values()) > 0


def test_the_explanation_says_what_made_the_order() -> None:
    assert "order: architecture order" in str(explain_backend(device="cpu"))
    shipped = rates.table_of("sm90")
    assert shipped is not None
    explanation = explain_backend(hardware=HOPPER, dtype=BF16)
    assert explanation.forward_basis == explanation.as_dict()["forward_basis"] == f"shipped table ({shipped.source}, {shipped.date})"
    assert explain_backend(hardware=HOPPER, dtype=BF16, window=True).forward_basis == "architecture order"
    assert registry.ranking(ask())["sdpa_cpu"] == "order of registration"
    assert explain_backend(device="cpu", backend="math").forward_basis == "asked for by name"
    with pytest.raises(ValueError, match="length is -1"):
        explain_backend(length=-1)


def test_an_order_of_ones_own_goes_before_rates_and_a_familys_after_them(table: RateTable, fresh: Registry) -> None:
    fresh.set_order("sm9x", ("flex", "math"))
    assert fresh.order(ask())[:4] == ("math", "flash2", "flex", "flash4")
    assert fresh.select(ask()).name == "math"
    fresh.set_order("sm90", ("sdpa_flash",))
    # at once, and the others as before
    assert fresh.select(ask()).name == "sdpa_flash"
    assert fresh.order(ask())[:4] == ("sdpa_flash", "math", "flash2", "flex")
    assert fresh.ranking(ask())["sdpa_flash"] == "architecture order"
    assert fresh.order(ask(blocks=(128, 128)))[0] == fresh.order(ask(hardware=AMPERE))[0] == "flash4"
    fresh.set_order("sm90", ("triton",), kind="blocks")
    assert fresh.order(ask(blocks=(128, 128)))[0] == "triton" and fresh.order(ask())[0] == "sdpa_flash"


def test_an_order_of_names_that_do_not_exist_is_refused(fresh: Registry) -> None:
    with pytest.raises(ValueError, match=r"names has \['flash9'\]; expected names of flash4, "):
        fresh.set_order("sm86", ("math", "flash9"))
    with pytest.raises(ValueError, match="kind is 'sparse'"):
        fresh.set_order("sm86", ("math",), kind="sparse")
