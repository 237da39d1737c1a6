"""The public names are listed once, and importing the package needs nothing but torch and einops."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import get_type_hints

import dilated_attention
from dilated_attention.pattern import LocalWindow

# pinned, with their signatures, by net.json (test_net.py); exceptions have none
PUBLIC = dilated_attention.__all__


def test_every_public_name_is_there_and_documented() -> None:
    assert "BackendUnavailable" in PUBLIC
    for name in PUBLIC:
        assert len(getattr(dilated_attention, name).__doc__ or "") > 60, name


def test_planning_profiling_and_the_compiler_are_imported_when_they_are_used() -> None:
    code = """
import sys, dilated_attention
later = ("dilated_attention.planning", "dilated_attention.profiling", "dilated_attention.cli")
assert not [name for name in sys.modules if name.startswith(later)]
# the compiler's import takes as long as the rest
assert "torch._dynamo" not in sys.modules
assert {"recommend", "profile_memory", "plan_model"} <= set(dir(dilated_attention))
from dilated_attention import plan_attention, profile_memory, recommend
from dilated_attention.planning import plan_attention as same
assert plan_attention is same is dilated_attention.plan_attention
try:
    dilated_attention.plan
except AttributeError as error:
    assert "'plan'" in str(error)
else:
    raise SystemExit("plan is no name of the package")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_plain_installation_imports_computes_and_has_its_commands(tmp_path: Path) -> None:
    code = f"""
import sys
class Block:
    blocked = {{'matplotlib', 'safetensors', 'triton', 'flash_attn', 'flash_attn_interface', 'xformers', 'transformers'}}
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in self.blocked or name in self.blocked:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
import torch, dilated_attention
q = torch.randn(1, 20, 2, 8, requires_grad=True)
dilated_attention.dilated_attention(q, q, q, [5, 20], [1, 2]).sum().backward()
print(dilated_attention.explain_backend().forward)
assert 'triton' in dilated_attention.list_backends()
try:
    dilated_attention.DilatedPattern([4], [1]).show()
except ImportError as error:
    print(error)
# of these, an import fails and find_spec finds nothing
sys.modules.update(dict.fromkeys(("matplotlib", "tensorboard", "tqdm", "transformers")))
from dilated_attention.cli import main
for arguments in (
    ["info"],
    ["show", "longnet-tiny"],
    ["show", "dilated", "--segment-lengths", "8", "32", "--dilation-rates", "1", "4", "--length", "32"],
    ["plan", "dense", "--length", "1k"],
    ["recommend", "encoder", "--length", "64k"],
    ["bench"],
):
    assert main(arguments) == 0, arguments
# a dependency, which only saving imports
Block.blocked.remove('safetensors')
model = dilated_attention.create_model("longnet-tiny")
model.save_pretrained({str(tmp_path / "model")!r})
type(model).from_pretrained({str(tmp_path / "model")!r})
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[:2] == [
        "sdpa_cpu",
        'drawing a pattern needs matplotlib: pip install "dilated-attention[plot]"',
    ]
    assert "python -m benchmarks" in result.stdout


def constructor(name: str) -> Any:
    value = getattr(dilated_attention, name)
    return value.__init__ if inspect.isclass(value) else value


WITH_OPTIONS = sorted(name for name in PUBLIC if "options" in getattr(constructor(name), "__annotations__", {}))


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_options_are_shown_completed_and_refused_by_name(name: str) -> None:
    """help() shows every option with its default, type checkers know the same ones, and a wrong one is told which there are."""
    assert len(WITH_OPTIONS) == 25
    value = getattr(dilated_attention, name)
    parameters = inspect.signature(value).parameters
    keywords = {key for key, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
    assert not [parameter for parameter in parameters.values() if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    (options,) = get_type_hints(constructor(name), include_extras=True)["options"].__args__
    assert set(get_type_hints(options)) <= keywords
    assert all(f"{key}: '" in str(inspect.signature(value)) for key in keywords)
    assert {key for key in keywords if parameters[key].default is inspect.Parameter.empty} <= {"query_rows"}
    given: dict[str, Any] = {"segment_lengths": [4], "dilation_rates": [4], "pattern": LocalWindow(4)}
    # an unknown name is refused before any tensor is looked at
    needed = {key: given.get(key) for key, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    with pytest.raises(TypeError) as error:
        value(**needed, is_casual=True)
    assert str(error.value).startswith(f"{name}() got an unexpected keyword argument 'is_casual'; it accepts ")
    assert set(str(error.value).partition("it accepts ")[2].split(", ")) == keywords


def test_options_that_belong_elsewhere_are_refused_by_name_and_say_where() -> None:
    q = torch.zeros(1, 4, 2, 8)
    core = dilated_attention.DilatedAttention([4], [1])
    layer = dilated_attention.MultiheadDilatedAttention(16, 2, [4], [1])
    for call, text in [
        (
            lambda: dilated_attention.attention(q, q, q, enable_gqa=True),
            r"'enable_gqa' \(key and value heads that are fewer .*; it accepts",
        ),
        (lambda: dilated_attention.attention(q, q, q, attn_mask=None), r"'attn_mask' \(here is_causal, window"),
        (lambda: core(q, q, q, softcap=2.0), r"DilatedAttention.forward\(\) got an unexpected keyword argument 'softcap'; it accepts"),
        (lambda: core(q, q, q, scale=2.0), r"'scale' \(an option of the constructor: DilatedAttention\(…, scale=…\)\)"),
        (
            lambda: layer(q.flatten(2), bias=None),
            r"'bias' \(an option of the constructor: MultiheadDilatedAttention\(…, bias=…\), of its projections; a bias of scores is",
        ),
        (lambda: core(q, q, q, bias=None), r"'bias' \(a bias of scores is an option of functions: dilated_attention\(…, bias=…\)\); "),
        (lambda: layer(q.flatten(2), sinks=q), r"'sinks' \(an option of the constructor"),
        (lambda: layer(q.flatten(2), seq_len=4), r"MultiheadDilatedAttention.forward\(\) got an unexpected keyword argument 'seq_len'; "),
    ]:
        with pytest.raises(TypeError, match=text):
            call()
