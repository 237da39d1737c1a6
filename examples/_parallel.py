"""Processes of a training run: rows of a mesh (data-parallel), each of which shares its sequences (context-parallel)."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dilated_attention import shard_sequence
from dilated_attention.models import LongNetLM


class Processes:
    """What torchrun started, or this process alone.

    Args:
        context_parallel: processes that share each sequence; they are consecutive ranks.
        layout: how they share it.
        fsdp: shard parameters over all processes.
    """

    def __init__(self, context_parallel: int, layout: str, fsdp: bool) -> None:
        self.distributed = "RANK" in os.environ
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
        world = int(os.environ.get("WORLD_SIZE", 1)) if self.distributed else 1
        if context_parallel < 1 or world % context_parallel:
            raise SystemExit(
                f"--context-parallel {context_parallel} with {world} process(es); expected a divisor of their number: "
                f"torchrun --nproc_per_node={max(context_parallel, 2)} …"
            )
        if fsdp and not self.distributed:
            raise SystemExit("--fsdp shards parameters over processes, and there is one: torchrun --nproc_per_node=2 …")
        if self.distributed:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.rank = dist.get_rank() if self.distributed else 0
        self.rows, self.row = world // context_parallel, self.rank // context_parallel
        self.layout, self.fsdp = layout, fsdp
        self.axis = None
        if context_parallel > 1:
            mesh = dist.init_device_mesh(self.device.type, (self.rows, context_parallel), mesh_dim_names=("dp", "cp"))
            self.axis = mesh["cp"]

    def model_options(self) -> dict[str, object]:
        """For ``create_model``."""
        return {} if self.axis is None else {"mesh": self.axis, "layout": self.layout}

    def shard(self, *tokens: torch.Tensor) -> list[torch.Tensor]:
        """This process's part of whole (batch, sequence) tensors."""
        return list(tokens) if self.axis is None else shard_sequence(self.axis, tokens, [1] * len(tokens), layout=self.layout)

    def parallel(self, model: LongNetLM) -> torch.nn.Module:
        """The model with gradients averaged over all processes, of all rows: by DDP, or by FSDP2, which shards its parameters too."""
        if not self.fsdp:
            return DistributedDataParallel(model) if self.distributed else model
        for block in model.decoder.blocks:
            fully_shard(block)
        return fully_shard(model)

    @property
    def is_spread(self) -> bool:
        """Whether the model needs the other processes to run."""
        return self.fsdp or self.axis is not None

    def weights(self, model: LongNetLM) -> dict[str, torch.Tensor]:
        """The whole state dict, on every process; all must ask."""
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
