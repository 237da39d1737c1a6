"""A model's planned peak, put together from pieces, against fake tensors of its whole step: tokens, stack, loss in chunks, backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilated_attention.factory import create_model
from dilated_attention.models import loss
from dilated_attention.models.summary import USABLE
from dilated_attention.planning import find_gpu, plan_attention, plan_model
from dilated_attention.planning.estimate.memory import standard_attention
from dilated_attention.planning.estimate.problem import make_problem
from dilated_attention.planning.whole_models import model_memory
from dilated_attention.planning.whole_models.trace import Tape, fake_tensors, peak_of

ROWS = 2**13
CASES: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "many chunks": {"vocab_size": 30_000, "num_layers": 2},
    "deep": {"num_layers": 7},
    "checkpointed": {"num_layers": 7, "checkpoint_activations": True},
    "detached": {"mixture_grad": "detached", "num_layers": 6},
    "detached, checkpointed": {"mixture_grad": "detached", "checkpoint_activations": True},
    "untied, swiglu": {"tie_embeddings": False, "ffn": "swiglu", "vocab_size": 30_000},
    "no last norm": {"final_norm": False, "num_layers": 5},
}


def whole_step(options: dict[str, Any]) -> int:
    """Bytes beside weights and moments at the highest point of a step under autocast, on a GPU as far as the tape is told."""
    model = create_model("longnet-tiny", **options)
    config = model.config
    problem = make_problem("dilated", num_positions=ROWS, num_heads=config.num_heads, head_dim=config.head_dim, dtype=torch.bfloat16,
                           is_causal=True, training=True, pattern=config.pattern, gpu=find_gpu("H200"))  # fmt: skip
    inside, kept = model_memory.insides(problem), model_memory._kept_bytes(problem)
    assert kept > 0
    with fake_tensors():
        model = create_model("longnet-tiny", **options)
        tape = Tape(on_gpu=True)
        tape.ignore(model.parameters())
        with tape:
            tokens = torch.zeros((1, ROWS), dtype=torch.int64)
            with torch.autocast("cpu", torch.bfloat16):
                value = model(tokens, targets=tokens)
            value.backward()
    return max(moment.alive + moment.inside + inside.get(moment.attention, 0) + kept * moment.kept for moment in tape.moments)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_pieces_are_the_whole(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # a quarter, for several chunks of few rows
    for module in (loss, model_memory):
        monkeypatch.setattr(module, "CHUNK_BYTES", 2**24 if CASES[case].get("vocab_size") else 2**26)
    plan = plan_model("longnet-tiny", num_positions=ROWS, gpu="H200", find_longest=False, **CASES[case])
    beside = sum(size for what, size in plan.terms if what in ("weights", "cuBLAS's workspaces", "optimizer's moments"))
    assert plan.moment != "in the optimizer's step"
    assert plan.peak - beside == pytest.approx(whole_step(CASES[case]), rel=0.01), str(plan)


def test_plain_attention_holds_four_matrices_in_its_backward_on_a_gpu() -> None:
    # grad · weights is a tensor of its own to torch's kernel of softmax's backward
    n, heads = 2048, 4
    matrix = heads * n * n * 2

    def step() -> Any:
        return torch.autograd.grad(standard_attention(*leaves), leaves, dout)

    with fake_tensors():
        leaves = [torch.empty(1, n, heads, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        dout = torch.empty(1, n, heads, 64, dtype=torch.bfloat16)
        peaks = {on_gpu: peak_of(step, on_gpu=on_gpu) for on_gpu in (False, True)}
    assert 3 * matrix < peaks[False] < 3.3 * matrix
    assert peaks[True] == peaks[False] + matrix


@pytest.mark.slow
def test_what_fits_of_plain_attention_leaves_room_for_what_its_allocator_cannot_use_again() -> None:
    plan = plan_attention("standard", num_positions=4096, num_heads=8, head_dim=64, dtype=torch.bfloat16, gpu="H200", memory=2**33)
    matrix = 8 * 4096**2 * 2
    assert plan.memory.reserve == matrix and 4 * matrix < plan.peak < 5 * matrix and "pieces" in str(plan)
    longest = plan_attention(
        "standard", num_positions=plan.longest, num_heads=8, head_dim=64, dtype=torch.bfloat16, gpu="H200", memory=2**33
    )
    assert longest.fits and longest.peak < 0.82 * USABLE * 2**33
    forward = plan_attention("standard", num_positions=4096, num_heads=8, head_dim=64, dtype=torch.bfloat16, gpu="H200", training=False)
    assert forward.memory.reserve == 0 and "pieces" not in str(forward)
