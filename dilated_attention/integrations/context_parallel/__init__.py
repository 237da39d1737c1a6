"""Context parallelism for transformers' ``Trainer`` and for accelerate: ``context_parallel(trainer, size=4)`` before ``trainer.train()``.

The batch that a model is called with is whole, and equal on the W processes of a group. Inside the call it is cut, and each process
computes its part of the loss, the sum over its own targets divided by the number of all. What the model returns has

    value     Σ over the group of the parts, which is the loss of the whole
    gradient  W · d(part), so that the mean over all processes, which DDP and FSDP take, is the mean over the groups of the whole gradient

so that nothing outside the model needs to know: the loss scale, gradient accumulation, clipping and logging stay transformers'.
"""

from __future__ import annotations

import contextlib
from typing import Any

from dilated_attention.integrations._hf_settings import check_release
from dilated_attention.integrations.context_parallel import batches
from dilated_attention.integrations.context_parallel.model import ContextParallel

__all__ = ["ContextParallel", "context_parallel"]


def context_parallel(
    trainer_or_accelerator: Any,
    model: Any = None,
    *,
    size: int | None = None,
    mesh: Any = None,
    group: Any = None,
    layout: str | None = None,
    exchange: str | None = None,
    timeout: float = 540.0,
) -> ContextParallel:
    """Trains a causal language model on sequences that groups of W processes share; the other processes are data parallel.

        context_parallel(trainer, size=4)                        # before trainer.train()
        context_parallel(accelerator, model, size=4)             # before accelerator.prepare(model, optimizer, loader)

    Every process of a group gets the same batch, different groups different ones. A call of the model with ``labels`` cuts the batch:
    labels are shifted before, positions and packed documents are those of the whole, any length N ≥ W is possible. Loss, gradients and,
    without dropout, every step are those of the same training with the data-parallel processes alone. ``logits`` are those of the process's
    own positions; ``Trainer.predict`` and ``compute_metrics`` get them whole. A call without labels, such as ``generate()``, is computed by
    each process alone with the model's own attention.

    A model with an attention of transformers stays exactly dense (windows, sinks and softcaps included); one with ``"dilated"``,
    ``"ring_dilated"`` or ``"ring"`` keeps its settings. What is saved names the model's own attention: a dense model is a plain one.
    Logits of long sequences need not exist: Liger's kernels (``use_liger_kernel=True``) compute the loss without them.

    Args:
        trainer_or_accelerator: a ``Trainer``, or an ``Accelerator`` whose loaders are prepared afterwards.
        model: with an accelerator, the model before it is prepared; PEFT's adapters included.
        size: W consecutive processes share a sequence; it divides the number of processes. Or give ``mesh`` or ``group``.
        mesh, group: a DeviceMesh of one axis, e.g. ``mesh["cp"]``, or a ProcessGroup; its processes share a sequence.
        layout: see ``ring_attention``; None for the model's setting, for dense models ``"zigzag"``, which balances causal attention.
        exchange: see ``ring_attention``; None for the model's setting, for dense models ``"auto"``.
        timeout: seconds that a process waits for the others of its group, of which one may be saving a checkpoint.

    Returns:
        A ``ContextParallel``, whose ``remove()`` makes the model and the trainer what they were.

    Raises:
        ValueError, TypeError: the model's loss is no sum over positions, its layers mix positions other than by attention, the trainer has
            a loss of its own or an option that needs the whole sequence in one process, or an argument is not accepted.
        ImportError: transformers is older than 5.23.
    """
    check_release((5, 23), "context_parallel")
    trainer = trainer_or_accelerator if hasattr(trainer_or_accelerator, "accelerator") else None
    accelerator = trainer_or_accelerator if trainer is None else trainer.accelerator
    if not hasattr(accelerator, "prepare_data_loader"):
        raise TypeError(f"trainer_or_accelerator is a {type(accelerator).__name__}; expected a Trainer, or an Accelerator and a model")
    if (model is None) == (trainer is None):
        raise ValueError("expected context_parallel(trainer, size=…), which has a model, or context_parallel(accelerator, model, size=…)")
    if trainer is not None:
        batches.check_trainer(trainer)
        model = trainer.model
    batches.check_accelerator(accelerator)
    with contextlib.ExitStack() as undo:
        place = batches.place_of(size, mesh, group, accelerator.device.type)
        handle = ContextParallel(model, place, layout=layout, exchange=exchange, timeout=timeout, undo=undo)
        batches.share_batches(accelerator, handle.group, undo)
        if trainer is not None:
            batches.adapt_trainer(trainer, handle, undo)
        handle.undo = undo.pop_all()
    return handle
