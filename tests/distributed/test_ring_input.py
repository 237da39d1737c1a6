"""Ring calls that are refused since they differ between ranks, with one text on all. Other bad input: functional/test_bad_input.py."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilated_attention import (
    Alibi,
    DilatedPattern,
    attention,
    ring_attention,
    ring_block_sparse_attention,
    ring_block_sparse_dilated_attention,
    ring_dilated_attention,
)
from dilated_attention.distributed import LAYOUTS
from dilated_attention.distributed.comm import call_consistency
from dilated_attention.distributed.comm.session import RingError
from dilated_attention.functional import arguments as functional_arguments
from dilated_attention.pattern import LocalWindow, MaskFunction
from dilated_attention.testing.cases import scattered
from tests.distributed.test_ring import check
from tests.helpers.pool import pool_of
from tests.helpers.ring_cases import spread_of


def tensors(rows: int = 8, heads: int = 4, kv_heads: int = 2, batch: int = 2, **changes: Any) -> dict[str, Any]:
    made = {"q": torch.zeros(batch, rows, heads, 8), "k": torch.zeros(batch, rows, kv_heads, 8), "v": torch.zeros(batch, rows, kv_heads, 8)}
    return made | changes


BOUNDS = torch.tensor([0, 3, 8], dtype=torch.int32)

# by whether a call has branches, and whether it has blocks
FUNCTIONS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): ring_attention,
    (True, False): ring_dilated_attention,
    (False, True): ring_block_sparse_attention,
    (True, True): ring_block_sparse_dilated_attention,
}


# --- in a world of four -----------------------------------------------------------------------------------------------------------

# of an argument: a rank's call is one without it
LEFT_OUT = ...


def call_of(rank: int, arguments: dict[str, Any]) -> str:
    """The text of what this rank's call raises, and whether it was fast."""
    arguments = {"timeout": 20.0} | arguments
    if arguments.pop("leaf", False):
        arguments["q"] = arguments["q"].requires_grad_()
    arguments = {name: x for name, x in arguments.items() if x is not LEFT_OUT}
    function = FUNCTIONS["segment_lengths" in arguments, "pattern" in arguments]
    began = time.monotonic()
    try:
        function(**arguments)
    except (ValueError, TypeError, RingError) as error:
        assert time.monotonic() - began < 5
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused(rank: int, world: int, calls: list[tuple[dict[str, Any], dict[int, dict[str, Any]]]]) -> list[str]:
    """Each call's text on this rank; then a call that is alike on all works as before."""
    texts = [call_of(rank, tensors() | base | odd.get(rank, {})) for base, odd in calls]
    assert call_of(rank, tensors()) == "no error"
    return texts


BASE = {"segment_lengths": [4, 16], "dilation_rates": [1, 2], "seq_len": 32}
BLOCKS: dict[str, Any] = {"pattern": LocalWindow(40, block_size=64), "head_steps": 1, "seq_len": 32}
UNION = BASE | BLOCKS
# with a scale, so that it is no call that the ranks have agreed on before
NO_BRANCHES = dict.fromkeys(("segment_lengths", "dilation_rates"), LEFT_OUT) | {"scale": 0.7}
NO_BLOCKS = dict.fromkeys(("pattern", "head_steps"), LEFT_OUT) | {"scale": 0.7}
OTHER = {"pattern": LocalWindow(41, block_size=64)}


def by_other_table(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (query // 64 + key // 64) % 3 == 1


# (arguments of all, those of rank 2, text): what one rank has of its own
ODD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(
        (BASE, {name: other}, re.escape(f"{name}: ranks 0, 1, 3 have {usual}, rank 2 has {other}"))
        for name, usual, other in (
            *(("segment_lengths", [4, 16], [4, 32]), ("dilation_rates", [1, 2], [1, 4]), ("head_offsets", "cyclic", "zero")),
            *(("branch_heads", "all", "split"), ("tail", "mask", "zero_keys"), ("mixture_grad", "exact", "detached")),
            *(("is_causal", False, True), ("scale", 8**-0.5, 0.5), ("softcap", None, 0.5), ("dropout_p", 0.0, 0.5)),
            *(("deterministic", False, True), ("layout", "contiguous", "zigzag"), ("exchange", "auto", "all_gather")),
            *(("seq_len", 32, None), ("seq_len", 32, 33), ("return_lse", False, True)),
        )
    ),
    (BASE, tensors(batch=1), r"q\.shape\[0\]: ranks 0, 1, 3 have 2, rank 2 has 1"),
    (BASE, tensors(heads=8), r"q\.shape\[2\]: ranks 0, 1, 3 have 4, rank 2 has 8"),
    (BASE, tensors(kv_heads=4), r"k\.shape\[2\]: ranks 0, 1, 3 have 2, rank 2 has 4"),
    (BASE, {name: x[..., :4] for name, x in tensors().items()}, r"q\.shape\[3\]: ranks 0, 1, 3 have 8, rank 2 has 4"),
    (BASE, {name: x.bfloat16() for name, x in tensors().items()}, r"dtype: .* have torch\.float32, rank 2 has torch\.bfloat16"),
    (BASE, tensors(rows=7), r"ranks hold \[8, 8, 7, 8\] positions; a contiguous sequence of 32 has \[8, 8, 8, 8\]"),
    (BASE, {"sinks": torch.zeros(4)}, "sinks: .* have None, rank 2 has given"),
    (BASE, {"bias": Alibi(torch.zeros(4))}, "bias: .* have None, rank 2 has by position"),
    (BASE, {"leaf": True}, "requires_grad: .* have False, rank 2 has True"),
    (BASE, {"key_padding_mask": torch.zeros(2, 8, dtype=torch.bool)}, "key_padding_mask: .* have None, rank 2 has given"),
    (
        tensors(batch=1, cu_seqlens=BOUNDS * 4) | BASE,
        {"cu_seqlens": BOUNDS[[0, 2]] * 4},
        r"cu_seqlens: .* have \[0, 12, 32\], rank 2 has \[0, 32\]",
    ),
    ({}, {"window": (1, 2)}, "window: ranks 0, 1, 3 have None, rank 2 has"),
    (BASE, {"backend": "flash4"}, "kernels: ranks 0, 1, 3 have available, rank 2 has unavailable: backend='flash4' cannot compute"),
    # one branch as long as any sequence is the other function, and nothing more is told
    (
        BASE,
        {"segment_lengths": [2**62], "dilation_rates": [1], "scale": 0.5},
        "^ranks disagree on function: ranks 0, 1, 3 have ring_dilated_attention, rank 2 has ring_attention; all ranks must make the same",
    ),
    # of blocks
    (BLOCKS, NO_BLOCKS, "function: ranks 0, 1, 3 have ring_block_sparse_attention, rank 2 has ring_attention"),
    (BLOCKS, OTHER, "ring_block_sparse_attention: .* on pattern: .* have .*40.*, rank 2 has .*41"),
    (BLOCKS, {"pattern": LocalWindow(40)}, r"block_size: .* have \(64, 64\), rank 2 has \(128, 128\)"),
    (
        BLOCKS | {"pattern": MaskFunction(scattered, block_size=64)},
        {"pattern": MaskFunction(by_other_table, block_size=64)},
        r"ranks disagree on pattern \(the blocks that its function keeps\)",
    ),
    (BLOCKS, {"head_steps": 2}, "ranks disagree on head_steps: .* have 1, rank 2 has 2"),
    (BLOCKS, {"backend": "flash4"}, "kernels: ranks 0, 1, 3 have available, rank 2 has unavailable: backend='flash4'"),
    (UNION, {"dilation_rates": [1, 4]}, "ring_block_sparse_dilated_attention: ranks disagree on branches: .* have .*, rank 2 has "),
    (UNION, NO_BRANCHES, "function: .* have ring_block_sparse_dilated_attention, rank 2 has ring_block_sparse_attention"),
    (UNION, NO_BLOCKS, "function: .* have ring_block_sparse_dilated_attention, rank 2 has ring_dilated_attention"),
    # several at once
    (BASE, {"is_causal": True, "scale": 0.5}, r"disagree on is_causal: .* have False, rank 2 has True; on scale: .* rank 2 has 0\.5"),
    # no rank is odd, yet the call is wrong
    (BASE | {"seq_len": 40}, {}, r"ranks hold \[8, 8, 8, 8\] positions; a contiguous sequence of 40 has \[10, 10, 10, 10\]"),
    (tensors(batch=1, cu_seqlens=BOUNDS) | BASE, {}, r"cu_seqlens is \[0, 3, 8\]; expected bounds .* end at N = 32"),
    (BASE | {"exchange": "all_to_all"} | tensors(heads=6), {}, "exchange='all_to_all': 6 heads are not a multiple of 4 ranks"),
    (BASE | {"exchange": "all_to_all"} | tensors(heads=12, kv_heads=3), {}, "3 key/value heads and 4 ranks: neither is a multiple"),
    (BASE | {"exchange": "all_to_all", "branch_heads": "split"}, {}, "exchange='all_to_all': branch_heads='split'"),
]


def test_what_differs_between_ranks_is_refused_alike_on_all() -> None:
    ranks = pool_of(4).run(refused, [(base, {2: odd}) for base, odd, _ in ODD])
    for index, (base, odd, text) in enumerate(ODD):
        texts = {rank[index] for rank in ranks}
        assert len(texts) == 1, (base, odd, texts)
        with pytest.raises(ValueError, match=text):
            name, _, message = texts.pop().partition(": ")
            assert name == "ValueError", message
            raise ValueError(message)


def own_choices(rank: int, world: int) -> list[str]:
    """Calls in which ranks differ in what each may choose, one call after the other of the same kind otherwise."""
    choices = [
        {},
        {"timeout": 10.0},
        {"backend": "math"},
        {"timeout": 15.0, "backend": "sdpa_cpu"},
        {"exchange": "2d"},
        {"exchange": "ring"},
    ]
    base = tensors() | {"seq_len": 8 * world}
    texts = [call_of(rank, base | (choice if rank == 1 else {})) for choice in choices]
    most, call_consistency.MOST_KINDS = call_consistency.MOST_KINDS, 4
    try:
        # more kinds than are remembered: afterwards no rank may skip the handshake
        texts += [call_of(rank, base | {"scale": 1.0 + i}) for i in range(4)]
        return [*texts, call_of(rank, base | ({"timeout": 12.0} if rank == 1 else {}))]
    finally:
        call_consistency.MOST_KINDS = most


def test_ranks_may_choose_their_timeout_and_backend() -> None:
    """A rank that calls with another timeout than before must not ask the others, who do not. "ring" and "2d" are "auto"."""
    assert pool_of(4).run(own_choices) == [["no error"] * 11] * 4


def in_two_groups(rank: int, world: int) -> set[str]:
    """Calls of all, before and after some ranks have made calls of a group of their own, so many that kinds are forgotten."""
    pair = dist.new_group([0, 1])
    x = {name: y[:1, :1] for name, y in tensors().items()}
    whole, own = x | {"seq_len": world}, x | {"seq_len": 2, "group": pair}
    most, call_consistency.MOST_KINDS = call_consistency.MOST_KINDS, 8
    try:
        texts = {call_of(rank, whole)}
        if rank < 2:
            texts |= {call_of(rank, own | {"scale": 1.0 + i}) for i in range(12)}
        return texts | {call_of(rank, whole)}
    finally:
        call_consistency.MOST_KINDS = most


def test_calls_of_one_group_leave_another_ones_agreement() -> None:
    assert pool_of(3).run(in_two_groups) == [{"no error"}] * 3


def group_and_mesh(rank: int, world: int) -> list[str]:
    mesh = dist.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "cp"))
    calls = [{"group": dist.group.WORLD, "mesh": mesh["cp"]}, {"mesh": mesh}, {"group": 3}]
    texts = [call_of(rank, tensors() | arguments) for arguments in calls]
    others = dist.new_group([0, 1])
    return [*texts, call_of(rank, tensors() | {"group": others})]


def test_groups_are_refused() -> None:
    for rank, texts in enumerate(pool_of(4).run(group_and_mesh)):
        both, axes, number, not_in = texts
        assert both.startswith("ValueError: group and mesh are both given")
        assert axes.startswith("ValueError: the mesh has 2 axes ('dp', 'cp'); a sequence is spread over one: pass mesh['cp']")
        assert number.startswith("TypeError: expected a ProcessGroup, a DeviceMesh of one axis or None, got int")
        assert not_in == "no error" if rank < 2 else f"ValueError: global rank {rank} is not in the group" in not_in


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("batch", "length"), [(0, 16), (2, 0), (2, 1)])
def test_nothing_is_attended_to_as_on_one_process(batch: int, length: int, world: int) -> None:
    """A batch of 0, or fewer positions than ranks."""
    branches, blocks = DilatedPattern((2, 16), (1, 2)), LocalWindow(64, block_size=64)
    ways: list[dict[str, Any]] = [
        *({"layout": layout} for layout in LAYOUTS),
        {"exchange": "all_to_all"},
        {"window": (2, 2)},
        {"is_causal": True, "dropout_p": 0.5},
        {"pattern": branches},
        {"pattern": branches, "mixture_grad": "detached", "lse_grad": False},
        {"pattern": replace(branches, tail="zero_keys", branch_heads="split")},
        {"pattern": blocks},
        {"pattern": blocks, "layout": "zigzag", "is_causal": True},
    ]
    check(pool_of(world), [spread_of(n=length, batch=batch, padding=padding, **way) for way in ways for padding in ("none", "some")])


def test_of_a_known_call_only_the_length_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, checked = [], functional_arguments.checked_settings
    monkeypatch.setattr(functional_arguments, "checked_settings", lambda *given, **more: made.append(given) or checked(*given, **more))
    q = torch.randn(2, 12, 3, 8)
    for n in (8, 9, 12, 8):
        x = q[:, :n]
        assert torch.equal(ring_attention(x, x, x, seq_len=n, scale=0.1234), attention(x, x, x, scale=0.1234))
    # one of each function
    assert len(made) == 2
    for rows, seq_len, error in ((8, -1, "seq_len is -1"), (8, 8.0, "seq_len is 8.0"), (8, True, "seq_len is True"), (8, 9, "ranks hold")):
        with pytest.raises((TypeError, ValueError), match=error):
            ring_attention(q[:, :rows], q[:, :rows], q[:, :rows], seq_len=seq_len, scale=0.1234)
    for rows in (7, 9):
        with pytest.raises(ValueError, match=f"q has {rows} rows and k has 8"):
            ring_attention(q[:, :rows], q[:, :8], q[:, :8], seq_len=8, scale=0.1234)
