"""A user's own copies of TorchScale, Prov-GigaPath and ring-flash-attention, imported unedited.

None of flash-attn, fairscale and timm is needed. This library's backends stand in for the first, as TorchScale and ring-flash-attention
call it: the same kernel then runs under another schedule, without this library's own operator around it. The few names that TorchScale
reads stand in for the others.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dilated_attention.backends import Options, registry
from dilated_attention.backends.base import Bounds, placed

TORCHSCALE = Path("torchscale/component/dilated_attention.py")
GIGAPATH = Path("gigapath/slide_encoder.py")
LONGVIT = Path("examples/longvit/longvit.py")
RING = Path("ring_flash_attn/__init__.py")
URLS = {TORCHSCALE: "https://github.com/microsoft/torchscale", GIGAPATH: "https://github.com/prov-gigapath/prov-gigapath",
        RING: "https://github.com/zhuzilin/ring-flash-attention"}  # fmt: skip
# the backend behind ``FLASH_ATTN``, which ring-flash-attention imports once
standing_in = {"kernel": "auto"}


def find(path: Path, inside: Path) -> Path:
    """Returns the folder ``path``. Raises ValueError, with the way to get it, where it does not hold ``inside``."""
    folder = path.expanduser().resolve()
    if not (folder / inside).is_file():
        raise ValueError(f"{path}: there is no {inside} in it; git clone {URLS[inside]} and give that folder")
    return folder


def drop_path(x: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
    """Drops each sample's branch as a whole and scales the others by 1/(1 − p), as timm does: samples are channels of one sample."""
    return nn.functional.dropout1d(x.flatten(1)[None], probability, training).view_as(x)


# packages that neither model needs, by the few names that are read of any; LongViT's own "utils" import much more than its model needs
_REPLACED = ("fairscale", "fairscale.nn", "timm", "timm.models", "timm.models.layers", "timm.models.registry", "huggingface_hub", "utils")
_STAND_IN: Any = SimpleNamespace(
    wrap=lambda module: module, checkpoint_wrapper=lambda module: module, register_model=lambda function: function, create_model=None,
    drop_path=drop_path, trunc_normal_=nn.init.trunc_normal_, get_rank=lambda: 0, __path__=[],
)  # fmt: skip


@contextlib.contextmanager
def imported(*folders: Path, stand_ins: Mapping[str, Any] = dict.fromkeys(_REPLACED, _STAND_IN)) -> Iterator[None]:
    """Imports find the packages of ``folders`` first, and ``stand_ins`` in place of others. On leaving, nothing of them is left."""
    modules, path = dict(sys.modules), list(sys.path)
    for name in modules:
        if name.split(".")[0] in {"torchscale", "gigapath", "longvit", "ring_flash_attn", *(name.split(".")[0] for name in stand_ins)}:
            del sys.modules[name]
    sys.modules.update(stand_ins)
    sys.path[:0] = [str(folder) for folder in folders]
    try:
        # their constructors print, and this library's warning of a shift is about segments that are compared all the same
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.path[:] = path
        # what torch imports meanwhile stays: it registers ops, once in a process
        for name in set(sys.modules) - set(modules):
            file = getattr(sys.modules[name], "__file__", None)
            if name in stand_ins or any(Path(file or "").is_relative_to(folder) for folder in folders):
                del sys.modules[name]
        sys.modules.update(modules)


def load(name: str, kernel: str = "sdpa_cpu") -> Any:
    """Imports a module that uses TorchScale's attention, which then calls this backend; where flash-attn is missing it has None."""
    module: Any = importlib.import_module(name)
    attention: Any = importlib.import_module("torchscale.component.multihead_attention")
    # looked up at each call
    attention.flash_attn_func = functools.partial(flash_attn_func, kernel)
    if hasattr(module, "LongNetViT"):
        lengths = module.LongNetViT.get_optimal_segment_length
        # numpy ≥ 2 writes np.int64(1024), which their own parser does not know
        module.LongNetViT.get_optimal_segment_length = lambda *sizes: re.sub(r"np\.int64\((\d+)\)", r"\1", lengths(*sizes))
        module.get_2d_sincos_pos_embed = functools.partial(_table, module.get_2d_sincos_pos_embed)
    return module


_tables: dict[tuple[int, int, bool], Any] = {}


def _table(make: Any, width: int, side: int, cls_token: bool = False) -> Any:
    """Returns Prov-GigaPath's own table of positions, made once: at its size of 1000² it takes half a minute, for every import."""
    key = width, side, cls_token
    if key not in _tables:
        _tables.clear()
        _tables[key] = make(width, side, cls_token=cls_token).astype("float32")
    return _tables[key]


class _Kernel(torch.autograd.Function):
    """A backend's forward and backward; lse has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str, options: Options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = registry.get(name).forward(q, k, v, options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.settings = name, options
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        name, options = ctx.settings
        q, k, v, out, lse = ctx.saved_tensors
        return *registry.get(name).backward(grads[0].contiguous(), q, k, v, out, lse, options), None, None


def flash_attn_func(
    kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0, bias: None = None,
    softmax_scale: float | None = None, is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (out, lse) of q, k, v (B, N, H, D) by a backend, as TorchScale calls flash-attn's function."""
    if bias is not None or dropout:
        raise ValueError(f"bias is {bias} and dropout {dropout}; expected None and 0: flash-attn's stand-in has neither")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    found: tuple[torch.Tensor, torch.Tensor] = _Kernel.apply(q, k, v, kernel, Options(scale=scale, causal=is_causal))
    return found


# dense and for packed documents. ring-flash-attention asks for their parameters, and passes all by name
def forward(**given: Any) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    backend, (q, k, v) = registry.get(standing_in["kernel"]), [given[name] for name in "qkv"]
    if "cu_seqlens_q" not in given:
        return *backend.forward(q, k, v, _options(given)), None, None
    out, lse = backend.forward(q[None], k[None], v[None], _options(given), _bounds(given))
    return out[0], lse[0], None, None


def backward(**given: Any) -> None:
    backend, (dq, dk, dv) = registry.get(standing_in["kernel"]), (given[name] for name in ("dq", "dk", "dv"))
    dout, q, k, v, out, lse = (given[name].contiguous() for name in ("dout", *"qkv", "out", "softmax_lse"))
    if "cu_seqlens_q" not in given:
        grads = dq, dk, dv
        placed(backend.backward(dout, q, k, v, out, lse, _options(given), grads=grads), grads)
        return
    packed = [x[None] for x in (dout, q, k, v, out, lse)]
    grads = dq[None], dk[None], dv[None]
    placed(backend.backward(*packed, _options(given), _bounds(given), grads=grads), grads)


FLASH_ATTN = {"_flash_attn_forward": forward, "_flash_attn_varlen_forward": forward}
FLASH_ATTN |= {"_flash_attn_backward": backward, "_flash_attn_varlen_backward": backward}  # type: ignore[dict-item]


def _options(given: dict[str, Any]) -> Options:
    others = {name: given.get(name) for name in ("dropout_p", "softcap", "alibi_slopes", "window_size_left", "window_size_right")}
    assert all(value in (None, 0, -1) for value in others.values()), f"the stand-in has no dropout, window, softcap or ALiBi: {others}"
    return Options(scale=given["softmax_scale"], causal=given["causal"])


def _bounds(given: dict[str, Any]) -> Bounds:
    return Bounds(*(given[f"{what}_{side}"] for what in ("cu_seqlens", "max_seqlen") for side in "qk"))
