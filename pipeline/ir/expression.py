"""Expressions of named dims, as torch prints them: `2*batch`, `((n//2)) + 1`, `Max(1, n)`, `Eq(Mod(n, 2), 0)`."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pipeline.errors import SourceError

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
