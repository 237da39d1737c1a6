"""The custom op: its gradients, its registration with torch, and how it lives under compile, export, checkpointing, autocast."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention import DilatedPattern, attention, dilated_attention
from dilated_attention.engine.branches import sequential
from dilated_attention.engine.ops import prepare as prepare_module
from dilated_attention.engine.reference import reference_attention
from tests.helpers.op_settings import settings

FORWARD = torch.ops.dilated_attention.dilated_attention.default
BACKWARD = torch.ops.dilated_attention.dilated_attention_backward.default
BRANCHES = [([4], [1]), ([5], [2]), ([3, 6], [1, 2]), ([2, 4, 8], [1, 2, 3]), ([4, 4], [1, 4]), ([16], [3])]
KINDS = ["plain", "offset", "padding", "documents", "dropout", "zero_keys", "lists", "split", "blocked"]


def make_qkv(
    batch: int, queries: int, keys: int, heads: int, kv_heads: int, dim: int, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, queries, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def random_case(index: int) -> dict[str, Any]:
    """Case ``index`` of the gradient sweep: branches and kinds of option in turn, the rest drawn."""
    draw = random.Random(index)
    lengths, rates = BRANCHES[index % len(BRANCHES)]
    heads, kv_heads = draw.choice([(1, 1), (2, 2), (2, 1), (4, 2), (3, 3)])
    keys = draw.randint(3, 7) if heads < 3 else draw.randint(2, 5)
    kind = KINDS[index // len(BRANCHES) % len(KINDS)]
    case: dict[str, Any] = {"lengths": lengths, "rates": rates, "heads": heads, "kv_heads": kv_heads, "keys": keys, "queries": keys}
    options: dict[str, Any] = {"is_causal": draw.random() < 0.5, "backend": draw.choice(["math", "sdpa_cpu"])}
    case |= {"kind": kind, "options": options, "batch": 2 if heads == 1 and kind != "documents" else 1}
    if kind == "offset":
        case["queries"] = draw.randint(1, keys)
        options["query_offset"] = keys - case["queries"]
    elif kind == "padding":
        generator = torch.Generator().manual_seed(index)
        options["key_padding_mask"] = torch.rand(case["batch"], keys, generator=generator) < 0.4
    elif kind == "documents":
        cut = draw.randint(0, keys)
        options["cu_seqlens"] = torch.tensor([0, cut, keys], dtype=torch.int32)
    elif kind == "dropout":
        options |= {"dropout_p": 0.3, "backend": "math"}
    elif kind == "zero_keys":
        options |= {"tail": "zero_keys", "is_causal": False}
    elif kind == "lists":
        options["head_offsets"] = [[draw.randrange(rate) for _ in range(heads)] for rate in rates]
    elif kind == "split":
        options["branch_heads"] = "split"
    elif kind == "blocked":
        options["head_offsets"] = "blocked"
    return case


def inputs_of(case: dict[str, Any]) -> list[torch.Tensor]:
    return make_qkv(case["batch"], case["queries"], case["keys"], case["heads"], case["kv_heads"], 2)


def pattern_of(case: dict[str, Any]) -> DilatedPattern:
    options = case["options"]
    return DilatedPattern(
        case["lengths"],
        case["rates"],
        options.get("head_offsets", "cyclic"),
        options.get("branch_heads", "all"),
        options.get("tail", "mask"),
    )


@pytest.mark.parametrize("index", range(66))
def test_gradients_of_out_and_lse_are_those_of_finite_differences(index: int) -> None:
    case = random_case(index)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(index)
        out, lse = dilated_attention(q, k, v, case["lengths"], case["rates"], return_lse=True, **case["options"])
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(run, inputs_of(case), check_batched_grad=False)


@pytest.mark.parametrize(
    "options", [{"window": 1}, {"window": (2, None), "is_causal": True}, {"window": (0, 1)}, {"is_causal": True}], ids=str
)
def test_gradients_of_dense_and_windowed_attention_are_those_of_finite_differences(options: dict[str, Any]) -> None:
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, return_lse=True, **options), make_qkv(1, 6, 6, 2, 1, 2))


def grads(function: Any, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    out = function(*inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad((out.double() * weights).sum(), inputs)


@pytest.mark.parametrize("index", [i for i in range(54) if random_case(i)["kind"] != "dropout"])
def test_detached_mixture_gradients_are_those_of_the_reference(index: int) -> None:
    case = random_case(index)
    options = {
        key: value for key, value in case["options"].items() if key in ("is_causal", "query_offset", "cu_seqlens", "key_padding_mask")
    }
    inputs = inputs_of(case)
    ours = grads(lambda *x: dilated_attention(*x, case["lengths"], case["rates"], mixture_grad="detached", **case["options"]), inputs)
    theirs = grads(lambda *x: reference_attention(*x, pattern_of(case), mixture_grad="detached", **options)[0], inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_detached_and_exact_mixture_agree_forward_and_differ_backward() -> None:
    inputs = make_qkv(1, 8, 8, 2, 2, 4)
    exact = dilated_attention(*inputs, [4, 8], [1, 2])
    detached, lse = dilated_attention(*inputs, [4, 8], [1, 2], mixture_grad="detached", return_lse=True)
    assert torch.equal(exact, detached)
    assert not lse.requires_grad
    dq, dq_detached = (torch.autograd.grad(out.square().sum(), inputs[0])[0] for out in (exact, detached))
    assert (dq - dq_detached).abs().max() > 1e-3


def test_second_derivatives_are_refused_with_a_way_out() -> None:
    inputs = make_qkv(1, 4, 4, 1, 1, 2)
    (dq,) = torch.autograd.grad(dilated_attention(*inputs, [4], [1]).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative.*reference_attention"):
        torch.autograd.grad(dq.sum(), inputs[1])


def test_only_inputs_that_need_a_gradient_get_one() -> None:
    q, k, v = make_qkv(1, 6, 6, 2, 2, 2)
    k.requires_grad_(False)
    dilated_attention(q, k, v, [3], [1]).sum().backward()
    assert q.grad is not None and v.grad is not None and k.grad is None


@pytest.mark.parametrize("enabled", [True, False])
def test_the_backend_is_asked_for_a_backward_only_where_autograd_records(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    select = prepare_module.registry.select
    monkeypatch.setattr(prepare_module.registry, "select", lambda request, name: asked.append(request.needs_grad) or select(request, name))
    with torch.set_grad_enabled(enabled):
        dilated_attention(*make_qkv(1, 4, 4, 1, 1, 2), [4], [1])
    assert asked and any(asked) is enabled


def op_arguments(index: int, *, requires_grad: bool) -> tuple[Any, ...]:
    """Arguments of the forward op, one set for each optional argument."""
    sets: list[dict[str, Any]] = [
        {},
        {"is_causal": True, "kv_heads": 1},
        {"mask": torch.tensor([[False, True, False, False, True, False]] * 2), "backend": "math"},
        {"batch": 1, "cu": torch.tensor([0, 2, 6], dtype=torch.int32)},
        {"seed": torch.tensor(7), "dropout": 0.25, "backend": "math"},
        {"offsets": ((0, 0), (1, 0))},
        {"queries": 2, "query_offset": 3, "is_causal": True},
        {"lengths": (2**62,), "rates": (1,), "offsets": "zero", "window": (2, 1)},
        {"tail": "zero_keys", "detached": True, "offsets": "blocked"},
        {"heads": "split", "dtype": torch.bfloat16},
        {"keys": 0, "queries": 0},
        {"sinks": torch.tensor([0.5, -2.0], dtype=torch.float64)},
    ]
    given = sets[index]
    batch, keys = given.get("batch", 2), given.get("keys", 6)
    q, k, v = make_qkv(batch, given.get("queries", keys), keys, 2, given.get("kv_heads", 2), 4, dtype=given.get("dtype", torch.float64))
    tensors = [x.detach().requires_grad_(requires_grad) for x in (q, k, v)]
    offsets, heads, tail = given.get("offsets", "cyclic"), given.get("heads", "all"), given.get("tail", "mask")
    call = settings(
        branches=(given.get("lengths", (3, 4)), given.get("rates", (1, 2)), offsets, heads, tail),
        window=given.get("window", ()),
        is_causal=given.get("is_causal", False),
        query_offset=given.get("query_offset", 0),
        dropout_p=given.get("dropout", 0.0),
        detached=given.get("detached", False),
        needs_grad=requires_grad,
        backend=given.get("backend", "auto"),
    )
    return (*tensors, given.get("mask"), given.get("cu"), given.get("seed"), None, given.get("sinks"), *call.arguments())


@pytest.mark.parametrize("index", range(12))
def test_the_forward_op_passes_every_opcheck(index: int) -> None:
    """Every fourth call without gradients, whose checks are a part of those with them."""
    arguments = op_arguments(index, requires_grad=index % 4 != 3)
    assert set(torch.library.opcheck(FORWARD, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("index", range(12))
def test_the_backward_op_passes_every_opcheck(index: int) -> None:
    """With and without a gradient of lse, every other pair of calls."""
    with_dlse = index // 2 % 2 == 0
    arguments = op_arguments(index, requires_grad=False)
    out, lse, kept = FORWARD(*arguments)
    dlse = torch.ones_like(lse) if with_dlse else None
    results = torch.library.opcheck(BACKWARD, (torch.ones_like(out), dlse, *arguments[:3], out, lse, kept, *arguments[3:]))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("lengths", "rates", "length"), [([4, 8], [1, 2], 16), ([4, 6], [3, 4], 17), ([2**40], [1], 9)])
def test_counted_flops_are_those_of_the_pattern(lengths: list[int], rates: list[int], length: int, is_causal: bool) -> None:
    inputs = make_qkv(2, length, length, 4, 2, 8)
    with FlopCounterMode(display=False) as counter:
        out = dilated_attention(*inputs, lengths, rates, is_causal=is_causal)
        forward = counter.get_total_flops()
        out.sum().backward()
    per_sequence = DilatedPattern(lengths, rates).flops(length, 4, 8, is_causal=is_causal)
    assert (forward, counter.get_total_flops() - forward) == tuple(2 * flops for flops in per_sequence)


def compiled(function: Any, backend: str = "aot_eager", **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


COMPILE_OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "offset_lists": {"head_offsets": [[0, 0], [1, 0]], "deterministic": True},
    "padding": {"key_padding_mask": torch.arange(10)[None] > 6},
    "documents": {"cu_seqlens": torch.tensor([0, 4, 10], dtype=torch.int32)},
    "detached": {"mixture_grad": "detached", "tail": "zero_keys"},
    "dropout": {"dropout_p": 0.5},
}


@pytest.mark.parametrize("name", COMPILE_OPTIONS)
@pytest.mark.filterwarnings("error:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_graph_equals_eager_forward_and_backward(name: str) -> None:
    check_compiled_equals_eager("aot_eager", COMPILE_OPTIONS[name])


def test_an_inductor_graph_equals_eager_forward_and_backward() -> None:
    check_compiled_equals_eager("inductor", {"is_causal": True})


def check_compiled_equals_eager(backend: str, options: dict[str, Any]) -> None:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = dilated_attention(q * 2, k, v, [4, 8], [1, 2], return_lse=True, **options)
        return out.sin() + lse.masked_fill(lse == -torch.inf, 0.0).transpose(1, 2)[..., None]

    inputs = make_qkv(1, 10, 10, 2, 1, 4)
    graph, _ = compiled(run, backend)
    results = []
    for function in (run, graph):
        torch.manual_seed(3)
        out = function(*inputs)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), inputs)))
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-12, atol=1e-12)


def test_four_lengths_share_one_dynamic_graph() -> None:
    graph, counter = compiled(lambda *x: dilated_attention(*x, [4, 8], [1, 2], is_causal=True), dynamic=True)
    frames = []
    for length in (16, 17, 23, 40):
        inputs = make_qkv(1, length, length, 2, 2, 4)
        out = graph(*inputs)
        out.sum().backward()
        frames.append(counter.frame_count)
        assert torch.equal(out, dilated_attention(*inputs, [4, 8], [1, 2], is_causal=True))
    # dynamic=True traces the first call twice: it takes dropout_p for an input and then learns that it is a constant
    assert frames[0] <= 2 and frames == [frames[0]] * 4


def test_decoding_steps_share_one_graph_after_the_first_pair() -> None:
    graph, counter = compiled(lambda q, k, v, step: dilated_attention(q, k, v, [4, 8], [1, 2], is_causal=True, query_offset=step))
    _, k, v = (x.detach() for x in make_qkv(1, 1, 9, 2, 2, 4))
    q = torch.ones(1, 1, 2, 4, dtype=torch.float64)
    for step in (3, 4, 5, 6, 7):
        assert torch.equal(graph(q, k, v, step), dilated_attention(q, k, v, [4, 8], [1, 2], is_causal=True, query_offset=step))
    assert counter.frame_count <= 2


class Attend(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dilated_attention(q, k, v, [4, 8], [1, 2], is_causal=True)


def test_an_exported_program_runs_at_other_lengths() -> None:
    q, k, v = (x.detach() for x in make_qkv(1, 12, 12, 2, 2, 4))
    length = torch.export.Dim("length", min=2, max=1024)
    program = torch.export.export(Attend(), (q, k, v), dynamic_shapes=({1: length},) * 3)
    assert any(node.target is FORWARD for node in program.graph.nodes)
    other = [x.detach() for x in make_qkv(1, 21, 21, 2, 2, 4, seed=1)]
    assert torch.equal(program.module()(*other), Attend()(*other))


def count_forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls = [0]
    run_forward = sequential.run_forward

    def counted(*arguments: Any) -> Any:
        calls[0] += 1
        return run_forward(*arguments)

    monkeypatch.setattr(sequential, "run_forward", counted)
    return calls


def keep_attention(ctx: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if function is FORWARD else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("policy", "forwards"), [(None, 2), (keep_attention, 1)], ids=["recompute_all", "keep_attention"])
def test_checkpointed_gradients_are_equal_and_a_kept_op_runs_once(policy: Any, forwards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_qkv(1, 8, 8, 2, 2, 4)

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dilated_attention(q.sin(), k.cos(), v, [4, 8], [1, 2], dropout_p=0.4).exp()

    torch.manual_seed(5)
    plain = torch.autograd.grad(block(*inputs).sum(), inputs)
    calls = count_forwards(monkeypatch)
    extra = {} if policy is None else {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}
    torch.manual_seed(5)
    again = torch.autograd.grad(checkpoint(block, *inputs, use_reentrant=False, **extra).sum(), inputs)
    assert calls == [forwards]
    for kept, recomputed in zip(plain, again, strict=True):
        assert torch.equal(kept, recomputed)


@pytest.mark.parametrize("backend", ["math", "sdpa_cpu"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_autocast_only_casts_the_inputs(backend: str, return_lse: bool) -> None:
    """Inside the op a backend's float32 arithmetic must stay float32, forward and backward, though autocast is on around it."""

    def run(*qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = dilated_attention(*qkv, [16, 32], [1, 2], backend=backend, return_lse=return_lse)
        parts = result if return_lse else (result,)
        loss = sum(part.float().masked_fill(part == -torch.inf, 0.0).square().sum() for part in parts)
        return *parts, *torch.autograd.grad(loss, qkv)

    inputs = [x.detach().requires_grad_() for x in make_qkv(1, 48, 48, 2, 2, 16, dtype=torch.float32)]
    with torch.autocast("cpu", torch.bfloat16):
        automatic = run(*inputs)
    by_hand = run(*(x.detach().bfloat16().requires_grad_() for x in inputs))
    assert automatic[0].dtype is torch.bfloat16 and automatic[-1].dtype is torch.float32
    for ours, expected in zip(automatic, by_hand, strict=True):
        assert torch.equal(ours.float(), expected.float())


def test_autocast_leaves_float64_alone() -> None:
    inputs = make_qkv(1, 8, 8, 2, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out = dilated_attention(*inputs, [4], [1])
    assert torch.equal(out, dilated_attention(*inputs, [4], [1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_meta_tensors_give_shapes_dtypes_and_gradients(dtype: torch.dtype) -> None:
    q = torch.empty(2, 12, 4, 8, dtype=dtype, device="meta", requires_grad=True)
    k = torch.empty(2, 12, 2, 8, dtype=dtype, device="meta", requires_grad=True)
    out, lse = dilated_attention(q, k, k, [4, 8], [1, 2], return_lse=True)
    out.sum().backward()
    assert (out.shape, out.dtype, out.device.type) == (q.shape, dtype, "meta")
    assert (lse.shape, lse.dtype) == ((2, 4, 12), torch.float64 if dtype is torch.float64 else torch.float32)
    assert q.grad is not None and q.grad.shape == q.shape and k.grad is not None and k.grad.shape == k.shape


def test_fake_outputs_have_the_strides_of_real_ones() -> None:
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in make_qkv(2, 8, 8, 4, 4, 8))
    real = dilated_attention(q, k, v, [4], [2], return_lse=True)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = dilated_attention(*(mode.from_tensor(x) for x in (q, k, v)), [4], [2], return_lse=True)
    for ours, expected in zip(fake, real, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (expected.shape, expected.stride(), expected.dtype)
