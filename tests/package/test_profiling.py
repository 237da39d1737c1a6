"""profile_memory: exact bytes by op on a CPU, also inside our own ops, what it refuses, and advice that follows from figures."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dilated_attention import DilatedPattern, attention, dilated_attention
from dilated_attention.engine.memory import attention_memory
from dilated_attention.engine.ops import op_hooks
from dilated_attention.models import LongNetConfig, LongNetEncoder
from dilated_attention.profiling import MemoryProfile, OpMemory, profile_memory
from dilated_attention.profiling.ledger import replay

# poisoned allocations are filled, which is an op more for each
pytestmark = pytest.mark.no_poison

MIB = 2**20
GIB = 2**30


def leaves(length: int = 1024, heads: int = 4, dim: int = 32, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(1, length, heads, dim, dtype=dtype, requires_grad=True) for _ in range(3)]


def op_of(profile: MemoryProfile, name: str) -> OpMemory:
    return next(op for op in profile.ops if op.name == name)


def floats(mib: int) -> int:
    return mib * MIB // 4


def test_every_byte_of_a_known_program() -> None:
    def program() -> None:
        a = torch.ones(floats(4))
        b = a + 1
        del a
        c = torch.cat([b, b])
        del b
        c.sum()

    profile = profile_memory(program, device="cpu")
    # b and c, as a has gone by then
    assert 12 * MIB <= profile.peak_allocated < 12 * MIB + 64
    assert profile.allocated_after == 0 and profile.allocated_before == 0
    ones, add, cat = (op_of(profile, f"aten::{name}") for name in ("ones", "add", "cat"))
    assert (ones.calls, ones.allocated, ones.at_peak) == (1, 4 * MIB, 0)
    # beside it the number 1 as a tensor
    assert 4 * MIB <= add.allocated < 4 * MIB + 64 and add.at_peak == 4 * MIB
    assert (cat.allocated, cat.peak, cat.kept, cat.at_peak) == (8 * MIB, 8 * MIB, 8 * MIB, 8 * MIB)
    assert profile.ops[0].name == "aten::cat"


def test_scratch_inside_a_kernel_is_seen() -> None:
    x = torch.randn(floats(2))
    profile = profile_memory(torch.sort, x, device="cpu")
    found = op_of(profile, "aten::sort")
    # values and int64 indices are its results, and torch's kernel takes memory beside them
    assert found.kept >= 6 * MIB and found.allocated > found.kept


def test_our_opaque_ops_are_seen_through() -> None:
    q, k, v = leaves()
    with profile_memory(device="cpu") as profile:
        dilated_attention(q, k, v, [256, 1024], [1, 4]).sum().backward()
    forward, backward = (op_of(profile, f"dilated_attention::dilated_attention{x}") for x in ("", "_backward"))
    size = q.numel() * 4
    lse = size // 32
    # out and lse; dq, dk, dv, of which the gradients are made
    assert forward.kept == size + lse and backward.kept == 3 * size
    assert forward.peak > forward.kept and backward.peak > backward.kept
    assert profile.allocated_after == 3 * size


@pytest.mark.parametrize("causal", [False, True])
def test_the_engines_own_account_is_what_is_measured(causal: bool) -> None:
    q, k, v = leaves(4096, 4, 64)
    dout = torch.randn_like(q)
    with profile_memory(device="cpu") as profile:
        out = dilated_attention(q, k, v, [1024, 4096], [1, 4], is_causal=causal)
        torch.autograd.grad(out, (q, k, v), dout)
    estimate = attention_memory(DilatedPattern((1024, 4096), (1, 4)), 4096, 4, 64, is_causal=causal)
    measured = profile.peak_allocated + estimate.inputs + dout.numel() * 4
    assert 0.9 < estimate.peak / measured < 1.1
    assert [(call.op, call.pass_name, count) for call, count in profile.seen] == [
        ("dilated_attention", "forward", 1),
        ("dilated_attention", "backward", 1),
    ]
    assert profile.seen[0][0].bytes_at() == estimate.peak


def test_both_forms_say_the_same() -> None:
    q, k, v = (x.detach() for x in leaves())
    called = profile_memory(attention, q, k, v, device="cpu", is_causal=True)
    with profile_memory(device="cpu") as block:
        attention(q, k, v, is_causal=True)
    assert called.peak_allocated == block.peak_allocated and called.ops == block.ops
    text = str(block)
    assert "dilated_attention::dilated_attention" in text and "MiB" in text
    assert json.loads(json.dumps(called.as_dict()))["ops"][0]["name"] == called.ops[0].name
    # what a CPU does not report is None, not 0
    assert called.fragmentation is None and called.peak_reserved is None and called.as_dict()["stats"] == {}


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ops=False on the CPU"):
        profile_memory(device="cpu", ops=False)
    with pytest.raises(ValueError, match="device is meta"):
        profile_memory(device="meta")
    with pytest.raises(TypeError, match="without a function"):
        profile_memory(device="cpu", tokens=3)
    block = profile_memory(device="cpu")
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(RuntimeError, match=r"torch\.profiler is already running"),
        block,
    ):
        pass
    assert not op_hooks.watchers


def test_an_error_passes_through_and_the_figures_stay() -> None:
    with pytest.raises(ZeroDivisionError), profile_memory(device="cpu") as profile:
        x = torch.ones(floats(3))
        _ = 1 / 0
    assert profile.peak_allocated >= 3 * MIB and x.numel() == floats(3)
    assert not op_hooks.watchers and not torch._C._autograd._profiler_enabled()


def test_a_profile_holds_no_tensors() -> None:
    q, k, v = leaves()
    with profile_memory(device="cpu") as profile:
        out = dilated_attention(q, k, v, [256, 1024], [1, 4])
        out.sum().backward()
    gone = [weakref.ref(x) for x in (q, out)]
    del q, k, v, out
    assert profile.seen and not any(ref() is not None for ref in gone)


def advised(profile: MemoryProfile, words: str) -> list[str]:
    return [text for text in profile.advice() if words in text]


@pytest.mark.slow
def test_advice_about_gradients() -> None:
    q, k, v = leaves()
    wide = profile_memory(lambda: dilated_attention(q, k, v, [256, 1024], [1, 4]).sum().backward(), device="cpu")
    assert not advised(wide, "torch.no_grad()")
    kept = profile_memory(lambda: dilated_attention(q, k, v, [256, 1024], [1, 4]), device="cpu")
    assert advised(kept, "torch.no_grad()")
    with torch.no_grad():
        assert not advised(profile_memory(lambda: dilated_attention(q, k, v, [256, 1024], [1, 4]), device="cpu"), "torch.no_grad()")


@pytest.mark.slow
def test_advice_about_activations_is_followed() -> None:
    config = LongNetConfig(embed_dim=64, num_heads=2, num_layers=6, segment_lengths=(256, 1024), dilation_rates=(1, 4), is_causal=False)
    peaks = {}
    for checkpoint in (False, True):
        torch.manual_seed(0)
        model = LongNetEncoder(config, checkpoint_activations=checkpoint)
        x = torch.randn(1, 2048, 64)
        step: Callable[[], None] = lambda model=model, x=x: model(x).sum().backward()  # noqa: E731
        step()
        profile = profile_memory(step, device="cpu")
        peaks[checkpoint] = profile.peak_allocated
        assert bool(advised(profile, "checkpoint_activations=True")) is not checkpoint
    assert peaks[True] < 0.8 * peaks[False]


def gpu_profile(**changes: object) -> MemoryProfile:
    """A profile with these figures, as if measured."""
    profile = MemoryProfile(torch.device("cuda:0"), by_op=False)
    figures = {
        "peak_allocated": 10 * GIB, "allocated_before": GIB, "allocated_after": GIB, "peak_reserved": 11 * GIB,
        "stats": {}, "ops": (), "seen": (),
    }  # fmt: skip
    vars(profile).update(figures | changes)
    return profile


def test_advice_about_a_gpu_speaks_only_where_figures_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert gpu_profile().advice() == []
    assert gpu_profile().fragmentation == pytest.approx(1.1)
    split = gpu_profile(peak_reserved=15 * GIB)
    (text,) = split.advice()
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text and "15.00 GiB" in text and "10.00 GiB" in text and "1.50" in text
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert split.advice() == []


def test_the_page_has_what_was_measured_of_fragmentation() -> None:
    root = Path(__file__).parents[2]
    rows = [json.loads(line) for line in (root / "benchmarks/results/2026-11-21-h200/fragmentation.jsonl").read_text().splitlines()]
    page = (root / "docs/memory.md").read_text()
    by_setting: dict[str, dict[str, float]] = {}
    for row in rows:
        ratio = row["peak_reserved"] / row["peak_allocated"]
        assert ratio == pytest.approx(row["fragmentation"])
        by_setting.setdefault(row["setting"], {})[row["kind"]] = ratio
    columns = ("torch's own", "longest first", "expandable", "sizes to 1/4", "both, 1/4")
    for kind in by_setting["expandable"]:
        cells = " | ".join(f"{by_setting[name][kind]:.2f}" for name in columns)
        assert f"| {cells} |" in page, (kind, cells)
    assert max(by_setting["expandable"].values()) < 1.2


def node(name: str, start: int, *children: SimpleNamespace, size: int = 0, address: int = 0) -> SimpleNamespace:
    """Of a profile's event tree."""
    fields = SimpleNamespace(alloc_size=size, ptr=address, device=torch.device("cpu"))
    return SimpleNamespace(name=name, start_time_ns=start, end_time_ns=start + 5, extra_fields=fields, children=list(children))


def test_a_free_that_nobody_told_is_found_where_its_address_is_used_again() -> None:
    op = [node("aten::mul", 10 * i, node("[memory]", 10 * i + 1, size=100, address=7)) for i in range(50)]
    ops, peak, end = replay([*op, node("aten::add", 900, node("[memory]", 901, size=30, address=8))], torch.device("cpu"), 5)
    assert (peak, end) == (135, 135)
    assert {found.name: found.at_peak for found in ops} == {"aten::mul": 100, "aten::add": 30}


def test_the_counters_of_a_gpu_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's path, on a CPU: torch's functions return what an allocator would."""
    counters = [f"{kind}_bytes.all.{what}" for kind in ("allocated", "reserved") for what in ("current", "peak")]
    counters += ["num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free"]
    readings = iter([{name: i for i, name in enumerate(counters)}, {name: 100 + 2 * i for i, name in enumerate(counters)}])
    fakes = {"memory_stats": lambda _: next(readings)}
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        fakes[name] = lambda *_, **__: None
    for name, fake in fakes.items():
        monkeypatch.setattr(f"torch.cuda.{name}", fake)
    profile = profile_memory(lambda: None, device="cuda:0", ops=False)
    assert (profile.allocated_before, profile.allocated_after, profile.peak_allocated) == (0, 100, 102)
    assert profile.peak_reserved == 106
    assert profile.stats == {"retries": 104, "refused": 105, "device_allocs": 106, "device_frees": 107}
    assert "retried 104, was refused 105" in str(profile)
