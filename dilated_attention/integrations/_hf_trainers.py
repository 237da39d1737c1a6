"""What transformers' ``Trainer`` and accelerate's ``Accelerator`` are told where groups of processes share sequences: which options
are refused, that a group reads one batch, and what a trainer counts and gathers."""

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
    before = vars(owner)
    if name in before:
        undo.callback(before.__setitem__, name, before[name])
    else:
        undo.callback(before.pop, name, None)
    before[name] = value


def check_trainer(trainer: Any) -> None:
    """Raises ValueError for a Trainer with a loss of its own, options that need the whole sequence in one process, or that has begun."""
    args, loss = trainer.args, getattr(trainer.compute_loss, "__func__", trainer.compute_loss)
    where = getattr(loss, "__module__", type(loss).__name__)
    # TRL's makes its loss of log-probabilities, which the model returns of the whole sequence, since TRL adds heads that compute them
    is_sft = where == "trl.trainer.sft_trainer" and hasattr(importlib.import_module("trl.trainer.utils"), "add_fused_lm_head")
    # by the method, since one that calls transformers' own may add what it reads in the logits, of which a process has a part
    if not is_sft and (loss is not importlib.import_module("transformers").Trainer.compute_loss or where != "transformers.trainer"):
        raise ValueError(
            f"{type(trainer).__name__} has its own compute_loss ({where}), which may read logits or log-probabilities of a whole sequence; "
            "expected transformers' Trainer and the model's own loss: Trainer(model, args, trainer.data_collator, trainer.train_dataset) "
            "with remove_unused_columns=False in args; or SFTTrainer of a TRL with add_fused_lm_head; or a loop of your own with "
            "context_parallel(accelerator, model, size=…). Other losses, such as those of preferences and rewards, need whole sequences: "
            "train without context_parallel"
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
    """Raises ValueError for an Accelerator that shares sequences itself, or has prepared loaders."""
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
    """An accelerator as its loaders should see it: each group that shares sequences is one process."""

    dispatch_batches = False

    def __init__(self, accelerator: Any, groups: list[list[int]]) -> None:
        self._accelerator, self._groups = accelerator, groups
        self.num_processes = len(groups)
        self.process_index = next(index for index, ranks in enumerate(groups) if accelerator.process_index in ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def _prepare_device_mesh(self) -> None:
        return None

    def gather(self, data: Any) -> Any:
        """Returns what the first process of each group has, along the first dimension."""
        first = [ranks[0] for ranks in self._groups]
        world = self._accelerator.num_processes
        return tree_map(lambda x: x.unflatten(0, (world, -1))[first].flatten(0, 1), self._accelerator.gather(data))


def share_batches(accelerator: Any, group: Any, undo: contextlib.ExitStack) -> None:
    """Lets loaders and schedulers that are prepared from now on, and ``gather_for_metrics``, count each group as one process."""
    if accelerator.num_processes == 1:
        return
    mine = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, sorted(mine))
    groups = sorted({tuple(ranks) for ranks in of_all})
    if sorted(rank for ranks in groups for rank in ranks) != list(range(len(of_all))) or len({len(ranks) for ranks in groups}) > 1:
        raise ValueError(f"the groups are {groups}; expected every process in one of them, and groups of equal size")
    view = _DataParallel(accelerator, [list(ranks) for ranks in groups])
    kind = type(accelerator)

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
        return kind.gather_for_metrics(view, input_data)

    def prepare_scheduler(scheduler: Any) -> Any:
        prepared = kind.prepare_scheduler(accelerator, scheduler)

        def step(*args: Any, **kwargs: Any) -> None:
            # accelerate's step calls the scheduler's once for each process; of a group's calls one counts
            calls, inner = itertools.count(1), prepared.scheduler.step
            with contextlib.ExitStack() as after:
                replace(after, prepared.scheduler, "step", lambda *args, **kwargs: next(calls) % len(groups[0]) or inner(*args, **kwargs))
                type(prepared).step(prepared, *args, **kwargs)

        if prepared.step_with_optimizer and not prepared.split_batches:
            prepared.step = step
        return prepared

    replace(undo, accelerator, "prepare_scheduler", prepare_scheduler)
    # accelerate's own methods, which ask the object that they are called on how many processes there are
    replace(undo, accelerator, "prepare_data_loader", functools.partial(kind.prepare_data_loader, view))
    replace(undo, accelerator, "gather_for_metrics", gather_for_metrics)


def adapt_trainer(trainer: Any, handle: Any, undo: contextlib.ExitStack) -> None:
    """Makes a Trainer's counts those of the groups, and gives whole logits to metrics."""
    size, sizes = handle.size, trainer.get_total_train_batch_size
    predict, operations, track = trainer.prediction_step, trainer.floating_point_ops, trainer._track_num_input_tokens

    def prediction_step(model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        handle.whole_logits = not prediction_loss_only
        try:
            return predict(model, inputs, prediction_loss_only, *args, **kwargs)
        finally:
            handle.whole_logits = False

    def track_tokens(inputs: Any) -> None:
        # a group's processes all count their batch
        before = trainer.state.num_input_tokens_seen
        track(inputs)
        trainer.state.num_input_tokens_seen = before + (trainer.state.num_input_tokens_seen - before) // size

    replace(undo, trainer, "get_total_train_batch_size", lambda args: sizes(args) // size)
    replace(undo, trainer, "floating_point_ops", lambda inputs: operations(inputs) / size)
    replace(undo, trainer, "_track_num_input_tokens", track_tokens)
    replace(undo, trainer, "prediction_step", prediction_step)
    # bound when the trainer was made, and again after each evaluation
    replace(undo, trainer, "gather_function", trainer.accelerator.gather_for_metrics)
