"""For tools that need the weights: the model goes to a file, the worker makes another, and that is read back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import save_model  # bound here: a pass of the user's may patch onnx

from passes.context import PassContext
from passes.errors import StepFailed
from passes.graph.index import GraphIndex, required_inputs
from passes.weights.detached import PROTOBUF_LIMIT, DetachedModel, read_model
from passes.weights.files import save
from passes.worker.client import Worker


def through_files(
    model: DetachedModel,
    context: PassContext,
    function: Callable[..., None],
    options: Mapping[str, Any],
    worker: Worker | None = None,
) -> DetachedModel:
    """Call `function(source=…, target=…, options=…)` in the worker on the attached model, and read what it wrote.

    The model goes inline while one protobuf message can hold it: the tools are slower with external data. The result's
    weights are memory-mapped, and its file stays until the context is cleared away.

    Args:
        worker: the worker that runs `function`; by default the context's worker for libraries.

    Raises:
        StepFailed: weights are to stay unread, or the function raised, crashed or timed out.
    """
    unread = model.unread()
    if unread:
        raise StepFailed(
            f"it takes the whole model with its weights, and {len(unread)} of them are to stay unread "
            f"({model.nbytes() / 2**30:.3g} GiB); leave it out, or prove by numbers"
        )
    folder = Path(tempfile.mkdtemp(dir=context.folder, prefix="step-"))
    source, target = folder / "before.onnx", folder / "after.onnx"
    try:
        save(model, source, external_from=PROTOBUF_LIMIT)
        (worker or context.worker).call(function, source=str(source), target=str(target), options=dict(options))
        return read_model(target, known=model.weights, may_lack_outputs=True)  # of the pins: the runner judges that
    finally:
        for file in folder.glob("*before.onnx*"):
            file.unlink()


def write(model: onnx.ModelProto, target: str) -> None:
    """Write `model` to `target`, with every tensor of 1 KiB or more in a file next to it; `model` is used up.

    Weights always go to that file, not only above protobuf's 2 GiB: a larger message cannot even compute its own size.
    """
    save_model(model, target, save_as_external_data=True, location=f"{Path(target).name}.data", size_threshold=1024)


def give_back_inputs(source: str, model: onnx.ModelProto) -> None:
    """Put back, in order, the inputs that `model` has no more: they belong to the signature of the file `source`.

    Libraries drop inputs that nothing reads; some also drop inputs that are read only inside of an If or a Loop.
    """
    before = onnx.load(source, load_external_data=False).graph
    has = GraphIndex(model.graph).inputs
    inputs = [has.pop(info.name, info) for info in required_inputs(before)]
    inputs += [info for info in model.graph.input if info.name in has]
    restored = onnx.GraphProto(input=inputs)  # a copy, since clearing the field frees them
    del model.graph.input[:]
    model.graph.input.extend(restored.input)
