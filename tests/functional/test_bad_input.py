"""Bad input is refused at the door: the right exception, a text that names the argument, its value and a way out, no work done."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention import (
    BackendUnavailable,
    DilatedPattern,
    attention,
    block_sparse_attention,
    block_sparse_dilated_attention,
    dilated_attention,
    ring_attention,
    ring_block_sparse_attention,
    ring_block_sparse_dilated_attention,
    ring_dilated_attention,
)
from dilated_attention.engine.branches import sequential, strategy
from dilated_attention.pattern import LocalWindow

LENGTHS, RATES = [4, 8], [1, 2]
# every text says what would be right, by one of these
REMEDIES = (
    "expected",
    "use ",
    "give ",
    "must be equal",
    "must be a positive multiple",
    "need ",
    "needs",
    "e.g.",
    "convert",
    "move",
    "leave ",
    "can be",
    "could",
)


def tensors(
    batch: int = 2, queries: int = 8, keys: int = 8, heads: int = 4, kv_heads: int = 2, dim: int = 8, **changes: torch.Tensor
) -> dict[str, Any]:
    made = {
        "q": torch.zeros(batch, queries, heads, dim),
        "k": torch.zeros(batch, keys, kv_heads, dim),
        "v": torch.zeros(batch, keys, kv_heads, dim),
    }
    return made | changes


def bounds(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


class NoOps(TorchDispatchMode):
    """Fails on any operation of torch, so that a check can neither allocate nor compute."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran before the input was refused")


# (what is wrong, arguments of dilated_attention, exception, words of its text)
BAD_CALLS: list[tuple[str, dict[str, Any], type[Exception], tuple[str, ...]]] = [
    # tensors
    ("q is a list", tensors(q=[1.0]), TypeError, ("q is a list", "torch.Tensor", "batch, sequence, heads, head_dim", "torch.tensor(q)")),
    # type: ignore[arg-type]
    ("k is None", tensors(k=None), TypeError, ("k is a NoneType",)),  # type: ignore[arg-type]
    ("v is numpy", tensors(v=np.zeros((2, 8, 2, 8))), TypeError, ("v is a ndarray", "torch.from_numpy(v)")),  # type: ignore[arg-type]
    ("q has 3 dimensions", tensors(q=torch.zeros(2, 8, 32)), ValueError, ("q has shape (2, 8, 32)", "4 dimensions")),
    ("k has 5 dimensions", tensors(k=torch.zeros(2, 8, 2, 8, 1)), ValueError, ("k has shape (2, 8, 2, 8, 1)",)),
    ("v is a number", tensors(v=torch.zeros(())), ValueError, ("v has shape ()",)),
    (
        "q is int64",
        tensors(q=torch.zeros(2, 8, 4, 8, dtype=torch.int64)),
        ValueError,
        ("q has dtype torch.int64", "float16, bfloat16, float32, float64"),
    ),
    ("k is complex", tensors(k=torch.zeros(2, 8, 2, 8, dtype=torch.complex64)), ValueError, ("k has dtype torch.complex64",)),
    ("v is bool", tensors(v=torch.zeros(2, 8, 2, 8, dtype=torch.bool)), ValueError, ("v has dtype torch.bool",)),
    ("q is float8", tensors(q=torch.zeros(2, 8, 4, 8).to(torch.float8_e4m3fn)), ValueError, ("q has dtype torch.float8_e4m3fn",)),
    ("dtypes differ", tensors(q=torch.zeros(2, 8, 4, 8, dtype=torch.bfloat16)), ValueError, ("q, k, v", "bfloat16", "float32", "autocast")),
    ("devices differ", tensors(q=torch.zeros(2, 8, 4, 8, device="meta")), ValueError, ("q, k, v", "meta", "cpu", ".to()")),
    ("k and v differ in length", tensors(v=torch.zeros(2, 9, 2, 8)), ValueError, ("(2, 8, 2, 8)", "(2, 9, 2, 8)")),
    ("k and v differ in heads", tensors(v=torch.zeros(2, 8, 4, 8)), ValueError, ("v has (2, 8, 4, 8)",)),
    ("v has another head_dim", tensors(v=torch.zeros(2, 8, 2, 16)), ValueError, ("v has (2, 8, 2, 16)",)),
    ("batches differ", tensors(q=torch.zeros(3, 8, 4, 8)), ValueError, ("batch size 3", "2")),
    ("head_dims differ", tensors(q=torch.zeros(2, 8, 4, 16)), ValueError, ("head_dim 16", "8")),
    ("head_dim 0", tensors(dim=0), ValueError, ("head_dim is 0", "1 to 256")),
    ("head_dim 257", tensors(dim=257), ValueError, ("head_dim is 257", "1 to 256")),
    ("heads no multiple", tensors(heads=5), ValueError, ("q has 5 heads", "k has 2", "multiple")),
    ("fewer query heads", tensors(heads=2, kv_heads=4), ValueError, ("q has 2 heads", "k has 4")),
    ("no heads", tensors(heads=0, kv_heads=0), ValueError, ("q has 0 heads",)),
    ("no key/value heads", tensors(kv_heads=0), ValueError, ("k has 0",)),
    # branches
    ("no branch", {"segment_lengths": [], "dilation_rates": []}, ValueError, ("segment_lengths is empty", "segment_lengths=[2048]")),
    ("fewer rates", {"dilation_rates": [1]}, ValueError, ("segment_lengths has 2", "dilation_rates has 1", "[4, 8]", "equal length")),
    ("more rates", {"dilation_rates": [1, 2, 4]}, ValueError, ("dilation_rates has 3", "[1, 2, 4]")),
    ("length 0", {"segment_lengths": [4, 0]}, ValueError, ("segment_lengths[1] is 0", "≥ 1")),
    ("length negative", {"segment_lengths": [-4, 8]}, ValueError, ("segment_lengths[0] is -4",)),
    ("length beyond 64 bits", {"segment_lengths": [4, 2**70]}, ValueError, ("segment_lengths[1]", str(2**70), "2**62")),
    ("length a float", {"segment_lengths": [4.0, 8]}, TypeError, ("segment_lengths[0] is 4.0 (float)", "integer")),
    ("length a bool", {"segment_lengths": [True, 8]}, TypeError, ("segment_lengths[0] is True (bool)",)),
    ("length a string", {"segment_lengths": ["4", 8]}, TypeError, ("segment_lengths[0] is '4' (str)",)),
    ("length None", {"segment_lengths": [None, 8]}, TypeError, ("segment_lengths[0] is None",)),
    ("lengths an int", {"segment_lengths": 8}, TypeError, ("segment_lengths is 8 (int)", "list of integers")),
    ("lengths a string", {"segment_lengths": "48"}, TypeError, ("segment_lengths is '48' (str)",)),
    ("lengths None", {"segment_lengths": None}, TypeError, ("segment_lengths is None",)),
    ("lengths a set", {"segment_lengths": {4, 8}}, TypeError, ("segment_lengths is {", "(set)")),
    ("lengths a dict", {"segment_lengths": {4: 1}}, TypeError, ("segment_lengths is {4: 1} (dict)",)),
    ("lengths a matrix", {"segment_lengths": np.array([[4, 8]])}, TypeError, ("segment_lengths is array([[4, 8]])",)),
    ("lengths of floats in numpy", {"segment_lengths": np.array([4.0, 8.0])}, TypeError, ("segment_lengths[0] is 4.0 (float)",)),
    ("rate 0", {"dilation_rates": [1, 0]}, ValueError, ("dilation_rates[1] is 0", "≥ 1")),
    ("rate negative", {"dilation_rates": [-1, 2]}, ValueError, ("dilation_rates[0] is -1",)),
    ("rate above length", {"dilation_rates": [5, 2]}, ValueError, ("dilation_rates[0] is 5", "segment_lengths[0] = 4", "≤ 4")),
    ("rate a float", {"dilation_rates": [1, 2.5]}, TypeError, ("dilation_rates[1] is 2.5 (float)",)),
    ("rates an int", {"dilation_rates": 2}, TypeError, ("dilation_rates is 2 (int)",)),
    # head offsets and layouts
    ("unknown offsets", {"head_offsets": "diagonal"}, ValueError, ("head_offsets is 'diagonal'", "'cyclic', 'blocked', 'zero'")),
    ("offsets a number", {"head_offsets": 3}, TypeError, ("head_offsets is 3 (int)", "'cyclic'")),
    ("offsets None", {"head_offsets": None}, TypeError, ("head_offsets is None", "'cyclic'")),
    ("offsets a dict", {"head_offsets": {}}, TypeError, ("head_offsets is {} (dict)",)),
    ("one list of offsets for two branches", {"head_offsets": [[0, 0, 0, 0]]}, ValueError, ("head_offsets has 1 lists for 2 branches",)),
    (
        "an offset of the rate",
        {"head_offsets": [[0] * 4, [0, 1, 2, 0]]},
        ValueError,
        ("head_offsets[1][2] is 2", "below 2", "dilation rate 2"),
    ),
    ("an offset negative", {"head_offsets": [[0] * 4, [0, -1, 0, 0]]}, ValueError, ("head_offsets[1][1] is -1",)),
    ("an offset a float", {"head_offsets": [[0] * 4, [0, 0.5, 0, 0]]}, TypeError, ("head_offsets[1][1] is 0.5 (float)",)),
    ("offsets of unequal lengths", {"head_offsets": [[0] * 4, [0] * 3]}, ValueError, ("head_offsets has lists of lengths [4, 3]",)),
    ("offsets for other heads", {"head_offsets": [[0] * 3, [0] * 3]}, ValueError, ("head_offsets has 3 integers per branch for 4 heads",)),
    ("offsets for no heads", {"head_offsets": [[], []]}, ValueError, ("head_offsets has 0 integers per branch for 4 heads",)),
    ("a flat list of offsets", {"head_offsets": [0, 1]}, TypeError, ("head_offsets[0] is 0 (int)", "list of integers")),
    (
        "offsets beside split",
        {"head_offsets": "zero", "branch_heads": "split"},
        ValueError,
        ("head_offsets='zero'", "branch_heads='split'", "leave"),
    ),
    (
        "lists beside split",
        {"head_offsets": [[0] * 4] * 2, "branch_heads": "split"},
        ValueError,
        ("head_offsets", "branch_heads='split'", "leave"),
    ),
    ("unknown branch_heads", {"branch_heads": "some"}, ValueError, ("branch_heads is 'some'", "'all', 'split'")),
    ("branch_heads None", {"branch_heads": None}, TypeError, ("branch_heads is None",)),
    ("branch_heads a list", {"branch_heads": []}, TypeError, ("branch_heads is [] (list)",)),
    ("unknown tail", {"tail": "pad"}, ValueError, ("tail is 'pad'", "'mask', 'zero_keys'")),
    ("tail a bool", {"tail": True}, TypeError, ("tail is True (bool)",)),
    ("unknown mixture_grad", {"mixture_grad": "none"}, ValueError, ("mixture_grad is 'none'", "'exact', 'detached'")),
    ("mixture_grad None", {"mixture_grad": None}, TypeError, ("mixture_grad is None",)),
    # numbers and flags
    ("scale 0", {"scale": 0.0}, ValueError, ("scale is 0.0", "> 0", "None")),
    ("scale negative", {"scale": -1}, ValueError, ("scale is -1",)),
    ("scale NaN", {"scale": math.nan}, ValueError, ("scale is nan",)),
    ("scale infinite", {"scale": math.inf}, ValueError, ("scale is inf",)),
    ("scale beyond float32", {"scale": 1e39}, ValueError, ("scale is 1e+39", "3.4e+38")),
    ("scale times log2(e) beyond float32", {"scale": 2.4e38}, ValueError, ("scale is 2.4e+38", "to 2.36e+38", "log2(e)", "None")),
    ("scale below float32", {"scale": 1e-40}, ValueError, ("scale is 1e-40", "from 1.18e-38", "None")),
    ("scale beyond float", {"scale": 10**400}, ValueError, ("scale is 1000",)),
    ("scale a string", {"scale": "0.1"}, TypeError, ("scale is '0.1' (str)",)),
    ("scale a bool", {"scale": True}, TypeError, ("scale is True (bool)",)),
    ("dropout 1", {"dropout_p": 1.0}, ValueError, ("dropout_p is 1.0", "[0, 1)")),
    ("dropout negative", {"dropout_p": -0.1}, ValueError, ("dropout_p is -0.1",)),
    ("dropout NaN", {"dropout_p": math.nan}, ValueError, ("dropout_p is nan",)),
    ("dropout a bool", {"dropout_p": True}, TypeError, ("dropout_p is True (bool)",)),
    ("dropout None", {"dropout_p": None}, TypeError, ("dropout_p is None",)),
    ("is_causal an int", {"is_causal": 1}, TypeError, ("is_causal is 1 (int)", "True or False")),
    ("is_causal None", {"is_causal": None}, TypeError, ("is_causal is None",)),
    ("return_lse a string", {"return_lse": "yes"}, TypeError, ("return_lse is 'yes' (str)",)),
    ("deterministic an int", {"deterministic": 0}, TypeError, ("deterministic is 0 (int)",)),
    ("query_offset negative", {"query_offset": -1}, ValueError, ("query_offset is -1", "≥ 0")),
    ("query_offset too large", {"query_offset": 1}, ValueError, ("query_offset is 1", "q has 8 rows", "position 9 of 8 keys", "give keys")),
    ("more queries than keys", tensors(queries=9), ValueError, ("query_offset is 0", "9 of 8")),
    ("query_offset a float", {"query_offset": 0.0}, TypeError, ("query_offset is 0.0 (float)",)),
    ("query_offset a bool", {"query_offset": False}, TypeError, ("query_offset is False (bool)",)),
    # masks and documents
    (
        "mask of integers",
        {"key_padding_mask": torch.zeros(2, 8, dtype=torch.int64)},
        TypeError,
        ("key_padding_mask has dtype torch.int64", "bool", "True = padding"),
    ),
    ("mask of floats", {"key_padding_mask": torch.zeros(2, 8)}, TypeError, ("key_padding_mask has dtype torch.float32",)),
    ("mask a list", {"key_padding_mask": [[False] * 8] * 2}, TypeError, ("key_padding_mask is a list",)),
    (
        "mask too short",
        {"key_padding_mask": torch.zeros(2, 7, dtype=torch.bool)},
        ValueError,
        ("key_padding_mask has shape (2, 7)", "(2, 8)"),
    ),
    (
        "mask of one batch",
        {"key_padding_mask": torch.zeros(1, 8, dtype=torch.bool)},
        ValueError,
        ("key_padding_mask has shape (1, 8)", "(2, 8)"),
    ),
    ("mask of scores", {"key_padding_mask": torch.zeros(2, 8, 8, dtype=torch.bool)}, ValueError, ("key_padding_mask has shape (2, 8, 8)",)),
    (
        "mask elsewhere",
        {"key_padding_mask": torch.zeros(2, 8, dtype=torch.bool, device="meta")},
        ValueError,
        ("key_padding_mask is on meta", ".to(k.device)"),
    ),
    ("cu_seqlens a list", tensors(1) | {"cu_seqlens": [0, 8]}, TypeError, ("cu_seqlens is a list", "int32", "torch.tensor(cu_seqlens)")),
    (
        "cu_seqlens of floats",
        tensors(1) | {"cu_seqlens": torch.tensor([0.0, 8.0])},
        TypeError,
        ("cu_seqlens has dtype torch.float32", "int32"),
    ),
    ("cu_seqlens a matrix", tensors(1) | {"cu_seqlens": bounds(0, 8)[None]}, ValueError, ("cu_seqlens has shape (1, 2)", "documents + 1")),
    (
        "cu_seqlens of no document",
        tensors(1) | {"cu_seqlens": bounds(0)},
        ValueError,
        ("cu_seqlens has shape (1,)", "at least one document"),
    ),
    ("cu_seqlens with a batch", {"cu_seqlens": bounds(0, 8)}, ValueError, ("cu_seqlens", "batch size 2", "batch size 1")),
    (
        "cu_seqlens with fewer queries",
        tensors(1, queries=4) | {"cu_seqlens": bounds(0, 8)},
        ValueError,
        ("cu_seqlens", "4 queries and 8 keys"),
    ),
    # backends
    ("unknown backend", {"backend": "flash5"}, ValueError, ("backend is 'flash5'", "auto", "math")),
    ("backend None", {"backend": None}, TypeError, ("backend is None", "auto")),
    ("backend a bool", {"backend": True}, TypeError, ("backend is True (bool)",)),
]


def refused(function: Callable[..., Any], arguments: dict[str, Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        function(**arguments)
    text = str(caught.value)
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {text}"
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    assert any(remedy in text for remedy in REMEDIES), f"no way out in: {text}"
    assert len(text) < 900


@pytest.mark.parametrize(("arguments", "kind", "words"), [pytest.param(*case[1:], id=case[0]) for case in BAD_CALLS])
def test_refused_before_anything_runs(arguments: dict[str, Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    arguments = tensors() | {"segment_lengths": LENGTHS, "dilation_rates": RATES} | arguments
    with NoOps():
        refused(dilated_attention, arguments, kind, words)


def test_the_call_that_all_bad_ones_change_is_good() -> None:
    assert dilated_attention(**tensors(), segment_lengths=LENGTHS, dilation_rates=RATES).shape == (2, 8, 4, 8)
    with pytest.raises(AssertionError, match="ran before"), NoOps():
        dilated_attention(**tensors(), segment_lengths=LENGTHS, dilation_rates=RATES)


WINDOW = LocalWindow(4)
OTHERS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "blocks": lambda **given: block_sparse_attention(pattern=WINDOW, **given),
    "union": lambda **given: block_sparse_dilated_attention(pattern=WINDOW, **given),
    "ring": ring_attention,
    "ring_dilated": ring_dilated_attention,
    "ring_blocks": lambda **given: ring_block_sparse_attention(pattern=WINDOW, **given),
    "ring_union": lambda **given: ring_block_sparse_dilated_attention(pattern=WINDOW, **given),
}
OF_BRANCHES = {"segment_lengths", "dilation_rates", "head_offsets", "branch_heads", "tail"}


@pytest.mark.parametrize(("arguments", "kind", "words"), [pytest.param(*case[1:], id=case[0]) for case in BAD_CALLS])
def test_every_function_refuses_the_same(arguments: dict[str, Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    for name, function in OTHERS.items():
        has_branches = "dilated" in name or "union" in name
        missing = {"query_offset"} if "ring" in name else set()
        missing |= set() if name == "ring_dilated" else {"mixture_grad"}
        # a process of a ring holds queries and keys of the same positions, and says that first
        unequal = "ring" in name and {"query_offset is 0", "4 queries and 8 keys"} & set(words)
        if unequal or arguments.keys() & (missing if has_branches else missing | OF_BRANCHES):
            continue
        branches = {"segment_lengths": LENGTHS, "dilation_rates": RATES} if has_branches else {}
        given = tensors() | branches | arguments
        with NoOps():
            refused(function, given, kind, words)


@pytest.mark.parametrize(
    ("window", "kind", "words"),
    [
        (-1, ValueError, ("window is -1", "≥ 0")),
        (2.0, TypeError, ("window is 2.0 (float)",)),
        ("3", TypeError, ("window is '3' (str)",)),
        (True, TypeError, ("window is True (bool)",)),
        ((1,), ValueError, ("window is (1,)", "(left, right)")),
        ((1, 2, 3), ValueError, ("window is (1, 2, 3)",)),
        ((1, -2), ValueError, ("window[1] is -2",)),
        ((1.5, 0), TypeError, ("window[0] is 1.5 (float)",)),
        (("a", None), TypeError, ("window[0] is 'a' (str)",)),
        ([], ValueError, ("window is []",)),
    ],
    ids=str,
)
def test_windows(window: Any, kind: type[Exception], words: tuple[str, ...]) -> None:
    arguments = tensors() | {"window": window}
    with NoOps():
        refused(attention, arguments, kind, words)


# --- values that are read where the work is planned: nothing of the result is allocated yet --------------------------------------------


@pytest.fixture
def no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes room for a result, or starts the run, fails the test."""

    def fail(*args: object, **kwargs: object) -> torch.Tensor:
        raise AssertionError("allocated before the input was refused")

    for name in ("empty", "zeros", "full", "empty_like", "zeros_like", "full_like"):
        monkeypatch.setattr(torch, name, fail)
    monkeypatch.setattr(strategy, "choose_forward", fail)
    monkeypatch.setattr(sequential, "run_forward", fail)


@pytest.mark.parametrize(
    "values",
    [(0, 9), (0, 7), (1, 8), (-1, 8), (0, 5, 4, 8), (8, 0), (0, -3, 8), (0, 4, 9, 8), (0, 0), (8, 8)],
    ids=str,
)
def test_document_bounds(values: tuple[int, ...], no_results: None) -> None:
    arguments = BATCH_OF_ONE | {"cu_seqlens": bounds(*values)}
    refused(dilated_attention, arguments, ValueError, ("cu_seqlens is", str(list(values)), "N = 8"))


BATCH_OF_ONE = tensors(1) | {"segment_lengths": LENGTHS, "dilation_rates": RATES}


def test_document_bounds_of_an_empty_sequence() -> None:
    refused(
        dilated_attention, BATCH_OF_ONE | tensors(1, 0, 0) | {"cu_seqlens": bounds(0, 3)}, ValueError, ("cu_seqlens is [0, 3]", "N = 0")
    )


def test_many_document_bounds_are_shown_in_short() -> None:
    values = [*range(400), 7]
    arguments = BATCH_OF_ONE | tensors(1, 400, 400) | {"cu_seqlens": bounds(*values)}
    refused(dilated_attention, arguments, ValueError, ("cu_seqlens is [0, 1, 2", "…", "N = 400"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "sdpa_cpu", "dropout_p": 0.5}, ("sdpa_cpu", "dropout", "math")),
        ({"backend": "sdpa"}, None),
        ({"backend": "flash4"}, ("flash4", "cpu", "sdpa_cpu")),
    ],
    ids=str,
)
def test_backends_that_cannot(changes: dict[str, Any], words: tuple[str, ...] | None) -> None:
    arguments = tensors() | {"segment_lengths": LENGTHS, "dilation_rates": RATES} | changes
    if words is None:
        assert dilated_attention(**arguments).shape == (2, 8, 4, 8)
    else:
        refused(dilated_attention, arguments, BackendUnavailable, words)


def test_backends_are_refused_before_results_are_allocated(no_results: None) -> None:
    arguments = BATCH_OF_ONE | {"backend": "flash4"}
    with pytest.raises(BackendUnavailable, match="flash4"):
        dilated_attention(**arguments)


# --- patterns by themselves ------------------------------------------------------------------------------------------------------------

OF_A_PATTERN = {"segment_lengths", "dilation_rates", "head_offsets", "branch_heads", "tail"}
PATTERN_CASES = [case for case in BAD_CALLS if case[1] and set(case[1]) <= OF_A_PATTERN and "for 4 heads" not in case[3][0]]


@pytest.mark.parametrize(("arguments", "kind", "words"), [pytest.param(*case[1:], id=case[0]) for case in PATTERN_CASES])
def test_patterns_refuse_the_same(arguments: dict[str, Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    refused(DilatedPattern, {"segment_lengths": LENGTHS, "dilation_rates": RATES} | arguments, kind, words)


PATTERN = DilatedPattern(LENGTHS, RATES)


@pytest.mark.parametrize(
    ("method", "arguments", "kind", "words"),
    [
        ("offsets", {"num_heads": 0}, ValueError, ("num_heads is 0", "≥ 1")),
        ("offsets", {"num_heads": 2.0}, TypeError, ("num_heads is 2.0 (float)",)),
        ("pairs", {"num_positions": -1}, ValueError, ("num_positions is -1", "≥ 0")),
        ("pairs", {"num_positions": 8.0}, TypeError, ("num_positions is 8.0 (float)",)),
        ("pairs", {"num_positions": 8, "num_heads": 0}, ValueError, ("num_heads is 0",)),
        ("coverage", {"num_positions": -1}, ValueError, ("num_positions is -1", "≥ 0")),
        ("coverage", {"num_positions": 8.0}, TypeError, ("num_positions is 8.0 (float)",)),
        ("dense_mask", {"num_queries": -1, "num_keys": 3, "num_heads": 1}, ValueError, ("num_queries is -1",)),
        ("dense_mask", {"num_queries": 3, "num_keys": 3.5, "num_heads": 1}, TypeError, ("num_keys is 3.5 (float)",)),
        ("dense_mask", {"num_queries": 3, "num_keys": 3, "num_heads": 0}, ValueError, ("num_heads is 0",)),
        ("dense_mask", {"num_queries": 3, "num_keys": 3, "num_heads": 1, "query_offset": -2}, ValueError, ("query_offset is -2",)),
    ],
)
def test_pattern_methods(method: str, arguments: dict[str, Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    refused(getattr(PATTERN, method), arguments, kind, words)


def test_integers_of_any_kind_are_taken() -> None:
    """What is an integer is not refused for its type: numpy's, torch's, a range."""
    expected = DilatedPattern([4, 8], [1, 2])
    for lengths in (np.array([4, 8]), torch.tensor([4, 8]), (np.int32(4), np.int64(8)), range(4, 9, 4), [torch.tensor(4), 8]):
        assert DilatedPattern(lengths, [1, 2]) == expected
    made = tensors()
    for scale in (1, 0.5, np.float64(0.5)):
        assert dilated_attention(**made, segment_lengths=np.array([4, 8]), dilation_rates=torch.tensor([1, 2]), scale=scale).shape == (
            2,
            8,
            4,
            8,
        )
    documents = bounds(0, 3, 8, dtype=torch.int64)
    assert dilated_attention(
        **tensors(1), segment_lengths=LENGTHS, dilation_rates=RATES, cu_seqlens=documents, query_offset=np.int64(0)
    ).shape == (1, 8, 4, 8)
