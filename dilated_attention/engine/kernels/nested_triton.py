"""The forward of nested families on GPUs: ``nested_forward``, its check ``reasons_against``, and the tile walk as a plain Triton kernel.

On Hopper the Gluon kernel of ``nested_gluon`` runs. The Triton kernel here walks the same tables with ordinary loads. It runs under
TRITON_INTERPRET=1 on the CPU, where tests compare it with the plain torch twin, and on GPUs as a baseline (half the Gluon kernel's rate).
"""

# kernels have no types that mypy knows
# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import importlib.util
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dilated_attention.backends import NESTED_CAPABILITIES
from dilated_attention.backends.block_lists import on_device
from dilated_attention.engine.kernels.nested import (
    MAX_DESCRIPTORS,
    TILE_KEYS,
    TILE_ROWS,
    NestedFamily,
    device_offsets,
    device_table,
    level_constants,
)

HEAD_DIMS = tuple(sorted(NESTED_CAPABILITIES.head_dims or ()))
HAS_GLUON = importlib.util.find_spec("triton.experimental.gluon") is not None

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _residue(offsets_ptr, branch, step, rate, head, HEADS: tl.constexpr):
    return (tl.load(offsets_ptr + branch * HEADS + head) + step) % rate


@triton.jit
def _step(
    j, q, rows, highest, total, acc, k_ptr, v_ptr, tiles_ptr, bias_ptr, offsets_ptr, start, head, k_token, v_token, scale_log2,
    HEADS: tl.constexpr, D: tl.constexpr, TILE_KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Processes one key tile: online softmax with the tile's multiplicity in the offset of the exponents."""
    entry = tiles_ptr + j * 4
    rate = tl.load(entry + 3)
    keys = _residue(offsets_ptr, tl.load(entry), tl.load(entry + 1), rate, head, HEADS)
    keys = start + keys + (tl.load(entry + 2) + tl.arange(0, TILE_KEYS)) * rate
    channels = tl.arange(0, D)
    k = tl.load(k_ptr + keys.to(tl.int64)[None, :] * k_token + channels[:, None])
    s = tl.dot(q, k, input_precision="ieee")
    if CAUSAL:
        s = tl.where(keys[None, :] <= rows[:, None], s, float("-inf"))
    new = tl.maximum(highest, tl.max(s, 1))
    p = tl.exp2(s * scale_log2 - (new * scale_log2 - tl.load(bias_ptr + j))[:, None])
    rescale = tl.exp2((highest - new) * scale_log2)
    v = tl.load(v_ptr + keys.to(tl.int64)[:, None] * v_token + channels[None, :])
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return new, total * rescale + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["segments"])
def nested_pointer_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, tiles_ptr, bias_ptr, counts_ptr, offsets_ptr, segments,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, o_batch, o_token, o_head,
    lse_batch, lse_head, lse_token, scale,
    ROW: tl.constexpr, FAMILY: tl.constexpr, D: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Computes one query tile per program. ROW: (row_branch, its rate, r_level or 0 at the top).
    FAMILY: (query tiles, table width, progressions of rows, query heads, query heads per key head, longest segment)."""
    Q_TILES: tl.constexpr = FAMILY[0]
    T: tl.constexpr = FAMILY[1]
    STEPS: tl.constexpr = FAMILY[2]
    HEADS: tl.constexpr = FAMILY[3]
    GROUP: tl.constexpr = FAMILY[4]
    TOP: tl.constexpr = FAMILY[5]
    row_branch: tl.constexpr = ROW[0]
    row_rate: tl.constexpr = ROW[1]
    row_step: tl.constexpr = ROW[2]
    index = tl.program_id(0)
    tile = index % Q_TILES
    index = index // Q_TILES
    u = index % STEPS
    index = index // STEPS
    segment = index % segments
    index = index // segments
    head = index % HEADS
    batch = (index // HEADS).to(tl.int64)
    start = segment * TOP
    rows = _residue(offsets_ptr, row_branch, (u + 1) * row_step, row_rate, head, HEADS)
    rows = start + rows + (tile * TILE_ROWS + tl.arange(0, TILE_ROWS)) * row_rate
    far = rows.to(tl.int64)
    channels = tl.arange(0, D)
    q = tl.load(q_ptr + batch * q_batch + head.to(tl.int64) * q_head + far[:, None] * q_token + channels[None, :])
    k_ptr += batch * k_batch + (head // GROUP).to(tl.int64) * k_head
    v_ptr += batch * v_batch + (head // GROUP).to(tl.int64) * v_head
    tiles_ptr += tile * T * 4
    bias_ptr += tile * T
    masked = tl.load(counts_ptr + tile * 3)
    unmasked = tl.load(counts_ptr + tile * 3 + 1)
    count = tl.load(counts_ptr + tile * 3 + 2)
    scale_log2 = scale * LOG2_E
    highest = tl.full([TILE_ROWS], -1e30, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, D], tl.float32)
    if CAUSAL:
        for j in range(masked):
            highest, total, acc = _step(
                j, q, rows, highest, total, acc, k_ptr, v_ptr, tiles_ptr, bias_ptr, offsets_ptr, start, head, k_token, v_token,
                scale_log2, HEADS, D, TILE_KEYS, True)  # fmt: skip
        for j in range(unmasked, count):
            highest, total, acc = _step(
                j, q, rows, highest, total, acc, k_ptr, v_ptr, tiles_ptr, bias_ptr, offsets_ptr, start, head, k_token, v_token,
                scale_log2, HEADS, D, TILE_KEYS, True)  # fmt: skip
    else:
        masked = 0
    for j in range(masked, unmasked):
        highest, total, acc = _step(
            j, q, rows, highest, total, acc, k_ptr, v_ptr, tiles_ptr, bias_ptr, offsets_ptr, start, head, k_token, v_token,
            scale_log2, HEADS, D, TILE_KEYS, False)  # fmt: skip
    lse = highest * scale + tl.log2(total) * LN_2
    tl.store(lse_ptr + batch * lse_batch + head.to(tl.int64) * lse_head + far * lse_token, lse)
    out = (acc / total[:, None]).to(q.dtype)
    tl.store(out_ptr + batch * o_batch + head.to(tl.int64) * o_head + far[:, None] * o_token + channels[None, :], out)


def triton_forward(
    family: NestedFamily, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, out: Tensor,
    lse: Tensor,
    *, tile_rows: int = 128, tile_keys: int = 64, num_warps: int = 8, num_stages: int = 2,
) -> None:  # fmt: skip
    """Launches the Triton kernel. Arguments are those of ``nested_forward``."""
    segments = family.num_positions // family.lengths[-1]
    for level in range(family.num_levels):
        if not family.row_steps(level):
            continue
        table = device_table(family, level, tile_rows, tile_keys, is_causal, q.device)
        row, constants = level_constants(family, level, tile_rows, table.width, q.shape[2] // k.shape[2])
        grid = (constants[0] * constants[2] * segments * q.shape[2] * q.shape[0],)
        with on_device(q.device):
            nested_pointer_kernel[grid](
                q, k, v, out, lse, table.tiles, table.bias, table.counts, device_offsets(family, q.device), segments,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], lse.stride(0), lse.stride(1), lse.stride(2), scale,
                row, constants, q.shape[3], tile_rows, tile_keys, is_causal, num_warps=num_warps, num_stages=num_stages,
            )  # fmt: skip


def reasons_against(family: NestedFamily, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> list[str]:
    """Returns every reason why ``nested_forward`` cannot take these tensors (or is slower than branch by branch); empty if it can."""
    if q.device.type != "cuda":
        return [f"needs a CUDA GPU, not {q.device.type}"]
    capability = torch.cuda.get_device_capability(q.device)
    reasons = []
    if capability != (9, 0):
        reasons.append(f"measured on sm_90 only, this is sm_{capability[0]}{capability[1]}")
    if not HAS_GLUON:
        reasons.append(f"needs the Gluon language of Triton 3.6 or later, this is Triton {triton.__version__}")
    return reasons + why_not_tensors(family, q, k, v, scale)


def why_not_tensors(family: NestedFamily, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> list[str]:
    """Returns the reasons of ``reasons_against`` that concern the family and the tensors, whatever the machine."""
    reasons = family.why_not_tiles(TILE_ROWS, TILE_KEYS)
    if family.num_levels > MAX_DESCRIPTORS + 1:
        reasons.append(f"{family.num_levels} branches, at most {MAX_DESCRIPTORS + 1}")
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
        reasons.append(f"dtypes {q.dtype}, {k.dtype}, {v.dtype}; expected all bfloat16 or all float16")
    if q.shape[3] not in HEAD_DIMS:
        reasons.append(f"head dim {q.shape[3]}; expected one of {HEAD_DIMS}")
    if family.num_heads != q.shape[2] or q.shape[2] % k.shape[2]:
        reasons.append(f"{family.num_heads} heads in the family, {q.shape[2]} query heads, {k.shape[2]} key heads")
    if min(q.shape[1], k.shape[1], v.shape[1]) < family.num_positions:
        reasons.append(f"the family has {family.num_positions} positions, the tensors {min(q.shape[1], k.shape[1], v.shape[1])}")
    if max(family.num_positions, *(x.stride(1) * family.rates[-1] for x in (q, k, v))) >= 2**31:
        reasons.append("positions and the elements between two rows of a progression are counted in 32 bits")
    if scale is not None and not (scale > 0 and math.isfinite(scale)):
        reasons.append(f"scale {scale}; expected a scale above 0, since the maximum of a row is taken before scaling")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not _by_tma(x):
            reasons.append(
                f"{name} with strides {x.stride()} at byte {x.data_ptr() % 16} of 16: "
                "TMA needs a last stride of 1, and other strides in multiples of 16 bytes"
            )
    return reasons


def _by_tma(x: Tensor) -> bool:
    steps = 16 // x.element_size()
    aligned = all(stride % steps == 0 for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1)
    # residue · token stride + channel is one coordinate of the descriptor
    return aligned and x.stride(3) == 1 and x.stride(1) >= x.shape[3] and x.data_ptr() % 16 == 0


def nested_forward(family: NestedFamily, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, out: Tensor, lse: Tensor) -> None:
    """Computes attention over the whole longest segments, each pair once. ``reasons_against`` must be empty, also for ``out`` as q.

    q (B, N, H, D), k, v (B, N, Hk, D) → written into out (B, N, H, D) in q's dtype and lse (B, H, N) float32 (natural log), positions
    0 … family.num_positions − 1; the rest is left as it is.
    """
    from dilated_attention.engine.kernels.nested_hopper import gluon_forward

    full = family.num_positions
    if family.rates[0] > 1:  # there are positions that no branch takes
        out[:, :full].zero_()
        lse[:, :, :full].fill_(-torch.inf)
    gluon_forward(family, q, k, v, is_causal, scale, out, lse)
