"""Where layout operators put the elements of a value, and the fewest operators that put them there.

The axes of a value are cut into **atoms**: the parts of which a Reshape joins or splits axes. Transpose, Reshape,
Squeeze, Unsqueeze, Flatten and Expand only reorder atoms, group them into axes, or repeat elements along new atoms. So
a chain of them, however long, is a list of groups of atoms, which two Reshapes, a Transpose and an Expand always make.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from passes.rewrites.graph_values import Dim

Atom = TypeVar("Atom", bound=Hashable)

Group = list[int]
"""The atoms of one axis, outermost first; none for an axis of size 1."""


@dataclass(frozen=True, slots=True)
class LayoutCall:
    """One operator to write: Reshape or Expand to a `shape`, where 0 and -1 mean what they mean in a Reshape; or a
    Transpose by `perm`."""

    op: str
    shape: tuple[int, ...] = ()
    perm: tuple[int, ...] = ()
    sizes: tuple[Dim, ...] = ()
    """The shape of the result."""


class NoLayout(Exception):
    """A chain that is not followed: a size is not known, or a Reshape cuts across the atoms."""


@dataclass(slots=True)
class LayoutMap:
    """The layout of a value that was a source of a known rank: `groups` has an entry for each of its axes.

    `source` has the atoms of the source's axes; `sizes` the size of each atom, where a symbolic size is a name of its
    own for each axis; `repeated` are the atoms along which elements are repeated.
    """

    source: list[Group]
    groups: list[Group]
    sizes: dict[int, int | str]
    repeated: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, shape: Sequence[Dim]) -> LayoutMap:
        """The layout of the source itself.

        Raises:
            NoLayout: it has no elements.
        """
        if 0 in shape:
            raise NoLayout
        sizes = {axis: dim if isinstance(dim, int) else f"{dim or ''}@{axis}" for axis, dim in enumerate(shape)}
        groups = [[] if size == 1 else [axis] for axis, size in sizes.items()]
        return cls([list(group) for group in groups], groups, sizes)

    def transpose(self, perm: Sequence[int]) -> None:
        self.groups = [self.groups[axis] for axis in perm]

    def squeeze(self, axes: Sequence[int] | None) -> None:
        """Take axes of size 1 away; all of them if `axes` is None.

        Raises:
            NoLayout: it is not known whether an axis has that size.
        """
        if axes is None:
            if not all(isinstance(self._size(group), int) for group in self.groups):
                raise NoLayout
            axes = [axis for axis, group in enumerate(self.groups) if not group]
        chosen = {axis % len(self.groups) for axis in axes}
        if any(self.groups[axis] for axis in chosen):
            raise NoLayout
        self.groups = [group for axis, group in enumerate(self.groups) if axis not in chosen]

    def unsqueeze(self, axes: Sequence[int]) -> None:
        rank = len(self.groups) + len(axes)
        chosen, rest = {axis % rank for axis in axes}, iter(self.groups)
        self.groups = [[] if axis in chosen else next(rest) for axis in range(rank)]

    def flatten(self, axis: int) -> None:
        axis = axis + len(self.groups) if axis < 0 else axis
        parts = self.groups[:axis], self.groups[axis:]
        self.groups = [[atom for group in part for atom in group] for part in parts]

    def expand(self, shape: Sequence[int]) -> None:
        """Repeat along axes of size 1.

        Raises:
            NoLayout: a symbolic size meets a size that is not 1.
        """
        while len(self.groups) < len(shape):
            self.groups.insert(0, [])
        for axis, size in enumerate(shape, start=len(self.groups) - len(shape)):
            if size == 1 or (self.groups[axis] and self._size(self.groups[axis]) == size):
                continue
            if self.groups[axis] or size < 1:
                raise NoLayout
            atom = len(self.sizes)
            self.sizes[atom] = size
            self.repeated.add(atom)
            self.groups[axis] = [atom]

    def tile(self, repeats: Sequence[int]) -> None:
        """Repeat along axes of size 1.

        Raises:
            NoLayout: an axis of another size is repeated.
        """
        if any(repeat != 1 and group for repeat, group in zip(repeats, self.groups, strict=True)):
            raise NoLayout
        self.expand(repeats)

    def reshape(self, shape: Sequence[int]) -> None:
        """Group the atoms anew; 0 leaves an axis as it is, and -1 takes what is left.

        Raises:
            NoLayout: the new axes cut across the atoms.
        """
        kept = [axis for axis, size in enumerate(shape) if size == 0]
        if any(axis >= len(self.groups) for axis in kept) or shape.count(-1) > 1:
            raise NoLayout
        wanted: list[int | Group] = [size or list(self.groups[axis]) for axis, size in enumerate(shape)]
        order, at = deque(atom for group in self.groups for atom in group), [*shape, -1].index(-1)
        head = take_axes(order, wanted[:at], self.sizes.__getitem__, self._cut_atom, last=False)
        tail = take_axes(order, wanted[:at:-1], self.sizes.__getitem__, self._cut_atom, last=True)
        middle = [list(order)] if at < len(shape) else []
        if len(head) + len(middle) + len(tail) < len(shape) or (order and not middle):
            raise NoLayout
        self.groups = [*head, *middle, *reversed(tail)]

    def _cut_atom(self, atom: int, size: int) -> tuple[int, int]:
        """Cut an atom in two, everywhere, so that the first has this size."""
        whole, inner = self.sizes[atom], len(self.sizes)
        assert isinstance(whole, int)
        self.sizes[atom], self.sizes[inner] = size, whole // size
        self.repeated.update({inner} if atom in self.repeated else ())
        for group in (*self.source, *self.groups):
            if atom in group:
                group.insert(group.index(atom) + 1, inner)
        return atom, inner

    def _size(self, group: Sequence[int]) -> Dim:
        """The size of an axis; a symbolic one has its name, and the product of one with others none."""
        size = 1
        for atom in group:
            factor = self.sizes[atom]
            if isinstance(factor, str):
                return factor if len(group) == 1 else None
            size *= factor
        return size

    def _dim(self, group: Sequence[int]) -> Dim:
        """The size of an axis, for the type of a value: a symbolic one has the name that it has in the source."""
        size = self._size(group)
        return size.rpartition("@")[0] or None if isinstance(size, str) else size

    def shortest(self) -> list[LayoutCall]:
        """The fewest operators that make this layout of the source.

        Raises:
            NoLayout: a Reshape would need two sizes that are not known.
        """
        if not self.repeated:
            return self._without_repeats(self.groups)
        cut = list(self._cut_at_repeats())
        base = [[] if set(group) & self.repeated else group for group in cut]
        calls = self._without_repeats(base)
        sizes = tuple(self._size(group) for group in cut)
        target = tuple(size if set(group) & self.repeated else 1 for size, group in zip(sizes, cut, strict=True))
        shape = tuple(size for size in target if isinstance(size, int))
        calls = [*calls, LayoutCall("Expand", shape, sizes=tuple(map(self._dim, cut)))]
        return calls if cut == self.groups else [*calls, self._reshape(cut, self.groups)]

    def _cut_at_repeats(self) -> Iterator[Group]:
        """The axes of the result, each cut so that an axis has repeated atoms alone or none."""
        for group in self.groups:
            run: Group = []
            for atom in group:
                if run and (run[-1] in self.repeated) != (atom in self.repeated):
                    yield run
                    run = []
                run = [*run, atom]
            yield run

    def _without_repeats(self, groups: Sequence[Group]) -> list[LayoutCall]:
        calls, current = list[LayoutCall](), self.source
        for step in layout_steps(self.source, groups):
            if step.perm:
                calls.append(LayoutCall("Transpose", perm=step.perm, sizes=tuple(map(self._dim, step.groups))))
            else:
                calls.append(self._reshape(current, step.groups))
            current = step.groups
        return calls

    def _reshape(self, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> LayoutCall:
        sizes = tuple(self._size(group) for group in after)
        shape: list[int] = []
        for axis, (group, size) in enumerate(zip(after, sizes, strict=True)):
            if isinstance(size, int):
                shape.append(size)
            elif axis < len(before) and list(before[axis]) == list(group):
                shape.append(0)
            elif -1 not in shape:
                shape.append(-1)
            else:
                raise NoLayout
        return LayoutCall("Reshape", tuple(shape), sizes=tuple(map(self._dim, after)))


def take_axes(
    order: deque[Atom],
    wanted: Sequence[int | str | list[Atom]],
    size_of: Callable[[Atom], int | str],
    split: Callable[[Atom, int], tuple[Atom, Atom]],
    *,
    last: bool,
) -> list[list[Atom]]:
    """Take the atoms of new axes off an end of `order`, axis by axis, as far as sizes tell.

    Args:
        order: the atoms.
        wanted: of the axes, that at the end first: its size, the name of its size, or its very atoms.
        size_of: gives the size of an atom, or the name of its size.
        split: splits an atom into two parts, the first of the given size.
        last: whether atoms are taken from the right.

    Returns:
        The atoms of the axes up to the first that does not fit.
    """
    take, put, place = (order.pop, order.append, -1) if last else (order.popleft, order.appendleft, 0)
    axes: list[list[Atom]] = []
    for want in wanted:
        before, taken = list(order), list[Atom]()
        if isinstance(want, int):
            while want != 1 and order and isinstance(size := size_of(order[place]), int):
                if not size or (want % size and size % want):
                    break
                atom = take()
                if want % size:
                    parts = split(atom, size // want if last else want)
                    put(parts[1 + place])
                    atom, size = parts[place], want
                taken.append(atom)
                want //= size
            fits = want == 1
        elif isinstance(want, str):
            taken.extend(take() for _ in before[:1])
            fits = [size_of(atom) for atom in taken] == [want]
        else:
            taken.extend(take() for _ in before[: len(want)])
            fits = taken[:: -1 if last else 1] == want
        if not fits:
            order.clear()
            order.extend(before)
            break
        axes.append(taken[:: -1 if last else 1])
    return axes


@dataclass(frozen=True, slots=True)
class LayoutStep(Generic[Atom]):
    """A Transpose by `perm`, or without it a Reshape, to `groups`."""

    groups: list[Sequence[Atom]]
    perm: tuple[int, ...] = ()


def layout_steps(before: Sequence[Sequence[Atom]], after: Sequence[Sequence[Atom]]) -> list[LayoutStep[Atom]]:
    """The fewest steps from axes `before` to axes `after`, which have the same atoms: at most a Reshape, a Transpose
    and a Reshape."""
    olds, news = ([atom for axis in axes for atom in axis] for axes in (before, after))
    if olds == news:
        return [] if _as_tuples(before) == _as_tuples(after) else [LayoutStep(list(after))]
    place, new_place = ({atom: at for at, atom in enumerate(order)} for order in (olds, news))
    if len(before) == len(after) and set(_as_tuples(before)) == set(_as_tuples(after)):
        return [_turn(before, after)]
    if _is_cut_at(after, place):
        first = _with_ones(sorted(filter(None, after), key=lambda axis: place[axis[0]]), after)
        return [LayoutStep(first), _turn(first, after)]
    if _is_cut_at(before, new_place):
        turned = _with_ones(sorted(filter(None, before), key=lambda axis: new_place[axis[0]]), before)
        return [_turn(before, turned), LayoutStep(list(after))]
    blocks: list[list[Atom]] = []
    """The atoms in their new order, where atoms that stay neighbours are one block."""
    for atom in news:
        if blocks and place[blocks[-1][-1]] + 1 == place[atom]:
            blocks[-1].append(atom)
        else:
            blocks.append([atom])
    stored = sorted(blocks, key=lambda block: place[block[0]])
    steps = [LayoutStep(list(stored)), _turn(stored, blocks)]
    return steps if _as_tuples(blocks) == _as_tuples(after) else [*steps, LayoutStep(list(after))]


def _as_tuples(axes: Sequence[Sequence[Atom]]) -> list[tuple[Atom, ...]]:
    return list(map(tuple, axes))


def _is_cut_at(axes: Sequence[Sequence[Atom]], places: Mapping[Atom, int]) -> bool:
    """Whether the atoms of each axis are neighbours, in order, in another arrangement."""
    return all(places[atom] == places[axis[0]] + at for axis in axes if axis for at, atom in enumerate(axis))


def _with_ones(axes: Sequence[Sequence[Atom]], like: Sequence[Sequence[Atom]]) -> list[Sequence[Atom]]:
    """`axes` with the axes of size 1 that `like` has, at the same places."""
    rest = iter(axes)
    return [next(rest) if axis else axis for axis in like]


def _turn(before: Sequence[Sequence[Atom]], after: Sequence[Sequence[Atom]]) -> LayoutStep[Atom]:
    left = dict(enumerate(_as_tuples(before)))
    perm = [next(at for at in left if left[at] == axis and left.pop(at) == axis) for axis in _as_tuples(after)]
    return LayoutStep(list(after), tuple(perm))
