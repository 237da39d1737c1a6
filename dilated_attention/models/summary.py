"""Figures of a model that follow from its configuration: parameters, keys per query, memory, and what fits."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from dilated_attention.engine.decode.keys import row_keys

# caches and plans ask for it here
from dilated_attention.engine.memory import readable as readable
from dilated_attention.models.config import LongNetConfig
from dilated_attention.pattern import BlockPattern
from dilated_attention.pattern.checks import MAX_LENGTH, as_int, as_int_tuple

# float32 weights and gradients, and AdamW's two moments
_TRAINING_BYTES_PER_PARAMETER = 16
# the fraction of a device's memory that remains after allocator gaps, kernels and the framework
USABLE = 0.9


def block_bytes(config: LongNetConfig, activation_bytes: int, *, is_plain: bool) -> tuple[int, int]:
    """Returns (bytes per position that a block saves for its backward, further bytes per position alive at the peak), with
    ``activation_bytes`` per element of an activation and 4 of the residual stream.

    Saved are x, q, k, v, out and its lse, x after attention and W_1 x; ``is_plain``: layers are plain ones, as on a CPU, which save the
    inputs of linear layers and of the inner norm, too. The peak is in the backward of the feed-forward layer, which holds the activation,
    its gradient and that of the residual stream.
    """
    embed, inner, heads = config.embed_dim, config.inner_dim, config.num_heads
    keys = 2 * embed * (config.num_kv_heads or heads) // heads
    wide = inner * (2 if config.ffn == "swiglu" else 1)
    # norms of q and k save and return them in float32
    saved = activation_bytes * (4 * embed + keys + wide) + 4 * heads + 8 * (embed + keys // 2) * config.qk_norm
    if is_plain:
        return saved + activation_bytes * (3 * embed + 2 * inner), activation_bytes * wide + 4 * embed
    return saved, activation_bytes * (wide + inner + embed) + 4 * embed


def residual_bytes(config: LongNetConfig, activation_bytes: int) -> int:
    """Returns the bytes per element of a block's input in training: under autocast float32, but of k-mers, whose tables are multiplied."""
    return activation_bytes if config.kmer > 1 else 4


def training_bytes(config: LongNetConfig, activation_bytes: int, *, checkpoint_activations: bool) -> int:
    """Estimates the bytes per position in training a stack of blocks without dropout, see ``block_bytes``; on a GPU where
    ``activation_bytes`` is 2. With ``checkpoint_activations`` a block only saves its input (see ``residual_bytes``). The
    estimate adds up the tensors that must be alive at once; docs/models.md compares it with measured peaks."""
    block, passing = block_bytes(config, activation_bytes, is_plain=activation_bytes == 4)
    embed = config.embed_dim

    def outputs(one: LongNetConfig) -> int:
        # on a GPU the branches' own outputs are saved, up to about 10^5 positions; beyond that they are recomputed
        is_saved = one.mixture_grad == "detached" and one.num_kv_heads in (None, one.num_heads) and len(one.dilation_rates) > 1
        return int(activation_bytes * embed * sum(1 / rate for rate in one.dilation_rates)) * is_saved

    if checkpoint_activations:
        # what a block computes again is all but its input
        recomputed = block - activation_bytes * embed + max(map(outputs, config.cycle))
        return config.num_layers * residual_bytes(config, activation_bytes) * embed + passing + recomputed
    return config.num_layers * block + config.sum_over_layers([*map(outputs, config.cycle)]) + passing


def cache_rows(config: LongNetConfig, num_positions: int) -> int | None:
    """Returns for how many of ``num_positions`` a ``KVCache`` keeps keys and values per request; None if decoding has no cache. All layers
    must be alike."""
    pattern = config.pattern
    if not config.is_causal or (isinstance(pattern, BlockPattern) and not pattern.is_prefix_stable):
        return None
    keys = row_keys(pattern, config.num_heads, config.num_kv_heads or config.num_heads, num_positions, "cpu")
    return min(num_positions, keys.num_needed)


def cache_bytes(config: LongNetConfig, num_positions: int, itemsize: int) -> int | None:
    """Returns the bytes of one sequence's cached keys and values in all blocks; None if decoding has no cache."""
    rows: list[Any] = [cache_rows(one, num_positions) for one in config.cycle]
    if None in rows:
        return None
    return 2 * (config.num_kv_heads or config.num_heads) * config.head_dim * itemsize * config.sum_over_layers(rows)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures of a model; ``str`` formats them, ``as_dict`` returns them."""

    name: str
    config: LongNetConfig
    num_parameters: int
    embedding_parameters: int
    lengths: tuple[int, ...]
    memory: int
    device: str
    # of an element of an activation: 2 on a GPU, in training under autocast; 4 on a CPU, which computes in float32
    activation_bytes: int = 2

    def keys_per_query(self, num_positions: int) -> float:
        """Returns the mean number of keys per query and head, with multiplicity; the mean over layers, too."""
        heads, is_causal = self.config.num_heads, self.config.is_causal
        patterns = self.config.patterns
        # of equal patterns, which lists often have, one is counted
        pairs = {pattern: pattern.pairs(num_positions, heads, is_causal=is_causal) for pattern in set(patterns)}
        return self.config.sum_over_layers([pairs[pattern] for pattern in patterns]) / (num_positions * heads * self.config.num_layers)

    def training_flops(self, num_positions: int) -> float:
        """Returns the FLOPs of forward and backward per position: 6 per matrix parameter, and 12·E per key of a query and layer."""
        config = self.config
        attended = 12 * config.embed_dim * self.keys_per_query(num_positions) * config.num_layers
        # a lookup costs nothing, but a tied embedding is also the matrix of the output layer
        looked_up = 0 if config.tie_embeddings else self.embedding_parameters
        return 6 * (self.num_parameters - looked_up) + attended

    def cache_bytes(self, num_positions: int, itemsize: int | None = None) -> int | None:
        """Returns the bytes of one sequence's keys and values; None if decoding has no cache. ``itemsize``: None for the activations'."""
        return cache_bytes(self.config, num_positions, self.activation_bytes if itemsize is None else itemsize)

    def as_dict(self) -> dict[str, Any]:
        fixed = _TRAINING_BYTES_PER_PARAMETER * self.num_parameters
        plain, checkpointed = (
            training_bytes(self.config, self.activation_bytes, checkpoint_activations=is_less) for is_less in (False, True)
        )
        room = max(0, int(USABLE * self.memory) - fixed)
        rows = [
            {
                "positions": n,
                "keys_per_query": round(self.keys_per_query(n), 1),
                "training_flops_per_position": round(self.training_flops(n)),
                "training_bytes": fixed + n * plain,
                "training_bytes_checkpointed": fixed + n * checkpointed,
            }
            | ({} if self.cache_bytes(n) is None else {"cache_bytes": self.cache_bytes(n)})
            for n in self.lengths
        ]
        return {
            "name": self.name,
            "parameters": self.num_parameters,
            "embedding_parameters": self.embedding_parameters,
            "lengths": rows,
            "memory": self.memory,
            "device": self.device,
            "activation_bytes": self.activation_bytes,
            "fits": {"kept": room // plain, "checkpointed": room // checkpointed},
        }

    def __str__(self) -> str:
        config, told = self.config, self.as_dict()
        heads = f"{config.num_heads} heads of {config.head_dim}" + (f", {config.num_kv_heads} of keys" if config.num_kv_heads else "")
        kinds = [
            f"{one.attention}, {'every key' if one.kind == 'dense' else one.pattern}"
            + (", without positions" if one.positions != config.positions else "")
            for one in config.cycle
        ]
        lines = [
            f"{self.name}: {config.num_layers} blocks of width {config.embed_dim}, {heads}, feed-forward {config.inner_dim}",
            f"attention: {'; '.join(kinds)}{', in turn' if len(kinds) > 1 else ''}{', causal' if config.is_causal else ''}",
            f"parameters: {self.num_parameters:,} ({self.num_parameters - self.embedding_parameters:,} without embeddings)",
            "",
            f"{'positions':>11}  {'keys/query':>11}  {'dense':>11}  {'TFLOP to train':>14}  {'memory':>9}  {'checkpointed':>12}  "
            f"{'KV cache':>9}",
        ]
        for row in told["lengths"]:
            n, cache = row["positions"], readable(row["cache_bytes"]) if "cache_bytes" in row else "–"
            lines.append(
                f"{n:>11,}  {row['keys_per_query']:>11,.0f}  {(n + 1) / 2 if config.is_causal else n:>11,.0f}  "
                f"{n * row['training_flops_per_position'] / 1e12:>14,.2f}  {readable(row['training_bytes']):>9}  "
                f"{readable(row['training_bytes_checkpointed']):>12}  {cache:>9}"
            )
        lines += [
            "",
            f"{self.device} with {readable(self.memory)} trains {told['fits']['kept']:,} positions at once, "
            f"{told['fits']['checkpointed']:,} with checkpoint_activations=True",
            f"(an estimate: {8 * self.activation_bytes}-bit activations, float32 weights and AdamW, no dropout; one sequence or several)",
        ]
        return "\n".join(lines)


def embedding_parameters(parameters: dict[str, int]) -> int:
    """Returns how many parameters are of embeddings of tokens, those of k-mers included."""
    return sum(size for key, size in parameters.items() if key.endswith("embedding.weight") or ".embedding.tables." in f".{key}")


def summarise(
    name: str, config: LongNetConfig, parameters: dict[str, int], lengths: tuple[int, ...] | None = None, memory: int | None = None
) -> Summary:
    """Makes the summary of a model whose parameters have these names and sizes."""
    if lengths is None:
        # a few orders of magnitude, around the model's segment lengths
        lengths = tuple(
            sorted({1024, 8192, 65536, max((w for one in config.cycle for w in one.segment_lengths if w <= 2**20), default=2**17), 2**20})
        )
    elif isinstance(lengths, Iterable) and not isinstance(lengths, str | bytes):
        lengths = tuple(lengths)
    device = "a device"
    if memory is None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        memory, device = properties.total_memory, properties.name
    elif memory is None:
        memory, device = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine's CPU"
    return Summary(
        name=name,
        config=config,
        num_parameters=sum(parameters.values()),
        embedding_parameters=embedding_parameters(parameters),
        lengths=as_int_tuple("lengths", lengths, minimum=1, maximum=MAX_LENGTH),
        memory=as_int("memory", memory, minimum=1),
        device=device,
        activation_bytes=4 if device == "this machine's CPU" else 2,
    )
