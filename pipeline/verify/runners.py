"""One protocol for everything that can run a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from passes.load import seconds_to_run
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.export.arrays import to_numpy
from pipeline.importers import from_onnx
from pipeline.lowering import EMITTERS
from pipeline.runtime import compile_graph

__all__ = ["Feeds", "Runner", "onnxruntime_runner", "plan_runner"]

Feeds = Mapping[str, np.ndarray]


class Runner(Protocol):
    """Feeds by input name → outputs by output name."""

    def __call__(self, feeds: Feeds) -> dict[str, np.ndarray]: ...


def onnxruntime_runner(model: DetachedModel, extra_outputs: Sequence[str] = ()) -> Runner:
    """onnxruntime on the CPU, graph optimization off, for as long as weights and inputs explain.

    Raises:
        StepFailed: onnxruntime refuses the model; the runner raises it where a run fails, or takes longer.
    """
    session, weights = Session.of(model, extra_outputs), model.nbytes()

    def run(feeds: Feeds) -> dict[str, np.ndarray]:
        return session.run(feeds, within_s=seconds_to_run(weights + sum(array.nbytes for array in feeds.values())))

    return run


def plan_runner(path: Path, shapes: Mapping[str, Sequence[int]], trainable: frozenset[str]) -> Runner:
    """Our own runtime: the ONNX file imported for inputs of these shapes, lowered, planned and bound.

    Raises:
        Unsupported: an operator that cannot be imported or has no emitter; all are listed.
    """
    program = compile_graph(from_onnx(path, shapes=shapes, emitters=EMITTERS, trainable=trainable))
    return lambda feeds: {name: to_numpy(tensor) for name, tensor in program.run(feeds).items()}
