"""profile_memory: exact bytes by op on a CPU, also inside our own ops, what it refuses, and advice that follows from figures."""

import json
import weakref

import pytest
import torch

from dilated_attention import attention, dilated_attention, profile_memory
from dilated_attention.models import LongNetConfig, LongNetEncoder
from dilated_attention.profiling import MemoryProfile, OpMemory

# poisoned allocations are filled, which is an op more for each
pytestmark = pytest.mark.no_poison

MIB, GIB = 2**20, 2**30


def leaves(length: int = 1024, heads: int = 4, dim: int = 32) -> list[torch.Tensor]:
    return [torch.randn(1, length, heads, dim, requires_grad=True) for _ in range(3)]


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
    assert (cat.allocated, cat.kept, cat.at_peak) == (8 * MIB, 8 * MIB, 8 * MIB) and profile.ops[0] is cat


def test_our_opaque_ops_are_seen_through() -> None:
    q, k, v = leaves()
    with profile_memory(device="cpu") as profile:
        dilated_attention(q, k, v, [256, 1024], [1, 4]).sum().backward()
    forward, backward = (op_of(profile, f"dilated_attention::dilated_attention{x}") for x in ("", "_backward"))
    size = q.numel() * 4
    # out and lse; dq, dk, dv, of which the gradients are made; and scratch inside
    assert forward.kept == size + size // 32 and backward.kept == 3 * size
    assert forward.allocated > forward.kept and backward.allocated > backward.kept
    assert profile.allocated_after == 3 * size


def test_both_forms_say_the_same_and_hold_no_tensors() -> None:
    q, k, v = (x.detach() for x in leaves())
    called = profile_memory(attention, q, k, v, device="cpu", is_causal=True)
    with profile_memory(device="cpu") as block:
        out = attention(q, k, v, is_causal=True)
    gone = [weakref.ref(x) for x in (q, out)]
    del q, k, v, out
    assert not any(ref() is not None for ref in gone)
    assert called.peak_allocated == block.peak_allocated and called.ops == block.ops
    assert "dilated_attention::dilated_attention" in str(block) and "MiB" in str(block)
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
    with pytest.raises(TypeError, match="function is a int; expected a function"):
        profile_memory(3)  # type: ignore[arg-type]
    block = profile_memory(device="cpu")
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(RuntimeError, match=r"torch\.profiler is already running"),
        block,
    ):
        pass


def test_an_error_passes_through_and_the_figures_stay() -> None:
    with pytest.raises(ZeroDivisionError), profile_memory(device="cpu") as profile:
        x = torch.ones(floats(3))
        _ = 1 / 0
    assert profile.peak_allocated >= 3 * MIB and x.numel() == floats(3)
    assert not torch._C._autograd._profiler_enabled()


@pytest.mark.slow
def test_advice_about_activations_is_followed() -> None:
    config = LongNetConfig(embed_dim=64, num_heads=2, num_layers=6, segment_lengths=(256, 1024), dilation_rates=(1, 4), is_causal=False)
    peaks = {}
    for checkpoint in (False, True):
        model = LongNetEncoder(config, checkpoint_activations=checkpoint)
        x = torch.randn(1, 2048, 64)
        model(x).sum().backward()
        profile = profile_memory(lambda model=model, x=x: model(x).sum().backward(), device="cpu")
        peaks[checkpoint] = profile.peak_allocated
        assert any("checkpoint_activations=True" in text for text in profile.advice()) is not checkpoint
    assert peaks[True] < 0.8 * peaks[False]


def test_the_counters_of_a_gpu_are_read_and_advised_on(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert profile.peak_reserved == 106 and profile.advice() == []
    assert profile.stats == {"retries": 104, "refused": 105, "device_allocs": 106, "device_frees": 107}
    assert "retried 104, was refused 105" in str(profile)
    profile.peak_allocated, profile.peak_reserved = 10 * GIB, 15 * GIB
    (text,) = profile.advice()
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text and "15 GiB" in text and "10 GiB" in text and "1.50" in text
