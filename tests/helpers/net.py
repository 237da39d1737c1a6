"""What a change of the inside must leave as it is, as one file: public signatures, choices of backends, keys of every state_dict.

    python -m tests.helpers.net          # writes tests/package/net.json; only where a change of these is meant, in the same commit

``tests/package/test_net.py`` compares.
"""

import importlib
import inspect
import itertools
import json
import re
from pathlib import Path
from typing import Any

import torch

from dilated_attention.factory import EXAMPLES, MODEL_PRESETS, create_attention, create_model, explain_backend
from dilated_attention.factory.create import KINDS
from dilated_attention.pattern import LocalWindow

FILE = Path(__file__).parents[1] / "package" / "net.json"
MODULES = ("", ".pattern", ".modules", ".models", ".distributed", ".testing", ".integrations.huggingface", ".integrations.torchscale")
# head dims that backends treat apart, and the options that decide
HEAD_DIMS = (16, 24, 48, 64, 96, 128, 192, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "grouped": {"num_kv_heads": 2},
    "padding": {"key_padding_mask": True},
    "window": {"window": True},
    "dropout": {"dropout_p": 0.1},
    "softcap": {"softcap": 30.0},
    "deterministic": {"deterministic": True},
    "short": {"length": 512},
    "blocks": {"block_size": 128},
    "blocks of 64, interval": {"block_size": 64, "block_masks": "interval"},
    "blocks, bits": {"block_size": 128, "block_masks": "bits"},
    "fp8": {"precision": "fp8", "needs_grad": False},
}


def signature_of(value: Any) -> dict[str, str]:
    """Returns parameter → default: those by place in their order, then those by keyword, sorted."""
    parameters: dict[str, str] = {}
    for parameter in sorted(inspect.signature(value).parameters.values(), key=lambda x: x.name if x.kind is x.KEYWORD_ONLY else ""):
        default = "required" if parameter.default is inspect.Parameter.empty else repr(parameter.default)
        mark = {"KEYWORD_ONLY": "", "VAR_KEYWORD": "**", "VAR_POSITIONAL": "*"}.get(parameter.kind.name, "by place ")
        parameters[f"{mark}{parameter.name}"] = re.sub(r" at 0x[0-9a-f]+", "", default)
    return parameters


def signatures() -> dict[str, dict[str, str]]:
    made = {}
    for module in MODULES:
        package = importlib.import_module(f"dilated_attention{module}")
        for name in sorted(package.__all__):
            value = getattr(package, name)
            if inspect.isfunction(value) or (inspect.isclass(value) and "__init__" in vars(value)):
                made[f"{module.lstrip('.')}.{name}".lstrip(".")] = signature_of(value)
                forward = getattr(value, "forward", None)
                if inspect.isclass(value) and issubclass(value, torch.nn.Module) and forward is not None:
                    made[f"{module.lstrip('.')}.{name}.forward".lstrip(".")] = signature_of(forward)
    return made


def choices() -> dict[str, str]:
    """Returns machine, dtype and option → the forward's and the backward's backend by head dim, equal ones joined."""
    made = {}
    for (machine, hardware), dtype, (option, how) in itertools.product(EXAMPLES.items(), DTYPES, OPTIONS.items()):
        taken = [explain_backend(hardware=hardware, dtype=dtype, head_dim=dim, **how) for dim in HEAD_DIMS]
        pairs = [f"{each.forward or '–'} | {each.backward or '–'}" for each in taken]
        groups = [(pair, [dim for dim, _ in group]) for pair, group in
                  itertools.groupby(zip(HEAD_DIMS, pairs, strict=True), key=lambda each: each[1])]  # fmt: skip
        made[f"{machine}, {str(dtype)[6:]}, {option}"] = "; ".join(f"{dims[0]}…{dims[-1]}: {pair}" for pair, dims in groups)
    return made


def keys_of(module: torch.nn.Module) -> list[str]:
    """Returns the keys with shapes, those of equal layers once."""
    state = module.state_dict()
    return [*sorted({f"{re.sub(r'(?<=[.])[0-9]+(?=[.])', 'N', key)} {tuple(x.shape)}" for key, x in state.items()}), f"{len(state)} in all"]


def state_keys() -> dict[str, list[str]]:
    made = {}
    branches = {"segment_lengths": [16, 64], "dilation_rates": [1, 2]}
    for kind in KINDS:
        own: dict[str, Any] = {"pattern": LocalWindow(20)} if "block_sparse" in kind else {}
        own |= branches if "dilated" in kind else {}
        own |= {"embed_dim": 32, "num_heads": 4} if "multihead" in kind else {}
        for label, more in {"": {}, " with options": {"sinks": True} | ({"num_kv_heads": 2, "rotary": True, "qk_norm": True}
                                                                       if "multihead" in kind else {"num_heads": 4})}.items():  # fmt: skip
            try:
                made[f"{kind}{label}"] = keys_of(create_attention(kind, **own, **more))
            except (TypeError, ValueError) as error:
                made[f"{kind}{label}"] = [f"{type(error).__name__}"]
    return made | {name: keys_of(create_model(name, device="meta")) for name in MODEL_PRESETS}


def net() -> dict[str, Any]:
    return {"signatures": signatures(), "choices": choices(), "state_dict keys": state_keys()}


if __name__ == "__main__":
    FILE.write_text(json.dumps(net(), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
