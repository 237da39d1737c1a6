"""A training step of Prov-GigaPath's slide encoder on a GPU: in a CUDA graph."""

from collections.abc import Callable

import pytest
import torch

from dilated_attention import create_model
from dilated_attention.models.images.slides import grid_positions
from tests.helpers.gpu_memory import captured

pytestmark = [pytest.mark.gpu, pytest.mark.no_poison]

TILES = 9000


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
        # gradients of a graph lie in its own memory and are written anew by each replay
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss: torch.Tensor = model(tiles, coords).float().square().sum()
        loss.backward()
        return loss.detach()

    return model, tiles, coords, step


def grads_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("autocast", [False, True])
def test_a_captured_training_step_equals_an_eager_one(autocast: bool) -> None:
    model, tiles, coords, step = make_step(autocast=autocast, dropout=0.0, drop_path=0.0)
    graph, loss = captured(step)
    for seed in range(2):
        torch.manual_seed(10 + seed)
        tiles.copy_(torch.randn_like(tiles))
        coords.copy_(torch.randint_like(coords, 200_000))
        graph.replay()
        torch.cuda.synchronize()
        found, found_loss = grads_of(model), loss.clone()
        replayed = {name: p.grad for name, p in model.named_parameters()}
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
    graph, loss = captured(step)
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
