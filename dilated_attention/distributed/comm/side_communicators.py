"""Separate NCCL communicators for the lanes of a group, so that exchanges of one lane do not wait for those of another.

They are built directly, on keys of the group's session in the store. ``new_group`` would not work: it names groups by how many the process
has, so ranks with different lanes would look for each other under different names.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dilated_attention.distributed.comm.session import Session, name
from dilated_attention.distributed.errors import RingError, first_line

_CUDA, _CPU = torch.device("cuda"), torch.device("cpu")


def has_nccl(group: dist.ProcessGroup) -> bool:
    """Whether the group sends GPU tensors through NCCL."""
    return _CUDA in group._device_types and group._get_backend(_CUDA).name() == "nccl"


def communicator(group: dist.ProcessGroup, session: Session, lane: str, most_ctas: int | None) -> dist.ProcessGroup:
    """Makes a communicator of the group's ranks for GPU tensors; CPU tensors use the group's own backend. All ranks must call it; RingError
    if torch could not make it."""
    store = PrefixStore(f"communicator/{lane}", session.store)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.global_ranks_in_group = list(session.global_ranks)
    options.group_name = group_name = f"{group.group_name}/{lane}"  # type: ignore[assignment,unused-ignore]
    if most_ctas is not None:
        options.config.max_ctas = most_ctas
    try:
        backend = dist.ProcessGroupNCCL(store, session.rank, session.size, options)
        backend._set_sequence_number_for_group()
        other = dist.ProcessGroup(store, session.rank, session.size)
        other._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        other._register_backend(_CUDA, dist.ProcessGroup.BackendType.NCCL, backend)
        # set the name before adding the group's own backend, which keeps its own name
        other._set_group_name(group_name)  # type: ignore[arg-type,unused-ignore]
        if _CPU in group._device_types:
            other._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, group._get_backend(_CPU))
    except RuntimeError as error:
        session.failed = f"{name(session, session.rank)}: a communicator for {lane} could not be made: {first_line(error)}"
        session.told = True
        raise RingError(f"{session.failed}; look at the output of the group's other ranks") from error
    return other


def close(other: dist.ProcessGroup, session: Session) -> None:
    """Shuts down a lane's communicator along with its group: ``destroy_process_group`` does not know about it."""
    backend = other._get_backend(_CUDA)
    # the group may be half destroyed, and there is no one left to report an error to
    with contextlib.suppress(RuntimeError):
        (backend.shutdown if session.failed is None else backend.abort)()
