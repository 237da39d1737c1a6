"""Public functions and transforms of torch.func for ``test_transforms.py``, also inside the pool's processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

import dilated_attention as da
from dilated_attention import DilatedPattern
from dilated_attention.pattern import LocalWindow

Function = Callable[..., torch.Tensor]
Tensors = tuple[torch.Tensor, ...]
B, N, H, D = 2, 8, 2, 3
BRANCHES = ((4, 8), (1, 2))
BLOCKS = LocalWindow(3)


def qkv(seed: int = 0, *batch: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*batch, B, N, H, D, generator=generator, dtype=torch.float64) for _ in range(3))
    return q, k, v


def plain(times: torch.Tensor) -> Function:
    """softmax over keys that occur so many times (H, N, N), in plain autograd."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * D**-0.5
        weights = torch.softmax(scores + times.to(scores.dtype).log(), -1)
        return torch.einsum("bhij,bjhd->bihd", weights, v)

    return function


def dilated_times() -> torch.Tensor:
    return DilatedPattern(*BRANCHES).dense_mask(N, N, H)


def block_times() -> torch.Tensor:
    return BLOCKS.dense_mask(N, N, H).expand(H, N, N).long()


def both_times() -> torch.Tensor:
    return dilated_times() + block_times()


def weights_of(out: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1.0, 2.0, out.numel(), dtype=torch.float64).reshape(out.shape).cos()


def loss_of(function: Function) -> Function:
    def loss(*x: torch.Tensor) -> torch.Tensor:
        out = function(*x)
        return (out * weights_of(out)).sum()

    return loss


def many(count: int = 3) -> Tensors:
    return qkv(1, count)


def jvp(f: Function) -> Any:
    return torch.func.jvp(f, qkv(), qkv(2))[1]


def jvp_of_one(f: Function) -> Any:
    """Only the last tensor has a tangent."""
    *others, v = qkv()
    return torch.func.jvp(lambda v: f(*others, v), (v,), (v.cos(),))[1]


def make_dual(f: Function) -> Any:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(qkv(), qkv(2), strict=True)]
        return forward_ad.unpack_dual(f(*duals)).tangent


def linearize(f: Function) -> Any:
    return torch.func.linearize(f, *qkv())[1](*qkv(2))


def jacfwd(f: Function) -> Any:
    return torch.func.jacfwd(f, argnums=(0, 2))(*qkv())


def hessian(f: Function) -> Any:
    return torch.func.hessian(loss_of(f), argnums=1)(*qkv())


def jacrev_of_jacrev(f: Function) -> Any:
    return torch.func.jacrev(torch.func.jacrev(loss_of(f), argnums=1), argnums=2)(*qkv())


def grad(f: Function) -> Any:
    return torch.func.grad(loss_of(f), argnums=(0, 1, 2))(*qkv())


def vjp(f: Function) -> Any:
    out, pull = torch.func.vjp(f, *qkv())
    return out, pull(weights_of(out))


def jacrev(f: Function) -> Any:
    return torch.func.jacrev(lambda *x: f(*x)[:, :2], argnums=(0, 1, 2))(*qkv())


def vmap_of_grad(f: Function) -> Any:
    return torch.func.vmap(torch.func.grad(loss_of(f), argnums=(0, 1, 2)))(*many())


def vmap_of_grad_over_one(f: Function) -> Any:
    (q, _, v), k = qkv(), many()[1]
    return torch.func.vmap(torch.func.grad(loss_of(f), argnums=(0, 1)), in_dims=(None, 2, None))(q, k.movedim(0, 2), v)


def grad_of_vmap(f: Function) -> Any:
    return torch.func.grad(lambda *x: torch.func.vmap(loss_of(f), in_dims=(0, None, None))(*x).sum(), argnums=(0, 1))(many()[0], *qkv()[1:])


def autograd_of_vmap(f: Function) -> Any:
    x = [tensor.requires_grad_() for tensor in many()]
    return torch.autograd.grad(torch.func.vmap(loss_of(f))(*x).sum(), x)


def vmap(f: Function) -> Any:
    return torch.func.vmap(f)(*many())


def vmap_of_vmap(f: Function) -> Any:
    q, k, v = many(2)
    inner = torch.func.vmap(f, in_dims=(0, None, 0))
    return torch.func.vmap(inner, in_dims=(None, 0, 4))(q, k, torch.stack([v, v.sin()], 4))


TRANSFORMS: dict[str, Callable[[Function], Any]] = {
    function.__name__: function
    for function in (
        jvp,
        jvp_of_one,
        make_dual,
        linearize,
        jacfwd,
        hessian,
        jacrev_of_jacrev,
        grad,
        vjp,
        jacrev,
        vmap_of_grad,
        vmap_of_grad_over_one,
        grad_of_vmap,
        autograd_of_vmap,
        vmap,
        vmap_of_vmap,
    )
}


def functions() -> dict[str, tuple[Function, Function]]:
    """(function of q, k, v and options, the same without options in plain autograd) of what attends and has derivatives, by public name."""
    made: dict[str, tuple[Function, Function]] = {}
    torch.manual_seed(3)
    for name in da.__all__:
        kind = getattr(da, name)
        if not name.lower().endswith("attention") or name in ("decode_attention", "create_attention", "plan_attention"):
            continue
        has_blocks = "BlockSparse" in name or "block_sparse" in name
        has_branches = "ilated" in name
        times = (dilated_times() if has_branches else 0) + (block_times() if has_blocks else 0)
        truth = plain(times if isinstance(times, torch.Tensor) else torch.ones(H, N, N))
        pattern: tuple[Any, ...] = (*(BRANCHES if has_branches else ()), *((BLOCKS,) if has_blocks else ()))
        if name.islower():
            made[name] = partial(_call, kind, pattern), truth
        elif "Multihead" in name:
            module = kind(H * D, H, *pattern).double()
            made[name] = partial(_layer, module), partial(_layer_in_parts, module, truth)
        else:
            made[name] = kind(*pattern), truth
    return made


def _call(function: Any, pattern: tuple[Any, ...], *x: torch.Tensor, **options: Any) -> torch.Tensor:
    return function(*x, *pattern, **options)  # type: ignore[no-any-return]


def _layer(module: Any, *x: torch.Tensor) -> torch.Tensor:
    """A module on (B, N, E)."""
    return module(*(tensor.flatten(2) for tensor in x))[0]  # type: ignore[no-any-return]


def _layer_in_parts(module: Any, attend: Function, *x: torch.Tensor) -> torch.Tensor:
    projections = (module.q_proj, module.k_proj, module.v_proj)
    heads = [layer(tensor.flatten(2)).unflatten(2, (H, D)) for layer, tensor in zip(projections, x, strict=True)]
    return module.out_proj(module.inner_attn_ln(attend(*heads).flatten(2)))  # type: ignore[no-any-return]


def round_trip(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    (part,) = da.shard_sequence(None, [q + k * v], [1])
    return da.unshard_sequence(None, [part], [1])[0]


def tools() -> dict[str, Function]:
    """What has no derivative, and no rule for vmap."""
    positions = torch.full((B,), N - 1)
    return {
        "attention_map": lambda q, k, v: da.attention_map(q, k, *BRANCHES, query_rows=[0, 3]),
        "attention_received": lambda q, k, v: da.attention_received(q, k, *BRANCHES),
        "decode_attention": lambda q, k, v: da.decode_attention(q[:, -1:], k, v, positions),
    }


RINGS: dict[str, tuple[Function, torch.Tensor]] = {
    "ring_attention": (lambda *x: da.ring_attention(*x, layout="contiguous"), torch.ones(H, N, N)),
    "ring_dilated_attention": (lambda *x: da.ring_dilated_attention(*x, *BRANCHES), dilated_times()),
    "ring_block_sparse_attention": (lambda *x: da.ring_block_sparse_attention(*x, BLOCKS), block_times()),
    "ring_block_sparse_dilated_attention": (lambda *x: da.ring_block_sparse_dilated_attention(*x, *BRANCHES, BLOCKS), both_times()),
}
RING_TRANSFORMS = ("vjp", "grad", "vmap_of_grad", "grad_of_vmap", "vmap", "jacrev", "jvp", "make_dual", "hessian")


def on_this_rank(rank: int, world: int, name: str, transform: str) -> Any:
    """The ring's part of a result, by a transform of this rank's shards; a refusal as its text."""
    ring = RINGS[name][0]
    rows = slice(rank * N // world, (rank + 1) * N // world)
    q, k, v = (x[:, rows] for x in qkv())
    many_q, many_k, many_v = (x[:, :, rows] for x in many())
    weights = weights_of(qkv()[0])[:, rows]

    def loss(*x: torch.Tensor) -> torch.Tensor:
        return (ring(*x) * weights).sum()

    every = (0, 1, 2)
    try:
        if transform == "vjp":
            out, pull = torch.func.vjp(ring, q, k, v)
            return (out, *pull(weights))
        if transform == "grad":
            return torch.func.grad(loss, argnums=every)(q, k, v)
        if transform == "vmap_of_grad":
            return torch.func.vmap(torch.func.grad(loss, argnums=every))(many_q, many_k, many_v)
        if transform == "grad_of_vmap":
            return torch.func.grad(lambda *x: torch.func.vmap(loss)(*x).sum(), argnums=every)(many_q, many_k, many_v)
        if transform == "vmap":
            return (torch.func.vmap(ring)(many_q, many_k, many_v),)
        if transform == "jacrev":
            # the same directions on all ranks at a time: what each rank's rows get from those of all
            return torch.func.jacrev(lambda *x: ring(*x).sum(1), argnums=every)(q, k, v)
        if transform == "hessian":
            return torch.func.hessian(loss)(q, k, v)
        if transform == "jvp":
            return torch.func.jvp(ring, (q, k, v), (q, k, v))[1]
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(ring(forward_ad.make_dual(q, q), k, v)).tangent
    except NotImplementedError as error:
        return str(error)


def round_trip_on_this_rank(rank: int, world: int) -> Any:
    """Gradients of each of three samples, and second ones, through shards that are put together again."""
    x = torch.arange(3.0 * N).reshape(3, 1, N).double().cos()

    def loss(x: torch.Tensor) -> torch.Tensor:
        (part,) = da.shard_sequence(None, [x], [1])
        (whole,) = da.unshard_sequence(None, [part.square()], [1])
        # the gradient of a shard is summed over ranks
        return (whole * torch.arange(N)).sum() / world

    first = torch.func.vmap(torch.func.grad(loss))(x)
    again = x[0].clone().requires_grad_()
    (dx,) = torch.autograd.grad(loss(again), again, create_graph=True)
    (second,) = torch.autograd.grad((dx * again).sum(), again)
    refused = ""
    try:
        torch.func.jvp(loss, (x[0],), (x[0],))
    except NotImplementedError as error:
        refused = str(error)
    return first, second, refused
