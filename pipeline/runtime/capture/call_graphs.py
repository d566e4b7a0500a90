"""Replay calls of operators from C++: a graph of TorchScript in place of a loop of Python.

First `read_operator_calls` reads a launch as calls of torch's operators, each with its overload and every argument of
its schema: what torch's Python functions decide at each call (which overload, which defaults) is decided once. A launch
that contains any other call is refused with a reason.

Then `CallGraph` makes one graph of the calls, with the same operators (`out=` and in place included) on the same
tensors. TorchScript's interpreter runs it without Python and without Python's lock. Its executor compiles the graph in
the first two runs and may rewrite it; `is_as_built` says whether the compiled graph still makes the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch

from pipeline.runtime.kernels import Launch
from pipeline.runtime.kernels.base import OverloadCall, call_in_turn, call_with_result, copy_all, copy_one

Overload = torch._ops.OpOverload


class UnreadableLaunchError(Exception):
    """A launch has a call that is not a call of an operator; the message says which call, and why."""


@dataclass(frozen=True, slots=True, eq=False)
class OperatorCall:
    """A call of an operator.

    overload: the operator, such as `aten.add.Tensor`.
    arguments: one for each parameter of the schema: a tensor, a constant, a `ListOf`, or a `ResultOf` an earlier call
        of the same launch.
    """

    overload: Overload
    arguments: tuple[object, ...]

    @property
    def name(self) -> str:
        return str(self.overload._schema.name)


@dataclass(frozen=True, slots=True)
class ResultOf:
    """Result `index` of an earlier call."""

    call: OperatorCall
    index: int


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list whose elements have the type `of`, as a schema names it."""

    of: str
    parts: tuple[object, ...]


def read_operator_calls(launch: Launch) -> list[OperatorCall]:
    """The calls of `launch`, in order.

    Raises:
        UnreadableLaunchError: something else is called, or with an argument that no schema has.
    """
    function, args, kwargs, overload = _call_of(launch)
    if function is call_in_turn:
        return [call for part in args[0] for call in read_operator_calls(part)]
    if function is copy_one:
        return _with_copies(args[0], {0: args[1]}, 1)
    if function is copy_all:
        make, outs, unread = args
        return _with_copies(make, {at: out for at, out in enumerate(outs) if at not in unread}, len(outs))
    if function is call_with_result:
        make, call, rest = args
        calls = read_operator_calls(make)
        return [*calls, _bind([call.overload], (*call.args, ResultOf(calls[-1], 0), *rest), call.keywords)]
    return [_bind(_overloads(function) if overload is None else [overload], args, kwargs)]


def _with_copies(make: Launch, outs: Mapping[int, torch.Tensor], count: int) -> list[OperatorCall]:
    calls = read_operator_calls(make)
    returns = [str(item.type) for item in calls[-1].overload._schema.returns]
    if returns != ["Tensor"] * count:
        raise UnreadableLaunchError(f"{calls[-1].name} has not one tensor for each result")
    copies = [_bind([COPY], (out, ResultOf(calls[-1], at)), {}) for at, out in outs.items()]
    return [*calls, *copies]


COPY = torch.ops.aten.copy_.default


def _call_of(launch: Launch) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Overload | None]:
    """(function, positional arguments, keyword arguments, overload or None) of a launch; partials are unfolded."""
    if not isinstance(launch, partial):
        method_of = getattr(launch, "__self__", None)  # `out.copy_`
        return launch, (method_of,) if isinstance(method_of, torch.Tensor) else (), {}, None
    function, args, kwargs, overload = _call_of(launch.func)
    if isinstance(launch, OverloadCall):
        overload = launch.overload
    return function, (*args, *launch.args), {**kwargs, **launch.keywords}, overload


def _overloads(function: Callable[..., Any]) -> Iterator[Overload]:
    """The overloads from which a function of torch chooses at a call.

    Raises:
        UnreadableLaunchError: `function` is not a function of torch.
    """
    if isinstance(function, Overload):
        yield function
        return
    name = str(getattr(function, "__name__", ""))
    packet = getattr(torch.ops.aten, name, None) if name and _is_of_torch(function, name) else None
    if packet is None:
        raise UnreadableLaunchError(f"{name or type(function).__name__} is a function of Python")
    yield from _overloads_of(packet)


@cache
def _overloads_of(packet: torch._ops.OpOverloadPacket) -> tuple[Overload, ...]:
    return tuple(getattr(packet, name) for name in packet.overloads())


def _is_of_torch(function: Callable[..., Any], name: str) -> bool:
    if isinstance(function, MethodDescriptorType):
        return function is getattr(torch.Tensor, name, None)
    if not isinstance(function, BuiltinFunctionType):
        return False
    if isinstance(function.__self__, torch.Tensor):
        return True
    return function in (getattr(torch, name, None), vars(vars(torch._C)["_nn"]).get(name))


def _bind(
    overloads: Iterator[Overload] | Sequence[Overload], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> OperatorCall:
    """The first overload that takes these arguments, as torch's own parser takes the first signature that fits."""
    first = None
    for overload in overloads:
        first = first or overload
        if overload.namespace not in NAMESPACES:
            raise UnreadableLaunchError(f"{overload.name()} is an operator of another library")
        if any(parameter.is_written and parameter.kind.startswith("List[") for parameter in _parameters(overload)):
            name = overload._schema.name
            raise UnreadableLaunchError(f"{name} writes to tensors in lists, which TorchScript takes for unread")
        try:
            return OperatorCall(overload, tuple(_bound_arguments(overload, args, kwargs)))
        except _MisfitError:
            continue
    raise UnreadableLaunchError(f"no overload of {first._schema.name if first else 'it'} takes these arguments")


NAMESPACES = frozenset({"aten", "mkldnn", "onnxline"})


class _MisfitError(Exception):
    """A value that a parameter does not take."""


def _bound_arguments(overload: Overload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[object]:
    left, named = list(args), dict(kwargs)
    for parameter in _parameters(overload):
        if parameter.name in named:
            value = named.pop(parameter.name)
        elif left and not parameter.named_only:
            value = left.pop(0)
        elif parameter.has_default:
            value = parameter.default
        else:
            raise _MisfitError
        yield _take(parameter.kind, value, parameter.count)
    if left or named:
        raise _MisfitError


@dataclass(frozen=True, slots=True)
class OperatorParameter:
    """A parameter of a schema, read once, since a schema is slow to read.

    kind: the type as the schema writes it, such as `Optional[List[int]]`.
    count: the length of a list that may be given as one element for all; 0 if it may not.
    named_only: the argument can be given by name alone.
    is_written: the operator writes to the argument.
    """

    name: str
    kind: str
    count: int
    named_only: bool
    has_default: bool
    default: object
    is_written: bool


@cache
def _parameters(overload: Overload) -> tuple[OperatorParameter, ...]:
    return tuple(
        OperatorParameter(
            item.name,
            str(item.type),
            getattr(item, "N", None) or 0,
            item.kwarg_only,
            item.has_default_value(),
            item.default_value,
            item.is_write,
        )
        for item in overload._schema.arguments
    )


def _take(kind: str, value: object, count: int = 0) -> object:
    """The argument for a parameter.

    Args:
        kind: see `OperatorParameter`.
        value: what the call gives.
        count: see `OperatorParameter`.

    Raises:
        _MisfitError: the parameter does not take the value.
    """
    if kind.startswith("Optional["):
        return None if value is None else _take(kind[len("Optional[") : -1], value, count)
    if kind.startswith("List["):
        of = kind[len("List[") : -1]
        parts = value if isinstance(value, list | tuple) else [value] * count
        if not isinstance(value, list | tuple) and not count:
            raise _MisfitError
        return ListOf(of, tuple(_take(of, part) for part in parts))
    if kind == "Tensor" and isinstance(value, ResultOf):
        return value
    if not isinstance(value, TYPES.get(kind, ())) or (isinstance(value, bool) and kind != "bool"):
        raise _MisfitError
    return float(value) if kind == "float" else value  # type: ignore[arg-type]


TYPES: Mapping[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor,),
    "number": (int, float),
    "int": (int, torch.dtype, torch.layout),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}
"""Type in a schema → the types of its arguments. Memory formats, devices and generators are not taken."""


LEAST_CALLS = 6
"""The fewest calls that are worth a graph: a graph costs 1.5 µs a run, and saves at least 0.25 µs a call."""

SETTLING_RUNS = 2
"""Runs until a graph is compiled: the executor looks at the arguments in the first run, and compiles in the second."""

C: Any = torch._C
"""Typed as Any: torch ships no type stubs for the classes of TorchScript graphs."""


class CallGraph:
    """Calls as one TorchScript graph; `run` makes them all.

    Raises:
        UnreadableLaunchError: TorchScript refuses a call.
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
        except RuntimeError:  # nothing was compiled: the process has switched the executor's optimization off
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
    """Builds a graph that takes the list `tensors` and returns nothing.

    The tensors are an argument, not constants: the executor would compute only once what depends on constants.
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
    """(name of the operator, text of its schema, types of its results)."""
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
