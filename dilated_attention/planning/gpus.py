"""GPUs by name: memory, bandwidth, peak rates and links as stated by the vendor, for planning on a machine that is not at hand. Peaks are
dense: where a document states only figures with 2:4 sparsity, they are halved."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from dilated_attention.pattern.checks import as_int, shown

GIB = 2**30
# what plans call the machine's CPU
THIS_CPU = "this machine's CPU"
# share of the datasheet's memory, whose GB are 2^30 bytes, that the driver leaves to programs
_VISIBLE_SHARE = 0.985
# where ECC is on, the error-correcting code takes one sixteenth of GDDR memory; HBM has extra memory for it
_SHARE_BESIDE_ECC = 15 / 16


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What a plan needs to know about a GPU, or about this machine's CPU, of which no rates are known.

    Args:
        name: the manufacturer's spelling.
        capability: CUDA compute capability; (0, 0) for a CPU.
        memory: bytes available to a program.
        bandwidth: memory bandwidth in bytes/s; None where it is not known.
        peaks: FLOP/s of dense products that accumulate in float32, without sparsity, by ``"float32"``, ``"float16"``, ``"bfloat16"`` and
            ``"fp8"``. The GPU does not support a missing dtype. float32 is the rate of the plain cores, without TF32. Empty where unknown.
        link: bytes/s to other GPUs of its node, in one direction. A bridge between two or four cards counts where it is the usual
            configuration (NVL; RTX 3090, A40, RTX A6000); for the A30 and the PCIe forms of A100 and H100 it does not.
        source: where the figures come from.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    bandwidth: float | None = None
    peaks: Mapping[str, float] = field(default_factory=dict, hash=False)
    link: float | None = None
    source: str

    @property
    def is_cpu(self) -> bool:
        return self.capability == (0, 0)

    def peak(self, dtype: torch.dtype | str) -> float | None:
        """Returns the FLOP/s of dense products in this dtype, or None where it is not supported or not known."""
        return self.peaks.get(str(dtype).removeprefix("torch."))


def _words(name: str) -> tuple[str, ...]:
    """Returns the words and numbers of a name that distinguish GPUs, sorted: without the maker, the GB of a size and the number behind SXM.
    ``"NVIDIA A100-SXM4-80GB"`` gives ``("100", "80", "a", "sxm")``."""
    plain = re.sub(r"nvidia|tesla|geforce|quadro|graphics|gpu", " ", name.lower())
    plain = re.sub(r"(\d)gb|(sxm)\d(?![a-z0-9])", r"\1\2", plain)
    return tuple(sorted(re.findall(r"[a-z]+|[0-9]+", plain)))


def _gpu_of(row: dict[str, Any]) -> Gpu:
    """Returns the GPU of a row of ``gpus.json``, whose ``about`` says what the figures are."""
    peaks = zip(("float32", "float16", "bfloat16", "fp8"), row["tflops"], strict=True)
    return Gpu(
        name=row["name"],
        capability=(row["capability"][0], row["capability"][1]),
        memory=int(row["gb"] * GIB * _VISIBLE_SHARE * (_SHARE_BESIDE_ECC if row.get("inline_code") else 1)),
        bandwidth=row["gb_per_s"] * 1e9,
        peaks=MappingProxyType({dtype: peak * 1e12 for dtype, peak in peaks if peak is not None}),
        # a datasheet states both directions together
        link=row["link_gb_per_s"] * 1e9 / 2,
        source=row["source"],
    )


_ROWS = json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8"))["gpus"]
GPUS: Mapping[str, Gpu] = MappingProxyType({row["name"]: _gpu_of(row) for row in _ROWS})
# by the words of their names, and of those that people usually give them
_BY_WORDS = {_words(name): GPUS[row["name"]] for row in _ROWS for name in (row["name"], *row.get("usual", ()))}


def find_gpu(name: str) -> Gpu:
    """Returns the GPU called ``name``. Case, spaces, dashes, the maker's name and the order of form and size do not matter.

    ``"h200"``, ``"NVIDIA H200"``, ``"a100-80gb"``, ``"A100-SXM4-80GB"`` and ``"4090"`` are valid names. Where there are several forms, the
    bare name means the SXM form with the most memory, except for the V100, where it means 16 GB.

    Raises:
        ValueError: there is no such GPU; the message lists the known names.
    """
    if not isinstance(name, str):
        raise TypeError(f"gpu is {shown(name)} ({type(name).__name__}); expected a name, such as 'H200'")
    found = _BY_WORDS.get(_words(name))
    if found is None:
        raise ValueError(f"gpu is {shown(name)}; known are {', '.join(GPUS)}. For another one use the nearest, and pass the memory")
    return found


def machine_of(gpu: str | Gpu | None, memory: int | None = None) -> Gpu:
    """Returns the GPU given or called ``gpu``; with None this machine's GPU, or its CPU if it has none; with ``"cpu"`` its CPU. ``memory``
    takes the place of its own."""
    found: Gpu | None
    if gpu is None:
        found = detected_gpu()
    elif isinstance(gpu, Gpu):
        found = gpu
    else:
        found = None if isinstance(gpu, str) and gpu.lower() == "cpu" else find_gpu(gpu)
    if found is None:
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found = Gpu(name=THIS_CPU, capability=(0, 0), memory=ram, source="its memory as the system reports it")
    return found if memory is None else replace(found, memory=as_int("memory", memory, minimum=1))


def detected_gpu(device: torch.device | str | None = None) -> Gpu | None:
    """Returns this machine's GPU: its memory as PyTorch reports it, its rates by its name; without rates where the name is not known. None
    without a CUDA GPU."""
    # torch.cuda may also be an AMD GPU, of which nothing is known here
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    properties = torch.cuda.get_device_properties(torch.device(device or "cuda"))
    known = _BY_WORDS.get(_words(properties.name))
    unknown = Gpu(name="", capability=(properties.major, properties.minor), memory=0, source="")
    source = f"memory of this machine, rates of {known.source}" if known else "this machine; its rates are not known by its name"
    return replace(known or unknown, name=properties.name, memory=properties.total_memory, source=source)
