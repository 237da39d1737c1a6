"""Training steps of a language model by kind of attention: forward, backward and the optimiser's step, in turns."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dilated_attention.bench.measure.skip import attempt, release
from dilated_attention.bench.measure.timing import in_turns, synchronise
from dilated_attention.bench.report.rows import Row
from dilated_attention.bench.workloads.language import Shape, family, right
from dilated_attention.models import LongNetLM
from dilated_attention.models.summary import footprint

# share of a device's memory that the estimate for weights, gradients, moments and activations may take
_USABLE = 0.85
# number of tensors of the weights' size and dtype: weights, gradients, and the moments of each optimiser
_COPIES = {"AdamW": 4, "SGD": 2}
_BATCHES = 4


@dataclass(frozen=True)
class Means:
    """How a model is trained so that it fits: the same for all kinds of attention."""

    optimizer: str
    checkpointed: bool


def means_of(shape: Shape, tokens: int, dtype: torch.dtype, memory: int | None) -> Means:
    """Returns AdamW and stored activations where the estimate fits ``memory`` bytes; else recomputed activations; else SGD, too.

    Args:
        memory: None for a CPU, whose small models fit.
    """
    if memory is None:
        return Means("AdamW", False)
    model = shape.model("dense", device="meta")
    weights = model.num_parameters * dtype.itemsize
    for optimizer, copies in _COPIES.items():
        for checkpointed in (False, True):
            activations = footprint(model.config, 0, checkpoint_activations=checkpointed).total(tokens)
            if copies * weights + activations <= _USABLE * memory:
                return Means(optimizer, checkpointed)
    # tried even if the estimate does not fit: an estimate is not a measurement
    return Means("SGD", True)


class Trainer:
    """One kind's step on alternating batches. The parameters and the optimiser are shared with the other kinds."""

    def __init__(self, model: LongNetLM, optimizer: torch.optim.Optimizer, batches: Sequence[torch.Tensor]) -> None:
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.steps = 0
        self.first_loss = math.nan
        self.last_loss = torch.tensor(math.nan)

    def look(self) -> None:
        """Evaluates the loss before any step."""
        tokens = self.batches[0]
        with torch.no_grad():
            self.first_loss = float(self.model(tokens[:, :-1], targets=tokens[:, 1:]))

    def __call__(self) -> None:
        tokens = self.batches[self.steps % len(self.batches)]
        loss = self.model(tokens[:, :-1], targets=tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.last_loss = loss.detach()
        self.steps += 1


def measure(
    shape: Shape,
    kinds: tuple[str, ...],
    context: int,
    batch: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
    checkpointed: bool | None = None,
) -> list[Row]:
    """Returns a row for each kind.

    Values: ``ms`` of a step, with percentiles; ``samples_per_s``, sequences of ``context`` tokens; ``tokens_per_s``; ``tflops`` by the
    FLOPs that the model needs, without recomputation; ``loss`` of the first tokens before any step; on a GPU ``peak_bytes`` of everything.
    """
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    means = means_of(shape, batch * context, dtype, memory)
    if checkpointed is not None:
        means = Means(means.optimizer, checkpointed)
    case = {"task": "train", "model": shape.name, "N": context, "B": batch, "dtype": str(dtype).removeprefix("torch.")}
    case |= {"optimizer": means.optimizer, "checkpointed": means.checkpointed}
    rows, errors = right(shape, kinds, ("logits", "gradient"), case, device, dtype)
    attention = {kind: {"attention": shape.legend(kind)} for kind in kinds}
    release()
    if not errors:
        return rows
    made = attempt(functools.partial(_trainers, shape, tuple(errors), context, batch, device, dtype, means))
    if made.value is None:
        return [*rows, *(Row(name=kind, case=case | attention[kind], note=made.note) for kind in errors)]
    able: dict[str, Trainer] = {}
    peaks: dict[str, int | None] = {}
    # before any of them changes the shared weights
    looked = {kind: attempt(trainer.look).note for kind, trainer in made.value.items()}
    for kind, trainer in made.value.items():
        if looked[kind]:
            rows.append(Row(name=kind, case=case | attention[kind], note=looked[kind]))
            continue
        first = attempt(functools.partial(_first, trainer, device))
        if first.note:
            # an interrupted step leaves gradients
            trainer.optimizer.zero_grad(set_to_none=True)
            rows.append(Row(name=kind, case=case | attention[kind], note=first.note))
        else:
            able[kind], peaks[kind] = trainer, first.value
    for kind, timing in in_turns(able, device, seconds=seconds).items():
        trainer = able[kind]
        values = timing.values() | _rates(trainer.model, context, batch, timing.ms) | {"loss": trainer.first_loss}
        peak = peaks[kind]
        values |= {} if peak is None else {"peak_bytes": peak}
        finite = math.isfinite(trainer.first_loss) and bool(trainer.last_loss.isfinite())
        note = "" if finite else f"wrong: the loss went from {trainer.first_loss} to {float(trainer.last_loss)}"
        rows.append(Row(name=kind, case=case | attention[kind], values=values if finite else {}, errors=errors[kind], note=note))
    return rows


def _trainers(
    shape: Shape, kinds: tuple[str, ...], context: int, batch: int, device: torch.device, dtype: torch.dtype, means: Means
) -> dict[str, Trainer]:
    models = family(shape, kinds, device, dtype, checkpoint_activations=means.checkpointed)
    parameters = list(models[kinds[0]].parameters())
    fused = device.type == "cuda"
    optimizer: torch.optim.Optimizer
    if means.optimizer == "AdamW":
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=fused)
    else:
        optimizer = torch.optim.SGD(parameters, lr=1e-4, fused=fused)
    generator = torch.Generator().manual_seed(3)
    vocab = shape.config.vocab_size
    assert vocab is not None
    batches = [torch.randint(vocab, (batch, context + 1), generator=generator).to(device) for _ in range(_BATCHES)]
    return {kind: Trainer(model, optimizer, batches) for kind, model in models.items()}


def _first(trainer: Trainer, device: torch.device) -> int | None:
    """Runs a step that compiles, and one whose peak is measured: bytes of everything on the device; None without CUDA."""
    trainer()
    if device.type != "cuda":
        return None
    synchronise(device)
    torch.cuda.reset_peak_memory_stats(device)
    trainer()
    synchronise(device)
    return torch.cuda.max_memory_allocated(device)


def _rates(model: LongNetLM, context: int, batch: int, ms: float) -> dict[str, float]:
    tokens = batch * context
    flops = tokens * model.summary((context,)).training_flops(context)
    return {"samples_per_s": 1000 * batch / ms, "tokens_per_s": 1000 * tokens / ms, "tflops": flops / ms / 1e9}
