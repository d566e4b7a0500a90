"""`passes.optimize`: the whole pass run on an ONNX model, with that model itself as the reference."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from passes.base import Workbench
from passes.draw import draw_array
from passes.errors import ModelMistake, StepFailed
from passes.isolate import Worker
from passes.order import sort_nodes
from passes.policy import Policy
from passes.prove import Prover, Reference
from passes.recipe import DEFAULT_RECIPE, RecipeItem, steps_of
from passes.result import PassRun
from passes.runner import run_passes
from passes.sessions import Session
from passes.weights import DetachedModel, detach, read_model

__all__ = ["draw_feeds", "optimize", "references_of"]


def optimize(
    model: onnx.ModelProto | str | Path,
    recipe: Sequence[RecipeItem] = DEFAULT_RECIPE,
    skip: Sequence[str] = (),
    keep: Sequence[str] = (),
    *,
    watch: bool = True,
    feeds: Sequence[Mapping[str, np.ndarray]] = (),
    timeout_s: float = 600.0,
) -> PassRun:
    """Run `recipe` over `model` and prove after every change that it computes what it did before.

    Args:
        model: left as it is; a path may have external data beside it.
        feeds: inputs to compare on; two seeded draws when there are none. Named dims are drawn as 2.

    Raises:
        ModelMistake: the model cannot be read or does not run.
        PolicyMistake: an unknown name, or a `keep` that matches nothing.
    """
    if isinstance(model, onnx.ModelProto):
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        sort_nodes(copy.graph)
        detached = detach(copy)
    else:
        detached = read_model(Path(model))
    with Worker(timeout_s) as worker, tempfile.TemporaryDirectory(prefix="onnxline-") as folder:
        prover = Prover(references_of(detached, feeds or [draw_feeds(detached, seed) for seed in range(2)]))
        bench = Workbench(worker, Path(folder))
        return run_passes(detached, steps_of(recipe), Policy(tuple(skip), tuple(keep), watch), prover, bench)


def references_of(model: DetachedModel, feeds: Sequence[Mapping[str, np.ndarray]]) -> list[Reference]:
    """What `model` computes on onnxruntime, graph optimization off.

    Raises:
        ModelMistake: onnxruntime refuses it, or an output is NaN.
    """
    try:
        session = Session(model)
        results = [session.run(feed) for feed in feeds]
    except StepFailed as error:
        raise ModelMistake(f"the model does not run as it is: {error}") from error
    for outputs in results:
        for name, array in outputs.items():
            if array.dtype.kind == "f" and np.isnan(array).any():
                raise ModelMistake(
                    f"output {name!r} of the reference holds NaN, so nothing can be compared with it; "
                    "check the weights and the input ranges"
                )
    return [Reference(feed, outputs, f"draw {i}") for i, (feed, outputs) in enumerate(zip(feeds, results, strict=True))]


def draw_feeds(model: DetachedModel, seed: int) -> dict[str, np.ndarray]:
    """Seeded inputs for every graph input that has no initializer."""
    graph = model.proto.graph
    stored = {tensor.name for tensor in graph.initializer}
    feeds = {}
    for info in graph.input:
        if info.name in stored:
            continue
        tensor = info.type.tensor_type
        shape = [dim.dim_value if dim.HasField("dim_value") else 2 for dim in tensor.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
        low, high = (-1.0, 1.0) if "float" in dtype else (0.0, 2.0)
        feeds[info.name] = draw_array(f"{seed}:{info.name}", shape, dtype, low, high)
    return feeds
