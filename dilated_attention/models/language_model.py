"""LongNet as a language model: embedding, stack of blocks, output layer, loss, generation, and its checkpoint on disk."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import Unpack

from dilated_attention.functional.options import shows_options
from dilated_attention.models.config import LongNetConfig, as_config
from dilated_attention.models.generation import Sampling, generate
from dilated_attention.models.kv_cache import CachePass, KVCache
from dilated_attention.models.loss import sharded_cross_entropy
from dilated_attention.models.saving import Pretrained
from dilated_attention.models.stack import LongNetDecoder, LongNetEncoder, ModelOptions, PaddingOptions, padding_of, stack_options
from dilated_attention.models.text import KmerEmbedding, check_ids, check_range, check_tokens, kmers, vocabulary_of
from dilated_attention.modules import RingSettings


class LongNetLM(Pretrained):
    """Language model: logits = stack(embedding[tokens]) · Wᵀ. W is the embedding or, if they are not tied, a separate matrix.

    A causal model predicts the next token; with ``config.is_causal=False`` it sees both sides, for masked tokens. With ``config.kmer`` a
    token is the code of a base with its nearest (``models.kmers``), and embedding[tokens] a ``KmerEmbedding``.

    Args:
        config: the model configuration.
        options: see ``models.stack.ModelOptions``. A sharded model takes each process's shards of tokens and targets; all layers but
            attention work per token.

    On every process a sharded model returns the loss of the whole sequence. Its gradient there is what this process's positions
    contribute, times the number of processes, so the mean over processes is exact. DDP or FSDP2 over the group (or over a mesh that has it
    as an axis) average gradients; without these, call ``average_gradients``. See ``models.loss``. The first process draws drop path for
    all; dropout uses each process's own random generator.

    >>> model = LongNetLM(LongNetConfig(
    ...     vocab_size=256, embed_dim=128, num_layers=3, num_heads=4,
    ...     segment_lengths=(1024, 8192), dilation_rates=(1, 8)))
    >>> loss = model(tokens[:, :-1], targets=tokens[:, 1:])
    """

    config_class = LongNetConfig

    @shows_options
    def __init__(self, config: LongNetConfig, **options: Unpack[ModelOptions]) -> None:
        super().__init__()
        config = as_config("config", config)
        if config.vocab_size is None:
            raise ValueError("config.vocab_size is None; LongNetLM needs the number of its tokens, e.g. 256 for bytes")
        self.config = config
        of_stack = stack_options("LongNetLM", options, is_ring=config.is_ring)
        self.ring: RingSettings | None = of_stack["ring"]
        factory: dict[str, Any] = {name: of_stack[name] for name in ("device", "dtype")}
        self.embedding: nn.Embedding | KmerEmbedding
        if config.kmer > 1:
            self.embedding = KmerEmbedding(config.kmer, config.embed_dim, **factory)
        else:
            self.embedding = nn.Embedding(config.vocab_size, config.embed_dim, **factory)
        self.dropout = nn.Dropout(config.dropout)
        stack = LongNetDecoder if config.is_causal else LongNetEncoder
        self.decoder = stack(config, **of_stack)
        self.output = None if config.tie_embeddings else nn.Linear(config.embed_dim, config.vocab_size, bias=False, **factory)
        # std E^-1/2: as the output layer, it gives logits of a normalised hidden state an initial variance near 1
        for layer in (self.embedding, self.output):
            if isinstance(layer, (nn.Embedding, nn.Linear)):
                nn.init.normal_(layer.weight, std=config.embed_dim**-0.5)

    @property
    def output_weight(self) -> torch.Tensor:
        """The weight of the output layer, (vocab_size, E)."""
        weight = self.embedding.weight if self.output is None else self.output.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def encode(self, text: str | bytes | torch.Tensor) -> torch.Tensor:
        """Returns the tokens (B, N) of a text on the model's device, as ``forward``, ``hidden`` and ``generate`` read them.

        Args:
            text: a text (B = 1), or its bytes or bases (N,) or (B, N) as ``read_fasta`` gives them. With ``config.kmer`` it is encoded as
                a whole sequence: before its first base and after its last are N.

        Raises:
            ValueError, TypeError: if the model's tokens are neither bytes nor bases (``vocabulary_of``), or a tensor holds others.

        >>> hidden = model.hidden(model.encode("GATTACA"))
        """
        vocabulary = vocabulary_of(self.config)
        if isinstance(text, (str, bytes)):
            text = vocabulary.encode(text)
        elif not isinstance(text, torch.Tensor):
            raise TypeError(f"text is a {type(text).__name__}; expected a str, bytes, or a tensor of {vocabulary.unit}s")
        tokens = text[None] if text.ndim == 1 else text
        check_tokens("text", tokens)
        if self.config.kmer > 1:
            tokens = kmers(tokens, self.config.kmer, both_sides=not self.config.is_causal)
        else:
            check_range("text", tokens, self.config.vocab_size)
        return tokens.to(self.output_weight.device)

    @shows_options
    def forward(
        self,
        tokens: torch.Tensor,
        *,
        targets: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        seq_len: int | None = None,
        cache: KVCache | CachePass | None = None,
        **options: Unpack[PaddingOptions],
    ) -> torch.Tensor:
        """Computes the logits, or the loss if ``targets`` are given.

        Args:
            tokens: (B, N) integers below vocab_size, with ``config.kmer`` codes below 5^k, as ``encode`` makes both; for a sharded model
                this process's shard (B, n), like all tensors here.
            targets: (B, N), for each position the token that follows it, or with ``is_causal=False`` the token itself; −100 for positions
                that do not count. Shift first, then shard.
            cu_seqlens: bounds of packed documents in the whole sequence, int32 (documents + 1,), B = 1; they do not attend to each other.
            seq_len: N, for a sharded model. None: the processes ask each other once per call; inside torch.compile it is required.
            cache: a ``KVCache``, a ``PagedKVCache``, or one request of either, ``cache.of(i)``. Tokens are then new positions only, which
                attend to those in the cache and are added to it: one token per request, or several for requests of equal length. With one
                token per request, that of a request that is finished or freed is dropped; its logits mean nothing.
            options: attention_mask, key_padding_mask (B, N) of ``tokens``: see ``models.stack.PaddingOptions``. Targets of padding do not
                count; a target that is padding itself, after the last token of a row, has to be −100.

        Returns:
            logits (B, N, vocab_size) in the parameters' dtype, 0 for padding; with ``targets`` the mean cross-entropy in nats, a float32
            scalar (float64 of a float64 model), for which logits are computed for a chunk of positions at a time. For a sharded model it is
            the loss of the whole sequence.

        Raises:
            ValueError, TypeError: if tensors do not fit, tokens or targets on the CPU are out of range, or bases are given in place of
                k-mer codes. On a GPU values are not checked, because the host would have to wait at every call (codes are, at the first):
                there what is out of range ends in a device-side assertion, after which the process must be restarted.
        """
        check_tokens("tokens", tokens)
        check_ids("tokens", tokens, self.embedding, is_shard=self.ring is not None)
        padding = padding_of("LongNetLM.forward", tokens, options, cache=cache, cu_seqlens=cu_seqlens)
        if cache is not None and targets is not None:
            raise ValueError("cache is given and targets, too; a cache is for decoding: leave one of them out")
        if targets is not None:
            check_tokens("targets", targets)
            if targets.shape != tokens.shape:
                raise ValueError(
                    f"targets has shape {tuple(targets.shape)} and tokens has {tuple(tokens.shape)}; expected one target for each token"
                )
            targets = targets if padding is None else targets.masked_fill(padding, -100)
            check_range("targets", targets, self.config.vocab_size, ignore_index=-100)
        if cache is not None:
            # the logits are inside: memory may run out for them, too, and the cache must learn of any failure
            with self.decoder.reading(cache, tokens, cu_seqlens) as cache_pass:
                return F.linear(self.hidden(tokens, seq_len=seq_len, cache=cache_pass), self.output_weight)
        hidden = self.hidden(tokens, cu_seqlens, seq_len, key_padding_mask=padding)
        if targets is None:
            return F.linear(hidden, self.output_weight)
        return sharded_cross_entropy(hidden, self.output_weight, targets, group="" if self.ring is None else self.ring.group_name)

    def hidden(
        self,
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        seq_len: int | None = None,
        cache: KVCache | CachePass | None = None,
        **options: Unpack[PaddingOptions],
    ) -> torch.Tensor:
        """Returns the hidden states (B, N, E) after the last norm; logits are their products with ``output_weight``. See ``forward``."""
        check_tokens("tokens", tokens)
        check_ids("tokens", tokens, self.embedding, is_shard=self.ring is not None)
        embedded = self.embedding(tokens)
        if self.config.scale_embedding:
            # undoes the small initial values of the output layer, so that the residual stream starts at variance 1
            embedded = embedded * self.config.embed_dim**0.5
        return self.decoder(self.dropout(embedded), cu_seqlens=cu_seqlens, seq_len=seq_len, cache=cache, **options)

    @torch.no_grad()
    @shows_options
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
        **options: Unpack[PaddingOptions],
    ) -> Any:
        """Continues the prompt. Each token is drawn from the logits that ``forward`` gives for all tokens so far.

        See ``models.generation.generate``; ``models.generate_stream`` yields each token as soon as it is drawn.

        Args:
            prompt: (B, N) integers, N ≥ 1; or a list of B prompts (N_i,) of unequal length. With ``config.kmer`` codes, like ``tokens``.
            max_new_tokens: number of tokens to add, ≥ 0.
            temperature: temperature of the softmax that tokens are drawn from; 0 takes the likeliest token.
            top_k: draw only from the k likeliest tokens.
            top_p: draw only from the smallest set of likeliest tokens whose probabilities sum to this, (0, 1].
            stop_token: the token that ends a sequence; with ``config.kmer`` a base, 0 to 4.
            generator: the random generator of the draws, on the model's device; None for torch's default.
            prefill_chunk: number of positions of a prompt that are computed at a time.
            cuda_graph: on a GPU, capture a step once and replay it.
            options: attention_mask, key_padding_mask (B, N) of a prompt with padding, on the left, on the right or between: see
                ``models.stack.PaddingOptions``.

        Returns:
            (B, N + tokens added), padded with ``stop_token`` after the end of a sequence; the added tokens are the last columns also of
            prompts padded on the right. For a list, a list of (N_i + tokens added,). With ``config.kmer`` the added tokens are codes, too,
            so that what is returned can be continued again: the code of a drawn base is base + 5·(previous code mod 5^(k−1)), and the
            bases are ``codes % 5``.

        Raises:
            ValueError, TypeError: if arguments do not fit, a prompt has tokens out of range (checked on a GPU, too), logits are not finite,
                e.g. because weights are NaN, or the model is shared between processes: generation runs on one process.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        return generate(
            self,
            prompt,
            max_new_tokens,
            sampling=sampling,
            stop_token=stop_token,
            prefill_chunk=prefill_chunk,
            cuda_graph=cuda_graph,
            **options,
        )
