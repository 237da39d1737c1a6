"""``recommend``: from a use case and a machine to the attention, its settings and the code that creates it, with a reason for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dilated_attention.factory import EXAMPLES, detect
from dilated_attention.pattern.checks import as_int, one_of, shown
from dilated_attention.planning.advice import rules
from dilated_attention.planning.advice.answer import Recommendation, rule_table
from dilated_attention.planning.advice.case import Case
from dilated_attention.planning.advice.use_cases import decoding, huggingface, layer, torchscale, training
from dilated_attention.planning.estimate.problem import MOST, machine_of
from dilated_attention.validation import MAX_HEAD_DIM, check_bool

USE_CASES: Mapping[str, str] = {name: case["for"] for name, case in rule_table()["use_cases"].items()}
KINDS = ("dense", "dilated", "block_sparse")
# limits; those of numbers that need not be whole are the parameters of a model, and the GiB of a device
_NUMBERS = {"parameters": 10**16, "memory": 2**30}
_MOST = MOST | {"heads": MOST["num_heads"], "head_dim": MAX_HEAD_DIM, "batch": MOST["batch_size"]}


def recommend(
    use_case: str,
    length: int,
    *,
    gpu: str | None = None,
    memory: float | None = None,
    parameters: float | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    gpus: int | None = None,
    batch: int | None = None,
    users: int | None = None,
    causal: bool | None = None,
    attention: str | None = None,
) -> Recommendation:
    """Recommends what to use for a use case, with a reason for each setting and the code that creates it. Allocates nothing on a device.

    Each reason follows from the definition, from this library's planning functions, or from measured figures in its documentation (most of
    them on one H200), and says which. How well a model learns with each kind of attention is not considered.

    Args:
        use_case: a key of ``USE_CASES``.
        length: N, positions of a sequence; for ``"torchscale"`` tiles of a slide, for ``"serving"`` positions of a request.
        gpu: ``"H200"``, ``"A100"``, … (``planning.gpus.GPUS``), assumed to have every kernel package installed; ``"cpu"``; None: this
            machine.
        memory: GiB of each device, instead of its actual memory.
        parameters: of the model; None: one attention layer, or for decoding the preset ``llama-1b``.
        heads, head_dim: of queries; None: the usual ones for this number of parameters.
        gpus: number of devices, 1 by default.
        batch: sequences of a training step over all GPUs, 1 by default.
        users: concurrent requests over all GPUs, 32 by default.
        causal: True by default, except for encoders.
        attention: ``"dense"``, ``"dilated"`` or ``"block_sparse"`` if the model has or must have it; None leaves the choice open.

    Raises:
        ValueError, TypeError: a use case, GPU or size that does not exist, or an argument that this use case does not accept.
    """
    one_of("use_case", use_case, tuple(USE_CASES))
    arguments = {
        "parameters": parameters, "heads": heads, "head_dim": head_dim, "gpus": gpus, "batch": batch, "users": users, "causal": causal,
        "attention": attention,
    }  # fmt: skip
    given = {name: _checked(name, value) for name, value in arguments.items() if value is not None}
    taken = rule_table()["use_cases"][use_case]["takes"]
    if wrong := ", ".join(name for name in given if name not in taken):
        takes = ", ".join(("length", "gpu", "memory", *taken))
        raise ValueError(f"{wrong} given, which {use_case!r} does not use; it takes {takes}: drop {wrong}")
    size = None if memory is None else int(_checked("memory", memory) * 2**30)
    usual: dict[str, Any] = {"gpus": 1, "batch": 1, "users": 32, "causal": use_case not in ("encoder", "torchscale")}
    shape: dict[str, Any] = dict.fromkeys(("parameters", "heads", "head_dim", "attention"))
    machine = machine_of(gpu, size)
    hardware = detect() if gpu is None else EXAMPLES["cpu"]
    if gpu is not None and machine.gpu is not None:
        hardware = replace(EXAMPLES["hopper"], capability=machine.gpu.capability, name=machine.gpu.name)
    if machine.gpu is None:
        machine = replace(machine, name="CPU" if hardware.device_type == "cpu" else hardware.name)
    case = Case(
        name=use_case, length=as_int("length", length, minimum=1, maximum=MOST["num_positions"]), machine=machine, hardware=hardware,
        here=gpu is None, **(shape | usual | given),
    )  # fmt: skip
    _check_use_case(case)
    named = {"torchscale": torchscale, "huggingface": huggingface, "long-context": decoding, "serving": decoding}
    return named.get(use_case, layer if parameters is None else training)(case)


def _checked(name: str, value: Any) -> Any:
    if name == "causal":
        check_bool(name, value)
    elif name == "attention":
        one_of(name, value, KINDS)
    elif name in _MOST:
        return as_int(name, value, minimum=1, maximum=_MOST[name])
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {shown(value)} ({type(value).__name__}); expected a number above 0")
    elif not 0 < value <= _NUMBERS[name]:
        raise ValueError(f"{name} is {shown(value)}; expected a number above 0, at most {_NUMBERS[name]:,}")
    return value


def _check_use_case(case: Case) -> None:
    if case.name == "large-training" and (case.parameters is None or case.parameters <= rules.LARGE):
        given = "not given" if case.parameters is None else f"{case.parameters:,.0f}"
        raise ValueError(f"parameters is {given}; 'large-training' is for more than {rules.LARGE:,}: give that many, or use 'training'")
    if case.name == "training" and case.parameters is not None and case.parameters > rules.LARGE:
        raise ValueError(f"parameters is {case.parameters:,.0f}; 'training' is for up to {rules.LARGE:,}: use 'large-training'")
    if case.name == "short-sequences" and case.length >= rules.LONG:
        raise ValueError(f"length is {case.length}; 'short-sequences' is for fewer than {rules.LONG:,} positions: use 'training'")
