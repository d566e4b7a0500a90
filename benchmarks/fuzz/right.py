"""Whether what is accepted is right: our own runtime against onnxruntime, on the same draw."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from passes.context import PassContext
from passes.errors import PassError
from passes.graph.op_facts import RANDOM_OPS
from passes.optimize import draw_feeds
from passes.weights.detached import read_model
from passes.weights.sharing import portable
from pipeline.errors import UsageError
from pipeline.importers import from_onnx
from pipeline.ops import emitter_of
from pipeline.runtime import compile_graph
from pipeline.runtime.tensors import to_numpy


def compare_with_onnxruntime(path: Path, dims: Mapping[str, int], context: PassContext) -> str:
    """`ok` where both run the model and agree; `refused` where one of them does not run it.

    Raises:
        AssertionError: they compute something else.
    """
    model = read_model(path)
    if any(node.op_type in RANDOM_OPS for node in model.proto.graph.node):
        return "refused: it is random"
    feeds = draw_feeds(model, 0)
    try:
        program = compile_graph(from_onnx(path, dims=dims, emitter_of=emitter_of))
        ours = {name: to_numpy(tensor) for name, tensor in program.run(feeds).items()}
    except UsageError as mistake:
        return f"refused: our runtime: {mistake}"
    try:
        theirs = context.proofs.call(run_in_worker, within_s=30.0, model=portable(model, context.spill), feeds=feeds)
    except PassError as error:
        return f"refused: onnxruntime: {error}"
    for name, expected in theirs.items():
        got = ours[name]
        assert got.shape == expected.shape and got.dtype == expected.dtype, (name, got.shape, expected.shape)
        if expected.dtype.kind in "fc":
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(got, expected, err_msg=name)
    return "ok"


def run_in_worker(model, feeds):
    """The outputs of `model` on onnxruntime, by name."""
    found = model.session().run(feeds)
    return {info.name: found[info.name] for info in model.model().graph.output}
