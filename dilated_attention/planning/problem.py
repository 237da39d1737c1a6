"""``Problem``: one attention call on one machine, to be planned. Every part of a plan reads this frozen record.

A *kind* is the name of a call: ``"dense"``, ``"dilated"``, ``"block_sparse"``, or over several processes ``"ring"``, ``"ring_dilated"``,
``"ring_block_sparse"``. What one process of a kind computes is one of the first three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from dilated_attention.backends import AttentionRequest, Hardware, detect, registry
from dilated_attention.engine.ops.prepare import rounded_length
from dilated_attention.engine.ops.settings import DENSE, dense_form, pattern_of
from dilated_attention.factory import EXAMPLES
from dilated_attention.models.config import RING_KINDS
from dilated_attention.pattern import BlockPattern, DilatedPattern
from dilated_attention.pattern.checks import as_int, differs, one_of, shown
from dilated_attention.planning.gpus import Gpu, machine_of
from dilated_attention.validation import DTYPES, MAX_HEAD_DIM, check_bool, check_counts

# each kind -> what one of its processes computes
KINDS = {kind: kind for kind in RING_KINDS.values()} | RING_KINDS
RINGS = tuple(RING_KINDS)
# dense attention as a dilated pattern: one segment, every position
WHOLE = pattern_of(DENSE)
# another machine is taken to have these packages, with which the tables of Hopper were measured
_PACKAGES = frozenset({"flash-attn-4", "triton"})
# the largest numbers that can be planned: beyond real hardware, yet figures stay exact and fast to compute
MOST = {"num_positions": 2**40, "num_heads": 512, "batch_size": 2**31, "world_size": 128}
MOST |= {"weight_shards": 2**20, "gpus": 2**16, "users": 2**31}
MOST_BRANCHES = 32
# the most random blocks of a row: the time to count them grows with each
MOST_DRAWN = 1024
# the most elements of q: byte counts that follow from it must fit in 64 bits
MOST_ELEMENTS = 2**56


def kind_of(computes: str, world_size: int) -> str:
    """Returns the kind of which each of ``world_size`` processes computes ``"dense"``, ``"dilated"`` or ``"block_sparse"`` attention."""
    return computes if as_int("world_size", world_size) == 1 else next(ring for ring, kind in RING_KINDS.items() if kind == computes)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call, checked and completed by ``make_problem``.

    ``kind``: a key of ``KINDS``; ``num_positions``: of the whole sequence; ``layout``, ``exchange``: how processes share it, and how they
    exchange keys, see ``plan_attention``; ``machine``: the GPU or CPU, for its figures; ``hardware``: the same, as the choice of backends
    sees it.
    """

    kind: str
    pattern: DilatedPattern | BlockPattern
    num_positions: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch_size: int
    dtype: torch.dtype
    world_size: int
    layout: str
    exchange: str
    is_causal: bool
    training: bool
    machine: Gpu
    hardware: Hardware

    @property
    def computes(self) -> str:
        """What one process computes: ``"dense"``, ``"dilated"`` or ``"block_sparse"``."""
        return KINDS[self.kind]

    @property
    def rows(self) -> int:
        """The number of positions on the rank that holds the most."""
        # this holds for a zigzag, too: its longer runs come first, so no rank gets a second one before every rank has one
        return -(-self.num_positions // self.world_size)

    @property
    def window(self) -> tuple[int, ...] | None:
        """The window of the dense attention that computes a block pattern (see ``dense_form``); None where lists of blocks do."""
        form = dense_form(self.pattern, self.is_causal, AttentionRequest(hardware=self.hardware, dtype=self.dtype, head_dim=self.head_dim))
        return None if form is None else form[0]

    def of_length(self, num_positions: int) -> Problem:
        """Returns the same call at another length."""
        return replace(self, num_positions=num_positions)

    def backend(self, *, backward: bool, length: int, block_masks: str = "none") -> tuple[str, AttentionRequest]:
        """Returns (name, request) of the backend that is chosen for problems of ``length`` rows. Of block lists, ``length`` is the mean
        number of keys of a row, and ``block_masks`` the kind of masks. Raises BackendUnavailable if no backend supports the request."""
        # the length as a call's, whose choice holds for all that round to one
        request = AttentionRequest(
            hardware=self.hardware, dtype=self.dtype, head_dim=self.head_dim, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            causal=self.is_causal, needs_grad=backward, length=rounded_length(length), window=bool(self.window),
        )  # fmt: skip
        if isinstance(self.pattern, BlockPattern) and self.window is None:
            request = replace(request, blocks=(self.pattern.q_block, self.pattern.k_block), block_masks=block_masks)
        return registry.select(request).name, request


def make_problem(
    kind: str,
    *,
    num_positions: int,
    num_heads: int,
    head_dim: int,
    batch_size: int = 1,
    num_kv_heads: int | None = None,
    dtype: torch.dtype | None = None,
    world_size: int = 1,
    layout: str | None = None,
    exchange: str = "auto",
    is_causal: bool = False,
    training: bool = True,
    segment_lengths: Any = None,
    dilation_rates: Any = None,
    pattern: DilatedPattern | BlockPattern | None = None,
    gpu: str | Gpu | None = "cpu",
    memory: int | None = None,
) -> Problem:
    """Returns the record of a call, with defaults filled in; raises ValueError or TypeError for what cannot be. Arguments: see
    ``plan_attention``."""
    one_of("kind", kind, tuple(KINDS))
    machine = machine_of(gpu, memory)
    sizes = {"num_positions": num_positions, "num_heads": num_heads, "batch_size": batch_size, "world_size": world_size}
    sizes = {name: as_int(name, size, minimum=1, maximum=MOST[name]) for name, size in sizes.items()}
    sizes["head_dim"], _, sizes["num_kv_heads"] = check_counts(head_dim, num_heads, num_kv_heads, most=MAX_HEAD_DIM)
    N, H, B, D = (sizes[name] for name in ("num_positions", "num_heads", "batch_size", "head_dim"))
    if N * H * B * D > MOST_ELEMENTS:
        raise ValueError(
            f"batch_size × num_positions × num_heads × head_dim is {B:,} × {N:,} × {H:,} × {D}; "
            f"expected at most 2**{MOST_ELEMENTS.bit_length() - 1} numbers in q"
        )
    check_bool("is_causal", is_causal)
    check_bool("training", training)
    for name, value, usual, takers in (
        ("world_size", world_size, 1, RINGS), ("layout", layout, None, RINGS), ("exchange", exchange, "auto", ("ring", "ring_dilated"))
    ):  # fmt: skip
        if differs(value, usual) and kind not in takers:
            why = "has none" if kind in RINGS else "one process computes"
            raise ValueError(
                f"{name} is {shown(value)} and kind is {kind!r}, which {why}; take one of {', '.join(takers)}, or leave it out"
            )
    layout = ("zigzag" if kind == "ring" else "contiguous") if layout is None else layout
    one_of("layout", layout, ("contiguous", "zigzag", *(("striped",) if kind != "ring_block_sparse" else ())))
    one_of("exchange", exchange, ("auto", "all_gather", "ring", "all_to_all"))
    is_here = machine.is_cpu or (torch.cuda.is_available() and torch.cuda.get_device_name() == machine.name)
    hardware = (
        detect("cpu" if machine.is_cpu else "cuda")
        if is_here
        else replace(EXAMPLES["hopper"], capability=machine.capability, packages=_PACKAGES, name=machine.name)
    )
    return Problem(
        kind=kind, pattern=_pattern_of(kind, segment_lengths, dilation_rates, pattern, num_heads), dtype=_dtype_of(dtype, machine),
        layout=layout, exchange=exchange, is_causal=is_causal, training=training, machine=machine, hardware=hardware, **sizes,
    )  # fmt: skip


def _dtype_of(dtype: Any, machine: Gpu) -> torch.dtype:
    """Returns the checked dtype; for None bfloat16 on a GPU that supports it, float16 on an older one, float32 on a CPU."""
    if dtype is None:
        return torch.float32 if machine.is_cpu else torch.bfloat16 if machine.capability >= (8, 0) else torch.float16
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise ValueError(f"dtype is {shown(dtype)}; expected torch.float16, bfloat16, float32 or float64")
    return dtype


def _pattern_of(kind: str, segment_lengths: Any, dilation_rates: Any, pattern: Any, num_heads: int) -> DilatedPattern | BlockPattern:
    """Returns the call's pattern; raises ValueError or TypeError if the arguments do not fit the kind."""
    computes, branches = KINDS[kind], segment_lengths is not None or dilation_rates is not None
    if computes == "dense" and (branches or pattern is not None):
        raise ValueError(f"kind is {kind!r}, which is dense; leave segment_lengths, dilation_rates and pattern out")
    if branches and pattern is not None:
        raise ValueError("segment_lengths or dilation_rates are given and pattern, too; give only one of them")
    if computes == "block_sparse" and not isinstance(pattern, BlockPattern):
        raise TypeError(
            f"kind is {kind!r} and pattern is {pattern!r}; it takes a pattern of dilated_attention.pattern, such as LocalWindow(1024)"
        )
    if getattr(pattern, "random_blocks", 0) > MOST_DRAWN:
        raise ValueError(
            f"random_blocks is {shown(pattern.random_blocks)}; expected at most {MOST_DRAWN:,} to plan for: "
            "take a density, with_sparsity(0.5)"
        )
    if computes == "dilated":
        if pattern is None and (segment_lengths is None or dilation_rates is None):
            raise ValueError(f"kind is {kind!r}, which needs segment_lengths and dilation_rates, such as [2048, 8192] and [1, 4]")
        pattern = DilatedPattern(segment_lengths, dilation_rates) if pattern is None else pattern
        if not isinstance(pattern, DilatedPattern):
            raise TypeError(f"pattern is a {type(pattern).__name__}; kind {kind!r} takes a DilatedPattern")
        # raises if the pattern does not suit so many heads
        pattern.offsets(num_heads)
        if pattern.num_branches > MOST_BRANCHES:
            raise ValueError(f"segment_lengths has {pattern.num_branches:,} entries; expected at most {MOST_BRANCHES} branches to plan for")
    return WHOLE if computes == "dense" else pattern
