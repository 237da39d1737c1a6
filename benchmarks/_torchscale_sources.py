"""A user's own copies of TorchScale and Prov-GigaPath, imported unedited on a CPU: stand-ins for the packages that they import.

flash-attn is replaced by plain torch in the precision of its input; fairscale and timm by the handful of names that TorchScale reads.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

TORCHSCALE = Path("torchscale/component/dilated_attention.py")
GIGAPATH = Path("gigapath/slide_encoder.py")
LONGVIT = Path("examples/longvit/longvit.py")
URLS = {TORCHSCALE: "https://github.com/microsoft/torchscale", GIGAPATH: "https://github.com/prov-gigapath/prov-gigapath"}


def find(path: str, inside: Path) -> Path:
    """The folder ``path``, which must hold ``inside``; a ValueError that says how to get it otherwise."""
    folder = Path(path).expanduser().resolve()
    if not (folder / inside).is_file():
        raise ValueError(f"{path}: there is no {inside} in it; git clone {URLS[inside]} and give that folder")
    return folder


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float = 0.0,
    bias: None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of q, k, v (B, N, H, D) as flash-attn has them: differentiable in q, k, v, lse (B, H, N) without a gradient."""
    if bias is not None or dropout:
        raise ValueError("the stand-in for flash-attn has neither bias nor dropout")
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1).detach()


def _unchanged(thing: Any, *args: Any, **kwargs: Any) -> Any:
    return thing


def _drop_path(x: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
    if training and probability:
        raise ValueError("the stand-in for timm's drop_path is for evaluation")
    return x


def _stand_ins() -> dict[str, dict[str, Any]]:
    trunc_normal = torch.nn.init.trunc_normal_
    return {
        "fairscale": {},
        "fairscale.nn": {"checkpoint_wrapper": _unchanged, "wrap": _unchanged},
        "timm": {"create_model": None},
        "timm.models": {},
        "timm.models.layers": {"drop_path": _drop_path, "trunc_normal_": trunc_normal},
        "timm.models.registry": {"register_model": _unchanged},
        "huggingface_hub": {},
        # LongViT's own helpers import much more than its model needs
        "utils": {"trunc_normal_": trunc_normal, "get_rank": lambda: 0},
    }


@contextlib.contextmanager
def imported(*folders: Path) -> Iterator[Any]:
    """A function like importlib.import_module that finds the packages of ``folders`` first. On leaving, nothing of them is left."""
    modules, path = dict(sys.modules), list(sys.path)
    for name in [name for name in modules if name.split(".")[0] in {"torchscale", "gigapath", "longvit"}]:
        del sys.modules[name]
    for name, members in _stand_ins().items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(members)
        sys.modules[name] = module
    sys.path[:0] = [str(folder) for folder in folders]

    def load(name: str) -> ModuleType:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(name)
            # looked up at each call; left None where flash-attn or a GPU is missing
            importlib.import_module("torchscale.component.multihead_attention").flash_attn_func = flash_attn_func
        return module

    try:
        yield load
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name not in modules]:
            del sys.modules[name]
        sys.modules.update(modules)
