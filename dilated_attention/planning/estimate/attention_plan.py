"""``AttentionPlan``: the cost of one attention call, as figures, as JSON and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dilated_attention.engine.memory import MemoryEstimate
from dilated_attention.planning.estimate.ring_estimate import Exchange
from dilated_attention.planning.estimate.speed import Pass


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """The cost of one call in figures. ``str`` prints them, ``as_dict`` returns them. Times are estimates and state what they are based on.

    Args:
        kind, num_positions, …: the request, with defaults filled in. For a sequence shared by several processes, the figures are those of
            the rank with the largest share.
        pairs: (query, key) products of the whole call, batch included.
        dense_pairs: pairs of dense attention with the same causality.
        pairs_exact: whether the pairs were counted; otherwise they are extrapolated from shorter sequences, as for long block patterns.
        flops: (forward, backward) of the whole call: 4·D and 10·D per pair; the backward is 0 without training.
        least_bytes: (forward, backward) memory traffic of one process: what must be read and written once.
        memory: peak bytes of one process, by term.
        exchange: what a rank receives and sends.
        passes: forward and backward in seconds; empty where no rate is known, and ``no_time`` says why.
        device, device_memory: name of the machine's device, and its memory in bytes.
        fits: whether the peak is within ``USABLE`` of that memory, and the lists of blocks can index all kept blocks.
        longest: a number of positions that fits where one more does not, up to 2^31; 0 if not even one fits.
    """

    kind: str
    pattern: str
    num_positions: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch_size: int
    dtype: str
    world_size: int
    layout: str
    is_causal: bool
    training: bool
    pairs: int
    dense_pairs: int
    pairs_exact: bool
    flops: tuple[int, int]
    least_bytes: tuple[int, int]
    memory: MemoryEstimate
    exchange: Exchange
    passes: tuple[Pass, ...]
    no_time: str
    device: str
    device_memory: int
    device_source: str
    fits: bool
    longest: int

    @property
    def keys_per_query(self) -> float:
        return self.pairs / (self.batch_size * self.num_positions * self.num_heads)

    @property
    def share_of_dense(self) -> float:
        return self.pairs / self.dense_pairs

    @property
    def peak(self) -> int:
        """Peak bytes of one process."""
        return self.memory.peak

    @property
    def seconds(self) -> float | None:
        """Seconds of the forward, plus the backward with ``training``; None where no rate is known."""
        return sum(one.seconds for one in self.passes) if self.passes else None

    def as_dict(self) -> dict[str, Any]:
        names = ("forward", "backward")
        moved = asdict(self.exchange.bytes)
        return {
            "kind": self.kind,
            "pattern": self.pattern,
            "num_positions": self.num_positions,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "batch_size": self.batch_size,
            "dtype": self.dtype,
            "world_size": self.world_size,
            "layout": self.layout if self.world_size > 1 else None,
            "is_causal": self.is_causal,
            "training": self.training,
            "pairs": self.pairs,
            "pairs_exact": self.pairs_exact,
            "keys_per_query": self.keys_per_query,
            "share_of_dense": self.share_of_dense,
            "flops": dict(zip(names, self.flops, strict=True)),
            "least_bytes": dict(zip(names, self.least_bytes, strict=True)),
            "memory": {
                "peak": self.peak,
                "reserve": self.memory.reserve,
                "forward_peak": self.memory.forward_peak,
                "backward_peak": self.memory.backward_peak,
                "forward": [list(term) for term in self.memory.forward],
                "backward": [list(term) for term in self.memory.backward],
            },
            "exchange": {"name": self.exchange.name, "steps": self.exchange.steps, "exact": self.exchange.is_exact, **moved},
            "seconds": self.seconds,
            "passes": [
                asdict(one) | {"pass": name, "seconds": one.seconds, "bound": one.bound}
                for name, one in zip(names, self.passes, strict=False)
            ],
            "no_time": self.no_time or None,
            "device": self.device,
            "device_memory": self.device_memory,
            "device_source": self.device_source,
            "fits": self.fits,
            "longest": self.longest,
        }

    def __str__(self) -> str:
        from dilated_attention.planning.text import plan_text

        return plan_text(self)
