"""The quantized model of another tool against the float model, value by value: where does the error jump?

The models are compared by the names of their values, which tools keep. So this finds what no run alone shows: a bias
that is added twice, or a step with the wrong scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from passes.graph.traversal import reads_of
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.quantsim.noise import sqnr_db
from pipeline.quantsim.sites import float_tensors

__all__ = ["ComparedValue", "compare_values", "find_jump"]

Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class ComparedValue:
    """A value of the float model that the other model computes too.

    sqnr_db: of the other model's value.
    read_db: the least of the values that it is computed from; infinite where none of them differs.
    """

    tensor: str
    node: str
    op: str
    sqnr_db: float
    read_db: float

    @property
    def own_db(self) -> float:
        """The SQNR that the step has by itself, if its error comes on top of that of its inputs."""
        own = 10 ** (-self.sqnr_db / 10) - 10 ** (-self.read_db / 10)
        return -10 * math.log10(own) if own > 0 else math.inf


def compare_values(model: DetachedModel, other: DetachedModel, samples: Iterable[Feeds]) -> tuple[ComparedValue, ...]:
    """The float values that both models compute under one name, in the order of `model`.

    A value that the other model has not is passed over: who reads it counts as reading what it was computed from.

    Raises:
        StepFailed: onnxruntime refuses one of the models.
    """
    nodes = model.proto.graph.node
    made = {name for node in other.proto.graph.node for name in node.output}
    floats = float_tensors(model.proto)
    shared = [name for node in nodes for name in node.output if name in floats and name in made]
    noise = _sum_noise(model, other, shared, samples)
    worst: dict[str, float] = {}
    found: list[ComparedValue] = []
    for node in nodes:
        read_db = min((worst[name] for name in reads_of(node) if name in worst), default=math.inf)
        for name in node.output:
            worst[name] = read_db
            if name in noise:
                worst[name] = sqnr_db(*noise[name])
                found.append(ComparedValue(name, node.name or name, node.op_type, worst[name], read_db))
    return tuple(found)


def find_jump(values: Sequence[ComparedValue], expected_db: float = 12.0) -> ComparedValue | None:
    """The first value whose step alone has a lower SQNR than quantization explains; None if there is none.

    Args:
        expected_db: what a step of the formats in use has at least. Weights of 4 bits leave a product some 20 dB.
    """
    return next((value for value in values if value.own_db < expected_db), None)


def _sum_noise(
    model: DetachedModel, other: DetachedModel, names: Sequence[str], samples: Iterable[Feeds]
) -> dict[str, tuple[float, float]]:
    """The sums of squares of each value, and of the differences; values of different shape are left out."""
    expected, found = Session.of(model, names), Session.of(other, names)
    sums = dict.fromkeys(names, (0.0, 0.0))
    for feeds in samples:
        wanted, computed = expected.run(feeds), found.run(feeds)
        for name in tuple(sums):
            if wanted[name].shape != computed[name].shape:
                del sums[name]
                continue
            signal = wanted[name].astype(np.float64)
            difference = computed[name].astype(np.float64) - signal
            sums[name] = sums[name][0] + float((signal**2).sum()), sums[name][1] + float((difference**2).sum())
    return sums
