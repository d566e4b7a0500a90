"""The layout of a value in its storage, strides and an offset, and how views change it.

Everything is counted in elements, from the first element of the storage. The rules are torch's, without torch: a view
gets exactly the strides that torch would give it (tests compare them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.ir.graph import TensorSpec, Value


@dataclass(frozen=True, slots=True)
class Layout:
    """Element `(i, j, …)` is element `offset + i * strides[0] + j * strides[1] + …` of the storage.

    A stride of 0 repeats elements (an expanded axis); there are no negative strides, as torch has none.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def contiguous(cls, sizes: Sequence[int]) -> Layout:
        """Row-major from the first element: the layout of a value that owns its storage."""
        return cls(tuple(sizes), _dense(sizes))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_contiguous(self) -> bool:
        """Whether it is row-major from any offset; strides of axes of size 1, and of an empty value, do not matter."""
        pairs = zip(self.sizes, self.strides, _dense(self.sizes), strict=True)
        return not self.numel or all(size == 1 or own == dense for size, own, dense in pairs)

    @property
    def is_distinct(self) -> bool:
        """Whether no two elements share a place: every stride is beyond the reach of all smaller ones."""
        reach = 0
        for stride, size in sorted(zip(self.strides, self.sizes, strict=True)):
            if size > 1 and stride <= reach:
                return not self.numel
            reach += stride * (size - 1)
        return True

    def permute(self, perm: Sequence[int]) -> Layout:
        """Axis `at` of the result is axis `perm[at]`."""
        return replace(
            self, sizes=tuple(self.sizes[axis] for axis in perm), strides=tuple(self.strides[axis] for axis in perm)
        )

    def slice_axis(self, axis: int, start: int, count: int, step: int = 1) -> Layout:
        """`count` positions of an axis, beginning at `start`, every `step`-th; `step` is positive, all are in range."""
        stride = self.strides[axis]
        return self._with_axis(axis, count, stride * step, self.offset + start * stride)

    def select(self, axis: int, index: int) -> Layout:
        """One position of an axis, which goes away."""
        return self.slice_axis(axis, index, 1).squeeze(axis)

    def squeeze(self, *axes: int) -> Layout:
        """Without these axes, each of size 1."""
        kept = [axis for axis in range(len(self.sizes)) if axis not in axes]
        return self.permute(kept)

    def expand(self, sizes: Sequence[int]) -> Layout:
        """Broadcast to `sizes`: new axes in front, and axes of size 1 repeated by a stride of 0."""
        new = len(sizes) - len(self.sizes)
        old = zip(self.sizes, self.strides, sizes[new:], strict=True)
        strides = [0 if size == 1 != wanted else stride for size, stride, wanted in old]
        # Torch gives a new axis of size 1 the stride that unsqueezing would, and any other a stride of 0.
        for size in reversed(sizes[:new]):
            strides.insert(0, sizes[-len(strides)] * strides[0] if strides and size == 1 else 0)
        return replace(self, sizes=tuple(sizes), strides=tuple(strides))

    def diagonal(self, distance: int, first: int, second: int) -> Layout:
        """The diagonal of two axes, `distance` right of the main one (below it if negative), as a new last axis."""
        down, right = max(-distance, 0), max(distance, 0)
        count = max(min(self.sizes[first] - down, self.sizes[second] - right), 0)
        step = self.strides[first] + self.strides[second]
        offset = self.offset + (down * self.strides[first] + right * self.strides[second] if count else 0)
        rest = self.squeeze(first, second)
        return Layout((*rest.sizes, count), (*rest.strides, step), offset)

    def unfold(self, axis: int, size: int, step: int) -> Layout:
        """Windows of `size` positions of an axis, every `step`; the positions in a window are a new last axis."""
        stride = self.strides[axis]
        windows = self._with_axis(axis, (self.sizes[axis] - size) // step + 1, stride * step, self.offset)
        return replace(windows, sizes=(*windows.sizes, size), strides=(*windows.strides, stride))

    def reshape(self, sizes: Sequence[int]) -> Layout | None:
        """The same elements in the same order under other sizes; None where no strides can say that.

        Neighbouring axes whose outer stride is the inner stride times the inner size are one run of elements. The axes
        of the result have to split each run exactly. From torch's computeStride.
        """
        if not self.numel or not self.sizes:
            return self if tuple(sizes) == self.sizes else replace(self, sizes=tuple(sizes), strides=_dense(sizes))
        strides: list[int] = []  # of the result, the last axis first
        for count, stride in self._runs():
            inner = 1
            while len(strides) < len(sizes) and (inner < count or sizes[-1 - len(strides)] == 1):
                strides.append(inner * stride)
                inner *= sizes[-len(strides)]
            if inner != count:
                return None
        return replace(self, sizes=tuple(sizes), strides=tuple(reversed(strides)))

    def _runs(self) -> list[tuple[int, int]]:
        """(elements, stride) of each maximal run of axes (see `reshape`), the last run first."""
        runs: list[tuple[int, int]] = []
        count, base = 1, self.strides[-1]
        for axis in reversed(range(len(self.sizes))):
            count *= self.sizes[axis]
            outer = axis - 1
            if axis == 0 or (self.sizes[outer] != 1 and self.strides[outer] != count * base):
                runs.append((count, base))
                count, base = 1, self.strides[outer]
        return runs

    def _with_axis(self, axis: int, size: int, stride: int, offset: int) -> Layout:
        axis %= len(self.sizes)
        return Layout(
            (*self.sizes[:axis], size, *self.sizes[axis + 1 :]),
            (*self.strides[:axis], stride, *self.strides[axis + 1 :]),
            offset,
        )


ViewRule = Callable[[Mapping[str, Any], Layout, Sequence[TensorSpec]], tuple[Layout, ...] | None]
"""(unpacked attrs, layout of input 0, output specs) -> the layout of every output as a view of input 0's storage, or
None where strides cannot say it, and the kernel has to copy."""


def first_layout(value: Value) -> Layout:
    """The layout of `value` if it owns its storage.

    Computed values are contiguous. Inputs and stored values keep their traced strides, since operators depend on them
    (a convolution on channels_last, a `view`), unless elements shared a place in the trace: an expanded input may hold
    different elements at each of them in a run, so it is contiguous.
    """
    sizes, strides = value.spec.sizes, traced_strides(value)
    traced = None if strides is None else Layout(sizes, strides)
    return traced if traced is not None and traced.is_distinct else Layout.contiguous(sizes)


def traced_strides(value: Value) -> tuple[int, ...] | None:
    """The traced strides of an input or stored value, in elements; None where it was contiguous or they are unknown."""
    if value.producer is not None or value.strides is None:
        return None
    strides = tuple(stride for stride in value.strides if isinstance(stride, int))
    return strides if len(strides) == value.spec.rank else None


def _dense(sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides; an axis of size 0 counts as 1, as in torch."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= max(size, 1)
    return tuple(strides)
