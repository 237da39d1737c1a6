"""A training step of Prov-GigaPath's slide encoder, 12 layers of 768, on one slide: over all processes, or on one of them alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dilated_attention import create_model, shard_sequence
from dilated_attention.bench.accuracy.correctness import relative
from dilated_attention.bench.measure.rank_sync import RankSync
from dilated_attention.bench.sharded.measure import Entry
from dilated_attention.models.sharded import average_gradients


class SlideStep(Entry):
    """Weights are random; a step is the forward without dropout (on a GPU under autocast to bfloat16), the sum of the slide's vector, its
    backward, and the mean of the gradients over the processes; no optimiser. The vector is compared with one process's.
    """

    def check(self, together: RankSync, most: int) -> list[dict[str, float]]:
        def errors() -> dict[str, float]:
            with torch.no_grad():
                found, wanted = (self._vector(*self._made(shared=shared)) for shared in (True, False))
            return {"vector (whole)": relative(found, wanted.double())}

        return together.everywhere(errors) if self.kind == "ring" else [{}]

    def call(self, which: str) -> tuple[Callable[[], Any], dict[str, float]]:
        model, inputs = self._made(shared=self.kind == "ring")

        def step() -> None:
            model.zero_grad(set_to_none=True)
            self._vector(model, inputs).sum().backward()
            if self.kind == "ring":
                average_gradients(model)

        return step, {}

    def _made(self, *, shared: bool) -> tuple[Any, list[torch.Tensor]]:
        """Returns the model, and this process's embeddings (1, L, 1536) and pixels (1, L, 2) of tiles in a square, row by row."""
        tiles, device, shared = self.problem.num_positions, self.problem.device, shared and dist.is_initialized()
        torch.manual_seed(0)
        options: dict[str, Any] = {"dropout": 0.0, "drop_path": 0.0, "device": device} | ({"group": dist.group.WORLD} if shared else {})
        # one layer for a try
        options |= {"num_layers": 1} if device.type == "cpu" else {}
        model, side = create_model("gigapath-12l768d", **options).train(), math.isqrt(tiles - 1) + 1
        place = torch.arange(tiles, device=device)
        coords = torch.stack((place // side, place % side), -1).float()[None] * 256
        x = torch.randn(1, tiles, 1536, generator=torch.Generator(device).manual_seed(0), device=device)
        return model, shard_sequence(None, [x, coords], [1, 1]) if shared else [x, coords]

    def _vector(self, model: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
        device = self.problem.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return model(*inputs).float()  # type: ignore[no-any-return]
