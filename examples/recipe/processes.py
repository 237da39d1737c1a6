"""Processes of a training run: rows of a mesh (data-parallel), each of which shares its sequences (context-parallel)."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dilated_attention import shard_sequence
from dilated_attention.models import LongNetLM


def precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Around a forward: bfloat16 where autocast takes it on a GPU, else the parameters' dtype."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


class Processes:
    """What torchrun started, or this process alone.

    Args:
        context_parallel: processes that share each sequence; they are consecutive ranks.
        layout: how they share it.
        fsdp: shard parameters over all processes.

    Raises:
        ValueError: if the processes do not allow it.
    """

    def __init__(self, context_parallel: int = 1, layout: str = "contiguous", fsdp: bool = False) -> None:
        self.distributed = "RANK" in os.environ
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if self.distributed else 1
        if self.device.type == "cuda" and here > torch.cuda.device_count():
            raise ValueError(
                f"{here} processes on a machine of {torch.cuda.device_count()} GPU(s); expected one for each: --nproc_per_node"
            )
        world = int(os.environ.get("WORLD_SIZE", 1)) if self.distributed else 1
        if context_parallel < 1 or world % context_parallel:
            raise ValueError(
                f"--context-parallel {context_parallel} with {world} process(es); expected a divisor of their number: "
                f"torchrun --nproc_per_node={max(context_parallel, 2)} …"
            )
        if fsdp and not self.distributed:
            raise ValueError("--fsdp shards parameters over processes, and there is one: torchrun --nproc_per_node=2 …")
        if self.distributed:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            # what the processes agree on at every step and what they save travels by the CPUs, and no GPU waits for it
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
        self.world = world
        self.rank = dist.get_rank() if self.distributed else 0
        self.rows, self.row = world // context_parallel, self.rank // context_parallel
        self.layout, self.fsdp = layout, fsdp
        self.axis = None
        if context_parallel > 1:
            mesh = dist.init_device_mesh(self.device.type, (self.rows, context_parallel), mesh_dim_names=("dp", "cp"))
            self.axis = mesh["cp"]

    def model_options(self) -> dict[str, Any]:
        """For ``create_model``."""
        return {} if self.axis is None else {"mesh": self.axis, "layout": self.layout}

    def shard(self, *tokens: torch.Tensor) -> list[torch.Tensor]:
        """This process's part of whole (batch, sequence) tensors."""
        return list(tokens) if self.axis is None else shard_sequence(self.axis, tokens, [1] * len(tokens), layout=self.layout)

    def parallel(self, model: LongNetLM) -> torch.nn.Module:
        """The model with gradients averaged over all processes, of all rows: by DDP, or by FSDP2, which shards its parameters too."""
        if not self.fsdp:
            if not self.distributed:
                return model
            # looking for unused parameters keeps DDP from ordering its buckets anew after the first step: a resumed run adds up
            # gradients in the order of the first one, and so to the same bits; a GPU's sums differ in any case
            return DistributedDataParallel(model, find_unused_parameters=self.device.type == "cpu")
        for block in model.decoder.blocks:
            fully_shard(block)
        # changes the model's class
        fully_shard(model)
        return model

    def accumulate(self, model: torch.nn.Module, last: bool) -> contextlib.AbstractContextManager[None]:
        """The block around a forward and backward: gradients are averaged over processes by the last backward of a step only."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        elif isinstance(model, DistributedDataParallel) and not last:
            return model.no_sync()
        return contextlib.nullcontext()

    def total(self, values: list[float]) -> list[float]:
        """The sums over all processes, on each."""
        if not self.distributed:
            return values
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed)
        return summed.tolist()

    def weights(self, model: torch.nn.Module) -> dict[str, Any]:
        """The whole state dict, on every process; all must ask."""
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
