"""Models that read k-mers: codes, the embedding, saving, processes that share a sequence, and generation from the last code."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.models import (
    BASES,
    KmerEmbedding,
    KVCache,
    LongNetConfig,
    LongNetLM,
    Sampling,
    generate_stream,
    kmers,
    prefill,
)
from dilated_attention.models.text import check_ids

SHAPE: dict[str, Any] = {"vocab_size": 5, "embed_dim": 32, "num_layers": 2, "num_heads": 4, "tie_embeddings": False}
SHAPE |= {"segment_lengths": (8, 24), "dilation_rates": (1, 3), "kmer": 4}


def model(**changes: Any) -> LongNetLM:
    """All tables with values: those of neighbours begin at 0."""
    torch.manual_seed(1)
    lm = LongNetLM(LongNetConfig(**{**SHAPE, **changes}))
    if isinstance(lm.embedding, KmerEmbedding):
        for table in lm.embedding.tables:
            torch.nn.init.normal_(table.weight, std=0.3)  # type: ignore[arg-type]
    return lm.eval()


def bases(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n", [1, 2, 50])
def test_codes_are_digits_of_the_nearest_and_the_embedding_a_sum_over_their_suffixes(n: int) -> None:
    generator = random.Random(0)
    symbols = torch.tensor([[generator.randrange(5) for _ in range(n)] for _ in range(2)])
    for both_sides, offsets in ((False, [0, -1, -2, -3, -4, -5]), (True, [0, -1, 1, -2, 2, -3])):
        for k in (1, 2, 6):
            codes = kmers(symbols, k, both_sides)
            for row, expected in zip(codes.tolist(), symbols.tolist(), strict=True):
                known = dict(enumerate(expected))
                assert row == [sum(known.get(t + o, 4) * 5**j for j, o in enumerate(offsets[:k])) for t in range(n)]
            assert torch.equal(kmers(symbols[0], k, both_sides), codes[0])
    lm = model(kmer=3)
    codes = kmers(symbols, 3, False)
    one, two, three = (table.weight for table in lm.embedding.tables)  # type: ignore[union-attr]
    torch.testing.assert_close(lm.embedding(codes), one[codes % 5] + two[codes % 25] + three[codes])  # type: ignore[operator, index]
    # what neighbours add begins at nothing
    assert [bool(table.weight.any()) for table in LongNetLM(lm.config).embedding.tables] == [True, False, False]  # type: ignore[union-attr]
    with torch.autocast("cpu", torch.bfloat16):
        assert lm.embedding(codes).dtype is torch.bfloat16


def config_of(**changes: Any) -> LongNetConfig:
    return LongNetConfig(**{**SHAPE, **changes})


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: kmers(torch.tensor([0, 5]), 3, False), r"symbols reach from 0 to 5; .* number of bases − 1 = 4: use BASES.encode"),
        (lambda: kmers("ACGT", 3, False), "symbols is a str"),  # type: ignore[arg-type]
        (lambda: config_of(vocab_size=256), "kmer is 4 and vocab_size is 256; .* use vocab_size=5"),
        (lambda: config_of(tie_embeddings=True), "kmer is 4 and tie_embeddings is True; .* use tie_embeddings=False"),
        (lambda: config_of(kmer=14), "kmer is 14"),
        (lambda: model()(torch.tensor([[625, 3]])), r"3 to 625; expected 0 to 5\^4 − 1 = 624: tokens of this model .* model\.encode"),
        (
            lambda: model()(torch.tensor([[624]]), targets=torch.tensor([[5]])),
            "targets reach from 5 to 5; expected 0 to vocab_size − 1 = 4",
        ),
        (lambda: model(kmer=1).encode(torch.tensor([0, 5])), "text reach from 0 to 5; expected 0 to vocab_size − 1 = 4"),
        (lambda: model(kmer=1, vocab_size=300).encode("x"), r"vocab_size is 300; expected 256 \(bytes\) or 5"),
        *((lambda x=x: model().encode(x), r"text (is a|has)") for x in (["ACGT"], torch.zeros(1, 1, 3).long())),
    ],
)
def test_what_is_no_base_code_or_setting_is_refused(call: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        call()


@pytest.mark.parametrize("is_causal", [True, False])
def test_bases_in_place_of_codes_are_refused(is_causal: bool) -> None:
    """Codes of neighbours name the base before them, so that no stretch of a genome has only codes of single bases, but for a run of A."""
    lm = model(is_causal=is_causal)
    symbols = BASES.encode("GATTACA")[None]
    calls = [lm, lm.hidden, lambda tokens: lm(tokens, targets=symbols[:, :1].expand_as(tokens))]
    calls += [lambda tokens: prefill(lm, tokens, KVCache(lm.config, 1, 9)), lambda tokens: lm.generate(tokens, 1)] if is_causal else []
    with torch.no_grad():
        for call in calls:
            for wrong in (symbols, symbols[:, :2], BASES.encode("NNNN")[None], BASES.encode("AAAAT A")[None]):
                with pytest.raises(ValueError, match=r"are bases, 0 to 4; expected codes .* use model\.encode"):
                    call(wrong)
        # in a part of a sequence, neighbours may lie apart
        check_ids("tokens", symbols, lm.embedding, is_shard=True)
        # stretches of genomes with runs of A, whose codes are the smallest
        for text in ("AAAAAAAAA", "CAAAAAATA", "NAAAAAACG", "TTTTAAAAA"):
            codes = kmers(BASES.encode(text), 4, not is_causal)[None]
            for begin in range(9):
                for end in range(begin + 1, 10):
                    lm(codes[:, begin:end])


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_model_encodes_what_it_reads_and_is_saved_with_its_embedding(is_causal: bool, tmp_path: Path) -> None:
    lm = model(is_causal=is_causal)
    codes = kmers(BASES.encode("gattNaca"), 4, not is_causal)[None]
    for text in ("gatt naca\n", b"GATTNACA", BASES.encode("GATTNACA"), BASES.encode("GATTNACA")[None].int()):
        assert torch.equal(lm.encode(text), codes)
    assert lm.encode(bases(3, 9)).shape == (3, 9)
    assert torch.equal(model(kmer=1).encode("GATN"), torch.tensor([[2, 0, 3, 4]]))
    assert bytes(model(kmer=1, vocab_size=256).encode("naïve")[0].tolist()).decode() == "naïve"
    lm.save_pretrained(tmp_path)
    again = LongNetLM.from_pretrained(tmp_path)
    codes = kmers(bases(2, 60), 4, both_sides=not is_causal)
    with torch.no_grad():
        assert torch.equal(again(codes), lm(codes)) and lm(codes).shape == (2, 60, 5)
    # 32 · (5 + 25 + 125 + 625) numbers of embeddings
    assert f"({lm.num_parameters - 24_960:,} without embeddings)" in str(again.summary())


def test_generation_is_that_of_full_forwards_as_a_stream_and_up_to_a_base() -> None:
    lm, symbols = model().train(), bases(2, 20)
    starts = [kmers(symbols[0], 4, False), kmers(symbols[1, :7], 4, False)]
    for row, start in zip(lm.generate(starts, 30, temperature=0), starts, strict=True):
        # the codes that were added are those of the bases, the likeliest ones
        assert torch.equal(row, kmers(row % 5, 4, False)) and torch.equal(row[: len(start)], start) and len(set((row % 5).tolist())) > 1
        with torch.no_grad():
            assert torch.equal(row[len(start) :] % 5, lm(row[None])[0, len(start) - 1 : -1].argmax(-1))
    prompt = kmers(bases(2, 9), 4, False)
    for stop in (None, 2):
        seeds = [torch.Generator().manual_seed(3) for _ in range(2)]
        steps = list(generate_stream(lm, prompt, 12, sampling=Sampling(top_k=3, generator=seeds[0]), stop_token=stop))
        made = lm.generate(prompt, 12, top_k=3, stop_token=stop, generator=seeds[1])
        assert torch.equal(torch.cat([prompt, *steps], 1), made)
    # a row of a batch that has ended goes on with the base that ends it
    is_over = (made[:, 9:] % 5 == 2).cummax(1).values
    assert bool((made[:, 9:][is_over] % 5 == 2).all())
    # a stream may be left early
    stream = generate_stream(lm, prompt, 10**6)
    assert next(stream).shape == (2, 1) and not lm.training
    stream.close()  # type: ignore[attr-defined]
    assert lm.training and lm.decoder.training
    assert list(generate_stream(lm, torch.tensor([[0]]), 0)) == []
