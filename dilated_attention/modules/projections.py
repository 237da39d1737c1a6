"""What all multi-head layers share: one class that adds projections to an attention; the call form of nn.MultiheadAttention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import Unpack

from dilated_attention import validation as check
from dilated_attention.engine.ops.bounds import own_bounds
from dilated_attention.functional.fused_layers import linear_layers
from dilated_attention.functional.options import check_names, shows_options
from dilated_attention.modules._ring import RingSettings
from dilated_attention.modules.core import Attention
from dilated_attention.modules.options import DEFAULTS, LocalArguments, ProjectionOptions, RingArguments
from dilated_attention.modules.rotary import Table, rotary_tables, rotate
from dilated_attention.pattern.checks import as_int

# an internal option of ``forward``, with a name that is no identifier: the ``SharedTables`` of the pass that the layer is part of
TABLES = "rotary tables"
# (layer, a tensor of the dtype and device to rotate, rows) → the layer's tables
SharedTables = Callable[["MultiheadAttention", torch.Tensor, int], tuple[Table, Table]]


def shared_tables(cu_seqlens: torch.Tensor | None, seq_len: int | None = None, ring: RingSettings | None = None) -> SharedTables:
    """Returns what makes the tables of one pass through layers, once for all that rotate as many rows alike. With ``ring`` the rows are a
    shard of ``seq_len`` positions."""
    made: dict[tuple[Any, ...], tuple[Table, Table]] = {}

    def tables(layer: MultiheadAttention, like: torch.Tensor, rows: int) -> tuple[Table, Table]:
        kind = rows, like.device, like.dtype, layer.head_dim, layer.rotary_base, layer.xpos_scale_base
        if kind not in made:
            if ring is None or seq_len is None:
                length, positions = rows, torch.arange(rows, device=like.device)
            else:
                length, positions = seq_len, ring.positions(like, seq_len)
            made[kind] = layer.tables(positions, cu_seqlens, length, like.dtype)
        return made[kind]

    return tables


class MultiheadAttention(nn.Module):
    """(B, N, E) → ``project`` → queries, keys, values (B, N, H, D) → ``attention`` → ``combine`` → (B, N, E).

    Parameters: ``q_proj``, ``k_proj``, ``v_proj``, ``out_proj``; ``inner_attn_ln`` with ``layer_norm``; ``q_norm``, ``k_norm`` with
    ``qk_norm``. The attention between them has none but ``sinks``. ``name``: the public class, whose options are accepted; ``core``: the
    class of ``attention``; ``patterns``: segment_lengths, dilation_rates and pattern, as many as it takes.
    """

    # nn.TransformerEncoderLayer and nn.TransformerEncoder read these of nn.MultiheadAttention; None says that there is no in_proj, and
    # keeps them from their fast path, which would compute dense attention
    batch_first = True
    _qkv_same_embed_dim = False
    in_proj_bias: None = None
    # the public classes say of which class
    attention: Any
    # the class whose ``forward`` says which options there are
    _layer: ClassVar[str]
    inner_attn_ln: nn.LayerNorm | None
    q_norm: nn.RMSNorm | None
    k_norm: nn.RMSNorm | None

    def __init__(
        self, name: str, core: Callable[..., Attention], embed_dim: int, num_heads: int, patterns: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        check_names(name, options)
        super().__init__()
        given = {key: options.get(key, DEFAULTS[key]) for key in ProjectionOptions.__annotations__}
        self.embed_dim = as_int("embed_dim", embed_dim, minimum=1)
        self.num_heads = as_int("num_heads", num_heads, minimum=1)
        num_kv_heads, xpos_scale_base = given["num_kv_heads"], given["xpos_scale_base"]
        self.num_kv_heads = self.num_heads if num_kv_heads is None else as_int("num_kv_heads", num_kv_heads, minimum=1)
        bias, layer_norm, rotary, qk_norm = (check.check_bool(name, given[name]) for name in ("bias", "layer_norm", "rotary", "qk_norm"))
        self.rotary = rotary
        self.head_dim = check.check_heads(self.embed_dim, self.num_heads, self.num_kv_heads, rotary=rotary)
        self.rotary_base = check.check_positive("rotary_base", given["rotary_base"], above=1.0)
        if not rotary and self.rotary_base != 10000.0:
            raise ValueError(
                f"rotary_base is {given['rotary_base']} and rotary is False, so that nothing is rotated; leave it out, or use rotary=True"
            )
        self.xpos_scale_base = None if xpos_scale_base is None else check.check_positive("xpos_scale_base", xpos_scale_base)
        if self.xpos_scale_base is not None and not rotary:
            raise ValueError(
                f"xpos_scale_base is {xpos_scale_base} and rotary is False; XPOS scales rotated vectors: use rotary=True with it"
            )
        self.gamma_init = check.check_held("gamma_init", given["gamma_init"], power=2)
        eps = check.check_held("layer_norm_eps", given["layer_norm_eps"])
        kv_dim = self.num_kv_heads * self.head_dim
        factory = check.check_factory(given["device"], given["dtype"])
        self.q_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **factory)
        self.k_proj, self.v_proj = (nn.Linear(self.embed_dim, kv_dim, bias=bias, **factory) for _ in range(2))
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **factory)
        self.inner_attn_ln = nn.LayerNorm(self.embed_dim, eps=eps, **factory) if layer_norm else None
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps=eps, **factory) if qk_norm else None for _ in range(2))
        of_core = {key: value for key, value in options.items() if key not in given}
        self.attention = core(*patterns, num_heads=self.num_heads if options.get("sinks") is True else None, **of_core)
        self.attention.to(**factory)
        if "segment_lengths" in self.attention._pattern_arguments:
            # refuses lists of offsets that do not have one entry per head
            self.attention.pattern.offsets(self.num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets MAGNETO's initial values: Xavier-normal weights, gain 1 for q and k, ``gamma_init`` for v and out; biases and sinks 0, norms
        1. The fans of k_proj and v_proj are those of their own weights, smaller with grouped heads. Call this after ``to_empty``."""
        for linear, gain in ((self.q_proj, 1.0), (self.k_proj, 1.0), (self.v_proj, self.gamma_init), (self.out_proj, self.gamma_init)):
            nn.init.xavier_normal_(linear.weight, gain=gain)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        for norm in (self.inner_attn_ln, self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()
        self.attention.reset_parameters()

    @property
    def sinks(self) -> nn.Parameter | None:
        """The attention's ``sinks`` (H,)."""
        return self.attention.sinks  # type: ignore[no-any-return]

    def project(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, input_norm: nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Projects the inputs, after ``input_norm`` if given, to q (B, Nq, H, D), k and v (B, Nk, Hk, D), normalised with ``qk_norm`` and
        not yet rotated."""
        self._check_inputs(query, key, value)
        if key is query and value is query:
            q, k, v = linear_layers(query, (self.q_proj, self.k_proj, self.v_proj), norm=input_norm)
        else:
            inputs = ((query, self.q_proj), (key, self.k_proj), (value, self.v_proj))
            q, k, v = (linear_layers(x, (linear,), norm=input_norm)[0] for x, linear in inputs)
        return *self._scored_heads(q, k), v.unflatten(-1, (self.num_kv_heads, self.head_dim))

    def _scored_heads(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Splits projected queries and keys into heads and applies ``qk_norm``."""
        # not einops' "b n (h d) -> b n h d": it costs twice the host time, and every call of a layer comes here
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))

    def _computed(
        self, query: Any, key: Any, value: Any, need_weights: bool, attn_mask: None, input_norm: nn.Module | None, options: dict[str, Any]
    ) -> tuple[torch.Tensor, None]:
        """Computes a call in nn.MultiheadAttention's form; ``options`` are those of the attention."""
        if check.check_bool("need_weights", need_weights):
            raise ValueError("need_weights=True; attention weights are never materialised here, N² of them: use need_weights=False")
        if attn_mask is not None:
            raise ValueError(
                "attn_mask is given; the pattern says what attends to what: use is_causal=True or key_padding_mask, and attn_mask=None"
            )
        if "return_lse" in options:
            raise TypeError("forward() got return_lse, and a layer returns (out, None); the attention within returns lse: layer.attention")
        tables = options.pop(TABLES, None)
        check_names(f"{self._layer}.forward", options, type(self).__name__)
        key = query if key is None else key
        q, k, v = self.project(query, key, key if value is None else value, input_norm)
        options["key_padding_mask"] = _as_bool(options.get("key_padding_mask"))
        q, k = self._rotated(q, k, options, tables)
        return self.combine(self.attention(q, k, v, **options)), None

    def _rotated(
        self, q: torch.Tensor, k: torch.Tensor, options: dict[str, Any], tables: SharedTables | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns q and k, rotated with ``rotary``."""
        if not self.rotary:
            return q, k
        ring: RingSettings | None = getattr(self.attention, "ring", None)
        cu_seqlens, seq_len = options.get("cu_seqlens"), options.get("seq_len")
        if tables is not None:
            check.check_cu_seqlens(cu_seqlens, q, k)
            of_q, of_k = tables(self, k, k.shape[1])
            return rotate(q, of_q), rotate(k, of_k)
        if ring is None:
            query_offset = check.check_query_offset(options.get("query_offset", 0), q.shape[1], k.shape[1])
            return self.rotate(q, k, torch.arange(k.shape[1], device=k.device), cu_seqlens, query_offset)
        options["seq_len"] = seq_len = ring.whole_length(q.shape[1]) if seq_len is None else as_int("seq_len", seq_len, minimum=0)
        # the attention refuses unequal numbers of rows, on all processes alike
        if q.shape[1] != k.shape[1]:
            return q, k
        return self.rotate(q, k, ring.positions(k, seq_len), cu_seqlens, seq_len=seq_len)

    def rotate(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        query_offset: int = 0,
        *,
        seq_len: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates q and k by the keys' ``positions`` (Nk,), counted anew in each packed document; query 0 is at index ``query_offset``.

        With ``xpos_scale_base`` they are also scaled by their distance from the middle of ``seq_len`` positions (None for Nk), or of the
        document; queries and keys that meet in one softmax, as with a key cache, must use the same ``seq_len``.
        """
        check.check_cu_seqlens(cu_seqlens, q, k)
        q_table, k_table = self.tables(positions, cu_seqlens, k.shape[1] if seq_len is None else seq_len, k.dtype)
        # queries are at positions of the key sequence, so a slice of the table covers them
        queries = slice(query_offset, query_offset + q.shape[1])
        return rotate(q, (q_table[0][queries], q_table[1][queries])), rotate(k, k_table)

    def tables(self, positions: torch.Tensor, cu_seqlens: torch.Tensor | None, seq_len: int, dtype: torch.dtype) -> tuple[Table, Table]:
        """Returns the tables of queries and keys at ``positions``: see ``rotary_tables``."""
        if cu_seqlens is not None:
            if torch.compiler.is_compiling():
                # compiled code may compute the tables again in the backward
                cu_seqlens = own_bounds(cu_seqlens, eager=False, on_host=False)
            cu_seqlens = cu_seqlens.to(positions.device)
        return rotary_tables(positions, cu_seqlens, seq_len, self.head_dim, self.rotary_base, self.xpos_scale_base, dtype)

    def combine(self, out: torch.Tensor) -> torch.Tensor:
        """(B, N, H, D) → (B, N, E): concatenates the heads, applies the sub-LayerNorm and the output projection."""
        return linear_layers(out.flatten(2), (self.out_proj,), norm=self.inner_attn_ln)[0]

    def _check_inputs(self, query: Any, key: Any, value: Any) -> None:
        inputs = [("query", query)]
        # of self-attention all three are one tensor
        inputs += [(name, x) for name, x in (("key", key), ("value", value)) if x is not query]
        for name, x in inputs:
            # a DTensor may be what the projections take
            if not isinstance(x, torch.Tensor) or x.is_nested or x.layout is not torch.strided:
                check.check_plain(name, x, "a torch.Tensor of shape (batch, sequence, embed_dim)")
            if x.ndim != 3 or x.shape[2] != self.embed_dim:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}; expected (batch, sequence, embed_dim) with embed_dim = {self.embed_dim}"
                )
            if not x.is_floating_point():
                raise ValueError(f"{name} has dtype {x.dtype}; expected a floating dtype, that of the module's parameters")
            # a layer that somebody has put in its place may convert
            if type(self.q_proj) is nn.Linear:
                self._check_fits(name, x, self.q_proj.weight)
        if query.shape[0] != key.shape[0] or key.shape[:2] != value.shape[:2]:
            raise ValueError(
                f"query, key, value have shapes {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}; "
                "expected one batch size for all and one sequence length for key and value"
            )

    def _check_fits(self, name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
        if x.device != weight.device:
            raise ValueError(f"{name} is on {x.device} and the module's parameters on {weight.device}; move either with .to(device)")
        if x.dtype is not weight.dtype and (x.dtype is torch.float64 or not torch.is_autocast_enabled(x.device.type)):
            raise ValueError(f"{name} has dtype {x.dtype} and the module's parameters {weight.dtype}; convert either with .to(dtype)")

    def extra_repr(self) -> str:
        more = {
            "num_kv_heads": self.num_kv_heads != self.num_heads,
            "gamma_init": self.gamma_init != 1.0,
            "rotary_base": self.rotary,
            "xpos_scale_base": self.xpos_scale_base is not None,
        }
        names = ["embed_dim", "num_heads", *(name for name, is_shown in more.items() if is_shown)]
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _as_bool(key_padding_mask: Any) -> Any:
    """Returns a mask of floats, which nn.TransformerEncoderLayer makes of every mask, as bool: -inf is padding, 0 is not; others as they
    are. Reads its values, so a GPU makes the host wait; where it cannot (torch.compile, capture of a CUDA graph) the device asserts."""
    if not isinstance(key_padding_mask, torch.Tensor) or not key_padding_mask.is_floating_point():
        return key_padding_mask
    padding = key_padding_mask == -math.inf
    check.refuse_where(
        ~padding & (key_padding_mask != 0),
        f"key_padding_mask has dtype {key_padding_mask.dtype} and values other than 0 and -inf, which would be added to the scores; "
        "expected torch.bool, True = padding: e.g. key_padding_mask=(mask == 0), or floats with -inf = padding and 0 elsewhere",
    )
    return padding


class LocalMultihead(MultiheadAttention):
    """A layer of one process. ``attention`` is a ``LocalAttention``, whose maps the layer offers too."""

    _layer = "LocalMultihead"

    @shows_options
    def forward(
        self, query: torch.Tensor, key: torch.Tensor | None = None, value: torch.Tensor | None = None, *, need_weights: bool = False,
        attn_mask: None = None, input_norm: nn.Module | None = None, **options: Unpack[LocalArguments],
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Computes the attention.

        Args:
            query: (B, Nq, E), in the parameters' dtype, or under autocast any but float64.
            key: (B, Nk, E); None for query.
            value: (B, Nk, E); None for key.
            is_causal: a query sees keys at its own position and before.
            key_padding_mask: (B, Nk) bool, True = padding; or floats, -inf = padding and 0 elsewhere, as torch's layers pass it.
            cu_seqlens: boundaries of packed documents, int32 (documents + 1,), B = 1.
            need_weights, attn_mask: for nn.MultiheadAttention's signature; only False and None are accepted.
            input_norm: a norm of the surrounding block, applied here to query, key and value first. Passing it saves memory in training.
            query_offset: position of the first query among the keys, for decoding; query_offset + Nq ≤ Nk. Keys are at 0 … Nk − 1.

        Returns:
            (out (B, Nq, E) in the projections' dtype, None). The None stands where nn.MultiheadAttention returns its weights.

        Raises:
            ValueError, TypeError: the inputs do not fit together.
            BackendUnavailable: no backend can compute this, or the named one cannot.
        """
        return self._computed(query, key, value, need_weights, attn_mask, input_norm, {**options})

    @torch.no_grad()
    def attention_map(self, query: torch.Tensor, key: torch.Tensor | None = None, *, query_rows: Any, **options: Any) -> torch.Tensor:
        """Returns the attention weights (B, H, R, Nk) of chosen queries in a ``forward`` without dropout.

        They weight the projected values, before ``inner_attn_ln`` and ``out_proj``.

        Args:
            query, key: see ``forward``.
            query_rows: see ``dilated_attention.functional.attention_map``.
            options: is_causal, key_padding_mask, cu_seqlens and query_offset of ``forward``; average_heads and chunk of that function.

        >>> weights = layer.attention_map(x, query_rows="cls", average_heads=True)
        >>> weights[:, 0]  # (B, N)
        """
        return self.attention.attention_map(*self._scored(query, key, options), query_rows, **options)

    @torch.no_grad()
    def attention_received(self, query: torch.Tensor, key: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        """Returns the attention (B, H, Nk) that every key receives from all queries.

        Args:
            query, key: see ``forward``.
            options: is_causal, key_padding_mask, cu_seqlens and query_offset of ``forward``; query_weights, average_heads, dtype and
                backend of ``dilated_attention.functional.attention_received``.
        """
        return self.attention.attention_received(*self._scored(query, key, options), **options)

    def _scored(self, query: torch.Tensor, key: torch.Tensor | None, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns q and k as ``forward`` passes them to the attention, without computing values as ``project`` does."""
        key = query if key is None else key
        self._check_inputs(query, key, key)
        return self._rotated(*self._scored_heads(self.q_proj(query), self.k_proj(key)), options)


class RingMultihead(MultiheadAttention):
    """A layer whose processes each hold some rows of a sequence. ``attention`` has ``ring``, which says where they are in it."""

    _layer = "RingMultihead"

    @shows_options
    def forward(
        self, query: torch.Tensor, key: torch.Tensor | None = None, value: torch.Tensor | None = None, *, need_weights: bool = False,
        attn_mask: None = None, input_norm: nn.Module | None = None, **options: Unpack[RingArguments],
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Computes the attention.

        Args:
            query: (B, n, E), this process's rows in the order of the layout, in the parameters' dtype, or under autocast any but float64.
            key: (B, n, E) of the same positions; None for query.
            value: (B, n, E); None for key.
            seq_len: N. With None the processes ask each other in every call. Either all processes give it, or none. With ``rotary`` under
                torch.compile it must be given.
            key_padding_mask: (B, n) bool of this process's keys, True = padding; or floats, -inf = padding and 0 elsewhere.
            cu_seqlens: boundaries of packed documents in the whole sequence, int32 (documents + 1,), B = 1; equal on all processes.
            is_causal, need_weights, attn_mask, input_norm: see ``MultiheadDilatedAttention.forward``.

        Returns:
            (out (B, n, E) in the projections' dtype, None).

        Raises:
            ValueError, TypeError: as there, or the calls differ between processes.
            RingError: a process died, stalled or made a different call.
        """
        return self._computed(query, key, value, need_weights, attn_mask, input_norm, {**options})
