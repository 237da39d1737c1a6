"""Arguments that several commands share."""

from __future__ import annotations

import argparse

import torch

from dilated_attention.bench.arguments import size

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

__all__ = ["DTYPES", "add_json", "size"]


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable")
