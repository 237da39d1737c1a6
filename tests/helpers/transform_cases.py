"""Public functions and transforms of torch.func for ``test_transforms.py``, also inside the pool's processes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.func import grad, hessian, jacrev, jvp, vmap

import dilated_attention as da
from dilated_attention import DilatedPattern
from dilated_attention.pattern import LocalWindow

Function = Callable[..., torch.Tensor]
Tensors = tuple[torch.Tensor, ...]
B, N, H, D = 2, 8, 2, 3
BRANCHES = ((4, 8), (1, 2))
BLOCKS = LocalWindow(3)
EACH = (0, 1, 2)


def qkv(seed: int = 0, *batch: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*batch, B, N, H, D, generator=generator, dtype=torch.float64) for _ in EACH)


def many(count: int = 3) -> Tensors:
    return qkv(1, count)


def weights_of(out: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1.0, 2.0, out.numel(), dtype=torch.float64).reshape(out.shape).cos()


def loss_of(function: Function, weights: torch.Tensor | None = None) -> Function:
    def loss(*x: torch.Tensor) -> torch.Tensor:
        out = function(*x)
        return (out * (weights_of(out) if weights is None else weights)).sum()

    return loss


# of a function, of q, k and v, of several of them, and of the weights of its loss
TRANSFORMS: dict[str, Callable[[Function, Tensors, Tensors, torch.Tensor | None], Any]] = {
    "jvp": lambda f, x, y, w: jvp(f, x, qkv(2))[1],
    "jvp_of_one": lambda f, x, y, w: jvp(partial(f, *x[:2]), x[2:], x[2:])[1],
    "hessian": lambda f, x, y, w: hessian(loss_of(f, w), argnums=1)(*x),
    "jacrev_of_jacrev": lambda f, x, y, w: jacrev(jacrev(loss_of(f, w), argnums=1), argnums=2)(*x),
    "grad": lambda f, x, y, w: grad(loss_of(f, w), argnums=EACH)(*x),
    "jacrev": lambda f, x, y, w: jacrev(lambda *x: f(*x).sum(1), argnums=EACH)(*x),
    "vmap": lambda f, x, y, w: vmap(f)(*y),
    "vmap_of_vmap": lambda f, x, y, w: vmap(vmap(f, in_dims=(0, None, 0)), in_dims=(None, 0, 4))(
        *y[:2], torch.stack([y[2], y[2].sin(), -y[2]], 4)
    ),
    "vmap_of_grad": lambda f, x, y, w: vmap(grad(loss_of(f, w), argnums=EACH))(*y),
    "grad_of_vmap": lambda f, x, y, w: grad(lambda *z: vmap(loss_of(f, w), in_dims=(0, None, None))(*z).sum(), argnums=EACH)(y[0], *x[1:]),
}


def plain(times: torch.Tensor) -> Function:
    """softmax over keys that occur so many times (H, N, N), in plain autograd."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * D**-0.5
        return torch.einsum("bhij,bjhd->bihd", torch.softmax(scores + times.double().log(), -1), v)

    return function


def functions() -> dict[str, tuple[Function, Function]]:
    """(function of q, k, v and options, the same without options in plain autograd) of what attends and has derivatives, by public name."""
    made: dict[str, tuple[Function, Function]] = {}
    torch.manual_seed(3)
    for name in da.__all__:
        kind = getattr(da, name)
        if not name.lower().endswith("attention") or name in ("decode_attention", "create_attention", "plan_attention"):
            continue
        times, pattern = torch.zeros(H, N, N), ()
        if "ilated" in name:
            times, pattern = times + DilatedPattern(*BRANCHES).dense_mask(N, N, H), BRANCHES
        if "BlockSparse" in name or "block_sparse" in name:
            times, pattern = times + BLOCKS.dense_mask(N, N, H), (*pattern, BLOCKS)
        truth = plain(times if pattern else times + 1)
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
