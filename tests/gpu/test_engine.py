"""The engine on a GPU: CUDA graphs, compiled modules, transient memory, what autograd keeps. Skipped without CUDA."""

import pytest
import torch

from benchmarks.case import Case
from benchmarks.truth import Truth
from dilated_attention import DilatedAttention, DilatedPattern, MultiheadDilatedAttention, dilated_attention
from dilated_attention.engine.branches import places
from tests.helpers.gpu_memory import captured, peak_of

pytestmark = [pytest.mark.gpu, pytest.mark.no_poison]

LENGTHS = [2048 << i for i in range(5)]
PAPER = [1, 2, 4, 6, 12]
GEOMETRIC = [1, 2, 4, 8, 16]


def make(n: int, heads: int, dim: int, *, batch: int = 1) -> list[torch.Tensor]:
    return [torch.randn(batch, n, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]


@pytest.mark.parametrize(
    ("n", "heads", "dim", "rates", "causal"),
    [
        (40_000, 12, 64, PAPER, False),
        (40_000, 12, 64, PAPER, True),
        (300_000, 16, 128, GEOMETRIC, True),
        (70_000, 16, 64, GEOMETRIC, False),
    ],
)
def test_sampled_rows_of_long_sequences(n: int, heads: int, dim: int, rates: list[int], causal: bool) -> None:
    """Ragged ends, several chunks, both passes, against float64."""
    q, k, v, _ = make(n, heads, dim)
    case = Case(name="", num_positions=n, num_heads=heads, head_dim=dim, dtype=q.dtype, device=q.device, is_causal=causal)
    truth = Truth(case, DilatedPattern(LENGTHS, rates), count=32)
    dout = truth.dout()
    out = dilated_attention(q, k, v, LENGTHS, rates, is_causal=causal)
    errors = truth.errors((q, k, v), dout, out.detach(), torch.autograd.grad(out, (q, k, v), dout))
    assert set(errors) == {"out", "dq", "dk", "dv"} and max(errors.values()) < 6e-3, errors


@pytest.mark.parametrize("causal", [False, True])
def test_both_passes_in_one_cuda_graph(causal: bool) -> None:
    q, k, v, dout = make(33_000, 12, 64)

    def step() -> tuple[torch.Tensor, ...]:
        out = dilated_attention(q, k, v, LENGTHS, PAPER, is_causal=causal)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    graph, results = captured(step)
    # calls of other lengths, which take the places of the captured one's tables in all caches
    for n in range(1000, 1600):
        dilated_attention(*(x[:, :n] for x in (q, k, v)), LENGTHS, PAPER, is_causal=causal)
    for _ in range(2):
        with torch.no_grad():
            for x in (q, k, v, dout):
                x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        expected = step()
        torch.testing.assert_close(results[0], expected[0], atol=0, rtol=0)
        for found, true in zip(results[1:], expected[1:], strict=True):
            # dq is summed by atomics, in no fixed order
            torch.testing.assert_close(found, true, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("kind", ["attention", "multihead"])
def test_compiled_max_autotune_equals_eager(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "attention":
        module: torch.nn.Module = DilatedAttention([512, 1024], [1, 2])
        inputs = [x.detach() for x in make(2048, 8, 64, batch=2)[:3]]
    else:
        module = MultiheadDilatedAttention(512, 8, [512, 1024], [1, 2], device="cuda", dtype=torch.bfloat16)
        inputs = [torch.randn(2, 2048, 512, device="cuda", dtype=torch.bfloat16)]
    compiled = torch.compile(module, mode="max-autotune")
    results = []
    for function in (module, compiled, compiled, compiled):
        leaves = [x.clone().requires_grad_() for x in inputs]
        if function is compiled:
            torch.compiler.cudagraph_mark_step_begin()
        out = function(*leaves)
        out = out[0] if isinstance(out, tuple) else out
        loss = (out.float() ** 2).mean()
        grads = torch.autograd.grad(loss, leaves)
        results.append([out.detach().clone(), *(g.clone() for g in grads)])
    for found in results[1:]:
        for x, y in zip(found, results[0], strict=True):
            torch.testing.assert_close(x, y, atol=2e-2 * float(y.abs().max()), rtol=2e-2)


@pytest.mark.xdist_group("large")
@pytest.mark.parametrize(
    ("n", "heads", "dim", "lengths", "rates"),
    [
        (2**19, 12, 64, LENGTHS, PAPER),
        (2**19, 16, 128, LENGTHS, GEOMETRIC),
        (200_000, 16, 24, [1024, 5792, 32768, 185363, 1048576], GEOMETRIC),
        (2**20, 16, 24, [1024, 4096, 32768, 262144, 1048576], GEOMETRIC),
        (2**22, 1, 64, [2048, 8192, 2**22], [1, 4, 64]),
        (2**24, 1, 64, [2048, 8192, 32768, 2**24], [1, 3, 9, 64]),
    ],
)
def test_transient_memory_keeps_to_the_limit(n: int, heads: int, dim: int, lengths: list[int], rates: list[int]) -> None:
    """In addition to inputs and results at most 512 MiB forward and 1 GiB backward, or 5 % of q, k and v, also of a single head whose
    longest segment is the whole sequence."""
    q, k, v, dout = make(n, heads, dim)
    limit, backward_limit = (places.transient_budget(3 * q.numel() * 2, is_backward=is_backward) for is_backward in (False, True))

    def forward() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return dilated_attention(q, k, v, lengths, rates, return_lse=True)  # type: ignore[no-any-return]

    out = dilated_attention(q, k, v, lengths, rates)
    forward_extra = peak_of(forward) - sum(x.nbytes for x in forward())
    backward_extra = peak_of(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)) - 3 * q.nbytes
    sizes = " / ".join(f"{size / 2**20:.0f}" for size in (forward_extra, backward_extra, limit, backward_limit))
    print(f"N {n} {heads}x{dim}: transient forward / backward, limits: {sizes} MiB")
    assert forward_extra <= limit and backward_extra <= backward_limit


def test_autograd_keeps_q_k_v_out_and_lse_alone() -> None:
    q, k, v, _ = make(2**17, 8, 64)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = dilated_attention(q, k, v, LENGTHS, GEOMETRIC)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    lse = 4 * q.shape[1] * q.shape[2]
    # small tables of offsets are kept for the next call
    assert kept <= out.numel() * 2 + lse + 2**20
