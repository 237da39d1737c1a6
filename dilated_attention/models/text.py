"""What tokens stand for: vocabularies of bytes and of DNA bases, FASTA files, k-mers of bases and their embedding.

Here are also the checks of token ids and targets: always of type and shape, and of values if the host can read them without waiting.
"""

from __future__ import annotations

import gzip
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dilated_attention.models.config import MAX_KMER, NUM_BASES, LongNetConfig, as_config
from dilated_attention.pattern.checks import as_int, shown
from dilated_attention.validation import check_bool, not_a_tensor

# the token of an unknown base: FASTA's N, which is also the mask token of masked models
UNKNOWN = NUM_BASES - 1
_INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_WHITESPACE = b" \t\n\r\v\f"


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary in which every token is one byte of text.

    Args:
        unit: what a token is called, ``"byte"`` or ``"base"``.
        letters: the byte of each token: token i stands for ``letters[i]``.
    """

    unit: str
    letters: bytes

    def __len__(self) -> int:
        return len(self.letters)

    def encode(self, text: str | bytes) -> torch.Tensor:
        """Returns the tokens of a text, int64 (N,). A ``str`` is encoded in UTF-8.

        Bases may be in upper or lower case; whitespace is left out, and every other letter becomes N. Warns if more than a tenth of the
        letters are such others.
        """
        if not isinstance(text, (str, bytes, bytearray, memoryview)):
            raise TypeError(f"text is {shown(text)} ({type(text).__name__}); expected a str or bytes")
        raw = text.encode() if isinstance(text, str) else bytes(text)
        if self.unit == "base":
            _warn_of_other_letters([raw], "the text")
        return self._encode(raw)

    def _encode(self, raw: bytes) -> torch.Tensor:
        if self.unit == "base":
            raw = raw.upper().translate(None, _WHITESPACE)
        # −1 for a letter that is none becomes the last token, N
        raw = raw.translate(bytes(self.letters.find(x) % len(self) for x in range(256)))
        # torch refuses an empty buffer
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long() if raw else torch.empty(0, dtype=torch.int64)

    def decode_bytes(self, tokens: torch.Tensor) -> bytes:
        """Returns the bytes of tokens (N,).

        Raises:
            ValueError, TypeError: if tokens are not of this vocabulary. A k-mer model has codes for tokens; their bases are ``codes % 5``.
        """
        check_integers("tokens", tokens)
        limit = f"the number of {self.unit}s − 1"
        check_range("tokens", tokens, len(self), waits=True, limit=limit, way_out="the bases of k-mer codes are codes % 5")
        return bytes(self.letters[value] for value in tokens.flatten().tolist())

    def decode(self, tokens: torch.Tensor) -> str:
        """Returns the text of tokens (N,); bytes that are not UTF-8 become U+FFFD. Raises like ``decode_bytes``."""
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")


BYTES = Vocabulary("byte", bytes(range(256)))
BASES = Vocabulary("base", b"ACGTN")


def _warn_of_other_letters(parts: list[bytes], what: str) -> None:
    """Warns if more than a tenth of the letters are not in BASES, as in a protein; a genome may have a few others. ``what``: their source,
    for the message."""
    letters = sum(len(part.translate(None, _WHITESPACE)) for part in parts)
    others = Counter(b"".join(part.upper().translate(None, _WHITESPACE + BASES.letters) for part in parts))
    count = others.total()
    if 10 * count <= letters:
        return
    warnings.warn(
        f"{count:,} of {letters:,} letters ({count / letters:.0%}) in {what} are none of A, C, G, T and N, most often "
        f"{', '.join(chr(letter) for letter, _ in others.most_common(3))}, and are read as N; expected DNA: no protein, and T where RNA "
        "has U",
        stacklevel=3,
    )


def vocabulary_of(config: LongNetConfig) -> Vocabulary:
    """Returns the vocabulary of a model, by its size: ``BYTES`` for ``vocab_size=256``, ``BASES`` for 5.

    Raises:
        ValueError: for any other size, because a checkpoint does not say what its tokens stand for.
    """
    for vocabulary in (BYTES, BASES):
        if as_config("config", config).vocab_size == len(vocabulary):
            return vocabulary
    raise ValueError(
        f"vocab_size is {config.vocab_size}; expected 256 (bytes) or 5 (bases A, C, G, T, N), whose text this library knows: for other "
        "tokens encode the text with your tokenizer and use Python, LongNetLM.from_pretrained(folder).generate(tokens, …)"
    )


def other_strand(symbols: torch.Tensor) -> torch.Tensor:
    """Returns the reverse complement of bases (…, N), as a gene on the other strand has them: A↔T, C↔G, N stays, in reverse order.

    Raises:
        ValueError, TypeError: if symbols are not integers, or on the CPU not 0 to 4.
    """
    _check_bases(symbols, _INTEGER_DTYPES)
    return torch.where(symbols == UNKNOWN, UNKNOWN, 3 - symbols).flip(-1)


def check_integers(name: str, x: Any, dtypes: tuple[torch.dtype, ...] = _INTEGER_DTYPES, way_out: str = "convert with .long()") -> None:
    """Raises TypeError unless x is a dense tensor of one of the dtypes. ``way_out``: a part of the message."""
    expected = f"an int64 or int32 tensor of integers (…, N): {way_out}"
    if not isinstance(x, torch.Tensor):
        raise not_a_tensor(name, x, expected)
    if x.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {x.dtype}; expected {expected}")
    if x.is_nested or x.layout is not torch.strided:
        raise TypeError(f"{name} is nested or sparse; expected a dense tensor: pad it, or convert with .to_dense()")


def _check_bases(symbols: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raises TypeError unless these are integers, and ValueError if their values can be read and are not 0 to 4."""
    way_out = "use BASES.encode(text)"
    check_integers("symbols", symbols, dtypes, way_out)
    if not symbols.ndim:
        raise ValueError(f"symbols is one number; expected a tensor of bases (…, N): {way_out}")
    check_range("symbols", symbols, NUM_BASES, limit="the number of bases − 1", way_out=way_out)


def read_fasta(path: str | Path) -> list[tuple[str, torch.Tensor]]:
    """Returns (name, bases) of every record, in the order of the file; bases are tokens of ``BASES``, int64 (N,).

    Args:
        path: a FASTA file, plain or compressed with gzip. Letters other than A, C, G and T, of either case, are N. Warns like ``encode``.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it holds no record, or letters before the first, or is compressed and damaged.
    """
    raw = Path(path).read_bytes()
    try:
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be decompressed ({error}); it is damaged or cut off: copy or download it again") from error
    # a record begins at a > after a line break, since names may hold > too; editors of Windows write a mark of UTF-8 before the first
    before, *rest = (b"\n" + text.removeprefix(b"\xef\xbb\xbf")).split(b"\n>")
    if not rest:
        raise ValueError(f"{path} holds no FASTA record; expected lines of bases under a line that begins with >")
    # of old, comments begin with ;
    if any(line.strip() and not line.startswith(b";") for line in before.split(b"\n")):
        raise ValueError(
            f"{path} has lines before the first that begins with >; expected none: name the record they belong to, or delete them"
        )
    records = [record.partition(b"\n") for record in rest]
    _warn_of_other_letters([body for _, _, body in records], str(path))
    return [(head.decode(errors="replace").strip(), BASES._encode(body)) for head, _, body in records]


def kmers(symbols: torch.Tensor, k: int, both_sides: bool) -> torch.Tensor:
    """Returns codes: at each position t a number in base 5, whose lowest digit is the base there and whose k − 1 others are its neighbours.

    code[t] = Σ_j 5^j · symbols[t + o_j], j = 0 … k − 1, o_0 = 0. Since a code holds its neighbours, codes can be sharded over processes
    like any tokens; ``codes % 5`` are the bases again.

    Args:
        symbols: (…, N) integers: 0 to 4 for A, C, G, T, N.
        k: digits of a code; 1 to 13.
        both_sides: True for a model with ``is_causal=False``: neighbours o = −1, 1, −2, 2, … on both sides; False: o = −1, −2, …

    Returns:
        (…, N) in the dtype of ``symbols``. Neighbours beyond the ends count as the base N.

    Raises:
        ValueError, TypeError: if symbols are not integers, or on the CPU not 0 to 4; if k is not 1 to 13.
    """
    k = as_int("k", k, minimum=1, maximum=MAX_KMER)
    check_bool("both_sides", both_sides)
    _check_bases(symbols, _INTEGER_DTYPES[:2])
    n = symbols.shape[-1]
    padded = F.pad(symbols, (k - 1, k - 1), value=UNKNOWN)
    codes = symbols.clone()
    for j in range(1, k):
        offset = (j + 1) // 2 * (-1 if j % 2 else 1) if both_sides else -j
        codes += padded[..., k - 1 + offset :][..., :n] * NUM_BASES**j
    return codes


class KmerEmbedding(nn.Module):
    """Embeds the codes of ``kmers``, (B, N) → (B, N, E): Σ_j table_j[code mod 5^j], j = 1 … k.

    Table 1 has a vector for each base, table 2 for each base with its nearest neighbour, … table k for all k bases. The first table starts
    at std E^-1/2, the others at 0.
    """

    def __init__(self, k: int, embed_dim: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.k, self.num_embeddings = k, NUM_BASES**k
        first, *others = (nn.Embedding(NUM_BASES**j, embed_dim, device=device, dtype=dtype) for j in range(1, k + 1))
        nn.init.normal_(first.weight, std=embed_dim**-0.5)
        for table in others:
            # 0 at first, so that a code that is seldom seen is embedded by its shorter, frequent ones
            nn.init.zeros_(table.weight)
        self.tables = nn.ModuleList((first, *others))
        # until ``check_ids`` has read codes for this embedding
        self.is_new = True

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        embedded = sum(table(codes % NUM_BASES**j) for j, table in enumerate(self.tables, 1))
        assert isinstance(embedded, torch.Tensor)
        # autocast does not cast embeddings, and the residual stream has the dtype of what enters it
        if torch.is_autocast_enabled(codes.device.type):
            return embedded.to(torch.get_autocast_dtype(codes.device.type))
        return embedded

    def extra_repr(self) -> str:
        return f"k={self.k}"


def check_tokens(name: str, tokens: Any) -> None:
    """Raises TypeError or ValueError unless tokens are (batch, sequence) of int64 or int32."""
    check_integers(name, tokens, _INTEGER_DTYPES[:2])
    if tokens.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(tokens.shape)}; expected (batch, sequence): for one sequence use {name}[None]")


def check_ids(name: str, tokens: torch.Tensor, embedding: nn.Module, *, waits: bool = False, is_shard: bool = False) -> None:
    """Raises ValueError for tokens that a model's embedding does not have, see ``check_range``, and for bases in place of k-mer codes.

    An embedding that is neither torch's nor ``KmerEmbedding`` is not checked: it may accept any number. ``is_shard``: tokens are a shard
    of a sequence, whose neighbours may lie apart, so that bases cannot be told from codes.
    """
    if isinstance(embedding, KmerEmbedding):
        # bases are valid codes and would go unnoticed, so the host waits for the GPU to read the first ones of an embedding
        if not tokens.numel() or not has_values(tokens, waits=waits or embedding.is_new):
            return
        embedding.is_new, waits = False, True
        way_out = f"tokens of this model are codes of {embedding.k} bases: use model.encode(text or bases)"
        check_range(name, tokens, embedding.num_embeddings, waits=waits, limit=f"5^{embedding.k} − 1", way_out=way_out)
        # a code is its base + 5 · the base before it + …, and A is 0. If all are below 5, every base before another is A, so all codes but
        # the last must be 0; else these are bases
        if not is_shard and bool((tokens < NUM_BASES).all()) and bool(tokens[..., :-1].any()):
            raise ValueError(f"{name} are bases, 0 to 4; expected codes below {embedding.num_embeddings}: {way_out}")
    elif isinstance(embedding, nn.Embedding):
        check_range(name, tokens, embedding.num_embeddings, waits=waits)


def has_values(tensor: torch.Tensor, *, waits: bool = False) -> bool:
    """Whether the host can read a tensor's values now: on the CPU, or, if ``waits``, after waiting for the device. There are no values to
    read while code is compiled or mapped, in fake tensors, and while a CUDA graph is captured."""
    if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor or torch._C._are_functorch_transforms_active():
        return False
    if tensor.device.type == "cpu":
        return True
    return waits and tensor.device.type != "meta" and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def check_range(
    name: str,
    tokens: torch.Tensor,
    vocab_size: int | None,
    *,
    ignore_index: int | None = None,
    waits: bool = False,
    limit: str = "vocab_size − 1",
    way_out: str = "check the tokenizer, or make the model with a larger vocab_size",
) -> None:
    """Raises ValueError if a token is neither in 0 … vocab_size − 1 nor ``ignore_index``. Checks nothing if ``vocab_size`` is None, or
    where ``has_values`` is False. ``limit`` and ``way_out`` are parts of the message."""
    if vocab_size is None or not has_values(tokens, waits=waits):
        return
    checked = tokens if ignore_index is None else tokens[tokens != ignore_index]
    if not checked.numel():
        return
    low, high = (int(x) for x in torch.aminmax(checked))
    if low >= 0 and high < vocab_size:
        return
    but = "" if ignore_index is None else f", or {ignore_index} where a position does not count".replace("-", "−")
    raise ValueError(f"{name} reach from {low} to {high}; expected 0 to {limit} = {vocab_size - 1}{but}: {way_out}")
