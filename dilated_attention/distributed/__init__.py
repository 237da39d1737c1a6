"""Sequence parallelism: which process holds which positions, and how sequences are sharded and put together again."""

from dilated_attention.distributed.comm.group import Members, members_of
from dilated_attention.distributed.comm.session import RingError
from dilated_attention.distributed.load_balance import balanced_layout
from dilated_attention.distributed.sharding.layout import LAYOUTS, Layout, local_positions, shard_sequence, spans, unshard_sequence

__all__ = [
    "LAYOUTS",
    "Layout",
    "Members",
    "RingError",
    "balanced_layout",
    "local_positions",
    "members_of",
    "shard_sequence",
    "spans",
    "unshard_sequence",
]
