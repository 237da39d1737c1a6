"""Published settings as frozen records: LongNet's own, the attention of Prov-GigaPath and LongViT, and models to train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dilated_attention.models import LongNetConfig, ModelConfig, SlideEncoderConfig, VisionConfig
from dilated_attention.pattern import DilatedPattern, LocalWindow, geometric_branches
from dilated_attention.pattern.checks import shown


@dataclass(frozen=True, kw_only=True)
class AttentionPreset:
    """The branches of one model's attention, with the conventions of the code that trained it.

    Args:
        pattern: segments, rates, offsets and tail.
        embed_dim, num_heads: of the model.
        mixture_grad: see ``dilated_attention``.
        source: where the figures come from.
    """

    pattern: DilatedPattern
    embed_dim: int
    num_heads: int
    mixture_grad: str = "exact"
    source: str


# Table 4 of the paper (arXiv 2307.02486); the branches are those of its section 4.1, the tokens those of cl100k_base
_LONGNET: dict[str, Any] = {
    "vocab_size": 100277,
    "segment_lengths": (2048, 4096, 8192, 16384, 32768),
    "dilation_rates": (1, 2, 4, 6, 12),
    "positions": "xpos",
}

# what Llama's shapes have in common, in fields of this library
_LLAMA: dict[str, Any] = {"num_heads": 32, "ffn": "swiglu", "norm": "rms_norm", "sub_norm": False, "bias": False, "scale_embedding": False}

# bytes, for a context of 32,768: the branches of geometric_branches, heads of 64
_BYTES: dict[str, Any] = dict(zip(("segment_lengths", "dilation_rates"), geometric_branches(32768), strict=True)) | {"vocab_size": 256}

# bytes, for a context of 32,768: of the attentions that were trained for equal time the one that learned most (docs/patterns.md)
_WINDOW: dict[str, Any] = {"attention": "block_sparse", "block_pattern": LocalWindow((1023, 0))}
_MIXED: dict[str, Any] = {"attention": (_WINDOW, _WINDOW, _WINDOW, {"attention": "dense"}), "rotary_base": 500000.0, "vocab_size": 256}

MODEL_PRESETS: dict[str, ModelConfig] = {
    # bytes in, bytes out; trains to below the bigram entropy of source text in under three minutes on two CPU cores
    "longnet-tiny": LongNetConfig(
        vocab_size=256, embed_dim=128, num_layers=3, num_heads=4, segment_lengths=(512, 2048, 8192), dilation_rates=(1, 4, 16)
    ),
    "longnet-15m": LongNetConfig(**_BYTES, num_layers=8, embed_dim=384, num_heads=6),
    "longnet-50m": LongNetConfig(**_BYTES, num_layers=10, embed_dim=640, num_heads=10),
    "mixed-15m": LongNetConfig(**_MIXED, num_layers=8, embed_dim=384, num_heads=6),
    "mixed-50m": LongNetConfig(**_MIXED, num_layers=10, embed_dim=640, num_heads=10),
    "longnet-125m": LongNetConfig(**_LONGNET, num_layers=12, embed_dim=768, num_heads=12),
    "longnet-350m": LongNetConfig(**_LONGNET, num_layers=24, embed_dim=1024, num_heads=16),
    "longnet-760m": LongNetConfig(**_LONGNET, num_layers=24, embed_dim=1536, num_heads=16),
    "longnet-2.7b": LongNetConfig(**_LONGNET, num_layers=32, embed_dim=2560, num_heads=32),
    # the shape of Llama 3.2 1B, with rates up to its number of heads, so that in every branch each position is used by some head
    "llama-1b": LongNetConfig(
        **_LLAMA,
        vocab_size=128256,
        embed_dim=2048,
        num_layers=16,
        num_kv_heads=8,
        ffn_dim=8192,
        qk_norm=True,
        rotary_base=500000.0,
        segment_lengths=(2048, 8192, 32768, 131072),
        dilation_rates=(1, 4, 8, 32),
    ),
    # GPT-2's shape, with rotary positions instead of its learned table of 1,024, so that any context length works
    "gpt2-124m": LongNetConfig(
        vocab_size=50257,
        embed_dim=768,
        num_layers=12,
        num_heads=12,
        sub_norm=False,
        scale_embedding=False,
        segment_lengths=(2048, 8192, 32768),
        dilation_rates=(1, 4, 12),
    ),
    # Llama 7B's shape (arXiv 2302.13971, Table 2), with rates up to its number of heads; only the shape, not its weights
    "llama-7b": LongNetConfig(
        **_LLAMA,
        vocab_size=32000,
        embed_dim=4096,
        num_layers=32,
        ffn_dim=11008,
        tie_embeddings=False,
        layer_norm_eps=1e-6,
        segment_lengths=(2048, 8192, 32768, 131072),
        dilation_rates=(1, 4, 16, 32),
    ),
    "gigapath-12l768d": SlideEncoderConfig.gigapath(768, 12),
    "gigapath-24l1024d": SlideEncoderConfig.gigapath(1024, 24),
    "gigapath-12l1536d": SlideEncoderConfig.gigapath(1536, 12),
    **{f"longvit-{size}": VisionConfig.longvit(size) for size in (1024, 4096, 8192, 16384, 32768)},
}


def _attention_of(model: str, source: str) -> AttentionPreset:
    config: Any = MODEL_PRESETS[model]
    stack = getattr(config, "encoder", config)
    fields = {name: getattr(stack, name) for name in ("pattern", "embed_dim", "num_heads", "mixture_grad")}
    return AttentionPreset(**fields, source=source)


ATTENTION_PRESETS: dict[str, AttentionPreset] = {
    "longnet": _attention_of("longnet-125m", "LongNet, arXiv 2307.02486, section 4.1"),
    "gigapath": _attention_of("gigapath-12l768d", "Prov-GigaPath slide encoder 12l768d, max_wsi_size 262144"),
    "longvit": _attention_of("longvit-32768", "LongViT at 32768 × 32768 pixels"),
}

# names of others' models and trainers that people look for here → what to use
SEARCHED = {
    "gigapath": "load_torchscale('slide_encoder.pth') loads Prov-GigaPath's weights, integrations.gigapath.create_model stands in for its "
    "own, create_model('gigapath-12l768d') makes a new one",
    "titan": "attention(…, bias=Distance(coordinates, slopes)) is the bias of TITAN's slide encoder (ALiBi in 2-D), whose weights nothing "
    "here loads; create_model('gigapath-12l768d', in_dim=768) trains a slide encoder on its tile features",
    "sft": "TRL's SFTTrainer takes a model with attn_implementation='dilated' (integrations.huggingface.register), and over several GPUs "
    "integrations.huggingface.context_parallel",
}


def hint_of(name: Any) -> str:
    """Returns "(…: what to use)" for each of ``SEARCHED`` that a name which is refused contains; else ""."""
    return "".join(f"({key}: {use})" for key, use in SEARCHED.items() if key in shown(name).lower())
