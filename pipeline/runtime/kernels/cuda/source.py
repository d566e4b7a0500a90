"""The text of a Triton kernel for a row program: `pipeline.ops.row_programs` says what a program means.

A block of the kernel computes a tile of rows and columns of the result. Sizes and strides are numbers in the text,
since a plan has one size for each value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.ops.row_programs import COMPARISONS, ROUNDINGS, Computed, Input, Operand, Program, needs_whole_rows

MOST_IN_A_TILE: Final = 2048
"""Elements of the result for a block, where a row is no longer; a block has four warps."""
NARROW: Final = 2**31
"""Offsets below are computed in 32 bits."""


@dataclass(frozen=True, slots=True)
class RowSpace:
    """The axes of a result after neighbours were joined, and the strides of each operand along them, in elements.

    The last axis is that of the rows. A stride of 0 is that of an operand which is broadcast along the axis.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def columns(self) -> int:
        return self.sizes[-1]

    @property
    def rows(self) -> int:
        count = 1
        for size in self.sizes[:-1]:
            count *= size
        return count

    @property
    def reaches_far(self) -> bool:
        """Whether an offset needs 64 bits."""
        spans = [sum((size - 1) * step for size, step in zip(self.sizes, own, strict=True)) for own in self.strides]
        return max(self.rows * self.columns, *spans) >= NARROW


def join_axes(sizes: Sequence[int], strides: Sequence[Sequence[int]], *, keeps_rows: bool) -> RowSpace:
    """The space with as few axes as possible: two neighbours are one axis if they are one for every operand.

    Args:
        sizes: of the result, of at least one axis.
        strides: of each operand, broadcast to `sizes`; the result itself is contiguous.
        keeps_rows: whether the last axis stays as it is.
    """
    axes = [(size, tuple(own[at] for own in strides)) for at, size in enumerate(sizes)]
    last = [axes.pop()] if keeps_rows else []
    joined: list[tuple[int, tuple[int, ...]]] = []
    for size, steps in axes:
        if size == 1:
            continue
        if joined and all(before == step * size for before, step in zip(joined[-1][1], steps, strict=True)):
            joined[-1] = (joined[-1][0] * size, steps)
        else:
            joined.append((size, steps))
    found = [*joined, *last] or [(1, (0,) * len(strides))]
    return RowSpace(tuple(size for size, _ in found), tuple(zip(*(steps for _, steps in found), strict=True)))


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of the result that a block computes; both are powers of two."""

    rows: int
    columns: int

    @classmethod
    def for_program(cls, program: Program, space: RowSpace) -> Tile:
        """A whole row where an instruction reads more than its element, and several where rows are short."""
        width = _power_of_two(space.columns)
        columns = width if needs_whole_rows(program) else min(width, MOST_IN_A_TILE // 2)
        return cls(max(1, min(_power_of_two(space.rows), MOST_IN_A_TILE // columns)), columns)

    def count_blocks(self, space: RowSpace) -> int:
        """How many blocks compute `space`: a grid of one axis, since CUDA has at most 65,535 along any other one."""
        return -(-space.rows // self.rows) * self.count_across(space)

    def count_across(self, space: RowSpace) -> int:
        """How many blocks compute a row of `space` together, side by side."""
        return -(-space.columns // self.columns)

    @property
    def warps(self) -> int:
        """Groups of 32 threads for a block."""
        return 4 if self.rows * self.columns <= MOST_IN_A_TILE else 8


def _power_of_two(count: int) -> int:
    """The least power of two that is no less than `count`."""
    return 1 << max(count - 1, 0).bit_length()


def write_source(program: Program, space: RowSpace, tile: Tile) -> str:
    """The text of the kernel: a function of a pointer for each operand, and one for the result."""
    inputs = range(len(space.strides))
    lines = [
        f"def row_program({', '.join(f'p{number}' for number in inputs)}, result):",
        *(f"    {line}" for line in _write_body(program, space, tile)),
    ]
    return "\n".join(lines) + "\n"


def _write_body(program: Program, space: RowSpace, tile: Tile) -> Iterator[str]:
    wide = ".to(tl.int64)" if space.reaches_far else ""
    across = tile.count_across(space)
    yield f"block = tl.program_id(0){wide}"
    yield f"rows = block // {across} * {tile.rows} + tl.arange(0, {tile.rows})[:, None]"
    yield f"columns = block % {across} * {tile.columns} + tl.arange(0, {tile.columns})[None, :]"
    yield f"inside = (rows < {space.rows}) & (columns < {space.columns})"
    rest = "rows"
    for axis in reversed(range(len(space.sizes) - 1)):
        yield f"a{axis} = {rest} % {space.sizes[axis]}" if axis else f"a0 = {rest}"
        rest = f"({rest} // {space.sizes[axis]})"
    plain = {operand for part in program if part.name != "rotate" for operand in part.operands}
    for number, strides in enumerate(space.strides):
        if Input(number) in plain:
            yield f"i{number} = {_write_load(number, strides, 'columns', space)}"
    for number, part in enumerate(program):
        if part.name == "rotate":
            yield from _write_rotation(number, part.operands[0], space)
            continue
        yield f"v{number} = {FORMS[part.name].format(*map(_write_operand, part.operands), count=space.columns)}"
    last = f"tl.where(inside, v{len(program) - 1}, 0.0).to(result.dtype.element_ty)"
    yield f"tl.store(result + rows * {space.columns} + columns, {last}, inside)"


def _write_load(number: int, strides: Sequence[int], columns: str, space: RowSpace) -> str:
    """A load as small as the operand is: a column or a row alone where it is broadcast."""
    along_rows = [f"a{axis} * {step}" for axis, step in enumerate(strides[:-1]) if step]
    along_columns = [f"{columns} * {strides[-1]}"] if strides[-1] else []
    offset = " + ".join([*along_rows, *along_columns])
    if not offset:
        return f"tl.load(p{number}).to(tl.float32)"
    within = [f"(rows < {space.rows})"] * bool(along_rows) + [f"(columns < {space.columns})"] * bool(along_columns)
    return f"tl.load(p{number} + {offset}, {' & '.join(within)}, 0.0).to(tl.float32)"


def _write_rotation(number: int, operand: Operand, space: RowSpace) -> Iterator[str]:
    assert isinstance(operand, Input)
    half = space.columns // 2
    yield f"c{number} = tl.where(columns < {half}, columns + {half}, columns - {half})"
    yield f"r{number} = {_write_load(operand.number, space.strides[operand.number], f'c{number}', space)}"
    yield f"v{number} = tl.where(columns < {half}, r{number} * -1.0, r{number})"


def _write_operand(operand: Operand) -> str:
    return (
        str(operand)
        if isinstance(operand, Input | Computed)
        else f"float('{operand}')"
        if operand - operand
        else repr(operand)
    )


SERIES: Final = "(1.0 + {0} * {0} * (-1 / 3 + {0} * {0} * (2 / 15 + {0} * {0} * (-17 / 315 + {0} * {0} * 62 / 2835))))"
"""tanh(x) / x near zero, by its first terms."""

NAN: Final = "propagate_nan=tl.PropagateNan.ALL"

FORMS: Final[Mapping[str, str]] = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "maximum": f"tl.maximum({{}}, {{}}, {NAN})",
    "minimum": f"tl.minimum({{}}, {{}}, {NAN})",
    **{name: f"({{}} {sign} {{}}).to(tl.float32)" for name, sign in COMPARISONS.items()},
    "neg": "{} * -1.0",
    "reciprocal": "1.0 / {}",
    "square": "{0} * {0}",
    **{name: f"tl.{name}({{}})" for name in ("abs", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "erf", "sigmoid")},
    "tanh": f"tl.where(tl.abs({{0}}) < 0.3, {{0}} * {SERIES}, 2.0 * tl.sigmoid(2.0 * {{0}}) - 1.0)",
    **{name: f"{{}}.to(tl.{name}).to(tl.float32)" for name in ROUNDINGS},
    "relu": f"tl.maximum({{}}, 0.0, {NAN})",
    "silu": "{0} * tl.sigmoid({0})",
    "gelu": "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
    "gelu_tanh": "{0} * tl.sigmoid(1.5957691216057308 * ({0} + 0.044715 * {0} * {0} * {0}))",
    "where": "tl.where({} != 0.0, {}, {})",
    "sum": "tl.sum(tl.where(inside, {}, 0.0), 1, keep_dims=True)",
    "mean": "tl.sum(tl.where(inside, {0}, 0.0), 1, keep_dims=True) / {count}",
    "amax": "tl.max(tl.where(inside, {}, float('-inf')), 1, keep_dims=True)",
}  # fmt: skip
"""Instruction → its form in Triton, whose language has no tanh: 2 sigmoid(2x) - 1 is within 1e-7, which is too far away
near zero. Its minus is 0 - x, which has no sign at zero."""
