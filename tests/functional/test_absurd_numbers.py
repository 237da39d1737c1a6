"""Numbers that no sequence, head or machine has, and tensors that are no plain ones: refused by name at once, or answered right."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from dilated_attention import (
    DilatedAttention,
    MultiheadDilatedAttention,
    attention,
    balanced_layout,
    block_sparse_attention,
    block_sparse_dilated_attention,
    dilated_attention,
    explain_backend,
    explain_decode,
    local_positions,
    ring_attention,
    ring_block_sparse_attention,
    ring_block_sparse_dilated_attention,
    ring_dilated_attention,
)
from dilated_attention.cli import main
from dilated_attention.distributed import explain_exchange
from dilated_attention.models import (
    KVCache,
    LongNetConfig,
    LongNetLM,
    PagedKVCache,
    Sampling,
    SlideEncoderConfig,
    VisionConfig,
)
from dilated_attention.models.images.positions import grid_positions
from dilated_attention.pattern import BigBird, DilatedPattern, LocalWindow, RandomBlocks, Sparsity
from dilated_attention.planning import plan_attention, recommend

HUGE = (2**63, 10**24, 10**400, 10**5000)
DILATED = ["--segment-lengths", "2048", "8192", "--dilation-rates", "1", "4"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["plan", "dense", "--gpu", "H200", "--length", str(10**24)], "--length"),
        (["plan", "dilated", *DILATED, "--gpu", "H200", "--length", "9999999999G"], "--length"),
        (["plan", "dense", "--gpu", "H200", "--length", "9" * 5000], "--length"),
        (["plan", "dense", "--gpu", "H200", "--length", "65536", "--heads", "1000000"], "heads"),
        (["plan", "ring", "--gpu", "H200", "--length", "65536", "--heads", "1000000", "--world-size", "4"], "num_heads"),
        (["plan", "dense", "--gpu", "H200", "--length", "65536", "--batch", str(2**62)], "batch_size"),
        (["plan", "ring", "--gpu", "H200", "--length", "65536", "--world-size", "1000000000"], "world_size"),
        (["plan", "llama-1b", "--gpu", "H200", "--length", str(2**62)], "num_positions"),
        (["recommend", "training", "--gpu", "H200", "--length", "65536", "--gpus", "1000000000"], "gpus"),
        (["recommend", "huggingface", "--gpu", "H200", "--length", "65536", "--heads", "1000000"], "heads"),
        (["show", "dilated", *DILATED, "--length", str(2**31)], "--length"),
        (["show", "dilated", *DILATED, "--length", str(10**24)], "--length"),
        (["show", "block_sparse", "--window", "128", "--length", str(2**40)], "--length"),
        (["show", "block_sparse", "--window", "128", "--heads", str(2**31)], "--heads"),
        (["show", "block_sparse", "--window", "128", "--heads", "1" + "0" * 400], "--heads"),
        (["show", "block_sparse", "--density", "nan"], "ratio"),
    ],
)
def test_a_command_ends_with_2_and_the_arguments_name(arguments: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert time.process_time() - began < 5
    error = capsys.readouterr().err
    assert flag in error.splitlines()[-1]


@pytest.mark.parametrize("huge", HUGE[:3], ids=["2**63", "10**24", "10**400"])
def test_a_window_beyond_the_sequence_is_unbounded(huge: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 24, 2, 8)
    assert torch.equal(attention(q, q, q, window=huge), attention(q, q, q))
    assert torch.equal(attention(q, q, q, window=(huge, 2)), attention(q, q, q, window=(None, 2)))
    assert LocalWindow(huge) == LocalWindow((None, None))
    assert torch.equal(block_sparse_attention(q, q, q, LocalWindow(huge)), block_sparse_attention(q, q, q, LocalWindow(24)))


@pytest.mark.parametrize("huge", HUGE, ids=["2**63", "10**24", "10**400", "10**5000"])
def test_huge_integers_are_refused_by_name(huge: int) -> None:
    q = torch.randn(1, 16, 2, 8)
    pattern, big_bird = DilatedPattern((8, 16), (1, 2)), BigBird(4, 1, 1)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("segment_lengths", lambda: dilated_attention(q, q, q, [huge], [1])),
        ("dilation_rates", lambda: dilated_attention(q, q, q, [8], [huge])),
        ("head_offsets", lambda: dilated_attention(q, q, q, [8], [2], head_offsets=[[huge, 0]])),
        ("query_offset", lambda: attention(q, q, q, query_offset=huge)),
        ("dropout_p", lambda: attention(q, q, q, dropout_p=huge)),
        ("scale", lambda: attention(q, q, q, scale=huge if huge > 10**100 else float("inf"))),
        ("num_positions", lambda: pattern.pairs(huge)),
        ("num_positions", lambda: pattern.coverage(huge)),
        ("num_positions", lambda: big_bird.pairs(huge)),
        ("num_heads", lambda: pattern.pairs(16, huge)),
        ("num_heads", lambda: big_bird.pairs(16, huge)),
        ("num_heads", lambda: big_bird.dense_mask(16, 16, huge)),
        ("num_queries", lambda: pattern.dense_mask(huge, 16, 2)),
        ("head_dim", lambda: pattern.flops(16, 2, huge)),
        ("num_positions", lambda: plan_attention("dense", num_positions=huge, num_heads=4, head_dim=64, gpu="H200")),
        ("num_heads", lambda: plan_attention("dense", num_positions=16, num_heads=huge, head_dim=64, gpu="H200")),
        ("memory", lambda: plan_attention("dense", num_positions=16, num_heads=4, head_dim=64, gpu="H200", memory=huge)),
        ("gpus", lambda: recommend("training", 65536, gpus=huge, gpu="H200")),
        ("parameters", lambda: recommend("training", 65536, parameters=huge, gpu="H200")),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=name) as caught:
            call()
        assert len(str(caught.value)) < 600, name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308, Fraction(3, 2), True, "16", None, 1.5, torch.ones(2)])
def test_what_is_no_integer_is_refused_by_name(value: object) -> None:
    q = torch.randn(1, 16, 2, 8)
    with pytest.raises((TypeError, ValueError), match="segment_lengths"):
        dilated_attention(q, q, q, [value], [1])
    with pytest.raises((TypeError, ValueError), match="query_offset"):
        attention(q, q, q, query_offset=value)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match="num_positions"):
        DilatedPattern((8,), (1,)).pairs(value)  # type: ignore[arg-type]


def _odd(x: torch.Tensor) -> dict[str, tuple[torch.Tensor, str]]:
    return {
        "COO": (x.to_sparse(), "to_dense"),
        "CSR": (x.reshape(-1, x.shape[-1]).to_sparse_csr(), "to_dense"),
        "jagged": (torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged), "cu_seqlens"),
        "nested": (torch.nested.nested_tensor([x[0], x[0]]), "cu_seqlens"),
    }


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_no_plain_ones_are_refused_with_a_way_out() -> None:
    q, mask = torch.randn(2, 64, 2, 8), torch.zeros(2, 64, dtype=torch.bool)
    calls: tuple[Callable[..., Any], ...] = (
        attention,
        lambda q, k, v, **options: dilated_attention(q, k, v, [16], [2], **options),
        lambda q, k, v, **options: block_sparse_attention(q, k, v, LocalWindow(16), **options),
    )
    for call in calls:
        for place, name in enumerate("qkv"):
            for kind, (odd, way_out) in _odd(q).items():
                tensors = [q, q, q]
                tensors[place] = odd
                with pytest.raises(TypeError, match=rf"{name} is a .*{way_out}"):
                    call(*tensors)
                assert kind
        quantised = torch.quantize_per_tensor(q, 0.1, 0, torch.qint8)
        with pytest.raises(TypeError, match=r"q is a quantised tensor.*dequantize"):
            call(quantised, quantised, quantised)
        with pytest.raises(TypeError, match=r"key_padding_mask is a sparse tensor.*to_dense"):
            call(q, q, q, key_padding_mask=mask.to_sparse())


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["show", "block_sparse", "--density", "0.2", "--density-kind", "x"], "kind"),
        (["plan", "dense", "--gpu", "X9", "--length", "65536"], "gpu"),
    ],
)
def test_names_are_refused_as_the_function_does(arguments: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert f"error: {flag}" in capsys.readouterr().err


@pytest.mark.timeout(60)
@pytest.mark.parametrize("blocks", ["1k", "2147483648", str(2**62)])
def test_more_random_blocks_than_there_are_keep_all_that_are_left(blocks: str, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    assert main(["show", "block_sparse", "--window", "64", "--random-blocks", blocks, "--json"]) == 0
    assert time.process_time() - began < 5
    # a row has a block in its window, so seven are left of eight
    assert json.loads(capsys.readouterr().out)["pairs"] == BigBird(64, 0, 7).pairs(1024, 4)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_ring_of_64_is_planned_in_seconds() -> None:
    began = time.process_time()
    assert main(["plan", "ring", "--length", "65536", "--gpu", "H200", "--world-size", "64"]) == 0
    assert time.process_time() - began < 10


@pytest.mark.parametrize("value", [torch.zeros(2, dtype=torch.bool), 3, object(), np.int64(3)], ids=["tensor", "int", "object", "numpy"])
def test_flags_and_names_of_another_type_are_refused_by_name(value: Any) -> None:
    dilated, window = DilatedPattern((8, 16), (1, 2)), LocalWindow(4)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("is_causal", lambda: dilated.pairs(16, is_causal=value)),
        ("is_causal", lambda: dilated.dense_mask(16, 16, 1, is_causal=value)),
        ("is_causal", lambda: dilated.coverage(16, is_causal=value)),
        ("is_causal", lambda: window.pairs(16, is_causal=value)),
        ("is_causal", lambda: window.dense_mask(16, 16, 1, is_causal=value)),
        ("is_causal", lambda: RandomBlocks(0.5).pairs(16, is_causal=value)),
        ("own_block", lambda: RandomBlocks(0.5, own_block=value)),
        ("gpu", lambda: plan_attention("dense", num_positions=16, num_heads=4, head_dim=64, gpu=value)),
        ("find_longest", lambda: plan_attention("dense", num_positions=16, num_heads=4, head_dim=64, gpu="H200", find_longest=value)),
        ("gpu", lambda: recommend("training", 65536, gpu=value)),
        ("config", lambda: LongNetLM(value)),
    ]
    for name, call in calls:
        with pytest.raises(TypeError, match=name):
            call()


@pytest.mark.parametrize("value", [2**63, -1, float("nan"), 10**400])
def test_a_length_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="seq_len"):
        local_positions(None, value)


def test_a_list_nested_without_end_is_shown_by_its_beginning() -> None:
    deep: Any = []
    for _ in range(3000):
        deep = [deep]
    q = torch.randn(1, 16, 2, 8)
    for name, call in (
        ("backend", lambda: attention(q, q, q, backend=deep)),
        ("pattern", lambda: block_sparse_attention(q, q, q, deep)),
        ("layout", lambda: plan_attention("dense", num_positions=16, num_heads=4, head_dim=64, gpu="H200", layout=deep)),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            call()


def test_a_seed_of_numpy_is_that_of_python() -> None:
    q = torch.randn(1, 300, 2, 8)
    assert torch.equal(
        block_sparse_attention(q, q, q, Sparsity(0.5, seed=np.int64(3))), block_sparse_attention(q, q, q, Sparsity(0.5, seed=3))
    )


WINDOW = LocalWindow(16)
ATTENTIONS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "dilated": lambda q, k, v, **options: dilated_attention(q, k, v, [16], [2], **options),
    "blocks": lambda q, k, v, **options: block_sparse_attention(q, k, v, WINDOW, **options),
    "union": lambda q, k, v, **options: block_sparse_dilated_attention(q, k, v, [16], [2], WINDOW, **options),
    "ring": ring_attention,
    "ring_dilated": lambda q, k, v, **options: ring_dilated_attention(q, k, v, [16], [2], **options),
    "ring_blocks": lambda q, k, v, **options: ring_block_sparse_attention(q, k, v, WINDOW, **options),
    "ring_union": lambda q, k, v, **options: ring_block_sparse_dilated_attention(q, k, v, [16], [2], WINDOW, **options),
}


def _with_gradients(call: Callable[..., Any], dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(1, 64, 2, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]
    out = call(*x, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_softcap_is_computed_right_or_refused(name: str) -> None:
    call = ATTENTIONS[name]
    for cap in (1.2e-38, 1e-30, 1, np.float64(50), 2**70, 1e31):
        mine, truth = (_with_gradients(call, dtype, softcap=cap) for dtype in (torch.float32, torch.float64))
        for x, y in zip(mine, truth, strict=True):
            assert float((x - y).abs().max()) < 1e-5, cap
    for cap in (0.0, -0.0, -1, 1e-39, 1e-46, 5e-324, 1.1e31, 1e39, 10**400, float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="softcap is"):
            _with_gradients(call, torch.float32, softcap=cap)
    # the quotient that kernels multiply q·k by
    with pytest.raises(ValueError, match="softcap is 1e-30 and scale is 1e"):
        _with_gradients(call, torch.float32, softcap=1e-30, scale=1e10)
    for wrong in (True, "50", [50.0], torch.tensor(50.0), 1j, np.bool_(True)):
        with pytest.raises(TypeError, match="softcap is"):
            _with_gradients(call, torch.float32, softcap=wrong)


CONFIG: dict[str, Any] = {"vocab_size": 16, "embed_dim": 16, "num_layers": 1, "num_heads": 2, "attention": "dense"}
ENCODER = LongNetConfig(embed_dim=16, num_layers=1, num_heads=2, attention="dense", is_causal=False, positions="none")


def _multihead(**options: Any) -> Any:
    return MultiheadDilatedAttention(16, 2, [16], [2], **options)


# by argument: what takes it, and numbers of its type that it refuses
REFUSED: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("gamma_init", _multihead, (0.0, 1e-20, 1e-46, 1e20, 1e39, 2**64)),
    ("layer_norm_eps", _multihead, (0.0, 1e-39, 1e-46, 5e-324, 1e39, 10**400)),
    ("layer_norm_eps", lambda **options: LongNetConfig(**CONFIG, **options), (0.0, 1e-39, 1e-46, 5e-324, 1e39, 10**400)),
    ("norm_eps", lambda **options: SlideEncoderConfig(encoder=ENCODER, **options), (0.0, 1e-46, 1e39)),
    ("norm_eps", lambda **options: VisionConfig(encoder=ENCODER, **options), (0.0, 1e-46, 1e39)),
    ("rotary_base", lambda **options: _multihead(rotary=True, **options), (1, 0.5, -2.0, 10**400)),
    ("xpos_scale_base", lambda **options: _multihead(rotary=True, **options), (0.0, -1, 10**400)),
    ("temperature", Sampling, (-1e-46, -1, 1e39, 1e308, 10**400)),
    ("top_p", Sampling, (0.0, -0.0, 1.0000001, 2, 1e39)),
    ("head_dim", explain_backend, (0, 2**63)),
    ("num_heads", explain_backend, (0, 2**21)),
    ("num_kv_heads", explain_backend, (0, 3)),
    ("dropout_p", explain_backend, (1, -0.1, 1e39)),
    ("softcap", explain_backend, (0.0, 1e39, 1e-46)),
    ("num_positions", lambda **options: explain_backend(pattern=DilatedPattern((8,), (1,)), **options), (0, 2**63)),
    ("head_dim", explain_decode, (0, 2**63)),
    ("num_heads", explain_decode, (0, 2**21)),
    ("size", lambda **options: explain_exchange(64, num_heads=2, **options), (0, -1, 2**21)),
    ("itemsize", lambda **options: explain_exchange(64, 2, num_heads=2, **options), (0, -1)),
    ("num_heads", lambda **options: DilatedAttention([8], [1], sinks=True, **options), (0, 2**21, 2**62)),
    ("world_size", lambda **options: balanced_layout(WINDOW, 64, **options), (0, 2**21, 2**62)),
    ("num_requests", lambda **options: KVCache(LongNetConfig(**CONFIG), max_length=8, **options), (0, 2**21, 2**62)),
    ("num_pages", lambda **options: PagedKVCache(LongNetConfig(**CONFIG), 1, 8, **options), (0, 2**31, 2**62)),
    ("page_size", lambda **options: PagedKVCache(LongNetConfig(**CONFIG), 1, 8, **options), (0, 2**31, 2**62)),
    ("grid_size", lambda **options: grid_positions(torch.zeros(1, 2), 16, **options), (0, -1, 2**31)),
    ("embed_dim", lambda **options: grid_positions(torch.zeros(1, 2), **options), (0, 6, 2**31)),
]


@pytest.mark.parametrize(("name", "call", "numbers"), REFUSED)
def test_a_number_that_cannot_be_computed_with_is_refused_by_name(name: str, call: Callable[..., Any], numbers: tuple[Any, ...]) -> None:
    for number in (*numbers, float("nan"), float("inf"), -float("inf"), True, torch.tensor(True), "1", [1], 1j):
        with pytest.raises((TypeError, ValueError), match=name):
            call(**{name: number})


def test_sampling_at_its_limits_draws_by_its_definition() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, -torch.inf]])
    for options in ({"top_p": 1e-46}, {"top_p": 5e-324}, {"temperature": 1e-46}, {"temperature": -0.0}, {"temperature": 1e-3}):
        assert int(Sampling(**options).draw(logits)) == 1, options
    torch.manual_seed(0)
    flat = [int(Sampling(temperature=2**64, top_k=3).draw(logits)) for _ in range(100)]
    assert set(flat) == {0, 1, 2}


def test_lengths_of_xpos_have_no_end_where_its_scale_has_none() -> None:
    x = torch.randn(1, 16, 16)
    assert bool(_multihead(rotary=True, xpos_scale_base=1e308)(x, is_causal=True)[0].isfinite().all())
