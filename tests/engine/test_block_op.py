"""The ops of block-sparse attention: registration, gradients, compile, export, checkpointing, autocast, counted FLOPs, bad input."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention import BackendUnavailable, DilatedPattern, block_sparse_attention, block_sparse_dilated_attention
from dilated_attention.backends import Dropout, Mask, Options, registry
from dilated_attention.backends.torch_ops.math import MathBackend
from dilated_attention.engine.blocks.bitmask import lists_of_kept
from dilated_attention.engine.blocks.launch import backward_lists, forward_lists
from dilated_attention.engine.blocks.lists import block_lists, clear_block_lists
from dilated_attention.engine.ops import resolve_blocks
from dilated_attention.pattern import (
    BigBird,
    BlockPattern,
    BlockTensor,
    Document,
    LocalWindow,
    MaskFunction,
    PerHead,
    RandomBlocks,
    Sparsity,
    Strided,
    TopBlocks,
)
from tests.functional.test_bad_input import BAD_CALLS, NoOps, bounds, refused, tensors
from tests.helpers.op_settings import settings

OPS = torch.ops.dilated_attention
WINDOW = LocalWindow((20, 3), block_size=64)
LENGTHS, RATES = [16, 64], [1, 3]
Function = Callable[..., Any]


def with_branches(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Any, **options: Any) -> Any:
    return block_sparse_dilated_attention(q, k, v, LENGTHS, RATES, pattern, **options)


FUNCTIONS = {"blocks": block_sparse_attention, "both": with_branches}
both = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def make_qkv(
    batch: int = 1, queries: int = 80, keys: int = 80, heads: int = 2, kv_heads: int = 1, dim: int = 4, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, queries, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


# --- registration ---------------------------------------------------------------------------------------------------------------------


def op_arguments(index: int, with_branches: bool, *, requires_grad: bool) -> tuple[Any, ...]:
    """Arguments of a forward op, one set for each optional argument."""
    sets: list[dict[str, Any]] = [
        {"is_causal": True},
        {"mask": torch.arange(80)[None].repeat(2, 1) % 3 == 0, "batch": 2},
        {"cu": torch.tensor([0, 30, 80], dtype=torch.int32)},
        {"seed": torch.tensor(7), "dropout": 0.25, "backend": "math"},
        {"queries": 9, "query_offset": 70, "dtype": torch.bfloat16},
        {"pattern": TopBlocks(1, block_size=64)},
        {"queries": 0, "keys": 0},
    ]
    given = sets[index]
    keys = given.get("keys", 80)
    made = make_qkv(given.get("batch", 1), given.get("queries", keys), keys, dtype=given.get("dtype", torch.float64))
    q, k, v = (x.detach().requires_grad_(requires_grad) for x in made)
    pattern, is_causal, offset = given.get("pattern", WINDOW), given.get("is_causal", False), given.get("query_offset", 0)
    kept = OPS.choose_blocks(q.detach(), k.detach(), None, None, pattern.spec(), is_causal, 0.5, offset) if pattern.is_chosen else None
    call = settings(
        branches=(tuple(LENGTHS), tuple(RATES), "cyclic", "all", "mask") if with_branches else None,
        blocks=pattern.spec(),
        is_causal=is_causal,
        query_offset=offset,
        dropout_p=given.get("dropout", 0.0),
        needs_grad=requires_grad,
        backend=given.get("backend", "auto"),
    )
    return (q, k, v, given.get("mask"), given.get("cu"), given.get("seed"), kept, given.get("sinks"), *call.arguments())


def ops(with_branches: bool) -> tuple[Any, Any]:
    if with_branches:
        return OPS.block_sparse_dilated_attention.default, OPS.block_sparse_dilated_attention_backward.default
    return OPS.block_sparse_attention.default, OPS.block_sparse_attention_backward.default


@pytest.mark.slow
@pytest.mark.parametrize(("index", "with_branches"), [*((index, False) for index in range(7)), (1, True), (4, True)])
def test_the_ops_pass_every_opcheck(index: int, with_branches: bool) -> None:
    forward, backward = ops(with_branches)
    passed = {"SUCCESS"}
    # its gradient is refused, so nothing is dispatched
    of_backward = ("test_schema", "test_faketensor", "test_autograd_registration")
    assert set(torch.library.opcheck(forward, op_arguments(index, with_branches, requires_grad=True)).values()) == passed
    arguments = op_arguments(index, with_branches, requires_grad=False)
    out, lse, saved = forward(*arguments)
    dlse = torch.ones_like(lse) if index % 2 else None
    given = (torch.ones_like(out), dlse, *arguments[:3], out, lse, saved, *arguments[3:])
    assert set(torch.library.opcheck(backward, given, test_utils=of_backward).values()) == passed


# --- gradients ------------------------------------------------------------------------------------------------------------------------

GRADCHECK: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "padding": {"key_padding_mask": torch.arange(70)[None] % 4 == 1},
    "documents": {"cu_seqlens": torch.tensor([0, 66, 70], dtype=torch.int32)},
    "dropout": {"dropout_p": 0.3},
    "sdpa_cpu": {"backend": "sdpa_cpu"},
    "deterministic": {"deterministic": True, "scale": 0.9},
}


@both
@pytest.mark.parametrize("name", GRADCHECK)
def test_gradients_of_out_and_lse_are_those_of_finite_differences(name: str, function: Function) -> None:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        out, lse = function(q, k, v, LocalWindow(5, block_size=64) & Strided(2, block_size=64), return_lse=True, **GRADCHECK[name])
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    # projections on random vectors: 70 rows have too many entries to be perturbed one by one
    assert torch.autograd.gradcheck(run, make_qkv(1, 70, 70, 2, 1, 1), fast_mode=True)


@both
def test_second_derivatives_are_refused_with_a_way_out(function: Function) -> None:
    q, k, v = make_qkv()
    (dq,) = torch.autograd.grad(function(q, k, v, WINDOW).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative.*dense_mask"):
        torch.autograd.grad(dq.sum(), k)


@both
def test_only_inputs_that_need_a_gradient_get_one(function: Function) -> None:
    q, k, v = make_qkv()
    k.requires_grad_(False)
    function(q, k, v, WINDOW).sum().backward()
    assert q.grad is not None and v.grad is not None and k.grad is None


@pytest.mark.parametrize("enabled", [True, False])
def test_a_backend_is_asked_for_a_backward_only_where_autograd_records(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    select = registry.select
    monkeypatch.setattr(registry, "select", lambda request, name: asked.append(request.needs_grad) or select(request, name))
    with torch.set_grad_enabled(enabled):
        block_sparse_attention(*make_qkv(), WINDOW)
    assert asked and any(asked) is enabled


def test_a_pattern_that_nobody_else_holds_lives_until_the_backward() -> None:
    q, k, v = make_qkv()
    out = block_sparse_attention(q, k, v, MaskFunction(lambda b, h, i, j: i - j < 9, block_size=64))
    # the cache of lists would hold it too, until other patterns fill it
    clear_block_lists()
    gc.collect()
    out.sum().backward()
    assert q.grad is not None


def test_equal_tables_of_different_content_are_different_patterns() -> None:
    q, k, v = make_qkv()
    kept = torch.tensor([[True, False], [False, True]])
    first, second = (block_sparse_attention(q, k, v, BlockTensor(table, block_size=64)) for table in (kept, ~kept))
    assert not torch.equal(first, second)


# --- torch.compile and torch.export -----------------------------------------------------------------------------------------------------


def compiled(function: Function, backend: str = "aot_eager", **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


@both
@pytest.mark.parametrize("name", ["causal", "padding", "documents", "dropout"])
@pytest.mark.filterwarnings("error:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_graph_equals_eager_forward_and_backward(name: str, function: Function) -> None:
    check_compiled_equals_eager("aot_eager", function, WINDOW | RandomBlocks(0.5, block_size=64), GRADCHECK[name])


def check_compiled_equals_eager(backend: str, function: Function, pattern: BlockPattern, options: dict[str, Any]) -> None:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = function(q * 2, k, v, pattern, return_lse=True, **options)
        return out.sin() + lse.masked_fill(lse == -torch.inf, 0.0).transpose(1, 2)[..., None]

    inputs = make_qkv(1, 70, 70)
    graph, _ = compiled(run, backend)
    results = []
    for made in (run, graph):
        torch.manual_seed(3)
        out = made(*inputs)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), inputs)))
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-12, atol=1e-12)


@both
def test_lengths_share_one_dynamic_graph(function: Function) -> None:
    graph, counter = compiled(lambda *x: function(*x, WINDOW, is_causal=True), dynamic=True)
    frames = []
    for length in (64, 65, 130, 200):
        inputs = make_qkv(1, length, length, 2, 2)
        out = graph(*inputs)
        out.sum().backward()
        frames.append(counter.frame_count)
        assert torch.equal(out, function(*inputs, WINDOW, is_causal=True))
    # dynamic=True traces the first call twice: it takes dropout_p for an input and then learns that it is a constant
    assert frames[0] <= 2 and frames == [frames[0]] * 4


@pytest.mark.slow
def test_patterns_that_a_compiled_function_is_given_or_makes_are_the_ones_it_uses() -> None:
    inputs = [x.detach() for x in make_qkv(1, 130, 130)]
    table = BlockTensor(torch.eye(3, dtype=torch.bool), block_size=64)
    given = [LocalWindow(3), LocalWindow(4), LocalWindow(3) | Strided(2), Sparsity(0.3), Sparsity(0.9)]
    held = [
        table,
        copy.deepcopy(table),
        BlockTensor(~table.mask, block_size=64),
        TopBlocks(density=0.4, block_size=64),
        PerHead((WINDOW, WINDOW)),
    ]
    for some in (given, held):
        graph, _ = compiled(lambda pattern: block_sparse_attention(*inputs, pattern))
        for pattern in some:
            assert torch.equal(graph(pattern), block_sparse_attention(*inputs, pattern)), pattern

    def made(width: int) -> torch.Tensor:
        return block_sparse_attention(*inputs, LocalWindow((width, 0)) | Sparsity(1 / width, seed=width))

    graph, _ = compiled(made)
    for width in (3, 5, 8):
        assert torch.equal(graph(width), made(width))


def test_a_pattern_that_holds_an_object_and_is_made_in_a_compiled_function_is_refused() -> None:
    inputs = make_qkv()
    graph, _ = compiled(lambda *x: block_sparse_attention(*x, MaskFunction(lambda b, h, i, j: i >= j)))
    with pytest.raises(Exception, match="make it outside"):
        graph(*inputs)


def test_a_block_mask_inside_a_compiled_function_is_refused_with_a_way_out() -> None:
    inputs = make_qkv(1, 128, 128)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    graph, _ = compiled(lambda *x: block_sparse_attention(*x, mask))
    with pytest.raises(Exception, match="from_block_mask"):
        graph(*inputs)


class Attend(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return block_sparse_attention(q, k, v, WINDOW, is_causal=True)


def test_an_exported_program_runs_at_other_lengths() -> None:
    length = torch.export.Dim("length", min=2, max=1024)
    made = tuple(x.detach() for x in make_qkv(1, 100, 100, 2, 2))
    program = torch.export.export(Attend(), made, dynamic_shapes=({1: length},) * 3)
    assert any(node.target is OPS.block_sparse_attention.default for node in program.graph.nodes)
    other = [x.detach() for x in make_qkv(1, 150, 150, 2, 2)]
    assert torch.equal(program.module()(*other), Attend()(*other))


# --- checkpointing, autocast, tensors without values ------------------------------------------------------------------------------------


def keep_attention(ctx: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    kept = (ops(False)[0], ops(True)[0])
    return CheckpointPolicy.MUST_SAVE if function in kept else CheckpointPolicy.PREFER_RECOMPUTE


@both
@pytest.mark.parametrize(("policy", "forwards"), [(None, 2), (keep_attention, 1)], ids=["recompute_all", "keep_attention"])
def test_checkpointed_gradients_are_equal_and_a_kept_op_runs_once(
    policy: Any, forwards: int, function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_qkv()

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return function(q.sin(), k.cos(), v, WINDOW, dropout_p=0.4).exp()

    torch.manual_seed(5)
    plain = torch.autograd.grad(block(*inputs).sum(), inputs)
    calls = []
    forward_lists = resolve_blocks.forward_lists
    monkeypatch.setattr(resolve_blocks, "forward_lists", lambda *x, **options: calls.append(1) or forward_lists(*x, **options))
    extra = {} if policy is None else {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}
    torch.manual_seed(5)
    again = torch.autograd.grad(checkpoint(block, *inputs, use_reentrant=False, **extra).sum(), inputs)
    assert len(calls) == forwards
    for kept, recomputed in zip(plain, again, strict=True):
        assert torch.equal(kept, recomputed)


@both
@pytest.mark.parametrize("backend", ["math", "sdpa_cpu"])
def test_autocast_only_casts_the_inputs(backend: str, function: Function) -> None:
    def run(*qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = function(*qkv, WINDOW, backend=backend, return_lse=True)
        loss = out.float().square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).square().sum()
        return out, lse, *torch.autograd.grad(loss, qkv)

    inputs = make_qkv(dim=16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        automatic = run(*inputs)
    by_hand = run(*(x.detach().bfloat16().requires_grad_() for x in inputs))
    assert automatic[0].dtype is torch.bfloat16 and automatic[-1].dtype is torch.float32
    for ours, expected in zip(automatic, by_hand, strict=True):
        assert torch.equal(ours.float(), expected.float())


@both
@pytest.mark.parametrize("pattern", [WINDOW, TopBlocks(1)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_meta_tensors_give_shapes_dtypes_and_gradients(dtype: torch.dtype, pattern: BlockPattern, function: Function) -> None:
    q = torch.empty(2, 70, 4, 8, dtype=dtype, device="meta", requires_grad=True)
    k = torch.empty(2, 70, 2, 8, dtype=dtype, device="meta", requires_grad=True)
    out, lse = function(q, k, k, pattern, return_lse=True)
    out.sum().backward()
    assert (out.shape, out.dtype, out.device.type) == (q.shape, dtype, "meta")
    assert (lse.shape, lse.dtype) == ((2, 4, 70), torch.float64 if dtype is torch.float64 else torch.float32)
    assert q.grad is not None and q.grad.shape == q.shape and k.grad is not None and k.grad.shape == k.shape


@both
@pytest.mark.parametrize("options", [{}, {"query_offset": 20}, {"cu_seqlens": torch.tensor([0, 9, 80])}], ids=str)
def test_fake_outputs_have_the_strides_of_real_ones(options: dict[str, Any], function: Function) -> None:
    queries = 60 if "query_offset" in options else 80
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in make_qkv(1, queries, 80))
    real = function(q, k, v, WINDOW, return_lse=True, **options)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = function(*(mode.from_tensor(x) for x in (q, k, v)), WINDOW, return_lse=True, **options)
    for ours, expected in zip(fake, real, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (expected.shape, expected.stride(), expected.dtype)


# --- counted FLOPs ------------------------------------------------------------------------------------------------------------------------


def counted(function: Function, inputs: list[torch.Tensor], pattern: BlockPattern, **options: Any) -> tuple[int, int]:
    with FlopCounterMode(display=False) as counter:
        out = function(*inputs, pattern, **options)
        forward = counter.get_total_flops()
        out.sum().backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", [WINDOW, BigBird(20, 3, 1, block_size=64), Sparsity(0.3, block_size=(128, 64))], ids=repr)
def test_counted_flops_are_those_of_the_pattern(pattern: BlockPattern, is_causal: bool) -> None:
    inputs = make_qkv(2, 200, 200, 4, 2, 8)
    expected = tuple(2 * x for x in pattern.flops(200, 4, 8, is_causal=is_causal))
    assert counted(block_sparse_attention, inputs, pattern, is_causal=is_causal) == expected
    branches = DilatedPattern(LENGTHS, RATES).flops(200, 4, 8, is_causal=is_causal)
    together = tuple(x + 2 * y for x, y in zip(expected, branches, strict=True))
    assert counted(with_branches, inputs, pattern, is_causal=is_causal) == together


def test_counted_flops_know_documents_offsets_and_choices() -> None:
    inputs = make_qkv(1, 200, 200, 2, 2, 8)
    pattern = LocalWindow((100, 7), block_size=64) & MaskFunction(lambda b, h, i, j: (i + j) % 3 > 0, block_size=64)
    documents = counted(block_sparse_attention, inputs, pattern, cu_seqlens=torch.tensor([0, 50, 200]))
    assert documents[0] == pattern.flops(50, 2, 8)[0] + pattern.flops(150, 2, 8)[0]
    some = [inputs[0][:, 90:150].detach().requires_grad_(), *inputs[1:]]
    pairs = int(pattern.dense_mask(60, 200, 2, query_offset=90).sum())
    assert counted(block_sparse_attention, some, pattern, query_offset=90) == (4 * 8 * pairs, 10 * 8 * pairs)
    top = TopBlocks(mass=0.5, block_size=64)
    chosen = top.choose(inputs[0], inputs[1], is_causal=True)
    assert counted(block_sparse_attention, inputs, top, is_causal=True) == chosen.flops(200, 2, 8, is_causal=True)


# --- bad input -------------------------------------------------------------------------------------------------------------------------

OF_BRANCHES = {"segment_lengths", "dilation_rates", "head_offsets", "branch_heads", "tail"}
SHARED = [case for case in BAD_CALLS if not set(case[1]) & (OF_BRANCHES | {"mixture_grad", "precision"})]
BRANCHES = [case for case in BAD_CALLS if set(case[1]) & OF_BRANCHES]
PATTERNS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("pattern None", None, ("pattern is None (NoneType)", "LocalWindow(512)", "BlockMask")),
    ("pattern a number", 0.1, ("pattern is 0.1 (float)",)),
    ("pattern a class", LocalWindow, ("pattern is <class", "(ABCMeta)")),
    ("pattern a tensor", torch.ones(2, 2, dtype=torch.bool), ("pattern is tensor", "(Tensor)")),
    ("pattern dilated", DilatedPattern([4], [1]), ("pattern is DilatedPattern", "expected a block pattern")),
]


@pytest.mark.parametrize(("arguments", "kind", "words"), [pytest.param(*case[1:], id=case[0]) for case in SHARED])
def test_refused_before_anything_runs(arguments: dict[str, Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    arguments = tensors() | {"pattern": WINDOW} | arguments
    with NoOps():
        refused(block_sparse_attention, arguments, kind, words)
        refused(block_sparse_dilated_attention, {"segment_lengths": [4], "dilation_rates": [1]} | arguments, kind, words)


@pytest.mark.parametrize(("arguments", "kind", "words"), [pytest.param(*case[1:], id=case[0]) for case in BRANCHES])
def test_bad_branches_are_refused_as_by_dilated_attention(arguments: dict[str, Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    arguments = tensors() | {"segment_lengths": [4, 8], "dilation_rates": [1, 2], "pattern": WINDOW} | arguments
    with NoOps():
        refused(block_sparse_dilated_attention, arguments, kind, words)


@both
@pytest.mark.parametrize(("pattern", "words"), [pytest.param(*case[1:], id=case[0]) for case in PATTERNS])
def test_what_is_no_pattern(pattern: Any, words: tuple[str, ...], function: Function) -> None:
    refused(function, tensors() | {"pattern": pattern}, TypeError, words)


@pytest.fixture
def no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts the run fails the test."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("ran before the input was refused")

    monkeypatch.setattr(resolve_blocks, "forward_lists", fail)


@both
@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"pattern": Document((3, 4))}, ValueError, ("lengths sum to 7", "8 positions")),
        ({"pattern": PerHead((WINDOW, WINDOW))}, ValueError, ("2 patterns", "4 heads")),
        ({"pattern": BlockTensor(torch.ones(3, 1, 1, dtype=torch.bool))}, ValueError, ("(3, 1, 1)", "4 heads")),
        (tensors(1) | {"cu_seqlens": bounds(0, 9)}, ValueError, ("cu_seqlens is [0, 9]", "N = 8")),
        ({"backend": "sdpa_cpu", "dropout_p": 0.5}, BackendUnavailable, ("sdpa_cpu", "dropout", "math")),
        ({"backend": "flash2"}, BackendUnavailable, ("flash2",)),
    ],
    ids=str,
)
def test_what_depends_on_shapes_is_refused_before_results_are_allocated(
    arguments: dict[str, Any], kind: type[Exception], words: tuple[str, ...], function: Function, no_results: None
) -> None:
    with pytest.raises(kind) as caught:
        function(**tensors() | {"pattern": WINDOW} | arguments)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


# --- launches --------------------------------------------------------------------------------------------------------------------------


class OneByOne(MathBackend):
    """As a library that takes one batch entry a launch."""

    capabilities = replace(MathBackend.capabilities, max_batch=1)


@pytest.mark.parametrize("chosen", [False, True])
def test_launches_that_a_backend_wants_cut_give_the_same(chosen: bool) -> None:
    q, k, v = (x.detach() for x in make_qkv(3, 80, 80))
    pattern = TopBlocks(1, block_size=64) if chosen else WINDOW
    if chosen:
        kept = OPS.choose_blocks(q, k, None, None, pattern.spec(), True, 0.5, 0)
        lists = lists_of_kept(kept, pattern, 80, 80, is_causal=True)
    else:
        lists = block_lists(pattern, 80, 2, is_causal=True, device="cpu")
    positions = torch.arange(80).expand(3, -1)
    dropout = Dropout(0.3, 5, torch.arange(3), torch.arange(2), positions, positions)
    options = Options(scale=0.5, mask=Mask(torch.arange(80)[None] % torch.tensor([[5], [7], [90]]) == 2), dropout=dropout)
    whole, cut = (forward_lists(backend, lists, q, k, v, options) for backend in (MathBackend(), OneByOne()))
    tensors_ = (torch.ones_like(q), q, k, v, *whole)
    grads = (backward_lists(backend, lists, tensors_, options, torch.ones_like(whole[1])) for backend in (MathBackend(), OneByOne()))
    for one, other in zip((*whole, *next(grads)), (*cut, *next(grads)), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-13)
