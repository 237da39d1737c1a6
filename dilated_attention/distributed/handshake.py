"""TEMPORARY."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from dilated_attention.distributed.group import Members


def agree(members: Members, same: Mapping[str, object], own: Mapping[str, int], timeout: float) -> list[dict[str, int]]:
    out = [None] * members.size
    dist.all_gather_object(out, (dict(same), dict(own)), group=members.group)
    for o in out:
        if o[0] != out[0][0]:
            raise ValueError(f"disagree {out}")
    return [o[1] for o in out]
