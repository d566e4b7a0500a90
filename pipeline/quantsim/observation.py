"""Run a model on samples, and see what its tensors hold: their least and greatest elements, or all elements.

Activations are freed as they are read. The extremes of a tensor are computed by nodes of the model itself, directly
after the node that makes the tensor. Tensors whose elements are all wanted are computed in portions of bounded size,
each by a session over the nodes that it needs.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

import numpy as np
from onnx import NodeProto, helper

from passes.errors import StepFailed
from passes.graph.index import keep_outputs, replace_entries
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.config import KEYS
from pipeline.errors import UsageError
from pipeline.quantsim.encodings import Range

Feeds = Mapping[str, np.ndarray]

MOST_BYTES: Final = 2**29
"""The nodes before a portion are run once more for each portion, which takes less time than to count the elements of
half a gigabyte."""

EMPTY: Final[Range] = (np.inf, -np.inf)
"""The extremes of a tensor without elements."""


class TensorObserver:
    """Computes what `tensors` hold on a sample.

    Args:
        model: to run.
        tensors: inputs of the model, and float values that its nodes make.
        most_bytes: the size of a portion of `walk`, unless one tensor alone is larger.
        data: what messages call the option of the samples.
    """

    def __init__(
        self, model: DetachedModel, tensors: Sequence[str], most_bytes: int = MOST_BYTES, data: str = KEYS.data
    ) -> None:
        self._model, self._most_bytes, self._data = model, most_bytes, data
        self._given = [name for name in tensors if name in model.index.inputs]
        self._computed = [name for name in tensors if name not in model.index.inputs]
        self._portions: list[tuple[Sequence[str], Session | None]] = []

    def find_extremes(self, sample: Feeds, number: int) -> dict[str, Range]:
        """{tensor: its least and greatest element}, which are NaN if one element is, and `EMPTY` without elements.

        Args:
            sample: input → array.
            number: how an error calls the sample.

        Raises:
            UsageError: the model does not run on the sample.
        """
        found = self._run(self._reductions, sample, number)
        ends = {name: [found[f"{name}/{operator}"] for operator in REDUCTIONS] for name in self._computed}
        ends |= {name: [np.asarray(sample[name])] * 3 for name in self._given}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of NaN
            return {name: _extremes(*arrays) for name, arrays in ends.items()}

    def walk(self, sample: Feeds, number: int) -> Iterator[tuple[str, np.ndarray]]:
        """Each tensor with its elements, of which one portion is held at a time.

        Arguments and errors are those of `find_extremes`.
        """
        if not self._portions:
            found = self._run(_open(reduce_values(self._model, self._computed, [SIZE])), sample, number)
            sizes = {name: int(found[f"{name}/{SIZE}"]) * np.dtype(np.float32).itemsize for name in self._computed}
            self._portions = [(names, self._session(names)) for names in divide_by_size(sizes, self._most_bytes)]
        yield from ((name, np.asarray(sample[name])) for name in self._given)
        for names, session in self._portions:
            found = self._run(session, sample, number)
            yield from ((name, found.pop(name)) for name in names)

    @cached_property
    def _reductions(self) -> Session | None:
        return _open(reduce_values(self._model, self._computed, REDUCTIONS))

    def _session(self, names: Sequence[str]) -> Session | None:
        proto = self._model.copy_proto()
        keep_outputs(proto.graph, names)
        return _open(self._model.with_proto(proto))

    def _run(self, session: Session | None, sample: Feeds, number: int) -> dict[str, np.ndarray]:
        try:
            return session.run(sample) if session is not None else {}
        except StepFailed as error:
            shapes = ", ".join(f"{name}: {list(array.shape)}" for name, array in sample.items())
            raise UsageError(
                f"calibration: the model does not run on sample {number} ({shapes}): {error}; give samples of other "
                f"sizes ({self._data})"
            ) from error


def _extremes(low: np.ndarray, high: np.ndarray, total: np.ndarray) -> Range:
    if not low.size:
        return EMPTY
    return (np.nan, np.nan) if np.isnan(total).any() else (float(low.min()), float(high.max()))


def divide_by_size(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """The keys of `sizes`, in order, in portions whose sizes are at most `most` in sum, or that are one larger key."""
    portion, size = list[str](), 0
    for name, own in sizes.items():
        if portion and size + own > most:
            yield portion
            portion, size = [], 0
        portion.append(name)
        size += own
    if portion:
        yield portion


def reduce_values(model: DetachedModel, names: Collection[str], operators: Sequence[str]) -> DetachedModel:
    """`model` with the outputs `NAME/OPERATOR` alone, each computed directly after the value of that name.

    Args:
        model: whose nodes make the values.
        names: float values of its main graph.
        operators: of ONNX, with one input, such as ReduceMin.
    """
    proto = model.copy_proto()
    nodes: list[NodeProto] = []
    for node in model.proto.graph.node:
        nodes.append(node)
        for name in (name for name in node.output if name in names):
            nodes += [helper.make_node(operator, [name], [f"{name}/{operator}"]) for operator in operators]
    replace_entries(proto.graph.node, nodes)
    keep_outputs(proto.graph, (f"{name}/{operator}" for name in names for operator in operators))
    return model.with_proto(proto)


REDUCTIONS: Final = ("ReduceMin", "ReduceMax", "ReduceL1")
"""The last is NaN where an element is, which onnxruntime's least and greatest element pass over."""

SIZE: Final = "Size"


def _open(model: DetachedModel) -> Session | None:
    """None for a model without outputs, which onnxruntime refuses."""
    try:
        return Session.of(model, in_order=True) if model.proto.graph.output else None
    except StepFailed as failure:
        raise UsageError(f"calibration: {failure}") from failure
