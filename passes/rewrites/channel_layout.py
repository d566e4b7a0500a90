"""Where the output channels of one product are in a value computed from its output by layout ops alone.

Each axis is a product of factors, as in einops. A factor belongs to positions (batch, sequence, height), whose size may
be unknown, or to channels, whose numbers are known one by one: `channels` is an index array over all channel factors.
So a layout op is done on a few small arrays, and interleaved heads show as a permutation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from passes.rewrites.layout_map import take_axes
from passes.weights.stand_ins import Array

Size = int | str
"""A number, or the name of a size that is not fixed; empty where it has none."""


@dataclass(frozen=True, slots=True)
class AxisFactor:
    """A factor of an axis. `key` identifies it within a layout; a factor that is split passes its key on to its parts.

    `source` is the tensor of sizes, and the index in it, from which a size that is not fixed can be read at run time.
    """

    size: Size
    key: tuple[int, ...]
    is_channel: bool = False
    source: tuple[str, int] | None = None

    def split(self, outer: int) -> tuple[AxisFactor, AxisFactor]:
        """Two factors, the first of size `outer`."""
        assert isinstance(self.size, int)
        return (
            AxisFactor(outer, (*self.key, 0), self.is_channel),
            AxisFactor(self.size // outer, (*self.key, 1), self.is_channel),
        )


Group = tuple[AxisFactor, ...]
"""The factors of one axis, outermost first; none for an axis of size 1."""


@dataclass(frozen=True, slots=True, eq=False)
class ChannelLayout:
    """The axes of a value, in factors.

    `base`: axes of the product's output in the current factorization; the channel axis, `channel_axis`, is left empty.
    `channels` and each array of `params`, with one number for each channel, have one axis for each channel factor.
    """

    axes: tuple[Group, ...]
    base: tuple[Group, ...]
    channel_axis: int
    channels: Array
    params: tuple[Array, ...] = ()

    @classmethod
    def of_product(cls, dims: Sequence[Size], channel_axis: int) -> ChannelLayout:
        """The layout of the product's own output."""
        channel_axis %= len(dims)
        count = dims[channel_axis]
        if not isinstance(count, int):
            raise ValueError("the number of channels is not known")
        factors = [AxisFactor(size or f"?{at}", (at,), at == channel_axis) for at, size in enumerate(dims)]
        axes = tuple(() if factor.size == 1 else (factor,) for factor in factors)
        base = tuple(() if at == channel_axis else axis for at, axis in enumerate(axes))
        return cls(axes, base, channel_axis, np.arange(count).reshape(() if count == 1 else (count,)))

    @property
    def factors(self) -> Group:
        return tuple(factor for axis in self.axes for factor in axis)

    def flat_order(self) -> tuple[Group, ...]:
        """The axes of a product that makes these channels in this order."""
        own = tuple(factor for factor in self.factors if factor.is_channel)
        return tuple(own if at == self.channel_axis else axis for at, axis in enumerate(self.base))

    def is_channel_axis(self, axis: int) -> bool:
        """Whether an axis has all channels, and nothing but channels."""
        return set(self.axes[axis]) == {part for part in self.factors if part.is_channel} and bool(self.axes[axis])

    def with_param(self, param: Array) -> ChannelLayout | None:
        """This layout with a parameter that broadcasts to it; None if the parameter differs between positions."""
        rank = len(self.axes)
        if param.ndim > rank:
            return None
        given = param.reshape((1,) * (rank - param.ndim) + param.shape)
        shape: list[int] = []
        for axis, size in zip(self.axes, given.shape, strict=True):
            own = [int(factor.size) for factor in axis if factor.is_channel]
            if size != 1 and (len(own) != len(axis) or prod(own) != size):
                return None
            shape += own if size != 1 else [1] * len(own)
        spread = np.broadcast_to(given.reshape(shape), self.channels.shape)
        return replace(self, params=(*self.params, spread))

    def transpose(self, perm: Sequence[int]) -> ChannelLayout:
        before = [factor for factor in self.factors if factor.is_channel]
        axes = tuple(self.axes[at] for at in perm)
        after = [factor for axis in axes for factor in axis if factor.is_channel]
        order = [before.index(factor) for factor in after]
        return self._with(axes, lambda array: array.transpose(order))

    def squeeze(self, axes: Sequence[int]) -> ChannelLayout | None:
        """Without the named axes of size 1; without all axes of size 1 if none are named."""
        gone = {at % len(self.axes) for at in axes} or {at for at, axis in enumerate(self.axes) if not axis}
        if any(self.axes[at] for at in gone):
            return None
        return replace(self, axes=tuple(axis for at, axis in enumerate(self.axes) if at not in gone))

    def unsqueeze(self, axes: Sequence[int]) -> ChannelLayout:
        rank = len(self.axes) + len(axes)
        news, rest = {at % rank for at in axes}, iter(self.axes)
        return replace(self, axes=tuple(() if at in news else next(rest) for at in range(rank)))

    def take(self, axis: int, indices: Array) -> ChannelLayout | None:
        """Some of an axis, as Gather takes them; None if the axis has positions, or the indices several axes."""
        axis %= len(self.axes)
        group = self.axes[axis]
        count = prod(int(factor.size) for factor in group if factor.is_channel)
        if not all(factor.is_channel for factor in group) or indices.ndim > 1 or not indices.size:
            return None
        if int(indices.min()) < -count or int(indices.max()) >= count:
            return None
        ahead = [factor for earlier in self.axes[:axis] for factor in earlier if factor.is_channel]
        first, wide = len(ahead), len(group)

        def taken_from(array: Array) -> Array:
            merged = array.reshape(*array.shape[:first], count, *array.shape[first + wide :])
            part = np.take(merged, indices, axis=first)
            return part.squeeze(first) if indices.shape == (1,) else part

        fewer = () if indices.size == 1 else (AxisFactor(indices.size, group[0].key, True),)
        news = () if indices.ndim == 0 else (fewer,)
        return self._with((*self.axes[:axis], *news, *self.axes[axis + 1 :]), taken_from)

    def reshape(self, dims: Sequence[Size], source: str = "") -> ChannelLayout | None:
        """In other axes; None where it is not known which old axes they consist of.

        Args:
            dims: the new sizes; `=3` is that of axis 3, which it keeps.
            source: the tensor of sizes that gives `dims` at run time.
        """
        sizes = [self._resolve_size(size) for size in dims]
        if None in sizes:
            return None
        grouped = _regroup(self.factors, [resolved for resolved in sizes if resolved is not None], source)
        if grouped is None:
            return None
        axes, splits = grouped
        base = tuple(tuple(part for factor in axis for part in _parts_of(factor, splits)) for axis in self.base)
        shape = [int(factor.size) for axis in axes for factor in axis if factor.is_channel]
        return replace(self, base=base)._with(axes, lambda array: array.reshape(shape))

    def _resolve_size(self, size: Size) -> Size | None:
        if not (isinstance(size, str) and size.startswith("=")):
            return size
        group = self.axes[int(size[1:])]
        sizes = [factor.size for factor in group]
        if len(sizes) == 1:
            return sizes[0]
        return prod(int(dim) for dim in sizes) if all(isinstance(dim, int) for dim in sizes) else None

    def _with(self, axes: tuple[Group, ...], change: Callable[[Array], Array]) -> ChannelLayout:
        return replace(
            self, axes=axes, channels=change(self.channels), params=tuple(change(param) for param in self.params)
        )


Splits = Mapping[AxisFactor, Group]


def _parts_of(factor: AxisFactor, splits: Splits) -> Group:
    parts = splits.get(factor)
    return (factor,) if parts is None else tuple(leaf for part in parts for leaf in _parts_of(part, splits))


def _regroup(factors: Group, dims: Sequence[Size], source: str) -> tuple[tuple[Group, ...], Splits] | None:
    """`factors` in groups of the sizes `dims`, and which of them had to be split for that.

    Groups are made from both ends, as far as sizes are known; what is left in the middle is one new axis, or one old.
    """
    splits: dict[AxisFactor, Group] = {}

    def split_factor(factor: AxisFactor, outer: int) -> tuple[AxisFactor, AxisFactor]:
        splits[factor] = parts = factor.split(outer)
        return parts

    def take(sizes: Sequence[Size], *, last: bool) -> list[Group]:
        return list(map(tuple, take_axes(queue, sizes, lambda factor: factor.size, split_factor, last=last)))

    queue = deque(factors)
    front = take(dims, last=False)
    back = take(list(dims[len(front) :])[::-1], last=True)
    rest, left = tuple(queue), range(len(front), len(dims) - len(back))
    middle: list[Group] = []
    if len(left) == 1:
        middle = [rest]
    elif len(left) > 1:
        if len(rest) != 1 or rest[0].is_channel or isinstance(rest[0].size, int):
            return None
        middle = [(_part_at(rest[0], at, dims[at], source),) if dims[at] != 1 else () for at in left]
        splits[rest[0]] = tuple(part for group in middle for part in group)
    elif rest:
        return None
    return (*front, *middle, *reversed(back)), splits


def _part_at(factor: AxisFactor, at: int, size: Size, source: str) -> AxisFactor:
    key = (*factor.key, at)
    return AxisFactor(size or f"?{key}", key, False, (source, at) if source else None)
