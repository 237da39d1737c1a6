"""FASTA files as tokens of bases."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import torch

from dilated_attention.models.text.vocabulary import BASES


def read_fasta(path: str | Path) -> list[tuple[str, torch.Tensor]]:
    """Returns (name, bases) of every record, in the order of the file; bases are tokens of ``BASES``, int64 (N,).

    Args:
        path: a FASTA file, plain or compressed with gzip. Letters other than A, C, G and T, of either case, are N.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it holds no record, or is compressed and damaged.
    """
    raw = Path(path).read_bytes()
    try:
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be decompressed ({error}); it is damaged or cut off: copy or download it again") from error
    records = [record.partition(b"\n") for record in text.split(b">")[1:]]
    if not records:
        raise ValueError(f"{path} holds no FASTA record; expected lines of bases under a line that begins with >")
    return [(head.decode(errors="replace").strip(), BASES.encode(body)) for head, _, body in records]
