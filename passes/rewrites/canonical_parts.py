"""Write layer norms, RMS norms, group norms and GELUs as one operator of the opset, or in parts.

A norm in parts divides by the root of the mean square; torch writes Reciprocal and Mul for that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from onnx import NodeProto, helper

from passes.context import PassContext
from passes.errors import PolicyError
from passes.graph.op_facts import attribute_of, first_output, input_of
from passes.rewrites.graph_values import Dim
from passes.rewrites.rewriter import Array, Rewriter, RewriteStep
from passes.step import PassResult
from passes.structures.activations import find_gelus
from passes.structures.norms import NormPattern, find_norm_patterns
from passes.structures.view import GraphView
from passes.suggest import say_count

SINCE: Final = {"LayerNormalization": 17, "Gelu": 20, "GroupNormalization": 21, "RMSNormalization": 23}
"""Operator → the opset that has it in the form that is written here."""


@dataclass(frozen=True, slots=True)
class CanonicalNorm(RewriteStep, name="canonical-norm", reads="values"):
    """Write layer, RMS and group norms as one operator of the opset, or in the fewest parts.

    Args:
        form: `operator` where the opset has one, and else the fewest parts; or `parts` for every norm.
        newer: whether RMSNormalization, which opset 23 has brought, is written where the model has that opset.
    """

    form: str = "operator"
    newer: bool = False

    def check(self, context: PassContext) -> None:
        _check_form(self.name, self.form)

    def rewrite(self, rewriter: Rewriter) -> PassResult:
        if self.form == "parts":
            norms = [node for node in rewriter.by_op(*WRITERS) if not any(node.output[1:])]
            written = sum(WRITERS[node.op_type](rewriter, node) for node in norms)
            left = say_count(len(norms) - written, "norm", "of other axes or open sizes")
            return rewriter.result(say_count(written, "norm", "in parts"), left, default="no norm is one operator")
        joined = sum(self._join(rewriter, pattern) for pattern in find_norm_patterns(GraphView(rewriter.model)))
        joined += sum(_join_groups(rewriter, node) for node in rewriter.by_op("InstanceNormalization"))
        shorter = sum(_divide(rewriter, node) for node in rewriter.by_op("Mul"))
        said = say_count(shorter, "norm", "with a division for Reciprocal and Mul")
        return rewriter.result(say_count(joined, "norm", "as one operator"), said, default="no norm gets shorter")

    def _join(self, rewriter: Rewriter, pattern: NormPattern) -> bool:
        """Write a norm in parts as one operator; false where the opset has none that says the same."""
        op = "LayerNormalization" if pattern.centred else "RMSNormalization"
        read = _read_norm(rewriter, pattern)
        if read is None or rewriter.opset < SINCE[op] or (op == "RMSNormalization" and not self.newer):
            return False
        epsilon, scale, bias = read
        shape = rewriter.shape(pattern.x)
        inputs = [rewriter.constant_of(array, f"{pattern.last.output[0]}/{label}") for array, label in
                  ((scale, "scale"), *(((bias, "bias"),) if bias is not None else ()))]  # fmt: skip
        own = inputs if op == "LayerNormalization" else inputs[:1]  # RMSNormalization has no bias
        name = rewriter.add(op, [pattern.x, *own], pattern.last, shape, axis=-1, epsilon=epsilon)
        if own != inputs:
            name = rewriter.add("Add", [name, inputs[1]], pattern.last, shape)
        rewriter.replace(pattern.last.output[0], name)
        return True


FORMS: Final = ("operator", "parts")


def _check_form(name: str, form: str) -> None:
    if form not in FORMS:
        raise PolicyError(f"pass {name!r}: form is {form!r}; expected {' or '.join(FORMS)}")


def _read_norm(rewriter: Rewriter, pattern: NormPattern) -> tuple[float, Array, Array | None] | None:
    """The epsilon, the scale and the bias of a norm over the last axis; None for another form of a norm."""
    shape, nodes = rewriter.shape(pattern.x), pattern.nodes
    width = shape[-1] if shape else None
    count = Counter(node.op_type for node in nodes)
    after = nodes[[node.output[0] for node in nodes].index(pattern.quotient) + 1 :]
    inner = Counter(node.op_type for node in nodes if node not in after)
    wanted = Counter({"ReduceMean": 2, "Sub": 1} if pattern.centred else {"ReduceMean": 1})
    wanted.update({"Add": 1, "Sqrt": 1})
    inner.subtract({"Pow": 1} if count["Pow"] else {"Mul": 1})
    inner.subtract({"Div": 1} if count["Div"] else {"Reciprocal": 1, "Mul": 1})
    if shape is None or not isinstance(width, int) or +inner != wanted or any(number < 0 for number in inner.values()):
        return None
    if any(node.output[0] in rewriter.held for node in nodes[:-1]):
        return None
    axes = [rewriter.ints(input_of(node, 1)) for node in nodes if node.op_type == "ReduceMean"]
    if any(found not in ([-1], [len(shape) - 1]) for found in axes):
        return None
    root = next(node for node in nodes if node.op_type == "Sqrt")
    total = rewriter.producer(root.input[0], "Add")  # an epsilon added to the root is another norm
    epsilon = None if total is None else next(
        (number for name in total.input if (number := rewriter.scalar(name)) is not None), None
    )  # fmt: skip
    ends = {node.op_type: _vector(rewriter, node, len(shape), width) for node in after}
    if epsilon is None or any(array is None for array in ends.values()) or not set(ends) <= {"Mul", "Add"}:
        return None
    if not _is_by_row(rewriter, [node for node in nodes if node not in after], shape):
        return None
    dtype = helper.tensor_dtype_to_np_dtype(rewriter.dtype(pattern.x))
    scale, bias = ends.get("Mul"), ends.get("Add")
    if any(array is not None and array.dtype != dtype for array in (scale, bias)):
        return None  # the norm is in another dtype than its data
    return epsilon, np.ones(width, dtype) if scale is None else scale, bias


def _is_by_row(rewriter: Rewriter, nodes: Sequence[NodeProto], shape: tuple[Dim, ...]) -> bool:
    """Whether a mean or a root has its row's axis of size 1, or is expanded, wherever the data meets it.

    A mean without that axis is broadcast over the columns of a square matrix.
    """
    met = [name for node in nodes if node.op_type in ("Sub", "Div", "Mul") for name in node.input]
    return all(rewriter.shape(name) in (shape, (*shape[:-1], 1), ()) for name in met)


def _vector(rewriter: Rewriter, node: NodeProto, rank: int, width: int) -> Array | None:
    """The stored operand of a Mul or an Add with one element for each feature."""
    arrays = [array for name in node.input if (array := rewriter.constant(name)) is not None]
    if len(arrays) != 1 or not is_feature_vector(arrays[0], rank, width):
        return None
    return np.broadcast_to(arrays[0].reshape(-1), (width,)).copy()


def is_feature_vector(array: Array, rank: int, width: int) -> bool:
    """Whether an operand of data with `width` features has an element for each feature, or one, and adds no axis."""
    return array.ndim <= rank and (array.size == 1 or array.shape[-1] == array.size == width)


def _join_groups(rewriter: Rewriter, node: NodeProto) -> bool:
    """Write an InstanceNormalization of groups between two Reshapes, with the scale and the bias after them, as one
    GroupNormalization."""
    into, after = rewriter.producer(node.input[0], "Reshape"), rewriter.consumers[node.output[0]]
    if into is None or len(after) != 1 or after[0].op_type != "Reshape" or node.output[0] in rewriter.held:
        return False
    shape, grouped = rewriter.shape(into.input[0]), rewriter.shape(node.input[0])
    scale, bias = (rewriter.constant(name) for name in node.input[1:3])
    if rewriter.opset < SINCE["GroupNormalization"] or shape is None or shape != rewriter.shape(after[0].output[0]):
        return False
    if grouped is None or scale is None or bias is None or len(shape) < 3 or len(grouped) != 3:
        return False
    channels, groups = shape[1], grouped[1]
    if grouped[0] != shape[0] or not isinstance(channels, int) or not isinstance(groups, int) or channels % groups:
        return False
    last, factors = after[0], [np.repeat(array, channels // groups) for array in (scale, bias)]
    for op in ("Mul", "Add"):
        consumers = rewriter.consumers[last.output[0]]
        array = _channels(rewriter, consumers[0], shape) if len(consumers) == 1 and consumers[0].op_type == op else None
        if array is not None and last.output[0] not in rewriter.held:
            last = consumers[0]
            factors = [factor * array if op == "Mul" else factor for factor in factors]
            factors[1] = factors[1] + array if op == "Add" else factors[1]
    names = [rewriter.constant_of(factor, f"{last.output[0]}/{label}")
             for factor, label in zip(factors, ("scale", "bias"), strict=True)]  # fmt: skip
    epsilon = attribute_of(node, "epsilon", 1e-5)
    inputs = [into.input[0], *names]
    made = rewriter.add("GroupNormalization", inputs, last, shape, epsilon=epsilon, num_groups=groups)
    rewriter.replace(last.output[0], made)
    return True


def _channels(rewriter: Rewriter, node: NodeProto, shape: tuple[Dim, ...]) -> Array | None:
    """The stored operand of a Mul or an Add with one element for each channel, which axis 1 has."""
    arrays = [array for name in node.input if (array := rewriter.constant(name)) is not None]
    wanted = (shape[1], *[1] * (len(shape) - 2))
    return arrays[0].reshape(-1) if len(arrays) == 1 and arrays[0].shape in (wanted, (1, *wanted)) else None


def _divide(rewriter: Rewriter, node: NodeProto) -> bool:
    """Write x · (1 / √v) as x / √v, if nothing else reads the reciprocal."""
    for position in (0, 1):
        inverse = rewriter.own_producer(node.input[position], "Reciprocal")
        if inverse is None or rewriter.producer(inverse.input[0], "Sqrt") is None:
            continue
        name = node.output[0]
        if any(map(rewriter.is_kept, (name, *map(first_output, rewriter.consumers[name])))):
            return False  # a norm is kept in its operators
        inputs = [node.input[1 - position], inverse.input[0]]
        rewriter.replace(name, rewriter.add("Div", inputs, node, rewriter.shape(name)))
        return True
    return False


def _in_parts(rewriter: Rewriter, node: NodeProto, data: str, shape: tuple[Dim, ...], *, centred: bool) -> str:
    """Write the division by the root of the mean square over the last axis; the value before scale and bias."""
    axes = [rewriter.constant_ints([-1], "last_axis")] if rewriter.opset >= 18 else []
    settings: dict[str, Any] = {} if rewriter.opset >= 18 else {"axes": [-1]}
    kept = (*shape[:-1], 1)
    if centred:
        mean = rewriter.add("ReduceMean", [data, *axes], node, kept, keepdims=1, **settings)
        data = rewriter.add("Sub", [data, mean], node, shape)
    square = rewriter.add("Mul", [data, data], node, shape)
    spread = rewriter.add("ReduceMean", [square, *axes], node, kept, keepdims=1, **settings)
    dtype = helper.tensor_dtype_to_np_dtype(rewriter.dtype(node.input[0]))
    epsilon = rewriter.constant_of(np.array(attribute_of(node, "epsilon", 1e-5), dtype), "epsilon")
    root = rewriter.add("Sqrt", [rewriter.add("Add", [spread, epsilon], node, kept)], node, kept)
    return rewriter.add("Div", [data, root], node, shape)


def _write_row_norm(rewriter: Rewriter, node: NodeProto) -> bool:
    """A LayerNormalization or RMSNormalization over the last axis, in parts."""
    shape = rewriter.shape(node.input[0])
    if shape is None or attribute_of(node, "axis", -1) not in (-1, len(shape) - 1):
        return False
    name = _in_parts(rewriter, node, node.input[0], shape, centred=node.op_type == "LayerNormalization")
    for op, operand in (("Mul", input_of(node, 1)), ("Add", input_of(node, 2))):
        name = rewriter.add(op, [name, operand], node, shape) if operand else name
    rewriter.replace(node.output[0], name)
    return True


def _write_group_norm(rewriter: Rewriter, node: NodeProto) -> bool:
    """A GroupNormalization of fixed sizes, as a norm of the rows that a group is."""
    shape = rewriter.fixed_shape(node.input[0])
    scale, bias = (rewriter.constant(name) for name in node.input[1:3])
    groups = attribute_of(node, "num_groups")
    if shape is None or scale is None or bias is None or rewriter.opset < SINCE["GroupNormalization"]:
        return False
    rows = (shape[0], groups, math.prod(shape[1:]) // groups)
    data = rewriter.reshape(node.input[0], rows, node)
    name = rewriter.reshape(_in_parts(rewriter, node, data, rows, centred=True), shape, node)
    for op, array in (("Mul", scale), ("Add", bias)):
        wide = rewriter.constant_of(array.reshape(-1, *[1] * (len(shape) - 2)), f"{node.output[0]}/{op.lower()}")
        name = rewriter.add(op, [name, wide], node, shape)
    rewriter.replace(node.output[0], name)
    return True


WRITERS: Final = {
    "LayerNormalization": _write_row_norm,
    "RMSNormalization": _write_row_norm,
    "GroupNormalization": _write_group_norm,
}
"""Operator → the function that writes it in parts."""


APPROXIMATE: Final = {"Erf": "none", "Tanh": "tanh"}
"""The curve of a GELU in parts → the attribute `approximate` of Gelu. That of x · sigmoid(1.702 x) has no Gelu."""


@dataclass(frozen=True, slots=True)
class CanonicalGelu(RewriteStep, name="canonical-gelu", reads="structure"):
    """Write each GELU as one operator, or in parts. One operator is Gelu (`form: operator`); the parts are products,
    sums and Erf or Tanh (`form: parts`)."""

    form: str = "operator"

    def check(self, context: PassContext) -> None:
        _check_form(self.name, self.form)

    def why_not(self, ops: Set[str]) -> str:
        if self.form == "parts":
            return "" if "Gelu" in ops else "no GELU is one operator"
        return "" if ops & APPROXIMATE.keys() else "no GELU is in parts"

    def rewrite(self, rewriter: Rewriter) -> PassResult:
        if self.form == "parts":
            nodes = list(rewriter.by_op("Gelu"))
            for node in nodes:
                _write_parts(rewriter, node)
            return rewriter.result(say_count(len(nodes), "GELU", "in parts"))
        count = 0
        for found in find_gelus(GraphView(rewriter.model)):
            curve, value = found.nodes[0].op_type, found.value
            inner = [node.output[0] for node in found.nodes[:-1]]
            same = rewriter.dtype(found.pins[0]) == rewriter.dtype(value)
            if curve in APPROXIMATE and same and rewriter.held.keys().isdisjoint(inner) and value in rewriter.producers:
                if rewriter.opset < SINCE["Gelu"]:
                    return rewriter.result(f"opset {rewriter.opset} has no Gelu, opset {SINCE['Gelu']} has")
                inputs = [found.pins[0]]
                new = rewriter.add("Gelu", inputs, found.last, rewriter.shape(value), approximate=APPROXIMATE[curve])
                rewriter.replace(value, new)
                count += 1
        return rewriter.result(say_count(count, "GELU", "as one operator"), default="no GELU is in parts")


def _write_parts(rewriter: Rewriter, node: NodeProto) -> None:
    """x · ½ · (1 + erf(x / √2)), or with tanh(√(2/π) · (x + 0.044715 x³))."""
    x, shape = node.input[0], rewriter.shape(node.input[0])
    dtype = helper.tensor_dtype_to_np_dtype(rewriter.dtype(node.output[0]) or rewriter.dtype(x))

    def write(op: str, name: str, number: float | str) -> str:
        operand = rewriter.constant_of(np.array(number, dtype), "number") if not isinstance(number, str) else number
        return rewriter.add(op, [name, operand], node, shape)

    approximate = attribute_of(node, "approximate", b"none")
    if approximate == b"tanh":
        cube = write("Mul", write("Mul", write("Mul", x, x), x), 0.044715)
        curve = rewriter.add("Tanh", [write("Mul", write("Add", x, cube), math.sqrt(2 / math.pi))], node, shape)
    else:
        curve = rewriter.add("Erf", [write("Mul", x, math.sqrt(0.5))], node, shape)
    half = write("Mul", x, 0.5)
    rewriter.replace(node.output[0], write("Mul", half, write("Add", curve, 1.0)))
