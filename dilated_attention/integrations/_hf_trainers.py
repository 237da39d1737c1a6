"""Adapts transformers' ``Trainer`` and accelerate's ``Accelerator`` to groups of processes that share sequences: refuses options that do
not work with them, makes each group read one batch, and corrects what a trainer counts and gathers.

All processes of a group see the same samples, of which each holds a part of the positions."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map


def replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute of this object, not of its class, until ``undo`` is closed."""
    attributes = vars(owner)
    if name in attributes:
        undo.callback(attributes.__setitem__, name, attributes[name])
    else:
        undo.callback(attributes.pop, name, None)
    attributes[name] = value


def check_trainer(trainer: Any) -> None:
    """Raises ValueError for a Trainer whose class or options compute another loss than the model's or need all positions in one process,
    and for one that has begun to train."""
    args, loss = trainer.args, getattr(trainer.compute_loss, "__func__", trainer.compute_loss)
    module = getattr(loss, "__module__", type(loss).__name__)
    # SFTTrainer computes its loss from log-probabilities. The model returns those of the whole sequence if TRL gives it a head for them
    is_sft = module == "trl.trainer.sft_trainer" and hasattr(importlib.import_module("trl.trainer.utils"), "add_fused_lm_head")
    # only transformers' very method will do: an override may call it and read logits, too, of which a process has a part
    if not is_sft and (loss is not importlib.import_module("transformers").Trainer.compute_loss or module != "transformers.trainer"):
        raise ValueError(
            f"{type(trainer).__name__} has its own compute_loss ({module}), which may read logits or log-probabilities of a whole "
            "sequence; expected transformers' Trainer and the model's own loss: Trainer(model, args, trainer.data_collator, "
            "trainer.train_dataset) with remove_unused_columns=False in args; or SFTTrainer of a TRL with add_fused_lm_head; or a loop "
            "of your own with context_parallel(accelerator, model, size=…). Other losses, such as those of preferences and rewards, need "
            "whole sequences: train without context_parallel"
        )
    rebalances = getattr(args, "train_sampling_strategy", None) == "batch_rebalance"
    for option, is_given, reason in (
        ("label_smoothing_factor", args.label_smoothing_factor != 0, "its loss reads the logits of a whole sequence"),
        ("compute_loss_func", trainer.compute_loss_func is not None, "such a loss may read the logits of a whole sequence"),
        ("model_init", trainer.model_init is not None, "train() would make a new model, which shares nothing"),
        ("neftune_noise_alpha", args.neftune_noise_alpha is not None, "its noise depends on the length, of which a process has a part"),
        ("deepspeed", bool(args.deepspeed), "its engine takes gradients over, which is not supported"),
        ("train_sampling_strategy", rebalances, "it gives the processes of a group different batches"),
        ("eval_use_gather_object", args.eval_use_gather_object, "every process of a group would add its objects once"),
    ):
        if is_given:
            raise ValueError(f"{option} is set: {reason}; expected a Trainer without it")
    if args.n_gpu > 1:
        raise ValueError(
            f"one process with {args.n_gpu} GPUs, which is torch's DataParallel; expected a process for each (torchrun), or "
            "one GPU (CUDA_VISIBLE_DEVICES=0)"
        )
    if trainer.model_wrapped is not trainer.model:
        raise ValueError("the trainer has wrapped its model already; expected context_parallel(trainer, …) before trainer.train()")


def check_accelerator(accelerator: Any) -> None:
    """Raises ValueError for an Accelerator that shares sequences itself, cuts batches itself, or has prepared loaders or models."""
    config = getattr(accelerator, "parallelism_config", None)
    for kind in ("cp", "tp", "sp"):
        if getattr(config, f"{kind}_enabled", False):
            raise ValueError(f"parallelism_config has {kind}_size above 1; expected dp_replicate_size and dp_shard_size only")
    if accelerator.dispatch_batches:
        raise ValueError(
            "dispatch_batches is True: the first process would cut each batch over all processes; expected None or False, so that every "
            "process reads the data set, of which a group takes its batches"
        )
    if accelerator._dataloaders or accelerator._models:
        raise ValueError("the accelerator has prepared a loader or a model; expected context_parallel(…) before accelerator.prepare(…)")


class _DataParallel:
    """An accelerator as its loaders should see it: each group that shares sequences is one process. Methods of Accelerator are called on
    it in place of the accelerator, so they read these counts, and all else of the accelerator."""

    dispatch_batches = False

    def __init__(self, accelerator: Any, groups: list[list[int]]) -> None:
        self._accelerator, self._groups = accelerator, groups
        self.num_processes = len(groups)
        self.process_index = next(index for index, ranks in enumerate(groups) if accelerator.process_index in ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def _prepare_device_mesh(self) -> None:
        """Returns no mesh: with one, a loader would count its processes instead of the groups."""

    def gather(self, data: Any) -> Any:
        """Concatenates the tensors of each group's first process along the first dimension; the others of the group have the same ones."""
        first_ranks = [ranks[0] for ranks in self._groups]
        world = self._accelerator.num_processes
        return tree_map(lambda x: x.unflatten(0, (world, -1))[first_ranks].flatten(0, 1), self._accelerator.gather(data))


def share_batches(accelerator: Any, group: Any, undo: contextlib.ExitStack) -> None:
    """Lets loaders and schedulers that are prepared from now on, and ``gather_for_metrics``, count each group as one process."""
    if accelerator.num_processes == 1:
        return
    my_ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, sorted(my_ranks))
    groups = sorted({tuple(ranks) for ranks in all_ranks})
    if sorted(rank for ranks in groups for rank in ranks) != list(range(len(all_ranks))) or len({len(ranks) for ranks in groups}) > 1:
        raise ValueError(f"the groups are {groups}; expected every process in one of them, and groups of equal size")
    size, view = len(groups[0]), _DataParallel(accelerator, [list(ranks) for ranks in groups])
    # its methods ask the object that they are called on how many processes there are: the view, if it is to be the groups
    accelerator_class = type(accelerator)

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object or not all(isinstance(x, torch.Tensor) for x in tree_leaves(input_data)):
            raise TypeError("gather_for_metrics of objects, which every process of a group would add once; expected tensors")
        loader = accelerator.gradient_state.active_dataloader
        if len(groups) > 1 and loader is not None and isinstance(loader.dataset, torch.utils.data.IterableDataset):
            # each group reads the stream and fills its last batch up, and nothing says by how much
            raise ValueError(
                f"gather_for_metrics over a data set without a length in {len(groups)} groups, whose last samples repeat; expected a data "
                "set with a length, or gather(), which returns the repeated ones, too"
            )
        return accelerator_class.gather_for_metrics(view, input_data)

    def prepare_scheduler(scheduler: Any) -> Any:
        prepared = accelerator_class.prepare_scheduler(accelerator, scheduler)

        def step(*args: Any, **kwargs: Any) -> None:
            # accelerate's step calls the scheduler's once for each process; of these calls every size-th passes, one for each group
            calls, inner = itertools.count(1), prepared.scheduler.step
            with contextlib.ExitStack() as undo_step:
                replace(undo_step, prepared.scheduler, "step", lambda *args, **kwargs: next(calls) % size or inner(*args, **kwargs))
                type(prepared).step(prepared, *args, **kwargs)

        if prepared.step_with_optimizer and not prepared.split_batches:
            prepared.step = step
        return prepared

    replace(undo, accelerator, "prepare_scheduler", prepare_scheduler)
    replace(undo, accelerator, "prepare_data_loader", functools.partial(accelerator_class.prepare_data_loader, view))
    replace(undo, accelerator, "gather_for_metrics", gather_for_metrics)


def adapt_trainer(trainer: Any, handle: Any, undo: contextlib.ExitStack) -> None:
    """Makes a Trainer count each batch and its tokens once for a group, not once for each process, and gives the logits of all positions to
    metrics.

    Args:
        handle: what ``context_parallel`` returns; has the ``size`` of a group, and ``whole_logits``, which makes the model return those.
    """
    size, total_batch_size = handle.size, trainer.get_total_train_batch_size
    predict, operations, track = trainer.prediction_step, trainer.floating_point_ops, trainer._track_num_input_tokens

    def prediction_step(model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        handle.whole_logits = not prediction_loss_only
        try:
            return predict(model, inputs, prediction_loss_only, *args, **kwargs)
        finally:
            handle.whole_logits = False

    def track_tokens(inputs: Any) -> None:
        # every process of a group adds the tokens of the group's batch
        previous = trainer.state.num_input_tokens_seen
        track(inputs)
        trainer.state.num_input_tokens_seen = previous + (trainer.state.num_input_tokens_seen - previous) // size

    replace(undo, trainer, "get_total_train_batch_size", lambda args: total_batch_size(args) // size)
    replace(undo, trainer, "floating_point_ops", lambda inputs: operations(inputs) / size)
    replace(undo, trainer, "_track_num_input_tokens", track_tokens)
    replace(undo, trainer, "prediction_step", prediction_step)
    # the trainer holds the accelerator's former method, and takes the present one only after an evaluation
    replace(undo, trainer, "gather_function", trainer.accelerator.gather_for_metrics)
