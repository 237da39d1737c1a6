"""TEMPORARY"""
from __future__ import annotations
import os
def resolve(ring, size, pattern, settings, tensors):
    ex = ring.exchange if ring.exchange != "auto" else "all_gather"
    inner = 2 if size % 2 == 0 else 1
    return ex, inner
def head_steps(seq_len, B, Hk, D, e):
    want = int(os.environ.get("STEPS", "1"))
    return max(d for d in range(1, Hk + 1) if Hk % d == 0 and d <= want)
