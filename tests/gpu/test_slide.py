"""A training step of Prov-GigaPath's slide encoder on a GPU: in a CUDA graph, and what its attention keeps. Skipped without CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dilated_attention import create_model, dilated_attention
from dilated_attention.backends import registry
from dilated_attention.engine.ops import resolve
from dilated_attention.models.images.positions import grid_positions
from tests.helpers.gpu_memory import bare

pytestmark = [pytest.mark.gpu, pytest.mark.no_poison]

TILES = 9000
SEGMENTS, RATES = [1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16]


def make_step(
    *, autocast: bool = False, **options: float
) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]:
    """(model, tiles, coords, a function that computes a loss and leaves its gradients)."""
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else torch.bfloat16
    model = create_model("gigapath-12l768d", num_layers=3, device="cuda", dtype=dtype, **options).train()
    tiles = torch.randn(1, TILES, 1536, device="cuda", dtype=torch.bfloat16)
    coords = torch.randint(200_000, (1, TILES, 2), device="cuda")

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss: torch.Tensor = model(tiles, coords).float().square().sum()
        loss.backward()
        return loss.detach()

    return model, tiles, coords, step


def capture(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(side)
    # gradients of the graph lie in its own memory and are written anew by each replay
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    return graph, loss


def grads_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("autocast", [False, True])
def test_a_captured_training_step_equals_an_eager_one(autocast: bool) -> None:
    model, tiles, coords, step = make_step(autocast=autocast, dropout=0.0, drop_path=0.0)
    graph, loss = capture(model, step)
    for seed in range(2):
        torch.manual_seed(10 + seed)
        tiles.copy_(torch.randn_like(tiles))
        coords.copy_(torch.randint_like(coords, 200_000))
        graph.replay()
        torch.cuda.synchronize()
        found, found_loss = grads_of(model), loss.clone()
        replayed = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        expected_loss = step()
        expected = grads_of(model)
        torch.testing.assert_close(found_loss, expected_loss, rtol=1e-3, atol=0)
        assert found.keys() == expected.keys()
        for name, grad in found.items():
            if name.endswith("k_proj.bias"):
                # all but 0, and that is rounding: a softmax does not change with it
                continue
            # dq is summed by atomics, in no fixed order
            true = expected[name].float()
            assert float((grad.float() - true).norm()) <= 0.02 * float(true.norm()) + 1e-6, name
        for name, p in model.named_parameters():
            p.grad = replayed[name]


def test_dropout_and_drop_path_draw_anew_in_each_replay() -> None:
    model, _, _, step = make_step(dropout=0.25, drop_path=0.5)
    graph, loss = capture(model, step)
    losses, grads = [], []
    for _ in range(4):
        graph.replay()
        torch.cuda.synchronize()
        losses.append(float(loss))
        grads.append(grads_of(model)["tile_embedding.weight"])
    assert len(set(losses)) == 4
    assert not torch.equal(grads[0], grads[1])


def test_a_captured_check_of_the_grid_lets_tiles_inside_it_pass() -> None:
    coords = torch.randint(200_000, (1, 50, 2), device="cuda")
    expected = grid_positions(coords, 64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = grid_positions(coords, 64)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="raise grid_size"):
        grid_positions(coords + 10**6, 64)


@pytest.mark.parametrize("backend", ["auto", "sdpa_cudnn"])
@pytest.mark.parametrize("n", [5001, 20_000])
def test_kept_outputs_give_the_gradients_of_those_made_again(monkeypatch: pytest.MonkeyPatch, n: int, backend: str) -> None:
    """TorchScale's semantics: zero keys, blocked offsets, detached mixing."""
    torch.manual_seed(n)
    q, k, v, dout = (torch.randn(1, n, 16, 48, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
    options = {"head_offsets": "blocked", "tail": "zero_keys", "mixture_grad": "detached", "backend": backend}
    sizes, results = [], []
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr(resolve, "saved_elements", lambda *_: 0)
            registry.cached.clear()
        # what the last backward still holds would be counted out of this call's memory when it goes
        before = bare()
        out = dilated_attention(q, k, v, SEGMENTS, RATES, **options)
        sizes.append(torch.cuda.memory_allocated() - before)
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    # 1.94 rows of a head for each position
    assert 1.8 * q.numel() * 2 < sizes[0] - sizes[1] < 2.1 * q.numel() * 2
    for name, kept, again in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        error = float((kept - again).float().norm() / again.float().norm())
        assert error < (4e-3 if name == "out" else 1.5e-2), (name, error)
