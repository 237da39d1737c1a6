"""What slide encoders and vision transformers share: LongNet's encoder, a norm and a head, over a sequence that processes may share."""

from __future__ import annotations

from typing import Any

from torch import nn

from dilated_attention.distributed.sharding.layout import LAYOUTS
from dilated_attention.models.saving import Pretrained
from dilated_attention.models.stack import LongNetEncoder, ModelOptions, stack_options
from dilated_attention.modules import RingSettings
from dilated_attention.pattern.checks import one_of, shown


class ImageModel(Pretrained):
    """Base class of ``SlideEncoder`` and ``LongViT``; ``name`` is the class whose options these are."""

    norm: Any

    def __init__(self, name: str, config: Any, options: ModelOptions) -> None:
        super().__init__()
        self.config = config
        if not isinstance(self.config, self.config_class):
            raise TypeError(f"config is {shown(config)}; expected a {self.config_class.__name__}")
        # the model derives the layout of tokens from that of their sources, for which a Layout's length is another
        one_of("layout", options.get("layout", "contiguous"), LAYOUTS)
        given = stack_options(name, options)
        self.ring: RingSettings | None = given["ring"]
        width, factory = config.encoder.embed_dim, {key: given[key] for key in ("device", "dtype")}
        self._add_embedding(width, factory)
        self.dropout = nn.Dropout(config.encoder.dropout)
        self.encoder = LongNetEncoder(config.encoder, **given)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps, **factory) if getattr(config, "pooling", None) != "none" else None
        self.head = None if config.num_classes is None else nn.Linear(width, config.num_classes, **factory)
        if self.head is not None:
            nn.init.zeros_(self.head.bias)

    def _add_embedding(self, width: int, factory: dict[str, Any]) -> None:
        """Makes the parameters before the encoder."""
        raise NotImplementedError

    @property
    def _shared(self) -> RingSettings | None:
        """How several processes share a sequence; None for one process."""
        return self.ring if self.ring is not None and self.ring.group_name else None
