"""Replay calls of operators from C++: a graph of TorchScript in place of a loop of Python.

The interpreter of TorchScript walks the calls of a graph, without Python and its lock. A graph has the very operators
of the launches, with `out=` and in place, on the same tensors. The executor compiles it in the first two runs, and may
rewrite it; a graph that is afterwards not call by call what was built is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from pipeline.runtime.capture.operator_calls import ListOf, OperatorCall, ResultOf, UnreadableLaunchError
from pipeline.runtime.kernels import Launch

LEAST_CALLS = 6
"""A graph costs 1.5 µs a run, and spares 0.25 µs a call and more."""

SETTLING_RUNS = 2
"""In the first run the executor looks at the arguments, in the second one it compiles."""

C: Any = torch._C
"""The classes of graphs have no stubs."""


class CallGraph:
    """Calls as one graph.

    Raises:
        UnreadableLaunchError: TorchScript has no such operator.
    """

    def __init__(self, calls: Sequence[OperatorCall]) -> None:
        try:
            builder = _TorchScriptBuilder(calls)
        except (RuntimeError, TypeError) as error:
            raise UnreadableLaunchError(f"TorchScript refuses a call: {error}") from error
        self._function = C._create_function_from_graph("replay", builder.graph)
        self._calls = list(_describe_calls(builder.graph))
        self.run: Launch = partial(self._function, C.ScriptList(builder.tensors))

    def is_as_built(self) -> bool:
        """Whether the executor runs the calls that were put into the graph, in their order, on the same operands."""
        try:
            plans = self._function.get_debug_state().execution_plans.values()
        except RuntimeError:  # nothing was compiled: somebody has switched the executor's passes off
            return False
        return [list(_describe_calls(plan.graph)) for plan in plans] == [self._calls]


def _describe_calls(graph: Any) -> Iterator[tuple[object, ...]]:
    """Each operator with its operands, without the names of values, which an executor changes."""
    known: dict[str, object] = {}
    number = 0  # of operators: the executor may make one list for several readers
    for node in graph.nodes():
        ins = tuple(_constant_or(known, value) for value in node.inputs())
        match node.kind():
            case "prim::Constant":
                continue
            case "prim::ListConstruct":
                known[node.output().debugName()] = ins
            case kind:
                yield (kind, *ins)
                known.update((value.debugName(), (number, at)) for at, value in enumerate(node.outputs()))
                number += 1


def _constant_or(known: Mapping[str, object], value: Any) -> object:
    if value.node().kind() != "prim::Constant":
        return known.get(value.debugName())
    constant = value.toIValue()  # by its text 0.0 is not -0.0, and NaN is NaN
    return tuple(map(repr, constant)) if isinstance(constant, list) else repr(constant)


class _TorchScriptBuilder:
    """A graph from a list of tensors to nothing.

    The tensors are an argument and no constants: the executor computes what depends on constants only once.
    """

    def __init__(self, calls: Sequence[OperatorCall]) -> None:
        self.graph = C.Graph()
        distinct = {id(tensor): tensor for call in calls for tensor in _tensors_of(call.arguments)}
        self.tensors = list(distinct.values())
        operands = self.graph.addInput()
        operands.setType(C.ListType(TENSOR))
        unpacked = self._add("prim::ListUnpack", [operands], len(self.tensors))
        self._values = dict(zip(distinct, unpacked.outputs(), strict=True))
        self._results: dict[OperatorCall, list[Any]] = {}
        for call in calls:
            self._add_call(call)
        self.graph.registerOutput(self.graph.insertConstant(None))

    def _add_call(self, call: OperatorCall) -> None:
        name, schema, returns = _names_of(call.overload)
        if any(kind != "Tensor" for kind in returns):
            raise UnreadableLaunchError(f"{name} makes something else than tensors")
        node = self._add(name, [self._value(item) for item in call.arguments], len(returns))
        if node.schema() != schema:
            raise UnreadableLaunchError(f"TorchScript has {node.schema()} in the place of {schema}")
        self._results[call] = list(node.outputs())

    def _value(self, argument: object) -> Any:
        match argument:
            case torch.Tensor():
                return self._values[id(argument)]
            case ResultOf(call, index):
                return self._results[call][index]
            case ListOf(of, parts):
                node = self._add("prim::ListConstruct", [self._value(part) for part in parts], 1)
                node.output().setType(C.ListType(_type(of)))
                return node.output()
        return self.graph.insertConstant(argument)

    def _add(self, kind: str, inputs: Sequence[Any], outputs: int) -> Any:
        node = self.graph.create(kind, list(inputs), outputs)
        self.graph.appendNode(node)
        for output in node.outputs():
            output.setType(TENSOR)
        return node


@cache
def _names_of(overload: torch._ops.OpOverload) -> tuple[str, str, tuple[str, ...]]:
    """Of the operator, of its schema, and of the types of its results."""
    schema = overload._schema
    return str(schema.name), str(schema), tuple(str(item.type) for item in schema.returns)


TENSOR = C.TensorType.get()


def _tensors_of(arguments: Sequence[object]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, ListOf):
            yield from _tensors_of(argument.parts)


def _type(name: str) -> Any:
    if name.startswith("Optional["):
        return C.OptionalType(_type(name[len("Optional[") : -1]))
    types = {
        "Tensor": C.TensorType,
        "int": C.IntType,
        "float": C.FloatType,
        "bool": C.BoolType,
        "number": C.NumberType,
        "str": C.StringType,
    }
    return types[name].get()
