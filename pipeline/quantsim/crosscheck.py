"""The quantized model of another tool against the float model, value by value: where does the error jump?

The models are compared by the names of their values, which tools keep. So this finds what no run alone shows: a bias
that is added twice, or a step with the wrong scale. A small bias hides in the noise of rounding, but not from its own
numbers: rounding errors have nothing to do with them, and what comes twice is in the mean difference once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import NodeProto

from passes.graph.inference import FLOATS, float_tensors
from passes.graph.op_facts import BIAS, BIASED, CONVOLUTIONS
from passes.graph.traversal import reads_of
from passes.suggest import describe_argument
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.argument_checks import NUMBER, Check, a, expects, several
from pipeline.errors import UsageError
from pipeline.quantsim.noise import sqnr_db

Feeds = Mapping[str, np.ndarray]


SAMPLES: Final = "samples, each a mapping of the names of inputs to arrays"


@dataclass(frozen=True, slots=True)
class ComparedValue:
    """A value of the float model that the other model computes too.

    sqnr_db: of the other model's value.
    read_db: the least of the values that it is computed from; infinite where none of them differs.
    constant: what is added here or right after, and is in the difference once, since it is added twice or never.
    """

    tensor: str
    node: str
    op: str
    sqnr_db: float
    read_db: float
    constant: str = ""

    @property
    def own_db(self) -> float:
        """The SQNR that the step has by itself, if its error comes on top of that of its inputs."""
        own = 10 ** (-self.sqnr_db / 10) - 10 ** (-self.read_db / 10)
        return -10 * math.log10(own) if own > 0 else math.inf


@expects(
    model=a(DetachedModel, "a model, as read_model gives"),
    other=a(DetachedModel, "a model, as read_model gives"),
    samples=Check(lambda item: isinstance(item, Iterable) and not isinstance(item, str | bytes | Mapping), SAMPLES),
)
def compare_values(model: DetachedModel, other: DetachedModel, samples: Iterable[Feeds]) -> tuple[ComparedValue, ...]:
    """The float values that both models compute under one name, in the order of `model`.

    A value that the other model has not is passed over: an op that reads it counts as reading what it was made from.

    Args:
        model: the model whose values are compared, such as the float model.
        other: the model that has values of the same names, such as its quantized form.
        samples: name of an input → array, for each sample.

    Raises:
        StepFailed: onnxruntime refuses one of the models.
        UsageError: an argument is of another type.
    """
    nodes = model.proto.graph.node
    made = other.index.producers
    floats = float_tensors(model.proto)
    shared = [name for node in nodes for name in node.output if name in floats and name in made]
    addends = {name: added for name, added in _find_addends(model).items() if name in shared}
    noise, shifts = _sum_noise(model, other, shared, addends, samples)
    worst: dict[str, float] = {}
    found: list[ComparedValue] = []
    for node in nodes:
        read_db = min((worst[name] for name in reads_of(node) if name in worst), default=math.inf)
        for name in node.output:
            worst[name] = read_db
            if name in noise:
                worst[name] = sqnr_db(*noise[name])
                constant = next((shift.constant for shift in shifts.get(name, ()) if shift.is_once()), "")
                found.append(ComparedValue(name, node.name or name, node.op_type, worst[name], read_db, constant))
    return tuple(found)


@expects(values=several(ComparedValue, "what compare_values gives"), expected_db=NUMBER)
def find_jump(values: Sequence[ComparedValue], expected_db: float = 12.0) -> ComparedValue | None:
    """The first value whose step alone has a lower SQNR than quantization explains, or a constant too often or not at
    all; None if there is none.

    Args:
        values: what `compare_values` returns.
        expected_db: what a step of the formats in use has at least. Weights of 4 bits leave a product some 20 dB.
    """
    return next((value for value in values if value.own_db < expected_db or value.constant), None)


@dataclass(slots=True)
class _Shift:
    """The mean difference of a value along the axes of a constant that is added to it.

    axis: of the value, along which a constant of one axis lies; None where broadcasting places it.
    """

    constant: str
    addend: np.ndarray
    axis: int | None
    total: np.ndarray | float = 0.0
    count: int = 0

    def add(self, difference: np.ndarray) -> None:
        """Take the difference on one more sample; one of another shape than the constant is passed over."""
        rank, shape = difference.ndim, list(self.addend.shape)
        lengths = [1] * (rank - len(shape)) + shape
        if self.axis is not None:
            lengths = [shape[0] if place == self.axis else 1 for place in range(rank)]
        if len(lengths) != rank or any(size not in (1, difference.shape[place]) for place, size in enumerate(lengths)):
            return
        others = tuple(place for place, size in enumerate(lengths) if size == 1)
        self.total = self.total + difference.sum(others).ravel()
        self.count += math.prod(difference.shape[place] for place in others)

    def is_once(self) -> bool:
        """Whether the constant is in the difference once, more or less: by as many times the error of that number as
        chance does not bring about."""
        addend = self.addend.ravel().astype(np.float64)
        power = float(addend @ addend)
        if not self.count or not power or addend.size < FEWEST:
            return False
        mean = np.asarray(self.total) / self.count
        if not np.isfinite(mean).all() or not mean.any():
            return False
        times = float(mean @ addend) / power
        rest = mean - times * addend
        error = math.sqrt(float(rest @ rest) / (addend.size - 1) / power)
        explained = times**2 * power / float(mean @ mean)
        is_near = abs(abs(times) - 1) <= min(NEAR, DOUBT * error)
        return is_near and abs(times) >= SURE * error and explained >= EXPLAINED


FEWEST: Final = 8
"""Numbers of a constant. Fewer may lie along a rounding error by chance."""

NEAR: Final = 0.25
"""How far from once a constant may be in the difference, since rounding errors shift its mean too."""

DOUBT: Final = 3.0
"""Standard errors that this may be. In a trained model much that goes wrong has to do with a bias, but seldom once."""

SURE: Final = 6.0
"""Standard errors that the constant itself has to be."""

EXPLAINED: Final = 0.75
"""The part of the square of the mean difference that the constant has to be."""


def _find_addends(model: DetachedModel) -> dict[str, list[_Shift]]:
    """Value → the constants that are added in the step that computes it, or in the next one."""
    graph = model.proto.graph
    stored = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type in FLOATS}
    found: dict[str, list[_Shift]] = {}
    for node in graph.node:
        reads = [read for read in node.input if node.op_type == "Add" and read not in stored]
        for name in _added_constants(node, stored):
            axis = 1 if node.op_type in CONVOLUTIONS else None
            for value in (node.output[0], *reads):
                found.setdefault(value, []).append(_Shift(name, model.array(stored[name]), axis))
    return found


def _added_constants(node: NodeProto, stored: Mapping[str, object]) -> Iterator[str]:
    places = (0, 1) if node.op_type == "Add" else (BIAS,) if node.op_type in BIASED else ()
    yield from (node.input[place] for place in places if place < len(node.input) and node.input[place] in stored)


def _sum_noise(
    model: DetachedModel,
    other: DetachedModel,
    names: Sequence[str],
    addends: Mapping[str, Sequence[_Shift]],
    samples: Iterable[Feeds],
) -> tuple[dict[str, tuple[float, float]], Mapping[str, Sequence[_Shift]]]:
    """The sums of squares of each value, and of the differences; and these differences along the constants `addends`.
    Values of different shape are left out."""
    expected, found = Session.of(model, names), Session.of(other, names)
    sums = dict.fromkeys(names, (0.0, 0.0))
    for feeds in samples:
        if not isinstance(feeds, Mapping):
            raise UsageError(f"compare_values: a sample is {describe_argument(feeds)}; expected {SAMPLES}")
        wanted, computed = expected.run(feeds), found.run(feeds)
        for name in tuple(sums):
            if wanted[name].shape != computed[name].shape:
                del sums[name]
                continue
            signal = wanted[name].astype(np.float64)
            difference = computed[name].astype(np.float64) - signal
            sums[name] = sums[name][0] + float((signal**2).sum()), sums[name][1] + float((difference**2).sum())
            for shift in addends.get(name, ()):
                shift.add(difference)
    return sums, addends
