"""The declared signature of a model, which its caller relies on; its annotations; and initializers that are inputs.

Before IR version 4 every initializer had to be a graph input, and onnxruntime still treats it as a constant. Since IR
version 4 it is a default that callers may override, so no pass may fold it or drop it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import onnx
from onnx import GraphProto, ModelProto, StringStringEntryProto, TensorProto, TypeProto, ValueInfoProto

from passes.errors import StepFailed
from passes.graph.formatting import format_type, is_unknown_dim
from passes.graph.index import GraphIndex, copy_of, delete_named, initializers_of, required_inputs
from passes.graph.inference import infer_types
from passes.suggest import join_first, plural
from passes.weights.detached import DetachedModel


def keep_signature(before: DetachedModel, after: DetachedModel, *, narrows: bool = False) -> None:
    """Put the types that `before` declares back on the inputs and outputs of `after`, in place.

    A pass may have inferred a size for a named dim, for example from an example input; for the caller it is still open.
    Only what `before` leaves out of an output's type is filled in; an input's type does not change.

    Args:
        before: the model with the declared types.
        after: the model that a step made of it; its proto is changed.
        narrows: the step was asked to give inputs other shapes, so only names have to stay.

    Raises:
        StepFailed: there are other inputs or outputs than before, or one has a type that contradicts the declared one.
    """
    for what in ("input", "output"):
        declared, made = _infos(before.proto.graph, what), _infos(after.proto.graph, what)
        had, has = [info.name for info in declared], [info.name for info in made]
        if has != had:
            raise StepFailed(f"changes the model's {what}s from {had} to {has}")
        for old, new in () if narrows else zip(declared, made, strict=True):
            if contradicts(old.type, new.type):
                raise StepFailed(f"changes the model's {what} {old.name} from {format_type(old)} to {format_type(new)}")
            new.type.CopyFrom(old.type if what == "input" else _fill_in(old.type, new.type))


def _infos(graph: GraphProto, what: str) -> list[ValueInfoProto]:
    """The inputs that a caller has to give, or all outputs; an initializer that is declared as an input is left out."""
    if what == "output":
        return list(graph.output)
    return required_inputs(graph)


def contradicts(old: TypeProto, new: TypeProto) -> bool:
    """Whether both types are declared and differ. Of sequences, optionals and maps only the kind is compared."""
    kinds = {old.WhichOneof("value"), new.WhichOneof("value")} - {None}
    if kinds != {"tensor_type"}:
        return len(kinds) > 1
    dtypes = {old.tensor_type.elem_type, new.tensor_type.elem_type} - {TensorProto.UNDEFINED}
    if len(dtypes) > 1:
        return True
    if not (old.tensor_type.HasField("shape") and new.tensor_type.HasField("shape")):
        return False
    olds, news = old.tensor_type.shape.dim, new.tensor_type.shape.dim
    return len(olds) != len(news) or any(
        old_dim.HasField("dim_value") and new_dim.HasField("dim_value") and old_dim.dim_value != new_dim.dim_value
        for old_dim, new_dim in zip(olds, news, strict=True)
    )


def _fill_in(old: TypeProto, new: TypeProto) -> TypeProto:
    """`old`, completed by what `new` declares in addition; they do not contradict each other."""
    if old.WhichOneof("value") is None:
        return new
    filled = copy_of(old)
    if old.WhichOneof("value") != "tensor_type" or new.WhichOneof("value") != "tensor_type":
        return filled
    tensor, found = filled.tensor_type, new.tensor_type
    tensor.elem_type = tensor.elem_type or found.elem_type
    if not found.HasField("shape"):
        return filled
    if not tensor.HasField("shape"):
        tensor.shape.CopyFrom(found.shape)
        return filled
    for dim, other in zip(tensor.shape.dim, found.shape.dim, strict=True):
        if is_unknown_dim(dim):
            dim.CopyFrom(other)
    return filled


def fill_in_outputs(model: DetachedModel) -> DetachedModel:
    """`model` with the types of its outputs, as far as they are not declared and inference knows them."""
    tensors = [output.type.tensor_type for output in model.proto.graph.output if not _is_other(output.type)]
    if all(tensor.elem_type and tensor.HasField("shape") for tensor in tensors):
        return model
    proto, inferred = model.copy_proto(), infer_types(model.proto)
    for output, found in zip(proto.graph.output, inferred.output, strict=True):
        if found.type.WhichOneof("value") and not contradicts(output.type, found.type):
            output.type.CopyFrom(_fill_in(output.type, found.type))
    return model.with_proto(proto)


def _is_other(declared: TypeProto) -> bool:
    """Whether the type is declared, and is not that of a tensor: a sequence, an optional, a map."""
    return declared.WhichOneof("value") not in (None, "tensor_type")


Props = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Annotations:
    """The annotations of a model, to compare: order does not count, and bodies of If and Loop are ignored."""

    types: dict[str, bytes]
    """The types of inner values, and of outputs: an output that is pinned in one model is an inner value of another."""
    nodes: Counter[tuple[str, str, tuple[str, ...], Props]]
    props: Props


def annotations_of(model: ModelProto) -> Annotations:
    """The types, names, doc strings and metadata of a model, which can be compared."""
    graph = model.graph
    return Annotations(
        {info.name: info.type.SerializeToString(deterministic=True) for info in (*graph.output, *graph.value_info)},
        Counter((node.name, node.doc_string, tuple(node.output), _props(node.metadata_props)) for node in graph.node),
        _props((*model.metadata_props, *graph.metadata_props)),
    )


def _props(entries: Iterable[StringStringEntryProto]) -> Props:
    return tuple(sorted((entry.key, entry.value) for entry in entries))


FREE_INITIALIZERS: Final = 4
"""The first IR version in which an initializer need not be a graph input as well."""

NAMED: Final = 3
"""How many initializers `describe_defaults` names."""


def free_initializers(model: DetachedModel) -> DetachedModel:
    """`model` in IR version 4, where initializers need not be inputs; itself if its version is 4 or later."""
    if not 0 < model.proto.ir_version < FREE_INITIALIZERS:
        return model
    proto = model.copy_proto()
    drop_default_inputs(proto.graph)
    proto.ir_version = FREE_INITIALIZERS
    return model.with_proto(proto)


def drop_default_inputs(graph: onnx.GraphProto) -> set[str]:
    """Remove the graph inputs that are initializers, in place.

    Returns:
        Their names.
    """
    names = _defaults(graph)
    delete_named(graph.input, names)
    return names


def restore_version(source: DetachedModel, final: DetachedModel) -> DetachedModel:
    """`final` in the IR version of `source`, with its initializers as inputs, if that version is below 4.

    Returns:
        `final` itself if `source` has version 4 or later, or if the opsets differ: newer opsets need a newer version.
    """
    is_older = 0 < source.proto.ir_version < FREE_INITIALIZERS
    if not is_older or list(source.proto.opset_import) != list(final.proto.opset_import):
        return final
    proto = final.copy_proto()
    proto.ir_version = source.proto.ir_version
    declare_initializers(proto.graph)
    return final.with_proto(proto)


def declare_initializers(graph: onnx.GraphProto) -> None:
    """Declare each initializer as a graph input too, in place, as IR versions before 4 require."""
    declared = GraphIndex(graph).inputs
    graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in graph.initializer
        if tensor.name not in declared
    )


def hide_defaults(graph: onnx.GraphProto) -> None:
    """Remove the initializers that are defaults of inputs, in place, so that no pass can take them for constants."""
    delete_named(graph.initializer, _defaults(graph))


def with_defaults(before: DetachedModel, after: DetachedModel) -> DetachedModel:
    """`after` with the defaults of the inputs of `before`; an input with a default that a pass dropped comes back."""
    graph, hidden = before.proto.graph, _defaults(before.proto.graph)
    if not hidden:
        return after
    proto = after.copy_proto()
    has = {entry.name for entry in (*proto.graph.input, *proto.graph.initializer)}
    proto.graph.input.extend(info for info in graph.input if info.name in hidden - has)
    proto.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in hidden)
    return DetachedModel(proto, {**before.weights, **after.weights})


def describe_defaults(model: DetachedModel) -> str:
    """A sentence on the initializers that callers may override; empty where there are none."""
    names = sorted(_defaults(model.proto.graph))
    if not names or model.proto.ir_version < FREE_INITIALIZERS:
        return ""
    are = "is an input, too" if len(names) == 1 else "are inputs, too"
    return (
        f"{plural(len(names), 'initializer')} {are} ({join_first(names, NAMED)}): callers may override what is "
        "stored there, so no pass folds it; the step fix-defaults before it makes constants of them"
    )


def drop_stale_training(before: DetachedModel, after: DetachedModel) -> DetachedModel:
    """`after` without training_info that names stored tensors of `before` which it does not have any more."""
    infos = after.proto.training_info
    bound = {entry.key for info in infos for entry in (*info.initialization_binding, *info.update_binding)}
    if not bound or bound.isdisjoint(before.index.initializers.keys() - after.index.initializers.keys()):
        return after
    proto = after.copy_proto()
    del proto.training_info[:]
    return after.with_proto(proto)


def describe_lost_training(before: DetachedModel, after: DetachedModel) -> str:
    """A sentence where a step has left out what a model says of its training; empty where none has."""
    is_lost = len(before.proto.training_info) > len(after.proto.training_info)
    return "training_info is not in the result: it names weights as they were before the passes" if is_lost else ""


def _defaults(graph: onnx.GraphProto) -> set[str]:
    """The names that are both a graph input and an initializer."""
    return initializers_of(graph).keys() & GraphIndex(graph).inputs.keys()
