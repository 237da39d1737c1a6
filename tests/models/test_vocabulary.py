"""Bytes and bases: text to tokens and back, which one a configuration means, and FASTA files."""

from __future__ import annotations

import gzip
import warnings
from pathlib import Path

import pytest
import torch

from dilated_attention.models import BASES, BYTES, LongNetConfig, other_strand, read_fasta, vocabulary_of


def test_bytes_are_their_own_tokens() -> None:
    text = "naïve → 日本\r\n\t"
    assert BYTES.encode(text).tolist() == list(text.encode()) and BYTES.encode(text).dtype is torch.int64
    assert BYTES.decode(BYTES.encode(text)) == text
    everything = bytes(range(256))
    assert BYTES.decode_bytes(BYTES.encode(everything)) == everything and len(BYTES) == 256
    assert BYTES.decode(torch.tensor([72, 255, 105])) == "H\ufffdi"
    assert BYTES.encode("").shape == (0,) and BYTES.decode(BYTES.encode("")) == ""


def test_bases_are_letters_of_either_case() -> None:
    assert BASES.encode("ACGTN").tolist() == [0, 1, 2, 3, 4]
    assert BASES.encode(b"acg tn\r\nUR-").tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    assert BASES.decode(torch.tensor([3, 0, 2, 4])) == "TAGN" and len(BASES) == 5
    with pytest.raises(ValueError, match=r"tokens reach from 3 to 7; expected 0 to .* = 4: .* bases of k-mer codes are codes % 5"):
        BASES.decode(torch.tensor([3, 7]))


PROTEIN = b"MKVLITGAGSGIGLELARQFAEEGAHVVLAGRDEAKLAEVAQSLGAQAVPCDVTDPAAVQALVDAAVARFGRLDVLVNNAGI"
GENOME = b"ACGTNNNNNNNNNNNNNNNNNNNNacgtacgtacgtnnnnRYacgtacgtacgtacgtACGT"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PROTEIN, "51 of 82 letters (62%) in {} are none of A, C, G, T and N, most often V, L, E, and are read as N; expected DNA"),
        (b"ACGU" * 9, "9 of 36 letters (25%) in {}"),
        (GENOME, ""),
    ],
)
def test_a_text_of_other_letters_than_bases_is_told(text: bytes, said: str, tmp_path: Path) -> None:
    """Of which N is one, and lower case the same; a genome has a few others."""
    path = tmp_path / "x.fa"
    path.write_bytes(b">LVLVLVLVLV an id\n" + text[:30] + b"\n>other\r\n" + text[30:] + b"\n")
    for what, call in (("the text", lambda: BASES.encode(text)), (str(path), lambda: read_fasta(path))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
            BYTES.encode(text)
        assert [str(warning.message)[: len(said.format(what))] for warning in caught] == ([said.format(what)] if said else [])


def test_the_other_strand_is_the_reverse_complement() -> None:
    assert BASES.decode(other_strand(BASES.encode("AACNT"))) == "ANGTT"
    both = torch.stack([BASES.encode("AAC"), BASES.encode("GGN")])
    assert [BASES.decode(row) for row in other_strand(both)] == ["GTT", "NCC"]


def test_the_size_says_which_vocabulary_is_meant() -> None:
    def config(vocab_size: int | None) -> LongNetConfig:
        return LongNetConfig(vocab_size=vocab_size, embed_dim=8, num_layers=1, num_heads=1, attention="dense")

    assert vocabulary_of(config(256)) is BYTES and vocabulary_of(config(5)) is BASES
    for other in (50257, 255, None):
        with pytest.raises(ValueError, match=f"vocab_size is {other}; expected 256 .* or 5 .* use Python, LongNetLM.from_pretrained"):
            vocabulary_of(config(other))


def test_every_record_of_a_fasta_file_is_read_plain_or_packed(tmp_path: Path) -> None:
    text = b"; a remark\n>short plasmid c.7A>T\nACGT\n>long one\r\nACgtN\r\nrYAC\r\n\nGGT\n>nothing\n"
    (tmp_path / "plain.fa").write_bytes(text)
    (tmp_path / "packed.fa.gz").write_bytes(gzip.compress(text))
    for file in ("plain.fa", "packed.fa.gz"):
        records = read_fasta(tmp_path / file)
        assert [(name, BASES.decode(bases)) for name, bases in records] == [
            ("short plasmid c.7A>T", "ACGT"),
            ("long one", "ACGTNNNACGGT"),
            ("nothing", ""),
        ]
    (tmp_path / "other").write_bytes(b"ACGT")
    with pytest.raises(ValueError, match="holds no FASTA record"):
        read_fasta(tmp_path / "other")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(text * 100)[:-20])
    with pytest.raises(ValueError, match=r"cut\.gz cannot be decompressed"):
        read_fasta(tmp_path / "cut.gz")
    with pytest.raises(FileNotFoundError):
        read_fasta(tmp_path / "none")
