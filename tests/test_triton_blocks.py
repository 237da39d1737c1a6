"""The Triton kernels for lists of blocks against a dense float64 softmax: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from dilated_attention.backends import Hardware, Mask, Options, Request, registry
from dilated_attention.backends import triton_blocks as under_test
from dilated_attention.backends.blocks import BlockLists
from dilated_attention.backends.triton_blocks import Tile, Tuning
from dilated_attention.testing import low_precision_bound, max_error, relative_bound

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("out", "lse", "dq", "dk", "dv")
BACKEND = registry.get("triton")
FLOAT32_TOLERANCE = 1e-5


def lists_of(
    kept: torch.Tensor, q_block: int, k_block: int, interval: tuple[torch.Tensor, torch.Tensor] | None = None, *, masked: bool | None = None
) -> BlockLists:
    """Exact lists of a dense bool mask (batch groups, head groups, Nq, Nk). Pairs beyond the end have random bits.

    ``masked`` False: there are whole blocks only; True: every block has a mask.
    """
    G, H, Nq, Nk = kept.shape
    rows, columns = -(-Nq // q_block), -(-Nk // k_block)
    padded = torch.rand(G * H, rows * q_block, columns * k_block, device=kept.device) < 0.5
    padded[:, :Nq, :Nk] = kept.flatten(0, 1)
    inside = torch.zeros_like(padded)
    inside[:, :Nq, :Nk] = True

    def blocks(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (rows, q_block)).unflatten(3, (columns, k_block)).transpose(2, 3)

    some = blocks(padded & inside).any((3, 4))
    whole = blocks(padded | ~inside).all((3, 4))
    tiles = blocks(padded)[some].unflatten(2, (k_block // 32, 32))
    words = (tiles.long() << torch.arange(32, device=kept.device)).sum(3).to(torch.int32)
    different, which = words.unique(dim=0, return_inverse=True)
    masks = which.int() if masked else which.int().masked_fill(whole[some], -1)
    plain = masked is False or (masked is None and bool((masks < 0).all()))
    if plain:
        assert torch.equal(whole, some)
    return BlockLists(
        num_queries=Nq,
        num_keys=Nk,
        q_block=q_block,
        k_block=k_block,
        num_batch=G,
        num_heads=H,
        row_starts=torch.cat([some.new_zeros(1, dtype=torch.int64), some.sum(2).flatten().cumsum(0)]).int(),
        columns=some.nonzero()[:, 2].int(),
        masks=None if plain else masks,
        bits=different[:0] if plain else different.contiguous(),
        interval=interval,
    )


@dataclass(frozen=True)
class Case:
    Nq: int = 100
    Nk: int = 150
    q_block: int = 64
    k_block: int = 64
    B: int = 1
    H: int = 2
    K: int = 2
    D: int = 16
    per_batch: bool = False
    per_head: bool = False
    # of the blocks · of the pairs in a kept block that is not whole; 1 for whole blocks only
    block_density: float = 0.6
    pair_density: float = 0.5
    padding: bool = False
    scale: float = 0.3
    tile: tuple[int, int] = (128, 128)

    def mask(self) -> torch.Tensor:
        """(groups of batch, groups of heads, Nq, Nk) with whole, partial and left out blocks and some empty rows."""
        groups = (self.B if self.per_batch else 1, self.H if self.per_head else 1)
        coarse = (*groups, -(-self.Nq // self.q_block), -(-self.Nk // self.k_block))
        blocks = torch.rand(coarse) < self.block_density
        partial = torch.rand(coarse) < 0.5
        pairs = torch.rand(*groups, self.Nq, self.Nk) < self.pair_density

        def fine(x: torch.Tensor) -> torch.Tensor:
            return x.repeat_interleave(self.q_block, 2).repeat_interleave(self.k_block, 3)[:, :, : self.Nq, : self.Nk]

        kept = fine(blocks) & (pairs | ~fine(partial)) if self.pair_density < 1 else fine(blocks)
        if self.pair_density < 1:
            kept[:, :, 3::11] = False
        return kept.to(DEVICE)


Tensors = dict[str, torch.Tensor]


def inputs(case: Case, dtype: torch.dtype = torch.float32) -> Tensors:
    shapes = {"q": (case.B, case.Nq, case.H, case.D), "k": (case.B, case.Nk, case.K, case.D), "v": (case.B, case.Nk, case.K, case.D)}
    shapes |= {"dout": shapes["q"]}
    x = {name: torch.randn(shape).to(DEVICE, dtype) for name, shape in shapes.items()}
    return x | {"dlse": torch.randn(case.B, case.H, case.Nq).to(DEVICE)}


def dense(x: Tensors, kept: torch.Tensor, scale: float, padding: torch.Tensor | None, dtype: torch.dtype, *, dlse: bool = False) -> Tensors:
    """The definition: softmax over the kept pairs, all gradients by autograd."""
    q, k, v = (x[name].detach().to(dtype).requires_grad_() for name in "qkv")
    group = q.shape[2] // k.shape[2]
    kept = kept.expand(q.shape[0], q.shape[2], -1, -1)
    if padding is not None:
        kept = kept & ~padding[:, None, None, :]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * scale
    scores = scores.masked_fill(~kept, -torch.inf)
    empty = ~kept.any(-1)
    # a row without keys has out 0 and gradients 0, by definition and not by autograd
    safe = scores.masked_fill(empty[..., None], 0.0)
    weights = safe.softmax(-1).masked_fill(empty[..., None], 0.0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(group, 2))
    lse = safe.logsumexp(-1)
    loss = (out * x["dout"].to(dtype)).sum()
    if dlse:
        loss = loss + (lse * x["dlse"].to(dtype)).masked_fill(empty, 0.0).sum()
    grads = torch.autograd.grad(loss, (q, k, v))
    return dict(zip(NAMES, (out.detach(), lse.detach().masked_fill(empty, -torch.inf), *grads), strict=True))


def tuning_of(tile: tuple[int, int]) -> Tuning:
    same = Tile(*tile, 4, 2)
    return Tuning(forward=same, dq=same, dkdv=same)


def check(found: Tensors, truth: Tensors, plain: Tensors | None, dtype: torch.dtype) -> None:
    for name in found:
        bound = relative_bound(truth[name], FLOAT32_TOLERANCE)
        if dtype is not torch.float32:
            assert plain is not None
            bound = low_precision_bound(plain[name], truth[name], dtype)
        error = max_error(found[name], truth[name])
        assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"


def run(case: Case, dtype: torch.dtype = torch.float32, *, dlse: bool = False) -> None:
    kept, x = case.mask(), inputs(case, dtype)
    padding = (torch.rand(case.B, case.Nk) < 0.3).to(DEVICE) if case.padding else None
    options = Options(case.scale, mask=Mask(padding))
    lists = lists_of(kept, case.q_block, case.k_block)
    tuning = tuning_of(case.tile)
    out, lse = under_test.forward(x["q"], x["k"], x["v"], lists, options, tuning=tuning)
    assert out.dtype == dtype and lse.dtype == torch.float32
    more = (x["dlse"],) if dlse else ()
    grads = under_test.backward(x["dout"], x["q"], x["k"], x["v"], out, lse, lists, options, *more, tuning=tuning)
    found = dict(zip(NAMES, (out, lse, *grads), strict=True))
    truth = dense(x, kept, case.scale, padding, torch.float64, dlse=dlse)
    plain = dense(x, kept, case.scale, padding, dtype, dlse=dlse) if dtype is not torch.float32 else None
    check(found, truth, plain, dtype)


# each differs from the first in what its name says
CASES = {
    "first": Case(),
    "whole blocks": Case(pair_density=1.0),
    "even": Case(Nq=128, Nk=192),
    "even whole blocks": Case(Nq=128, Nk=192, pair_density=1.0, block_density=0.5),
    "more queries": Case(Nq=200, Nk=50),
    "128 by 64": Case(q_block=128),
    "64 by 128": Case(k_block=128),
    "128 by 128": Case(q_block=128, k_block=128, Nq=257, Nk=131, H=1, K=1),
    "small tiles": Case(q_block=128, k_block=128, Nq=150, Nk=140, H=1, K=1, tile=(64, 32)),
    "small tiles of whole blocks": Case(q_block=128, k_block=128, H=1, K=1, pair_density=1.0, tile=(32, 64)),
    "head dim 40": Case(D=40),
    "head dim 64": Case(D=64),
    "head dim 1": Case(D=1, scale=1.0),
    "GQA": Case(H=4, K=2),
    "one key head": Case(H=3, K=1, Nq=70),
    "lists of batch entries": Case(B=2, per_batch=True),
    "lists of heads": Case(H=3, K=3, per_head=True),
    "lists of batch entries and grouped heads": Case(B=2, H=4, K=2, per_batch=True, per_head=True, Nq=100, Nk=100),
    "lists of grouped heads": Case(B=2, H=4, K=2, per_head=True, Nq=100, Nk=100),
    "padding": Case(padding=True, B=2),
    "padding of whole blocks": Case(padding=True, pair_density=1.0),
    "nothing kept": Case(block_density=0.0),
    "one query": Case(Nq=1, Nk=70, pair_density=0.9),
    "one key": Case(Nq=70, Nk=1, block_density=1.0),
    "negative scale": Case(scale=-0.4),
    "scale 0": Case(scale=0.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_are_the_definition(case: Case) -> None:
    torch.manual_seed(0)
    run(case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["first", "head dim 64", "lists of grouped heads"])
def test_half_precision_errs_as_plain_torch_does(name: str, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as if they were integers")
    torch.manual_seed(1)
    run(CASES[name], dtype)


def test_strides_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels do where 128 positions span 2^31 elements, on tensors that fit in memory."""
    monkeypatch.setattr(under_test, "_wide", lambda strides, align: True)
    torch.manual_seed(0)
    run(Case(H=1, K=1))


@pytest.mark.parametrize("name", ["first", "lists of grouped heads", "whole blocks"])
def test_gradient_of_lse(name: str) -> None:
    torch.manual_seed(2)
    run(CASES[name], dlse=True)


def test_an_interval_says_the_same_as_bits() -> None:
    torch.manual_seed(3)
    case = Case(Nq=80, Nk=140)
    low = torch.randint(0, 110, (80,), device=DEVICE, dtype=torch.int32)
    high = low + torch.randint(0, 90, (80,), device=DEVICE, dtype=torch.int32)
    keys = torch.arange(140, device=DEVICE)
    kept = ((keys >= low[:, None]) & (keys < high[:, None]))[None, None]
    x, options = inputs(case), Options(case.scale)
    with_bits, with_interval = (lists_of(kept, 64, 64, interval) for interval in (None, (low, high)))
    assert with_interval.mask_kind == "interval"
    # an interval is read in place of bits
    with_interval = replace(with_interval, bits=with_interval.bits[:0])
    truth = dense(x, kept, case.scale, None, torch.float64)
    for lists in (with_bits, with_interval):
        out, lse = BACKEND.forward_blocks(x["q"], x["k"], x["v"], lists, options)
        grads = BACKEND.backward_blocks(x["dout"], x["q"], x["k"], x["v"], out, lse, lists, options)
        check(dict(zip(NAMES, (out, lse, *grads), strict=True)), truth, None, torch.float32)


def test_shares_of_parts_with_the_merged_results_add_up() -> None:
    """Two halves of a mask, each with the out and lse of the whole; rows that one half or both leave out; strided everything."""
    torch.manual_seed(4)
    case = Case(B=2, H=2, K=1, Nq=80, Nk=140, per_head=True)
    x, options = inputs(case), Options(case.scale)
    x = {name: strided(y) for name, y in x.items()}
    kept = case.mask()
    first = kept & (torch.rand(kept.shape, device=DEVICE) < 0.5)
    first[:, :, 5] = False
    first[:, :, 7] = kept[:, :, 7]
    halves = [lists_of(half, 64, 128) for half in (first, kept & ~first)]
    parts = [BACKEND.forward_blocks(x["q"], x["k"], x["v"], lists, options) for lists in halves]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    weights = [(part_lse - lse).exp().nan_to_num(0.0).transpose(1, 2)[..., None] for _, part_lse in parts]
    out = strided(sum(part * weight for (part, _), weight in zip(parts, weights, strict=True)))
    # what the engine hands a backward for rows without keys
    lse = strided(lse.masked_fill(lse == -torch.inf, torch.inf))
    shares = [BACKEND.backward_blocks(x["dout"], x["q"], x["k"], x["v"], out, lse, lists, options, x["dlse"]) for lists in halves]
    sums = [a + b for a, b in zip(*shares, strict=True)]
    found = dict(zip(NAMES, (out, lse.masked_fill(lse == torch.inf, -torch.inf), *sums), strict=True))
    check(found, dense(x, kept, case.scale, None, torch.float64, dlse=True), None, torch.float32)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as a view of a larger tensor: other strides in every dimension but the last of four."""
    if x.dim() == 3:
        wide = torch.full((*x.shape[:2], 2 * x.shape[2]), torch.nan, device=x.device, dtype=x.dtype)[..., ::2]
    else:
        B, N, H, D = x.shape
        wide = torch.full((N + 1, B, H + 2, D + 3), torch.nan, device=x.device, dtype=x.dtype)
        wide = wide[1:, :, 1:-1, :D].transpose(0, 1)
    return wide.copy_(x)


def test_gradient_of_a_sum() -> None:
    """dout is one number expanded, out a view of channels that lie apart."""
    torch.manual_seed(5)
    case = Case(Nq=70, Nk=70)
    kept, x, options = case.mask(), inputs(case), Options(case.scale)
    x["dout"] = torch.ones((), device=DEVICE).expand(x["q"].shape)
    lists = lists_of(kept, 64, 64)
    out, lse = BACKEND.forward_blocks(x["q"], x["k"], x["v"], lists, options)
    out = torch.stack([out, out], -1)[..., 0]
    grads = BACKEND.backward_blocks(x["dout"], x["q"], x["k"], x["v"], out, lse, lists, options)
    check(dict(zip(NAMES, (out, lse, *grads), strict=True)), dense(x, kept, case.scale, None, torch.float64), None, torch.float32)


def test_rows_that_take_no_part_are_never_nan() -> None:
    """Some row's lse is +inf or −inf though it has keys here: its weights are 0, whatever its dlse."""
    torch.manual_seed(6)
    case = Case(Nq=70, Nk=70, block_density=1.0, pair_density=1.0)
    kept, x, options = case.mask(), inputs(case), Options(case.scale)
    lists = lists_of(kept, 64, 64)
    out, lse = BACKEND.forward_blocks(x["q"], x["k"], x["v"], lists, options)
    lse[:, :, 3], lse[:, :, 65] = torch.inf, -torch.inf
    x["dlse"][:, :, [3, 65]] = torch.nan
    grads = BACKEND.backward_blocks(x["dout"], x["q"], x["k"], x["v"], out, lse, lists, options, x["dlse"])
    assert (grads[0][:, [3, 65]] == 0).all()
    kept[:, :, [3, 65]] = False
    truth = dense(x, kept, case.scale, None, torch.float64, dlse=True)
    check(dict(zip(NAMES[2:], grads, strict=True)), {name: truth[name] for name in NAMES[2:]}, None, torch.float32)


def test_a_mask_of_every_pair_is_no_mask() -> None:
    torch.manual_seed(7)
    case = Case(Nq=100, Nk=100, pair_density=1.0)
    kept, x, options = case.mask(), inputs(case), Options(case.scale)
    plain, masked = lists_of(kept, 64, 64, masked=False), lists_of(kept, 64, 64, masked=True)
    assert plain.masks is None and masked.masks is not None and (masked.masks >= 0).all()
    results = [BACKEND.forward_blocks(x["q"], x["k"], x["v"], lists, options) for lists in (plain, masked)]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def counted(counts: list[list[int]], heads: int = 1) -> BlockLists:
    """Whole blocks: row i of group g keeps its first counts[g][i] columns."""
    columns = max(map(max, counts))
    kept = torch.tensor([[[column < count for column in range(columns)] for count in row] for row in counts])
    kept = kept.repeat_interleave(64, 1).repeat_interleave(64, 2)
    return lists_of(kept.unflatten(0, (-1, heads)), 64, 64)


def test_long_lists_are_started_first_and_equal_ones_stay_in_order() -> None:
    order = under_test.row_order(lists := counted([[1, 1, 2, 1, 12, 0, 1, 30]]))
    assert order.places.tolist() == [[7, 4, 2, 0, 1, 3, 5, 6]] and order.heavy == 2
    assert under_test.row_order(lists) is order
    # nearly equal ones lie together, as do the keys that they share
    assert under_test.row_order(counted([[20, 21, 20, 21, 20, 9]])).places.tolist() == [[0, 1, 2, 3, 4, 5]]
    # a group without a long list goes on with its next ones
    order = under_test.row_order(counted([[2, 2, 2, 30, 2, 2], [2, 2, 2, 2, 2, 3]], heads=2))
    assert order.places.tolist() == [[3, 0, 1, 2, 4, 5], [5, 0, 1, 2, 3, 4]] and order.heavy == 1
    # a key head's program takes the columns of all its query heads
    lists = counted([[2, 0], [1, 0], [0, 1], [0, 1]], heads=4)
    assert under_test.column_order(lists, 2).places.tolist() == [[0, 1], [0, 1]]
    assert under_test.column_order(lists, 1).places.shape == (4, 2)
    assert under_test.row_order(counted([[0, 1]])).places.tolist() == [[1, 0]]


def test_what_it_says_of_itself() -> None:
    hopper = Hardware(device_type="cuda", capability=(9, 0), torch_version=(2, 13), packages=frozenset({"triton"}))
    request = Request(hardware=hopper, dtype=torch.bfloat16, head_dim=72, blocks=(64, 128), block_masks="bits", key_mask=True)
    assert BACKEND.why_not(request) == []
    assert BACKEND.why_not(replace(request, needs_grad=True, lse_grad=True, deterministic=True, block_masks="interval")) == []
    for change, words in (
        ({"blocks": None}, "lists of blocks only"),
        ({"blocks": (32, 64)}, "64x64"),
        ({"window": True}, "window"),
        ({"dropout": True}, "dropout"),
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 264}, "256"),
        ({"hardware": replace(hopper, packages=frozenset())}, "triton is not installed"),
        ({"hardware": replace(hopper, capability=(7, 5)), "dtype": torch.float16}, "8.0"),
        ({"hardware": replace(hopper, capability=(8, 9)), "dtype": torch.float32, "head_dim": 256}, "shared memory"),
    ):
        reasons = BACKEND.why_not(replace(request, **change))
        assert len(reasons) == 1 and words in reasons[0], (change, reasons)


def test_tiles_fit_blocks_and_the_kernels() -> None:
    for dtype, head_dim, capability in itertools.product(
        (torch.float16, torch.float32), (8, 64, 96, 256), ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0), None)
    ):
        if dtype is torch.float32 and head_dim == 256 and capability in ((8, 6), (12, 0)):
            continue
        tuning = under_test.default_tuning(dtype, head_dim, capability)
        for tile in (tuning.forward, tuning.dq, tuning.dkdv):
            assert 64 % min(tile.rows, 64) == 128 % tile.rows == 64 % min(tile.keys, 64) == 128 % tile.keys == 0
            assert tile.rows >= 16 and tile.keys >= 32


def test_the_package_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import dilated_attention; assert 'triton' in dilated_attention.backends.registry.names()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


COMPILED = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dilated_attention.backends import triton_blocks_kernels as kernels
from dilated_attention.backends.triton_blocks import default_tuning

halves = {"q_ptr", "k_ptr", "v_ptr", "out_ptr", "dout_ptr", "dq_ptr", "dk_ptr", "dv_ptr"}
for capability, memory, names in (((8, 0), 163, ["dkdv"]), ((9, 0), 227, ["forward", "dq", "dkdv"])):
    tuning = default_tuning(torch.bfloat16, 64, capability)
    for name in names:
        tile = getattr(tuning, name)
        kernel = getattr(kernels, f"{name}_kernel")
        constants = {"WALK": (128, 128, tile.rows, tile.keys), "GROUP": 1, "D": 64, "BLOCK_D": 64, "MASKS": 2, "NEGATIVE": False}
        constants |= {"PADDED": False, "EVEN": True, "ALIGN": 16, "WIDE": False}
        signature, values, aligned = {}, {}, {}
        for i, parameter in enumerate(kernel.params):
            pointer = parameter.name.endswith("_ptr")
            if parameter.is_constexpr:
                signature[parameter.name], values[(i,)] = "constexpr", constants[parameter.name]
            elif pointer:
                kind = "*bf16" if parameter.name in halves else "*fp32" if parameter.name in ("lse_ptr", "offset_ptr", "delta_ptr") else "*i32"
                signature[parameter.name], aligned[(i,)] = kind, [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32" if parameter.name == "scale" else "i32"
        source = ASTSource(kernel, signature, values, aligned)
        target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
        made = triton.compile(source, target=target, options={"num_warps": tile.warps, "num_stages": tile.stages})
        assert made.metadata.shared <= memory * 1024, (name, capability, made.metadata.shared)
        # both streamed tensors are loaded ahead, 16 bytes at a time
        copies = [line for line in made.asm["ptx"].splitlines() if "cp.async.cg.shared.global" in line and "0x10" in line]
        assert len(copies) >= 4, (name, capability, copies)
"""


def test_compiled_loads_run_ahead(tmp_path: Path) -> None:
    """What the interpreter cannot show: a stride whose alignment the compiler does not know would halve the rate unseen."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
