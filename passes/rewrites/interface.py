"""Steps that change what a model takes and gives: cut a part out, choose outputs, rename values, fix or change sizes.

Each says in a `Relation` which value of the model before an input or an output of its result is; the run computes both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from passes.context import PassContext
from passes.errors import PolicyError, StepFailed
from passes.graph.index import (
    GraphIndex,
    copy_of,
    drop_unread,
    replace_all_uses_with,
    replace_entries,
    required_inputs,
    take_name,
    value_names,
)
from passes.graph.inference import declare_rank, dims_of, infer_types
from passes.graph.sizes import infer_at_sizes
from passes.graph.traversal import read_names, reads_of
from passes.step import PassResult, Relation, Step
from passes.suggest import nearest, plural
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class Extract(Step, name="extract", reads="structure"):
    """Leave only the part between values, or nodes, that are named. Inputs of the model that are needed besides stay
    inputs.

    A name is that of a value, or of a node, which then is in the part. Without `inputs` the part begins at the inputs
    of the model, without `outputs` it ends at its outputs.
    """

    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    makes_reference: ClassVar[bool] = True

    def check(self, context: PassContext) -> None:
        _check_names(self.name, inputs=self.inputs, outputs=self.outputs)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        graph = model.proto.graph
        index = model.index
        ends = _values_of(self.name, self.outputs, index, of_inputs=False) or list(index.outputs)
        if not ends:
            raise PolicyError(f"{self.name}: the model has no output; name a value with which the part ends")
        begins = _values_of(self.name, self.inputs, index, of_inputs=True)
        cut = [name for name in begins if name not in index.required_inputs]
        part = cut_out(model, begins, ends)
        taken = [info.name for info in required_inputs(part.proto.graph)]
        unread = [name for name in begins if name not in taken]
        if unread:
            raise PolicyError(f"{self.name}: {', '.join(ends)} is not computed from {unread[0]!r}; name another value")
        more = [name for name in taken if name not in begins] if begins else []
        why = f"needs {', '.join(map(repr, more))} besides, so it stays an input" if more else None
        changed = bool(cut) or len(part.proto.graph.node) < len(graph.node) or ends != list(index.outputs)
        return PassResult(part, changed, why, Relation.between_namesakes(taken, ends))


@dataclass(frozen=True, slots=True)
class ChangeOutputs(Step, name="outputs", reads="structure"):
    """Make outputs of values, or drop outputs and what only they need."""

    add: Sequence[str] = ()
    drop: Sequence[str] = ()
    makes_reference: ClassVar[bool] = True

    def check(self, context: PassContext) -> None:
        _check_names(self.name, add=self.add, drop=self.drop)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        index = model.index
        for name in self.drop:
            if name not in index.outputs:
                raise PolicyError(f"{self.name}: the model has no output {name!r}{_hint(name, index.outputs)}")
        added = _values_of(self.name, self.add, index, of_inputs=False)
        ends = [name for name in dict.fromkeys((*index.outputs, *added)) if name not in self.drop]
        if not ends:
            raise PolicyError(f"{self.name}: drops every output; expected one that stays")
        part = cut_out(model, list(index.required_inputs), ends)
        taken = [info.name for info in required_inputs(part.proto.graph)]
        return PassResult(part, ends != list(index.outputs), None, Relation.between_namesakes(taken, ends))


@dataclass(frozen=True, slots=True)
class Rename(Step, name="rename", reads="structure"):
    """Give values other names: inputs, outputs, weights, inner values."""

    values: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    makes_reference: ClassVar[bool] = True

    def check(self, context: PassContext) -> None:
        if not isinstance(self.values, Mapping) or not all(
            isinstance(name, str) and name for pair in self.values.items() for name in pair
        ):
            raise PolicyError(
                f"{self.name}: values is {self.values!r}; expected a mapping of names, as in {{old: new}}"
            )

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        graph, index = model.proto.graph, model.index
        known = [*index.producers, *index.inputs, *index.initializers]
        for old in self.values:
            if old not in known:
                raise PolicyError(f"{self.name}: the model has no value {old!r}{_hint(old, known)}")
        taken = value_names(graph) - self.values.keys()
        news = list(self.values.values())
        clash = next((new for new in news if new in taken or news.count(new) > 1), None)
        if clash is not None:
            raise PolicyError(f"{self.name}: {clash!r} would be the name of two values; choose another name")
        proto = model.copy_proto()
        graph = proto.graph
        replace_all_uses_with(graph.node, self.values)
        for node in graph.node:
            node.output[:] = [self.values.get(name, name) for name in node.output]
        for entry in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
            entry.name = self.values.get(entry.name, entry.name)
        for sparse in graph.sparse_initializer:
            sparse.values.name = self.values.get(sparse.values.name, sparse.values.name)
        back = {new: old for old, new in self.values.items()}
        made = model.with_proto(proto)
        inputs, outputs = (
            {name: back.get(name, name) for name in names} for names in (made.index.required_inputs, made.index.outputs)
        )
        return PassResult(made, any(old != new for old, new in self.values.items()), None, Relation(inputs, outputs))


@dataclass(frozen=True, slots=True)
class FixShapes(Step, name="fix-shapes", reads="structure"):
    """Give inputs fixed shapes, and all values the shapes that follow. A named dim that is fixed in one input is fixed
    in all, and in what is declared."""

    shapes: Mapping[str, Sequence[int]] = field(default_factory=lambda: MappingProxyType({}))
    narrows: bool = field(default=True, init=False)
    annotates: ClassVar[bool] = True

    @property
    def input_shapes(self) -> Mapping[str, Sequence[int]]:  # type: ignore[override]  # a field of other steps
        return self.shapes

    def check(self, context: PassContext) -> None:
        shapes = self.shapes.values() if isinstance(self.shapes, Mapping) else ["none"]
        if not self.shapes or not all(
            isinstance(shape, list | tuple) and all(map(_is_size, shape)) for shape in shapes
        ):
            raise PolicyError(
                f"{self.name}: shapes is {self.shapes!r}; expected sizes of 1 or more for each input, as in "
                "{images: [1, 3, 320, 320]}"
            )

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        proto = model.copy_proto()
        sizes: dict[str, int] = {}
        for info in proto.graph.input:
            shape = self.shapes.get(info.name, ())
            declare_rank(info, len(shape))
            for dim, size in zip(info.type.tensor_type.shape.dim, shape, strict=False):
                sizes |= {dim.dim_param: size} if dim.dim_param else {}
                dim.dim_value = size
        for info in (*proto.graph.input, *proto.graph.output):
            for dim in info.type.tensor_type.shape.dim:
                if dim.dim_param in sizes:
                    dim.dim_value = sizes[dim.dim_param]
        return PassResult(model.with_proto(_with_shapes(proto)))


@dataclass(frozen=True, slots=True)
class ChangeBatch(Step, name="change-batch", reads="structure"):
    """Let the model take another number of rows at once, or any number. `size` is a number, or the name of a dim for
    any number.

    The first axis of each input is the batch, but for scalars, which have none; Reshape nodes that name the old number
    compute it.
    """

    size: int | str = "batch"
    makes_reference: ClassVar[bool] = True

    def check(self, context: PassContext) -> None:
        if not (_is_size(self.size) or (isinstance(self.size, str) and self.size.isidentifier())):
            raise PolicyError(f"{self.name}: size is {self.size!r}; expected a number of 1 or more, or a dim's name")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        proto = model.without_functions().copy_proto()
        typed = GraphIndex(infer_types(proto))
        inputs = [dims_of(info) for info in typed.required_inputs.values()]
        before = {dims[0] for dims in inputs if dims}
        if None in inputs:
            name = next(name for name, info in typed.required_inputs.items() if dims_of(info) is None)
            raise PolicyError(
                f"{self.name}: input {name!r} has no known rank, so no batch is known either; give it one before, by "
                f"`onnxline fix-shapes MODEL -o OUT --shape {name}=1,3,320,320` with the sizes of the input, say"
            )
        if len(before) != 1:
            raise PolicyError(f"{self.name}: the inputs have no batch in common: their shapes are {inputs}")
        if 0 in before:
            raise PolicyError(f"{self.name}: the inputs have 0 rows: their shapes are {inputs}; expected 1 or more")
        (old,) = before
        for info in (*required_inputs(proto.graph), *proto.graph.output):
            dims = info.type.tensor_type.shape.dim
            if dims and (info.name in typed.required_inputs or dims_of(info)[:1] == (old,)):  # type: ignore[index]
                dims[0].Clear()
                setattr(dims[0], "dim_value" if isinstance(self.size, int) else "dim_param", self.size)
        opened = _open_reshapes(proto, typed, old if isinstance(old, int) else None)
        made = model.with_proto(_with_shapes(proto))
        rows = self.size if isinstance(self.size, int) else 0
        relation = Relation.between_namesakes(typed.required_inputs, typed.outputs, rows=rows)
        why = f"{plural(opened, 'Reshape', 'Reshapes')} find the batch now" if opened else None
        return PassResult(made, old != self.size, why, relation)


def _open_reshapes(proto: ModelProto, typed: GraphIndex, old: int | None) -> int:
    """Let each Reshape to a fixed shape find the batch, which is in the outermost axis, in place; returns how many."""
    index, opened, taken = GraphIndex(proto.graph), 0, value_names(proto.graph)
    stored = {**index.initializers, **index.constants}
    for node in index.own if old is not None else ():
        if node.op_type not in ("Reshape", "Expand") or node.input[0] in index.folded or node.input[1] not in stored:
            continue
        shape = numpy_helper.to_array(stored[node.input[1]]).copy()
        given = dims_of(typed.types[node.input[0]]) if node.input[0] in typed.types else None
        if not shape.size or shape[0] <= 0:
            continue
        if node.op_type == "Expand":
            shape[0] = 1 if shape[0] == old else shape[0]
        elif (shape == -1).any():
            shape[0] = 0 if shape[0] == old and given and given[0] == old else shape[0]
        else:
            shape[0] = -1
        node.input[1] = take_name(f"{node.input[1]}_any_batch", taken, 0)
        proto.graph.initializer.append(numpy_helper.from_array(shape, node.input[1]))
        opened += 1
    drop_unread(proto.graph)
    return opened


def cut_out(model: DetachedModel, inputs: Sequence[str], outputs: Sequence[str]) -> DetachedModel:
    """The part of `model` that computes `outputs`, from `inputs` where it reaches them.

    Raises:
        StepFailed: the type of a value at which the part begins or ends cannot be inferred.
    """
    proto = model.copy_proto()
    graph = proto.graph
    index = GraphIndex(graph)
    types = GraphIndex(infer_types(model.without_functions().proto)).types
    stored = [index.initializers[name] for name in (*inputs, *outputs) if name in index.initializers]
    types |= {
        tensor.name: helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in stored
    }
    begins = {*inputs, *index.required_inputs}
    nodes = [copy_of(node) for node in index.ancestors(outputs, index.producers.keys() - begins)]
    reads = read_names(nodes).union(outputs)
    first = [name for name in index.inputs if name in reads]
    cuts = [name for name in inputs if name in reads and name not in first]
    infos = [_require_type(name, types) for name in (*first, *cuts)]
    ends = [_require_type(name, types) for name in outputs]
    others = [name for name in cuts if types[name].type.WhichOneof("value") != "tensor_type"]
    if others:
        raise PolicyError(
            f"{others[0]!r} is no tensor, and only tensors are fed to a part; cut at another value (--at, --from)"
        )
    taken = value_names(graph)
    for node in nodes:  # a node that makes a further value, which is read, makes one that is fed under another name
        node.output[:] = [take_name(name, taken) if name in cuts else name for name in node.output]
    replace_entries(graph.node, nodes)
    replace_entries(graph.input, infos)
    replace_entries(graph.output, ends)
    stays = (tensor for tensor in graph.initializer if tensor.name in reads and tensor.name not in inputs)
    replace_entries(graph.initializer, stays)
    replace_entries(
        graph.sparse_initializer, (tensor for tensor in graph.sparse_initializer if tensor.values.name in reads)
    )
    named = GraphIndex(graph).producers.keys() - {*outputs}
    replace_entries(graph.value_info, (info for info in graph.value_info if info.name in named))
    return model.with_proto(proto)


def _require_type(name: str, types: Mapping[str, ValueInfoProto]) -> ValueInfoProto:
    info = types.get(name)
    if info is None or info.type.WhichOneof("value") is None:
        raise StepFailed(
            f"the type of {name!r} cannot be inferred, so it can be no input or output; declare the operator that "
            "makes it (--custom-ops, custom_ops), or cut at another value (--at, --from, --to)"
        )
    return info


def _values_of(step: str, names: Sequence[str], index: GraphIndex, *, of_inputs: bool) -> list[str]:
    """The values that `names` mean: a value itself, or what the node of that name reads, or makes."""
    nodes = {node.name: node for node in index.own if node.name}
    known = {**index.producers, **index.inputs, **index.initializers}
    found: dict[str, None] = {}
    for name in names:
        if name in known:
            found[name] = None
        elif name in nodes:
            found |= dict.fromkeys(_data_of(nodes[name], index) if of_inputs else filter(None, nodes[name].output))
        else:
            raise PolicyError(f"{step}: the model has no value or node {name!r}{_hint(name, [*known, *nodes])}")
    return list(found)


def _data_of(node: NodeProto, index: GraphIndex) -> list[str]:
    return [name for name in reads_of(node) if name and name not in {*index.folded, *index.initializers}]


def _with_shapes(proto: ModelProto) -> ModelProto:
    """`proto` with shapes of inner values that are inferred from its inputs, in place of the declared shapes."""
    del proto.graph.value_info[:]
    graph = infer_at_sizes(proto)
    types = GraphIndex(graph).types
    for info in proto.graph.output:
        if info.name in types and dims_of(types[info.name]) is not None:
            info.type.CopyFrom(types[info.name].type)
    replace_entries(proto.graph.value_info, graph.value_info)
    return proto


def _hint(name: str, known: Iterable[str]) -> str:
    return nearest(name, known) or " (`onnxline view` shows all values)"


def _is_size(size: object) -> bool:
    return type(size) is int and size >= 1


def _check_names(step: str, **lists: object) -> None:
    for option, names in lists.items():
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
            raise PolicyError(f"{step}: {option} is {names!r}; expected a list of names")
    if not any(lists.values()):
        raise PolicyError(f"{step}: found no names; expected {' or '.join(lists)}: a list of names")
