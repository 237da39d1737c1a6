"""Text generation with a cache: prompts are prefilled in chunks, then tokens follow one at a time, on a GPU with a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from typing_extensions import Unpack

from dilated_attention.functional.fused_layers import compute_dtype
from dilated_attention.functional.options import shows_options
from dilated_attention.models.config import NUM_BASES
from dilated_attention.models.kv_cache import KVCache, PagedKVCache
from dilated_attention.models.stack import PaddingOptions, rows_of
from dilated_attention.models.text import check_ids, check_tokens
from dilated_attention.pattern.checks import MAX_LENGTH, as_int, check_bool, check_number, shown

# a LongNetLM, whose module imports this one
LanguageModel = Any


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn from logits. For the arguments see ``LongNetLM.generate``."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, "a number ≥ 0")
        highest_held = torch.finfo(torch.float32).max
        if not 0 <= self.temperature <= highest_held:
            raise ValueError(
                f"temperature is {shown(self.temperature)}; expected a number from 0, for the likeliest token, to {highest_held:.3g}"
            )
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            got = f"{shown(self.generator)} ({type(self.generator).__name__})"
            raise TypeError(f"generator is {got}; expected a torch.Generator, such as torch.Generator().manual_seed(0), or None")
        # torch takes no integer of more than 64 bits
        object.__setattr__(self, "temperature", float(self.temperature))
        if self.top_k is not None:
            as_int("top_k", self.top_k, minimum=1)
        if self.top_p is not None:
            check_number("top_p", self.top_p, "a number in (0, 1]")
            if not 0 < self.top_p <= 1:
                raise ValueError(f"top_p is {self.top_p}; expected a number in (0, 1]: the share of probability that is drawn from")

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Draws one token per row of logits (B, V). Returns (B, 1).

        Raises:
            ValueError: if a row has NaN or inf, or only −inf. On a GPU this is not checked, because the host would have to wait: such a row
                gives an arbitrary token.
        """
        token, highest = self.pick(logits)
        if logits.device.type == "cpu" and not bool(highest.isfinite().all()):
            row = int((~highest.isfinite()).nonzero()[0, 0])
            raise ValueError(
                f"logits have {float(highest[row])} in row {row}; expected finite numbers or -inf, at least one of them finite"
            )
        return token

    def pick(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (tokens, highest logits), (B, 1) each. If the highest logit is not finite, the token is arbitrary."""
        # below any difference that float32 distinguishes from 0
        if self.temperature < 1e-30:
            highest, token = logits.max(-1, keepdim=True)
            return token, highest
        logits = logits.float()
        highest = logits.amax(-1, keepdim=True)
        logits = logits - highest
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            # by index, so that exactly top_k tokens remain even if several are equally likely at the edge
            likeliest = logits.topk(self.top_k, dim=-1)
            logits = torch.full_like(logits, -torch.inf).scatter(-1, likeliest.indices, likeliest.values)
        probabilities = (logits / self.temperature).softmax(-1)
        if self.top_p is not None:
            ordered, order = probabilities.sort(-1, descending=True)
            # a token stays if the probabilities before it sum to less than top_p; the likeliest always stays, before which there is 0,
            # also where float32 rounds top_p to 0
            before = ordered.cumsum(-1) - ordered
            dropped = (before >= self.top_p) & (before > 0)
            probabilities = probabilities.scatter(-1, order, ordered.masked_fill(dropped, 0.0))
        # the same bits as torch.multinomial, but without its device-side assertion, after which a process cannot use its GPU any more
        rivals = torch.empty_like(probabilities).exponential_(1.0, generator=self.generator)
        return (probabilities / rivals).argmax(-1, keepdim=True), highest


class Stepper:
    """Computes the logits of the next token of every request from its last one: a step of the model over its cache.

    On a GPU the step is captured once as a CUDA graph and replayed: nothing in it depends on the host, neither lengths nor tokens. It is
    captured again when tables of a block pattern have grown. The token of a request that is finished or freed is dropped, and its logits
    mean nothing: prefill the request first.

    Args:
        model: the model, in eval mode.
        cache: a cache in which every request is prefilled.
        cuda_graph: whether to capture a CUDA graph; no effect on other devices.

    >>> step = Stepper(model, cache)
    >>> logits = step(tokens)  # (B, 1) → (B, V); overwritten by the next call
    """

    def __init__(self, model: LanguageModel, cache: KVCache, *, cuda_graph: bool = True) -> None:
        self.model, self.cache = model, cache
        self.uses_graph = check_bool("cuda_graph", cuda_graph) and cache.device.type == "cuda"
        self.tokens = torch.zeros(cache.num_requests, 1, dtype=torch.int64, device=cache.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: torch.Tensor | None = None
        self._generation = 0

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        check_tokens("tokens", tokens)
        if tokens.shape != self.tokens.shape:
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}; expected one token for each request, {tuple(self.tokens.shape)}")
        check_ids("tokens", tokens, self.model.embedding)
        generation = self.cache.prepare_step()
        self.tokens.copy_(tokens)
        if not self.uses_graph:
            logits = self._forward()
        else:
            # another pass over this cache may also have made tables grow
            if self._graph is None or self._generation != generation:
                self._graph = self._logits = None
                # a graph is captured on the current device, which need not be the cache's
                with torch.cuda.device(self.cache.device):
                    self._capture()
                self._generation = generation
            assert self._graph is not None and self._logits is not None
            self._graph.replay()
            logits = self._logits
        self.cache.advance()
        return logits

    def _forward(self) -> torch.Tensor:
        hidden = self.model.hidden(self.tokens, cache=self.cache.step())
        return F.linear(hidden[:, -1], self.model.output_weight)

    def _capture(self) -> None:
        # a step only writes its own position, and lengths grow outside it, so it may run any number of times
        side = torch.cuda.Stream(self.cache.device)
        side.wait_stream(torch.cuda.current_stream(self.cache.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self._forward()
        torch.cuda.current_stream(self.cache.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._forward()
        # assigned only now, so that a failed capture leaves no graph
        self._graph, self._logits = graph, logits


@torch.no_grad()
def prefill(model: LanguageModel, tokens: torch.Tensor, cache: KVCache, *, chunk: int = 8192) -> torch.Tensor:
    """Returns logits (B, V) of the token after ``tokens`` (B, N).

    The tokens enter the cache ``chunk`` at a time.

    Args:
        model: the model, in eval mode.
        cache: a cache, or one request of it, ``cache.of(i)``. After an error, such as too little memory, call ``cache.free(i)`` and try
            again with a smaller ``chunk``: the request is refused until it is freed.
    """
    check_tokens("tokens", tokens)
    if tokens.shape[1] < 1:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}; expected at least one position, whose next token is asked for")
    check_ids("tokens", tokens, model.embedding)
    for part in tokens.split(as_int("prefill_chunk", chunk, minimum=1), dim=1):
        # around all that can fail: a prompt that was cut off is refused, too
        with model.decoder.reading(cache, part) as cache_pass:
            logits = F.linear(model.hidden(part, cache=cache_pass)[:, -1], model.output_weight)
    return logits


@torch.no_grad()
@shows_options
def generate(
    model: LanguageModel,
    prompts: Any,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop_token: int | None = None,
    prefill_chunk: int = 8192,
    cuda_graph: bool = True,
    **options: Unpack[PaddingOptions],
) -> Any:
    """Continues prompts: each token is drawn from the logits that a forward over the whole sequence before it would give.

    Keys and values are cached, so a token only reads those that its row keeps. With LongNet's branches their number does not grow with the
    context. Prompts of equal length use a ``KVCache``; prompts of unequal length use a ``PagedKVCache`` and are prefilled one by one. The
    choice depends on shapes alone and changes results by no more than rounding.

    For arguments, results and errors see ``LongNetLM.generate``.
    """
    unpadded = rows_of("generate", prompts, options)
    # nothing waits for the device before the end: the draws of all steps are checked together
    rows, steps = _begun(model, unpadded, max_new_tokens, sampling, stop_token, prefill_chunk, cuda_graph, waits=False)
    if not (drawn := list(steps)):
        return prompts
    new = torch.cat(drawn, 1)
    if isinstance(prompts, torch.Tensor):
        return torch.cat([prompts, new.to(prompts.dtype)], 1)
    # of each up to the first that ends it; bases of codes
    ends = (new % model.config.vocab_size == (-1 if stop_token is None else stop_token)).long()
    is_added = ends.cumsum(1) - ends == 0
    return [torch.cat([row, added[chosen].to(row.dtype)]) for row, added, chosen in zip(rows, new, is_added, strict=True)]


@shows_options
def generate_stream(
    model: LanguageModel,
    prompts: Any,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop_token: int | None = None,
    prefill_chunk: int = 8192,
    cuda_graph: bool = True,
    **options: Unpack[PaddingOptions],
) -> Iterator[torch.Tensor]:
    """Yields the tokens that ``generate`` adds, (B, 1) of each step, as soon as they are drawn; the same for the same random generator.

    Arguments are checked at the call. The model is in eval mode from the first token until the iterator ends, is closed or collected. A
    request that has ended yields ``stop_token`` while others go on. Each step waits for the device, to check that its logits are finite.

    For arguments and errors see ``LongNetLM.generate``.

    >>> sampling = Sampling(temperature=0.8)
    >>> for token in generate_stream(model, prompt, 100, sampling=sampling):
    ...     print(BYTES.decode(token[0]), end="", flush=True)
    """
    prompts = rows_of("generate_stream", prompts, options)
    return _begun(model, prompts, max_new_tokens, sampling, stop_token, prefill_chunk, cuda_graph, waits=True)[1]


@contextlib.contextmanager
def eval_mode(model: LanguageModel) -> Iterator[None]:
    """Puts the model in eval mode; at the end every module is in its former mode again."""
    in_training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in in_training:
            module.training = True


def _begun(
    model: LanguageModel,
    prompts: Any,
    max_new_tokens: int,
    sampling: Sampling | None,
    stop_token: int | None,
    prefill_chunk: int,
    cuda_graph: bool,
    *,
    waits: bool,
) -> tuple[list[torch.Tensor], Iterator[torch.Tensor]]:
    """Checks the arguments of ``generate``. Returns the prompts as rows, and an iterator over the drawn tokens as input, (B, 1) of each
    step, at most max_new_tokens; a request that has ended gets ``stop_token`` again. ``waits``: check at each step that logits are finite,
    not only at the first and the last."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise TypeError(f"sampling is {shown(sampling)} ({type(sampling).__name__}); expected a Sampling, e.g. Sampling(temperature=0.8)")
    if not model.config.is_causal:
        raise ValueError("config.is_causal is False; such a model fills in tokens and has no next one: generate needs is_causal=True")
    if model.ring is not None and model.ring.group_name:
        raise ValueError(
            f"this model's sequence is spread over {model.ring.place()[1]} processes, and generate runs on one; load its state_dict into a "
            "LongNetLM of the same config without group and mesh"
        )
    rows: list[torch.Tensor] = []
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, (str, bytes))
    for name, x in [(f"prompt[{i}]", row) for i, row in enumerate(prompts)] if is_list else [("prompt", prompts)]:
        if is_list and isinstance(x, torch.Tensor):
            if x.ndim != 1:
                raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (tokens,), one prompt of a list")
            x = x[None]
        check_tokens(name, x)
        check_ids(name, x, model.embedding, waits=True)
        if x.shape[1] < 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected at least one token to continue from")
        rows += x.unbind(0)
    max_new_tokens = as_int("max_new_tokens", max_new_tokens, minimum=0, maximum=MAX_LENGTH // 2)
    stop_token = None if stop_token is None else as_int("stop_token", stop_token, minimum=0)
    if stop_token is not None and stop_token >= model.config.vocab_size:
        raise ValueError(f"stop_token is {stop_token}; expected a token below vocab_size = {model.config.vocab_size}")
    if max_new_tokens == 0 or not rows:
        return rows, iter(())

    @torch.no_grad()
    def steps() -> Iterator[torch.Tensor]:
        with eval_mode(model):
            weight = model.output_weight
            lengths = [len(row) for row in rows]
            place: dict[str, Any] = {"device": weight.device, "dtype": compute_dtype(weight, weight)}
            longest = max(lengths) + max_new_tokens
            if len(set(lengths)) == 1:
                cache = KVCache(model.config, len(rows), longest, **place)
                logits = prefill(model, torch.stack(rows), cache, chunk=prefill_chunk)
            else:
                cache = PagedKVCache(model.config, len(rows), longest, chunk=prefill_chunk, **place)
                logits = torch.cat([prefill(model, row[None], cache.of(i), chunk=prefill_chunk) for i, row in enumerate(rows)])
            step = Stepper(model, cache, cuda_graph=cuda_graph)
            count, sampler = 0, Sampling() if sampling is None else sampling
            unchecked: list[torch.Tensor] = []
            ended = torch.zeros(len(rows), 1, dtype=torch.bool, device=weight.device)
            # of a k-mer model codes, from which the next codes follow
            last = torch.stack([row[-1:] for row in rows])
            while True:
                token, highest = sampler.pick(logits)
                count += 1
                # the tokens of requests that have ended are not read
                unchecked.append(highest if stop_token is None else highest.masked_fill(ended, 0.0))
                if stop_token is not None:
                    token = token.masked_fill(ended, stop_token)
                    ended = token == stop_token
                    # the host has to know whether to continue; without a stop token no step waits for the device
                    for request in ended[:, 0].nonzero()[:, 0].tolist():
                        if cache.active[request]:
                            cache.finish(request)
                last = token + NUM_BASES * (last % NUM_BASES ** (model.config.kmer - 1)) if model.config.kmer > 1 else token
                is_last = count == max_new_tokens or not any(cache.active)
                # NaN weights are told of at once
                if waits or is_last or count == 1 or weight.device.type == "cpu":
                    _check_finite(model, unchecked, count - len(unchecked))
                    unchecked = []
                yield last
                if is_last:
                    return
                logits = step(last)

    return rows, steps()


def _check_finite(model: LanguageModel, highest: list[torch.Tensor], before: int) -> None:
    """Raises ValueError if the highest logits (B, 1) of any step are not finite; waits for the device. ``before``: how many new tokens came
    before the first of these steps."""
    # (steps, requests)
    wrong = ~torch.stack(highest)[..., 0].isfinite()
    if not bool(wrong.any()):
        return
    place, row = wrong.nonzero()[0].tolist()
    spoilt = next((name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())), None)
    cause = f"its parameter {spoilt} holds NaN or inf: load weights that do not"
    if spoilt is None:
        cause = f"none of its parameters is NaN or inf, so numbers overflow in {model.output_weight.dtype}: try bfloat16 or float32"
    raise ValueError(
        f"model gives logits whose highest is {float(highest[place][row])} (prompt {row}, {before + place} new tokens); expected finite "
        f"numbers, and {cause}"
    )
