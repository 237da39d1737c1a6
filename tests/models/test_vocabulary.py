"""Bytes and bases: text to tokens and back, which one a configuration means, and FASTA files."""

import gzip
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.models import BASES, BYTES, LongNetConfig, other_strand, read_fasta, vocabulary_of


def test_bytes_and_bases_are_encoded_and_decoded() -> None:
    text, everything = "naïve → 日本\r\n\t", bytes(range(256))
    assert BYTES.encode(text).tolist() == list(text.encode()) and BYTES.encode(text).dtype is torch.int64
    assert BYTES.decode(BYTES.encode(text)) == text and len(BYTES) == 256
    assert BYTES.decode_bytes(BYTES.encode(everything)) == everything
    assert BYTES.decode(torch.tensor([72, 255, 105])) == "H\ufffdi"
    assert BYTES.encode("").shape == (0,) and BYTES.decode(BYTES.encode("")) == ""
    # letters of either case
    assert BASES.encode(b"acg tn\r\nUR-NACGT").tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 4, 0, 1, 2, 3]
    assert BASES.decode(torch.tensor([3, 0, 2, 4])) == "TAGN" and len(BASES) == 5
    with pytest.raises(ValueError, match=r"tokens reach from 3 to 7; expected 0 to .* = 4: .* bases of k-mer codes are codes % 5"):
        BASES.decode(torch.tensor([3, 7]))
    # the other strand is the reverse complement
    both = torch.stack([BASES.encode("AAC"), BASES.encode("GGN")])
    assert [BASES.decode(row) for row in other_strand(both)] == ["GTT", "NCC"]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: BYTES.encode(5), TypeError, "text is 5 .*expected a str or bytes"),  # type: ignore[arg-type]
        (lambda: BYTES.decode(torch.zeros(2)), TypeError, "tokens has dtype torch.float32; expected an int64"),
        (lambda: BYTES.decode([1]), TypeError, "tokens is a list"),  # type: ignore[arg-type]
        (lambda: vocabulary_of("bytes"), TypeError, "config is 'bytes' .*expected a LongNetConfig"),  # type: ignore[arg-type]
        (lambda: other_strand(torch.tensor([0, 1, 2, 3, 4, 9])), ValueError, "symbols reach from 0 to 9; expected 0 to"),
        (lambda: other_strand(torch.zeros(3)), TypeError, "symbols has dtype torch.float32"),
    ],
)
def test_what_is_no_text_and_no_base_is_refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
    assert BASES.decode(other_strand(BASES.encode("AAC").to(torch.uint8))) == "GTT"


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


def test_the_size_says_which_vocabulary_is_meant() -> None:
    sizes: dict[int | None, object] = {256: BYTES, 5: BASES, 50257: None, 255: None, None: None}
    for size, vocabulary in sizes.items():
        config = LongNetConfig(vocab_size=size, embed_dim=8, num_layers=1, num_heads=1, attention="dense")
        if vocabulary is not None:
            assert vocabulary_of(config) is vocabulary
            continue
        with pytest.raises(ValueError, match=f"vocab_size is {size}; expected 256 .* or 5 .* use Python, LongNetLM.from_pretrained"):
            vocabulary_of(config)


def test_every_record_of_a_fasta_file_is_read_plain_or_packed(tmp_path: Path) -> None:
    text = b"; a remark\n>short plasmid c.7A>T\nACGT\n>long one\r\nACgtN\r\nrYAC\r\n\nGGT\n>nothing\n"
    files = {"plain.fa": text, "packed.fa.gz": gzip.compress(text), "other": b"ACGT", "cut.gz": gzip.compress(text * 100)[:-20]}
    # the mark is what editors of Windows write before a text
    files |= {"first.fa": b"ACGT\n>x\nACGT\n", "marked.fa": b"\xef\xbb\xbf" + text}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name in ("plain.fa", "packed.fa.gz", "marked.fa"):
        records = [(head, BASES.decode(bases)) for head, bases in read_fasta(tmp_path / name)]
        assert records == [("short plasmid c.7A>T", "ACGT"), ("long one", "ACGTNNNACGGT"), ("nothing", "")]
    for name, text_of in (
        ("other", "holds no FASTA record"),
        ("cut.gz", r"cut\.gz cannot be decompressed"),
        ("first.fa", "lines before the first"),
    ):
        with pytest.raises(ValueError, match=text_of):
            read_fasta(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_fasta(tmp_path / "none")
