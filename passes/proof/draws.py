"""The inputs that a proof runs on: seeded draws, other sizes of named dims, and extreme values.

A pass can be wrong at batch 1 alone, in a row of a table that no draw looks up, or where a Clip would have acted. So
in addition to plain draws there are draws at other sizes, indices that reach both ends of their table, floats of ten
times their range, and masks of zeros and of ones. Each of these is taken if the reference runs on it and its outputs
are finite; if not, `draw_choice.py` reports why.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

import ml_dtypes
import numpy as np

from passes.load import check_drawn, check_drawn_together
from passes.proof.masks import Mask, MaskForm, mask_of, size_of, suggested_range

FURTHER_SIZES: Final = (1, 8)
"""Further sizes of every named dim: batch 1 is what is deployed, and 8 is larger than the first sizes."""

INNER_SIZES: Final = (7, 13)
"""Further sizes of dims that are no first axis: an odd size, and a size above all others."""

BATCH_SIZES: Final = (4, 7, 9)
"""Further sizes of first axes, where the inputs stay small: large batches cost time."""

SMALL: Final = 2**12
"""Elements of all inputs up to which they are small: short sequences of tokens are, most images are not."""

OUTLIERS: Final = 10.0
"""The factor on the range of floats in the draw of outliers."""


OTHER_FIRST_SIZES: Final = (1, 16, 64, 256, 512, 1024)
"""Sizes to try for dims without a given size, if the model does not run at the first one: some models take only a batch
of 1, audio models frame their samples, image models halve their pixels."""


LEAST_FIRST: Final = 2
"""The first size of an open dim, unless the model does not run at it."""


class Trait(StrEnum):
    """A way in which a draw differs from a plain draw."""

    ROWS = "rows"
    WIDE = "wide"
    EXACT = "exact"
    OUTLIERS = "outliers"
    ONES = "ones"
    ZEROS = "zeros"


WORDS: Final[Mapping[Trait, str]] = {
    Trait.ROWS: "indices over whole tables",
    Trait.WIDE: "values over the range that a name, a dtype or a range gives",
    Trait.EXACT: "exact zeros among floats",
    Trait.OUTLIERS: "floats of ten times their range",
    Trait.ONES: "masks of ones",
    Trait.ZEROS: "masks of zeros",
}


UNNAMED: Final = frozenset({Trait.ROWS, Trait.WIDE, Trait.EXACT})
"""Traits that the label of a draw does not name."""

BROUGHT_DOWN: Final = (
    "not drawn: other sizes, outliers and masks of one number (on one of them the model did not come to an end: {})"
)
"""The sentence for the report where only `DrawPlan.reduce_to_needed` was drawn; takes the error."""


@dataclass(frozen=True, slots=True)
class DrawnInput:
    """One input, with its shape, dtype and range.

    Floats are uniform in [low, high]; integers and bools go from low up to, and without, high. A string in `shape` is a
    named dim.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    low: float
    high: float
    identity: str
    """The key from which the input is drawn, together with the seed of the draw."""
    rows: tuple[int, int] | None = None
    """For an input that indexes a table: the first index, and the one after the last. Both ends are drawn."""
    is_assumed: bool = False
    """Whether the range is our default, and not the caller's."""
    is_padding: bool = False
    """Whether the caller has declared this input a padding mask: such a mask is never all zeros."""
    wide: tuple[float, float] | None = None
    """The range of a value that indexes nothing. The value is drawn as 0 or 1 at first; `Trait.WIDE` draws the whole
    range."""
    example: np.ndarray | None = field(default=None, compare=False)
    """Integers of the caller's own example, which are drawn where no trait asks for other values."""
    first: np.ndarray | None = field(default=None, compare=False)
    """The value in the first draw of a plan, such as the first state of a cache; None: the first draw is random too."""

    @property
    def mask(self) -> Mask | None:
        if self.is_padding:
            return Mask(MaskForm.PADDING)
        if self.rows is not None or (self.low >= self.high and not self.is_assumed):
            return None
        return mask_of(
            self.name, self.dtype, len(self.shape), self.low, self.high, is_assumed=self.is_assumed and self.low != 1
        )

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype

    @property
    def is_mask(self) -> bool:
        """Whether the input is a mask, of zeros and ones or of values that hide and show, and indexes no table."""
        if self.mask is not None:
            return True
        return not self.is_float and not self.is_bytes and self.rows is None and (self.low, self.high) == (0, 2)

    @property
    def is_bytes(self) -> bool:
        """Whether the input may be an image or quantized: its outliers span all values of 8 bits."""
        return self.dtype in ("uint8", "int8") and self.rows is None and self.is_assumed

    @property
    def traits(self) -> frozenset[Trait]:
        """The traits that the input can be drawn with."""
        if self.mask is not None:
            hides_all = not self.is_padding and self.mask.hidden >= 0
            return frozenset({Trait.ONES, Trait.ZEROS} if hides_all else {Trait.ONES})
        wide = {Trait.WIDE} if self.wide is not None else set[Trait]()
        if self.is_float or self.is_bytes:
            exact = {Trait.EXACT} if self.is_float and self.low < 0 < self.high else set()
            outliers = {Trait.OUTLIERS} if self.low < self.high and not wide else set()
            return frozenset(outliers | exact | wide)
        if self.rows is not None:
            return frozenset({Trait.ROWS})
        return frozenset(({Trait.ONES, Trait.ZEROS} if self.is_mask else set()) | wide)

    def sizes_in(self, draw: Draw) -> list[int]:
        return [size_of(dim, draw.sizes) if isinstance(dim, str) else dim for dim in self.shape]

    def draw(self, draw: Draw) -> np.ndarray:
        shape, identity = self.sizes_in(draw), f"{draw.seed}:{self.identity}"
        if self.mask is not None:
            return self._draw_mask(self.mask, identity, shape, draw.traits)
        chosen = self.traits & draw.traits & {Trait.ROWS, Trait.WIDE, Trait.ONES, Trait.ZEROS}
        if self.example is not None and self.example.size and not chosen:
            return _fit(self.example, shape)
        low, high = self._interval(draw.traits & self.traits)
        array = draw_array(identity, shape, self.dtype, low, high)
        if Trait.WIDE in chosen and (low, high) == self.wide:
            if self.is_float and high > MOST_FRACTION:
                np.floor(array, out=array)
            _reach(array, [(low + high) // 2, high - 1, low], draw.seed)
        elif Trait.ROWS in chosen and self.rows is not None and self.rows[0] < self.rows[1]:
            _reach(array, [self.rows[0], self.rows[1] - 1], draw.seed)
        elif Trait.EXACT in self.traits & draw.traits:
            _put_zeros(array, max(-low, high))
        return array

    def _draw_mask(self, mask: Mask, identity: str, shape: Sequence[int], traits: frozenset[Trait]) -> np.ndarray:
        low, high = (0, 0) if Trait.ZEROS in traits & self.traits else (1, 1) if Trait.ONES in traits else (0, 2)
        is_visible = draw_array(identity, shape, "int64", low, high).astype(bool)
        drawn = np.where(is_visible, mask.visible, mask.hidden) if low == high else mask.apply(is_visible)
        return drawn.astype(dtype_named(self.dtype))

    def _interval(self, traits: frozenset[Trait]) -> tuple[float, float]:
        if self.is_float and Trait.OUTLIERS in traits:
            return self.low * OUTLIERS, self.high * OUTLIERS
        if self.is_bytes and Trait.OUTLIERS in traits:
            limits = np.iinfo(self.dtype)
            return limits.min, limits.max + 1
        if self.rows is not None and Trait.ROWS in traits:
            return self.rows
        if self.is_mask and Trait.ZEROS in traits:
            return 0, 0
        if self.is_mask and Trait.ONES in traits:
            return 1, 1
        if self.wide is not None and Trait.WIDE in traits:
            return self.wide
        return self.low, self.high


def _reach(array: np.ndarray, values: Sequence[float], seed: int) -> None:
    """Put `values` into `array`, from both ends; an array with fewer elements gets some of them, chosen by the
    seed."""
    turn = -seed % len(values) if array.size < len(values) else 0
    for index in range(min(array.size, len(values))):
        array.flat[-((index + 1) // 2) if index % 2 else index // 2] = values[(turn + index) % len(values)]


def _fit(example: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """`example`, repeated or cut along each axis where it has another size."""
    for axis, size in enumerate(shape):
        if example.shape[axis] != size:
            example = np.take(example, np.arange(size), axis, mode="wrap")
    return example.copy()


MOST_FRACTION: Final = 100
"""Floats whose range ends above this number, such as steps of diffusion, are drawn as integers too."""


def _put_zeros(array: np.ndarray, most: float) -> None:
    """Set the elements nearest to zero to zero, at least one, and leave the extremes."""
    magnitude = np.abs(array.astype(np.float32))
    array[magnitude < most / EVERY] = 0
    if array.size > 1:
        array.flat[int(magnitude.argmin())] = 0


EVERY: Final = 16
"""About one float in this many is zero in draws with exact zeros."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One comparison: a seed, a size for every named dim, and traits."""

    seed: int
    sizes: Mapping[str, int]
    traits: frozenset[Trait] = frozenset()
    source: str = ""
    """The origin of inputs that the user gave; empty for inputs drawn from the seed."""

    @property
    def label(self) -> str:
        words = [f"{name or 'unnamed'}={size}" for name, size in self.sizes.items()]
        words += [WORDS[trait] for trait in Trait if trait in self.traits - UNNAMED]
        name = f"inputs of {self.source}" if self.source else f"draw {self.seed}"
        return name + (f" ({', '.join(words)})" if words else "")


@dataclass(frozen=True, slots=True)
class GivenDraw:
    """Inputs that the user gave, in place of drawn ones."""

    draw: Draw
    feeds: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """The draws to try on a reference.

    Args:
        needed: sizes of named dims, each with one draw that has to run; if empty, nothing is drawn.
        second: alternatives for one more draw, at the first sizes on which the reference runs; may be empty.
        further: further sizes for every named dim, drawn where the reference runs on them.
        open: dims without a given size; see `at_other_sizes`.
        given: inputs that the user gave. They come before all draws, and have to run.
        is_plain: draw no outliers, and no masks of all zeros or all ones.
    """

    inputs: tuple[DrawnInput, ...]
    needed: tuple[Mapping[str, int], ...]
    second: tuple[Mapping[str, int], ...] = ()
    further: tuple[int, ...] = FURTHER_SIZES
    seed: int = 0
    open: tuple[str, ...] = ()
    given: tuple[GivenDraw, ...] = ()
    is_plain: bool = False

    def at_other_sizes(self) -> Iterator[DrawPlan]:
        """Plans to try in turn if the model does not run at the first sizes: other sizes for the open dims that are not
        a first axis, which keeps a batch small, and then for all open dims."""
        leading = {dim for known in self.inputs for dim in known.shape[:1]}
        inner = frozenset(self.open) - leading
        for dims in dict.fromkeys((inner, frozenset(self.open))):
            for size in OTHER_FIRST_SIZES if dims else ():
                needed = tuple(self._shift(sizes, dims, size) for sizes in self.needed)
                yield replace(self, needed=needed, second=tuple(self._shift(s, dims, size) for s in self.second))

    def without_zeros(self) -> Iterator[DrawPlan]:
        """The plan to try if the model computes NaN at first: inputs of zeros and ones become all ones, since they may
        be lengths, or masks in which no row may be empty."""
        if any(known.is_mask for known in self.inputs):
            positive = (replace(known, low=1.0) if known.is_mask else known for known in self.inputs)
            yield replace(self, inputs=tuple(positive))

    def _shift(self, sizes: Mapping[str, int], dims: Collection[str], first: int) -> Mapping[str, int]:
        """`sizes`, shifted so that `dims` have the size `first` in the first draw."""
        return {dim: size + first - self.needed[0][dim] if dim in dims else size for dim, size in sizes.items()}

    @property
    def first_feeds(self) -> Mapping[str, np.ndarray]:
        """The inputs of the first comparison."""
        return self.given[0].feeds if self.given else self.feeds(Draw(self.seed, self.needed[0]))

    @property
    def dims(self) -> tuple[str, ...]:
        """The named dims that have a size of their own, each once."""
        named = dict.fromkeys(dim for known in self.inputs for dim in known.shape if isinstance(dim, str))
        return tuple(dim for dim in named if dim in self.needed[0])

    def further_sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Named dim → further sizes to draw it at. If a dim had to be drawn larger, its further sizes are near that
        size."""
        leading = {dim for known in self.inputs for dim in known.shape[:1] if isinstance(dim, str)}
        first = self.needed[0]
        largest = Draw(0, {**first, **dict.fromkeys(leading & first.keys(), BATCH_SIZES[-1])})
        is_small = sum(math.prod(known.sizes_in(largest)) for known in self.inputs) <= SMALL
        sizes: dict[str, tuple[int, ...]] = {}
        for dim in self.dims:
            more = INNER_SIZES if dim not in leading else BATCH_SIZES if is_small else ()
            shift = first[dim] - LEAST_FIRST if dim in self.open and first[dim] in OTHER_FIRST_SIZES[1:] else 0
            own = (*self.further, *more) if self.further == FURTHER_SIZES else self.further
            sizes[dim] = tuple(size + shift for size in own)
        return sizes

    @property
    def traits(self) -> frozenset[Trait]:
        traits = frozenset[Trait]().union(*(known.traits for known in self.inputs))
        return traits & UNNAMED if self.is_plain else traits

    def reduce_to_needed(self) -> DrawPlan:
        """The plan with only the draws that are needed, for a reference that crashed on another draw."""
        return replace(self, second=self.second[-1:], further=(), is_plain=True)

    def with_rows(self, rows: Mapping[str, int], *, lengths: Collection[str] = (), has_loops: bool = False) -> DrawPlan:
        """The plan after learning which inputs index tables. `rows`: name of the input → rows of its smallest table.

        An input with a range from the caller keeps that range. Inputs that are `lengths` of sequences are 1 or more:
        onnxruntime leaves what a recurrent operator computes of no step as it finds it in memory. Where the model has
        loops, an integer input may be the trip count of a loop, so its range stays small.
        """
        given = (
            replace(known, low=1, high=LEAST_FIRST + 1, is_assumed=False)
            if known.name in lengths and known.is_assumed
            else known
            for known in self.inputs
        )
        known_rows = (_with_rows(known, rows.get(known.name)) for known in given)
        default = FEW_TURNS if has_loops else WHOLE_NUMBERS
        return replace(self, inputs=tuple(_with_wide(known, default) for known in known_rows))

    def feeds(self, draw: Draw) -> dict[str, np.ndarray]:
        """The inputs of one draw.

        Raises:
            ModelError: the inputs are larger than any that a proof needs.
        """
        shapes = {known.name: known.sizes_in(draw) for known in self.inputs}
        for name, shape in shapes.items():
            check_drawn(name, shape)
        check_drawn_together(shapes)
        is_first = draw.seed == self.seed
        return {
            known.name: known.draw(draw) if known.first is None or not is_first else known.first
            for known in self.inputs
        }


@dataclass(frozen=True, slots=True)
class InputSampler:
    """Draws inputs of a model at sizes, and in ranges, on which its reference has run.

    `choose_draws` finds the sizes and ranges once; further inputs of the model are drawn here.
    """

    inputs: tuple[DrawnInput, ...]
    sizes: Mapping[str, int]
    """By named dim; dims without a name have the size of the empty one."""

    def draw(self, seed: int) -> dict[str, np.ndarray]:
        """One array for each input, over whole tables; equal seeds give equal arrays.

        Raises:
            ModelError: the inputs are larger than any that are drawn.
        """
        return DrawPlan(self.inputs, ()).feeds(Draw(seed, self.sizes, frozenset({Trait.ROWS})))


def _with_rows(known: DrawnInput, rows: int | None) -> DrawnInput:
    if rows is None or rows < 1 or known.is_float or known.dtype == "bool" or known.low >= known.high:
        return known
    is_default = (known.low, known.high) == (0, 2)
    return replace(known, rows=(0, rows) if is_default else (int(known.low), int(known.high)))


def _with_wide(known: DrawnInput, whole_numbers: tuple[float, float]) -> DrawnInput:
    """The input with `wide`, if it has a range of values that index no table and that is not drawn at first."""
    is_number = known.dtype not in ("bool", "int8", "uint8") and known.rows is None and known.mask is None
    if not is_number or known.low >= known.high:
        return known
    if known.is_assumed or known.example is not None:
        default = None if known.is_float or known.example is not None else whole_numbers
        return replace(known, wide=suggested_range(known.name, known.dtype) or default)
    is_narrow = known.is_float or known.high - known.low <= NARROW
    return known if is_narrow else replace(known, wide=(known.low, known.high))


WHOLE_NUMBERS: Final = (0.0, 1000.0)
"""The range of integer inputs that index no table and have no range from the caller or from their name: it includes the
steps of diffusion, and token ids that a model compares."""

FEW_TURNS: Final = (0.0, 8.0)

NARROW: Final = 2
"""A range of this many integers has no integer between its ends."""

BLOCK: Final = 2**24 + 43
"""Elements that are drawn one by one; a larger array repeats them. Drawing 2²⁷ elements takes
seconds, copying them a tenth of a second. The number is prime, so that no two rows of an array are alike."""


def draw_array(identity: str, shape: Sequence[int], dtype: str, low: float, high: float) -> np.ndarray:
    """An array of a dtype by its numpy name (or `bfloat16`), drawn by `identity` alone.

    Floats are uniform in [low, high]; integers and bools go from low up to, and without, high; where low equals
    high every element is low.

    Raises:
        ModelError: more elements than are drawn in reasonable time and memory.
    """
    check_drawn(identity.rpartition(":")[2], shape)
    words = np.frombuffer(hashlib.sha256(identity.encode()).digest(), np.uint32)
    generator = np.random.default_rng(np.random.SeedSequence(words.tolist()))
    size = math.prod(shape)
    block = _draw_block(generator, min(size, BLOCK), dtype, low, high).astype(dtype_named(dtype))
    return np.resize(block, tuple(shape)) if size > BLOCK else block.reshape(shape)


def _draw_block(generator: np.random.Generator, count: int, dtype: str, low: float, high: float) -> np.ndarray:
    if "float" in dtype:
        return generator.uniform(low, high, count)
    first, end = int(low), int(high)
    return generator.integers(first, end, count) if first < end else np.full(count, first, np.int64)


def dtype_named(name: str) -> np.dtype:
    """numpy's dtype; bfloat16 comes from ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
