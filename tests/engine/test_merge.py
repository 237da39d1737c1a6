"""Parts merged into the whole: kernels, results of a call in chunks, and what of them a forward saves. The law: test_oracle.py."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention import DilatedPattern, dilated_attention
from dilated_attention.backends.merge import merge_, merge_onto
from dilated_attention.engine.branches import places
from dilated_attention.engine.branches.places import Layout, layout_of
from dilated_attention.engine.branches.problems import whole_shape
from dilated_attention.testing.cases import random_branches
from tests.helpers import fused

onto_triton = pytest.importorskip("dilated_attention.backends.merge_triton")


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 37, 3, 64), (3, 5, 2, 59), (2, 3, 1, 256), (5, 4099, 12, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kernel", [merge_onto, onto_triton.merge_onto], ids=["torch", "triton"])
def test_a_part_merges_onto_views_like_float64_and_rounds_once(
    shape: tuple[int, int, int, int], dtype: torch.dtype, kernel: Callable[..., None], device: str
) -> None:
    """Strided rows of larger tensors, with empty rows on one side, the other, and both, and scores of which float32 holds few digits; what
    lies between the rows is left alone."""
    P, L, G, D = shape
    if device == "cpu" and L > 4000:
        pytest.skip("long for the interpreter")
    generator = torch.Generator().manual_seed(L * 7 + D)
    whole = torch.randn((P, 2 * L, G + 1, D), generator=generator).to(dtype).to(device)
    out, part = whole[:, ::2, 1:], torch.randn((P, L, G, D), generator=generator).to(dtype).to(device)
    lse, part_lse = (torch.randn((P, G, n), generator=generator).mul(5).to(device).transpose(1, 2) for n in (2 * L, L))
    lse = lse[:, 1::2]
    # weights e^(lse_i − lse) would not sum to 1
    for y, far in itertools.product((lse, part_lse), (-1, 1)):
        y[:, 2 + far :: 5] += far * 1e4
    for x, y, step in ((out, lse, 3), (part, part_lse, 2)):
        y[:, ::step], x[:, ::step] = -torch.inf, 0
    want, want_lse = out.double(), lse.double()
    merge_(want, want_lse, part.double(), part_lse.double())
    before = whole.clone()
    kernel(out, lse, part, part_lse)
    # Triton's interpreter cuts bfloat16 off instead of rounding it
    cut_off = device == "cpu" and kernel is onto_triton.merge_onto and dtype is torch.bfloat16
    half_a_step = torch.finfo(dtype).eps * (1 if cut_off else 0.5)
    assert bool(((out.double() - want).abs() <= 1.01 * half_a_step * want.abs() + 4e-6).all())
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=2e-6)
    out.copy_(before[:, ::2, 1:])
    assert torch.equal(whole, before)


# --- results at their places -------------------------------------------------------------------------------------------------------------


def random_layout(rng: random.Random, batch: int, heads: int, n: int) -> Layout:
    pattern = replace(random_branches(rng, heads, n, None), tail="mask")
    low = rng.randrange(heads)
    documents = tuple((b * n, b * n + n) for b in range(batch))
    shape = whole_shape(heads, heads, batch * n, False)._replace(documents=documents)
    # as where outputs of branches are saved
    return layout_of(pattern, shape, rng.random() < 0.4, (low, rng.randint(low + 1, heads)))


# the dtype by the seed, of which either has a direct branch and none
@pytest.mark.parametrize(("seed", "dtype"), [(seed, (torch.float32, torch.bfloat16)[seed % 2]) for seed in range(16)])
def test_kernels_equal_their_definition(seed: int, dtype: torch.dtype) -> None:
    """Random patterns and batches, ragged ends, empty parts, strided results, head dims that are no power of two."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = random.Random(seed)
    torch.manual_seed(seed)
    B, D, n, tolerance = rng.randint(1, 3), rng.choice([8, 24, 40]), rng.randint(1, 150), 1e-5 if dtype is torch.float32 else 0.04
    layout = random_layout(rng, B, rng.choice([1, 3, 4]), n)
    H, size = len(layout.offsets[0]), len(layout.offsets[0]) * layout.num_places
    part, *parts = (torch.randn(size * D, device=device).to(dtype) for _ in range(4))
    part_lse, lse = (torch.randn(*shape, device=device) * 4 for shape in ((size,), (B, H, n)))
    for x in (part_lse, lse):
        x[torch.rand_like(x) < 0.2] = -torch.inf
        x[torch.rand_like(x) < 0.1] = 1e4
    # an empty part may hold anything; what lies beside a chunk's heads and rows is left alone
    part.view(-1, D)[part_lse == -torch.inf] = torch.nan
    out, grads = torch.randn(B, n + 3, H + 2, D, device=device).to(dtype), torch.randn(3, B, n, H, D, device=device).to(dtype)
    # what a backend writes of an empty row
    out[:, 2:-1, 1:-1][lse.transpose(1, 2) == -torch.inf] = 0.0
    both = []
    for kernels, as_dtype in ((fused, torch.Tensor.double), (places, torch.clone)):
        results = [as_dtype(x) for x in (out, lse, grads)]
        kernels.combine(layout, (results[0][:, 2:-1, 1:-1], results[1].transpose(1, 2)), [as_dtype(x) for x in (part, part_lse)])
        if layout.walk.direct == layout.walk.key_direct:
            kernels.combine(layout, list(results[2]), [as_dtype(x) for x in parts])
        both.append(results)
    for x, y in zip(*both, strict=True):
        torch.testing.assert_close(y.double(), x, atol=1e-5 if x.dim() == 3 else tolerance, rtol=1e-6)


# --- chunks ------------------------------------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=100)
def test_chunks_keep_to_the_budget(data: st.DataObject) -> None:
    kv_heads, ratio = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    heads, n = kv_heads * ratio, data.draw(st.integers(1, 300))
    lengths = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24, 48, 1000]), min_size=1, max_size=3)))
    rates = tuple(data.draw(st.integers(1, w)) for w in lengths)
    pattern = DilatedPattern(lengths, rates, "cyclic", "all", data.draw(st.sampled_from(["mask", "zero_keys"])))
    budget = data.draw(st.integers(1, 5000))
    stages = places.make_stages(pattern, whole_shape(heads, kv_heads, n, False), 2, budget)
    for stage in stages:
        sizes = []
        for (low, high), (first, last) in stage.chunks(heads, n):
            layout = layout_of(stage.pattern, whole_shape(heads, heads, last - first, False), False, (low, high))
            sizes.append(layout.num_places * 2 * (high - low))
        smallest = stage.heads == ratio and (stage.positions == n or stage.positions <= max(lengths) * 12)
        assert smallest or max(sizes) * min(len(sizes), stage.concurrent) <= budget
        # where not even one of these fits, there is one at a time
        assert stage.concurrent == (1 if len(sizes) == 1 or 2 * max(sizes) > budget else 2)
    # two stages run the branches once each, and take less where the smallest chunks of all branches together do not fit
    assert sorted(stage.pattern.branches[b] for stage in stages for b in stage.branches) == sorted(pattern.branches)
    assert stages[0].merged is None
    for stage in stages[1:]:
        assert stage.merged is not None and stage.pattern.branches[stage.merged] == (n, 1)


def test_only_a_call_with_detached_mixing_saves_outputs_of_branches_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that autograd saves, beside q, k, v, out and lse."""
    q, k, v = (torch.randn(2, 20, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    elements = 2 * 2 * 4 * (3 * 8 + 5)
    detached = {"mixture_grad": "detached", "tail": "zero_keys", "head_offsets": "blocked"}

    def saved(k: torch.Tensor = k, v: torch.Tensor = v, lengths: Any = (8, 40), rates: Any = (1, 4), **options: Any) -> int:
        fused.run_fused(monkeypatch)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()), lambda _: None):
            dilated_attention(q, k, v, lengths, rates, **detached | options)
        return elements * sizes.count(elements)

    assert saved() == saved(key_padding_mask=(torch.arange(20) > 17).repeat(2, 1)) == elements
    assert not saved(mixture_grad="exact") and not saved(dropout_p=0.1) and not saved(lengths=(8,), rates=(1,))
    assert not saved(k[:, :, :1], v[:, :, :1])
    monkeypatch.setattr(places, "transient_budget", lambda _, is_backward=False: elements * 8 - 1)
    assert not saved()
