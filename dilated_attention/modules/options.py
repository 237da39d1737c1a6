"""The options of the modules, once: what each means, its type, its default, and which class takes it. See ``functional.options``."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import TypedDict

from dilated_attention.distributed.sharding.layout import Layout
from dilated_attention.functional.options import DEFAULTS as CALL_DEFAULTS
from dilated_attention.functional.options import BranchOptions


class AttentionOptions(TypedDict, total=False):
    """What every module takes.

    Args:
        scale: factor of q·k, from 1.18e-38 to 2.36e38; None for 1/sqrt(D).
        dropout: probability that an attention weight is dropped, in training mode only; [0, 1).
        deterministic: use only kernels whose gradients repeat bit for bit.
        backend: ``"auto"``, or a backend's name. A named backend is used or the call is refused; it is never replaced.
        sinks: learn a score per head that the denominator gets in addition: the parameter ``sinks`` (num_heads,), zeros at first. A
            multi-head layer has it as ``attention.sinks``.
    """

    scale: float | None
    dropout: float
    deterministic: bool
    backend: str
    sinks: bool


class CoreOptions(AttentionOptions, total=False):
    """``AttentionOptions`` of the modules without projections.

    Args:
        num_heads: H, with ``sinks``; None: the first call says it, as in torch's lazy modules. Optimizers need it before.
    """

    num_heads: int | None


class BlockOptions(TypedDict, total=False):
    """Which pairs are kept, instead of by ``pattern``.

    Args:
        sparsity_ratio: the fraction of dense attention's pairs to compute; (0, 1].
        sparsity: how these pairs are chosen: ``"random"`` blocks · ``"local"`` · ``"dilated"`` · ``"global_local"`` · ``"big_bird"``; see
            ``dilated_attention.pattern.Sparsity``.
        block_size: block size of that pattern: 64 or 128, or (query block, key block).
        seed: seed of that pattern, if it draws random blocks.
    """

    sparsity_ratio: float | None
    sparsity: str
    block_size: Any
    seed: int


class GroupOptions(TypedDict, total=False):
    """Which processes share the sequence.

    Args:
        group: the ProcessGroup, looked up at construction and stored by name; None for ``mesh``, or for all processes.
        mesh: a DeviceMesh of one axis, instead of a group.
        timeout: seconds that an exchange may take before an error names it and its peer.
    """

    group: Any
    mesh: Any
    timeout: float


class ProjectionOptions(TypedDict, total=False):
    """What the projections around an attention take; E is their width, H the number of heads, D = E/H ≤ 256.

    Args:
        num_kv_heads: Hk key/value heads, a divisor of H; query head h reads h // (H/Hk). None for H.
        bias: whether the four projections have biases.
        layer_norm: whether to use the sub-LayerNorm before ``out_proj``; nn.MultiheadAttention has none.
        layer_norm_eps: eps of every norm of this layer.
        gamma_init: gain of the weights of v_proj and out_proj: MAGNETO's γ, sqrt(log 2M) for an encoder or a decoder of M layers.
        rotary: rotate queries and keys, halves paired as in Llama, by position in the whole sequence, or with ``cu_seqlens`` in the
            document, before dilation.
        rotary_base: θ of the rotation, > 1.
        xpos_scale_base: b of XPOS (arXiv 2212.10554; TorchScale uses 512), with ``rotary``: pair i of a score is also multiplied by
            ((2i + 0.4D)/1.4D)^(distance/b). This attenuates far keys in causal attention; keys *after* a query are amplified. None for
            RoPE. Lengths whose factors overflow the dtype are refused: with b = 512 beyond 6,798 in float16, 70,251 in bfloat16.
        qk_norm: apply RMSNorm to each query and key head (``q_norm``, ``k_norm``) before the rotation.
        device, dtype: device and dtype of the parameters.
    """

    num_kv_heads: int | None
    bias: bool
    layer_norm: bool
    layer_norm_eps: float
    gamma_init: float
    rotary: bool
    rotary_base: float
    xpos_scale_base: float | None
    qk_norm: bool
    device: Any
    dtype: torch.dtype | None


DEFAULTS: dict[str, Any] = {
    **CALL_DEFAULTS,
    "dropout": 0.0, "sinks": False, "num_heads": None, "window": None,
    "sparsity_ratio": None, "sparsity": "random", "block_size": 128, "seed": 0,
    "num_kv_heads": None, "bias": True, "layer_norm": True, "layer_norm_eps": 1e-5, "gamma_init": 1.0, "rotary": False,
    "rotary_base": 10000.0, "xpos_scale_base": None, "qk_norm": False, "device": None, "dtype": None,
}  # fmt: skip


# by kind of pattern: alone, over processes, with projections, and both
class ExchangeOptions(GroupOptions, total=False):
    exchange: str
    ranks_per_node: int | None


class StepOptions(GroupOptions, total=False):
    layout: str | Layout
    head_steps: int | None


class DilatedOptions(CoreOptions, BranchOptions, total=False):
    mixture_grad: str
    precision: str


class BlockSparseOptions(CoreOptions, BlockOptions, total=False): ...


class UnionOptions(CoreOptions, BranchOptions, BlockOptions, total=False): ...


class RingOptions(CoreOptions, ExchangeOptions, total=False):
    window: int | tuple[int | None, int | None] | None


class RingDilatedOptions(CoreOptions, BranchOptions, ExchangeOptions, total=False):
    mixture_grad: str
    layout: str | Layout


class RingBlockSparseOptions(BlockSparseOptions, StepOptions, total=False): ...


class RingUnionOptions(UnionOptions, StepOptions, total=False): ...


class MultiheadOptions(AttentionOptions, ProjectionOptions, total=False): ...


class MultiheadDilatedOptions(MultiheadOptions, BranchOptions, total=False):
    mixture_grad: str
    precision: str


class MultiheadBlockSparseOptions(MultiheadOptions, BlockOptions, total=False): ...


class MultiheadUnionOptions(MultiheadBlockSparseOptions, BranchOptions, total=False): ...


class RingMultiheadDilatedOptions(MultiheadOptions, BranchOptions, ExchangeOptions, total=False):
    mixture_grad: str
    layout: str | Layout


class RingMultiheadBlockSparseOptions(MultiheadBlockSparseOptions, StepOptions, total=False): ...


class RingMultiheadUnionOptions(MultiheadUnionOptions, StepOptions, total=False): ...


# what ``forward`` takes beside the tensors
class MaskArguments(TypedDict, total=False):
    is_causal: bool
    key_padding_mask: torch.Tensor | None
    cu_seqlens: torch.Tensor | None


class LocalArguments(MaskArguments, total=False):
    query_offset: int


class RingArguments(MaskArguments, total=False):
    seq_len: int | None
