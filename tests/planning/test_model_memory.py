"""A model's planned peak, put together from pieces, against fake tensors of its whole step: tokens, stack, loss in chunks, backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilated_attention.factory import create_model
from dilated_attention.models import loss
from dilated_attention.models.summary import USABLE
from dilated_attention.planning import find_gpu, plan_attention, plan_model
from dilated_attention.planning.estimate.memory import memory_of
from dilated_attention.planning.estimate.problem import make_problem
from dilated_attention.planning.whole_models import model_memory
from dilated_attention.planning.whole_models.trace import Tape, fake_tensors
from tests.helpers.standard import standard_attention

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
        tape = Tape(on_gpu=True, parameters=model.parameters())
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


@pytest.mark.parametrize("gpu", [None, "H200"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 4), (2, 4), (1, 2), (2, 1)])
def test_the_formula_of_plain_attention_is_what_fake_tensors_hold(batch: int, kv_heads: int, is_causal: bool, gpu: str | None) -> None:
    # on a GPU, grad · weights is a tensor of its own to torch's kernel of softmax's backward
    n, heads, dtype = 600, 4, torch.bfloat16
    problem = make_problem(
        "standard", num_positions=n, num_heads=heads, num_kv_heads=kv_heads, head_dim=64, batch_size=batch, dtype=dtype,
        is_causal=is_causal, gpu=None if gpu is None else find_gpu(gpu),
    )  # fmt: skip
    planned = memory_of(problem)
    with fake_tensors():
        leaves = [torch.empty(batch, n, h, 64, dtype=dtype, requires_grad=True) for h in (heads, kv_heads, kv_heads)]
        tapes = [Tape(on_gpu=gpu is not None) for _ in range(2)]
        with torch.no_grad(), tapes[0]:
            standard_attention(*leaves, is_causal=is_causal)
        dout = torch.empty(batch, n, heads, 64, dtype=dtype)
        with tapes[1]:
            out = standard_attention(*leaves, is_causal=is_causal)
            grads = torch.autograd.grad(out, leaves, dout)
            del grads
    # the tapes count inputs where they are first read, as the products read copies of them; dout is there before
    found = [max(moment.alive + moment.inside for moment in tape.moments) for tape in tapes]
    found[1] += dout.nbytes
    assert [planned.forward_peak - planned.inputs, planned.backward_peak - planned.inputs] == found


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
