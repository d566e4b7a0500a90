"""A sequence whose tensors have constant places, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pipeline.errors import SourceMistake, Unsupported
from pipeline.importers.from_onnx.attributes import Attributes
from pipeline.ir.spec import TensorSpec

__all__ = ["Pieces", "split_pieces"]


MOST_PIECES = 2**16
"""Tensors of one sequence."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The tensors of a sequence: what Split makes of them, and what is read at each place."""

    axis: int
    sizes: tuple[int, ...]
    parts: tuple[TensorSpec, ...]
    """Specs as Split makes them."""
    items: tuple[TensorSpec, ...]
    """Specs as SequenceAt reads them: without the axis if keepdims is 0."""
    names: dict[int, str] = field(default_factory=dict)
    """Place → the output of the first SequenceAt that reads it."""

    def pick(self, index: int, name: str) -> TensorSpec:
        """Note that `name` is the tensor at `index`, and say what it is."""
        if not -len(self.items) <= index < len(self.items):
            raise SourceMistake(f"{name!r} is read from place {index} of a sequence of {len(self.items)} tensors")
        place = range(len(self.items))[index]
        self.names.setdefault(place, name)
        return self.items[place]


def split_pieces(attributes: Attributes, spec: TensorSpec, split: np.ndarray | None) -> Pieces:
    """What SplitToSequence makes of a tensor of `spec`; `split` is its second input: one size, all sizes, or None."""
    axis = attributes.integer("axis")
    if not -spec.rank <= axis < spec.rank:
        raise SourceMistake(f"SplitToSequence has the axis {axis}, and what it splits has {spec.rank}")
    axis %= spec.rank
    total = spec.sizes[axis]
    step = 1 if split is None else int(split.item()) if not split.ndim else total
    if (split is not None and (split < 0).any()) or not step and total:
        raise SourceMistake(f"SplitToSequence splits {total} into pieces of {split}; expected sizes of 1 and more")
    if total > MOST_PIECES * step:
        raise Unsupported(f"SplitToSequence makes {total // step:,} tensors; expected {MOST_PIECES:,} at most")
    if split is None:
        sizes = (1,) * total
    elif split.ndim:
        sizes = tuple(int(size) for size in split)
        if sum(sizes) != total:
            raise SourceMistake(f"SplitToSequence splits {total} into {list(sizes)}, which are {sum(sizes)}")
    else:
        sizes = tuple(min(step, total - start) for start in range(0, total, step))
    parts = tuple(TensorSpec((*spec.shape[:axis], size, *spec.shape[axis + 1 :]), spec.dtype) for size in sizes)
    items = parts
    if split is None and not attributes.flag("keepdims", True):
        items = tuple(TensorSpec((*spec.shape[:axis], *spec.shape[axis + 1 :]), spec.dtype) for _ in sizes)
    return Pieces(axis, sizes, parts, items)
