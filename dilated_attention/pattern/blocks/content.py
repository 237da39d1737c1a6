"""Patterns whose blocks are chosen by content, anew in each forward: a query block (row) keeps the key blocks that score highest.

``TopBlocks`` says how to choose, ``ChosenBlocks`` is a choice. ``engine/blocks/selection.py`` computes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from dilated_attention.pattern.blocks.base import BlockPattern, Blocks, Grid, Heads
from dilated_attention.pattern.blocks.block_lists import unpacked
from dilated_attention.pattern.blocks.whole_blocks import BlockTable
from dilated_attention.pattern.blocks.window import LocalWindow
from dilated_attention.pattern.checks import as_int, check_bool, check_number, one_of, shown


@dataclass(frozen=True, init=False, repr=False)
class TopBlocks(BlockPattern):
    """The key blocks with the highest scores in each row (query block): MoBA's gate (arXiv 2502.13189, Eq. 5–6) for blocks of queries.

        score_h(r, c) = scale · mean(q_h of row r) · mean(k_h of block c)

    Blocks are chosen per batch entry and query head. The choice has no gradient; attention's gradient flows through the kept blocks. A row
    keeps

    * always: its own blocks, the blocks next to them and the first block, unless ``always`` says otherwise; and under causality the blocks
      that some of its queries see only in part (the diagonal). A pretrained model's first tokens hold much of its attention (StreamingLLM,
      arXiv 2309.17453), and most of the rest is near;
    * then, of the other blocks that every query of the row may see, those with the highest scores; of equal scores, the lower column.

    A kept block is kept whole, except for causality. ``always`` and ``within`` apply to whole blocks, too: a block of which ``always``
    keeps any pair is kept whole, one of which ``within`` keeps any pair may be chosen. Blocks that hold only padding are never kept.

    Args:
        blocks: number of blocks that a row keeps, including those it always keeps; fewer only if no more exist. A shorter last row is
            treated as a complete one where later positions may not change a choice (causality with ``queries="before"``): if query blocks
            are longer than key blocks, the blocks of the diagonal that only its missing queries would see count, too.
        density: alternatively, the fraction of blocks to keep, rounded up, at least 1 block. It is a fraction of the blocks with a key that
            is not padding, under causality of those among them that the row sees (for a last row as for ``blocks``).
        mass: alternatively, keep the fewest blocks whose softmax of scores sums to this (XAttention, arXiv 2503.16428, with means instead
            of antidiagonals). The softmax is over the blocks that may be kept and of which every query of the row sees all keys. Blocks
            that are always kept count first. Weights below 2^-25 of a row's largest count as 0.
        always: a static pattern of blocks that are always kept; None for the blocks that hold the row's positions, as far as ``within``
            keeps them.
        near: whether to always keep also, as far as ``within`` keeps them: the blocks that hold the row's positions, the one to the left of
            these (without causality also the one to the right), and the first with a key that is not padding. None: only if ``always`` is
            None.
        within: a static pattern; blocks outside it are kept only if they are in ``always``. None for all.
        pool: how a block is summarized: ``"mean"``, over the positions that exist (for keys, those that are not padding).
        queries: which queries score a row. ``"block"``: its own; under causality a query then sees a choice that up to q_block − 1 later
            ones influence: for prefill, not for training · ``"before"``: the q_block queries up to and including the row's first one, so
            that nothing after a position changes its output · None: ``"before"`` under causality, else ``"block"``.

    Each packed document (``cu_seqlens``) is a sequence of its own. ``|`` and ``&`` with a static pattern return ``TopBlocks`` again.

    Differs from MoBA: query blocks choose, not single queries. ``dense_mask`` and ``show`` need tensors: see ``choose``.
    """

    blocks: int | None = None
    share: float | None = field(default=None, metadata={"argument": "density"})
    mass: float | None = None
    always: BlockPattern | None = None
    within: BlockPattern | None = None
    near: bool = True
    pool: str = "mean"
    queries: str | None = None

    per_head: ClassVar[bool] = True
    is_chosen: ClassVar[bool] = True

    def __init__(
        self,
        blocks: int | None = None,
        *,
        density: float | None = None,
        mass: float | None = None,
        always: BlockPattern | None = None,
        within: BlockPattern | None = None,
        near: bool | None = None,
        pool: str = "mean",
        queries: str | None = None,
        block_size: int | tuple[int, int] = 128,
    ) -> None:
        # the field is called ``share``, since ``density`` is also the name of a method
        near = always is None if near is None else near
        self._set(
            blocks=blocks, share=density, mass=mass, always=always, within=within, near=near, pool=pool, queries=queries,
            block_size=block_size,
        )  # fmt: skip
        super().__post_init__()
        amounts = {name: value for name, value in (("blocks", blocks), ("density", density), ("mass", mass)) if value is not None}
        if len(amounts) != 1:
            raise ValueError(
                f"{amounts or 'none of blocks, density and mass'} given; exactly one says how many blocks to keep, e.g. density=0.1"
            )
        ((name, amount),) = amounts.items()
        if name == "blocks":
            self._set(blocks=as_int(name, amount, minimum=1, maximum=2**31 - 1))
        else:
            check_number(name, amount, "a number in (0, 1]")
            if not 0 < amount <= 1:
                raise ValueError(f"{name} is {amount}; expected a number in (0, 1]; for a number of blocks use blocks=")
        self._check_static("always", always)
        self._check_static("within", within)
        check_bool("near", near)
        one_of("pool", pool, ("mean",))
        if queries is not None:
            one_of("queries", queries, ("block", "before"), also="or None")

    def _check_static(self, name: str, pattern: Any) -> None:
        if pattern is None:
            return
        if not isinstance(pattern, BlockPattern):
            raise TypeError(
                f"{name} is {shown(pattern)} ({type(pattern).__name__}); expected a block pattern such as LocalWindow(512), or None"
            )
        if pattern.is_chosen:
            raise ValueError(
                f"{name} is {shown(pattern)}, which is chosen by content itself; expected a pattern determined by shapes alone"
            )
        if pattern.block_size != self.block_size:
            raise ValueError(
                f"{name} has blocks of {pattern.block_size} and this pattern of {self.block_size}; give both the same block_size"
            )

    def __repr__(self) -> str:
        given = self.arguments()
        # None is the default of all others
        block_size, defaults = given.pop("block_size"), {"near": self.always is None, "pool": "mean"}
        parts = [f"{name}={value!r}" for name, value in given.items() if value is not None and value != defaults.get(name)]
        return f"TopBlocks({', '.join([*parts, f'block_size={block_size}'])})"

    @property
    def _parts(self) -> tuple[BlockPattern, ...]:  # type: ignore[override]
        return tuple(pattern for pattern in (self.always, self.within) if pattern is not None)

    def queries_are_before(self, is_causal: bool) -> bool:
        """Whether rows are scored by the queries up to and including their first one."""
        return is_causal if self.queries is None else self.queries == "before"

    def _with(self, always: BlockPattern | None, within: BlockPattern | None) -> TopBlocks:
        return TopBlocks(**self.arguments() | {"always": always, "within": within})

    def _joined(self, name: str, other: Any) -> BlockPattern:
        """Returns the union or intersection with a static pattern; ``name``: ``"Union"`` or ``"Intersection"``."""
        if not isinstance(other, BlockPattern):
            return NotImplemented
        if other.is_chosen:
            raise ValueError(
                f"{self!r} {'|' if name == 'Union' else '&'} {other!r}: both are chosen by content; at most one of them can be, raise its "
                "density instead"
            )
        always = self.always
        if name == "Intersection":
            # the kept blocks are ``always`` and a choice from ``within``, so both are cut
            return self._with(None if always is None else always & other, other if self.within is None else self.within & other)
        if always is None and not self.near:
            # ``always=None`` stands for the row's own positions; beside ``other``, which becomes ``always``, they must be named
            always = LocalWindow(0, block_size=self.block_size)
            always = always if self.within is None else always & self.within
        return self._with(other if always is None else always | other, self.within)

    # for static | TopBlocks and static & TopBlocks, which are the same as the other way round
    __ror__, __rand__ = BlockPattern.__or__, BlockPattern.__and__

    def choose(
        self,
        q: Tensor,
        k: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        key_padding_mask: Tensor | None = None,
        query_offset: int = 0,
    ) -> ChosenBlocks:
        """Returns the pattern that ``block_sparse_attention`` chooses for these tensors, to inspect, test, or use with other tensors.

        Args:
            q, k: (B, Nq, H, D) and (B, Nk, Hk, D), as for attention.
            is_causal, scale, key_padding_mask, query_offset: as for ``block_sparse_attention``.
        """
        from dilated_attention import validation as check

        check.check_tensors(q, k, k)
        scale = check.check_scale(scale, q.shape[3], q.dtype)
        check.check_bool("is_causal", is_causal)
        query_offset = check.check_query_offset(query_offset, q.shape[1], k.shape[1])
        check.check_key_padding_mask(key_padding_mask, k)
        # by the op's name, since patterns do not import the engine
        op = torch.ops.dilated_attention.choose_blocks
        kept = op(q.detach(), k.detach(), key_padding_mask, None, self.spec(), is_causal, scale, query_offset)
        return ChosenBlocks(kept, k.shape[1], query_offset // self.q_block, block_size=self.block_size)

    def pairs(self, num_positions: int, num_heads: int = 1, *, is_causal: bool = False) -> int:
        """Returns the number of kept (head, query, key) triples, if it does not depend on the choice.

        Raises:
            ValueError: it depends on the choice: with ``mass``, ``always`` or ``within``, or if a shorter last block may be chosen or not.
        """
        self.resolved(num_positions, num_heads)
        if self.mass is not None or self.always is not None or self.within is not None:
            raise ValueError(f"how many pairs {self!r} keeps depends on q and k: call choose(q, k), and .pairs() of what it returns")
        # the number of pairs is the same for all tensors; zeros give equal scores, so the lower columns are kept, and the short one last
        q = torch.zeros(1, num_positions, 1, 1)
        pairs = self.choose(q, q, is_causal=is_causal).pairs(num_positions, is_causal=is_causal)
        if not is_causal and num_positions % self.k_block and pairs < num_positions**2:
            raise ValueError(
                f"how many pairs {self!r} keeps of {num_positions} positions depends on whether the shorter last block is chosen: call "
                f"choose(q, k), and .pairs() of what it returns, or ask for a multiple of {self.k_block}"
            )
        return num_heads * pairs

    def allowed(self, *_: Any) -> NoReturn:
        raise ValueError(f"{self!r} keeps blocks by what q and k hold; call its choose(q, k) for the pattern of these tensors")

    # whatever asks for the blocks without tensors gets this error
    columns = classify = allowed  # type: ignore[assignment]


@dataclass(frozen=True, eq=False, repr=False)
class ChosenBlocks(BlockTable):
    """The blocks that ``TopBlocks.choose`` chose, each kept whole, for as many heads and positions as its tensors had.

    With several batch entries, take the pattern of one, ``chosen[b]``, before calling any other method.

    Args:
        kept: (B, H, rows, words) int32: bit c % 32 of word c // 32 of row r is set where query block first_row + r keeps key block c.
        num_positions: N of the key sequence.
        first_row: the query block that is row 0 of ``kept``.
    """

    kept: Tensor
    num_positions: int
    first_row: int = 0

    per_head: ClassVar[bool] = True

    def __getitem__(self, entry: int) -> ChosenBlocks:
        """Returns the pattern of batch entry ``entry``."""
        return ChosenBlocks(self.kept[entry][None], self.num_positions, self.first_row, block_size=self.block_size)

    def __repr__(self) -> str:
        B, H, rows, _ = self.kept.shape
        return (
            f"ChosenBlocks({B} × {H} heads, {rows} rows from {self.first_row}, {self.num_positions} positions, "
            f"block_size={self.block_size})"
        )

    def check(self, num_positions: int, num_heads: int) -> None:
        B, H = self.kept.shape[:2]
        if B != 1:
            raise ValueError(f"this choice is for {B} batch entries; select one with chosen[b]")
        if (num_positions, num_heads) != (self.num_positions, H):
            raise ValueError(
                f"{num_heads} heads and {num_positions} positions; this choice is for {H} heads and {self.num_positions} positions: "
                "call choose(q, k) again"
            )

    def columns(self, grid: Grid, heads: Heads) -> Blocks:
        if grid.first_row < self.first_row or grid.last_row > self.first_row + self.kept.shape[2]:
            raise ValueError(
                f"query blocks {grid.first_row} to {grid.last_row} asked for; {self!r} has others: choose(q, k) with these queries, too"
            )
        return super().columns(grid, heads)

    def table(self, heads: slice | list[int]) -> Tensor:
        return unpacked(self.kept[0, heads], -(-self.num_positions // self.k_block))


def num_blocks_of(density: float, existing: Tensor) -> Tensor:
    """Returns ceil(density · existing), at least 1, in the dtype of ``existing``, numbers of blocks. A product less than a billionth above
    an integer counts as that integer: 0.1 · 30 is 3."""
    return (existing.double() * density - 1e-9).ceil().clamp(min=1).to(existing.dtype)
