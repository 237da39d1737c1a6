"""Calls on spread sequences, on CPUs and GPUs: how they are drawn, and what runs inside the pool's processes.

Every rank makes the whole inputs from the case's seed and cuts out its rows; the parent puts the ranks' results together and judges.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dilated_attention import DilatedPattern
from dilated_attention.distributed import LAYOUTS, Layout, ring_pass, spans
from dilated_attention.distributed.ring_pass import why_no_heads
from dilated_attention.pattern import BlockPattern
from dilated_attention.testing import Case, Inputs, Result, Space, inputs, random_case, results
from dilated_attention.testing.cases import random_branches
from tests.helpers.forms import ring
from tests.helpers.pool import here, patience

HEADS = ((4, 4), (4, 2), (6, 2), (8, 1))
WHOLE = DilatedPattern((2**62,), (1,), "zero")
SEQUENCE_DIM = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What the kernels of a sweep's calls are compiled for, so that a call more compiles nothing.

    Args:
        heads: (H, Hk) pairs to draw from; None for many. A pair divides into the ranks of every world that draws it.
        backend: by name.
        instead: (option, another backend) of calls with ``"padding"``, ``"window"`` or ``"dropout"``; the first that a call has counts.
        stretch: of the sequence's length.
        shapes: how many lengths, each with its branches, which merging kernels are compiled for; 0 for another one each call.
    """

    dtype: torch.dtype = torch.float64
    head_dim: int = 8
    heads: tuple[tuple[int, int], ...] | None = None
    backend: str = "auto"
    instead: tuple[tuple[str, str], ...] = ()
    stretch: int = 1
    shapes: int = 0


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One call of all ranks. Its repr rebuilds it.

    Args:
        case: of the whole sequence; with ``WHOLE`` as its pattern the call is one of ``ring_attention``.
        exchange, head_steps: of calls without blocks, and of those with blocks.
        seq_len_given: the ranks are told N.
        steps: the byte limits are 1, so that an exchange has as many steps as it can and two of them in memory, and branches across ranks
            are computed apart from those within.
        memory: of each rank's q, k and v: ``"rows"`` one after the other · ``"heads"`` first · ``"slice"`` of wider tensors.
    """

    case: Case
    layout: str = "contiguous"
    exchange: str = "auto"
    head_steps: int | None = None
    seq_len_given: bool = True
    steps: bool = False
    memory: str = "rows"
    backend: str = "auto"


def draw(world: int, seed: int, kernel: Kernel = Kernel()) -> Spread:
    """A random call of ``world`` ranks."""
    rng = random.Random(world * 100_003 + seed)
    of_shape = random.Random(world * 100_003 + seed // 100 * 100 + seed % kernel.shapes) if kernel.shapes else rng
    # "ring" stands for the two names that run as "auto"
    exchange = rng.choice(["auto", "all_gather", "all_gather", "all_gather", "all_to_all", "ring"])
    parts = world if exchange == "all_to_all" else 1
    choices = list(kernel.heads or (*HEADS, (world, world), (2 * world, world), (world, 1)))
    heads, kv_heads = rng.choice([pair for pair in choices if why_no_heads(*pair, parts, "all") is None])
    n = of_shape.choice(
        [
            of_shape.randint(0, 2),
            of_shape.randint(0, 2 * world),
            of_shape.randint(1, 48),
            of_shape.randint(1, 96),
            2 * world * of_shape.randint(1, 6),
        ]
    )
    n = n * kernel.stretch + (of_shape.randint(0, kernel.stretch - 1) if kernel.stretch > 1 and n % world else 0)
    dense, window = rng.random() < 0.35, None
    if dense and rng.random() < 0.5:
        window = (rng.choice([None, rng.randint(0, 9), rng.randint(0, n)]), rng.choice([None, rng.randint(0, 9), rng.randint(0, n)]))
    is_wide = kernel.dtype is torch.float64
    case = random_case(rng, Space(window=False, softcap=is_wide, bias=is_wide, max_length=n))
    case = dataclasses.replace(
        case,
        pattern=WHOLE if dense else _pattern(of_shape, n, world, heads, exchange != "all_to_all"),
        num_queries=n,
        num_keys=n,
        query_offset=0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=kernel.head_dim,
        window=window,
        bounds=None if case.bounds is None else (*(min(bound, n) for bound in case.bounds[:-1]), n),
        mixture_grad="exact" if dense else case.mixture_grad,
    )
    options = {"padding": case.padding != "none", "window": case.window is not None, "dropout": case.dropout_p > 0}
    return Spread(
        case=case,
        layout=rng.choice((*LAYOUTS, random_layout(rng, n, world).name)),
        exchange=exchange,
        seq_len_given=rng.random() < 0.7,
        steps=rng.random() < 0.4,
        memory=rng.choice(["rows", "rows", "heads", "slice"]),
        backend=next((other for option, other in kernel.instead if options[option]), kernel.backend),
    )


def _pattern(rng: random.Random, n: int, world: int, heads: int, may_split: bool) -> DilatedPattern:
    """Segments inside a rank, of several ranks, aligned with neither, longer than the sequence."""
    pattern, share = random_branches(rng, heads, n, None), n // world
    lengths = [max(rate, rng.choice([length, length, share, 2 * share, share // 2, share * world])) for length, rate in pattern.branches]
    return dataclasses.replace(pattern, segment_lengths=tuple(lengths), branch_heads=pattern.branch_heads if may_split else "all")


def random_layout(rng: random.Random, seq_len: int, world: int) -> Layout:
    """Runs of random lengths, dealt at random: neighbours may go to one rank, and a rank may get none."""
    cuts = sorted({0, seq_len, *(rng.randint(0, seq_len) for _ in range(rng.randint(0, 4 * world)))})
    runs: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for start, end in itertools.pairwise(cuts):
        runs[rng.randrange(world)].append((start, end))
    return Layout(seq_len, tuple(tuple(mine) for mine in runs))


def positions(seq_len: int, rank: int, world: int, layout: str) -> torch.Tensor:
    return torch.cat([torch.arange(*span) for span in spans(seq_len, rank, world, layout)])


def local_inputs(x: Inputs, rows: torch.Tensor, memory: str = "rows") -> Inputs:
    """The rows of one rank, lying as ``memory`` says."""
    q, k, v, dout = (_laid_out(y[:, rows], memory) for y in (x.q, x.k, x.v, x.dout))
    padding = None if x.key_padding_mask is None else x.key_padding_mask[:, rows]
    coordinates = None if x.coordinates is None else x.coordinates[:, rows]
    return Inputs(q, k, v, dout, x.dlse[..., rows], padding, x.cu_seqlens, x.sinks, coordinates, x.slopes)


def _laid_out(x: torch.Tensor, memory: str) -> torch.Tensor:
    if memory == "heads":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if memory == "slice":
        return torch.stack([x, torch.full_like(x, 7.0)], 3)[:, :, :, 0]
    return x


def ring_call(spread: Spread, group: Any = None, **options: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The call as ``testing.results`` makes it."""

    arguments = {"group": group, "layout": spread.layout, "backend": spread.backend, "timeout": patience()}
    arguments["seq_len"] = spread.case.num_keys if spread.seq_len_given else None
    # all keys of blocks come in one exchange, which has no name
    name = "head_steps" if isinstance(spread.case.pattern, BlockPattern) else "exchange"
    arguments |= {name: getattr(spread, name)} | options

    def function(case: Case, x: Inputs, *qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if case.pattern == WHOLE:
            case = dataclasses.replace(case, window=case.window or (None, None))
        return ring(case, x, *qkv, **arguments)

    return function


@contextmanager
def byte_limits_of_one() -> Iterator[None]:
    before = ring_pass.STEP_BYTES, ring_pass.HOST_SECONDS, ring_pass.SMALL_BYTES
    # calls of a kind share their preparation, which depends on the limits
    ring_pass._setups.clear()
    ring_pass.STEP_BYTES, ring_pass.HOST_SECONDS, ring_pass.SMALL_BYTES = 1, dict.fromkeys(before[1], 1e-30), 0
    try:
        yield
    finally:
        ring_pass.STEP_BYTES, ring_pass.HOST_SECONDS, ring_pass.SMALL_BYTES = before
        ring_pass._setups.clear()


def run(
    rank: int, world: int, spreads: Sequence[Spread], dtype: torch.dtype = torch.float64, times: int = 1, deterministic: bool = False
) -> list[list[Result]]:
    """This rank's results of each call, ``times`` in a row."""
    return [run_one(spread, rank, world, None, dtype, times, deterministic=deterministic) for spread in spreads]


def run_one(
    spread: Spread, rank: int, world: int, group: Any, dtype: torch.dtype = torch.float64, times: int = 1, **options: Any
) -> list[Result]:
    case = spread.case
    x = local_inputs(inputs(case, dtype, here()), positions(case.num_keys, rank, world, spread.layout).to(here()), spread.memory)
    function = ring_call(spread, group, **options)
    try:
        with byte_limits_of_one() if spread.steps else nullcontext():
            return [{name: y.cpu() for name, y in results(function, case, x).items()} for _ in range(times)]
    except Exception as error:
        raise RuntimeError(f"rank {rank} of {world}: {spread}") from error


def together(spread: Spread, parts: Sequence[Result]) -> Result:
    """The ranks' results as those of the whole sequence."""
    n, world = spread.case.num_keys, len(parts)
    rows = torch.cat([positions(n, rank, world, spread.layout) for rank in range(world)])
    order = rows.argsort()
    dims = {name: dim for name, dim in SEQUENCE_DIM.items() if name in parts[0]}
    whole = {name: torch.cat([part[name] for part in parts], dim).index_select(dim, order) for name, dim in dims.items()}
    # a rank has the gradient of sinks and slopes of its own rows
    return whole | {name: torch.stack([part[name] for part in parts]).sum(0) for name in ("dsinks", "dslopes") if name in parts[0]}


def in_subgroup(rank: int, world: int, ranks: Sequence[int], spreads: Sequence[Spread], as_mesh: bool) -> list[Result] | None:
    """Calls of a part of the processes; None on the others."""
    if as_mesh:
        # columns of the mesh are the sequences: ranks [i, i + world / 2, …]
        mesh = dist.init_device_mesh(here().type, (world // 2, 2), mesh_dim_names=("cp", "dp"))["cp"]
        return [run_one(spread, mesh.get_local_rank(), mesh.size(), mesh)[0] for spread in spreads]
    group = dist.new_group(list(ranks))
    if rank not in ranks:
        return None
    return [run_one(spread, list(ranks).index(rank), len(ranks), group)[0] for spread in spreads]


def with_changes(spread: Spread, **changes: Any) -> Spread:
    """Another case or another way to spread it, by the names of either's fields."""
    own = {field.name for field in dataclasses.fields(Spread)}
    case = dataclasses.replace(spread.case, **{name: value for name, value in changes.items() if name not in own})
    return dataclasses.replace(spread, case=case, **{name: value for name, value in changes.items() if name in own})


# chosen calls, where lengths, segments, heads and ranks meet at their edges


def spread_of(pattern: DilatedPattern = WHOLE, n: int = 48, **changes: Any) -> Spread:
    case = Case(pattern=pattern, batch=2, num_queries=n, num_keys=n, heads=4, kv_heads=2, lse_grad=True, seed=3)
    return with_changes(Spread(case=case), **changes)


def biases() -> list[Spread]:
    """By position and by place, of branches and of all keys, where rows move, where heads do, and where neither does."""
    branches = DilatedPattern((16, 32, 100), (1, 2, 4))
    ways: list[dict[str, Any]] = [
        {"pattern": WHOLE, "layout": "zigzag", "is_causal": True, "bias": "alibi"},
        {"pattern": branches, "layout": "striped", "bias": "plane"},
        {"pattern": WHOLE, "exchange": "all_to_all", "bias": "line", "batch": 2},
        {"pattern": branches, "bounds": (0, 9, 31, 40), "bias": "plane"},
    ]
    return [spread_of(n=40, head_dim=32, **{"heads": 2, "kv_heads": 1, "batch": 1, **way}) for way in ways]


def of_each_kind() -> list[Spread]:
    """Of every exchange and layout one dense call and one dilated."""
    return [
        spread_of(pattern, 61, exchange=exchange, layout=layout, is_causal=True, steps=True)
        for pattern in (WHOLE, DilatedPattern((8, 40, 61), (1, 2, 3)))
        for exchange in ("all_gather", "all_to_all")
        for layout in LAYOUTS
    ]


def part_first(rank: int, world: int, ranks: Sequence[int], spread: Spread) -> Result:
    """A call of all processes, after some of them have made groups that the others know nothing of."""
    in_subgroup(rank, world, ranks, [spread], as_mesh=False)
    whole = dist.new_group(list(range(world)))
    return run_one(spread, rank, world, whole)[0]


def lse_of_the_last(rank: int, world: int, spread: Spread) -> Result:
    """A call where only the last rank's loss depends on lse."""
    return run_one(with_changes(spread, lse_grad=rank == world - 1), rank, world, None)[0]
