"""Names that the parser offers, without importing what they stand for. tests/cli/test_start.py compares them with the originals."""

from __future__ import annotations

import json
from pathlib import Path

# factory.EXAMPLES
MACHINES = ("ada", "ampere", "blackwell", "blackwell-consumer", "cpu", "hopper", "mps", "pascal", "rocm", "turing", "volta")
# backends.PRECISIONS
PRECISIONS = ("native", "fp8")
# dtypes that attention takes, as torch calls them
DTYPES = ("float16", "bfloat16", "float32", "float64")
# factory.MODEL_PRESETS
MODEL_PRESETS = (
    *("longnet-tiny", "longnet-15m", "longnet-50m", "longnet-125m", "longnet-350m", "longnet-760m", "longnet-2.7b"),
    *("llama-1b", "gpt2-124m", "llama-7b"),
    *("gigapath-12l768d", "gigapath-24l1024d", "gigapath-12l1536d"),
    *("longvit-1024", "longvit-4096", "longvit-8192", "longvit-16384", "longvit-32768"),
)
# planning.estimate.problem.KINDS; those of recommend are the first three
PLAN_KINDS = ("dense", "dilated", "block_sparse", "ring", "ring_dilated", "ring_block_sparse", "standard", "sdpa")
PATTERN_KINDS = PLAN_KINDS[:3]
# planning.USE_CASES, from the table that it reads as well
_RULES = Path(__file__).parents[1] / "planning" / "advice" / "rules.json"
USE_CASES: dict[str, str] = {name: case["for"] for name, case in json.loads(_RULES.read_text(encoding="utf-8"))["use_cases"].items()}
