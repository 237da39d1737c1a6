"""The ops of branches, of blocks and of both: registration with torch, and how they live under compile, export, checkpointing, autocast.

Their results in each of these forms: tests/engine/test_oracle.py.
"""

import copy
import gc
import re
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

from dilated_attention import DilatedPattern, attention, block_sparse_attention, block_sparse_dilated_attention, dilated_attention
from dilated_attention.engine.blocks.lists import clear_block_lists
from dilated_attention.engine.branches import run_problems
from dilated_attention.engine.ops import resolve_blocks
from dilated_attention.pattern import BlockTensor, LocalWindow, MaskFunction, PerHead, Sparsity, Strided, TopBlocks
from dilated_attention.testing import Case, Space, call, inputs, random_case, results
from dilated_attention.testing.oracle import block_multiplicities, multiplicities
from tests.helpers.forms import FORMS, Looks
from tests.helpers.fused import run_fused
from tests.helpers.op_settings import calls_of

OPS = torch.ops.dilated_attention
WINDOW = LocalWindow((20, 3), block_size=64)
LENGTHS, RATES = (16, 64), (1, 3)
Function = Callable[..., Any]


def dilated(*qkv: torch.Tensor, **options: Any) -> Any:
    return dilated_attention(*qkv, LENGTHS, RATES, **options)


def blocks(*qkv: torch.Tensor, pattern: Any = WINDOW, **options: Any) -> Any:
    return block_sparse_attention(*qkv, pattern, **options)


def both(*qkv: torch.Tensor, pattern: Any = WINDOW, **options: Any) -> Any:
    return block_sparse_dilated_attention(*qkv, LENGTHS, RATES, pattern, **options)


# each kind with its op
KINDS: dict[str, tuple[Function, str]] = {
    "dilated": (dilated, "dilated_attention"),
    "blocks": (blocks, "block_sparse_attention"),
    "both": (both, "block_sparse_dilated_attention"),
}
FORWARDS = [getattr(OPS, name).default for _, name in KINDS.values()]
of_every_kind = pytest.mark.parametrize("function", [function for function, _ in KINDS.values()], ids=KINDS)
TORCHSCALE: dict[str, Any] = {"mixture_grad": "detached", "tail": "zero_keys", "head_offsets": "blocked"}


def make_qkv(
    batch: int = 1, queries: int = 80, keys: int = 80, heads: int = 2, kv_heads: int = 1, dim: int = 4, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, queries, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


# --- registration ---------------------------------------------------------------------------------------------------------------------

SMALL = Space(softcap=True, bias=True, max_length=20, head_dims=(4,))
# drawn so that few have every option, of branches, of blocks and of both; and nothing to attend to
CHECKED = [random_case(seed, SMALL) for seed in (22, 78, 125, 140, 163, 250)]
CHECKED += [random_case(seed, replace(SMALL, blocks=True)) for seed in (94, 140, 163, 167, 180, 224, 250, 303, 385)]
# whole segments: places of positions that there are not hold nothing that could be compared; fakes have the strides of real results
SAVED_PATTERN = DilatedPattern((2, 4), (1, 2), "blocked", tail="zero_keys")
LAYOUTS = ("heads_first",) * 4
SAVED = Case(pattern=SAVED_PATTERN, mixture_grad="detached", num_queries=8, num_keys=8, heads=2, kv_heads=2, layouts=LAYOUTS)


@pytest.mark.parametrize("index", range(len(CHECKED) + 1))
def test_the_ops_pass_every_opcheck(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward."""
    case = [*CHECKED, SAVED][index]
    if case is SAVED:
        run_fused(monkeypatch)
    seen: list[tuple[Any, Any]] = []
    with Looks(lambda *called: seen.append(called)):
        results(call, case, inputs(case, (torch.float64, torch.bfloat16)[index % 2]))
    # of attention, and of choices
    *choices, (forward, arguments), (backward, given) = (
        (op, x) for op, x in seen if op.namespace == "dilated_attention" and re.search("::.*(attention|choose)", op._schema.name)
    )
    passed = {"SUCCESS"}
    leaves = [x.detach().requires_grad_() for x in arguments[:3]]
    assert set(torch.library.opcheck(forward, (*leaves, *arguments[3:])).values()) == passed
    assert (forward(*arguments)[2].numel() > 0) == (case is SAVED)
    # its gradient is refused, so nothing is dispatched
    without_gradient = ("test_schema", "test_faketensor", "test_autograd_registration")
    for op, of_op in (*choices, (backward, given)):
        assert set(torch.library.opcheck(op, of_op, test_utils=without_gradient).values()) == passed


# --- gradients ------------------------------------------------------------------------------------------------------------------------


@of_every_kind
@pytest.mark.parametrize("is_op", [False, True], ids=["eager", "op"])
def test_second_derivatives_are_refused_with_a_way_out(is_op: bool, function: Function) -> None:
    q, k, v = make_qkv()
    with Looks() if is_op else torch.enable_grad():
        (dq,) = torch.autograd.grad(function(q, k, v).square().sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match=r"no second derivative.*(reference_attention|dense_mask)"):
            torch.autograd.grad(dq.sum(), k)


@of_every_kind
def test_only_inputs_that_need_a_gradient_get_one(function: Function) -> None:
    q, k, v = make_qkv()
    k.requires_grad_(False)
    function(q, k, v).sum().backward()
    assert q.grad is not None and v.grad is not None and k.grad is None
    assert not dilated(q, k, v, mixture_grad="detached", return_lse=True)[1].requires_grad


def test_a_pattern_that_nobody_else_holds_lives_until_the_backward() -> None:
    q, k, v = make_qkv()
    out = block_sparse_attention(q, k, v, MaskFunction(lambda b, h, i, j: i - j < 9, block_size=64))
    # the cache of lists would hold it too, until other patterns fill it
    clear_block_lists()
    gc.collect()
    out.sum().backward()
    assert q.grad is not None


# --- torch.compile and torch.export -----------------------------------------------------------------------------------------------------


def compiled(function: Function, backend: str = "aot_eager", **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


@pytest.mark.parametrize("kind", [*KINDS, "saved"])
def test_lengths_share_one_dynamic_graph(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, options = KINDS.get(kind, KINDS["dilated"])[0], {"is_causal": True}
    if kind == "saved":
        # branches' outputs, whose number follows from the length
        run_fused(monkeypatch)
        options = TORCHSCALE
    graph, counter = compiled(lambda *x: function(*x, **options), dynamic=True)
    frames = []
    for length in (64, 65, 130, 200):
        inputs = make_qkv(1, length, length, 2, 2)
        both = []
        for attend in (graph, lambda *x: function(*x, **options)):
            out = attend(*inputs)
            both.append((out, *torch.autograd.grad(out.sum(), inputs)))
        frames.append(counter.frame_count)
        assert all(map(torch.equal, *both))
    # dynamic=True traces the first call twice: it takes dropout_p for an input and then learns that it is a constant
    assert frames[0] <= 2 and frames == [frames[0]] * 4


def test_decoding_steps_share_one_graph_after_the_first_pair() -> None:
    graph, counter = compiled(lambda q, k, v, step: dilated(q, k, v, is_causal=True, query_offset=step))
    _, k, v = (x.detach() for x in make_qkv(1, 1, 9, 2, 2, 4))
    q = torch.ones(1, 1, 2, 4, dtype=torch.float64)
    for step in (3, 4, 5, 6, 7):
        assert torch.equal(graph(q, k, v, step), dilated(q, k, v, is_causal=True, query_offset=step))
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_patterns_that_a_compiled_function_is_given_or_makes_are_the_ones_it_uses() -> None:
    inputs = [x.detach() for x in make_qkv(1, 130, 130)]
    table = BlockTensor(torch.eye(3, dtype=torch.bool), block_size=64)
    given = [LocalWindow(3), LocalWindow(4), LocalWindow(3) | Strided(2), Sparsity(0.3), Sparsity(0.9)]
    other = [table, copy.deepcopy(table), BlockTensor(~table.mask, block_size=64), TopBlocks(density=0.4, block_size=64)]

    def made(width: int) -> torch.Tensor:
        return block_sparse_attention(*inputs, LocalWindow((width, 0)) | Sparsity(1 / width, seed=width))

    for function, arguments in (
        (lambda pattern: blocks(*inputs, pattern=pattern), given),
        (lambda pattern: blocks(*inputs, pattern=pattern), [*other, PerHead((WINDOW, WINDOW))]),
        (made, [3, 5, 8]),
    ):
        graph, _ = compiled(function)
        for argument in arguments:
            assert torch.equal(graph(argument), function(argument)), argument


def test_what_a_compiled_function_cannot_take_is_refused_with_a_way_out() -> None:
    inputs = make_qkv(1, 128, 128)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    for make, way_out in ((lambda: MaskFunction(lambda b, h, i, j: i >= j), "make it outside"), (lambda: mask, "from_block_mask")):
        with pytest.raises(Exception, match=way_out):
            compiled(lambda *x, make=make: blocks(*x, pattern=make()))[0](*inputs)


class Attend(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return self.function(q, k, v, is_causal=True)


@of_every_kind
def test_an_exported_program_runs_at_other_lengths(function: Function) -> None:
    length = torch.export.Dim("length", min=2, max=1024)
    made = tuple(x.detach() for x in make_qkv(1, 100, 100, 2, 2))
    program = torch.export.export(Attend(function), made, dynamic_shapes=({1: length},) * 3)
    assert any(node.target in FORWARDS for node in program.graph.nodes)
    other = [x.detach() for x in make_qkv(1, 150, 150, 2, 2)]
    assert torch.equal(program.module()(*other), function(*other, is_causal=True))


# --- checkpointing, autocast, tensors without values ------------------------------------------------------------------------------------


def keep_attention(ctx: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if function in FORWARDS else CheckpointPolicy.PREFER_RECOMPUTE


@of_every_kind
def test_a_kept_op_runs_once_with_equal_gradients(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_qkv()

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return function(q.sin(), k.cos(), v, dropout_p=0.4).exp()

    torch.manual_seed(5)
    plain = torch.autograd.grad(block(*inputs).sum(), inputs)
    calls = calls_of(monkeypatch, *((resolve_blocks, "run_lists") if function is blocks else (run_problems, "run_forward")))
    torch.manual_seed(5)
    out = checkpoint(block, *inputs, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(keep_attention))
    again = torch.autograd.grad(out.sum(), inputs)
    # of q, k and v: the backward reads more
    forwards = [given for _, given in calls if function is not blocks or len(given[2]) == 3]
    assert len(forwards) == 1 and all(map(torch.equal, plain, again))


@pytest.mark.parametrize("form", ["eager", "ring"])
@pytest.mark.parametrize("blocks", [False, True])
def test_autocast_only_casts_the_inputs(blocks: bool, form: str) -> None:
    """Inside the op a backend's float32 arithmetic must stay float32, forward and backward, though autocast is on around it."""
    function, fitting = FORMS[form]
    for seed in range(20):
        case = fitting(random_case(seed, Space(softcap=True, bias=True, blocks=blocks, max_length=150 if blocks else 70)))
        for dtype, low in ((torch.float32, torch.bfloat16), (torch.float64, torch.float64)):
            x = inputs(case, dtype)
            with torch.autocast("cpu", torch.bfloat16):
                found = results(function, case, x)
            by_hand = results(function, case, replace(x, q=x.q.to(low), k=x.k.to(low), v=x.v.to(low)))
            assert found["out"].dtype is low and found["dq"].dtype is dtype
            assert all(torch.equal(found[name].double(), by_hand[name].double()) for name in by_hand), case


# --- counted FLOPs ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [False, True])
def test_counted_flops_are_those_of_the_pairs(blocks: bool) -> None:
    """Four of a pair and channel in the forward, ten in the backward; for branches, packed documents count as one sequence."""
    for seed in range(40):
        case = replace(random_case(seed, Space(softcap=True, bias=True, blocks=blocks, max_length=300 if blocks else 70)), padding="none")
        case = case if case.dilated is None else replace(case, bounds=None)
        x = inputs(case, torch.float64)
        pairs = case.batch * int(multiplicities(case, None)[0].sum()) + (int(block_multiplicities(case, x).sum()) if blocks else 0)
        with FlopCounterMode(display=False) as counter:
            results(call, case, x)
        assert counter.get_total_flops() == 14 * case.head_dim * pairs, case


SETTINGS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "softcap": (lambda q, x: attention(q, q, q, softcap=x), (0.5, 0.75, 2)),
    "window": (lambda q, x: attention(q, q, q, window=x), (3, 4)),
    "sides of a window": (lambda q, x: attention(q, q, q, window=x), ((3, 4), (2, None))),
    "offsets": (lambda q, x: dilated_attention(q, q, q, [8], [4], head_offsets=x), ([[0, 1, 2, 3]], [[3, 2, 1, 0]])),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_is_a_symbol_to_the_compiler_becomes_a_constant(name: str) -> None:
    function, values = SETTINGS[name]
    q = torch.randn(1, 20, 4, 8)
    torch.compiler.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=True)
    for value in values:
        torch.testing.assert_close(compiled(q, value), function(q, value))
