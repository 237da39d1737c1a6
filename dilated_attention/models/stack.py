"""LongNet's encoder and decoder: a stack of blocks, non-causal or causal; and padded batches, whose rows it computes without padding."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from typing_extensions import TypedDict, Unpack

from dilated_attention.distributed.sharding.layout import Layout
from dilated_attention.engine.ops.bounds import own_bounds
from dilated_attention.engine.ops.transforms import is_eager
from dilated_attention.functional.fused_layers import is_lean
from dilated_attention.functional.options import check_names, shows_options
from dilated_attention.models.blocks import Block, make_norm
from dilated_attention.models.config import LongNetConfig, as_config
from dilated_attention.models.kv_cache import CachePass, KVCache
from dilated_attention.modules import RingSettings
from dilated_attention.modules._ring import RING_OPTIONS
from dilated_attention.modules.options import DEFAULTS as MODULE_DEFAULTS
from dilated_attention.modules.projections import shared_tables
from dilated_attention.pattern.checks import as_int, differs
from dilated_attention.validation import check_bool, check_factory, check_key_padding_mask, check_plain, refuse_where


class ModelOptions(TypedDict, total=False):
    """What the constructors of all models take.

    Args:
        backend: ``"auto"`` or a name of ``list_backends()``.
        group, mesh: the processes that share a sequence (context parallelism), as a ProcessGroup or a DeviceMesh of one axis. None for one
            process.
        layout, exchange, ranks_per_node, timeout: see ``ring_dilated_attention``.
        checkpoint_activations: save only each block's input for the backward and recompute the block.
        device, dtype: those of the parameters. Every process holds all of them, under the same names, so a checkpoint fits both the sharded
            and the single-process model.
    """

    backend: str
    group: Any
    mesh: Any
    layout: str | Layout
    exchange: str
    ranks_per_node: int | None
    timeout: float
    checkpoint_activations: bool
    device: Any
    dtype: torch.dtype | None


class PaddingOptions(TypedDict, total=False):
    """Which positions of a batch are padding; at most one of the two. A row is computed as its tokens alone: positions and segments count
    from its first token, wherever padding lies, and nothing is computed for padding. On a GPU the host waits for the mask.

    Args:
        attention_mask: (B, N) integers or bool, 1 = token, 0 = padding, as transformers' tokenizers make it.
        key_padding_mask: (B, N) bool, True = padding, as in nn.MultiheadAttention.
    """

    attention_mask: torch.Tensor | None
    key_padding_mask: torch.Tensor | None


DEFAULTS: dict[str, Any] = {
    **{name: MODULE_DEFAULTS.get(name, False) for name in ModelOptions.__annotations__},
    **dict.fromkeys(PaddingOptions.__annotations__),
}
_WAYS_OUT = {
    "cache": "prefill rows one by one without padding, with cache.of(i), or call generate, which does so",
    "cu_seqlens": "packed documents have no padding: leave one of them out",
}


def stack_options(model: str, options: ModelOptions, *, is_ring: bool = False) -> dict[str, Any]:
    """Returns the options of a model as those of its stack; ``is_ring``: its sequence is shared even if no group is given."""
    check_names(model, options)
    given = {name: options.get(name, DEFAULTS[name]) for name in ModelOptions.__annotations__}
    where = {name: given.pop(name) for name in RING_OPTIONS}
    given |= check_factory(given["device"], given["dtype"])
    # checked even where one process has the whole sequence
    ring, is_spread = RingSettings.of(where), is_ring or where["group"] is not None or where["mesh"] is not None
    return {**given, "ring": ring if is_spread else None}


def padding_of(function: str, x: Any, options: PaddingOptions, **others: Any) -> torch.Tensor | None:
    """Returns which positions of x (B, N, …) are padding, bool (B, N); None without a mask. ``function``: the public one that has it;
    ``others``: its arguments that go with no mask."""
    check_names(function, options)
    masks: dict[str, Any] = {name: mask for name, mask in options.items() if mask is not None}
    if not masks:
        return None
    if len(masks) > 1:
        raise ValueError("attention_mask and key_padding_mask are given; they say the same of opposite values: leave one of them out")
    ((name, mask),) = masks.items()
    if not isinstance(x, torch.Tensor) or x.ndim < 2:
        raise ValueError(f"{name} is given, and no batch (B, N) that it could be of; rows of a list have no padding: leave it out")
    for other, way_out in _WAYS_OUT.items():
        if others.get(other) is not None:
            raise ValueError(f"{name} is given and {other}, too; {way_out}")
    if name == "attention_mask":
        if not isinstance(mask, torch.Tensor) or mask.is_floating_point():
            got = mask.dtype if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
            raise TypeError(f"attention_mask is {got}; expected a tensor of integers or bool, 1 = token and 0 = padding")
        check_plain(name, mask, "a tensor of integers or bool")
        way_out = "expected 1 = token and 0 = padding: documents of one row are told by cu_seqlens"
        refuse_where(mask.long() * (mask.long() - 1) != 0, f"attention_mask has other values than 0 and 1; {way_out}")
        mask = mask == 0
    check_key_padding_mask(mask, x, name)
    return mask  # type: ignore[no-any-return]


def rows_of(function: str, tokens: Any, options: PaddingOptions) -> Any:
    """Returns the rows of tokens (B, N) without padding, as a list of tensors (N_i,); tokens themselves without a mask."""
    padding = padding_of(function, tokens, options)
    return tokens if padding is None else [row[~hidden] for row, hidden in zip(tokens, padding, strict=True)]


class LongNetStack(nn.Module):
    """A stack of M ``Block`` modules and a last norm, (B, N, E) → (B, N, E): see ``LongNetEncoder`` and ``LongNetDecoder``."""

    is_causal: ClassVar[bool]

    def __init__(
        self, config: LongNetConfig, *, backend: str = "auto", ring: RingSettings | None = None, checkpoint_activations: bool = False,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if as_config("config", config).is_causal is not self.is_causal:
            other = "LongNetDecoder" if config.is_causal else "LongNetEncoder"
            raise ValueError(
                f"config.is_causal is {config.is_causal}; {type(self).__name__} needs {self.is_causal}: set it, or use {other}"
            )
        if ring is None and config.is_ring:
            ring = RingSettings.of({})
        self.config = config
        self.ring = ring
        self.checkpoint_activations = check_bool("checkpoint_activations", checkpoint_activations)
        self.blocks = nn.ModuleList(
            Block(layer, depth=depth, backend=backend, ring=ring, device=device, dtype=dtype) for depth, layer in enumerate(config.layers)
        )
        self.norm = make_norm(config, device=device, dtype=dtype) if config.final_norm else None
        # dtypes and modes in which the kernels of a block are compiled or being compiled
        self._started: set[tuple[Any, ...]] = set()

    @shows_options
    def forward(
        self,
        x: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        seq_len: int | None = None,
        all_layers: bool = False,
        cache: KVCache | CachePass | None = None,
        **options: Unpack[PaddingOptions],
    ) -> Any:
        """Computes the hidden states.

        Args:
            x: (B, N, E); in a sharded stack this process's rows (B, n, E).
            cu_seqlens: bounds of packed documents in the whole sequence, int32 (documents + 1,), B = 1; they do not attend to each other.
            seq_len: N if processes share the sequence; None: they ask each other, once for all blocks.
            cache: a cache (causal stacks only): x then holds new positions only, which attend to those in the cache and are added to it. It
                may also be a pass that goes on.
            all_layers: also return the input of the first block and the output of each, before the last norm.
            options: attention_mask, key_padding_mask: see ``PaddingOptions``.

        Returns:
            (B, N, E), zeros for padding; with ``all_layers`` (that, [M + 1 tensors (B, N, E)]).
        """
        check_bool("all_layers", all_layers)
        padding = padding_of("LongNetStack.forward", x, options, cache=cache, cu_seqlens=cu_seqlens)
        if padding is not None:
            if self.ring is not None and self.ring.group_name:
                way_out = "join the rows without padding to one sequence, and shard it with cu_seqlens"
                raise ValueError(f"a padding mask is given and processes share the sequence; {way_out}")
            real = ~padding
            index = real.flatten().nonzero()[:, 0]
            if len(index) < padding.numel():
                # as packed documents, which all attention keeps apart and counts anew; not self(…): hooks, such as those of FSDP, have run
                bounds = F.pad(real.sum(1).cumsum(0), (1, 0)).int()
                packed = self.forward(x.flatten(0, 1).index_select(0, index)[None], cu_seqlens=bounds, all_layers=all_layers)
                return tree_map(lambda y: y.new_zeros(real.numel(), y.shape[2]).index_copy(0, index, y[0]).unflatten(0, real.shape), packed)
        if cache is not None:
            reading = self.reading(cache, x, cu_seqlens)
            if not isinstance(cache, CachePass):
                with reading as cache_pass:
                    return self.forward(x, seq_len=seq_len, all_layers=all_layers, cache=cache_pass)
        if self.ring is None:
            if seq_len is not None and differs(seq_len, x.shape[1]):
                raise ValueError(f"seq_len is {seq_len} and there are {x.shape[1]} positions; on one process leave seq_len out")
            seq_len = None
        elif seq_len is None:
            seq_len = self.ring.whole_length(x.shape[1])
        states, recomputes = [x], self.checkpoint_activations and torch.is_grad_enabled() and cache is None
        blocks: Any = self.blocks
        if cu_seqlens is not None and (recomputes or torch.compiler.is_compiling()):
            # recomputed blocks and compiled code read the bounds again in the backward, when the caller may have filled them anew
            cu_seqlens = own_bounds(cu_seqlens, eager=is_eager([x, cu_seqlens]), on_host=False)
        if is_eager([x]) and x.is_cuda:
            kind = x.dtype, torch.is_autocast_enabled("cuda"), torch.is_grad_enabled(), self.training
            if kind not in self._started:
                self._started.add(kind)
                # the first block has no stochastic depth
                for block in (blocks[0], blocks[-1]):
                    if is_lean(block, Block):
                        block.compile_ahead(x)
        same: dict[str, Any] = {"cu_seqlens": cu_seqlens, "seq_len": seq_len} if cache is None else {"cache": cache}
        tables: dict[str, Any] = {}
        # a checkpointed block keeps its input alone, and no table
        if cache is None and not recomputes and is_eager([x]):
            tables["tables"] = shared_tables(cu_seqlens, seq_len, self.ring)
        for block in blocks:
            if recomputes:
                x = checkpoint(block, x, use_reentrant=False, **same)
            elif tables and is_lean(block, Block) and block._compiled_call_impl is None:
                x = block(x, **same, **tables)
            else:
                # what stands in a block's place may not have this argument, a compiled block would be compiled anew for tables that are
                # there, and a checkpoint by hooks would find them there when it computes again
                x = block(x, **same)
            if all_layers:
                states.append(x)
        x = x if self.norm is None else self.norm(x)
        return (x, states) if all_layers else x

    def reading(
        self, cache: KVCache | CachePass, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> AbstractContextManager[CachePass]:
        """A pass of a cache that fits this model over new positions x (B, n, …), around all steps that can fail: see ``KVCache.reading``. A
        pass that goes on is used as it is, and not ended."""
        if self.ring is not None and self.ring.group_name:
            raise ValueError("cache is given and processes share the sequence; decode on one process, with a model without group and mesh")
        if cu_seqlens is not None:
            raise ValueError("cache is given and cu_seqlens, too; in a cache each document is a separate request: leave cu_seqlens out")
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters()):
            raise ValueError("cache is given and gradients are enabled, but a cache has none; call the model under torch.no_grad()")
        if self.training:
            raise ValueError("cache is given and the model is in training mode; call model.eval() first")
        made_for = (cache.cache if isinstance(cache, CachePass) else cache).config
        if made_for is not self.config:
            # by layer: lists of other lengths may say the same
            layers = {*zip(made_for.layers, self.config.layers, strict=False)}
            rotations = {(a, b) for a, b in layers if a.positions == b.positions}
            compared = (
                (("num_layers", "num_heads", "num_kv_heads", "head_dim"), {(made_for, self.config)}),
                (("pattern", "positions"), layers),
                (("rotary_base", "xpos_scale_base"), rotations),
            )
            differences = [x for names, pairs in compared for x in names if any(getattr(a, x) != getattr(b, x) for a, b in pairs)]
            if differences:
                raise ValueError(f"the cache was made for a model with another {', '.join(differences)}; make it with this model's config")
        return nullcontext(cache) if isinstance(cache, CachePass) else cache.reading(x.shape[0], x.shape[1])

    @torch.no_grad()
    def attention_map(
        self, x: torch.Tensor, *, query_rows: Any, layer: int = -1, cu_seqlens: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Returns the attention weights of chosen queries in one block, (B, H, R, N), exact and without computing all N².

        Set eval mode first.

        Args:
            x, cu_seqlens: see ``forward``.
            query_rows: see ``dilated_attention.functional.attention_map``, which also says what a row sums to.
            options: average_heads, chunk: see there.
            layer: index of the block, from 0; negative values count from the end. Only the blocks before it run.

        Raises:
            ValueError, TypeError: if the layer or rows do not exist, or processes share the stack's sequence.
        """
        return self._inspected("attention_map", layer, x, cu_seqlens, query_rows=query_rows, **options)

    @torch.no_grad()
    def attention_received(
        self, x: torch.Tensor, *, layer: int = -1, cu_seqlens: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Returns how much attention each position receives from all queries in one block, (B, H, N), or (B, N) with ``average_heads``.

        Set eval mode first.

        Args:
            x, cu_seqlens: see ``forward``.
            layer: index of the block, from 0; negative values count from the end. Only the blocks before it run.
            options: query_weights, average_heads: see ``dilated_attention.functional.attention_received``.

        Raises:
            ValueError, TypeError: if the layer does not exist, weights do not fit, or processes share the stack's sequence.
        """
        return self._inspected("attention_received", layer, x, cu_seqlens, **options)

    def _inspected(self, method: str, layer: int, x: torch.Tensor, cu_seqlens: torch.Tensor | None, **options: Any) -> torch.Tensor:
        """Runs the blocks before a layer, and returns what a method of its attention tells of that attention's input."""
        if self.ring is not None:
            raise ValueError(
                "processes share this stack's sequence, and an attention map is computed by one process; load the weights without a ring"
            )
        if options.get("key_padding_mask") is not None:
            raise ValueError(
                "key_padding_mask is given, which blocks before this one would not see; give rows alone, or packed, cu_seqlens"
            )
        layer = as_int("layer", layer)
        if not -len(self.blocks) <= layer < len(self.blocks):
            raise ValueError(f"layer is {layer}; expected one of this stack's {len(self.blocks)} blocks")
        *before, chosen = self.blocks[: layer % len(self.blocks) + 1]
        for block in before:
            x = block(x, cu_seqlens=cu_seqlens)
        told: Any = getattr(chosen.attention, method)
        return told(chosen.attention_norm(x), is_causal=self.is_causal, cu_seqlens=cu_seqlens, **options)  # type: ignore[no-any-return, operator]


class LongNetDecoder(LongNetStack):
    """LongNet's decoder (arXiv 2307.02486): M blocks of causal attention and feed-forward layers, each x + f(norm(x)), and a last norm.

    Args:
        config: the configuration, with ``is_causal=True``.
        backend: ``"auto"`` or a name of ``list_backends()``, for every layer.
        ring: how processes share the sequence; this process then gets and returns its rows. None for one process or, if the config has a
            ``ring`` attention, for all processes and contiguous shards.
        checkpoint_activations: save only each block's input for the backward and recompute the block (activation checkpointing).
        device, dtype: those of the parameters.

    Differs from the paper in its defaults: rotary positions, where LongNet has XPOS (``positions="xpos"``).
    """

    is_causal = True


class LongNetEncoder(LongNetStack):
    """The same stack with bidirectional attention, for a configuration with ``is_causal=False``. For arguments see ``LongNetDecoder``."""

    is_causal = False
