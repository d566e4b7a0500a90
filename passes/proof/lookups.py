"""Find lookups: nodes that read rows of a constant table, selected by indices that an input decides.

A draw proves nothing about rows that it does not read. So indices are drawn over all rows of their table
(`rows_by_input`), and the gauges measure which rows were read (`find_lookups`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from passes.graph.index import GraphIndex
from passes.graph.op_facts import ARRANGING, CONTRACTIONS, ONNX_DOMAINS, RECURRENT, SIZES, attribute_of, input_of
from passes.graph.traversal import bodies_in, every_node, reads_of, walk
from passes.structures.axes import Side, product_of
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class Lookup:
    """One node that reads rows of a table.

    `data` names the table, `axis` its axis of rows, `selectors` the values that select the rows. `stored` is the table
    itself if a body of If, Loop or Scan stores it, else None. `is_nested`: the node is in a body, where its values
    cannot be measured from outside.
    """

    output: str
    op: str
    data: str
    axis: int
    selectors: tuple[str, ...]
    stored: TensorProto | None = None
    is_nested: bool = False
    one_hot: int | None = None
    """For a product of the table with a one-hot value (`selectors`): the axis of that value that counts the rows."""
    by_value: bool = False
    """Whether the selectors depend on the elements of some input, and not only on its shape."""

    @property
    def reads_whole_rows(self) -> bool:
        """Whether a lookup that reads part of a row reads all of the row."""
        return self.op not in ("GatherND", "GatherElements")

    def as_rows(self, table: np.ndarray) -> np.ndarray:
        """`table` as a matrix [rows, elements of a row]."""
        return np.moveaxis(table, self.axis, 0).reshape(table.shape[self.axis], -1)

    def rows_read(self, dims: tuple[int, ...], values: Mapping[str, np.ndarray]) -> np.ndarray:
        """bool[rows]: which rows of a table with these `dims` are read; `values`: the selectors' arrays by name."""
        count = dims[self.axis]
        read = np.zeros(count, bool)
        if self.op == "Slice":
            read[_sliced_rows(count, self.axis % len(dims), [values.get(name) for name in self.selectors])] = True
        elif self.one_hot is not None:
            hot = np.moveaxis(values[self.selectors[0]], self.one_hot, 0)
            read |= hot.reshape(count, -1).any(axis=1)
        elif self.op == "Compress":
            picked = values[self.selectors[0]].ravel()
            read[: picked.size] = picked[:count]
        else:
            selectors = values[self.selectors[0]]
            indices = (selectors[..., 0] if self.op == "GatherND" else selectors).ravel().astype(np.int64)
            read[indices[(indices >= -count) & (indices < count)]] = True
        return read


def _sliced_rows(count: int, axis: int, bounds: list[np.ndarray | None]) -> slice:
    starts, ends, axes, steps = (*bounds, None, None, None, None)[:4]
    if starts is None or ends is None:
        return slice(None)
    over = range(len(starts)) if axes is None else [int(number) for number in axes]
    index = next((index for index, sliced in enumerate(over) if sliced == axis), None)
    if index is None:
        return slice(None)
    step = 1 if steps is None else int(steps[index])
    start, stop = int(starts[index]), int(ends[index])
    # ONNX writes "to the very front" as a number far below zero; Python's slices would count it from the back.
    return slice(start, None if step < 0 and stop < -count else stop, step)


def find_lookups(model: DetachedModel) -> list[Lookup]:
    """All lookups that an output depends on, also inside of bodies."""
    if not _has_any(model.proto.graph):
        return []
    index = model.index
    constant = index.folded
    lookups: list[Lookup] = []
    view = cache(lambda: GraphView(model))  # few models have such a product
    for node in model.index.live:
        lookup = _lookup(node, constant, index.initializers) or _product_with_one_hot(view, node, index)
        if lookup is not None:
            lookups.append(lookup)
        lookups.extend(_fused_lookups(node, constant))
        for body in bodies_in(node):
            lookups.extend(_in_body(body, constant))
    return lookups


def _has_any(graph: GraphProto) -> bool:
    return any(node.op_type in {EMBEDS, *OPS, *ONE_HOT} for node in every_node(graph))


def _in_body(body: GraphProto, outside: Collection[str]) -> Iterator[Lookup]:
    """The lookups of a body, in its own tables or in constants of the graph around it."""
    index = GraphIndex(body)
    own = index.initializers | index.constants
    computed = index.producers.keys() | index.inputs.keys()
    constant = {*own, *(name for name in outside if name not in computed)}
    for node in body.node:
        lookup = _lookup(node, constant, own)
        if lookup is not None:
            stored = own.get(lookup.data)
            yield Lookup(lookup.output, lookup.op, lookup.data, lookup.axis, lookup.selectors, stored, is_nested=True)
        for inner in bodies_in(node):
            yield from _in_body(inner, constant - own.keys())


def _lookup(node: NodeProto, constant: Collection[str], initializers: Mapping[str, TensorProto]) -> Lookup | None:
    if node.domain not in ONNX_DOMAINS or node.op_type not in OPS:
        return None
    if node.input[0] not in constant or _has_constant_selectors(node, constant):
        return None
    axis = attribute_of(node, "axis", 0)
    selectors = tuple(node.input[1:])
    if node.op_type == "Slice":
        axis = _first_axis(node, initializers)
    elif node.op_type == "GatherND":
        axis = 0
    return Lookup(node.output[0], node.op_type, node.input[0], axis, selectors)


def _fused_lookups(node: NodeProto, constant: Collection[str]) -> Iterator[Lookup]:
    """The tables of words, positions and segments that onnxruntime's fused operator reads."""
    if node.op_type != EMBEDS:
        return
    operands = dict(enumerate(node.input))
    for table, ids in ((2, 0), (3, 8), (4, 1)):
        data, selectors = operands.get(table, ""), operands.get(ids, "")
        if data and data in constant and (not selectors or selectors not in constant):
            yield Lookup(node.output[0], node.op_type, data, 0, (selectors,), is_nested=not selectors)


def _has_constant_selectors(node: NodeProto, constant: Collection[str]) -> bool:
    """Whether the selectors are constant, so that the result is too."""
    return len(node.input) < 2 or all(name in constant for name in node.input[1:])


def _first_axis(node: NodeProto, initializers: Mapping[str, TensorProto]) -> int:
    stored = initializers.get(node.input[3]) if len(node.input) > 3 else None
    if stored is None or stored.data_type not in (TensorProto.INT64, TensorProto.INT32):
        return 0
    axes = numpy_helper.to_array(stored)
    return int(axes.ravel()[0]) if axes.size else 0


def _product_with_one_hot(view: Callable[[], GraphView], node: NodeProto, index: GraphIndex) -> Lookup | None:
    """The lookup by a product with a one-hot value: MatMul(OneHot(indices), table)."""
    if node.op_type not in CONTRACTIONS or not any(_is_one_hot(name, index) for name in node.input):
        return None
    product = product_of(view(), node)
    if product is None:
        return None
    sides: tuple[Side, Side] = (1, 0)
    for side in sides:
        table, hot = product.operands[side], product.operands[1 - side]
        over, counts = product.contracted_axis(side), product.contracted_axis(sides[side])
        if table not in index.folded or not _is_one_hot(hot, index) or over is None or counts is None:
            continue
        if all(-axis <= len(view().dims(name) or ()) for name, axis in ((table, over), (hot, counts))):
            return Lookup(node.output[0], node.op_type, table, over, (hot,), one_hot=counts)
    return None


def _is_one_hot(name: str, index: GraphIndex) -> bool:
    """Whether a value is a one-hot encoding, made by OneHot or Equal."""
    node = index.producer(index.origin_of(name, ARRANGING))
    if node is None or node.op_type not in ONE_HOT:
        return False
    return [name in index.folded for name in node.input[:2]] in ([[False, True]] if node.op_type == "OneHot" else MIXED)


def values_of_inputs(model: DetachedModel) -> set[str]:
    """Values that depend on the elements of some input, and not only on its shape."""
    graph = model.proto.graph
    variable = {*model.index.required_inputs}
    for node in graph.node:
        if node.op_type not in SIZES and not variable.isdisjoint(reads_of(node)):
            variable.update(node.output)
    return variable


def has_loops(model: DetachedModel) -> bool:
    """Whether an input may be a trip count: how often a loop runs."""
    return any(node.op_type == "Loop" for node in every_node(model.proto.graph))


def rows_by_input(model: DetachedModel) -> dict[str, int]:
    """Inputs that are indices of tables → the number of rows of the smallest table that they index."""
    lookups = [lookup for lookup in find_lookups(model) if lookup.op in INDEXED]
    view = GraphView(model)
    sizes: dict[str, int] = {}
    for lookup in lookups:
        shape = tuple(lookup.stored.dims) if lookup.stored is not None else view.dims(lookup.data) or ()
        rows = shape[lookup.axis] if lookup.axis < len(shape) else ""
        if isinstance(rows, int):
            for name in _sources_of_moves(lookup.selectors[0], view.producers) & view.required_inputs.keys():
                sizes[name] = min(rows, sizes.get(name, rows))
    return sizes


def length_inputs(model: DetachedModel) -> frozenset[str]:
    """Inputs that recurrent operators read as the lengths of their sequences."""
    view = GraphView(model)
    recurrent = (node for node in model.index.live if node.op_type in RECURRENT and input_of(node, LENGTHS))
    read = [_sources_of_moves(input_of(node, LENGTHS), view.producers) for node in recurrent]
    return frozenset().union(*read) & view.required_inputs.keys()


def _sources_of_moves(name: str, producers: Mapping[str, NodeProto]) -> set[str]:
    """The values from which ops that only move or cast elements compute `name`."""

    def before(value: str) -> Sequence[str]:
        node = producers.get(value)
        if node is None or node.op_type in ("Concat", "Equal"):
            return () if node is None else node.input
        is_moved = node.op_type in PASSED_ON or (node.op_type == "TopK" and value == node.output[0])
        return node.input[:1] if is_moved else ()

    return {value for value in walk([name], before) if value not in producers}


ONE_HOT: Final = frozenset({"OneHot", "Equal"})
MIXED: Final = ([False, True], [True, False])
EMBEDS: Final = "EmbedLayerNormalization"
INDEXED: Final = frozenset({"Gather", "GatherElements", EMBEDS, *CONTRACTIONS})
OPS: Final = frozenset({"Gather", "GatherElements", "GatherND", "Slice", "Compress"})
LENGTHS: Final = 4
"""The position of the lengths among the inputs of a recurrent operator."""

PASSED_ON: Final = ARRANGING | {"Slice", "Gather", "Expand", "Tile", "Split", "OneHot"}
"""Ops whose result holds elements of their first input, or encodes them."""
