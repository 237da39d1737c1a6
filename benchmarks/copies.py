"""A user's own copies of TorchScale, Prov-GigaPath and ring-flash-attention, imported unedited, and equality with the first two: of
models' outputs and all weights' gradients, float32 on the CPU.

flash-attn, fairscale and timm are not needed: this library's backends stand in for the first, as TorchScale and ring-flash-attention call
it (the same kernel under another schedule), the few names that TorchScale reads for the others.
"""

from __future__ import annotations

import argparse
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

from benchmarks.report import Row
from dilated_attention.backends import Options, registry
from dilated_attention.backends.base import Bounds, placed
from dilated_attention.integrations.torchscale import from_torchscale, load_torchscale
from dilated_attention.parsing import UsageError

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
    dout, q, k, v, out, lse = (x[None] for x in (dout, q, k, v, out, lse))
    grads = dq[None], dk[None], dv[None]
    placed(backend.backward(dout, q, k, v, out, lse, _options(given), _bounds(given), grads=grads), grads)


FLASH_ATTN = {"_flash_attn_forward": forward, "_flash_attn_varlen_forward": forward}
FLASH_ATTN |= {"_flash_attn_backward": backward, "_flash_attn_varlen_backward": backward}  # type: ignore[dict-item]


def _options(given: dict[str, Any]) -> Options:
    others = {name: given.get(name) for name in ("dropout_p", "softcap", "alibi_slopes", "window_size_left", "window_size_right")}
    assert all(value in (None, 0, -1) for value in others.values()), f"the stand-in has no dropout, window, softcap or ALiBi: {others}"
    return Options(scale=given["softmax_scale"], causal=given["causal"])


def _bounds(given: dict[str, Any]) -> Bounds:
    return Bounds(*(given[f"{what}_{side}"] for what in ("cu_seqlens", "max_seqlen") for side in "qk"))


# the greatest difference allowed, over the greatest value
PARITY = {"output": 1e-5, "gradient": 1e-4}
# positions, heads, segment lengths, dilation rates, causal
CASES: list[tuple[int, int, tuple[int, ...], tuple[int, ...], bool]] = [
    (256, 8, (64, 128, 256), (1, 2, 4), False),
    (307, 16, (64, 128, 512), (1, 4, 16), True),
    (211, 3, (32, 64, 1024), (1, 8, 16), False),
    (128, 5, (24, 48), (3, 4), False),
    (97, 12, (1000, 2000), (1, 8), True),
    (13, 4, (16, 32), (1, 16), False),
    (2100, 16, (1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16), False),
]
# (label, their model, inputs, what else ``_compared`` takes)
Model = tuple[str, nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]


def check_parity(options: argparse.Namespace) -> None:
    """Raises UsageError where nothing can be compared."""
    if options.torchscale is None and options.gigapath is None:
        where = URLS[TORCHSCALE]
        raise UsageError(f"--tasks parity compares with nothing; expected --torchscale PATH, --gigapath PATH or both: git clone {where}")
    if max(options.tiles or [0]) > options.grid**2:
        raise UsageError(f"--tiles {max(options.tiles)} do not fit on a grid of {options.grid} × {options.grid}: raise --grid")
    for path, inside in ((options.torchscale, TORCHSCALE), (options.gigapath, GIGAPATH)):
        if path is not None:
            find(path, inside)


def measure_parity(options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each model. A difference beyond ``PARITY`` is a note that begins with "wrong"."""
    torch.manual_seed(0)
    if options.torchscale is not None:
        folder = find(options.torchscale, TORCHSCALE)
        with imported(folder, (folder / LONGVIT).parent):
            yield from (_compared(*model) for model in _torchscale_models())
            if (folder / LONGVIT).is_file():
                yield from (_compared(*model) for model in _longvit_models())
    if options.gigapath is not None:
        folder = find(options.gigapath, GIGAPATH)
        # its package puts its own copy of TorchScale on the path
        with imported(folder, folder / "gigapath"):
            yield from (_compared(*model) for model in _gigapath_models(options))


def _torchscale_models() -> Iterator[Model]:
    longnet, config = load("torchscale.model.LongNet"), load("torchscale.architecture.config")
    for N, heads, segments, rates, causal in CASES:
        role, width = "decoder" if causal else "encoder", heads * 8
        sizes = {"embed_dim": width, "attention_heads": heads, "ffn_embed_dim": 2 * width, "layers": 2}
        fields: dict[str, Any] = {f"{role}_{name}": value for name, value in sizes.items()}
        fields |= {"flash_attention": True, "segment_length": str(list(segments)), "dilated_ratio": str(list(rates))}
        label = f"{role}{' with XPOS' if causal else ''}: N {N}, {heads} heads, w {list(segments)}, r {list(rates)}"
        if causal:
            args = config.DecoderConfig(**fields, vocab_size=31, xpos_rel_pos=True, no_scale_embedding=False)
            theirs, inputs, how = longnet.LongNetDecoder(args, embed_tokens=nn.Embedding(31, width)), torch.randint(31, (2, N)), {}
        else:
            theirs, inputs = longnet.LongNetEncoder(config.EncoderConfig(**fields)), torch.randn(2, N, width)
            how = {"call": lambda theirs, x: theirs(None, token_embeddings=x)["encoder_out"]}
        yield label, theirs, (inputs,), {"gradients": True} | how


def _longvit_models() -> Iterator[Model]:
    module = load("longvit")
    for height, width in ((1024, 1024), (512, 768)):
        theirs = module.LongViT(img_size=1024, patch_size=32, embed_dim=384, depth=2, num_heads=16)
        yield f"LongViT of 1024 pixels, 2 of 12 layers, on {height} × {width}", theirs, (torch.randn(1, 3, height, width),), {}


def _gigapath_models(options: argparse.Namespace) -> Iterator[Model]:
    """Weights are random unless ``options.weights`` is Prov-GigaPath's file."""
    module, grid, weights = load("gigapath.slide_encoder"), options.grid, options.weights
    tiles = (options.tiles or [1201])[0]
    for pooled in (False, True):
        cells = torch.randperm(grid * grid)[:tiles]
        x = torch.randn(1, tiles, 1536), (torch.stack((cells // grid, cells % grid), dim=-1) * 256.0)[None]
        theirs = module.gigapath_slide_enc12l768d(slide_ngrids=grid, global_pool=pooled)
        how = {} if weights is None else {"weights": weights, "grid_size": grid, "global_pool": pooled}
        yield f"slide encoder 12l768d, {tiles} tiles, {'mean' if pooled else 'class token'}", theirs, x, how
    theirs = module.LongNetViT(embed_dim=384, depth=3, slide_ngrids=grid, max_wsi_size=250_000)
    x = torch.randn(1, 300, 1536), torch.randint(grid * 256, (1, 300, 2)).float()
    yield "slide encoder 3l384d, max_wsi_size 250000", theirs, x, {"gradients": True}


def _compared(label: str, theirs: nn.Module, inputs: tuple[torch.Tensor, ...], how: dict[str, Any]) -> Row:
    gradients, call, weights = (how.pop(name, None) for name in ("gradients", "call", "weights"))
    theirs.eval()
    with torch.no_grad():
        # norms get other weights than ones and biases other values than zeros, so that a swapped pair shows
        for name, parameter in theirs.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(std=0.2).add_(1.0 if name.endswith("weight") else 0.0)
    if weights is not None:
        theirs.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True)["model"], strict=False)
    ours: Any = from_torchscale(theirs) if weights is None else load_torchscale(weights, **how)
    with torch.set_grad_enabled(bool(gradients)):
        expected, result = call(theirs, *inputs) if call else theirs(*inputs), ours(*inputs)
    expected = expected if isinstance(expected, torch.Tensor) else expected[0]
    errors = {"output": float((expected - result).detach().abs().max() / expected.detach().abs().max())}
    if gradients:
        factors = torch.randn_like(expected)
        (expected * factors).sum().backward()
        (result * factors).sum().backward()
        errors["gradient"] = _gradient_error(theirs, ours)
    beyond = [f"{name} differs by {error:.1e}" for name, error in errors.items() if not error <= PARITY[name]]
    return Row(name=label, case={"task": "parity"}, errors=errors, note=f"wrong: {', '.join(beyond)}" if beyond else "")


def _gradient_error(theirs: nn.Module, ours: nn.Module) -> float:
    """Returns the greatest relative difference of gradients. Theirs take the place of their weights, and are loaded as weights are."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    worst = 0.0
    for (name, mine), true in zip(ours.named_parameters(), from_torchscale(theirs).parameters(), strict=True):
        # without zero keys softmax does not see a bias of all keys: its gradient is rounding only
        if "k_proj.bias" not in name:
            assert mine.grad is not None
            worst = max(worst, float((mine.grad - true).abs().max() / true.abs().max().clamp(min=1e-12)))
    return worst
