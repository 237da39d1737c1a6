"""Explains which backends exist, which one a call would use, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from typing_extensions import Unpack

from dilated_attention.backends import PRECISIONS, AttentionRequest, BackendUnavailable, Hardware, registry
from dilated_attention.backends.hardware import hardware_of
from dilated_attention.engine.branches.problems import whole_shape
from dilated_attention.engine.ops import prepare
from dilated_attention.engine.ops.settings import CallSettings
from dilated_attention.functional.options import Options, SoftmaxOptions, check_names, checked_numbers, shows_options
from dilated_attention.pattern import DilatedPattern
from dilated_attention.pattern.checks import as_int, check_bool, checked_block_size, one_of, shown
from dilated_attention.validation import check_counts, check_dtype, check_scale

_CUDA_PACKAGES = frozenset({"flash-attn-4", "flash-attn-3", "flash-attn-3-fp8", "flash-attn-2", "triton"})
_CAPABILITIES = {
    "pascal": (6, 1), "volta": (7, 0), "turing": (7, 5), "ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0), "blackwell": (10, 0),
    "blackwell-consumer": (12, 0),
}  # fmt: skip
_TORCH: Any = {"torch_version": (2, 13)}

# every kernel package counts as installed, so that only the architecture can cause a refusal
EXAMPLES: dict[str, Hardware] = {
    "cpu": Hardware(device_type="cpu", name="cpu", **_TORCH),
    **{
        name: Hardware(device_type="cuda", capability=capability, cudnn_version=92000, packages=_CUDA_PACKAGES, name=name, **_TORCH)
        for name, capability in _CAPABILITIES.items()
    },
    "rocm": Hardware(device_type="cuda", is_rocm=True, capability=(9, 4), packages=_CUDA_PACKAGES, name="rocm", **_TORCH),
    "mps": Hardware(device_type="mps", name="mps", **_TORCH),
}


def list_backends() -> tuple[str, ...]:
    """Returns the names of all backends, usable here or not. ``backend=`` takes these, ``"auto"``, and ``"sdpa"`` for PyTorch's best.

    Their order of preference depends on the call: ``explain_backend`` prints it, with what determined it.
    """
    return registry.names()


@dataclass(frozen=True)
class Row:
    """One backend of an ``Explanation``.

    Args:
        reasons: all reasons against it, in the forward and, if gradients are requested, in the backward.
        source: where its capabilities were read or measured.
    """

    name: str
    reasons: tuple[str, ...]
    source: str

    @property
    def usable(self) -> bool:
        """Whether it can compute every pass that is requested."""
        return not self.reasons


class Line(NamedTuple):
    """A row as it is printed. ``mark``: ``→`` a backend that is taken · ``·`` one that can · ``✗`` one that cannot."""

    mark: str
    text: str


@dataclass(frozen=True)
class Explanation:
    """The choice of backends for one kind of call; ``str()`` prints the whole table.

    Args:
        request: the request for the last pass of the call.
        rows: every backend in order of preference.
        forward, backward: the backend used for each pass; None if no backend can compute it; ``backward`` is also None if no gradient is
            requested.
        forward_basis, backward_basis: why it came first: ``shipped table (source, date)``, ``architecture order``,
            ``order of registration``, ``asked for by name`` or ``estimated time of the whole call``; empty if no backend can compute the
            pass.
        tiles: whether a whole call runs on a table of tiles, and by which rule; empty where it cannot.
    """

    request: AttentionRequest
    rows: tuple[Row, ...]
    forward: str | None
    backward: str | None
    forward_basis: str = ""
    backward_basis: str = ""
    tiles: str = ""

    @property
    def chosen(self) -> str | None:
        """Returns the backend of the forward."""
        return self.forward

    def as_dict(self) -> dict[str, Any]:
        """Returns the explanation as plain data, for JSON."""
        copied = ("forward", "backward", "forward_basis", "backward_basis", "tiles")
        return {
            "hardware": self.request.hardware.label,
            "request": self.request.describe(),
            **{name: getattr(self, name) for name in copied},
            "backends": [{"name": row.name, "usable": row.usable, "reasons": list(row.reasons), "source": row.source} for row in self.rows],
        }

    @property
    def what(self) -> str:
        """Returns the call in words: its request without "forward", which describes a single pass."""
        gradients = ", with gradients" if self.request.needs_grad else ""
        return replace(self.request, needs_grad=False).describe().replace(", forward", "") + gradients

    def lines(self) -> list[Line]:
        """Returns the line of each backend, as ``str()`` prints it."""
        width = max(len(row.name) for row in self.rows)
        lines = []
        for row in self.rows:
            passes = " and ".join(name for name in ("forward", "backward") if getattr(self, name) == row.name)
            text = "; ".join(row.reasons) or row.source or "usable"
            # with reasons against one pass, a backend may be taken for the other
            text = f"{passes} only: {text}" if passes and row.reasons else text
            mark = "→" if passes else "·" if row.usable else "✗"
            lines.append(Line(mark, f"  {mark} {row.name:<{width}}  {text}"))
        return lines

    def __str__(self) -> str:
        none = "no backend can"
        backward = f" · backward: {self.backward or none}" if self.request.needs_grad else ""
        # a pass that no backend can compute has no basis; two equal ones are printed once
        bases = [basis for basis in (self.forward_basis, self.backward_basis) if basis]
        order = f"forward {self.forward_basis} · backward {self.backward_basis}" if len(set(bases)) > 1 else "".join(bases[:1])
        lines = [self.what, f"forward: {self.forward or none}{backward}", *([f"order: {order}"] if order else [])]
        lines += [line.text for line in self.lines()] + ([f"tiles: {self.tiles}"] if self.tiles else [])
        return "\n".join([*lines, "→ taken · can, less preferred here ✗ cannot, with every reason. In the forward's order of preference."])


@shows_options
def explain_backend(
    *,
    device: torch.device | str | None = None,
    hardware: Hardware | None = None,
    dtype: torch.dtype | None = None,
    head_dim: int = 64,
    num_heads: int = 8,
    num_kv_heads: int | None = None,
    is_causal: bool = False,
    needs_grad: bool = True,
    key_padding_mask: bool = False,
    window: bool = False,
    bias: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    precision: str = "native",
    length: int = 0,
    block_size: int | tuple[int, int] | None = None,
    block_masks: str = "none",
    pattern: DilatedPattern | None = None,
    num_positions: int | None = None,
    **options: Unpack[SoftmaxOptions],
) -> Explanation:
    """Explains which backend a call of this kind uses for each pass, with every reason against the others. Nothing is computed.

    Args:
        device: the device of this machine to ask about; by default the GPU if there is one.
        hardware: another machine instead of ``device``, e.g. ``factory.EXAMPLES["hopper"]`` or a ``Hardware`` that you construct.
        dtype: by default bfloat16 on CUDA from compute capability 8.0, float16 on older GPUs, else float32.
        bias: whether the scores have a bias.
        backend: ``"auto"``, or a name whose refusal is to be explained.
        length: rows of a problem, i.e. the largest segment length / dilation rate; rates are looked up by it. 0 means long.
            For block-sparse attention: the mean number of keys that a query keeps.
        block_size: for block-sparse attention, as in a pattern; None: dense or dilated attention.
        block_masks: what is masked inside the blocks: ``"none"``: blocks are kept whole · ``"interval"``: windows, documents, causality ·
            ``"bits"``: anything else.
        pattern, num_positions: a dilated call on one sequence, to explain whether it runs on a table of tiles; ``length`` follows from
            them.
        options: see ``functional.SoftmaxOptions``.

    The other arguments are those of ``dilated_attention``.
    """
    check_names("explain_backend", options)
    machine = hardware_of(device, hardware)
    if dtype is None:
        dtype = torch.float32
        if machine.device_type == "cuda":
            dtype = torch.bfloat16 if (machine.capability or (0, 0)) >= (8, 0) else torch.float16
    if pattern is not None and not isinstance(pattern, DilatedPattern):
        raise TypeError(f"pattern is {shown(pattern)} ({type(pattern).__name__}); expected a DilatedPattern, or block_size= for blocks")
    if (pattern is None) != (num_positions is None):
        raise ValueError("pattern or num_positions is given without the other; give both to ask about a call, or neither")
    if num_positions is not None:
        num_positions = as_int("num_positions", num_positions, minimum=1)
    length = 0 if length is None and pattern is not None else as_int("length", length, minimum=0)
    if pattern is not None and num_positions is not None:
        # the rows of the largest problem; a segment may be longer than the sequence
        length = length or max(-(-min(w, num_positions) // r) for w, r in pattern.branches)
    head_dim, num_heads, num_kv_heads = check_counts(head_dim, num_heads, num_kv_heads)
    check_bool("needs_grad", needs_grad)
    # PyTorch's global settings count as in a call: they are part of what backends are asked
    torch_deterministic = torch.are_deterministic_algorithms_enabled()
    dtype, scale = check_dtype(dtype), check_scale(None, head_dim)
    softmax = CallSettings(scale, **checked_numbers(Options(**options), scale, dtype))
    request = AttentionRequest(
        hardware=machine,
        dtype=dtype,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        causal=check_bool("is_causal", is_causal),
        key_mask=check_bool("key_padding_mask", key_padding_mask),
        window=check_bool("window", window),
        deterministic=check_bool("deterministic", deterministic) or torch_deterministic,
        torch_deterministic=torch_deterministic,
        shapes_repeat=torch.backends.cudnn.benchmark,
        precision=precision,
        # as a call's, whose choice holds for all lengths that round to one
        length=length and prepare.rounded_length(length),
        blocks=None if block_size is None else checked_block_size(block_size),
        block_masks=block_masks,
        **softmax.features | {"bias": check_bool("bias", bias)},
    )
    one_of("block_masks", block_masks, ("none", "interval", "bits"))
    if block_size is None and block_masks != "none":
        raise ValueError(f"block_masks is {block_masks!r} without a block_size; give block_size=128 to ask about block-sparse attention")
    registry.check_name(backend)
    one_of("precision", precision, PRECISIONS)
    of_backward = replace(request, needs_grad=True)
    backward_reasons = dict(registry.table(of_backward)) if needs_grad else {}
    # many reasons are the same in both passes
    rows = tuple(
        Row(name, tuple(dict.fromkeys([*reasons, *backward_reasons.get(name, ())])), registry.get(name).capabilities.source)
        for name, reasons in registry.table(request)
    )
    forward, forward_basis = _taken(request, backend)
    backward, backward_basis = _taken(of_backward, backend) if needs_grad else (None, "")
    request = of_backward if needs_grad else request
    tiles, on_tiles = _tiles(request, backend, pattern, num_positions)
    if "forward" in on_tiles:
        forward, forward_basis = prepare.TILES, "estimated time of the whole call"
    if "backward" in on_tiles:
        backward, backward_basis = prepare.TILES, "estimated time of the whole call"
    return Explanation(request, rows, forward, backward, forward_basis, backward_basis, tiles)


def _tiles(
    request: AttentionRequest, backend: str, pattern: DilatedPattern | None, num_positions: int | None
) -> tuple[str, tuple[str, ...]]:
    """Returns (by which rule a whole call runs on a table of tiles, with the estimates where the call is known; the passes that do). Empty
    where it cannot: tiles are taken for dilated calls alone, and never in place of a backend that was asked for by name."""
    if backend != "auto" or request.blocks is not None or registry.get(prepare.TILES).reasons_against(request):
        return "", ()
    rule = (
        "auto takes them for a whole call where their estimated time is shorter than the chosen library's with its launches, or the "
        "library is a slow one"
    )
    if pattern is None or num_positions is None:
        return f"{rule}, as in short ones; pattern= and num_positions= give the estimates", ()
    # the call of a single sequence
    shape, batch = whole_shape(request.num_heads, request.num_kv_heads, num_positions, request.causal), 1
    parts, on_tiles = [], []
    for name in ("forward", "backward") if request.needs_grad else ("forward",):
        of_pass = replace(request, needs_grad=name == "backward")
        try:
            library = registry.select(of_pass).name
        except BackendUnavailable:
            return "", ()
        if library == prepare.TILES:
            parts.append(f"{name} {library}, preferred for dense problems, too")
            continue
        taken = prepare.TILES if prepare.runs_on_tiles(pattern, shape, of_pass, batch, library) else library
        on_tiles += [name] * (taken == prepare.TILES)
        tiles_ms = prepare.tiles_ms(pattern, shape, of_pass, batch)
        library_ms = prepare.library_ms(pattern, shape, of_pass, batch, library)
        parts.append(f"{name} {tiles_ms:.2f} ms against {library_ms:.2f} on {library}: {taken}")
    return f"{rule}: {' · '.join(parts)}", tuple(on_tiles)


def _taken(request: AttentionRequest, backend: str) -> tuple[str | None, str]:
    """Returns (the backend of a pass, why it came first)."""
    try:
        name = registry.select(request, backend).name
    except BackendUnavailable:
        return None, ""
    return name, "asked for by name" if name == backend else registry.ranking(request)[name]
