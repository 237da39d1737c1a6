"""A communicator more for the ranks of a group, so that exchanges of one lane do not wait for those of another."""

from __future__ import annotations

import hashlib
import uuid

import torch.distributed as dist

from dilated_attention.distributed.errors import RingError, first_line
from dilated_attention.distributed.group import next_group_named
from dilated_attention.distributed.handshake import gather
from dilated_attention.distributed.session import Session, name


def another(group: dist.ProcessGroup, session: Session, lane: str, timeout: float, most_ctas: int | None) -> dist.ProcessGroup:
    """A communicator of the same ranks."""
    ranks = list(session.global_ranks)
    # torch would wait for absent ranks by its own timeout, and not say for whom
    texts = gather(session, f"lane/{lane}", f"first use of the communicator for {lane}", timeout, uuid.uuid4().hex)
    agreed = hashlib.sha256(b"".join(texts)).hexdigest()
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    options = None
    if dist.get_backend(group) == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if most_ctas is not None:
            options.config.max_ctas = most_ctas
    try:
        with next_group_named(agreed):
            if bound is not None and len(ranks) < dist.get_world_size():
                # new_group would split the communicator of all processes, which takes all of them; splitting this one takes its ranks
                other = dist.split_group(group, [list(range(session.size))], pg_options=options)
            else:
                other = dist.new_group(ranks, backend=dist.get_backend(group), pg_options=options, use_local_synchronization=True)
    except RuntimeError as error:
        session.failed = f"{name(session, session.rank)}: a communicator for {lane} could not be made: {first_line(error)}"
        session.told = True
        raise RingError(f"{session.failed}; look at the output of the group's other ranks") from error
    assert isinstance(other, dist.ProcessGroup)
    return other
