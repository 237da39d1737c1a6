"""The base class of block-sparse patterns: their definition by positions, their kept blocks row by row, and their counts.

A sequence of N positions is cut into query blocks (rows) of ``q_block`` and key blocks (columns) of ``k_block`` positions. The last of
each may be shorter. A new pattern is one class with one method: ``allowed``, or of whole blocks (``WholeBlocks``) ``keeps``; any file of
this folder may hold it. By default all blocks are listed, and ``classify`` asks ``allowed`` about every pair; a class for long sequences,
or one that derives from a class with its own, writes ``columns`` and ``classify``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import operator
import weakref
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from dilated_attention.files import parse_json
from dilated_attention.pattern.base import Pattern
from dilated_attention.pattern.checks import MAX_HEADS, as_int, check_bool, checked_block_size, shown
from dilated_attention.pattern.reads import reads_of

# lists of blocks store positions in 32 bits
MAX_POSITIONS = 2**31
# pairs evaluated at once, which bounds the memory of building lists
PAIRS_AT_ONCE = 2**24
# FlexAttention's mask function: (batch, head, q_idx, kv_idx) -> bool
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# blocks: (group, row, column), where a group is an index into the heads that are asked about
Blocks = tuple[Tensor, Tensor, Tensor]
# the heads that are asked about
Heads = tuple[int, ...]
# what blocks are: (state, key); partial blocks of equal keys have equal masks
States = tuple[Tensor, Tensor]
# the first position of each block or query, or its first key, and the last one or the one after it
Ends = tuple[Tensor, Tensor]
# (left, right) of a window, None for unbounded
Sides = tuple[int | None, int | None]
# states of a block: no pair kept · some pairs kept · every pair within the sequence kept
ABSENT, PARTIAL, FULL = 0, 1, 2
# in specs: what begins a reference to a live pattern, and the key of a pattern's class
OBJECT, _CLASS = "object:", "pattern"
# all pattern classes by name, and the patterns that hold objects by the number in their specs
_classes: dict[str, type[BlockPattern]] = {}
_living: weakref.WeakValueDictionary[int, BlockPattern] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
# names of classes that were defined again: what is remembered by a pattern's spec holds until there is one more
redefined_classes: list[str] = []
# a method that defines a pattern → what says the same faster, or promises something of it
_ALL_FORMS = "columns", "classify", "entries", "interval", "mask_mod", "causal", "at", "is_prefix_stable"
_FORMS = {
    "allowed": _ALL_FORMS, "keeps": ("columns", "entries", "is_prefix_stable"), "reach": ("mask_mod", "causal", "is_prefix_stable"),
    "columns": ("entries",), "classify": ("entries",),
}  # fmt: skip
# one of ``BlockPattern.limits``
SEED = "seed", 0, 2**62 - 1


@dataclass(frozen=True)
class Grid:
    """The blocks of a sequence, and the requested rows of them: [first_row, last_row). ``num_rows`` counts these, ``num_columns`` all."""

    num_positions: int
    q_block: int
    k_block: int
    first_row: int
    last_row: int
    num_rows: int
    num_columns: int
    device: torch.device

    @property
    def num_sequence_rows(self) -> int:
        """Number of rows of the whole sequence, at least 1, so that one can divide by it."""
        return max(-(-self.num_positions // self.q_block), 1)

    def rows(self) -> Tensor:
        return self.range(self.first_row, self.last_row)

    def range(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last, device=self.device)

    def queries(self, row: Tensor) -> Ends:
        """Returns the first and the last position of query blocks."""
        return self._ends(row, self.q_block)

    def keys(self, column: Tensor) -> Ends:
        """Returns the first and the last position of key blocks."""
        return self._ends(column, self.k_block)

    def _ends(self, block: Tensor, size: int) -> Ends:
        first = block * size
        last = first + (size - 1)
        return first, last if self.num_positions % size == 0 else last.clamp(max=self.num_positions - 1)

    def block_number(self, row: Tensor, column: Tensor) -> Tensor:
        """Returns a unique number for each block of the sequence. With group · num_rows + row − first_row in place of the row, for each
        block of the requested rows in all groups."""
        return row * self.num_columns + column

    def blocks_of(self, numbers: Tensor) -> Blocks:
        """Returns the blocks in all groups that have these numbers, in the same order."""
        rows, column = divided(numbers, max(self.num_columns, 1))
        group, row = divided(rows, max(self.num_rows, 1))
        return group, row + self.first_row, column

    def positions(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the positions in blocks, queries (blocks, q_block, 1) and keys (blocks, 1, k_block), also those behind the end."""
        queries = row[:, None] * self.q_block + self.range(0, self.q_block)
        return queries[:, :, None], (column[:, None] * self.k_block + self.range(0, self.k_block))[:, None]

    def parts(self, count: int) -> list[slice]:
        """Returns slices of ``count`` blocks, each with as many blocks as are evaluated at once."""
        step = max(1, PAIRS_AT_ONCE // (self.q_block * self.k_block))
        return [slice(first, first + step) for first in range(0, count, step)]


@dataclass(frozen=True)
class BlockPattern(Pattern):
    """A pattern with m = 1 on the pairs that it keeps, computed block by block.

    ``allowed`` says which pairs are kept. Patterns compose by ``|`` (either keeps the pair), ``&`` (both do) and ``PerHead``. Fields are
    numbers, strings, tuples and patterns, so that ``spec`` writes a pattern as a string: patterns pass through custom ops as strings.

    Args:
        block_size: positions per block: 64 or 128, or (query block, key block) with each of them 64 or 128. For patterns defined by
            positions, it does not change which pairs are kept. For patterns defined by blocks, it is the unit of their parameters.
    """

    block_size: int | tuple[int, int] = field(default=128, kw_only=True)
    q_block: int = field(init=False, repr=False, compare=False)
    k_block: int = field(init=False, repr=False, compare=False)

    # whether position t keeps the same keys j ≤ t in every sequence that contains it, whatever follows; False: no, or not known. Only
    # then does decoding a token from cached keys give the same result as the forward of any longer sequence
    is_prefix_stable: ClassVar[bool] = False
    # whether, with square blocks, sequences of equally many blocks keep the same pairs, as far as both have these positions. Such sequences
    # share lists of blocks. It is not inherited: a derived class that keeps this promise says so again
    shares_lists: ClassVar[bool] = False
    # whether the blocks are chosen by the content of q and k; such a pattern class defines its own | and &
    is_chosen: ClassVar[bool] = False
    # whether it holds a Python function or a tensor, which cannot be serialized: ``spec`` then refers to the live object
    holds_objects: ClassVar[bool] = False
    # the patterns that it is made of; a pattern of one's own may have a field ``parts``
    _parts: ClassVar[tuple[BlockPattern, ...]] = ()
    # (name, least, most) of fields that are integers
    limits: ClassVar[tuple[tuple[str, int, int], ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Registers the class by its name. Defining it again, as notebooks do, replaces it."""
        super().__init_subclass__(**kwargs)
        # a property, as compositions have, is inherited
        if cls.shares_lists is True and "shares_lists" not in vars(cls):
            cls.shares_lists = False
        known = _classes.get(cls.__name__)
        if known is not None and known.__module__ != cls.__module__:
            raise TypeError(f"{cls.__module__}.{cls.__name__} has the name of {known.__module__}.{known.__name__}: give it another name")
        if known is not None:
            redefined_classes.append(cls.__name__)
        _classes[cls.__name__] = cls
        _read_once.cache_clear()
        # a class that is derived from one of the library's may keep other pairs, of which its bases' faster forms know nothing
        if not cls.__module__.startswith("dilated_attention."):
            forms = {name for definition in _FORMS if definition in vars(cls) for name in _FORMS[definition]}
            for name in forms:
                owner = next(base for base in cls.__mro__ if name in vars(base))
                if owner.__module__.startswith("dilated_attention."):
                    setattr(cls, name, vars(BlockPattern)[name])
            inherited = inspect.getattr_static(cls, "per_head")
            if forms and "per_head" not in vars(cls) and isinstance(inherited, property):
                cls.per_head = property(lambda self: inherited.__get__(self) or BlockPattern.per_head.__get__(self))  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self._set_blocks(checked_block_size(self.block_size))
        for name, least, most in self.limits:
            self._set(**{name: as_int(name, getattr(self, name), minimum=least, maximum=most)})
        self._name_object()

    @classmethod
    def random(cls, draw: Any, **fields: Any) -> BlockPattern:
        """Returns a pattern for ``testing.random_case``, with drawn integers in the fields of ``limits``. A class with other fields without
        a default draws these, too. ``draw``: a ``random.Random``, or anything with its ``randint`` and ``choice``."""
        drawn = {name: draw.randint(least, min(most, least + draw.choice([3, 150]))) for name, least, most in cls.limits}
        return cls(**drawn | fields)

    def arguments(self) -> dict[str, Any]:
        """Returns what the constructor takes to make an equal pattern."""
        fields = [field for field in dataclasses.fields(self) if field.init]
        return {field.metadata.get("argument", field.name): getattr(self, field.name) for field in fields}

    def _name_object(self, is_needed: bool = False) -> None:
        """Gives a pattern that holds a function or a tensor the number by which its spec refers to it."""
        # not inside a compiled function, where nothing would keep the pattern alive until the graph runs
        if (self.holds_objects or is_needed) and not torch.compiler.is_compiling():
            self._set(_number=next(_numbers))
            _living[self.__dict__["_number"]] = self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_number", "_spec", "_reads_heads")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy gets a new name, since the original may be freed before it
        self.__dict__.update(state)
        self._name_object()

    def spec(self) -> str:
        """Returns the pattern as a string. ``pattern_from_spec`` restores an equal one (the same one, if it holds a function or tensor)."""
        if torch.compiler.is_compiling():
            return _text(_plain(self))
        # computed once, since every call of an op needs it
        if "_spec" not in self.__dict__:
            attributes = vars(type(self))
            if "__init__" in attributes and "__dataclass_fields__" not in attributes:
                raise TypeError(
                    f"{type(self).__name__} has an __init__ of its own and is not a dataclass, so two of them cannot be told apart; "
                    "write its arguments as fields and decorate it with @dataclass(frozen=True)"
                )
            self._set(_spec=_text(_plain(self)))
        return self.__dict__["_spec"]  # type: ignore[no-any-return]

    @functools.cached_property
    def is_bound_to_process(self) -> bool:
        """Whether the pattern or a part of it holds a function or a tensor, which other processes cannot restore from ``spec``."""
        return OBJECT in self.spec()

    @property
    def dense_window(self) -> Sides | None:
        """The (left, right) of dense attention with a window that keeps the same pairs, None for unbounded; None if there is no such."""
        return None

    @property
    def per_head(self) -> bool:
        """Whether the lists differ between heads. A class of a user's own need not say it: it is whether ``allowed`` reads ``heads``."""
        if type(self).__module__.startswith("dilated_attention."):
            return False
        if (reads := self.__dict__.get("_reads_heads")) is None:
            if torch.compiler.is_compiling():
                return True
            # what ``allowed`` itself is told if it asks
            self._set(_reads_heads=True)
            # it may read heads at some lengths alone
            reads = any(reads_of(lambda _, head, query, key, n=n: self.allowed(query, key, head, n), 2)[1] for n in (1, 300, 70_000))
            self._set(_reads_heads=reads)
        return bool(reads)

    @property
    def reads_batch(self) -> bool:
        """Whether the pairs may differ between batch entries. The pattern is then that of entry 0 alone (see ``check_batch``)."""
        return any(part.reads_batch for part in self._parts)

    def _set(self, **values: Any) -> None:
        """Sets fields, for ``__post_init__``: the record is frozen."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _set_blocks(self, block_size: tuple[int, int]) -> None:
        self._set(block_size=block_size, q_block=block_size[0], k_block=block_size[1])

    @abstractmethod
    def allowed(self, queries: Tensor, keys: Tensor, heads: Tensor, num_positions: int) -> Tensor:
        """The definition: whether head h keeps the pair (i, j), elementwise.

        Args:
            queries, keys, heads: int64, broadcastable: absolute positions and head indices. Positions from ``num_positions`` on are
                outside the sequence; they must not raise an error, and any answer is valid for them.
            num_positions: N, the number of positions of the whole key sequence.

        Returns:
            bool, of the broadcast shape or of a shape that broadcasts to it.
        """

    def columns(self, grid: Grid, heads: Heads) -> Blocks:
        """Returns (index into ``heads``, row, column) of every kept block, ascending and without duplicates.

        It may include blocks that are not kept, and by default has all. Patterns that are not ``per_head`` are called with a single head.
        """
        return grid.blocks_of(grid.range(0, len(heads) * grid.num_rows * grid.num_columns))

    def classify(self, grid: Grid, head: Tensor, row: Tensor, column: Tensor) -> States:
        """Returns (state int8, key int64) of any blocks: ABSENT, PARTIAL or FULL, and the key of the partial ones. Two with equal keys keep
        the same pairs, as far as both are within the sequence.

        By default ``allowed`` is evaluated for every pair, and every block has its own key: exact, in time proportional to the pairs.
        """
        state, last = torch.zeros_like(row, dtype=torch.int8), grid.num_positions - 1
        for part in grid.parts(row.shape[0]):
            # clamped positions repeat the last ones, which are evaluated anyway
            queries, keys = (x.clamp(max=last) for x in grid.positions(row[part], column[part]))
            pairs = self.allowed(queries, keys, head[part, None, None], grid.num_positions)
            pairs = pairs.broadcast_to(queries.shape[0], grid.q_block, grid.k_block)
            state[part] = state_of(pairs.any(2).any(1), pairs.all(2).all(1))
        key = grid.block_number(row, column)
        if self.per_head:
            # other keys for each head: all numbers of the rows up to last_row are below this product
            key = key + head * (grid.num_columns * max(grid.last_row, 1))
        return state, key

    def cost(self, grid: Grid) -> float:
        """Estimates how many blocks per row ``columns`` returns. An intersection lists its cheapest part and classifies with the others."""
        return float(grid.num_columns)

    def check(self, num_positions: int, num_heads: int) -> None:
        """Raises ValueError if the pattern does not exist for this number of positions or heads."""
        for part in self._parts:
            part.check(num_positions, num_heads)

    def check_batch(self, num_batch: int) -> None:
        """Raises ValueError if the pairs differ between the entries of a batch of this size: a pattern holds for all of them."""
        if num_batch > 1 and self.reads_batch:
            raise ValueError(
                f"the batch has {num_batch} entries, which the function of {shown(self)} may tell apart; expected one, of index 0: call "
                "once for each entry b, with from_block_mask(mask, batch=b) of a BlockMask made for all of them, or with its own function"
            )

    def at(self, num_positions: int) -> BlockPattern:
        """Returns the pattern for ``num_positions``, which is the pattern itself unless it is defined by a density."""
        return self

    def causal(self) -> BlockPattern:
        """Returns the pattern restricted to pairs with j ≤ i."""
        return self & _classes["Causal"](block_size=self.block_size)

    def interval(self, positions: Tensor, num_positions: int) -> Ends | None:
        """Returns (low, high) if every *kept* block keeps exactly its pairs with low[i] ≤ j < high[i]; None if that is not known.
        ``positions`` are those of the queries; the result is the same for all heads."""
        return None

    def mask_mod(self, num_positions: int, num_heads: int, device: torch.device | str = "cpu") -> MaskMod:
        """Returns the definition in FlexAttention's form, f(batch, head, q_idx, kv_idx) -> bool, with its tables on ``device``. Where
        ``allowed`` searches or hashes, this uses tables, since compilers recompute a value at each use."""
        return lambda batch, head, q_idx, kv_idx: self.allowed(q_idx, kv_idx, head, num_positions)

    def __or__(self, other: BlockPattern) -> BlockPattern:
        return self._joined("Union", other)

    def __and__(self, other: BlockPattern) -> BlockPattern:
        return self._joined("Intersection", other)

    def _joined(self, name: str, other: Any) -> BlockPattern:
        composite: Any = _classes[name]
        return composite.of(self, other) if isinstance(other, BlockPattern) and not other.is_chosen else NotImplemented

    def grid(self, num_positions: int, rows: tuple[int, int] | None = None, device: torch.device | str = "cpu") -> Grid:
        """Returns the blocks of a sequence, with the requested rows [first, last); None requests all."""
        all_rows, columns = (-(-checked_positions(num_positions) // size) for size in (self.q_block, self.k_block))
        first_row, last_row = (0, all_rows) if rows is None else rows
        if not 0 <= first_row <= last_row <= all_rows:
            raise ValueError(f"rows is {rows}; expected 0 ≤ first ≤ last ≤ {all_rows}, the query blocks of {num_positions} positions")
        num_rows = last_row - first_row
        return Grid(num_positions, self.q_block, self.k_block, first_row, last_row, num_rows, columns, torch.device(device))

    def resolved(self, num_positions: int, num_heads: int, is_causal: bool = False) -> tuple[BlockPattern, Heads]:
        """Returns the pattern for this number of positions, and the heads that have lists of their own: head 0 alone if all share one.
        Raises ValueError if it does not exist."""
        self.check(checked_positions(num_positions), as_int("num_heads", num_heads, minimum=1, maximum=MAX_HEADS))
        pattern = self.at(num_positions)
        pattern = pattern.causal() if check_bool("is_causal", is_causal) else pattern
        return pattern, tuple(range(num_heads)) if pattern.per_head else (0,)

    def entries(self, grid: Grid, heads: Heads) -> tuple[Blocks, Tensor, Tensor]:
        """Returns the kept blocks of a ``resolved`` pattern, as ``columns``; whether every pair of each within the sequence is kept; and
        the keys of ``classify``."""
        group, row, column = self.columns(grid, heads)
        state, key = self.classify(grid, head_of(group, heads), row, column)
        kept = state.nonzero()[:, 0]
        if len(kept) < len(state):
            group, row, column, state, key = (x[kept] for x in (group, row, column, state, key))
        return (group, row, column), state == FULL, key

    def _mask(self, rows: Tensor, keys: Tensor, num_heads: int, num_positions: int) -> Tensor:
        self.check(checked_positions(num_positions), num_heads)
        mask = self.allowed(rows[None, :, None], keys[None, None, :], torch.arange(num_heads)[:, None, None], num_positions)
        return mask.broadcast_to(num_heads, len(rows), len(keys)).clone(memory_format=torch.contiguous_format)

    def pairs(self, num_positions: int, num_heads: int = 1, *, is_causal: bool = False) -> int:
        """Returns the exact number of kept (head, query, key) triples, from sizes of full blocks and the pairs of each distinct mask."""
        from dilated_attention.pattern.blocks.block_lists import count_pairs

        return count_pairs(self, num_positions, num_heads, is_causal=is_causal)

    def long_cell_pairs(self, num_positions: int, num_heads: int, cell: int, is_causal: bool) -> Tensor:
        """Counts the kept pairs in squares of ``cell`` × ``cell`` positions, int64 (num_heads, cells, cells), from the lists of blocks: for
        sequences too long for a mask. ``cell`` is a multiple of both block sizes. See ``cell_pairs`` in ``pattern/base.py``."""
        from dilated_attention.pattern.blocks.block_lists import block_pairs

        cells = -(-num_positions // cell)
        total = torch.zeros(num_heads, cells, cells, dtype=torch.int64)
        for head, row, column, pairs in block_pairs(self, num_positions, num_heads, is_causal=is_causal):
            total.index_put_((head, row * self.q_block // cell, column * self.k_block // cell), pairs, accumulate=True)
        return total if self.at(num_positions).per_head else total[:1].expand(num_heads, -1, -1)

    def show(self, num_positions: int = 1024, num_heads: int = 4, *, is_causal: bool = False, path: str | None = None) -> Any:
        return super().show(num_positions, num_heads, is_causal=is_causal, path=path)


def kinds() -> dict[str, type[BlockPattern]]:
    """Returns all classes of block patterns by name, but for base classes."""
    return {name: kind for name, kind in _classes.items() if not (name.startswith("_") or inspect.isabstract(kind))}


def pattern_from_spec(spec: str) -> BlockPattern:
    """Restores the pattern that ``BlockPattern.spec`` wrote.

    Raises:
        RuntimeError: the pattern held a Python function or a tensor, and has been freed or was in another process.
        ValueError: the string is not the spec of a pattern.
    """
    if not isinstance(spec, str):
        raise TypeError(f"spec is {shown(spec)} ({type(spec).__name__}); expected the string that BlockPattern.spec() returns")
    # a cache would keep live objects alive forever
    return _read(spec) if OBJECT in spec else _read_once(spec)


def _read(spec: str) -> BlockPattern:
    """``pattern_from_spec`` without a cache."""
    try:
        pattern = _value(parse_json(spec, "spec"))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"spec is {spec[:200]!r}; expected what BlockPattern.spec() returns ({error})") from error
    if not isinstance(pattern, BlockPattern):
        raise ValueError(f"spec is {spec!r}; expected what BlockPattern.spec() returns")
    return pattern


_read_once = functools.lru_cache(maxsize=256)(_read)


def _plain(value: Any) -> Any:
    """Returns a pattern or the value of a field as plain data for JSON, which ``_value`` reads: patterns as dicts, tuples as lists.
    torch.compile traces this code, as a pattern may be made inside a compiled function."""
    if isinstance(value, BlockPattern):
        if value.holds_objects:
            number = getattr(value, "_number", None)
            if number is None:
                raise RuntimeError("a pattern that holds a function or a tensor is made inside a compiled function; make it outside")
            return f"{OBJECT}{operator.index(number)}"
        return {_CLASS: type(value).__name__} | {name: _plain(x) for name, x in value.arguments().items()}
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    # makes constants of torch.compile's symbolic numbers
    if isinstance(value, int) and not isinstance(value, bool):
        return operator.index(value)
    return value.__float__() if isinstance(value, float) else value


def _text(plain: Any) -> str:
    return json.dumps(plain, separators=(",", ":"))


# what torch.compiler.assume_constant_result does, without importing the compiler
_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _value(written: Any) -> Any:
    """Returns the pattern or the value that ``_plain`` made ``written`` of."""
    if isinstance(written, dict):
        fields = {name: _value(value) for name, value in written.items() if name != _CLASS}
        kind = _classes.get(written.get(_CLASS, ""))
        if kind is None:
            raise ValueError(f"no pattern is called {written.get(_CLASS)!r}; known are {', '.join(sorted(kinds()))}")
        return kind(**fields)
    if isinstance(written, list):
        return tuple(_value(x) for x in written)
    if isinstance(written, str) and written.startswith(OBJECT):
        pattern = _living.get(int(written.removeprefix(OBJECT)))
        if pattern is None:
            raise RuntimeError(
                f"the pattern {written!r} holds a function or a tensor and has been freed, or was made by another process; "
                "keep a reference to it as long as it is used, until after the backward pass"
            )
        return pattern
    return written


def checked_positions(num_positions: Any) -> int:
    return as_int("num_positions", num_positions, minimum=0, maximum=MAX_POSITIONS)


def head_of(group: Tensor, heads: Heads) -> Tensor:
    """Returns the heads of indices into ``heads``."""
    return group if heads == tuple(range(len(heads))) else torch.tensor(heads, device=group.device)[group]


def state_of(kept: Tensor, full: Tensor) -> Tensor:
    """Returns the states of blocks. Every full block must be kept, since the states are numbered so that they are this sum."""
    return kept.to(torch.int8) + full


def divided(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """Returns (x // by, x % by)."""
    quotient = x // by
    return quotient, x - quotient * by
