"""Dropout by position: the definition, and its Triton kernel."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from dilated_attention.backends import Dropout, dropout
from dilated_attention.backends.dropout import Words, keep_mask, philox, words_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# where there is a GPU, its suite runs these tests on it
pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")
SEEDS = (0, 7, 2**31, 2**32 - 1, 2**32 + 5, 2**62 - 1, 2**64 - 1)
# of Random123's file kat_vectors, philox4x32 10: counter, key, result
ONES = 0xFFFFFFFF
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def scalar_philox(seed: int, *counter: int) -> tuple[int, ...]:
    """As the paper writes it, in Python's integers."""
    c, k = list(counter), [seed % 2**32, seed // 2**32]
    for _ in range(10):
        (high_0, low_0), (high_1, low_1) = divmod(0xD2511F53 * c[0], 2**32), divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


def is_saved(p: float, seed: int, batch: int, head: int, query: int, key: int) -> bool:
    a, c = scalar_philox(seed, query % 2**32, head, batch, 0)[:2]
    b = scalar_philox(seed, key % 2**32, head, batch, 1)[0]
    return (a ^ b) * (c | 1) % 2**32 >= int(p * 2**32)


def span(start: int, count: int, step: int = 1) -> torch.Tensor:
    return torch.arange(count, device=DEVICE) * step + start


@pytest.mark.parametrize(("counter", "key", "result"), PUBLISHED)
def test_philox_gives_the_published_words(counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]) -> None:
    words = philox(key[0] + key[1] * 2**32, *(torch.tensor([word], device=DEVICE) for word in counter))
    assert tuple(int(word) for word in words) == result
    assert scalar_philox(key[0] + key[1] * 2**32, *counter) == result


@pytest.mark.parametrize("p", [0.1, 0.5, 1 - 2**-40])
@pytest.mark.parametrize("seed", [3, 2**61 + 9])
def test_a_pair_is_kept_by_its_definition(p: float, seed: int) -> None:
    batch, heads, queries, keys = (4, 9), (0, 3, 17), (0, 5, 2**31 + 1, 2**32 + 5, 2**40), (2, 2**31 - 1, 2**32 - 1, 77, 5)
    tensors = (torch.tensor(x, device=DEVICE) for x in (batch, heads))
    found = keep_mask(Dropout(p, seed, *tensors, *(torch.tensor([x] * 2, device=DEVICE) for x in (queries, keys))), slice(None))
    wanted = [is_saved(p, seed, *pair) for pair in itertools.product(batch, heads, queries, keys)]
    assert found.shape == (2, 3, 5, 5) and found.flatten().tolist() == wanted
    assert p == 1 - 2**-40 or 0 < sum(wanted) < len(wanted)


def test_the_same_pair_has_the_same_fate_however_words_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of any size. Where documents of one batch entry are problems of their own: test_oracle.py."""
    one = Dropout(0.4, 11, span(0, 3), span(0, 5), span(100, 40).repeat(3, 1), span(0, 90).repeat(3, 1))
    whole = keep_mask(one, slice(None))
    assert torch.equal(torch.cat([keep_mask(one, slice(start, start + 7)) for start in range(0, 40, 7)], dim=2), whole)
    for name in ("_CPU_CHUNK", "_GPU_CHUNK"):
        monkeypatch.setattr(dropout, name, 100)
    assert torch.equal(keep_mask(replace(one), slice(None)), whole)


def same_words(found: Words, wanted: Words) -> bool:
    return all(torch.equal(x, y) and x.is_contiguous() for x, y in zip(found, wanted, strict=True))


NUMBERS = [*zip(SEEDS, (0, 1, 2**31 - 300, 2**32 - 5, 2**40 + 123, 2**32 - 5, 0), [(700, 700)] * 7, strict=True)]
NUMBERS += [(5, 40, sizes) for sizes in ((1, 1), (0, 5), (5, 0), (0, 0), (512, 513), (1, 1300))]


@pytest.mark.parametrize(("seed", "origin", "sizes"), NUMBERS)
def test_the_kernel_writes_the_same_words(seed: int, origin: int, sizes: tuple[int, int]) -> None:
    kernel = pytest.importorskip("dilated_attention.backends.dropout_triton")
    options = {"position_offset": origin, "num_keys": sizes[1], "key_position_offset": origin + 2**31, "first_head": 1000}
    found = kernel.dropout_words(seed, 2, 3, sizes[0], DEVICE, **options, first_batch=2**20)
    positions = span(origin, sizes[0])[None], span(origin + 2**31, sizes[1])[None]
    assert same_words(found, words_of(seed, span(2**20, 2), span(1000, 3), *positions)) and bool((found.c & 1 == 1).all())


def test_the_kernel_refuses_more_positions_than_it_counts() -> None:
    kernel = pytest.importorskip("dilated_attention.backends.dropout_triton")
    with pytest.raises(ValueError, match=r"words of 2147483648 positions are requested.*split them"):
        kernel.dropout_words(5, 1, 1, 1, "meta", num_keys=2**31)


def test_the_kernel_gets_numbers_of_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signed 32-bit words, whatever the seed and the positions; it specialises none of them (test_kernels_compile.py)."""
    kernel = pytest.importorskip("dilated_attention.backends.dropout_triton")
    launched: list[object] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *args, **_: launched.extend(x for x in args if not isinstance(x, torch.Tensor))

    monkeypatch.setattr(kernel, "_words_kernel", Recorder())
    for seed, origin in itertools.product(SEEDS, (0, 2**31, 2**32 - 1, 2**50)):
        kernel.dropout_words(seed, 1, 1, 3, DEVICE, position_offset=origin, first_head=2**31, first_batch=1)
    assert len(launched) == 10 * 4 * len(SEEDS) and all(type(x) is int and -(2**31) <= x < 2**31 for x in launched)
