"""Peak memory of a few layers of Llama-7B's shape in training and generating, measured and planned."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch

from dilated_attention.bench.measure.subprocess_runner import Peak
from dilated_attention.bench.models.language import KINDS, Shape
from dilated_attention.planning import plan_model

LAYERS = 32
# a sixteenth of the width, for a CPU
_NARROW: dict[str, Any] = {"embed_dim": 256, "num_heads": 4, "ffn_dim": 688, "vocab_size": 2000}
ATTENTION: tuple[str, ...] = KINDS
# what → (training, checkpoint_activations)
WORK = {"training": (True, False), "training, checkpointed": (True, True), "generating": (False, False)}


@dataclass(frozen=True)
class Size:
    """A kind of ``ATTENTION`` and a ``WORK`` at a length, of Llama-7B's shape where ``full``."""

    kind: str
    work: str
    num_positions: int
    full: bool

    @property
    def shape(self) -> str:
        return "Llama-7B's shape" if self.full else "a sixteenth of Llama-7B's width"

    def _model(self, layers: int) -> Shape:
        return Shape("llama-7b", {"num_layers": layers} if self.full else _NARROW | {"num_layers": layers}, not self.full)

    def planned(self, layers: int, device: torch.device) -> int:
        training, checkpoints = WORK[self.work]
        gpu, model = None if device.type == "cuda" else "cpu", self._model(layers)
        return plan_model(model.preset, num_positions=self.num_positions, training=training, checkpoint_activations=checkpoints, gpu=gpu,
                          find_longest=False, **model.changes | model.kind(self.kind)).peak  # fmt: skip

    def peak(self, layers: int, device: torch.device) -> int:
        """Returns the peak bytes of two training steps of AdamW, or of a prompt and two tokens after it, in the current process.

        On a GPU, training keeps float32 weights under bfloat16 autocast and generation uses bfloat16 weights; on a CPU everything is
        float32.
        """
        if device.type != "cuda":
            # code that is loaded on first use does not count towards the model
            Size(self.kind, self.work, 64, False)._run(2, device)
        gc.collect()
        peak = Peak(device)
        self._run(layers, device)
        return peak.bytes()

    def _run(self, layers: int, device: torch.device) -> None:
        training, checkpoints = WORK[self.work]
        half = device.type == "cuda"
        dtype = torch.float32 if training or not half else torch.bfloat16
        model = self._model(layers).model(self.kind, checkpoint_activations=checkpoints, device=device, dtype=dtype)
        tokens = torch.randint(model.config.vocab_size or 1, (1, self.num_positions + 1), device=device)
        if not training:
            model.eval().generate(tokens[:, : self.num_positions - 2], 2, cuda_graph=False)
            return
        optimizer = torch.optim.AdamW(model.parameters())
        # the second step includes the moments that the first one created
        for _ in range(2):
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                loss = model(tokens[:, :-1], targets=tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        assert bool(loss.isfinite())
