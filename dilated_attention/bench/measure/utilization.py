"""Shares of a device's peak rate, looked up by the device name in a file of results."""

from __future__ import annotations

from dilated_attention.bench.report.rows import Results, Row
from dilated_attention.planning import Gpu, find_gpu


def gpu_of(results: Results) -> Gpu | None:
    """Returns the GPU on which the results were measured; None for a CPU, and for a GPU whose rates are not known."""
    hardware = results.machine["hardware"]
    if "capability" not in hardware:
        return None
    try:
        return find_gpu(hardware["device"])
    except ValueError:
        return None


def peak_flops(gpu: Gpu | None, row: Row) -> float | None:
    """Returns the peak FLOP/s of the row's products, by the case's dtype, or for 8 bits where the contender's name contains fp8.

    None for float32, whose products may or may not use TF32 depending on the kernel, and where the rate is not known.
    """
    dtype = "fp8" if "fp8" in row.name else row.case["dtype"]
    return None if gpu is None or dtype not in ("fp8", "float16", "bfloat16") else gpu.peak(dtype)


def utilisation(gpu: Gpu | None, row: Row) -> float | None:
    """Returns the share of the peak, from 0 to 1."""
    peak = peak_flops(gpu, row)
    return None if peak is None or "tflops" not in row.values else 1e12 * row.values["tflops"] / peak


def explained(results: Results, dtype: str) -> str:
    """Returns a sentence for a caption: what 100 % means, or why there are no shares."""
    gpu = gpu_of(results)
    device = results.machine["hardware"]["device"]
    if gpu is None:
        return f"No utilisation: the peak rates of {device} are not known here."
    peaks = [(name, gpu.peak(name)) for name in dict.fromkeys((dtype, "fp8")) if name != "float32"]
    told = ", ".join(f"{peak / 1e12:,.0f} TFLOP/s in {name}" for name, peak in peaks if peak is not None)
    if dtype not in ("float16", "bfloat16") or gpu.peak(dtype) is None:
        return f"No utilisation in {dtype}: its peak depends on whether a kernel uses TF32 products, or is not known."
    return f"In brackets: share of {gpu.name}'s peak, {told} ({gpu.source})."
