"""Markov models of a sequence, in bits per base: what a model must be below to have learned more than frequencies of k-mers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# of add-α smoothing, and of c in the interpolation: each order takes the best, in hindsight, which favours these models
ALPHAS = (1.0, 1 / 4, 1 / 16)
WEIGHTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True)
class Order:
    """Bits per base of one order.

    Args:
        k: bases of context; of a two-sided model on each side.
        smoothed: with p = (n(context, x) + α) / (n(context) + 4α), the best α.
        interpolated: with p_k = (n(context, x) + c·p_{k−1}) / (n(context) + c), p_{−1} = 1/4, the best c at each order.
    """

    k: int
    smoothed: float
    interpolated: float


def adaptive(symbols: torch.Tensor, scored: torch.Tensor, max_order: int, both_strands: bool) -> list[Order]:
    """Models of the next base, which count everything before it: the training part and what of the held-out part has passed.

    Args:
        symbols: (N,) of 0 … 3, and 4 for a base that is not known, of which and after which nothing is counted.
        scored: (N,) bool, the positions whose mean is taken.
        both_strands: count each window's reverse complement, too, as soon as the window is complete.
    """
    counts = (_counts_before(symbols, k, both_strands) for k in range(max_order + 1))
    return _orders(counts, scored)


def two_sided(symbols: torch.Tensor, scored: torch.Tensor, cut: int, max_order: int, both_strands: bool) -> list[Order]:
    """Models of a hidden base between the k before and the k after it, counted in ``symbols[:cut]``; the k are shown even where hidden."""
    return _orders((_counts_around(symbols, k, cut, both_strands) for k in range(max_order + 1)), scored)


def _orders(counts: object, scored: torch.Tensor) -> list[Order]:
    rows = []
    lower = torch.full((int(scored.sum()),), 0.25, dtype=torch.float64, device=scored.device)
    for k, (of_pair, of_context) in enumerate(counts):  # type: ignore[arg-type, var-annotated]
        pair, context = of_pair[scored].double(), of_context[scored].double()
        smoothed = min(_bits((pair + a) / (context + 4 * a)) for a in ALPHAS)
        mixed = [(pair + c * lower) / (context + c) for c in WEIGHTS]
        lower = min(mixed, key=_bits)
        rows.append(Order(k, smoothed, _bits(lower)))
    return rows


def _bits(p: torch.Tensor) -> float:
    return float(-p.log2().mean())


def _counts_before(symbols: torch.Tensor, k: int, both_strands: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(n(context, x), n(context)) at each position, both (N,): how often its k bases of context came before it, and followed by x."""
    windows = symbols.unfold(0, k + 1, 1)
    events = [_number(windows)]
    if both_strands:
        events.append(_number((3 - windows).flip(1)))
    known = (windows < 4).all(1)
    # events in the order in which they are known: a window, its reverse complement, the next window, …
    keys = torch.stack([event.where(known, -4) for event in events], dim=1).flatten()
    return tuple(_from(_earlier(key)[:: len(events)] * known, k) for key in (keys, keys // 4))  # type: ignore[return-value]


def _counts_around(symbols: torch.Tensor, k: int, cut: int, both_strands: bool) -> tuple[torch.Tensor, torch.Tensor]:
    windows = symbols.unfold(0, 2 * k + 1, 1)
    # the middle comes last: the rest of the number is the context
    order = [*range(k), *range(k + 1, 2 * k + 1), k]
    known = (windows < 4).all(1)
    keys = _number(windows[:, order])
    trained = torch.arange(len(keys), device=keys.device) + 2 * k < cut
    counted = [keys[known & trained]]
    if both_strands:
        counted.append(_number((3 - windows).flip(1)[:, order])[known & trained])
    both = []
    for divisor in (1, 4):
        values, times = (torch.cat(counted) // divisor).unique(return_counts=True)
        here = keys // divisor
        place = torch.searchsorted(values, here).clamp(max=len(values) - 1)
        both.append(_from(torch.where((values[place] == here) & known, times[place], 0), k, k))
    return both[0], both[1]


def _number(windows: torch.Tensor) -> torch.Tensor:
    """(M, j) → (M,): the symbols of a window as digits of base 4, the last one the lowest."""
    number = torch.zeros_like(windows[:, 0])
    for column in windows.unbind(1):
        number = number * 4 + column
    return number


def _earlier(keys: torch.Tensor) -> torch.Tensor:
    """(M,) → (M,): how many equal keys come before each."""
    values, order = torch.sort(keys, stable=True)
    index = torch.arange(len(keys), device=keys.device)
    is_first = torch.ones_like(values, dtype=torch.bool)
    is_first[1:] = values[1:] != values[:-1]
    first = index.where(is_first, 0).cummax(0).values
    return torch.empty_like(index).scatter_(0, order, index - first)


def _from(counts: torch.Tensor, before: int, after: int = 0) -> torch.Tensor:
    """Counts of the windows as (N,), 0 where there is none."""
    return torch.nn.functional.pad(counts, (before, after))
