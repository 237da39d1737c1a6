"""Determines which processes share a sequence, from a ProcessGroup or one axis of a DeviceMesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Members:
    """The processes of one sequence, in the order of its shards.

    Args:
        group: the process group; None for one process, which needs no communication.
        rank: this process's rank in the group.
        size: W, the number of processes.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int


def members_named(name: str) -> Members:
    """Returns the members of the group with this name, which is how custom ops refer to a group; "" for one process."""
    if not name:
        return Members(None, 0, 1)
    if not dist.is_initialized():
        raise ValueError(f"the group {name!r} is not known here: torch.distributed is not initialised; call init_process_group first")
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type,unused-ignore]
    return Members(group, dist.get_rank(group), dist.get_world_size(group))


def members_of(group_or_mesh: Any) -> Members:
    """Returns the group's members as seen from this process.

    Args:
        group_or_mesh: a ProcessGroup; a DeviceMesh of one axis; None for all processes, or for this one alone if torch.distributed is not
            initialised.

    Raises:
        ValueError: if this process is not in the group, or the mesh has several axes.
        TypeError: if it is neither a group nor a mesh.
    """
    if group_or_mesh is None and not (dist.is_available() and dist.is_initialized()):
        return Members(None, 0, 1)
    if not dist.is_initialized():
        raise ValueError("a group is given but torch.distributed is not initialised; call torch.distributed.init_process_group first")
    group = group_or_mesh
    if _is_mesh(group_or_mesh):
        if group_or_mesh.ndim != 1:
            names = group_or_mesh.mesh_dim_names
            raise ValueError(
                f"the mesh has {group_or_mesh.ndim} axes {names or tuple(group_or_mesh.mesh.shape)}; a sequence is spread over one: pass "
                f"mesh[{(names or ('cp',))[-1]!r}]"
            )
        group = group_or_mesh.get_group()
    elif group is None:
        group = dist.group.WORLD
    elif not isinstance(group, dist.ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(f"expected a ProcessGroup, a DeviceMesh of one axis or None, got {type(group).__name__}")
    rank = -1 if group is dist.GroupMember.NON_GROUP_MEMBER else dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"global rank {dist.get_rank()} is not in the group it was given; call this on the group's own ranks only")
    size = dist.get_world_size(group)
    return Members(group if size > 1 else None, rank, size)


def _is_mesh(x: Any) -> bool:
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(x, DeviceMesh)
