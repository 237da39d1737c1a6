"""The forms in which a case of ``testing`` may be called, and what of a case each takes: ``results(function, fitting(case), …)``."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dilated_attention as da
from dilated_attention.backends import AttentionRequest, detect, registry
from dilated_attention.pattern import BlockPattern
from dilated_attention.testing import Case, Inputs, call
from dilated_attention.testing.check import function_of

Tensors = tuple[torch.Tensor, torch.Tensor]
Form = Callable[..., Tensors]


class Looks(TorchDispatchMode):
    """Sees everything and changes nothing: whoever looks on gets the op. ``tell`` is given each operation and its arguments."""

    def __init__(self, tell: Callable[..., object] = lambda *_: None) -> None:
        super().__init__()
        self.tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tell(func, args)
        return func(*args, **(kwargs or {}))


def op(case: Case, x: Inputs, *qkv: torch.Tensor, **options: Any) -> Tensors:
    with Looks():
        return call(case, x, *qkv, **options)


def compiled(case: Case, x: Inputs, *qkv: torch.Tensor, **more: Any) -> Tensors:
    torch._dynamo.reset()
    function, arguments, options = function_of(case, x)
    torch.manual_seed(case.seed)
    graph = torch.compile(lambda *qkv: function(*qkv, *arguments, **options | more), backend="aot_eager", fullgraph=True)
    return graph(*qkv)  # type: ignore[no-any-return]


def checkpointed(case: Case, x: Inputs, *qkv: torch.Tensor, **options: Any) -> Tensors:
    return checkpoint(lambda *qkv: call(case, x, *qkv, **options), *qkv, use_reentrant=False)  # type: ignore[no-any-return]


def saved(case: Case, x: Inputs, *qkv: torch.Tensor, **options: Any) -> Tensors:
    """What autograd saves goes away and comes back, with other strides."""

    def unpack(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 3).contiguous().transpose(1, 3) if x.ndim == 4 else x.clone()

    with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
        return call(case, x, *qkv, **options)


def mapped(case: Case, x: Inputs, *qkv: torch.Tensor, **options: Any) -> Tensors:
    """The second of two samples, mapped in dimensions of their own; keys have none."""
    q, k, v = qkv
    samples = torch.stack([q.detach() + 1, q]), torch.stack([v.detach().sin(), v], -1)
    out, lse = vmap(lambda q, v: call(case, x, q, k, v, **options), in_dims=(0, -1))(*samples)
    return out[1], lse[1]


def rows(case: Case, x: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Tensors:
    """Queries in pieces, the last ones row by row, as in decoding."""
    n = case.num_queries
    cuts = sorted({0, n // 3, *range(max(0, n - 3), n + 1)})
    parts = [
        call(replace(case, num_queries=b - a, query_offset=case.query_offset + a), x, q[:, a:b], k, v, **options)
        for a, b in itertools.pairwise(cuts)
    ]
    if not parts:
        return call(case, x, q, k, v, **options)
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)


def ring(case: Case, x: Inputs, *qkv: torch.Tensor, **more: Any) -> Tensors:
    """Of one process."""
    function, arguments, options = function_of(case, x)
    torch.manual_seed(case.seed)
    del options["query_offset"]
    return getattr(da, f"ring_{function.__name__}")(*qkv, *arguments, **options | more)  # type: ignore[no-any-return]


def module(case: Case, x: Inputs, *qkv: torch.Tensor, **more: Any) -> Tensors:
    function, arguments, options = function_of(case, x)
    del options["softcap"], options["bias"]
    of_call = {name: options.pop(name) for name in ("is_causal", "cu_seqlens", "key_padding_mask", "query_offset", "return_lse")}
    sinks, options["dropout"] = options.pop("sinks"), options.pop("dropout_p")
    name = {"attention": "RingAttention", "dilated_attention": "DilatedAttention"}.get(function.__name__, "BlockSparseAttention")
    if function is da.block_sparse_dilated_attention:
        name = "BlockSparseDilatedAttention"
    if name == "RingAttention":
        del of_call["query_offset"]
    options |= {} if sinks is None else {"sinks": True, "num_heads": case.heads}
    made = getattr(da, name)(*arguments, **options, **more)
    torch.manual_seed(case.seed)
    return functional_call(made, {} if sinks is None else {"sinks": sinks}, qkv, of_call)  # type: ignore[no-any-return]


def _any(case: Case) -> Case:
    return case


def static(case: Case) -> Case:
    pattern: Any = case.pattern
    if isinstance(pattern, BlockPattern) and pattern.is_chosen:
        return replace(case, pattern=pattern.always or pattern.within or da.DilatedPattern((16, 64), (1, 3)), branches=None)  # type: ignore[attr-defined]
    return case


def _of_rows(case: Case) -> Case:
    """A row of packed documents has no call of its own, and content chooses for a whole block of queries."""
    return replace(static(case), bounds=None)


def _of_ring(case: Case) -> Case:
    return replace(static(case), num_queries=case.num_keys, query_offset=0)


def _of_module(case: Case) -> Case:
    """Modules have no cap and no bias; that with a window is a ring's."""
    case = replace(case, softcap=None, bias="none")
    return case if case.window is None else _of_ring(case)


FORMS: dict[str, tuple[Form, Callable[[Case], Case]]] = {
    "eager": (call, _any),
    "op": (op, _any),
    "compiled": (compiled, _any),
    "checkpointed": (checkpointed, _any),
    "saved": (saved, _any),
    # vmap asks for its ``randomness`` where a call draws: test_transforms.py
    "mapped": (mapped, lambda case: replace(case, dropout_p=0.0)),
    "rows": (rows, _of_rows),
    "ring": (ring, _of_ring),
    "module": (module, _of_module),
}


def cpu_backends() -> tuple[str, ...]:
    """The registered backends that compute dense problems on a CPU, with gradients."""
    request = AttentionRequest(hardware=detect("cpu"), dtype=torch.float32, head_dim=8, needs_grad=True)
    return tuple(name for name, reasons in registry.table(request) if not reasons)
