"""NCCL communicators of their own for the lanes of a group, so that exchanges of one lane do not wait for those of another.

They are built directly, on keys of the group's session in the store, and torch.distributed does not know them: ``new_group`` counts the
groups of a process and names further ones by that count, so ranks with different lanes would look for each other under different names.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dilated_attention.distributed.errors import RingError, first_line
from dilated_attention.distributed.session import Session, name

_CUDA, _CPU = torch.device("cuda"), torch.device("cpu")


def has_nccl(group: dist.ProcessGroup) -> bool:
    """Whether the group's GPU tensors go by NCCL."""
    return _CUDA in group._device_types and group._get_backend(_CUDA).name() == "nccl"


def communicator(group: dist.ProcessGroup, session: Session, lane: str, most_ctas: int | None) -> dist.ProcessGroup:
    """A communicator of the group's ranks for GPU tensors; those of a CPU go by the group's own. All ranks make it together.

    Raises:
        RingError: torch made none.
    """
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
        # before the group's own backend is in it, whose name stays
        other._set_group_name(group_name)  # type: ignore[arg-type,unused-ignore]
        if _CPU in group._device_types:
            other._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, group._get_backend(_CPU))
    except RuntimeError as error:
        session.failed = f"{name(session, session.rank)}: a communicator for {lane} could not be made: {first_line(error)}"
        session.told = True
        raise RingError(f"{session.failed}; look at the output of the group's other ranks") from error
    return other


def close(other: dist.ProcessGroup, session: Session) -> None:
    """Ends a lane's communicator with its group: ``destroy_process_group`` does not know it."""
    backend = other._get_backend(_CUDA)
    # the group may be half destroyed, and there is nobody left to tell
    with contextlib.suppress(RuntimeError):
        (backend.shutdown if session.failed is None else backend.abort)()
