"""Replay calls of operators from C++: a graph of TorchScript in place of a loop of Python.

The interpreter of TorchScript walks the calls of a graph, without Python and its lock. A graph has the very operators
of the launches, with `out=` and in place, on the same tensors. The executor compiles it in the first two runs, and may
rewrite it; a graph that is afterwards not call by call what was built is not used.

Read a launch as calls of torch's operators: each with its overload and every argument of its schema.

What Python's functions of torch decide at each call (which overload, with which defaults) is decided here, once. A
launch that does not consist of such calls alone is refused with a reason.
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
    """A launch has a call that is none of an operator; the message says which and why."""


@dataclass(frozen=True, slots=True, eq=False)
class OperatorCall:
    """One call. An argument is a tensor, a constant, a `ListOf`, or a `ResultOf` an earlier call of the same launch."""

    overload: Overload
    arguments: tuple[object, ...]

    @property
    def name(self) -> str:
        return str(self.overload._schema.name)


@dataclass(frozen=True, slots=True)
class ResultOf:
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
    """The function of `launch` and its arguments; the overload where it has one with it."""
    if not isinstance(launch, partial):
        method_of = getattr(launch, "__self__", None)  # `out.copy_`
        return launch, (method_of,) if isinstance(method_of, torch.Tensor) else (), {}, None
    function, args, kwargs, overload = _call_of(launch.func)
    if isinstance(launch, OverloadCall):
        overload = launch.overload
    return function, (*args, *launch.args), {**kwargs, **launch.keywords}, overload


def _overloads(function: Callable[..., Any]) -> Iterator[Overload]:
    """Those that a function of torch chooses from."""
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
    """One of a schema, which is slow to ask."""

    name: str
    kind: str
    count: int
    """Of the elements of a list that may be given as one number; else 0."""
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
    """`value` for a parameter of the type `kind`; a list of `count` may be given as one number for all."""
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
"""What is taken for a parameter; memory formats, devices and generators are not."""


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
