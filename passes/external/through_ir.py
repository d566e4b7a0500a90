"""For tools that work on an `onnx_ir.Model`: the worker gives them the model with its weights mapped from their files.

Nothing is copied: a tool reads the weights that it looks at, and those that it leaves alone come back as stand-ins.
Large new ones (a transposed weight is a view until then) go to a file, one after the other. Weights that are to stay
unread become inputs of the graph for the time of the call, so no tool can look at them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import onnx

from passes.context import PassContext
from passes.graph.traversal import reads_of
from passes.weights.detached import DetachedModel, detach
from passes.weights.mapped import release
from passes.weights.sharing import MappedModel, portable

LARGE: Final = 2**18
"""Bytes from which a new tensor goes to a file."""


def through_ir(
    model: DetachedModel,
    context: PassContext,
    function: Callable[[Any, Mapping[str, Any]], None],
    options: Mapping[str, Any],
) -> DetachedModel:
    """Call `function(ir_model, options)` in the worker, which edits the model in place, and take over the result.

    Raises:
        StepFailed: the function raised, crashed or timed out.
    """
    hidden = {tensor.name: tensor for tensor in model.proto.graph.initializer if model.is_unread(tensor)}
    shown = model.copy_proto()
    _delete(shown.graph.initializer, hidden)
    added = hidden.keys() - {info.name for info in shown.graph.input}
    shown.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims)
        for name, tensor in hidden.items()
        if name in added
    )
    folder = tempfile.mkdtemp(dir=context.folder, prefix="edited-")
    result = context.worker.call(
        edit_model,
        model=portable(model.with_proto(shown), context.spill),
        function=function,
        options=dict(options),
        folder=folder,
    )
    proto = onnx.load_from_string(result)
    _delete(proto.graph.input, added)
    read = {name for node in proto.graph.node for name in reads_of(node)}
    read.update(output.name for output in proto.graph.output)
    proto.graph.initializer.extend(tensor for name, tensor in hidden.items() if name in read)
    detached = detach(proto, Path(folder), model.weights)
    return DetachedModel(proto, {**model.weights, **detached.weights})


def _delete(entries: Any, names: Collection[str]) -> None:
    """Delete those of a graph's inputs or initializers that have one of `names`."""
    for place in reversed([place for place, entry in enumerate(entries) if entry.name in names]):
        del entries[place]


def edit_model(
    model: MappedModel, function: Callable[[Any, Mapping[str, Any]], None], options: dict[str, Any], folder: str
) -> bytes:
    """In the worker: let `function` edit the model; returns it serialized, with stand-ins for the weights that it had,
    and large new ones in a file in `folder`."""
    import onnx_ir

    edited = onnx_ir.from_proto(model.model())
    weights, mapped = model.map_weights(), {}
    stand_ins: dict[int, Any] = {}
    for name, weight in weights.items():
        value = edited.graph.initializers[name]
        mapped[name] = onnx_ir.Tensor(weight.array(), onnx_ir.DataType(weight.data_type), name=name)
        stand_ins[id(mapped[name])] = value.const_value
        value.const_value = mapped[name]
    function(edited, options)
    values = [(value, value.const_value) for value in edited.graph.initializers.values()]
    new_tensors = [(value, tensor) for value, tensor in values if tensor is not None and id(tensor) not in stand_ins]
    large = [(value, tensor) for value, tensor in new_tensors if tensor.nbytes >= LARGE]
    if large:
        tensors = [tensor for _, tensor in large]
        moved = onnx_ir.external_data.convert_tensors_to_external(tensors, folder, "large.data")
        for (value, _), tensor in zip(large, moved, strict=True):
            value.const_value = tensor
    for value, tensor in values:
        if id(tensor) in stand_ins:
            value.const_value = stand_ins[id(tensor)]
    for weight in weights.values():
        release(weight.data)
    return onnx_ir.to_proto(edited).SerializeToString()
