"""Bad input is refused at the door by whatever takes it: an error of the right kind that names the argument, what it got and a way out."""

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import dilated_attention as da
from dilated_attention import BackendUnavailable, DilatedPattern, modules
from dilated_attention.backends import Hardware
from dilated_attention.distributed import Layout
from dilated_attention.models import KVCache, LongNetConfig, LongNetLM, PagedKVCache, SlideEncoderConfig
from dilated_attention.pattern import BigBird, BlockTensor, Document, LocalWindow, PerHead, RandomBlocks, TopBlocks
from dilated_attention.pattern.checks import shown
from tests.helpers.forms import Looks

LENGTHS, RATES, WINDOW = [4, 8], [1, 2], LocalWindow(4)
# every text says what would be right, by one of these
REMEDIES = (
    *("expected", "use ", "give ", "must be ", "need ", "needs", "e.g.", "convert", "move", "leave "),
    *("can be", "could", "at most", "accepts", "cannot"),
)


def tensors(
    batch: int = 2, queries: int = 8, keys: int = 8, heads: int = 4, kv_heads: int = 2, dim: int = 8, **changes: Any
) -> dict[str, Any]:
    k, v = (torch.zeros(batch, keys, kv_heads, dim) for _ in range(2))
    return {"q": torch.zeros(batch, queries, heads, dim), "k": k, "v": v} | changes


def bounds(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def no_ops() -> Looks:
    """Fails on any operation of torch, so that a check can neither allocate nor compute."""
    return Looks(lambda func, _: pytest.fail(f"{func} ran before the input was refused"))


# --- what takes arguments of attention ------------------------------------------------------------------------------------------------

NAMES = [
    *("attention", "dilated_attention", "block_sparse_attention", "block_sparse_dilated_attention", "ring_attention"),
    *("ring_dilated_attention", "ring_block_sparse_attention", "ring_block_sparse_dilated_attention", "attention_map"),
    *("attention_received", "DilatedPattern", *(name for name in modules.__all__ if hasattr(getattr(modules, name), "forward"))),
]
PARAMETERS = {name: inspect.signature(getattr(da, name)).parameters for name in NAMES}


def given_to(name: str, **arguments: Any) -> dict[str, Any]:
    """What a good call of it is given, but for ``arguments``."""
    good: dict[str, Any] = tensors() | {"segment_lengths": LENGTHS, "dilation_rates": RATES, "pattern": WINDOW}
    good |= {"query_rows": [0], "embed_dim": 16, "num_heads": 4}
    needed = {key for key, parameter in PARAMETERS[name].items() if parameter.default is inspect.Parameter.empty}
    needed |= {"segment_lengths", "dilation_rates", "query_rows"} if name.startswith("attention_") else set()
    needed |= {"pattern"} if "BlockSparse" in name and "sparsity_ratio" not in arguments else set()
    return {key: good[key] for key in good if key in needed & PARAMETERS[name].keys()} | arguments


def refused(function: Callable[..., Any], arguments: dict[str, Any], error: type[Exception], words: str) -> str:
    """``words``: what the text holds, with … between."""
    with pytest.raises(error) as caught:
        function(**arguments)
    text = str(caught.value)
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {text}"
    for word in words.split(" … "):
        assert word in text, f"{word!r} is not in: {text}"
    assert any(remedy in text for remedy in REMEDIES), f"no way out in: {text}"
    assert len(text) < 900
    return text


def equal_to(value: Any) -> list[Any]:
    """What compares equal to a value of a wrong type, and may be good: a call with it is remembered."""
    if isinstance(value, list | tuple):
        return [[equal for x in value for equal in (equal_to(x) or [x])[-1:]]]
    return [bool(value), int(value)] if isinstance(value, int | float | np.bool_) and value in (0, 1, 4) else []


# of what is checked in every call, also in one that is remembered
GOOD = {"key_padding_mask": [torch.zeros(2, 8, dtype=torch.bool)], "sinks": [torch.zeros(4)], "cu_seqlens": [bounds(0, 8)]}


def refused_by_all(arguments: dict[str, Any], error: type[Exception], words: str, but: str = " ") -> None:
    """By whatever takes these arguments and has no ``but`` in its name: without an operation of torch, and after a good call, alike."""
    names = [name for name in NAMES if arguments.keys() <= PARAMETERS[name].keys() and but not in name]
    assert names
    for name in names:
        function, given = getattr(da, name), given_to(name, **arguments)
        # maps look at rows first
        is_function = "q" in PARAMETERS[name] and not name.startswith("attention_")
        function(**given_to(name))
        for key, value in arguments.items() if is_function else ():
            for equal in (*equal_to(value), *GOOD.get(key, ())):
                with suppress(TypeError, ValueError):
                    function(**given | {key: equal})
        texts = set()
        for where in (nullcontext, no_ops) if is_function else (nullcontext,):
            with where():
                texts.add(refused(function, given, error, words))
        assert len(texts) == 1, texts


nan, inf, HUGE = math.nan, math.inf, (2**63, 10**24, 10**400, 10**5000)
FLAG: tuple[str, list[Any], list[Any]] = ("True or False", [1, 0, None, "yes", np.True_], [])
FLAGS = ("is_causal", "return_lse", "deterministic", "average_heads", "rotary", "qk_norm", "bias", "layer_norm")
# argument → what every text says is right, values of a wrong type, wrong values of a right type
OPTIONS: dict[str, tuple[str, list[Any], list[Any]]] = dict.fromkeys(FLAGS, FLAG) | {
    "scale": ("", ["0.1", True, [1.0]], [0.0, -1, nan, inf, 10**400]),
    "dropout_p": ("[0, 1)", [True, None], [1.0, -0.1, nan, 10**400]),
    "dropout": ("[0, 1)", ["0.1"], [1.0, -0.1]),
    "query_offset": ("", [0.0, False, "16", None, torch.ones(2), Fraction(3, 2)], [-1, 1, *HUGE]),
    "backend": ("auto, sdpa, flash4", [None, True, ["auto"]], ["flash5"]),
    "precision": ("'native', 'fp8'", [None], ["fp4"]),
    "head_offsets": ("'cyclic'", [3, None, {}], ["diagonal"]),
    "branch_heads": ("'all', 'split'", [None, []], ["some"]),
    "tail": ("'mask', 'zero_keys'", [True, None], ["pad"]),
    "mixture_grad": ("'exact', 'detached'", [None], ["none"]),
    "segment_lengths": ("list of integers", [8, "48", {4: 1}, np.array([[4, 8]])], []),
    "dilation_rates": ("list of integers", [2], []),
    "softcap": ("", [True, "50", [50.0], 1j, np.bool_(True)], [0.0, -0.0, -1, 1e-39, 5e-324, 1.1e31, 10**400, nan, inf]),
    "window": ("", [2.0, "3", True], [-1, (1,), (1, 2, 3), []]),
    "chunk": ("", [None.__class__, 1.5], [0]),
    "embed_dim": ("", [16.0], [0]),
    "num_kv_heads": ("", [True], [3, 8]),
    "rotary_base": ("", ["1e4"], [1.0]),
    "gamma_init": ("", [None], [nan]),
    "layer_norm_eps": ("", [], [-1e-5]),
    "sparsity_ratio": ("", ["0.1", True], [0.0, 1.5]),
    "layout": ("", [None], ["spiral"]),
    "exchange": ("'auto', 'all_gather', 'ring', 'all_to_all', '2d'", [2], ["mail"]),
    "ranks_per_node": ("", [1.0], [0]),
    "seq_len": ("", [8.0], [-1]),
    "head_steps": ("", [], [0]),
    "timeout": ("", [], [-1, 0, inf, nan, True, "60"]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_refused_by_whatever_takes_it(name: str) -> None:
    expected, types, values = OPTIONS[name]
    for value, error in (*((value, TypeError) for value in types), *((value, ValueError) for value in values)):
        # one of a rank's own is too far where the whole is not; functions take a bias of another kind
        but = {"query_offset": "ring", "bias": "attention"}.get(name, " ")
        refused_by_all({name: value}, error, f"{name} is {shown(value)} … {expected}", but)


# argument → (value, words), of one argument alone
TYPES: dict[str, list[tuple[Any, str]]] = {
    "segment_lengths": [
        ([4.0, 8], "segment_lengths[0] is 4.0 (float) … integer"),
        ([True, 8], "segment_lengths[0] is True (bool)"),
    ],
    "dilation_rates": [([1, 2.5], "dilation_rates[1] is 2.5 (float)")],
    "head_offsets": [
        ([[0] * 4, [0, True, 0, 0]], "head_offsets[1][1] is True (bool)"),
        ([0, 1], "head_offsets[0] is 0 (int) … list of integers"),
    ],
    "window": [(("a", None), "window[0] is 'a' (str)")],
    "pattern": [
        (0.1, "pattern is 0.1 (float) … LocalWindow(512)"),
        (torch.ones(2, 2, dtype=torch.bool), "pattern is tensor … (Tensor)"),
        (DilatedPattern([4], [1]), "pattern is DilatedPattern … expected a block pattern"),
    ],
    "xpos_scale_base": [("512", "xpos_scale_base is '512'")],
    "key_padding_mask": [
        (torch.zeros(2, 8, dtype=torch.int64), "key_padding_mask has dtype torch.int64 … True = padding"),
        ([[False] * 8] * 2, "key_padding_mask is a list"),
        (torch.zeros(2, 8, dtype=torch.bool).to_sparse(), "key_padding_mask is a sparse tensor … to_dense"),
    ],
    "query_rows": [([1.5], "query_rows[0] is 1.5"), (torch.ones(8, dtype=torch.bool), "mask.nonzero … expected")],
    "query_weights": [(2.0, "query_weights is a float")],
}
VALUES: dict[str, list[tuple[Any, str]]] = {
    "segment_lengths": [
        ([4, 0], "segment_lengths[1] is 0 … ≥ 1"),
        ([4, 2**70], f"segment_lengths[1] … {2**70} … 2**62"),
    ],
    "dilation_rates": [
        ([1], "segment_lengths has 2 … dilation_rates has 1 … [4, 8] … equal length"),
        ([1, 0], "dilation_rates[1] is 0 … ≥ 1"),
        ([5, 2], "dilation_rates[0] is 5 … segment_lengths[0] = 4 … ≤ 4"),
    ],
    "head_offsets": [
        ([[0, 0, 0, 0]], "head_offsets has 1 lists for 2 branches"),
        ([[0] * 4, [0, 1, 2, 0]], "head_offsets[1][2] is 2 … below 2 … dilation rate 2"),
        ([[0] * 4, [0] * 3], "head_offsets has lists of lengths [4, 3]"),
    ],
    "window": [((1, -2), "window[1] is -2")],
    # layers
    "embed_dim": [
        (18, "embed_dim is 18 and num_heads is 4"),
        (2048, "head_dim 512 … at most 256 … at least 8 heads"),
    ],
    "rotary_base": [(500.0, "rotary_base is 500.0 and rotary is False")],
    "xpos_scale_base": [(6.0, "xpos_scale_base is 6.0 and rotary is False … use rotary=True")],
    # masks and documents
    "key_padding_mask": [
        (torch.zeros(2, 7, dtype=torch.bool), "key_padding_mask has shape (2, 7) … (2, 8)"),
        (torch.zeros(2, 8, dtype=torch.bool, device="meta"), "key_padding_mask is on meta … .to(k.device)"),
    ],
    "cu_seqlens": [(bounds(0, 8), "cu_seqlens … batch size 2 … batch size 1")],
    # maps
    "query_rows": [
        ([8], "query_rows holds 8; expected rows of q, 0 to 7"),
        ("first", "query_rows is 'first'"),
        (torch.zeros(2, 3, dtype=torch.int64), "query_rows has shape (2, 3)"),
    ],
    "lse": [(torch.zeros(2, 4, 3), "lse has shape (2, 4, 3) … (batch, heads, queries) = (2, 4, 8)"), (1.0, "lse is a float")],
    "query_weights": [(torch.ones(2, 3), "query_weights has shape (2, 3); expected (batch, queries) = (2, 8)")],
}
Q = torch.zeros(2, 8, 4, 8)
# arguments that do not go together, and tensors
CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(({name: value}, TypeError, words) for name, rows in TYPES.items() for value, words in rows),
    *(({name: value}, ValueError, words) for name, rows in VALUES.items() for value, words in rows),
    ({"segment_lengths": [], "dilation_rates": []}, ValueError, "segment_lengths is empty … segment_lengths=[2048]"),
    ({"head_offsets": "zero", "branch_heads": "split"}, ValueError, "head_offsets='zero' … branch_heads='split' … leave"),
    ({"head_offsets": [[0] * 3, [0] * 3], "q": Q}, ValueError, "head_offsets has 3 integers per branch for 4 heads"),
    # blocks
    ({"pattern": None, "rotary": True}, ValueError, "neither given … exactly one … sparsity_ratio=0.1"),
    ({"sparsity_ratio": 0.1, "pattern": WINDOW}, ValueError, "both … exactly one"),
    ({"seed": 1, "pattern": WINDOW}, ValueError, "seed is 1 with a pattern … leave seed"),
    ({"sparsity_ratio": 0.1, "sparsity": "most"}, ValueError, "sparsity is 'most' … 'random' … 'big_bird'"),
    ({"sparsity_ratio": 0.1, "block_size": 32}, ValueError, "block_size is 32 … 64 or 128"),
    ({"sparsity_ratio": 0.1, "seed": -1}, ValueError, "seed is -1"),
    ({"pattern": TopBlocks(1), "layout": "contiguous"}, ValueError, "chosen by content"),
    ({"pattern": WINDOW, "layout": "striped"}, ValueError, "layout is 'striped' … balanced_layout"),
    # layers
    ({"num_heads": 0, "embed_dim": 16}, ValueError, "num_heads is 0"),
    ({"embed_dim": 12, "rotary": True}, ValueError, "rotary=True with head_dim 3"),
    # that kernels of float32 hold
    *(({"q": Q, "scale": scale}, ValueError, f"scale is {scale} … 1.18e-38 to 2.36e+38 … log2(e)") for scale in (1e39, 2.4e38, 1e-40)),
    # the quotient that kernels multiply q·k by
    ({"q": Q, "softcap": 1e-30, "scale": 1e10}, ValueError, "softcap is 1e-30 and scale is 1e"),
    # sinks
    ({"q": Q, "sinks": 1.0}, TypeError, "sinks is a float; expected a tensor … (4,)"),
    ({"q": Q, "sinks": torch.zeros(3)}, ValueError, "shape (3,); expected one score per query head, (4,)"),
    ({"q": Q, "sinks": torch.zeros(4, dtype=torch.float16)}, ValueError, "float16; expected float32 or q's dtype, torch.float32"),
    ({"q": Q, "sinks": torch.zeros(4, device="meta")}, ValueError, "sinks is on meta and q on cpu"),
    ({"q": Q, "sinks": torch.zeros(4).to_sparse()}, TypeError, "sinks is a sparse tensor"),
    ({"q": Q, "sinks": torch.zeros(4), "mixture_grad": "detached"}, ValueError, "sinks are given with mixture_grad='detached'"),
    # a bias
    ({"q": Q, "bias": torch.zeros(8, 8)}, TypeError, "bias is a Tensor; expected Alibi(slopes), Distance(coordinates, slopes) … N²"),
    ({"q": Q, "bias": da.Alibi(torch.zeros(3))}, ValueError, "bias.slopes has shape (3,); expected one number per query head, (4,)"),
    ({"q": Q, "bias": da.Distance(torch.zeros(7, 2), torch.zeros(4))}, ValueError, "(7, 2); expected one of (8,), (8, 1), (8, 2)"),
    ({"q": Q, "bias": da.Distance(torch.zeros(8, dtype=torch.bool), torch.zeros(4))}, TypeError, "coordinates has dtype torch.bool"),
    (
        {"q": Q, "bias": da.Distance(torch.zeros(8, 2).to_sparse(), torch.zeros(4))},
        TypeError,
        "coordinates is a sparse tensor … .to_dense()",
    ),
    ({"q": Q, "bias": da.Distance(torch.zeros(8, device="meta"), torch.zeros(4))}, ValueError, "coordinates is on meta and q on cpu"),
    ({"q": Q, "bias": da.Distance(torch.zeros(8).requires_grad_(), torch.zeros(4))}, ValueError, "needs a gradient … .detach()"),
    ({"q": Q, "bias": da.Alibi(torch.zeros(4)), "softcap": 5.0}, ValueError, "bias is given with softcap 5.0"),
    # documents
    (tensors(1, cu_seqlens=[0, 8]), TypeError, "cu_seqlens is a list … int32 … torch.tensor(cu_seqlens)"),
    (tensors(1, cu_seqlens=torch.tensor([0.0, 8.0])), TypeError, "cu_seqlens has dtype torch.float32 … int32"),
    (tensors(1, cu_seqlens=bounds(0, 8)[None]), ValueError, "cu_seqlens has shape (1, 2) … documents + 1"),
    (tensors(1, cu_seqlens=bounds(0, 8).to("meta")), ValueError, "cu_seqlens is on the device meta … holds the bounds"),
    (tensors(1, cu_seqlens=bounds(0)), ValueError, "cu_seqlens has shape (1,) … at least one document"),
    (tensors(1, queries=4, cu_seqlens=bounds(0, 8), query_offset=0), ValueError, "cu_seqlens … 4 queries and 8 keys"),
    (tensors(queries=9, query_offset=0), ValueError, "query_offset is 0 … 9 of 8"),
    # tensors
    (tensors(q=[1.0]), TypeError, "q is a list … torch.Tensor … batch, sequence, heads, head_dim … torch.tensor(q)"),
    (tensors(v=np.zeros((2, 8, 2, 8))), TypeError, "v is a ndarray … torch.from_numpy(v)"),
    (tensors(q=torch.zeros(2, 8, 32)), ValueError, "q has shape (2, 8, 32) … 4 dimensions"),
    (tensors(q=Q.long()), ValueError, "q has dtype torch.int64 … float16, bfloat16, float32, float64"),
    (tensors(q=Q.bfloat16()), ValueError, "q, k, v … bfloat16 … float32 … autocast"),
    (tensors(q=torch.zeros(2, 8, 4, 8, device="meta")), ValueError, "q, k, v … meta … cpu … .to()"),
    (tensors(v=torch.zeros(2, 9, 2, 8)), ValueError, "(2, 8, 2, 8) … (2, 9, 2, 8)"),
    (tensors(q=torch.zeros(3, 8, 4, 8)), ValueError, "batch size 3 … 2"),
    (tensors(q=torch.zeros(2, 8, 4, 16)), ValueError, "head_dim 16 … 8"),
    (tensors(dim=0), ValueError, "head_dim is 0 … 1 to 256"),
    (tensors(dim=257), ValueError, "head_dim is 257 … 1 to 256"),
    (tensors(heads=5), ValueError, "q has 5 heads … k has 2 … multiple"),
    (tensors(heads=0, kv_heads=0), ValueError, "q has 0 heads"),
    # maps
    ({"query_rows": [0], "segment_lengths": None}, ValueError, "segment_lengths is None and dilation_rates is"),
    (
        {"query_rows": [0], "segment_lengths": None, "dilation_rates": None, "tail": "zero_keys"},
        ValueError,
        "tail is 'zero_keys' and applies only",
    ),
    ({"query_weights": None, "dtype": torch.int8}, ValueError, "dtype is torch.int8"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), CALLS, ids=[words[:50] for *_, words in CALLS])
def test_a_call_is_refused_by_whatever_takes_it(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    # a process of a ring holds queries and keys of the same positions, and says that first
    refused_by_all(arguments, error, words, "ring" if words.endswith(("9 of 8", "4 queries and 8 keys")) else " ")


def test_the_call_that_all_bad_ones_change_is_good() -> None:
    with pytest.raises(pytest.fail.Exception, match="ran before"), no_ops():
        da.dilated_attention(**given_to("dilated_attention"))
    for make, error, words in (
        (lambda: da.DilatedAttention([16], [1], num_heads=True, sinks=True), TypeError, "num_heads is True … expected"),
        (
            lambda: da.MultiheadDilatedAttention(32, 4, [16], [1], mixture_grad="detached", sinks=True),
            ValueError,
            "sinks=True with mixture_grad",
        ),
        (lambda: da.DilatedAttention([16], [1], num_heads=4), ValueError, "num_heads is 4 without sinks"),
        (lambda: da.DilatedAttention([16], [1], sinks=1), TypeError, "sinks is 1 (int); expected True or False"),
        (
            lambda: da.MultiheadDilatedAttention(32, 4, [16], [1], sinks=torch.zeros(4)),
            TypeError,
            "sinks is … (Tensor); expected True or False",
        ),
    ):
        refused(make, {}, error, words)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", range(3))
def test_tensors_that_are_no_plain_ones_are_refused_with_a_way_out(place: int) -> None:
    x, letter = torch.randn(2, 64, 2, 8), "qkv"[place]
    odd: list[tuple[torch.Tensor, str]] = [
        (x.to_sparse(), "to_dense"),
        (x.reshape(-1, 8).to_sparse_csr(), "to_dense"),
        (torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged), "cu_seqlens"),
        (torch.nested.nested_tensor([x[0], x[0]]), "cu_seqlens"),
        (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "dequantize"),
    ]
    for name in NAMES[:4]:
        for tensor, way_out in odd:
            with pytest.raises(TypeError, match=rf"{letter} is a .*{way_out}"):
                getattr(da, name)(**given_to(name) | {"q": x, "k": x, "v": x, letter: tensor})


# --- what is read where the work is planned ----------------------------------------------------------------------------------------------


ALONE = tensors(1)
PLANNED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        (ALONE | {"cu_seqlens": bounds(*values)}, ValueError, f"cu_seqlens is {list(values)} … N = 8")
        for values in ((0, 9), (0, 7), (1, 8), (0, 5, 4, 8), (0, -3, 8), (0, 0))
    ),
    (tensors(1, 0, 0, cu_seqlens=bounds(0, 3)), ValueError, "cu_seqlens is [0, 3] … N = 0"),
    (tensors(1, 400, 400, cu_seqlens=bounds(*range(400), 7)), ValueError, "cu_seqlens is [0, 1, 2 … N = 400"),
    (ALONE | {"backend": "flash4"}, BackendUnavailable, "flash4 … cpu … sdpa_cpu"),
    (ALONE | {"backend": "sdpa_cpu", "dropout_p": 0.5}, BackendUnavailable, "sdpa_cpu … dropout … math"),
    (
        ALONE | {"backend": "sdpa_cpu", "bias": da.Alibi(torch.zeros(4))},
        BackendUnavailable,
        "no bias by position or distance (math and tiles do)",
    ),
    (ALONE | {"pattern": Document((3, 4))}, ValueError, "lengths sum to 7 … 8 positions"),
    (ALONE | {"pattern": PerHead((WINDOW, WINDOW))}, ValueError, "2 patterns … 4 heads"),
    (ALONE | {"pattern": BlockTensor(torch.ones(3, 1, 1, dtype=torch.bool))}, ValueError, "(3, 1, 1) … 4 heads of 8 positions"),
    (tensors(q=torch.zeros(2, 7, 4, 8), layout="zigzag"), ValueError, "q has 7 rows and k has 8; a process holds queries and keys of"),
    (tensors(layout=Layout(32, (((0, 32),),))), ValueError, "layout is for 32 positions on 1 processes, the sequence has 8 on 1"),
    (tensors(layout="zigzag", seq_len=9), ValueError, "hold [8] positions; a zigzag sequence of 9 has [9]: cut it by shard_sequence"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), PLANNED, ids=[words for *_, words in PLANNED])
def test_what_values_and_shapes_say_is_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    for name in NAMES[:8]:
        if not arguments.keys() <= PARAMETERS[name].keys():
            continue
        for _ in range(2):
            with pytest.raises(error) as caught:
                getattr(da, name)(**given_to(name, **arguments))
            assert all(word in str(caught.value) for word in words.split(" … ")), caught.value


# --- numbers that no sequence, head or machine has -----------------------------------------------------------------------------------

CONFIG = LongNetConfig(vocab_size=16, embed_dim=16, num_layers=1, num_heads=2, attention="dense")
ENCODER = LongNetConfig(embed_dim=16, num_layers=1, num_heads=2, attention="dense", is_causal=False, positions="none")
PATTERN, BIG_BIRD = DilatedPattern(LENGTHS, RATES), BigBird(4, 1, 1)


def with_(function: Any, *arguments: Any, **given: Any) -> Callable[..., Any]:
    return lambda **options: function(*arguments, **given | options)


_multihead = with_(da.MultiheadDilatedAttention, 16, 2, [16], [2])
_rotary = with_(da.MultiheadDilatedAttention, 16, 2, [16], [2], rotary=True)
_plan = with_(da.plan_attention, "dense", num_positions=16, num_heads=4, head_dim=64, gpu="H200")
_recommend = with_(da.recommend, "training", 65536, gpu="H200")
_mask, _blocks_mask, _window_mask = (
    with_(pattern.dense_mask, num_queries=16, num_keys=16, num_heads=1) for pattern in (PATTERN, BIG_BIRD, WINDOW)
)
EPS, COUNTS = (0.0, 1e-39, 1e-46, 5e-324, 1e39, 10**400), (0, 2**21, 2**62)

FLAGS = ("is_causal", "needs_grad", "key_padding_mask", "window", "bias", "deterministic")

# by argument: what takes it, and numbers of its type that it refuses
REFUSED: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("num_positions", PATTERN.pairs, (-1, 8.5, *HUGE)),
    ("num_positions", BIG_BIRD.pairs, HUGE),
    ("num_heads", with_(PATTERN.pairs, 16), (0, *HUGE)),
    ("num_heads", _mask, (0,)),
    ("num_queries", _mask, (-1, *HUGE)),
    ("query_offset", _mask, (-2,)),
    ("head_dim", with_(PATTERN.flops, 16, 2), HUGE),
    ("num_positions", _plan, HUGE),
    ("memory", _plan, HUGE),
    ("gpus", _recommend, HUGE),
    ("seq_len", with_(da.local_positions, None), (-1, 2**63, 10**400)),
    ("gamma_init", _multihead, (0.0, 1e-20, 1e-46, 1e20, 1e39, 2**64)),
    ("layer_norm_eps", _multihead, EPS),
    ("layer_norm_eps", with_(LongNetConfig, vocab_size=16, embed_dim=16, num_layers=1, num_heads=2, attention="dense"), EPS),
    ("norm_eps", with_(SlideEncoderConfig, encoder=ENCODER), (0.0, 1e-46, 1e39)),
    ("rotary_base", _rotary, (1, 0.5, -2.0, 10**400)),
    ("xpos_scale_base", _rotary, (0.0, -1, 10**400)),
    ("head_dim", da.explain_backend, (0, 2**63)),
    ("num_heads", da.explain_backend, (0, 2**21)),
    ("num_kv_heads", da.explain_backend, (0, 3)),
    ("dropout_p", da.explain_backend, (1, -0.1, 1e39)),
    ("softcap", da.explain_backend, (0.0, 1e39, 1e-46)),
    ("num_positions", with_(da.explain_backend, pattern=PATTERN), (0, 2**63)),
    ("num_heads", with_(da.DilatedAttention, [8], [1], sinks=True), COUNTS),
    ("num_requests", with_(KVCache, CONFIG, max_length=8), COUNTS),
    ("num_pages", with_(PagedKVCache, CONFIG, 1, 8), (0, 2**31, 2**62)),
    ("grid_size", with_(SlideEncoderConfig, encoder=ENCODER), (0, -1, 2**31)),
    ("tile_size", with_(SlideEncoderConfig, encoder=ENCODER), (0, -1, 2**31)),
]


@pytest.mark.parametrize(("name", "call", "numbers"), REFUSED)
def test_a_number_that_cannot_be_computed_with_is_refused_by_name(name: str, call: Callable[..., Any], numbers: tuple[Any, ...]) -> None:
    for number in (*numbers, nan, inf, -inf, True, torch.tensor(True), "1", [1], 1j):
        with pytest.raises((TypeError, ValueError), match=name) as caught:
            call(**{name: number})
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *(("is_causal", with_(pattern.pairs, 16)) for pattern in (PATTERN, WINDOW, RandomBlocks(0.5))),
        ("is_causal", _mask),
        ("is_causal", _window_mask),
        ("own_block", with_(RandomBlocks, 0.5)),
        ("gpu", _plan),
        *((name, da.explain_backend) for name in FLAGS),
        *(("hardware", explain) for explain in (da.explain_backend, da.explain_decode)),
        ("dense", da.explain_decode),
        ("config", LongNetLM),
    ],
)
def test_flags_and_names_of_another_type_are_refused_by_name(name: str, call: Callable[..., Any]) -> None:
    for value in (torch.zeros(2, dtype=torch.bool), 3, object(), np.int64(3)):
        with pytest.raises(TypeError, match=name):
            call(**{name: value})


@pytest.mark.parametrize("explain", [da.explain_backend, da.explain_decode])
def test_explanations_of_no_dtype_and_no_device_are_refused(explain: Callable[..., Any]) -> None:
    for value in ("bfloat16", "x", -1, [1], torch.int64):
        with pytest.raises(TypeError, match=r"dtype is .*expected a floating torch\.dtype"):
            explain(device="cpu", dtype=value)
    with pytest.raises(ValueError, match="device is 'x'; expected one of this machine"):
        explain(device="x")
    with pytest.raises(TypeError, match=r"device is .1.; expected one of this machine"):
        explain(device=[1])
    with pytest.raises(ValueError, match="ask about one of them"):
        explain(device="cpu", hardware=Hardware(device_type="cpu"))


def test_a_list_nested_without_end_is_shown_by_its_beginning() -> None:
    deep: Any = []
    for _ in range(3000):
        deep = [deep]
    q = torch.randn(1, 16, 2, 8)
    for name, call in (
        ("backend", with_(da.attention, q, q, q)),
        ("pattern", with_(da.block_sparse_attention, q, q, q)),
        ("layout", _plan),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            call(**{name: deep})
