"""Fingerprints of outputs and gradients of many random calls, through public functions: equal before and after a change of the inside.

    python -m tests.helpers.bit_equal save before.json      # in the old tree
    python -m tests.helpers.bit_equal compare before.json   # in the new one; exit code 1 and the names of the calls that differ

With ``--device cuda`` on a GPU, ``--count`` calls of each kind. One thread and no TRITON_INTERPRET on a CPU, so that runs repeat.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dilated_attention import create_model
from dilated_attention.testing import Space, inputs, random_case, results
from tests.helpers import ring_cases
from tests.helpers.forms import FORMS
from tests.helpers.pool import pool_of


def digest(tensors: Iterable[torch.Tensor | None]) -> str:
    found = hashlib.sha256()
    for x in tensors:
        if x is not None:
            x = x.detach().cpu()
            found.update(f"{tuple(x.shape)} {x.dtype}".encode())
            found.update(x.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:24]


def attend(index: int, device: str, form: str, **space: Any) -> Any:
    """Branches, windows, blocks, and both."""
    function, fitting = FORMS[form]
    case = fitting(random_case(index, Space(**space)))
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if device == "cuda" else (torch.float32, torch.bfloat16, torch.float64)
    return results(function, case, inputs(case, dtypes[index % 3], device), **{} if index % 4 else {"backend": "math"}).values()


def model(index: int, device: str) -> Any:
    made = create_model("longnet-tiny", num_layers=2, device=device)
    tokens = torch.randint(250, (1, 65 + index), device=device)
    loss = made(tokens[:, :-1], targets=tokens[:, 1:])
    return [loss, *torch.autograd.grad(loss, list(made.parameters()), allow_unused=True)]


# with how many calls for one of the others
KINDS: dict[str, tuple[Any, int]] = {
    "branches": (lambda index, device: attend(index, device, "eager", max_length=70 if device == "cpu" else 400), 6),
    "blocks": (lambda index, device: attend(index, device, "eager", max_length=300, blocks=True), 4),
    "rows": (lambda index, device: attend(index, device, "rows"), 1),
    "module": (lambda index, device: attend(index, device, "module"), 1),
    "model": (model, 0),
}


def everything(device: str, count: int) -> dict[str, str]:
    """Calls by name, with their fingerprint, or the error that they end with."""
    found = {}
    for kind, (function, share) in KINDS.items():
        for index in range(max(3, count * share)):
            try:
                torch.manual_seed(index)
                found[f"{kind} {index}"] = digest(function(index, device))
            except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
                found[f"{kind} {index}"] = f"{type(error).__name__}: {error}"[:300]
    if device == "cpu":
        ranks = pool_of(3).run(ring_cases.run, [ring_cases.draw(3, seed) for seed in range(max(3, 2 * count))], torch.float32)
        for index, parts in enumerate(zip(*ranks, strict=True)):
            found[f"ring {index}"] = " ".join(digest(x for result in part for x in result.values()) for part in parts)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["save", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = everything(args.device, args.count)
    errors = sum(": " in value for value in found.values())
    if args.what == "save":
        args.file.write_text(json.dumps(found, indent=0))
        print(f"{len(found)} calls, {errors} of them refused")
        return 0
    before = json.loads(args.file.read_text())
    different = [name for name in {**before, **found} if before.get(name) != found.get(name)]
    print(f"{len(found)} calls, {errors} of them refused, {len(different)} different: {', '.join(different[:20])}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
