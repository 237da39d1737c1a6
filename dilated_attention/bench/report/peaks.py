"""Shares of a device's peak rate, looked up by the device name in a file of results."""

from __future__ import annotations

from collections.abc import Sequence

from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.planning import Gpu, find_gpu


def gpu_of(results: Results) -> Gpu | None:
    """Returns the GPU on which the results were measured; None for a CPU, and for a GPU whose rates are not known."""
    hardware = results.machine["hardware"]
    try:
        return find_gpu(hardware["device"]) if "capability" in hardware else None
    except ValueError:
        return None


def utilisation(gpu: Gpu | None, row: Row) -> float | None:
    """Returns the share of the peak, from 0 to 1, by the case's dtype, or of 8 bits where the contender's name contains fp8.

    None for float32, whose products may or may not use TF32 depending on the kernel, and where the rate is not known.
    """
    dtype = "fp8" if "fp8" in row.name else row.case["dtype"]
    peak = None if gpu is None or dtype not in ("fp8", "float16", "bfloat16") else gpu.peak(dtype)
    return None if peak is None or "tflops" not in row.values else 1e12 * row.values["tflops"] / peak


def explained(results: Results, rows: Sequence[Row]) -> str:
    """Returns a sentence for a caption: what 100 % means, or why there are no shares."""
    gpu = gpu_of(results)
    if gpu is None:
        return f"No utilisation: the peak rates of {results.machine['hardware']['device']} are not known here."
    names = dict.fromkeys([*(row.case["dtype"] for row in rows), "fp8"])
    peaks = ", ".join(f"{gpu.peak(name) or 0:.3g} FLOP/s in {name}" for name in names if name in ("fp8", "float16", "bfloat16"))
    return f"%: share of {gpu.name}'s peak, {peaks} ({gpu.source})."
