"""For tools that need the weights: write the attached model to a file, let the worker make another, read it back."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from passes.context import PassContext
from passes.errors import StepFailed
from passes.model.files import save
from passes.model.weights import PROTOBUF_LIMIT, DetachedModel, read_model

__all__ = ["through_files"]


def through_files(model: DetachedModel, bench: PassContext, function: str, options: Mapping[str, Any]) -> DetachedModel:
    """Call `function(source=…, target=…, options=…)` in the worker on the attached model, and read what it wrote.

    The model goes inline while one protobuf message can hold it: the tools are slower with external data. The result's
    weights are memory-mapped, and its file stays until the bench is cleared away.

    Raises:
        StepFailed: weights are to stay unread, or the function raised, crashed or timed out.
    """
    unread = model.unread()
    if unread:
        raise StepFailed(
            f"it takes the whole model with its weights, and {len(unread)} of them are to stay unread "
            f"({model.nbytes() / 2**30:.3g} GiB); leave it out, or prove by numbers"
        )
    folder = Path(tempfile.mkdtemp(dir=bench.folder, prefix="step-"))
    source, target = folder / "before.onnx", folder / "after.onnx"
    try:
        save(model, source, external_from=PROTOBUF_LIMIT)
        bench.worker.call(function, source=str(source), target=str(target), options=dict(options))
        return read_model(target, known=model.weights, may_lack_outputs=True)  # of the pins: the runner judges that
    finally:
        for file in folder.glob("*before.onnx*"):
            file.unlink()
