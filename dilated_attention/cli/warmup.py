"""``warmup``: compiles the kernels of a call or a model into Triton's cache on disk, where later processes find them."""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import torch

from dilated_attention.backends import BackendUnavailable
from dilated_attention.cli import common
from dilated_attention.cli.common import put
from dilated_attention.factory import MODEL_PRESETS, create_model
from dilated_attention.functional import attention, block_sparse_attention, dilated_attention
from dilated_attention.models import SlideEncoderConfig, VisionConfig
from dilated_attention.parsing import size
from dilated_attention.pattern import DilatedPattern

_KINDS = ("dilated", "dense", "block_sparse")
# options of a call, which a model preset refuses
_OF_CALLS = ("heads", "head_dim", "kv_heads", "causal")


def add(commands: Any) -> None:
    text = "compiles the kernels of a call or a model into the cache on disk, for later processes on machines like this one"
    about = "Runs one forward and backward on this machine's GPU. The folder is that of TRITON_CACHE_DIR, or ~/.triton/cache."
    add = common.add_command(commands, "warmup", _warmup, usage="%(prog)s what [options]", help=text, description=about).add_argument
    names = [*_KINDS, *MODEL_PRESETS]
    add("what", choices=names, metavar="what", help=f"a kind of attention, or a model preset: {', '.join(names)}")
    add("--length", type=size, default=3000, metavar="N", help="positions; default: 3000, for which the library's own kernels run")
    add("--dtype", choices=common.DTYPE_NAMES, default="bfloat16", help="of a call, or of a model's autocast; default: bfloat16")
    add("--train", action="store_true", help="a model's backward, too; that of a call is always compiled")
    common.add_heads(add)
    common.add_pattern(add, "dilated", "block_sparse")


def _warmup(args: argparse.Namespace) -> int:
    is_call = args.what in _KINDS
    taken = (*_OF_CALLS, *common.PATTERN_OPTIONS[args.what]) if is_call else ()
    common.refuse_others(args, taken, *_OF_CALLS)
    pattern = common.pattern_of(args, args.what) if is_call else None
    if not torch.cuda.is_available():
        raise BackendUnavailable("warmup compiles for this machine's GPU, and torch sees none; run it on a machine with one")
    # a machine without a GPU may lack Triton
    from triton import knobs

    from dilated_attention.backends.tiles import launch

    kernels: list[dict[str, Any]] = []

    def listen(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        kernels.append({"kernel": src.name, "seconds": times.total / 1e6, "cached": cache_hit})

    start = time.perf_counter()
    with knobs.compilation.scope():
        knobs.compilation.listener = listen
        _run_call(args, pattern) if is_call else _run_model(args)
        torch.cuda.synchronize()
        # threads may still compile a form of a kernel that only other lengths need; nothing above waits for it
        launch.finish()
    seconds, folder = time.perf_counter() - start, knobs.cache.dir
    if args.json:
        common.put_json({"folder": folder, "seconds": seconds, "kernels": kernels})
        return 0
    for x in kernels:
        put(f"{x['kernel']}: " + ("cached" if x["cached"] else f"{x['seconds']:.2f} s"))
    put(f"{len(kernels)} kernels in {folder}, {sum(not x['cached'] for x in kernels)} of them new, after {seconds:.2f} s")
    return 0


def _run_call(args: argparse.Namespace, pattern: Any) -> None:
    heads = args.heads or 12
    q, k, v = (
        torch.randn(1, args.length, count, args.head_dim or 64, device="cuda", dtype=common.dtype_of(args), requires_grad=True)
        for count in (heads, args.kv_heads or heads, args.kv_heads or heads)
    )
    causal = bool(args.causal)
    if pattern is None:
        out = attention(q, k, v, is_causal=causal)
    elif isinstance(pattern, DilatedPattern):
        out = dilated_attention(q, k, v, is_causal=causal, **{name: getattr(pattern, name) for name in common.PATTERN_OPTIONS["dilated"]})
    else:
        out = block_sparse_attention(q, k, v, pattern, is_causal=causal)
    out.sum().backward()


def _run_model(args: argparse.Namespace) -> None:
    config, length = MODEL_PRESETS[args.what], args.length
    model = create_model(args.what, device="cuda").train(args.train)
    if isinstance(config, SlideEncoderConfig):
        inputs: Any = torch.randn(1, length, config.in_dim, device="cuda"), torch.zeros(1, length, 2, device="cuda")
    elif isinstance(config, VisionConfig):
        side = config.patch_size * math.isqrt(length)
        inputs = (torch.randn(1, config.in_channels, side, side, device="cuda"),)
    else:
        inputs = (torch.zeros(1, length, dtype=torch.int64, device="cuda"),)
    with torch.set_grad_enabled(args.train), torch.autocast("cuda", common.dtype_of(args)):
        out = model(*inputs)
    if args.train:
        out.float().sum().backward()
