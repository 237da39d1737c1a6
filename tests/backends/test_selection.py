"""Backend selection for machines that are not here: pure Python on static facts, so any GPU can be asked about on a CPU."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention import BackendUnavailable, dilated_attention, explain_backend
from dilated_attention.backends import AttentionRequest, Registry, detect, hardware, refresh, registry
from dilated_attention.factory import EXAMPLES
from dilated_attention.functional.fused_layers import _has_kernels

BARE = {name: replace(hardware, packages=frozenset()) for name, hardware in EXAMPLES.items()}
HALF, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


LISTS: dict[str, Any] = {"hardware": EXAMPLES["hopper"], "head_dim": 128, "num_heads": 4, "num_kv_heads": 4, "blocks": (128, 128)}
# what tests/package/net.json has no choices of: without kernel packages, and lists of blocks. What is asked, the forward, the backward
EXPECTED: list[tuple[dict[str, Any], str, str]] = [
    *(({"hardware": BARE[machine], "dtype": dtype, "head_dim": head_dim, **flags}, forward, backward)
      for machine, dtype, head_dim, flags, forward, backward in (
        ("turing", HALF, 64, {}, "sdpa_efficient", "sdpa_efficient"),
        ("turing", HALF, 59, {}, "math", "math"),
        ("turing", BF16, 64, {}, "math", "math"),
        ("volta", F32, 64, {"deterministic": True}, "sdpa_efficient", "math"),
        ("ampere", BF16, 64, {}, "sdpa_flash", "sdpa_flash"),
        ("ampere", BF16, 64, {"key_mask": True}, "sdpa_efficient", "sdpa_efficient"),
        ("ada", HALF, 128, {"window": True}, "sdpa_flash", "sdpa_flash"),
        ("hopper", BF16, 48, {"shapes_repeat": True}, "sdpa_cudnn", "sdpa_cudnn"),
        ("hopper", BF16, 48, {}, "sdpa_flash", "sdpa_flash"),
        ("hopper", BF16, 64, {"dropout": True}, "math", "math"),
        ("hopper", F32, 64, {}, "sdpa_efficient", "sdpa_efficient"),
        ("hopper", F64, 64, {}, "math", "math"),
    )),
    *((LISTS | changes, forward, backward) for changes, forward, backward in (
        ({"blocks": (64, 64), "lse_grad": True}, "flash4", "triton"),
        ({"blocks": (64, 64), "num_kv_heads": 2, "dtype": HALF, "head_dim": 96}, "flash4", "triton"),
        ({"blocks": (64, 128)}, "flash4", "flash4"),
        ({"dtype": HALF, "head_dim": 64, "num_kv_heads": 2}, "flash4", "flash4"),
        ({"deterministic": True}, "flash4", "triton"),
        ({"key_mask": True}, "triton", "triton"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "forward", "backward"), EXPECTED)
def test_each_machine_takes_its_fastest_that_can(asked: dict[str, Any], forward: str, backward: str) -> None:
    request = AttentionRequest(**{"dtype": BF16} | asked)
    assert registry.select(request).name == forward and registry.select(replace(request, needs_grad=True)).name == backward


def test_a_named_backend_that_cannot_is_refused_with_every_reason_and_who_could() -> None:
    request = AttentionRequest(hardware=BARE["turing"], dtype=BF16, head_dim=59, key_mask=True, needs_grad=True, dropout=True)
    with pytest.raises(BackendUnavailable) as caught:
        registry.select(request, "flash4")
    text = str(caught.value)
    for reason in ("flash-attn-4 is not installed: pip install", "compute capability 8.0 to 12.1, the GPU has 7.5", "multiple of 8, not 59",
                   "takes no key_padding_mask", "no dropout by position", "could: math (backend='math' or 'auto')"):  # fmt: skip
        assert reason in text, reason


GRAD, NO_GRAD = {"needs_grad": True}, {"needs_grad": False}
EXACT, ON_HOPPER = {"needs_grad": True, "deterministic": True}, EXAMPLES["hopper"]
MANY = {"lse_grad": True, "deterministic": True, "block_masks": "interval"}
CAUSE = "its library does not load (libcudart.so.12: cannot open shared object file)"
# what a backend takes (no words), or the words of its only reason: what is asked of it, and changes of that
REASONS: list[tuple[str, dict[str, Any], list[tuple[dict[str, Any], str]]]] = [
    ("sdpa_cudnn", {}, [
        (GRAD, ""),
        ({"key_mask": True}, "takes no key_padding_mask"),
        (EXACT, "9.25"),
        (EXACT | {"hardware": replace(ON_HOPPER, cudnn_version=92600)}, ""),
        (EXACT | {"hardware": replace(ON_HOPPER, cudnn_version=None)}, "torch finds no cuDNN"),
    ]),
    *((name, {"bias": True}, [({}, "takes no bias by position or distance (math and tiles do)")]) for name in ("sdpa_flash", "flash3")),
    *((name, {"bias": True, "hardware": machine}, [({}, "")])
      for name, machine in (("tiles", EXAMPLES["hopper"]), ("math", EXAMPLES["cpu"]))),
    ("sdpa_efficient", {"dtype": F32}, [({"extent": 2**31 - 1}, ""), ({"extent": 2**31}, str(2**31))]),
    ("flash3_fp8", {"precision": "fp8"}, [
        ({"precision": "native"}, 'computes fp8 only, not native: precision="fp8"'),
        ({"hardware": EXAMPLES["ada"]}, "needs compute capability 9.0 to 9.0, the GPU has 8.9"),
        ({"hardware": replace(ON_HOPPER, packages=frozenset({"triton"}))}, "flash-attn-3-fp8 is not installed: pip install"),
        ({"dtype": F32}, "takes bfloat16, float16, not float32"),
        ({"head_dim": 72}, "head_dim must be a multiple of 16, not 72"),
    ]),
    ("xformers", {"hardware": replace(ON_HOPPER, packages=frozenset({"xformers"}))}, [
        *(({"dtype": dtype} | grad, "") for dtype in (BF16, HALF, F32) for grad in (GRAD, NO_GRAD)),
        *(({"dtype": dtype, "window": True} | grad, "") for dtype in (BF16, HALF) for grad in (GRAD, NO_GRAD)),
        *(({"dtype": F32, "window": True} | grad, "half precision only, not in float32") for grad in (GRAD, NO_GRAD)),
        ({"hardware": replace(ON_HOPPER, packages=frozenset(), unusable=(("xformers", CAUSE),))},
         f"xformers is installed and cannot be used: {CAUSE}"),
    ]),
    *((name, {"hardware": EXAMPLES["cpu"], "dtype": F32, "head_dim": 59, "key_mask": True} | GRAD,
       [({"blocks": blocks, "block_masks": masks}, "") for blocks in ((64, 64), (128, 64)) for masks in ("none", "interval", "bits")])
      for name in ("math", "sdpa_cpu")),
    ("triton", {"head_dim": 72, "blocks": (64, 128), "block_masks": "bits", "key_mask": True}, [
        ({}, ""),
        (GRAD | MANY, ""),
        ({"blocks": None}, "lists of blocks only"),
        ({"blocks": (32, 64)}, "64x64"),
        ({"window": True}, "window"),
        ({"dropout": True}, "dropout"),
        ({"dtype": F64}, "float64"),
        ({"head_dim": 264}, "256"),
        ({"hardware": BARE["hopper"]}, "triton is not installed"),
        ({"hardware": replace(ON_HOPPER, capability=(7, 5)), "dtype": HALF}, "8.0"),
        ({"hardware": replace(ON_HOPPER, capability=(8, 9)), "dtype": F32, "head_dim": 256}, "shared memory"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "asked", "changes"), REASONS, ids=[name for name, *_ in REASONS])
def test_a_backend_says_what_it_does_not_take(name: str, asked: dict[str, Any], changes: list[tuple[dict[str, Any], str]]) -> None:
    for change, words in changes:
        request = AttentionRequest(**{"hardware": ON_HOPPER, "dtype": BF16, "head_dim": 64} | asked | change)
        reasons = registry.get(name).reasons_against(request)
        assert len(reasons) == bool(words) and words in "".join(reasons), (change, reasons)


def test_sdpa_means_the_best_of_torchs_own() -> None:
    asked = AttentionRequest(hardware=BARE["hopper"], dtype=BF16, head_dim=64)
    # cuDNN plans every shape: where shapes repeat, or where one problem is as long as this
    assert registry.select(asked, "sdpa").name == registry.select(replace(asked, length=2**18), "sdpa").name == "sdpa_flash"
    assert registry.select(replace(asked, shapes_repeat=True), "sdpa").name == "sdpa_cudnn"
    assert registry.select(replace(asked, length=2**18, num_heads=16), "sdpa").name == "sdpa_cudnn"
    assert registry.select(AttentionRequest(hardware=BARE["hopper"], dtype=BF16, head_dim=256), "sdpa").name == "sdpa_flash"
    assert registry.select(AttentionRequest(hardware=BARE["cpu"], dtype=F32, head_dim=64), "sdpa").name == "sdpa_cpu"
    with pytest.raises(BackendUnavailable, match="sdpa_efficient: takes"):
        registry.select(AttentionRequest(hardware=BARE["hopper"], dtype=F64, head_dim=64), "sdpa")


def test_backend_that_lacks_only_the_backward_is_refused_before_the_forward_runs() -> None:
    with pytest.raises(BackendUnavailable, match="wrong gradients"):
        registry.select(AttentionRequest(hardware=EXAMPLES["hopper"], dtype=BF16, head_dim=48, needs_grad=True), "flash4")
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    with pytest.raises(BackendUnavailable, match="runs on cuda, not on cpu"):
        dilated_attention(q, q, q, [4], [1], backend="flash4")


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fresh = Registry()
    for name in ("sdpa_cpu", "math"):
        fresh.register(registry.get(name))
    request = AttentionRequest(hardware=detect("cpu"), dtype=F32, head_dim=64)
    with caplog.at_level("INFO", logger="dilated_attention"):
        for _ in range(3):
            fresh.select(request)
    assert [record.message for record in caplog.records] == [f"backend sdpa_cpu (chosen) for {request.describe()}"]
    with pytest.raises(ValueError, match="'math' is already registered"):
        fresh.register(registry.get("math"))


def test_explanation_of_what_nothing_can_do() -> None:
    explanation = explain_backend(hardware=BARE["cpu"], head_dim=512)
    assert explanation.forward is None
    assert "no backend can" in str(explanation)


@pytest.mark.parametrize("kind", ["cpu", "meta", "mps", "xpu"])
def test_devices_have_no_capability_where_there_is_no_cuda_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.capability(torch.device(kind)) is None


@pytest.fixture
def refreshed() -> Iterator[None]:
    yield
    refresh()


@pytest.mark.usefixtures("refreshed")
def test_what_is_installed_meanwhile_is_found_after_refresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> tuple[bool, ...]:
        cpu = torch.device("cpu")
        return "triton" in detect(cpu).packages, hardware.has_triton(cpu), _has_kernels(cpu), hardware.has_gluon()

    with monkeypatch.context() as before:
        before.setitem(hardware.PACKAGES, "triton", "installed_meanwhile")
        before.setattr(hardware, "_importable", lambda module, real=hardware._importable: "gluon" not in module and real(module))
        before.syspath_prepend(tmp_path)
        refresh()
        assert not any(found())
        time = tmp_path.stat().st_mtime_ns
        (tmp_path / "installed_meanwhile.py").touch()
        # of a coarse clock, by which the folder does not seem to have changed since it was listed
        os.utime(tmp_path, ns=(time, time))
        before.setattr(hardware, "_importable", lambda module, real=hardware._importable: "gluon" in module or real(module))
        assert not any(found())
        refresh()
        assert all(found())
