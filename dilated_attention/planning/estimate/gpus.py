"""GPUs by name: memory, bandwidth, peak rates and links as stated by the vendor, for planning on a machine that is not at hand.

Every figure was compared in November 2026 with copies of the document that ``source`` names, or with quotations from it. Peaks are dense:
where a document states only figures with 2:4 sparsity, they are halved. Figures for which no such copy was found are not in the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from dilated_attention.pattern.checks import shown

GIB = 2**30
# share of the datasheet's memory, counted in 2^30 bytes, that the driver leaves to programs
_VISIBLE = 0.985
# GDDR memory stores its error-correcting code in itself, one sixteenth, where ECC is on; HBM has extra memory for it
_AFTER_CODE = 15 / 16


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What a plan needs to know about a GPU.

    Args:
        name: the manufacturer's spelling.
        capability: CUDA compute capability.
        memory: bytes available to a program.
        bandwidth: memory bandwidth in bytes/s; None where it is not known.
        peaks: FLOP/s of dense products that accumulate in float32, without sparsity, by ``"float32"``, ``"float16"``, ``"bfloat16"`` and
            ``"fp8"``. The GPU does not support a missing dtype. float32 is the rate of the plain cores, without TF32. Empty where unknown.
        link: bytes/s to other GPUs of its node, in one direction. A bridge between two or four cards counts where it is the usual
            configuration (NVL; RTX 3090, A40, RTX A6000); for the A30 and the PCIe forms of A100 and H100 it does not.
        link_name: ``"NVLink"`` or ``"PCIe"``.
        source: where the figures come from.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    bandwidth: float | None
    peaks: Mapping[str, float] = field(hash=False)
    link: float | None
    link_name: str
    source: str

    def peak(self, dtype: torch.dtype | str) -> float | None:
        """Returns the FLOP/s of dense products in this dtype, or None where it is not supported or not known."""
        return self.peaks.get(str(dtype).removeprefix("torch."))


def _gpu(
    name: str,
    capability: tuple[int, int],
    gib: float,
    gb_per_s: float,
    peaks: tuple[float | None, float | None, float | None, float | None],
    link_gb_per_s: float,
    link_name: str,
    source: str,
    *,
    has_inline_code: bool = False,
) -> Gpu:
    """``peaks``: TFLOP/s of float32, float16, bfloat16, fp8. ``link_gb_per_s``: both directions together, as in datasheets."""
    names = ("float32", "float16", "bfloat16", "fp8")
    return Gpu(
        name=name,
        capability=capability,
        memory=int(gib * GIB * _VISIBLE * (_AFTER_CODE if has_inline_code else 1)),
        bandwidth=gb_per_s * 1e9,
        peaks=MappingProxyType({key: peak * 1e12 for key, peak in zip(names, peaks, strict=True) if peak is not None}),
        link=link_gb_per_s * 1e9 / 2,
        link_name=link_name,
        source=source,
    )


_HALF = ", half of what it states with sparsity"
_P100 = "NVIDIA, Tesla P100 datasheet; float16 at the rate of float32, which it sums in"
_PCIE_3, _PCIE_4, _PCIE_5 = (32, "PCIe"), (64, "PCIe"), (128, "PCIe")
# name, compute capability, GB, GB/s, TFLOP/s (float32, float16, bfloat16, fp8), link GB/s, kind of link, source
_ALL = (
    _gpu("GTX 1080", (6, 1), 8, 320, (8.87, None, None, None), *_PCIE_3, "NVIDIA, GeForce GTX 1080 whitepaper"),
    _gpu("GTX 1080 Ti", (6, 1), 11, 484, (11.3, None, None, None), *_PCIE_3, "NVIDIA, GeForce GTX 1080 Ti specifications"),
    # the 18.7 and 21.2 TFLOP/s it reaches in float16 accumulate in float16; accumulation in float32 runs at float32's rate
    _gpu("P100 PCIe", (6, 0), 16, 732, (9.3, 9.3, None, None), *_PCIE_3, _P100),
    _gpu("P100 SXM2", (6, 0), 16, 732, (10.6, 10.6, None, None), 160, "NVLink", _P100),
    _gpu("V100 PCIe 16GB", (7, 0), 16, 900, (14, 112, None, None), *_PCIE_3, "NVIDIA, V100 datasheet"),
    _gpu("V100 PCIe 32GB", (7, 0), 32, 900, (14, 112, None, None), *_PCIE_3, "NVIDIA, V100 datasheet"),
    _gpu("V100 SXM2 16GB", (7, 0), 16, 900, (15.7, 125, None, None), 300, "NVLink", "NVIDIA, V100 datasheet"),
    _gpu("V100 SXM2 32GB", (7, 0), 32, 900, (15.7, 125, None, None), 300, "NVLink", "NVIDIA, V100 datasheet"),
    _gpu("T4", (7, 5), 16, 320, (8.1, 65, None, None), *_PCIE_3, "NVIDIA, T4 datasheet", has_inline_code=True),
    _gpu("RTX 3090", (8, 6), 24, 936, (35.6, 71, 71, None), 112.5, "NVLink", "NVIDIA, Ampere GA102 whitepaper, appendix A"),
    _gpu("A10", (8, 6), 24, 600, (31.2, 125, 125, None), *_PCIE_4, "NVIDIA, A10 datasheet", has_inline_code=True),
    _gpu("A30", (8, 0), 24, 933, (10.3, 165, 165, None), *_PCIE_4, "NVIDIA, A30 datasheet"),
    _gpu("A40", (8, 6), 48, 696, (37.4, 149.7, 149.7, None), 112.5, "NVLink", "NVIDIA, A40 datasheet", has_inline_code=True),
    _gpu("RTX A6000", (8, 6), 48, 768, (38.7, 154.8, 154.8, None), 112.5, "NVLink", "NVIDIA, RTX A6000 datasheet" + _HALF),
    _gpu("A100 SXM 40GB", (8, 0), 40, 1555, (19.5, 312, 312, None), 600, "NVLink", "NVIDIA, A100 datasheet"),
    _gpu("A100 PCIe 40GB", (8, 0), 40, 1555, (19.5, 312, 312, None), *_PCIE_4, "NVIDIA, A100 datasheet"),
    _gpu("A100 SXM 80GB", (8, 0), 80, 2039, (19.5, 312, 312, None), 600, "NVLink", "NVIDIA, A100 datasheet"),
    _gpu("A100 PCIe 80GB", (8, 0), 80, 1935, (19.5, 312, 312, None), *_PCIE_4, "NVIDIA, A100 datasheet"),
    _gpu("RTX 4090", (8, 9), 24, 1008, (82.6, 165.2, 165.2, 330.3), *_PCIE_4, "NVIDIA, Ada GPU architecture whitepaper 2.02, appendix A"),
    _gpu("L4", (8, 9), 24, 300, (30.3, 121, 121, 242.5), *_PCIE_4, "NVIDIA, L4 datasheet" + _HALF, has_inline_code=True),
    _gpu("L40", (8, 9), 48, 864, (90.5, 181.05, 181.05, 362), *_PCIE_4, "NVIDIA, L40 datasheet", has_inline_code=True),
    _gpu("L40S", (8, 9), 48, 864, (91.6, 362.05, 362.05, 733), *_PCIE_4, "NVIDIA, L40S datasheet", has_inline_code=True),
    _gpu("H100 PCIe", (9, 0), 80, 2000, (51, 756, 756, 1513), *_PCIE_5, "NVIDIA, H100 datasheet" + _HALF),
    _gpu("H100 NVL", (9, 0), 94, 3938, (60, 835, 835, 1671), 600, "NVLink", "NVIDIA, H100 NVL datasheet and product brief" + _HALF),
    _gpu("H100 SXM", (9, 0), 80, 3350, (67, 989, 989, 1979), 900, "NVLink", "NVIDIA, H100 datasheet" + _HALF),
    _gpu("H200 NVL", (9, 0), 141, 4800, (60, 835, 835, 1671), 900, "NVLink", "NVIDIA, H200 product page" + _HALF),
    _gpu("H200 SXM", (9, 0), 141, 4800, (67, 989, 989, 1979), 900, "NVLink", "NVIDIA, H200 datasheet" + _HALF),
    _gpu("GH200 96GB", (9, 0), 96, 4000, (67, 989, 989, 1979), 900, "NVLink", "NVIDIA, GH200 datasheet" + _HALF),
    _gpu("B200", (10, 0), 180, 7700, (75, 2250, 2250, 4500), 1800, "NVLink", "NVIDIA, HGX B200 datasheet" + _HALF),
    _gpu("RTX 5090", (12, 0), 32, 1792, (104.8, 209.5, 209.5, 419), *_PCIE_5, "NVIDIA, RTX Blackwell GPU architecture whitepaper"),
)  # fmt: skip
GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _ALL})
# where a name fits several GPUs, the one that people usually mean
_USUAL = {
    "p100": "P100 SXM2", "v100": "V100 SXM2 16GB", "v10032gb": "V100 SXM2 32GB", "v10032": "V100 SXM2 32GB",
    "v10016gb": "V100 SXM2 16GB", "v10016": "V100 SXM2 16GB", "a100": "A100 SXM 80GB", "a10080gb": "A100 SXM 80GB",
    "a10080": "A100 SXM 80GB", "a10040gb": "A100 SXM 40GB", "a10040": "A100 SXM 40GB", "h100": "H100 SXM", "h10080gb": "H100 SXM",
    "h200": "H200 SXM", "gh200": "GH200 96GB", "a6000": "RTX A6000", "h10080gbhbm3": "H100 SXM", "3090": "RTX 3090", "4090": "RTX 4090",
    "5090": "RTX 5090", "1080": "GTX 1080", "1080ti": "GTX 1080 Ti", "p100pcie16gb": "P100 PCIe", "p100sxm16gb": "P100 SXM2",
    "gh200480gb": "GH200 96GB", "a100pcie": "A100 PCIe 80GB", "a100sxm": "A100 SXM 80GB",
}  # fmt: skip
_NOISE = ("nvidia", "tesla", "geforce", "quadro", "graphics", "gpu")


def find_gpu(name: str) -> Gpu:
    """Returns the GPU called ``name``. Case, spaces, dashes, the maker's name and the order of form and size do not matter.

    ``"h200"``, ``"NVIDIA H200"``, ``"a100-80gb"``, ``"A100-SXM4-80GB"`` and ``"4090"`` are valid names. Where there are several forms, the
    bare name means the SXM form with the most memory, except for the V100, where it means 16 GB.

    Raises:
        ValueError: there is no such GPU; the message lists the known names.
    """
    if not isinstance(name, str):
        raise TypeError(f"gpu is {shown(name)} ({type(name).__name__}); expected a name, such as 'H200'")
    found = _known(name)
    if found is None:
        raise ValueError(f"gpu is {shown(name)}; known are {', '.join(GPUS)}. For another one use the nearest, and pass the memory")
    return found


def _known(name: str) -> Gpu | None:
    plain = _plain(name)
    names = {_plain(other): other for other in GPUS}
    if plain in _USUAL or plain in names:
        return GPUS[_USUAL.get(plain) or names[plain]]
    # the same words in another order: A100-80GB-PCIe
    words = sorted(_words(name))
    same = [other for other in GPUS if sorted(_words(other)) == words]
    return GPUS[same[0]] if len(same) == 1 else None


def _plain(name: str) -> str:
    """Reduces a name to the letters and digits that distinguish GPUs."""
    plain = re.sub(r"[^a-z0-9]", "", _without_generation(name))
    for word in _NOISE:
        plain = plain.replace(word, "")
    return plain


def _words(name: str) -> list[str]:
    words = re.split(r"[^a-z0-9]+", _without_generation(name))
    return [re.sub(r"^(\d+)gb$", r"\1", word) for word in words if word and word not in _NOISE]


def _without_generation(name: str) -> str:
    """Drops the generation of the form: SXM2 … SXM5 are generations of one form, and a GPU exists in only one of them."""
    return re.sub(r"sxm\d(?![a-z0-9])", "sxm", name.lower())


def detected_gpu(device: torch.device | str | None = None) -> Gpu | None:
    """Returns this machine's GPU: its memory as PyTorch reports it, its rates by its name; without rates where the name is not known.

    Returns None without a CUDA GPU.
    """
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    properties = torch.cuda.get_device_properties(torch.device(device or "cuda"))
    known = _known(properties.name)
    if known is None:
        capability = (properties.major, properties.minor)
        return Gpu(
            name=properties.name,
            capability=capability,
            memory=properties.total_memory,
            bandwidth=None,
            peaks=MappingProxyType({}),
            link=None,
            link_name="an unknown link",
            source="this machine; its rates are not known by its name",
        )
    return Gpu(
        name=properties.name,
        capability=known.capability,
        memory=properties.total_memory,
        bandwidth=known.bandwidth,
        peaks=known.peaks,
        link=known.link,
        link_name=known.link_name,
        source=f"memory of this machine, rates of {known.source}",
    )
