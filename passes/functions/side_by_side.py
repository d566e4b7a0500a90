"""Layer functions while passes run: each body once, in one graph with the nodes that call it.

    a model with functions             the graph that passes get
    main: x ▸ f(x, w0) ▸ f(·, w1)      main: x ▸ f ▸ f          f is an operator that no pass knows
    f(h, w): MatMul(h, w)              f/h ▸ MatMul(f/h, f/w)   f/h an input, f/w an input with a default

So a step runs once on each body, whatever the number of calls; finders of structures see a body as they see a layer.
What a function gets from its calls alone has no value in its body. A weight of a body is therefore a default of an
input, which no pass may fold (`passes/model/signature.py`); its data is never read, since no data stands for all calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final

import numpy as np
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from passes.errors import StepFailed
from passes.functions.find import is_small
from passes.functions.fold import complete_function, take_identifier, without_unread
from passes.graph.index import copy_of, drop_unread, replace_entries, unread_tensors
from passes.graph.inference import infer_types
from passes.graph.layer_calls import LAYERS, inline_layers, layer_functions, module_of, rename_module, rename_values
from passes.graph.traversal import reads_of, sort_nodes
from passes.model.analysis import AnalyzedModel
from passes.model.signature import describe_defaults
from passes.proof.coverage import Coverage
from passes.proof.prover import Measurement, Prover, Sensitivity
from passes.run.result import PassRun, StructureVerdict
from passes.run.tracked import TrackedStructures
from passes.structures import Instance, structure_of
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel
from passes.weights.stand_ins import DETACH_FROM_BYTES, Key, Weight, derived_digest, initializer_of

SEPARATOR: Final = "/"
"""Between the name of a function and that of a value of its body."""


@dataclass(frozen=True, slots=True)
class FunctionLayout:
    """What is needed to put the functions of a model together again."""

    functions: Mapping[str, FunctionProto]
    modules: Mapping[str, tuple[str, ...]]
    """Function → the modules that its calls stand for."""
    calls: Mapping[str, NodeProto]
    """The calls by their first output: libraries drop names and metadata of nodes."""

    def fold(self, model: DetachedModel) -> DetachedModel:
        """The model with functions that `model`, the graph with all bodies, stands for."""
        return _BodyFolder(model, self).fold()

    def make_whole(self, model: DetachedModel) -> DetachedModel:
        """`model` as a model without functions, in which every layer has its own weights."""
        folded = self.fold(model)
        return folded.with_proto(inline_layers(folded.proto))

    def verdicts(self, structures: Iterable[StructureVerdict]) -> Iterator[StructureVerdict]:
        """`structures` of the graph with all bodies, each once for every call of the function that it is in."""
        for verdict in structures:
            yield from self._verdicts(verdict)

    def _verdicts(self, verdict: StructureVerdict) -> Iterator[StructureVerdict]:
        for function in self.functions.values():
            own = module_of(function)
            if f"{verdict.module}.".startswith(f"{own}."):
                for module in self.modules[function.name]:
                    name = rename_module(verdict.name, own, module)
                    yield replace(verdict, name=name, module=rename_module(verdict.module, own, module))
                return
        yield verdict


def lay_out(model: DetachedModel) -> tuple[DetachedModel, FunctionLayout | None]:
    """The graph with all bodies that stands for `model`, and how to fold it again; `model` itself and None where it has
    no layer function."""
    functions = layer_functions(model.proto)
    if not functions:
        return model, None
    proto = model.copy_proto()
    kept = [function for function in proto.functions if function.domain != LAYERS]
    replace_entries(proto.functions, kept)
    layout = _BodyWriter(model, proto, functions)
    for name, function in functions.items():
        layout.add(name, function)
    calls = [node for node in model.proto.graph.node if node.domain == LAYERS]
    modules = {name: tuple(module_of(call) for call in calls if call.op_type == name) for name in functions}
    weights = {**model.weights, **layout.weights}
    return DetachedModel(proto, weights), FunctionLayout(functions, modules, {call.output[0]: call for call in calls})


def fold_run(run: PassRun, layout: FunctionLayout) -> PassRun:
    """`run`, whose model is the graph with all bodies, with the model and the structures that this stands for."""
    model = layout.fold(run.model)
    of_bodies = describe_defaults(run.model)
    remarks = [describe_defaults(model), *(remark for remark in run.remarks if remark != of_bodies)]
    structures = tuple(layout.verdicts(run.structures))
    return replace(run, model=model, structures=structures, remarks=tuple(filter(None, remarks)))


class _BodyWriter:
    """Adds bodies to the graph of `proto`, a copy of the model's without its functions."""

    def __init__(self, model: DetachedModel, proto: ModelProto, functions: Mapping[str, FunctionProto]) -> None:
        self.weights: dict[Key, Weight] = {}
        self._graph, self._index = proto.graph, model.index
        calls = [node for node in model.index.nodes if node.domain == LAYERS]
        self._calls = {name: [call for call in calls if call.op_type == name] for name in functions}
        inferred = infer_types(proto)
        known = (*inferred.value_info, *model.index.types.values())
        self._types = {info.name: info for info in known if info.type.WhichOneof("value")}

    def add(self, name: str, function: FunctionProto) -> None:
        first = self._calls[name][0]
        for at, (inside, outside) in enumerate(zip(function.input, first.input, strict=True)):
            self._add_input(f"{name}{SEPARATOR}{inside}", outside, self._calls[name], at)
        for node in function.node:
            copy = rename_values(node, lambda value: f"{name}{SEPARATOR}{value}")
            copy.name = f"{name}{SEPARATOR}{node.name}" if node.name else ""
            self._graph.node.append(copy)
        outputs = {*function.output}
        for info in function.value_info:
            if info.name not in outputs:
                self._graph.value_info.append(_declare(f"{name}{SEPARATOR}{info.name}", info))
        declared = {info.name: info for info in function.value_info}
        for inside, outside in zip(function.output, first.output, strict=True):
            info = declared.get(inside) or self._types.get(outside)
            self._graph.output.append(_declare(f"{name}{SEPARATOR}{inside}", info))

    def _add_input(self, name: str, given: str, calls: Sequence[NodeProto], at: int) -> None:
        tensor = self._index.initializers.get(given)
        info = self._types.get(given)
        if tensor is not None:
            info = helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
        self._graph.input.append(_declare(name, info))
        if info is not None and all(call.input[at] in self._index.folded for call in calls):
            dims = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
            stored, key, weight = _default(name, info.type.tensor_type.elem_type, dims)
            self._graph.initializer.append(stored)
            self.weights |= {key: weight} if key is not None else {}


def _default(name: str, data_type: int, dims: Sequence[int]) -> tuple[TensorProto, Key | None, Weight]:
    """A weight in place of those that the calls of a function give it.

    A small one holds values that no other has, and a large one holds nothing, and is never read.
    """
    dtype = helper.tensor_dtype_to_np_dtype(data_type)
    digest, size = derived_digest(name, "Argument", dims), prod(dims) * dtype.itemsize
    if size < DETACH_FROM_BYTES:
        values = np.random.default_rng(int(digest, 16)).uniform(2, 100, prod(dims)).astype(dtype)
        weight = Weight(tuple(dims), data_type, values.view(np.uint8), digest)
        return *initializer_of(name, weight), weight
    data = np.broadcast_to(np.zeros(1, np.uint8), (size,))
    weight = Weight(tuple(dims), data_type, data, digest, unread=True)
    return *initializer_of(name, weight), weight


def _declare(name: str, info: ValueInfoProto | None) -> ValueInfoProto:
    typed = ValueInfoProto() if info is None else copy_of(info)
    typed.name = name
    return typed


class _BodyFolder:
    """Takes the bodies out of a graph, and makes functions of them."""

    def __init__(self, model: DetachedModel, layout: FunctionLayout) -> None:
        self.model, self.layout, self.index = model, layout, model.index
        self._shared: dict[str, list[str]] = {}
        """Function → the large tensors of the graph that its body reads, which become arguments."""

    def fold(self) -> DetachedModel:
        proto = self.model.copy_proto()
        graph = proto.graph
        bodies = {name: self._body(name, function) for name, function in self.layout.functions.items()}
        added = {f"{name}{SEPARATOR}{value}" for name, old in self.layout.functions.items() for value in old.input}
        made = {f"{name}{SEPARATOR}{value}" for name, old in self.layout.functions.items() for value in old.output}
        own = [info for info in graph.output if info.name not in made]
        main = self._main(added, made, [info.name for info in own])
        calls, unread = self._with_arguments(main, bodies)
        replace_entries(graph.output, own)
        replace_entries(graph.input, [info for info in graph.input if info.name not in added])
        replace_entries(graph.node, without_unread(calls, unread, [info.name for info in own]))
        drop_unread(graph, unread_tensors(self.model.proto.graph) - added)
        proto.functions.extend(bodies.values())
        sort_nodes(graph)
        return self.model.with_proto(proto)

    def _body(self, name: str, old: FunctionProto) -> FunctionProto:
        prefix = f"{name}{SEPARATOR}"
        outputs = [f"{prefix}{value}" for value in old.output]
        nodes = self.index.ancestors(outputs)
        if any(node.domain == LAYERS for node in nodes):
            raise StepFailed(f"lets the function {name} read a value from outside of it")
        given = {f"{prefix}{value}": value for value in old.input}
        read = dict.fromkeys((*(value for node in nodes for value in node.input if value), *outputs))
        stored = [self.index.initializers[value] for value in read if value in self.index.initializers]
        stored = [tensor for tensor in stored if tensor.name not in given]
        small = [tensor for tensor in stored if self.model.weight(tensor) is None and is_small(tensor)]
        names = self._inner_names(prefix, nodes, given)
        self._shared[name] = [tensor.name for tensor in stored if tensor not in small]
        function = FunctionProto(name=name, domain=LAYERS, metadata_props=old.metadata_props)
        function.input.extend(value for at, value in given.items() if at in read)
        function.input.extend(names[value] for value in self._shared[name])
        constants = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in small]
        for node in (*constants, *nodes):
            copy = rename_values(node, lambda value: names.get(value, value.removeprefix(prefix)))
            copy.name = node.name.removeprefix(prefix)
            function.node.append(copy)
        function.output.extend(old.output)
        types = self.index.types
        infos = {inner: _declare(inner, types[value]) for value, inner in names.items() if value in types}
        complete_function(function, self.model.proto.opset_import, infos)
        return function

    def _inner_names(self, prefix: str, nodes: Sequence[NodeProto], given: Mapping[str, str]) -> dict[str, str]:
        """Value of the graph → its name in the body; a free name for a constant that other nodes read too."""
        values = dict.fromkeys(value for node in nodes for value in (*node.input, *node.output) if value)
        names = {value: given.get(value, value.removeprefix(prefix)) for value in values if value.startswith(prefix)}
        taken = set(names.values())
        return {**names, **{value: take_identifier(value, taken) for value in values if value not in names}}

    def _main(self, added: set[str], made: set[str], outputs: Sequence[str]) -> list[NodeProto]:
        """The nodes that are not in bodies alone; also dead ones, but for those of bodies."""
        bodies = {id(node) for node in self.index.ancestors(made)}
        inside, others = set(added), list(outputs)
        for node in self.index.nodes:
            if not inside.isdisjoint(reads_of(node)):
                inside.update(node.output)
            elif id(node) not in bodies:
                others.extend(node.output)
        return self.index.ancestors(others)

    def _with_arguments(
        self, nodes: Sequence[NodeProto], bodies: Mapping[str, FunctionProto]
    ) -> tuple[list[NodeProto], set[str]]:
        """`nodes` with the arguments that the bodies still read, and the values that are arguments no more."""
        result, unread = [], set[str]()
        for node in nodes:
            if node.domain != LAYERS:
                result.append(node)
                continue
            old, body = self.layout.functions[node.op_type], {*bodies[node.op_type].input}
            call = copy_of(node)
            given = list(zip(old.input, node.input, strict=True))
            call.input[:] = [value for inside, value in given if inside in body] + self._shared[node.op_type]
            unread.update(value for inside, value in given if inside not in body)
            known = self.layout.calls.get(node.output[0])
            if known is not None:
                call.name = known.name
                replace_entries(call.metadata_props, known.metadata_props)
            result.append(call)
        return result, unread


@dataclass
class LayoutProver:
    """A `Prover` that answers for a laid-out graph, which has each body once: it asks `prover` about the rebuilt model.

    Args:
        rebuild: makes the model for `prover` from the laid-out graph: `FunctionLayout.whole` (flat) where models run,
            `FunctionLayout.fold` (with functions) where only structures are checked. It raises StepFailed where a pass
            has changed a body so that the body cannot be a function.
    """

    prover: Prover
    rebuild: Callable[[DetachedModel], DetachedModel]
    _latest: tuple[ModelProto | None, AnalyzedModel | None] = field(default=(None, None), init=False)

    def watch(self, model: AnalyzedModel, instances: Sequence[Instance]) -> None:
        """Search the rebuilt model for the kinds of `instances`: a structure in a body is there once for each call."""
        rebuilt = self._rebuilt(model.model)
        view = GraphView(rebuilt.model)
        searches = {kind: structure_of(kind) for kind in dict.fromkeys(instance.kind for instance in instances)}
        found = {kind: search.search(view).instances for kind, search in searches.items() if search is not None}
        held = TrackedStructures(found, enforced=frozenset(found), pinned=frozenset())
        self.prover.watch(rebuilt, held.must_hold())

    def feeds(self) -> Sequence[Mapping[str, np.ndarray]]:
        return self.prover.feeds()

    def measure(self, model: AnalyzedModel) -> Measurement:
        return self.prover.measure(self._rebuilt(model.model))

    def run(self, model: AnalyzedModel, *, hold: bool = True) -> Measurement:
        return self.prover.run(self._rebuilt(model.model), hold=hold)

    def has_run(self, model: DetachedModel) -> bool:
        return self.prover.has_run(self._rebuilt(model).model)

    def power(self) -> Sensitivity:
        return self.prover.power()

    def coverage(self, model: AnalyzedModel) -> Coverage:
        return self.prover.coverage(self._rebuilt(model.model))

    def _rebuilt(self, model: DetachedModel) -> AnalyzedModel:
        """The model rebuilt from `model`, kept until another model is asked about: `prover.has_run` compares
        objects."""
        if self._latest[0] is not model.proto:
            self._latest = (model.proto, AnalyzedModel(self.rebuild(model)))
        rebuilt = self._latest[1]
        assert rebuilt is not None
        return rebuilt
