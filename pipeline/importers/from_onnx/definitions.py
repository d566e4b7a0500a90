"""Definitions of operators as expressions over operators of torch, which read like those of the ONNX standard.

    "PRelu": define(lambda x, slope: where(x < 0, x * slope, x))
    "Selu": define(lambda x, alpha=1.673, gamma=1.05: aten("elu", x, alpha=alpha) * gamma)

A parameter of the function is an input of the node, optional if its default is None; one with another default is an
attribute of that name, type and default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.importers.from_onnx.node import CONVERSION, Importer, Node, read_attribute
from pipeline.ir.graph import Attr, TensorSpec, TorchConst


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A call of an elementwise operator of torch on other terms; without an operator, the input `vid` of the node."""

    spec: TensorSpec
    operator: str = ""
    operands: tuple[Term, ...] = ()
    arguments: Mapping[str, Attr] = field(default_factory=dict)
    vid: int = -1

    @property
    def is_float(self) -> bool:
        return "float" in self.spec.dtype

    def __add__(self, other: Term | float) -> Term:
        return _combine("add.Tensor", self, other)

    def __mul__(self, other: Term | float) -> Term:
        return _combine("mul.Tensor", self, other)

    def __sub__(self, other: Term | float) -> Term:
        return _combine("sub.Tensor", self, other)

    def __truediv__(self, other: Term | float) -> Term:
        return _combine("div.Tensor", self, other)

    def __lt__(self, other: Term | float) -> Term:
        return _combine("lt.Tensor" if isinstance(other, Term) else "lt.Scalar", self, other)

    def __ne__(self, other: object) -> Any:
        return _combine("ne.Tensor", self, other)


def aten(name: str, *operands: Term, **arguments: Attr) -> Term:
    """The call of `aten.name`, whose result has the operands' common shape, and the dtype of the last or bool."""
    shape = np.broadcast_shapes(*(term.spec.sizes for term in operands))
    dtype = "bool" if name.partition(".")[0] in COMPARISONS else operands[-1].spec.dtype
    operator = f"aten.{name}" if "." in name else f"aten.{name}.default"
    return Term(TensorSpec(shape, dtype), operator, operands, arguments)


def cast(value: Term, dtype: str) -> Term:
    """The value in another dtype; itself where it has this one."""
    if value.spec.dtype == dtype:
        return value
    return Term(TensorSpec(value.spec.shape, dtype), CONVERSION, (value,), {"dtype": TorchConst("dtype", dtype)})


def reshape(value: Term, sizes: Sequence[int]) -> Term:
    """The elements in their order, in another shape; the value itself where it has this one."""
    sizes = tuple(sizes)
    if value.spec.shape == sizes:
        return value
    return Term(TensorSpec(sizes, value.spec.dtype), "aten.reshape.default", (value,), {"shape": sizes})


def where(condition: Term, chosen: Term, other: Term) -> Term:
    return aten("where.self", condition, chosen, other)


def define(definition: Callable[..., Term]) -> Importer:
    """An importer for the operator that `definition` defines; a Term that is an input makes no op."""
    parameters = inspect.signature(definition).parameters.values()

    def importer(node: Node) -> None:
        given: list[Any] = []
        for place, parameter in enumerate(parameters):
            if parameter.default not in (parameter.empty, None):
                given.append(read_attribute(node, parameter.name, parameter.default))
            else:
                is_given = parameter.default is parameter.empty or node.has(place)
                given.append(term(node, node.operand(place)) if is_given else None)
        give(node, definition(*given))

    return importer


def term(node: Node, vid: int) -> Term:
    """A value of the graph, to compute with."""
    return Term(node.vid_spec(vid), vid=vid)


def constant(node: Node, array: np.ndarray | float, like: Term | None = None) -> Term:
    """A new constant, in the dtype of `like` where that is given."""
    return term(node, node.constant_operand(np.array(array, None if like is None else like.spec.dtype)))


def give(node: Node, result: Term) -> None:
    """Add the ops of `result`, the last of which makes output 0."""
    if result.operator:
        node.emit(result.operator, [compute(node, operand) for operand in result.operands], result.arguments)
    else:
        node.alias(result.vid)


def compute(node: Node, result: Term) -> int:
    """Add the ops of `result`, and return its vid."""
    if not result.operator:
        return result.vid
    operands = [compute(node, operand) for operand in result.operands]
    return node.step(result.operator, operands, result.spec, result.arguments)


def _combine(name: str, left: Term, right: object) -> Term:
    """A number is an argument of the call."""
    return aten(name, left, right) if isinstance(right, Term) else aten(name, left, other=right)  # type: ignore[arg-type]


COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})
