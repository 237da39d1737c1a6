"""LongNet as a language model: tied embedding, decoder, loss, sampling, and its checkpoint on disk."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dilated_attention.models.cache import Cache, Requests
from dilated_attention.models.cache_use import Use
from dilated_attention.models.config import LongNetConfig
from dilated_attention.models.loss import chunked_cross_entropy
from dilated_attention.models.saving import Pretrained
from dilated_attention.models.sharded import sharded_cross_entropy
from dilated_attention.models.stack import LongNetDecoder, LongNetEncoder
from dilated_attention.models.tokens import check_range, check_tokens, num_ids
from dilated_attention.modules import RingSettings
from dilated_attention.pattern.checks import shown


class LongNetLM(Pretrained):
    """Language model: logits = stack(embedding[tokens]) · Wᵀ, with W the embedding or, not tied, a matrix of its own.

    Causal it predicts the next token; with ``config.is_causal=False`` it sees both sides, for masked tokens.

    Args:
        config: the shape.
        backend: ``"auto"`` or a name of ``list_backends()``.
        group, mesh: the processes that share a sequence (context parallelism), as a ProcessGroup or a DeviceMesh of one axis. Tokens and
            targets are then each process's shards; everything but attention is per token. None for whole sequences.
        layout, exchange, ranks_per_node, timeout: as of ``ring_dilated_attention``.
        checkpoint_activations: keep only each block's input for the backward and compute the block again.
        device, dtype: of the parameters, which every process holds whole, under the same names: a checkpoint fits either kind.

    The loss of a spread model is that of the whole sequence, on every process, and its gradient on each is W times that
    process's share: exact once gradients are averaged, which DDP or FSDP2 over the group (or over a mesh that has it as an axis)
    do, and ``average_gradients`` does without them. See ``models.sharded``. Dropout draws from each process's own generator.

    >>> model = LongNetLM(LongNetConfig(vocab_size=256, embed_dim=128, num_layers=3, num_heads=4,
    ...                                 segment_lengths=(1024, 8192), dilation_rates=(1, 8)))
    >>> loss = model(tokens[:, :-1], targets=tokens[:, 1:])
    """

    config_class = LongNetConfig

    def __init__(
        self,
        config: LongNetConfig,
        *,
        backend: str = "auto",
        group: Any = None,
        mesh: Any = None,
        layout: str = "contiguous",
        exchange: str = "auto",
        ranks_per_node: int | None = None,
        timeout: float = 60.0,
        checkpoint_activations: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, LongNetConfig):
            raise TypeError(f"config is {shown(config)} ({type(config).__name__}); expected a LongNetConfig")
        if config.vocab_size is None:
            raise ValueError("config.vocab_size is None; LongNetLM needs the number of its tokens, e.g. 256 for bytes")
        self.config = config
        is_spread = group is not None or mesh is not None or config.is_ring
        self.ring = RingSettings.of(group, mesh, layout, exchange, ranks_per_node, timeout) if is_spread else None
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim, device=device, dtype=dtype)
        self.dropout = nn.Dropout(config.dropout)
        stack = LongNetDecoder if config.is_causal else LongNetEncoder
        self.decoder = stack(
            config, backend=backend, ring=self.ring, checkpoint_activations=checkpoint_activations, device=device, dtype=dtype
        )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.output = None if config.tie_embeddings else nn.Linear(config.embed_dim, config.vocab_size, bias=False, **factory)
        # E^-1/2: as the output layer, it makes logits of a normalised hidden state start near variance 1
        for layer in (self.embedding, self.output):
            if layer is not None:
                nn.init.normal_(layer.weight, std=config.embed_dim**-0.5)

    @property
    def output_weight(self) -> torch.Tensor:
        """(vocab_size, E), of the logits."""
        return self.embedding.weight if self.output is None else self.output.weight

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        targets: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        seq_len: int | None = None,
        cache: Cache | Requests | Use | None = None,
    ) -> torch.Tensor:
        """Logits, or the loss.

        Args:
            tokens: (B, N) integers below vocab_size; of a spread model this process's shard (B, n), as all tensors here.
            targets: (B, N), of each position the token that follows it, or with ``is_causal=False`` the token itself; −100 where a
                position does not count. Shift, then shard.
            cu_seqlens: bounds of packed documents in the whole sequence, int32 (documents + 1,), B = 1; they do not see each other.
            seq_len: N, of a spread model. None: the processes ask each other, once a call; inside torch.compile it is needed.
            cache: tokens are new positions only, which attend to those in the cache and join them: one token for each request, or several
                for requests of equal length. ``KVCache``, ``PagedKVCache``, or of one of its requests ``cache.of(i)``.

        Returns:
            logits (B, N, vocab_size) in the parameters' dtype; with ``targets`` the mean cross-entropy in nats, a float32
            scalar, for which logits are made a chunk of positions at a time; of a spread model the whole sequence's.

        Raises:
            ValueError, TypeError: tensors that do not fit; tokens or targets out of range, where they lie on the CPU. On a GPU nobody looks, for
                the host would wait at every call: there they end in a device-side assertion, after which the process has to start anew.
        """
        check_tokens("tokens", tokens)
        check_range("tokens", tokens, num_ids(self.embedding))
        if cache is not None and targets is not None:
            raise ValueError("cache is given and targets, too; a cache is for decoding: leave one of them out")
        if targets is not None:
            check_tokens("targets", targets)
            if targets.shape != tokens.shape:
                raise ValueError(
                    f"targets has shape {tuple(targets.shape)} and tokens has {tuple(tokens.shape)}; expected one target for each token"
                )
            check_range("targets", targets, self.config.vocab_size, ignore_index=-100)
        use = None if cache is None else self.decoder.begin(tokens.shape[0], tokens.shape[1], cache, cu_seqlens)
        hidden = self.hidden(tokens, cu_seqlens, seq_len, use)
        if targets is None:
            logits = F.linear(hidden, self.output_weight)
            # logits may be what memory is too small for: until they are there, the pass has not been
            if use is not None and use is not cache:
                use.end()
            return logits
        if self.ring is not None:
            return sharded_cross_entropy(hidden, self.output_weight, targets, group=self.ring.group_name)
        return chunked_cross_entropy(hidden, self.output_weight, targets)

    def hidden(
        self,
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        seq_len: int | None = None,
        cache: Cache | Requests | Use | None = None,
    ) -> torch.Tensor:
        """Hidden states (B, N, E) behind the last norm: logits are their products with ``output_weight``. Arguments as of ``forward``."""
        check_range("tokens", tokens, num_ids(self.embedding))
        embedded = self.embedding(tokens)
        if self.config.scale_embedding:
            # undoes the output layer's small initial values, for the residual stream to start at variance 1
            embedded = embedded * self.config.embed_dim**0.5
        return self.decoder(self.dropout(embedded), cu_seqlens=cu_seqlens, seq_len=seq_len, cache=cache)

    @torch.no_grad()
    def generate(
        self,
        prompt: Any,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_token: int | None = None,
        generator: torch.Generator | None = None,
        prefill_chunk: int = 8192,
        cuda_graph: bool = True,
    ) -> Any:
        """The prompt continued, each token as the forward over the whole sequence before it gives it; see ``models.generation.generate``.

        Args:
            prompt: (B, N) integers, N ≥ 1; or a list of B prompts (N_i,) of unequal length.
            max_new_tokens: tokens to add, ≥ 0.
            temperature: of the softmax that is drawn from; 0 takes the likeliest token.
            top_k: draw from the k likeliest only.
            top_p: draw from the fewest likeliest whose probabilities sum to this, (0, 1].
            stop_token: a sequence ends with it.
            generator: of the draws, on the model's device; None for torch's default.
            prefill_chunk: positions of a prompt that are computed at a time.
            cuda_graph: on a GPU, capture a step once and replay it.

        Returns:
            (B, N + tokens added), with ``stop_token`` behind a sequence that ended; of a list, a list of (N_i + tokens added,).

        Raises:
            ValueError, TypeError: arguments that do not fit, a prompt with tokens out of range (on a GPU, too), logits that are not finite, as of
                weights with NaN, or a model that several processes share: generation is one process's work.
        """
        from dilated_attention.models.generation import Sampling, generate

        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        return generate(
            self,
            prompt,
            max_new_tokens,
            sampling=sampling,
            stop_token=stop_token,
            prefill_chunk=prefill_chunk,
            cuda_graph=cuda_graph,
        )

