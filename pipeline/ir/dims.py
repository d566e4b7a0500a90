"""Named dims: evaluate the expressions that torch prints of them, give them sizes, and turn inputs into states.

An expression is one such as `2*batch`, `((n//2)) + 1`, `Max(1, n)` or `Eq(Mod(n, 2), 0)`. With sizes for its dims, a
Graph for any batch becomes a Graph for a batch of 4. Caches that ONNX models take as `past` and give back as `present`
become states of the graph.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from passes.suggest import nearest
from pipeline.argument_checks import MAPPING, a, expects
from pipeline.errors import SourceError, UsageError
from pipeline.ir.builder import GraphFacts, assemble, declarations
from pipeline.ir.graph import Attr, Dim, DimRange, Graph, Op, Role, SymExpr, Value

Number = int | float


def names_in(expression: str) -> frozenset[str]:
    """The names of the dims in `expression`.

    Raises:
        SourceError: the text is no expression, or has an operator that is not supported.
    """
    tree = _parse(expression)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)) - called


def evaluate(expression: str, dims: Mapping[str, int]) -> Number:
    """The value of `expression`; a condition is True or False. Only the operators of the tables below are ever run.

    Raises:
        SourceError: the text is no expression, or has an operator that is not supported.
        KeyError: a dim that is not in `dims`.
    """
    return _value(_parse(expression), dims)


@cache
def _parse(expression: str) -> ast.expr:
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise _no_expression(expression) from error
    if not _is_supported(tree):
        raise _no_expression(expression)
    return tree


def _is_supported(node: ast.expr) -> bool:
    """Whether `node` uses only operators of the tables below."""
    match node:
        case ast.Constant(value=int() | float()) | ast.Name():
            return True
        case ast.UnaryOp(op=sign, operand=item):
            return type(sign) in SIGNS and _is_supported(item)
        case ast.BinOp(left=left, op=sign, right=right):
            return type(sign) in OPERATORS and _is_supported(left) and _is_supported(right)
        case ast.BoolOp(values=values):
            return all(map(_is_supported, values))
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            return type(sign) in COMPARISONS and _is_supported(left) and _is_supported(right)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return name in FUNCTIONS and all(map(_is_supported, args))
    return False


def _value(node: ast.AST, dims: Mapping[str, int]) -> Any:
    """The value of a node that `_is_supported`."""
    match node:
        case ast.Constant(value=number):
            return number
        case ast.Name(id=name):
            return dims[name]
        case ast.UnaryOp(op=sign, operand=item):
            return SIGNS[type(sign)](_value(item, dims))
        case ast.BinOp(left=left, op=sign, right=right):
            return OPERATORS[type(sign)](_value(left, dims), _value(right, dims))
        case ast.BoolOp(op=sign, values=values):
            items = [_value(item, dims) for item in values]
            return all(items) if isinstance(sign, ast.And) else any(items)
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            return COMPARISONS[type(sign)](_value(left, dims), _value(right, dims))
        case ast.Call(func=ast.Name(id=name), args=args):
            return FUNCTIONS[name](*(_value(item, dims) for item in args))


def _no_expression(expression: str) -> SourceError:
    return SourceError(
        f"{expression!r} is no expression of named dims; expected numbers, names, + - * / // % **, comparisons, "
        f"& | ~ and {', '.join(FUNCTIONS)}"
    )


SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.not_,
}

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}

COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "PowByNatural": operator.pow,
    "FloatPow": operator.pow,
    "CeilToInt": math.ceil,
    "FloorToInt": math.floor,
    "TruncToInt": math.trunc,
    "RoundToInt": round,
    "ToFloat": float,
    "floor": math.floor,
    "ceiling": math.ceil,
    "Abs": abs,
    "Max": max,
    "Min": min,
    "Eq": operator.eq,
    "Ne": operator.ne,
    "Lt": operator.lt,
    "Le": operator.le,
    "Gt": operator.gt,
    "Ge": operator.ge,
    "And": lambda *items: all(items),
    "Or": lambda *items: any(items),
    "Not": operator.not_,
    "Where": lambda condition, yes, no: yes if condition else no,
    "Identity": lambda item: item,
}
"""sympy's functions and those of torch.utils._sympy.functions, by the names that they print (torch 2.13)."""


@expects(graph=a(Graph, "a Graph"), pairs=MAPPING)
def as_states(graph: Graph, pairs: Mapping[str, str]) -> Graph:
    """`graph` with states in place of inputs: {input: output that is its value after a run}.

    These inputs and outputs are no longer in the signature: the values live with the program, which may write the new
    one over the old one. They have no value at first; `give_states` or the first feed gives it.

    Args:
        graph: the graph, which stays as it is.
        pairs: input → output, of equal shape and dtype.

    Raises:
        UsageError: there is no such input or output, or the two have different shapes or dtypes.
    """
    inputs = {graph.values[vid].name: vid for vid in graph.inputs}
    outputs = {graph.values[vid].name: vid for vid in graph.outputs}
    for name, after in pairs.items():
        for kind, given, known in (("input", name, inputs), ("output", after, outputs)):
            if given not in known:
                raise UsageError(f"graph {graph.name!r} has no {kind} {given!r}{nearest(given, known)}")
        before, new = graph.values[inputs[name]].spec, graph.values[outputs[after]].spec
        if before != new:
            raise UsageError(
                f"input {name!r} is {before.dtype}{list(before.shape)} and output {after!r} is "
                f"{new.dtype}{list(new.shape)}; a state has one shape and one dtype: use a cache of fixed size"
            )
    states = {inputs[name]: outputs[after] for name, after in pairs.items()}
    decls = [replace(decl, role=Role.STATE) if vid in states else decl for vid, decl in enumerate(declarations(graph))]
    payloads = {graph.values[vid].name: payload for vid, payload in graph.payloads.items()}
    facts = GraphFacts({**graph.updates, **states}, graph.sources, graph.dims, graph.guards)
    kept_inputs = [vid for vid in graph.inputs if vid not in states]
    kept_outputs = [vid for vid in graph.outputs if vid not in states.values()]
    return assemble(graph.name, decls, graph.ops, kept_inputs, kept_outputs, payloads, facts=facts)


Dims = Mapping[str, int]


@expects(graph=a(Graph, "a Graph"), dims=MAPPING)
def fix_dims(graph: Graph, dims: Dims) -> Graph:
    """`graph` and its bodies with concrete shapes, strides and attributes, without ranges and guards.

    Args:
        graph: the graph, which stays as it is.
        dims: name of a dim → its size; every name of the graph has to be there.

    Raises:
        UsageError: a name is missing or unknown, or a range or guard does not hold; the message names every violation.
    """
    if problems := [*_wrong_names(graph, dims), *_wrong_sizes(graph, dims)]:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        sizes = ", ".join(f"{name} = {size}" for name, size in dims.items()) or "no dims"
        raise UsageError(
            f"graph {graph.name!r} does not hold for {sizes}:\n{lines}\nGive sizes that it was traced for."
        )
    return _fix_graph(graph, dims)


@expects(graph=a(Graph, "a Graph"), shapes=MAPPING)
def dims_of(graph: Graph, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The sizes of the named dims that follow from the shapes of inputs, {input name: shape}.

    A size that is an expression of one name is solved as if it were linear (`2*batch`); the solution is checked
    against every shape in the end.

    Args:
        graph: the graph with named dims.
        shapes: input → its concrete shape; an input without named dims may be left out.

    Raises:
        UsageError: no sizes of the dims give these shapes; the message names every input that does not fit.
    """
    declared = {graph.values[vid].name: graph.values[vid].spec.shape for vid in graph.inputs}
    pairs = [
        (dim, size)
        for name, shape in shapes.items()
        for dim, size in zip(declared.get(name, ()), shape, strict=False)
        if isinstance(dim, str)
    ]
    dims: dict[str, int] = {}
    for dim, size in sorted(pairs, key=lambda pair: not pair[0].isidentifier()):
        unknown = names_in(dim) - dims.keys()
        if len(unknown) == 1:
            (name,) = unknown
            dims[name] = _solve(dim, size, name, dims)
    wrong = [
        f"  - {name!r} is {list(shape)}; the graph has {list(declared[name])}"
        for name, shape in shapes.items()
        if name in declared and not _fits(declared[name], shape, dims)
    ]
    if wrong:
        solved = ", ".join(f"{name} = {size}" for name, size in dims.items()) or "no dims"
        raise UsageError(f"graph {graph.name!r}: shapes that do not go together ({solved}):\n" + "\n".join(wrong))
    return dims


def dim_names(graph: Graph) -> frozenset[str]:
    """Every named dim in a shape of the graph."""
    dims = (dim for value in graph.values for dim in value.spec.shape if isinstance(dim, str))
    return frozenset(name for dim in dims for name in names_in(dim))


def _wrong_names(graph: Graph, dims: Dims) -> Iterator[str]:
    known = dim_names(graph) | graph.dims.keys()
    for name in dims.keys() - known:
        hint = nearest(name, known) or f"; its dims are {', '.join(sorted(known)) or 'all fixed'}"
        yield f"it has no dim {name!r}{hint}"
    for name in sorted(dim_names(graph) - dims.keys()):
        yield f"the dim {name!r} has no size"


def _wrong_sizes(graph: Graph, dims: Dims) -> Iterator[str]:
    for name, span in graph.dims.items():
        if name in dims and not _within(dims[name], span):
            limits = f"{span.least} or more" if span.most is None else f"{span.least} .. {span.most}"
            yield f"{name} = {dims[name]}; expected {limits}"
    for guard in graph.guards:
        if names_in(guard) <= dims.keys() and not _holds(guard, dims):
            yield f"the trace relies on {guard}"


def _holds(guard: str, dims: Dims) -> bool:
    try:
        return bool(evaluate(guard, dims))
    except ZeroDivisionError:  # Mod(n, n//2) of 1
        return False


def _within(size: int, span: DimRange) -> bool:
    return span.least <= size and (span.most is None or size <= span.most)


def _solve(dim: str, size: int, name: str, dims: Dims) -> int:
    if dim == name:
        return size
    at_one, at_two = (int(evaluate(dim, {**dims, name: number})) for number in (1, 2))
    return 1 + (size - at_one) // (at_two - at_one) if at_two != at_one else 1


def _fits(declared: Sequence[Dim], shape: Sequence[int], dims: Dims) -> bool:
    if len(declared) != len(shape) or not all(names_in(dim) <= dims.keys() for dim in declared if isinstance(dim, str)):
        return False
    return all(_evaluate_size(dim, dims) == size for dim, size in zip(declared, shape, strict=True))


def _fix_graph(graph: Graph, dims: Dims) -> Graph:
    if not dims:
        return graph
    values = tuple(_fix_value(value, dims) for value in graph.values)
    return replace(graph, values=values, ops=tuple(_fix_op(op, dims) for op in graph.ops), dims={}, guards=())


def _fix_value(value: Value, dims: Dims) -> Value:
    strides = value.strides and tuple(_evaluate_size(dim, dims) for dim in value.strides)
    if value.spec.is_static and strides == value.strides:
        return value
    return replace(
        value,
        spec=replace(value.spec, shape=tuple(_evaluate_size(dim, dims) for dim in value.spec.shape)),
        strides=strides,
    )


def _fix_op(op: Op, dims: Dims) -> Op:
    attrs = {name: _fix_attr(item, dims) for name, item in op.attrs.items()}
    kernel = None  # a kernel call of named dims has other sizes
    return replace(op, attrs=attrs, kernel=kernel, bodies=tuple(_fix_graph(body, dims) for body in op.bodies))


def _fix_attr(item: Attr, dims: Dims) -> Attr:
    if isinstance(item, tuple):
        return tuple(_fix_attr(part, dims) for part in item)
    return evaluate(item.expression, dims) if isinstance(item, SymExpr) else item


def _evaluate_size(dim: Dim, dims: Dims) -> int:
    return int(evaluate(dim, dims)) if isinstance(dim, str) else dim
