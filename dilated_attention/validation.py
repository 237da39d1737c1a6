"""Argument checks of the functional API. Each error says what was given, what is allowed, and one way to fix it."""

from __future__ import annotations

import math
import operator
import sys
from typing import Any

import torch

from dilated_attention.pattern.checks import MAX_HEADS, MAX_LENGTH, as_int, check_number, shown
from dilated_attention.pattern.checks import check_bool as check_bool

_STRIDED = torch.strided
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
MAX_TIMEOUT = 366 * 86_400


def not_a_tensor(name: str, x: Any, expected: str) -> TypeError:
    """Returns the error for an argument that must be a tensor, with the call that makes one of numpy's arrays and of lists."""
    way_out = ""
    if type(x).__module__ == "numpy":
        way_out = f": torch.from_numpy({name}) makes one of a numpy array"
    elif isinstance(x, list | tuple):
        way_out = f": torch.tensor({name}) makes one of a {type(x).__name__}"
    return TypeError(f"{name} is a {type(x).__name__}; expected {expected}{way_out}")


def refuse_where(is_wrong: torch.Tensor, text: str) -> None:
    """Raises a ValueError if any element is True; the host waits for a GPU. In compiled code and captured graphs the device asserts."""
    if torch.compiler.is_compiling() or (is_wrong.is_cuda and torch.cuda.is_current_stream_capturing()):
        torch._assert_async(~is_wrong.any(), text)
    elif not is_wrong.is_meta and bool(is_wrong.any()):
        raise ValueError(text)


def check_tensors(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_plain(name, x, "a torch.Tensor of shape (batch, sequence, heads, head_dim)")
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected 4 dimensions (batch, sequence, heads, head_dim)")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {x.dtype}; expected one of float16, bfloat16, float32, float64: convert it with .to()")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {tuple(k.shape)} and v has {tuple(v.shape)}; they must be equal")
    for index, what in ((0, "batch size"), (3, "head_dim")):
        if q.shape[index] != k.shape[index]:
            raise ValueError(
                f"q has {what} {q.shape[index]} and k has {k.shape[index]} (shapes {tuple(q.shape)} and {tuple(k.shape)}); "
                "they must be equal"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; they must be equal: convert with .to(), or run under autocast"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v are on {q.device}, {k.device}, {v.device}; move them to one device with .to()")
    if not 1 <= q.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim is {q.shape[3]} (q has shape {tuple(q.shape)}); expected 1 to {MAX_HEAD_DIM}: use more heads of a smaller dimension"
        )
    if q.shape[2] < 1 or k.shape[2] < 1 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads and k has {k.shape[2]}; the number of query heads must be a positive multiple of the key/value heads"
        )


def check_sinks(sinks: Any, q: torch.Tensor) -> None:
    if sinks is not None:
        check_numbers_of_heads("sinks", sinks, q, "score", " or None")


def check_numbers_of_heads(name: str, x: Any, q: torch.Tensor, what: str = "number", or_none: str = "") -> None:
    check_plain(name, x, f"a tensor with one {what} per head, of shape ({q.shape[2]},){',' * bool(or_none)}{or_none}")
    if tuple(x.shape) != (q.shape[2],):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected one {what} per query head, ({q.shape[2]},)")
    if x.dtype not in (torch.float32, q.dtype):
        raise ValueError(f"{name} has dtype {x.dtype}; expected float32 or q's dtype, {q.dtype}: convert it with .to()")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and q on {q.device}; they must be on one device: move it with .to()")


def check_plain(name: str, x: Any, expected: str) -> None:
    """Checks that x is a plain strided tensor on this process; anything else is refused with a way to fix it."""
    if not isinstance(x, torch.Tensor):
        raise not_a_tensor(name, x, expected)
    if x.layout is _STRIDED and not x.is_nested and not x.is_quantized and (type(x) is torch.Tensor or not _is_spread(x)):
        return
    if x.is_nested:
        out = (
            "concatenate sequences of different lengths to (1, sum of lengths, …) and pass cu_seqlens=; or pad them with "
            ".to_padded_tensor() and pass a key_padding_mask"
        )
        raise TypeError(f"{name} is a nested tensor; {out}")
    if x.layout is not _STRIDED:
        raise TypeError(f"{name} is a sparse tensor of layout {x.layout}; expected a dense one: convert it with .to_dense()")
    if x.is_quantized:
        raise TypeError(f"{name} is a quantised tensor of {x.dtype}; expected a floating-point one: convert it with .dequantize()")
    raise TypeError(
        f"{name} is a DTensor, spread over processes; pass this rank's part, {name}.to_local(), to ring_attention or another ring "
        f"function, or pass the whole tensor, {name}.full_tensor()"
    )


def _is_spread(x: torch.Tensor) -> bool:
    # if torch.distributed.tensor was never imported, x cannot be a DTensor
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def check_kv_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads is {num_kv_heads}; expected a divisor of num_heads = {num_heads}")


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int, *, rotary: bool) -> int:
    """Returns the head dimension of a layer, which must be even with ``rotary``."""
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim is {embed_dim} and num_heads is {num_heads}; embed_dim must be a multiple of num_heads")
    check_kv_heads(num_heads, num_kv_heads)
    head_dim = embed_dim // num_heads
    made = f"embed_dim is {embed_dim} and num_heads is {num_heads}, which makes head_dim {head_dim}"
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"{made}; expected at most {MAX_HEAD_DIM}: use at least {-(-embed_dim // MAX_HEAD_DIM)} heads")
    if rotary and head_dim % 2:
        raise ValueError(f"rotary=True with head_dim {head_dim}: {made}; it must be even: make embed_dim a multiple of {2 * num_heads}")
    return head_dim


def check_counts(head_dim: Any, num_heads: Any, num_kv_heads: Any, *, most: int = MAX_LENGTH) -> tuple[int, int, int]:
    """Checks the numbers of a call that is asked about and not made, and returns them; ``num_kv_heads`` may be None for num_heads.
    ``most``: the largest head_dim; an explanation says who takes which."""
    head_dim = as_int("head_dim", head_dim, minimum=1, maximum=most)
    num_heads = as_int("num_heads", num_heads, minimum=1, maximum=MAX_HEADS)
    num_kv_heads = num_heads if num_kv_heads is None else as_int("num_kv_heads", num_kv_heads, minimum=1)
    check_kv_heads(num_heads, num_kv_heads)
    return head_dim, num_heads, num_kv_heads


def check_dtype(dtype: Any) -> torch.dtype:
    """Checks the dtype of a call that is asked about and not made."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype is {shown(dtype)} ({type(dtype).__name__}); expected a floating torch.dtype, such as torch.bfloat16")
    return dtype


def check_factory(device: Any, dtype: Any) -> dict[str, Any]:
    """Checks where and in which dtype parameters are made, None for torch's default, and returns both as keywords."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in DTYPES):
        expected = "expected torch.float16, bfloat16, float32 or float64, or None for torch's default"
        kind = ValueError if isinstance(dtype, torch.dtype) else TypeError
        raise kind(f"dtype is {shown(dtype)} ({type(dtype).__name__}); {expected}")
    try:
        return {"device": None if device is None else torch.device(device), "dtype": dtype}
    except (RuntimeError, TypeError, ValueError) as error:
        expected = "expected a torch.device or its name, such as 'cpu' or 'cuda:0'"
        raise (TypeError if isinstance(error, TypeError) else ValueError)(f"device is {shown(device)}; {expected}") from error


def check_scale(scale: Any, head_dim: int, dtype: torch.dtype = torch.float64) -> float:
    if scale is None:
        return head_dim**-0.5
    check_number("scale", scale, "a positive number, or None for 1/sqrt(head_dim)")
    # some kernels treat values below the smallest normal number as 0, and 0 times the −inf of a masked pair is NaN
    held = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32)
    lowest, highest = held.tiny, held.max * math.log(2)
    if not lowest <= scale <= highest:
        raise ValueError(
            f"scale is {shown(scale)}; expected a number > 0, from {lowest:.3g} to {highest:.3g}, or None for 1/sqrt(head_dim): kernels "
            f"hold scale · log2(e) in {held.dtype}, whose largest value is {held.max:.2g}, and produce NaN outside this range"
        )
    return float(scale)


def check_probability(name: str, value: Any) -> float:
    check_number(name, value, "a number in [0, 1)")
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {shown(value)}; expected a probability in [0, 1)")
    return float(value)


def check_positive(name: str, value: Any, *, above: float = 0.0) -> float:
    """Checks a number that is used in Python or in float64."""
    check_number(name, value, f"a number > {above:g}")
    # an integer may be larger than any float
    if not above < value <= sys.float_info.max:
        raise ValueError(f"{name} is {shown(value)}; expected a finite number > {above:g}")
    return float(value)


def check_held(name: str, value: Any, *, power: int = 1) -> float:
    """Checks a positive number whose ``power`` float32 has to hold: 2 for one that a norm squares."""
    check_number(name, value, "a number > 0")
    held = torch.finfo(torch.float32)
    lowest, highest = held.tiny ** (1 / power), held.max ** (1 / power)
    if not lowest <= value <= highest:
        raise ValueError(f"{name} is {shown(value)}; expected a number from {lowest:.3g} to {highest:.3g}, which float32 can compute with")
    return float(value)


def check_timeout(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_TIMEOUT:
        raise ValueError(f"timeout is {shown(value)}; expected a number of seconds > 0 and ≤ {MAX_TIMEOUT:,}, a year")
    return float(value)


def check_query_offset(query_offset: Any, num_queries: int, num_keys: int) -> int:
    offset = as_int("query_offset", query_offset, minimum=0)
    if offset + num_queries > num_keys:
        raise ValueError(
            f"query_offset is {offset} and q has {num_queries} rows, so queries reach position {offset + num_queries} of {num_keys} keys; "
            "queries are positions of the key sequence: give keys for all of them"
        )
    return offset


def check_rows(q: torch.Tensor, k: torch.Tensor) -> None:
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} rows and k has {k.shape[1]}; a process holds queries and keys of the same positions")


def check_key_padding_mask(mask: Any, k: torch.Tensor, name: str = "key_padding_mask") -> None:
    if mask is None:
        return
    check_plain(name, mask, "a bool tensor of shape (batch, keys), True = padding")
    if mask.dtype is not torch.bool:
        raise TypeError(f"key_padding_mask has dtype {mask.dtype}; expected torch.bool, True = padding: e.g. key_padding_mask=(mask == 0)")
    if tuple(mask.shape) != (k.shape[0], k.shape[1]):
        raise ValueError(f"{name} has shape {tuple(mask.shape)}; expected (batch, keys) = {(k.shape[0], k.shape[1])}")
    if mask.device != k.device:
        raise ValueError(f"{name} is on {mask.device} and k on {k.device}; move it with .to(k.device)")


def check_cu_seqlens(cu_seqlens: Any, q: torch.Tensor, k: torch.Tensor) -> None:
    """Checks shape and type only; the values are read during planning, so that a traced graph does not depend on them."""
    if cu_seqlens is None:
        return
    check_plain("cu_seqlens", cu_seqlens, "an int32 tensor of shape (documents + 1,)")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens has dtype {cu_seqlens.dtype}; expected torch.int32")
    if cu_seqlens.is_meta and not q.is_meta:
        raise ValueError(f"cu_seqlens is on the device meta, without values, and q on {q.device}; expected a tensor that holds the bounds")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; expected (documents + 1,) with at least one document")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens with batch size {q.shape[0]}; packed documents are one row: expected batch size 1")
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"cu_seqlens with {q.shape[1]} queries and {k.shape[1]} keys; packed documents need as many queries as keys")


def check_window(window: Any) -> tuple[int, ...]:
    """Returns () for no window, else (left, right) with −1 for unbounded, constants to torch.compile."""
    if window is None:
        return ()
    if not isinstance(window, (tuple, list)):
        # a window beyond the longest sequence excludes nothing
        size = min(operator.index(as_int("window", window, minimum=0, maximum=None)), MAX_LENGTH)
        return () if size == MAX_LENGTH else (size, size)
    if len(window) != 2:
        raise ValueError(f"window is {shown(window)}; expected one integer or (left, right), None for unbounded")
    given = (-1 if side is None else as_int(f"window[{i}]", side, minimum=-1, maximum=None) for i, side in enumerate(window))
    left, right = map(operator.index, given)
    sides = -1 if left >= MAX_LENGTH else left, -1 if right >= MAX_LENGTH else right
    return () if sides == (-1, -1) else sides
