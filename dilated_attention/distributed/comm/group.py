"""Finds the processes that share a sequence: from a ProcessGroup, a DeviceMesh of one axis, or a group's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Members:
    """The processes that share one sequence. Rank i holds shard i.

    Attributes:
        group: their group; None if there is one process.
        rank: this process's rank in the group.
        size: W, the number of processes.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int


def members_named(name: str) -> Members:
    """Returns the members of the group with this name; "" stands for one process. Custom ops get a name, since they cannot take a group."""
    if not name:
        return Members(None, 0, 1)
    if not dist.is_initialized():
        raise ValueError(f"the group {name!r} is not known here: torch.distributed is not initialised; call init_process_group first")
    group = _group_named(name)
    if group is None:
        raise _error_of_destroyed(name)
    # not dist.get_rank, which looks it up in several dictionaries
    return Members(group, group.rank(), group.size())


def members_of(group_or_mesh: Any) -> Members:
    """Returns the members of a ProcessGroup or of a DeviceMesh of one axis. None stands for all processes, or for this one alone if
    torch.distributed is not initialised.

    Raises ValueError if this process is not in the group, the group was destroyed or the mesh has several axes, else TypeError."""
    if not (dist.is_available() and dist.is_initialized()):
        if group_or_mesh is None:
            return Members(None, 0, 1)
        raise ValueError("a group is given but torch.distributed is not initialised; call torch.distributed.init_process_group first")
    group: Any = dist.group.WORLD if group_or_mesh is None else group_or_mesh
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            raise ValueError(
                f"the mesh has {group.ndim} axes {names or tuple(group.mesh.shape)}; a sequence is spread over one: pass "
                f"mesh[{(names or ('cp',))[-1]!r}]"
            )
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"global rank {dist.get_rank()} is not in the group it was given; call this on the group's own ranks only")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"expected a ProcessGroup, a DeviceMesh of one axis or None, got {type(group).__name__}")
    # names are given anew after destroy_process_group: that of a destroyed group may be another group's, of other processes.
    # torch.compile cannot trace the question
    if not torch.compiler.is_compiling() and _group_named(str(group.group_name)) is not group:
        raise _error_of_destroyed(str(group.group_name))
    return Members(group if group.size() > 1 else None, group.rank(), group.size())


def _group_named(name: str) -> Any:
    """Returns the group that has this name now; None if there is none."""
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type,unused-ignore]
    except RuntimeError:
        return None


def _error_of_destroyed(name: str) -> ValueError:
    return ValueError(
        f"the group {name!r} is not known here any more: destroy_process_group has ended it; make a new group (torch.distributed.new_group "
        "or init_device_mesh), and modules with that"
    )


def group_name_of(group: Any, mesh: Any) -> str:
    """Returns the name of the group or of the mesh's group, for ``members_named``; "" for one process. At most one of the two is given;
    neither: all processes. ``group`` may be such a name already: a module looks its group up once and passes the name."""
    if isinstance(group, str):
        return group
    if group is not None and mesh is not None:
        raise ValueError("group and mesh are both given; a sequence is spread over one of them: pass group= or mesh=")
    members = members_of(mesh if group is None else group)
    return "" if members.group is None else str(members.group.group_name)
