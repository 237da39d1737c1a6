"""``plan_attention``: figures that follow from the definition, the longest sequence, times and peaks against measured ones."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import block_sparse_attention, dilated_attention, profile_memory
from dilated_attention.models.summary import USABLE
from dilated_attention.pattern import BigBird, DilatedPattern, GlobalLocal, LocalWindow, MaskFunction, with_sparsity
from dilated_attention.planning import GPUS, AttentionPlan, detected_gpu, find_gpu, plan_attention, plan_model
from dilated_attention.planning.memory import block_counts
from tests.helpers.comm_volume import heads_bytes, rows_bytes
from tests.helpers.largest import Largest
from tests.helpers.ring_cases import spread_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LONGNET = {"segment_lengths": (2048, 4096, 8192, 16384, 32768), "dilation_rates": (1, 2, 4, 6, 12)}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dilated": LONGNET,
    "block_sparse": {"pattern": LocalWindow(256)},
    "ring": {"world_size": 4},
    "ring_dilated": {"world_size": 4, "segment_lengths": (2048, 65536), "dilation_rates": (1, 16)},
    "ring_block_sparse": {"world_size": 4, "pattern": LocalWindow(256)},
}
MOST_POSITIONS = 2**31


def plan(kind: str, num_positions: int = 65536, **options: Any) -> AttentionPlan:
    options = {"num_heads": 8, "head_dim": 64, "gpu": "H200", "find_longest": False, **KINDS[kind]} | options
    return plan_attention(kind, num_positions=num_positions, **options)


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def test_gpus_are_found_by_the_names_people_and_drivers_give_them() -> None:
    for name, found in (
        ("a100-80gb", "A100 SXM 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("Tesla V100-SXM2-32GB", "V100 SXM2 32GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        *zip(GPUS, GPUS, strict=True),
    ):
        assert find_gpu(name) is GPUS[found]
    with pytest.raises(ValueError, match=r"gpu is 'H300'; known are .*A100 SXM 80GB.*H200 SXM"):
        find_gpu("H300")
    with pytest.raises(TypeError, match="gpu is 5"):
        find_gpu(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GPUS)
def test_figures_of_a_gpu_make_sense(name: str) -> None:
    gpu = GPUS[name]
    assert gpu.source and gpu.memory > 7 * 2**30
    assert gpu.bandwidth and gpu.bandwidth > 2e11 and gpu.peaks["float32"] > 5e12
    # bfloat16 came with compute capability 8.0, at float16's rate; fp8 with 8.9, at twice that
    assert ("bfloat16" in gpu.peaks) == (gpu.capability >= (8, 0)) and ("fp8" in gpu.peaks) == (gpu.capability >= (8, 9))
    assert "bfloat16" not in gpu.peaks or gpu.peaks["bfloat16"] == gpu.peaks["float16"]
    assert "fp8" not in gpu.peaks or gpu.peaks["fp8"] / gpu.peaks["float16"] == pytest.approx(2, rel=0.02)
    # Pascal's fast float16 sums in float16, which no attention here does
    assert "P100" not in name or gpu.peaks["float16"] == gpu.peaks["float32"]


def test_this_machines_gpu_has_the_memory_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, major, minor = "NVIDIA H200", 150_000_000_000, 9, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    found = detected_gpu("cuda")
    assert found is not None and found.memory == 150_000_000_000 and found.bandwidth == GPUS["H200 SXM"].bandwidth
    monkeypatch.setattr(Properties, "name", "NVIDIA X1")
    unknown = detected_gpu("cuda")
    assert unknown is not None and unknown.bandwidth is None and not unknown.peaks


@pytest.mark.parametrize("kind", KINDS)
def test_millions_of_sequences_are_planned_as_fast_as_one(kind: str) -> None:
    """Plans of a GPU went through the sequences one by one: a million took minutes."""
    few, many = (plan(kind, batch_size=2**i, find_longest=True) for i in (8, 28))
    # a large batch may run in another way
    assert few.peak * 2**19 < many.peak < few.peak * 2**21 and not many.fits and many.longest == 0


def test_pairs_and_flops_are_the_patterns_own() -> None:
    found, pattern = plan("dilated", is_causal=True, batch_size=3), DilatedPattern(**LONGNET)
    assert found.pairs == 3 * pattern.pairs(65536, 8, is_causal=True)
    assert found.flops == tuple(3 * flops for flops in pattern.flops(65536, 8, 64, is_causal=True))
    assert found.dense_pairs == 3 * 8 * 65536 * 65537 // 2
    assert plan("dense").share_of_dense == 1 and plan("dense").keys_per_query == 65536
    assert plan("block_sparse").pairs == LocalWindow(256).pairs(65536, 8)
    assert plan("dilated", training=False).flops[1] == 0


def test_least_bytes_by_hand() -> None:
    # 1024 rows of 8 heads of 64 numbers of 2 bytes are 1 MiB, of 2 heads a quarter; lse is 32 KiB
    forward, backward = plan("dense", 1024, num_kv_heads=2).least_bytes
    assert forward == 2 * 2**20 + 2 * 2**18 + 2**15
    assert backward == 4 * 2**20 + 4 * 2**18 + 2**15
    assert plan("ring", 4096, num_kv_heads=2).least_bytes == (forward, backward)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_a_plan_is_whole_and_told_as_text_and_json(kind: str, training: bool) -> None:
    found = plan(kind, training=training)
    assert found.memory.forward_peak == sum(size for _, size in found.memory.forward)
    assert found.peak == max(found.memory.forward_peak, found.memory.backward_peak)
    assert bool(found.memory.backward) is training and len(found.passes) == 1 + training
    # q, k, v and out are there in any case
    assert found.peak >= 4 * found.num_positions // found.world_size * 8 * 64 * 2
    assert found.seconds == sum(one.seconds for one in found.passes)
    assert all(one.seconds >= max(one.arithmetic, one.memory, one.launches) > 0 and one.source for one in found.passes)
    told, text = json.loads(json.dumps(found.as_dict())), str(found)
    assert told["memory"]["peak"] == found.peak and told["fits"] is found.fits and told["seconds"] == found.seconds
    assert "estimate" in text and f"{found.num_positions:,} positions" in text and ("wire" in text) == (found.world_size > 1)


@settings(max_examples=25)
@given(kind=st.sampled_from(sorted(KINDS)), training=st.booleans(), memory=st.integers(2**20, 2**42), heads=st.sampled_from([4, 8, 16]))
def test_the_longest_fits_and_one_more_does_not(kind: str, training: bool, memory: int, heads: int) -> None:
    longest = plan(kind, training=training, memory=memory, num_heads=heads, find_longest=True).longest
    less, there, more = (
        plan(kind, max(4, n), training=training, memory=memory, num_heads=heads) for n in (longest // 2, longest, longest + 1)
    )
    assert not longest or (less.fits and there.fits and less.peak <= there.peak <= USABLE * memory)
    assert longest == MOST_POSITIONS or not more.fits
    # more positions need no less
    assert less.pairs <= there.pairs <= more.pairs and less.flops <= there.flops <= more.flops


@pytest.mark.parametrize("kind", [*KINDS, "ring of 64"])
def test_two_billion_positions_are_planned_in_a_moment(kind: str) -> None:
    kind, ranks = kind.partition(" ")[0], {"world_size": 64} if kind.endswith("64") else {}
    # kernels' packages and traces of the first call are not what is timed
    plan(kind, **ranks)
    start = time.process_time()
    found = plan(kind, MOST_POSITIONS, find_longest=True, **ranks)
    # a second on a core of its own; what shares its caches with others takes up to twice that. Per position it would be hours
    assert time.process_time() - start < (10 if ranks else 4)
    assert found.num_positions == 2**31 and not found.fits


@pytest.mark.parametrize(
    ("function", "n", "heads", "keys_of_query"),
    [
        (lambda b, h, i, j: i - j < 4096, 2**17, 2, 4096.0),
        (lambda b, h, i, j: i - j < 1024 * (h + 1), 2**17, 2, 1536.0),
        (lambda b, h, i, j: (i + j) % 4 > 0, 2**17, 2, 0.75 * 2**16),
        (lambda b, h, i, j: i // 4096 == j // 4096, 2**17, 2, 2048.0),
        # too long for a sample: a window's keys do not grow with the sequence, all keys do
        (lambda b, h, i, j: i - j < 4096, 2**20, 2, 4096.0),
        (lambda b, h, i, j: j <= i, 2**20, 2, 2**19),
        # of few rows, in a list for each head
        *((lambda b, h, i, j: (j <= i) & (h >= 0), n, 32, n / 2) for n in (700, 2048, 8192)),
    ],
)
def test_a_function_of_pairs_is_asked_about_some(function: Any, n: int, heads: int, keys_of_query: float) -> None:
    asked = 0

    def fn(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        nonlocal asked
        asked += torch.broadcast_shapes(i.shape, j.shape, h.shape).numel()
        return function(b, h, i, j)  # type: ignore[no-any-return]

    pattern = MaskFunction(fn)
    found = plan("block_sparse", n, num_heads=heads, pattern=pattern, is_causal=True)
    assert pattern.per_head == (heads == 32 or keys_of_query == 1536)
    assert not found.pairs_exact and found.pairs == pytest.approx(heads * n * keys_of_query, rel=0.1 if heads == 2 else 0.08)
    # of 2^33 for two heads
    assert 0 < asked <= (2**25 if heads == 2 else 2**28)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_bytes_on_the_wire_are_those_of_the_formulas(layout: str, exchange: str, is_causal: bool) -> None:
    spread = spread_of(n=4096, heads=8, kv_heads=4, head_dim=64, batch=1, layout=layout, is_causal=is_causal)
    found = plan("ring", 4096, layout=layout, exchange=exchange, is_causal=is_causal, num_kv_heads=4).exchange.bytes
    if exchange == "all_to_all":
        assert found == heads_bytes(spread, 4, 0, 2, 4)
        return
    # GPUs send shares of gradients in the inputs' dtype
    ranks = [rows_bytes(spread, 4, rank, 2) for rank in range(4)]
    assert found in ranks and found.forward_received == max(rank.forward_received for rank in ranks)


def test_a_window_brings_a_rank_the_blocks_beside_it() -> None:
    found = plan("ring_block_sparse", 2**15, num_kv_heads=8).exchange.bytes
    # 256 positions before and 256 behind a rank in the middle are two blocks each; keys and values of 8 heads of 64 in 2 bytes
    assert found.forward_received == 4 * 128 * 2 * 8 * 64 * 2
    assert plan("ring_dilated", 2**18, segment_lengths=(2048,), dilation_rates=(1,)).exchange.bytes.forward_received == 0


def test_segments_that_do_not_divide_one_another_need_no_memory_for_the_whole_document() -> None:
    """A memory begins where all branches begin a segment, here every 150,000 positions."""
    found = plan("ring_dilated", 2**20, world_size=8, segment_lengths=(3000, 50_000), dilation_rates=(1, 3)).exchange
    assert 2**17 < found.rows < 2**17 + 150_000 + 50_000


def timed() -> Iterator[tuple[str, dict[str, Any], int | None, float, float]]:
    """(kind, call, index of the pass or None for all, ms, how near) of what was measured on H200s."""
    for row in lines_of("2026-11-21-h200/floor.jsonl"):
        if row["backend"] == "auto":
            heads, dim = map(int, row["shape"].split("x"))
            rates = LONGNET["dilation_rates"] if heads == 12 else (1, 2, 4, 8, 16)
            call = {"num_positions": row["N"], "num_heads": heads, "head_dim": dim, "dilation_rates": rates, "is_causal": row["causal"]}
            yield "dilated", call, 1, row["backward"], 0.15
            # timed without gradients; the other forwards ran with a kernel that is out since, shorter ones with a library
            if heads == 12 and 32_768 < row["N"] < 500_000:
                yield "dilated", call | {"training": False}, 0, row["forward"], 0.15
    for row in lines_of("2026-11-21-h200/block-sparse.jsonl"):
        for index, name in enumerate(("forward", "backward") if row["part"] == "random" else ()):
            call = {"num_positions": row["N"], "num_heads": row["H"], "head_dim": row["D"], "training": bool(index)}
            yield "block_sparse", call | {"pattern": with_sparsity(row["density"])}, index, row[name]["ours"]["ms"], 0.25
            yield "dense", call, index, row[name]["dense"]["ms"], 0.25
    for row in lines_of("2026-11-21-h200x4/ring.jsonl"):
        if match := re.search(r"dense-32/8-(\d+)-(\w+) (\w+) \| ours all_gather auto$", row.get("key", "")):
            length, causality, which = match.groups()
            call = {
                "num_heads": 32,
                "num_kv_heads": 8,
                "head_dim": 128,
                "is_causal": causality == "causal",
                "training": which == "training",
            }
            yield "ring", call | {"num_positions": 4 * int(length), "exchange": "all_gather"}, None, 1e3 * row["seconds"], 0.25
    branches = {"segment_lengths": (1024, 5792, 32768, 185363, 1048576), "dilation_rates": (1, 2, 4, 8, 16)}
    gigapath = {"num_heads": 16, "head_dim": 48} | branches
    longnet = {"num_heads": 12, "head_dim": 64, "is_causal": True} | LONGNET
    dense = {"num_heads": 16, "head_dim": 64, "is_causal": True}
    cases = {"GigaPath": gigapath, "LongNet 12x64 causal": longnet, "dense causal 16x64": dense}
    for name, (called, _) in json.loads((RESULTS / "2026-11-29-h200x2/repeated.json").read_text()).items():
        case, _, length = name.partition(",")[0].rpartition(" ")
        if case in cases:
            kind, is_both = "dense" if cases[case] is dense else "dilated", name.endswith("fb")
            yield kind, cases[case] | {"num_positions": int(length), "training": is_both}, None, called, 0.3


@pytest.mark.parametrize(("kind", "call", "index", "ms", "near"), [*timed()])
def test_times_are_near_what_h200s_took(kind: str, call: dict[str, Any], index: int | None, ms: float, near: float) -> None:
    found = plan(kind, **call)
    assert 1e3 * (found.seconds if index is None else found.passes[index].seconds) == pytest.approx(ms, rel=near)


def test_a_time_says_where_its_rate_comes_from_and_none_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, text in (
        ("H200", "shipped table of NVIDIA H200"),
        ("H100 PCIe", "ratio of peaks, 0.76"),
        ("A100", "assumed, not measured"),
    ):
        assert all(text in one.source for one in plan("dense", gpu=gpu).passes)
    assert "ratio of peaks" not in str(plan("dense"))
    # contiguous parts of a causal sequence: the last of four ranks has 7 of 16 pairs
    last, mean = (plan("ring", world_size=4, layout=layout, is_causal=True).passes[0].arithmetic for layout in ("contiguous", "zigzag"))
    assert last == pytest.approx(7 / 4 * mean)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = plan("dense", gpu=None)
    assert found.device == "this machine's CPU" and found.dtype == "float32"
    blocks, model = plan("block_sparse", gpu=None), plan_model("longnet-tiny", num_positions=4096, gpu="cpu", find_longest=False)
    for one in (found, blocks, model):
        assert one.seconds is None and "the ratio of the FLOPs" in one.no_time and str(one).count(one.no_time) == 1
        # the figure is of tensors, and a process may take more
        assert "MALLOC_MMAP_THRESHOLD_" in str(one)
    assert "MALLOC" not in str(plan("dense"))
    # a length that was not searched for is not told
    assert plan("dense").longest is None and "longest" not in str(plan("dense"))
    assert f"longest that does: {plan('dense', find_longest=True).longest:,} positions" in str(plan("dense", find_longest=True))


MEASURED: dict[str, tuple[Any, int, torch.dtype]] = {
    "dense": (None, 8, torch.float32),
    "dilated, bfloat16": (DilatedPattern((256, 1024, 2048), (1, 4, 8)), 8, torch.bfloat16),
    "shared keys": (GlobalLocal(512, 128), 2, torch.float32),
    "random": (BigBird(256, 128, 3), 8, torch.float32),
}


@pytest.mark.no_poison
@pytest.mark.parametrize("training", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("case", MEASURED)
def test_planned_peaks_on_a_cpu_are_those_of_their_tensors(case: str, training: bool) -> None:
    pattern, kv_heads, dtype = MEASURED[case]
    q, dout, k, v = (torch.randn(1, 2048, heads, 64, dtype=dtype) for heads in (8, 8, kv_heads, kv_heads))
    inputs = [x.requires_grad_(training) for x in (q, k, v)]
    is_dilated = isinstance(pattern, DilatedPattern)

    def call() -> None:
        if pattern is None or is_dilated:
            branches = pattern or DilatedPattern((2048,), (1,))
            out = dilated_attention(*inputs, branches.segment_lengths, branches.dilation_rates)
        else:
            out = block_sparse_attention(*inputs, pattern)
        if training:
            out.backward(dout)

    peak = profile_memory(call, device="cpu").peak_allocated + sum(x.nbytes for x in [*inputs, *[dout] * training])
    planned = plan_attention(
        "dense" if pattern is None else "dilated" if is_dilated else "block_sparse", num_positions=2048, num_heads=8,
        num_kv_heads=kv_heads, head_dim=64, dtype=dtype, training=training, gpu="cpu", find_longest=False, pattern=pattern,
    )  # fmt: skip
    # products of 16-bit floats pack their operands on some CPUs
    assert planned.peak == pytest.approx(peak, rel=0.25 if dtype is torch.bfloat16 else 0.15)


@pytest.mark.parametrize("row", lines_of("2026-11-21-h200/extreme.jsonl"), ids=lambda row: str(row["tokens"]))
def test_planned_peaks_of_long_sequences_are_what_an_h200_took(row: dict[str, Any]) -> None:
    powers = range(0, row["tokens"].bit_length() - 11, 2)
    branches = {"segment_lengths": [2048 * 2**i for i in powers], "dilation_rates": [2**i for i in powers]}
    found = plan("dilated", row["tokens"], num_heads=1, training=row["backward"], **branches)
    assert found.peak == pytest.approx(row["bytes_per_token"] * row["tokens"], rel=0.15)


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("flash", {}, "kind is 'flash'; expected"),
        ("dense", {"head_dim": 512}, "head_dim is 512; expected an integer ≤ 256"),
        ("dense", {"world_size": 2}, "world_size is 2 and kind is 'dense'"),
        ("dense", {"pattern": LocalWindow(4)}, "kind is 'dense', which is dense"),
        ("dilated", {}, "needs segment_lengths"),
        ("dilated", {"segment_lengths": [8], "dilation_rates": [1], "pattern": DilatedPattern((8,), (1,))}, "give only one of them"),
        ("ring", {"layout": "", "world_size": 2}, "layout is ''; expected one of 'contiguous', 'zigzag', 'striped'"),
        ("dense", {"dtype": np.array([1, 2])}, r"dtype is array\(\[1, 2\]\); expected torch.float16"),
        ("ring", {"exchange": "all_to_all", "world_size": 3}, "8 heads are not a multiple of 3"),
        ("block_sparse", {"exchange": "ring", "pattern": LocalWindow(4)}, "exchange is 'ring'"),
        ("block_sparse", {"pattern": BigBird(256, 0, 2**62)}, "random_blocks is 4611686018427387904; expected at most 1,024 to plan for"),
        # the product is 2⁸⁶, which is 0 in numpy's 64 bits
        ("dense", {"num_positions": np.int64(2**40), "num_heads": np.int64(512), "batch_size": np.int64(2**31)}, "expected at most 2..56"),
    ],
)
def test_what_cannot_be_is_refused(kind: str, options: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = {"num_positions": 64, "num_heads": 8, "head_dim": 64, "gpu": "H200"} | options
    with pytest.raises(ValueError, match=text):
        plan_attention(kind, **arguments)
    with pytest.raises(TypeError, match="takes a pattern"):
        plan_attention("block_sparse", num_positions=64, num_heads=8, head_dim=64)
    with pytest.raises(TypeError, match=r"layout is 0 \(int\); expected one of 'contiguous'"):
        plan_attention("ring", num_positions=64, num_heads=8, head_dim=64, layout=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"world_size is .*; expected an integer"):
        plan_model("longnet-tiny", num_positions=64, world_size=np.array([1, 2]))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_positions", [2**20, 2**31 - 2**20])
def test_a_global_row_of_a_long_sequence_takes_little_memory(num_positions: int) -> None:
    # its first row of blocks keeps every key, 16 heads draw their own blocks
    pattern = BigBird(128, 3, 1)
    with Largest() as largest:
        counts = block_counts.__wrapped__(pattern, num_positions, 16, False, 2**13)
    # before, the keys of that row: 17 GB at two billion positions
    assert largest.nbytes <= 2**26
    # listed whole at 16,384 positions; the global row and column, the window and the random blocks grow with the number of rows
    short = block_counts(pattern, 2**14, 16, False, 2**14)
    assert short.is_exact and counts.entries / num_positions == pytest.approx(short.entries / 2**14, rel=0.05)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_density_has_its_pairs_at_lengths_of_which_few_rows_are_looked_at(is_causal: bool) -> None:
    n, heads = 2**25, 8
    found = plan("block_sparse", n, pattern=with_sparsity(0.1), is_causal=is_causal, num_heads=heads)
    assert found.pairs == pytest.approx(0.1 * heads * n * n / (2 if is_causal else 1), rel=0.01)


def test_a_sequence_far_too_long_for_its_ring_is_planned_in_seconds() -> None:
    began = time.perf_counter()
    plan = plan_attention("ring", num_positions=2**31, world_size=64, num_heads=64, head_dim=64, gpu="H200")
    # 1 to 2 s; with a count of needed rows for each step of heads it took 70 to 180
    assert not plan.fits and plan.longest and time.perf_counter() - began < 30
