"""Settings that people use, as frozen records: LongNet's own, Prov-GigaPath's and LongViT's attention, and models to train."""

from __future__ import annotations

from dataclasses import dataclass

from dilated_attention.models import LongNetConfig
from dilated_attention.pattern import DilatedPattern


@dataclass(frozen=True, kw_only=True)
class AttentionPreset:
    """Branches of one model's attention, with the conventions of the code that trained it.

    Args:
        pattern: segments, rates, offsets and tail.
        embed_dim, num_heads: of the model.
        mixture_grad: as of ``dilated_attention``.
        source: where the figures stand.
    """

    pattern: DilatedPattern
    embed_dim: int
    num_heads: int
    mixture_grad: str = "exact"
    source: str


def _torchscale(segment_lengths: tuple[int, ...], embed_dim: int, num_heads: int, source: str) -> AttentionPreset:
    pattern = DilatedPattern(segment_lengths, (1, 2, 4, 8, 16), "blocked", "all", "zero_keys")
    return AttentionPreset(pattern=pattern, embed_dim=embed_dim, num_heads=num_heads, mixture_grad="detached", source=source)


ATTENTION_PRESETS: dict[str, AttentionPreset] = {
    "longnet": AttentionPreset(
        pattern=DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)),
        embed_dim=768,
        num_heads=12,
        source="LongNet, arXiv 2307.02486, section 4.1",
    ),
    "gigapath": _torchscale((1024, 5792, 32768, 185363, 1048576), 768, 16, "Prov-GigaPath slide encoder 12l768d, max_wsi_size 262144"),
    "longvit": _torchscale((1024, 4096, 32768, 262144, 1048576), 384, 16, "LongViT at 32768 × 32768 pixels"),
}

MODEL_PRESETS: dict[str, LongNetConfig] = {
    # bytes in, bytes out; trains below the bigram entropy of source text in under three minutes on two CPU cores
    "longnet-tiny": LongNetConfig(
        vocab_size=256,
        embed_dim=128,
        num_layers=3,
        num_heads=4,
        segment_lengths=(512, 2048, 8192),
        dilation_rates=(1, 4, 16),
    ),
}
