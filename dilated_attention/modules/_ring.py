"""How a module's sequence is sharded over processes: looked up once and kept as plain values, so that modules can be copied and pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from dilated_attention import validation as check
from dilated_attention.distributed.comm.call_consistency import agree, checked_length
from dilated_attention.distributed.comm.group import group_name_of, members_named
from dilated_attention.distributed.ring_pass import EXCHANGES
from dilated_attention.distributed.sharding.layout import Layout, layout_name, positions_of, short_name
from dilated_attention.functional.arguments import place_in
from dilated_attention.functional.options import DEFAULTS
from dilated_attention.pattern.checks import as_int, one_of

# the options that are looked up here
RING_OPTIONS = ("group", "mesh", "layout", "exchange", "ranks_per_node", "timeout")


@dataclass(frozen=True, kw_only=True)
class RingSettings:
    """The checked arguments of ``ring_dilated_attention`` that say how the sequence is sharded.

    Args:
        group_name: the name by which torch.distributed finds the group again in this process; "" for one process. Names are only valid
            within a job: between jobs, transfer a ``state_dict``, not a pickled module.
        layout: see ``ring_dilated_attention``; a ``Layout`` by its name.
        exchange, ranks_per_node, timeout: see ``ring_dilated_attention``.
        before_init: no group was given and torch.distributed was not initialised, so this process was assumed to be alone.
    """

    group_name: str
    layout: str
    exchange: str
    ranks_per_node: int | None
    timeout: float
    before_init: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RingSettings:
        """Builds the settings from a module's options; ValueError or TypeError if the layout, exchange or group does not exist or lacks
        this process."""
        group, mesh, layout, exchange, per_node, timeout = ({**DEFAULTS, **options}[name] for name in RING_OPTIONS)
        one_of("exchange", exchange, ("auto", *EXCHANGES))
        return cls(
            group_name=group_name_of(group, mesh),
            layout=layout_name(layout),
            exchange=exchange,
            ranks_per_node=None if per_node is None else as_int("ranks_per_node", per_node, minimum=1),
            timeout=check.check_timeout(timeout),
            before_init=group is None and mesh is None and not (dist.is_available() and dist.is_initialized()),
        )

    def arguments(self) -> dict[str, Any]:
        """Returns the settings as arguments for the functional API and other modules; exchange and ranks_per_node, which not all of these
        have, only where they are not the default."""
        self._check_still_alone()
        values = {name: getattr(self, name) for name in RING_OPTIONS[2:]}
        return {"group": self.group_name, **{name: value for name, value in values.items() if value not in ("auto", None)}}

    def place(self) -> tuple[int, int]:
        """Returns (rank, W) in the group. It is looked up at each call: a module unpickled by another process has another rank."""
        self._check_still_alone()
        return place_in(self.group_name)

    def whole_length(self, rows: int, **same: object) -> int:
        """Returns N, the sum of all ranks' rows, which the ranks exchange here; all must call it. ``same``: other values to be equal.

        Raises ValueError on all ranks alike if the rows are no shards of a sequence in this layout or values differ; and inside
        torch.compile, whose graph cannot contain a number received from other processes.
        """
        if not self.group_name:
            return rows
        if torch.compiler.is_compiling():
            raise ValueError("seq_len is None inside torch.compile; positions depend on it: give seq_len, the length of the whole sequence")
        members = members_named(self.group_name)
        same = {"function": "seq_len, asked for", "layout": short_name(self.layout), "seq_len": "None", **same}
        return checked_length(self.layout, -1, agree(members, same, rows, self.timeout))

    def positions(self, x: torch.Tensor, seq_len: int) -> torch.Tensor:
        """Returns the positions in the whole sequence of the rows of x (B, n, …), as int64 (n,); zeros if n rows are not a shard of
        seq_len, which the attention that follows then refuses, on all processes alike."""
        self._check_still_alone()
        # positions have no derivative, so autograd does not need to see the op
        return shard_positions(x.detach(), seq_len, self.group_name, self.layout)

    def extra_repr(self) -> str:
        parts = [f"layout={short_name(self.layout)!r}"]
        if self.exchange != "auto":
            parts.append(f"exchange={self.exchange!r}")
        if self.ranks_per_node is not None:
            parts.append(f"ranks_per_node={self.ranks_per_node}")
        if not self.group_name:
            parts.append("one process")
        return ", ".join(parts)

    def _check_still_alone(self) -> None:
        # otherwise each process would silently attend to its own shard only
        if self.before_init and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "this module was built before torch.distributed.init_process_group, for one process, "
                f"and now there are {dist.get_world_size()}; build it afterwards, or pass group= or mesh="
            )


def set_layout(module: nn.Module, layout: Layout) -> None:
    """Makes a module and all modules in it take their rows in another layout from now on: of another batch of packed documents.

    All processes must call it with the same layout, and after the backward of the batch before: what activation checkpointing computes
    again, it computes in the layout that is then set.

    Args:
        module: a ring's module, or a model that was made with ``group`` or ``mesh``.
        layout: of the next batch, e.g. from ``balanced_layout``.

    Raises:
        TypeError: if the layout is not a ``Layout``.
        ValueError: if the module has no sequence that processes share.

    >>> layout = balanced_layout(
    ...     [*patterns], N, W, H, is_causal=True, cu_seqlens=cu_seqlens)
    >>> set_layout(model, layout)
    >>> tokens, targets = shard_sequence(
    ...     group, [tokens, targets], [1, 1], layout=layout)
    >>> loss = model(tokens, targets=targets, cu_seqlens=cu_seqlens, seq_len=N)
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is {layout!r} ({type(layout).__name__}); expected a Layout, e.g. from balanced_layout")
    rings = [part for part in module.modules() if isinstance(getattr(part, "ring", None), RingSettings)]
    if not rings:
        raise ValueError(f"module is a {type(module).__name__} without a ring, so there is no layout to set; pass group= or mesh= to it")
    for part in rings:
        part.ring = replace(cast(RingSettings, part.ring), layout=layout.name)  # type: ignore[assignment]


@torch.library.custom_op("dilated_attention::shard_positions", mutates_args=())
def shard_positions(x: torch.Tensor, seq_len: int, group_name: str, layout: str) -> torch.Tensor:
    """See ``RingSettings.positions``. It is an op so that a compiled graph contains neither this process's rank nor a fixed length."""
    members = members_named(group_name)
    positions = positions_of(seq_len, members.rank, members.size, layout, x.device)
    return positions if positions.shape[0] == x.shape[1] else positions.new_zeros(x.shape[1])


@shard_positions.register_fake
def _(x: torch.Tensor, seq_len: int, group_name: str, layout: str) -> torch.Tensor:
    return x.new_empty(x.shape[1], dtype=torch.int64)


@shard_positions.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, None]:
    return shard_positions(x.movedim(in_dims[0], -1), *settings), None
