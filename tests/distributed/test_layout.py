"""Which positions each rank holds, and sequences cut and put together again over gloo processes."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention.distributed import LAYOUTS, Layout, local_positions, members_of, shard_sequence, spans, unshard_sequence
from tests.helpers.pool import pool_of

WORLD = 5


@given(seq_len=st.integers(0, 200), size=st.integers(1, 9), layout=st.sampled_from(LAYOUTS))
def test_ranks_partition_the_sequence(seq_len: int, size: int, layout: str) -> None:
    held = [[p for span in spans(seq_len, rank, size, layout) for p in range(*span)] for rank in range(size)]
    assert sorted(p for positions in held for p in positions) == list(range(seq_len))
    lengths = [len(positions) for positions in held]
    assert max(lengths) - min(lengths) <= (2 if layout == "zigzag" else 1)
    assert all(positions == sorted(positions) for positions in held)


def test_zigzag_pairs_the_first_run_with_the_last() -> None:
    assert [spans(16, rank, 2, "zigzag") for rank in range(2)] == [((0, 4, 1), (12, 16, 1)), ((4, 8, 1), (8, 12, 1))]
    assert spans(7, 1, 3, "striped") == ((1, 7, 3),)
    # ten positions in four runs: the first two runs are longer
    assert spans(10, 0, 2, "zigzag") == ((0, 3, 1), (8, 10, 1))


def test_one_process_communicates_nothing() -> None:
    x = torch.randn(2, 7, 3)
    assert members_of(None).size == 1
    for layout in LAYOUTS:
        (part,) = shard_sequence(None, [x], [1], layout=layout)
        assert torch.equal(part, x) and part.data_ptr() != x.data_ptr()
        assert torch.equal(unshard_sequence(None, [part], [1], layout=layout, seq_len=7)[0], x)
        assert local_positions(None, 7, layout=layout).tolist() == list(range(7))


def test_bad_input_is_refused() -> None:
    x = torch.randn(2, 7)
    with pytest.raises(ValueError, match="layout is 'diagonal'"):
        shard_sequence(None, [x], [1], layout="diagonal")
    with pytest.raises(ValueError, match=r"seq_dims is \[1, 1\] for 1 buffers"):
        shard_sequence(None, [x], [1, 1])
    with pytest.raises(ValueError, match=r"seq_dims\[0\] is 2 for a tensor of shape \(2, 7\); expected -2 to 1"):
        shard_sequence(None, [x], [2])
    for buffers in (x, None, 3):
        with pytest.raises(TypeError, match=rf"buffers is a {type(buffers).__name__}; expected a list of tensors"):
            shard_sequence(None, buffers, [1])  # type: ignore[arg-type]
    for dims in ([1.0], [None], "1", [torch.tensor([1, 2])]):
        with pytest.raises(TypeError, match=r"seq_dims.*; expected a"):
            shard_sequence(None, [x], dims)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"buffers\[0\] has \[7\] positions .* of 9 has \[9\]"):
        unshard_sequence(None, [x], [1], seq_len=9)
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        members_of("cp")


def round_trips(rank: int, world: int) -> int:
    for size in (1, 2, 3, world):
        group = dist.new_group(list(range(size)))
        if rank >= size:
            with pytest.raises(ValueError, match=f"global rank {rank} is not in the group"):
                members_of(group)
            continue
        for layout in LAYOUTS:
            for n in (0, 1, 4, 11, 24):
                check_round_trip(group, rank, size, layout, n)
        if size == 2:
            check_round_trip(group, rank, size, Layout(9, (((0, 2), (7, 9)), ((2, 7),))), 9)
    # lengths that are no sequence's: every rank says so, and none waits
    with pytest.raises(ValueError, match=r"buffers\[0\] has \[3, 1, 1, 1, 1\] positions on the group's ranks; a contiguous sequence of 7"):
        unshard_sequence(None, [torch.zeros(3 if rank == 0 else 1)], [0])
    # tensors that a collective would abort at
    for other in ([torch.zeros(1, 2, dtype=torch.float64)], [torch.zeros(1, 3)], [torch.zeros(1, 2)] * 2):
        mine = other if rank == 0 else [torch.zeros(1, 2)]
        with pytest.raises(ValueError, match=r"buffers are torch\.float.* on rank \d and others on ranks \[.*\]; expected the same dtypes"):
            unshard_sequence(None, mine, [0] * len(mine))
    # otherwise a rank would put the shards together in another order, or raise an error alone while the others wait
    for other_way in ({"layout": "zigzag"}, {"seq_len": 2 * world}, {"seq_len": 2 * world + 1}):
        with pytest.raises(
            ValueError, match=r"with layout .* and seq_len .* on rank \d and others on ranks \[.*the same layout, and seq_len on"
        ):
            unshard_sequence(None, [torch.zeros(2)], [0], **(other_way if rank == 0 else {}))  # type: ignore[arg-type]
    return rank


def check_round_trip(group: dist.ProcessGroup, rank: int, size: int, layout: str | Layout, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(2, n, 3, dtype=torch.float64, generator=generator).requires_grad_()
    mask = torch.rand(n, generator=generator) < 0.5
    part, mask_part = shard_sequence(group, [x, mask], [1, -1], layout=layout)
    positions = local_positions(group, n, layout=layout)
    assert torch.equal(part, x[:, positions]) and torch.equal(mask_part, mask[positions])
    whole, whole_mask = unshard_sequence(group, [part, mask_part], [1, 0], layout=layout, seq_len=n)
    assert torch.equal(whole, x) and torch.equal(whole_mask, mask)
    # every rank's loss reads the whole: its gradient comes back summed over ranks
    weight = torch.randn(whole.shape, dtype=torch.float64, generator=generator)
    (grad,) = torch.autograd.grad((whole * weight * (rank + 1)).sum(), x)
    expected = torch.zeros_like(x)
    expected[:, positions] = weight[:, positions] * size * (size + 1) / 2
    torch.testing.assert_close(grad, expected)


@pytest.mark.timeout(180)
def test_round_trips_over_processes() -> None:
    assert pool_of(WORLD).run(round_trips) == list(range(WORLD))


# --- layouts of any runs ----------------------------------------------------------------------------------------------------------


def test_a_layout_says_what_its_runs_lack() -> None:
    for runs, words in (
        ((((0, 5),), ((6, 9),)), "leave out position 5"),
        ((((0, 5),), ((4, 9),)), "hold twice position 4"),
        ((((0, 5),), ((5, 8),)), "end at position 8 of a sequence of 9"),
        ((((5, 9), (0, 5)),), "ascending"),
        ((), "expected the runs of at least one process"),
    ):
        with pytest.raises(ValueError, match=words):
            Layout(9, runs)
    with pytest.raises(ValueError, match="the sequence has 9 on 1"):
        shard_sequence(None, [torch.arange(9)], [0], layout=Layout(9, (((0, 9),), ())))
