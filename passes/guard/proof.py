"""The prover of a call: it compares numbers on the caller's inputs, or on drawn ones of the caller's shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import onnx

from passes.context import PassContext
from passes.errors import ModelError, StepFailed
from passes.graph.index import required_inputs
from passes.guard.calls.base import InterceptedCall
from passes.model.canonical import CanonicalGraph
from passes.optimize import FIRST_SIZE, drawn_shape, open_dims, plan_draws
from passes.proof.draws import FURTHER_SIZES, Draw, DrawPlan
from passes.proof.numeric import NumericProver
from passes.structures import Instance
from passes.weights.detached import DetachedModel

MOST_ELEMENTS: Final = 2**24
"""The most elements of one input that is drawn."""


class NotComparable(Exception):  # not an error: structure is still proven
    """The outputs of the model cannot be compared; the message says why."""


class NumbersProver(NumericProver):
    """Watches the model only once, although a call may be tried twice."""

    _has_looked = False

    def watch(self, model: DetachedModel, instances: Sequence[Instance], reading: CanonicalGraph | None = None) -> None:
        if not self._has_looked:
            super().watch(model, instances, reading)
        self._has_looked = True


def numbers_prover(call: InterceptedCall, instances: Sequence[Instance], context: PassContext) -> NumericProver:
    """A prover that compares on the caller's own inputs if there are any, else on drawn ones of the caller's shapes.

    Args:
        instances: what the prover watches.

    Raises:
        NotComparable: no inputs can be drawn, the model does not run on them, or its outputs depend on random numbers
            that cannot be fixed.
    """
    if call.feeds:
        return _watching(call, NumbersProver.of_itself(call.feeds, context), instances)
    return _watching(call, NumbersProver.of_plan(_plan(call), context), instances)


def _watching(call: InterceptedCall, prover: NumericProver, instances: Sequence[Instance]) -> NumericProver:
    try:
        prover.watch(call.model, instances)
        prover.power()
    except (ModelError, StepFailed) as error:
        raise NotComparable(str(error)) from error
    return prover


def _plan(call: InterceptedCall) -> DrawPlan:
    """The draws to try.

    Raises:
        NotComparable: the inputs of the first draws are too large, or cannot be drawn.
    """
    inputs = _inputs(call)
    sizes = [dict.fromkeys(open_dims(inputs), size) for size in (FIRST_SIZE, FIRST_SIZE + 1, *FURTHER_SIZES)]
    elements = [math.prod(drawn_shape(info, drawn)) for drawn in sizes for info in inputs.graph.input]
    if max(elements, default=0) > MOST_ELEMENTS:
        raise NotComparable(f"its inputs are too large to draw, with open dims of {FIRST_SIZE}")
    try:
        plan = plan_draws(call.model, inputs=inputs)
        plan.feeds(Draw(0, plan.needed[0]))
    except Exception as error:  # an input that is no tensor, or has a dtype without numbers
        raise NotComparable(f"no inputs can be drawn for it ({type(error).__name__}: {error})") from error
    return plan


def _inputs(call: InterceptedCall) -> onnx.ModelProto:
    """The model's inputs alone, with the dims that the caller gave."""
    graph, proto = call.model.proto.graph, onnx.ModelProto()
    proto.graph.input.extend(required_inputs(graph))
    for info in proto.graph.input:
        dims = info.type.tensor_type.shape.dim
        shape = call.shapes.get(info.name, ())
        for dim, size in zip(dims, shape if len(shape) == len(dims) else (), strict=False):
            if isinstance(size, int | np.integer) and size > 0:
                dim.dim_value = int(size)
    return proto
