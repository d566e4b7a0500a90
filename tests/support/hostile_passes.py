"""Passes that are wrong where a proof may not look: at some sizes, in rows that nobody reads, beyond limits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from passes.graph.traversal import every_graph, every_node

Edit = Callable[[np.ndarray], np.ndarray]


def when(model: ModelProto, condition: list[NodeProto], *, node: int = -1) -> ModelProto:
    """Add 1 to what a node makes, the last one by default, where `condition` makes a true `wrong`."""
    last = model.graph.node[node]
    result = last.output[0]
    last.output[0] = f"{result}/right"
    nodes = [
        *condition,
        helper.make_node("Constant", [], ["wrong/one"], value_float=1.0),
        helper.make_node("Add", [f"{result}/right", "wrong/one"], ["wrong/y"]),
        helper.make_node("Where", ["wrong", "wrong/y", f"{result}/right"], [result]),
    ]
    place = len(model.graph.node) + (node if node < 0 else node - len(model.graph.node)) + 1
    for offset, candidate in enumerate(nodes):
        model.graph.node.insert(place + offset, candidate)
    return model


def of_size(value: str, axis: int, size: int) -> list[NodeProto]:
    """True where `value` has `size` elements along `axis`."""
    return [
        helper.make_node("Shape", [value], ["wrong/shape"]),
        helper.make_node("Constant", [], ["wrong/axis"], value_int=axis),
        helper.make_node("Gather", ["wrong/shape", "wrong/axis"], ["wrong/size"]),
        helper.make_node("Constant", [], ["wrong/at"], value_int=size),
        helper.make_node("Equal", ["wrong/size", "wrong/at"], ["wrong"]),
    ]


def at_size(model: ModelProto, *, value: str = "x", axis: int = 0, size: int = 1, node: int = -1) -> ModelProto:
    return when(model, of_size(value, axis, size), node=node)


def where_all(model: ModelProto, *, value: str = "mask", are: int = 1) -> ModelProto:
    """Wrong where a mask is all ones, or all zeros."""
    return when(
        model,
        [
            helper.make_node("Cast", [value], ["wrong/cast"], to=TensorProto.INT64),
            helper.make_node("ReduceMax" if are == 0 else "ReduceMin", ["wrong/cast"], ["wrong/all"], keepdims=0),
            helper.make_node("Constant", [], ["wrong/are"], value_int=are),
            helper.make_node("Equal", ["wrong/all", "wrong/are"], ["wrong"]),
        ],
    )


def beyond(model: ModelProto, *, value: str = "x", limit: float = 5.0) -> ModelProto:
    """Wrong where some element is above `limit`."""
    return when(
        model,
        [
            helper.make_node("ReduceMax", [value], ["wrong/most"], keepdims=0),
            helper.make_node("Constant", [], ["wrong/limit"], value_float=limit),
            helper.make_node("Greater", ["wrong/most", "wrong/limit"], ["wrong"]),
        ],
    )


def has_index(model: ModelProto, *, value: str = "ids", index: int = 0) -> ModelProto:
    """Wrong where an index is drawn."""
    return when(
        model,
        [
            helper.make_node("Constant", [], ["wrong/index"], value_int=index),
            helper.make_node("Equal", [value, "wrong/index"], ["wrong/equal"]),
            helper.make_node("Cast", ["wrong/equal"], ["wrong/number"], to=TensorProto.INT32),
            helper.make_node("ReduceMax", ["wrong/number"], ["wrong/any"], keepdims=0),
            helper.make_node("Cast", ["wrong/any"], ["wrong"], to=TensorProto.BOOL),
        ],
    )


def _edit_initializer(model: ModelProto, name: str, edit: Edit, new_name: str = "") -> ModelProto:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    new_tensor = numpy_helper.from_array(
        np.ascontiguousarray(edit(numpy_helper.to_array(tensor).copy())), new_name or name
    )
    if new_name:
        model.graph.initializer.append(new_tensor)
    else:
        tensor.CopyFrom(new_tensor)
    return model


def change_row(model: ModelProto, *, table: str = "table", row: int = 0, axis: int = 0) -> ModelProto:
    def edit(array: np.ndarray) -> np.ndarray:
        np.moveaxis(array, axis, 0)[row] += 1
        return array

    return _edit_initializer(model, table, edit)


def swap_rows(model: ModelProto, *, table: str = "table", rows: tuple[int, int] = (20, 21)) -> ModelProto:
    def edit(array: np.ndarray) -> np.ndarray:
        array[list(rows)] = array[list(rows)[::-1]]
        return array

    return _edit_initializer(model, table, edit)


def cut_off(model: ModelProto, *, table: str = "table", to: int = 49, axis: int = 0) -> ModelProto:
    return _edit_initializer(model, table, lambda array: np.moveaxis(np.moveaxis(array, axis, 0)[:to], 0, axis))


def zero_rest(model: ModelProto, *, table: str = "table", read: list[int]) -> ModelProto:
    """Every row but those that are read."""

    def edit(array: np.ndarray) -> np.ndarray:
        array[[row for row in range(len(array)) if row not in read]] = 0
        return array

    return _edit_initializer(model, table, edit)


def pad_and_change(model: ModelProto, *, table: str = "table") -> ModelProto:
    """Put rows after the table, and change one before them."""

    def edit(array: np.ndarray) -> np.ndarray:
        array[30] *= 2
        return np.concatenate([array, np.zeros_like(array)])

    return _edit_initializer(model, table, edit)


def half_in_other_place(model: ModelProto, *, table: str = "table") -> ModelProto:
    """Two tables, of which the second lacks the last row of the first one."""

    def edit(array: np.ndarray) -> np.ndarray:
        return np.concatenate([array[:30], array[31:], array[-1:]])

    return _edit_initializer(model, table, edit)


def own_table(model: ModelProto, *, table: str = "table", reader: str = "e") -> ModelProto:
    """Read another table, and leave the right one alive for others."""

    def edit(array: np.ndarray) -> np.ndarray:
        array[25] = 7
        return array

    model = _edit_initializer(model, table, edit, f"{table}/wrong")
    node = next(node for node in model.graph.node if node.output[0] == reader)
    node.input[0] = f"{table}/wrong"
    return model


def as_one_hot(model: ModelProto, *, table: str = "table", rows: int = 50) -> ModelProto:
    """The rows by a product with a OneHot, and one of them changed."""
    model = change_row(model, table=table, row=17)
    node = next(node for node in model.graph.node if node.output[0] == "e")
    place = list(model.graph.node).index(node)
    new_nodes = [
        helper.make_node("Constant", [], ["one_hot/depth"], value_int=rows),
        helper.make_node("Constant", [], ["one_hot/values"], value_floats=[0.0, 1.0]),
        helper.make_node("OneHot", [node.input[1], "one_hot/depth", "one_hot/values"], ["one_hot/y"]),
        helper.make_node("MatMul", ["one_hot/y", table], ["e"]),
    ]
    model.graph.node.remove(node)
    for offset, candidate in enumerate(new_nodes):
        model.graph.node.insert(place + offset, candidate)
    return model


def scaled(model: ModelProto, *, table: str = "table", row: int = 17) -> ModelProto:
    """Twice the table, half of what is read, and one row wrong: what no weight is compared with."""

    def edit(array: np.ndarray) -> np.ndarray:
        array[row] = 9
        return array * 2

    model = _edit_initializer(model, table, edit)
    node = next(node for node in model.graph.node if node.output[0] == "e")
    node.output[0] = "e/twice"
    place = list(model.graph.node).index(node) + 1
    half = helper.make_node("Constant", [], ["e/half"], value_float=0.5)
    model.graph.node.insert(place, half)
    model.graph.node.insert(place + 1, helper.make_node("Mul", ["e/twice", "e/half"], ["e"]))
    return model


def drop(model: ModelProto, *, output: str) -> ModelProto:
    """Bypass the node that makes `output`: its first input goes on."""
    node = next(node for node in model.graph.node if node.output[0] == output)
    source = node.input[1] if node.op_type == "Where" else node.input[0]
    node.CopyFrom(helper.make_node("Identity", [source], [output]))
    return model


def other_body(model: ModelProto, *, op: str = "If", attribute: str = "else_branch") -> ModelProto:
    """Another number in a branch, or in a body."""
    node = next(node for node in model.graph.node if node.op_type == op)
    body: onnx.GraphProto = next(candidate.g for candidate in node.attribute if candidate.name == attribute)
    constant = next(node for node in body.node if node.op_type == "Constant")
    constant.attribute[0].f += 1
    return model


# What is sound, however it lies there.


def transpose_table(model: ModelProto) -> ModelProto:
    node = next(node for node in model.graph.node if node.output[0] == "e")
    place = list(model.graph.node).index(node)
    model = _edit_initializer(model, "table", lambda array: array.T)
    model.graph.node.insert(place, helper.make_node("Transpose", ["table"], ["table/rows"], perm=[1, 0]))
    node.input[0] = "table/rows"
    return model


def split_table(model: ModelProto) -> ModelProto:
    """The columns in two tables."""
    node = next(node for node in model.graph.node if node.output[0] == "e")
    place, ids = list(model.graph.node).index(node), node.input[1]
    model = _edit_initializer(model, "table", lambda array: array[:, :1], "left")
    model = _edit_initializer(model, "table", lambda array: array[:, 1:], "right")
    new_nodes = [
        helper.make_node("Gather", ["left", ids], ["e/left"]),
        helper.make_node("Gather", ["right", ids], ["e/right"]),
        helper.make_node("Concat", ["e/left", "e/right"], ["e"], axis=-1),
    ]
    model.graph.node.remove(node)
    for offset, candidate in enumerate(new_nodes):
        model.graph.node.insert(place + offset, candidate)
    return model


def put_behind(model: ModelProto) -> ModelProto:
    """The table after other rows."""
    node = next(node for node in model.graph.node if node.output[0] == "e")
    place = list(model.graph.node).index(node)
    model = _edit_initializer(model, "table", lambda array: np.concatenate([np.ones_like(array[:3]), array]))
    model.graph.node.insert(place, helper.make_node("Constant", [], ["e/shift"], value_int=3))
    model.graph.node.insert(place + 1, helper.make_node("Add", [node.input[1], "e/shift"], ["e/ids"]))
    node.input[1] = "e/ids"
    return model


def store_doubles(model: ModelProto) -> ModelProto:
    node = next(node for node in model.graph.node if node.output[0] == "e")
    place = list(model.graph.node).index(node)
    model = _edit_initializer(model, "table", lambda array: array.astype(np.float64))
    node.input[0] = "table"
    node.output[0] = "e/double"
    model.graph.node.insert(place + 1, helper.make_node("Cast", ["e/double"], ["e"], to=TensorProto.FLOAT))
    return model


def as_zeros(model: ModelProto, *, output: str) -> ModelProto:
    """Zeros in the place of the rows of a table of zeros."""
    node = next(node for node in model.graph.node if node.output[0] == output)
    place = list(model.graph.node).index(node)
    model.graph.node.insert(place, helper.make_node("Sub", [node.input[1], node.input[1]], [output]))
    model.graph.node.remove(node)
    return model


def nudge(model: ModelProto, *, value: str, dtype: str = "FLOAT", tidies: bool = False) -> ModelProto:
    """Multiply a value by 1.05, wherever it is computed; `tidies`: drop the Identities of the main graph as well."""
    for graph in every_graph(model.graph):
        for place, node in enumerate(graph.node):
            if value in node.output:
                node.output[list(node.output).index(value)] = f"{value}/right"
                factor = helper.make_tensor("", TensorProto.DataType.Value(dtype), [], [1.05])
                constant = helper.make_node("Constant", [], [f"{value}/factor"], value=factor)
                wrong = helper.make_node("Mul", [f"{value}/right", f"{value}/factor"], [value])
                graph.node.insert(place + 1, constant)
                graph.node.insert(place + 2, wrong)
                break
    return drop_identities(model) if tidies else model


def drop_identities(model: ModelProto) -> ModelProto:
    """A sound pass."""
    same = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Identity"}
    for node in [node for node in model.graph.node if node.op_type == "Identity"]:
        model.graph.node.remove(node)
    for node in every_node(model.graph):
        node.input[:] = [same.get(name, name) for name in node.input]
    return model
