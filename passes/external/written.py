"""In the worker: write what a library returned, so that the other side can map its weights from a file."""

from __future__ import annotations

from pathlib import Path

import onnx

__all__ = ["give_back_inputs", "write"]


def write(model: onnx.ModelProto, target: str) -> None:
    """Write `model` to `target`, with every tensor of 1 KiB or more in a file beside it; `model` is used up.

    Always so, and not only above protobuf's 2 GiB: past those a message cannot even tell its own size.
    """
    onnx.save(model, target, save_as_external_data=True, location=f"{Path(target).name}.data", size_threshold=1024)


def give_back_inputs(source: str, model: onnx.ModelProto) -> None:
    """Put back, in order, the inputs that `model` has no more: they belong to the signature of the file `source`.

    Libraries drop inputs that nothing reads; some also those that are read only inside of an If or a Loop.
    """
    before = onnx.load(source, load_external_data=False).graph
    stored = {tensor.name for tensor in before.initializer}
    has = {info.name: info for info in model.graph.input}
    inputs = [has.pop(info.name, info) for info in before.input if info.name not in stored]
    inputs += [info for info in model.graph.input if info.name in has]
    restored = onnx.GraphProto(input=inputs)  # a copy, since clearing the field frees them
    del model.graph.input[:]
    model.graph.input.extend(restored.input)
