"""Names that the parser offers, without importing what they stand for. tests/cli/test_start.py compares them with the originals."""

from __future__ import annotations

import json
from pathlib import Path

# factory.EXAMPLES
MACHINES = ("ada", "ampere", "blackwell", "blackwell-consumer", "cpu", "hopper", "mps", "pascal", "rocm", "turing", "volta")
# backends.PRECISIONS
PRECISIONS = ("native", "fp8")
# those of bench.workloads.problem.BOUNDS, as torch calls them
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
# bench.suites.SUITES, with what each says about itself
SUITES = {
    "speed": "time, TFLOP/s and memory of forward, backward and both: every kernel and module by length, named cases, competitors",
    "accuracy": "errors against float64 by dtype, backend and length",
    "memory": "peak memory of attention by length, predicted and measured",
    "extreme": "the longest sequence that fits: tokens, bytes per token, throughput, by doubling until memory runs out",
    "scaling": "attention over processes (torchrun): time, efficiency, memory, traffic; torch's context_parallel, ring-flash-attention",
    "train-infer": "models: tokens/s of generating by kind of attention; training steps of slide encoders; equality with TorchScale",
    "quality": "loss of a pretrained model over dense, by pattern, density and position; hidden keys found; time; before and after tuning",
}
