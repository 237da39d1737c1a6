"""The two vocabularies of this library, bytes and bases: text and FASTA files to tokens, and back."""

from __future__ import annotations

import functools
import gzip
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from dilated_attention.models.config import NUM_BASES, LongNetConfig

# the base that is not known: FASTA's N, which is also the mask of masked models
UNKNOWN = NUM_BASES - 1
_WHITESPACE = b" \t\n\r\v\f"


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary in which every token is one character of eight bits.

    Args:
        unit: what a token is called, ``"byte"`` or ``"base"``.
        letters: the character of each token, by its number.
    """

    unit: str
    letters: bytes

    def __len__(self) -> int:
        return len(self.letters)

    def encode(self, text: str | bytes) -> torch.Tensor:
        """Returns the tokens of a text, int64 (N,). A ``str`` is encoded in UTF-8.

        Bases are read in upper and lower case; whitespace is left out, and every other letter is N. Warns if more than a tenth are others.
        """
        raw = text.encode() if isinstance(text, str) else bytes(text)
        if self.unit == "base":
            _warn_of_letters([raw], "the text")
        return self._encode(raw)

    def _encode(self, raw: bytes) -> torch.Tensor:
        raw = raw.translate(_tokens_of(self.letters), _WHITESPACE if self.unit == "base" else b"")
        # torch refuses an empty buffer
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long() if raw else torch.empty(0, dtype=torch.int64)

    def decode_bytes(self, tokens: torch.Tensor) -> bytes:
        """Returns the characters of tokens (N,).

        Raises:
            ValueError: if tokens are not of this vocabulary. Those of a k-mer model are codes, whose bases are ``codes % 5``.
        """
        values = tokens.flatten().tolist()
        if values and not (min(values) >= 0 and max(values) < len(self)):
            raise ValueError(
                f"tokens reach from {min(values)} to {max(values)}; expected 0 to {len(self) - 1}, the {self.unit}s of this vocabulary: "
                "the bases of k-mer codes are codes % 5"
            )
        return bytes(self.letters[value] for value in values)

    def decode(self, tokens: torch.Tensor) -> str:
        """Returns the text of tokens (N,); bytes that are not UTF-8 become U+FFFD. Raises ValueError like ``decode_bytes``."""
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")


@functools.cache
def _tokens_of(letters: bytes) -> bytes:
    """The token of each of the 256 characters: a letter's own, else that of the letter in upper case, else the last one."""
    numbers = {letter: number for number, letter in enumerate(letters)}
    return bytes(numbers.get(x, numbers.get(bytes([x]).upper()[0], len(letters) - 1)) for x in range(256))


BYTES = Vocabulary("byte", bytes(range(256)))
BASES = Vocabulary("base", b"ACGTN")


def _warn_of_letters(parts: list[bytes], what: str) -> None:
    """Warns if more than a tenth of the letters are none of BASES, as those of a protein are; a genome has a few of other codes."""
    letters = sum(len(part.translate(None, _WHITESPACE)) for part in parts)
    others = [part.translate(None, _WHITESPACE + BASES.letters + BASES.letters.lower()).upper() for part in parts]
    count = sum(map(len, others))
    if 10 * count <= letters:
        return
    often = sum((Counter(part) for part in others), Counter[int]()).most_common(3)
    warnings.warn(
        f"{count:,} of {letters:,} letters ({count / letters:.0%}) in {what} are none of A, C, G, T and N, most often "
        f"{', '.join(chr(letter) for letter, _ in often)}, and are read as N; expected DNA: no protein, and T where RNA has U",
        stacklevel=3,
    )


def vocabulary_of(config: LongNetConfig) -> Vocabulary:
    """Returns the vocabulary that a configuration means: ``BYTES`` for ``vocab_size=256``, ``BASES`` for 5.

    Raises:
        ValueError: for any other size, because a checkpoint does not say what its tokens stand for.
    """
    for vocabulary in (BYTES, BASES):
        if config.vocab_size == len(vocabulary):
            return vocabulary
    raise ValueError(
        f"vocab_size is {config.vocab_size}; expected 256 (bytes) or 5 (bases A, C, G, T, N), whose text this library knows: for other "
        "tokens encode the text with your tokenizer and use Python, LongNetLM.from_pretrained(folder).generate(tokens, …)"
    )


def other_strand(symbols: torch.Tensor) -> torch.Tensor:
    """Returns the reverse complement of bases (…, N), which is what a gene on the other strand reads: A↔T, C↔G, N stays, from the end."""
    return torch.where(symbols == UNKNOWN, UNKNOWN, 3 - symbols).flip(-1)


def read_fasta(path: str | Path) -> list[tuple[str, torch.Tensor]]:
    """Returns (name, bases) of every record, in the order of the file; bases are tokens of ``BASES``, int64 (N,).

    Args:
        path: a FASTA file, plain or compressed with gzip. Letters other than A, C, G and T, of either case, are N. Warns like ``encode``.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it holds no record, or is compressed and damaged.
    """
    raw = Path(path).read_bytes()
    try:
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be decompressed ({error}); it is damaged or cut off: copy or download it again") from error
    # the name may hold > as well
    records = [record.partition(b"\n") for record in (b"\n" + text).split(b"\n>")[1:]]
    if not records:
        raise ValueError(f"{path} holds no FASTA record; expected lines of bases under a line that begins with >")
    _warn_of_letters([body for _, _, body in records], str(path))
    return [(head.decode(errors="replace").strip(), BASES._encode(body)) for head, _, body in records]
