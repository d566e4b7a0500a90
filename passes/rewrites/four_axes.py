"""Values of four axes, which some accelerators want, by choice.

The step walks through the graph once and writes each operator that it knows for a *twin* of its result: the same
elements in four axes. What other operators read, and what is an output, is made of the twin again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from onnx import NodeProto, TensorProto

from passes.graph.op_facts import BROADCASTING, CURVES, RESHAPES, attribute_of, broadcasts, input_of, is_scaled
from passes.rewrites.merge_layout import merge_chains
from passes.rewrites.rewriter import Rewriter, RewriteStep
from passes.step import PassResult
from passes.suggest import say_count

Shape = tuple[int, ...]

REDUCTIONS: Final = frozenset({"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2"})

AXES: Final = {"Slice": 3, **dict.fromkeys(REDUCTIONS, 1)}
"""Operator → the place among its inputs of the axes, which are an attribute in early opsets."""

ALONG_AXIS: Final = frozenset({"Softmax", "LogSoftmax", "Concat", "Split", "Slice", "LpNormalization"}) | REDUCTIONS
"""Operators along one axis of their data, which keep the number of axes; a reduction does where `keepdims` is set."""


@dataclass(frozen=True, slots=True)
class To4d(RewriteStep, name="to-4d", reads="values"):
    """Give operators on values of fewer or more axes values of four. Axes of size 1 come first, and axes that a
    Transpose or a sum leaves together are one axis.

    Sizes have to be fixed. An operator that is not known reads the value in its own shape, by a Reshape. `merge-layout`
    after it would write matrices again.
    """

    def rewrite(self, rewriter: Rewriter) -> PassResult:
        writer = _FourAxes(rewriter)
        nodes = writer.find_nodes()
        for node in nodes:
            writer.write(node)
        rewriter.replace_made(nodes, writer.twin_in_own_shape)
        while nodes and merge_chains(rewriter):
            pass
        return rewriter.result(say_count(len(nodes), "operator", "on values of four axes"), default=NOTHING)


NOTHING: Final = "every operator that is known has values of four axes, or of sizes that are not fixed"

RANK: Final = 4


@dataclass(slots=True)
class _FourAxes:
    """Writes operators on twins of four axes; a twin of a value of more axes has its elements in order, in any shape of
    at most four axes."""

    rewriter: Rewriter
    twins: dict[str, str] = field(default_factory=dict)

    def find_nodes(self) -> list[NodeProto]:
        """The nodes to write, in graph order: a layout operator only where one of its consumers is among them, or where
        an operator that is known makes or reads its value of more axes."""
        known = {id(node): shapes for node in self.rewriter.nodes if (shapes := self._shapes(node)) is not None}
        found: dict[str, NodeProto] = {}
        for node in reversed(self.rewriter.nodes):
            shapes = known.get(id(node))
            if shapes is None or all(len(shape) == RANK for shape in shapes):
                continue
            if node.op_type in RESHAPES and not self._is_needed(node, shapes, found, known):
                continue
            found[node.output[0]] = node
        return list(found.values())[::-1]

    def _is_needed(
        self, node: NodeProto, shapes: Sequence[Shape], found: Mapping[str, NodeProto], known: Mapping[int, list[Shape]]
    ) -> bool:
        """Whether a layout operator is written. Next to an operator that is not known, it stays as it is."""
        consumers = self.rewriter.consumers[node.output[0]]
        if all(len(shape) <= RANK for shape in shapes):
            return len(shapes[-1]) != RANK and any(consumer.output[0] in found for consumer in consumers)
        producer = self.rewriter.producer(node.input[0]) if len(shapes[0]) > RANK else None
        neighbours = [*([] if producer is None else [producer]), *(consumers if len(shapes[-1]) > RANK else [])]
        return any(id(neighbour) in known for neighbour in neighbours)

    def _shapes(self, node: NodeProto) -> list[Shape] | None:
        """The shapes of the computed values of a node that is known; None for others."""
        rewriter = self.rewriter
        names = [name for name in (*node.input, *node.output) if name and rewriter.constant(name) is None]
        shapes = [rewriter.fixed_shape(name) for name in names]
        known = [shape for shape in shapes if shape is not None and 0 not in shape]
        if node.domain or len(known) < len(shapes) or rewriter.dtype(node.output[0]) in (0, TensorProto.INT64):
            return None
        if not known:
            return None
        most, op = max(map(len, known)), node.op_type
        is_known = op in CURVES | RESHAPES or bool(_permutation(node, len(known[-1])))
        if broadcasts(node):
            is_known = most <= RANK or len(_blocks(self._operands(node), known[-1])) <= RANK
        elif op == "MatMul":
            is_known = all(len(shape) >= 2 for shape in self._operands(node)) and (most <= RANK or self._is_batch(node))
        elif op in ("LayerNormalization", "RMSNormalization"):
            is_known = most < RANK and len(node.output) == 1
        elif op == "Gemm":
            is_known = all(rewriter.constant(name) is not None for name in node.input[1:]) and not is_scaled(node)
        elif op in ALONG_AXIS:
            is_known = self._axis(node) is not None and rewriter.held.keys().isdisjoint(node.output[1:])
        return known if is_known else None

    def _operands(self, node: NodeProto) -> list[Shape]:
        return [self.rewriter.fixed_shape(name) or () for name in node.input]

    def _is_batch(self, node: NodeProto) -> bool:
        left, right = self._operands(node)
        return left[:-2] == right[:-2]

    def _axis(self, node: NodeProto) -> int | None:
        """The one axis along which a node works, counted from the first; None where it is not one."""
        rank = len(self.rewriter.fixed_shape(node.input[0]) or ())
        axes: list[int] | None = [attribute_of(node, "axis", 0 if node.op_type == "Split" else -1)]
        if node.op_type in AXES:
            given = input_of(node, AXES[node.op_type])
            axes = self.rewriter.ints(given) if given else attribute_of(node, "axes")
            if node.op_type in REDUCTIONS and not attribute_of(node, "keepdims", 1):
                return None
        return axes[0] % rank if axes and len(axes) == 1 and rank else None

    def write(self, node: NodeProto) -> None:
        """Write a node that is known; its outputs have twins afterwards."""
        rewriter, op, name = self.rewriter, node.op_type, node.output[0]
        shape = rewriter.fixed_shape(name) or ()
        wide = _widen(shape)
        if op in RESHAPES:
            source = self._twin(node.input[0])
            fits = len(shape) > RANK or rewriter.fixed_shape(source) == wide
            self.twins[name] = source if fits else self._reshape(source, wide, node)
        elif op in ("Transpose", "Einsum"):
            self.twins[name] = self._transpose(node, self._operands(node)[0], _permutation(node, len(shape)))
        elif op in CURVES:
            source = self._twin(node.input[0])
            self.twins[name] = rewriter.add_copy(node, [source, *node.input[1:]], rewriter.fixed_shape(source))
        elif op in BROADCASTING:
            self._write_blocks(node, shape)
        elif op == "MatMul":
            inputs = [
                self._as(read, (1, math.prod(own[:-2]), *own[-2:]) if len(own) > RANK else _widen(own), node)
                for read, own in zip(node.input, self._operands(node), strict=True)
            ]
            batch = (1, math.prod(shape[:-2]), *shape[-2:]) if len(shape) > RANK else wide
            self.twins[name] = rewriter.add_copy(node, inputs, batch)
        elif op == "Gemm":
            self._write_gemm(node, wide)
        else:
            self._write_along_axis(node)

    def _write_blocks(self, node: NodeProto, shape: Shape) -> None:
        operands = self._operands(node)
        blocks = _blocks(operands, shape) if len(shape) > RANK else [[axis] for axis in range(len(shape))]
        inputs = []
        for name, own in zip(node.input, operands, strict=True):
            full = (*[1] * (len(shape) - len(own)), *own)
            inputs.append(
                self._as(name, _widen(tuple(math.prod(full[axis] for axis in block) for block in blocks)), node)
            )
        wide = _widen(tuple(math.prod(shape[axis] for axis in block) for block in blocks))
        self.twins[node.output[0]] = self.rewriter.add_copy(node, inputs, wide)

    def _write_gemm(self, node: NodeProto, wide: Shape) -> None:
        """Write MatMul and Add, since Gemm takes matrices alone."""
        rewriter, weight = self.rewriter, self.rewriter.constant(node.input[1])
        assert weight is not None
        matrix = np.ascontiguousarray(weight.T) if attribute_of(node, "transB", 0) else weight
        name = node.input[1] if matrix is weight else rewriter.constant_of(matrix, f"{node.input[1]}_transposed")
        made = rewriter.add("MatMul", [self._twin(node.input[0]), name], node, wide)
        self.twins[node.output[0]] = (
            rewriter.add("Add", [made, node.input[2]], node, wide) if input_of(node, 2) else made
        )

    def _write_along_axis(self, node: NodeProto) -> None:
        rewriter, axis = self.rewriter, self._axis(node)
        own = self._operands(node)[0]
        if node.op_type in ("LayerNormalization", "RMSNormalization"):
            axis = attribute_of(node, "axis", -1) % len(own)
        assert axis is not None

        def reshape_for(shape: Shape) -> Shape:
            if len(shape) <= RANK:
                return _widen(shape)
            return 1, math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])

        at = axis + RANK - len(own) if len(own) <= RANK else 2
        data = len(node.input) if node.op_type == "Concat" else 1
        inputs = [self._as(name, reshape_for(self._operands(node)[position]), node) if position < data else name
                  for position, name in enumerate(node.input)]  # fmt: skip
        changed: dict[str, int | list[int]] = {}
        place = AXES.get(node.op_type)
        if place is None:
            changed = {"axis": at}
        elif input_of(node, place):
            inputs[place] = rewriter.constant_ints([at], "axis")
        else:
            changed = {"axes": [at]}
        shapes = [reshape_for(rewriter.fixed_shape(name) or ()) for name in node.output]
        self.twins.update(zip(node.output, rewriter.add_copies(node, inputs, shapes, **changed), strict=True))

    def _transpose(self, node: NodeProto, shape: Shape, perm: Sequence[int]) -> str:
        """Transpose at most four blocks of axes at a time: each call brings one block to the front of what is left."""
        name = self._twin(node.input[0])
        if len(shape) <= RANK:
            first = RANK - len(shape)
            return self._turn(name, _widen(shape), [*range(first), *(axis + first for axis in perm)], node)
        order = list(range(len(shape)))
        for position, axis in enumerate(perm):
            at = order.index(axis)
            if at > position and any(shape[passed] > 1 for passed in order[position:at]) and shape[axis] > 1:
                end = at + 1
                while end < len(order) and end - at + position < len(perm) and order[end] == perm[end - at + position]:
                    end += 1
                parts = order[:position], order[position:at], order[at:end], order[end:]
                sizes = tuple(math.prod(shape[moved] for moved in part) for part in parts)
                name = self._turn(name, sizes, [0, 2, 1, 3], node)
                order = [*order[:position], *order[at:end], *order[position:at], *order[end:]]
            elif at > position:
                order.insert(position, order.pop(at))
        return name

    def _turn(self, name: str, shape: Shape, perm: Sequence[int], like: NodeProto) -> str:
        return self.rewriter.transpose(self._reshape(name, shape, like), perm, like)

    def _twin(self, name: str) -> str:
        """The twin of a value: axes of size 1 come first; of more than four axes, the elements in order."""
        if name not in self.twins:
            shape = self.rewriter.fixed_shape(name) or ()
            wide = _widen(shape) if len(shape) <= RANK else (math.prod(shape[:-3]), *shape[-3:])
            self.twins[name] = self._reshape(name, wide, None)
        return self.twins[name]

    def twin_in_own_shape(self, name: str) -> str:
        """The twin of a value, in the shape of the value."""
        return self._reshape(self.twins[name], self.rewriter.fixed_shape(name) or (), None)

    def _as(self, name: str, shape: Shape, like: NodeProto) -> str:
        """An operand in a shape; a constant of fewer elements than axes need broadcasts as it is."""
        array = self.rewriter.constant(name)
        if array is None:
            return self._reshape(self._twin(name), shape, like)
        if array.ndim <= RANK and _widen(array.shape) == shape and like.op_type != "Concat":
            return name
        return self.rewriter.constant_of(array.reshape(shape), f"{name}_4d")

    def _reshape(self, name: str, shape: Shape, like: NodeProto | None) -> str:
        rewriter = self.rewriter
        if rewriter.fixed_shape(name) == shape:
            return name
        return rewriter.reshape(name, shape, like or rewriter.producer(name) or NodeProto(output=[name]))


def _widen(shape: Shape) -> Shape:
    return (*[1] * (RANK - len(shape)), *shape)


def _permutation(node: NodeProto, rank: int) -> list[int]:
    """The order of axes that a Transpose writes, or an Einsum that does the same; empty for another operator."""
    if node.op_type == "Transpose":
        return list(attribute_of(node, "perm", range(rank)[::-1]))
    before, _, after = attribute_of(node, "equation", b"").decode().replace(" ", "").partition("->")
    is_order = node.op_type == "Einsum" and len(set(before)) == rank and sorted(before) == sorted(after)
    return [before.index(letter) for letter in after] if is_order and before.isalpha() else []


def _blocks(operands: Sequence[Shape], shape: Shape) -> list[list[int]]:
    """The axes of a broadcast result, where neighbours along which the same operands have size 1 are one block."""
    full = [(*[1] * (len(shape) - len(own)), *own) for own in operands]
    blocks: list[list[int]] = []
    last: list[bool] = []
    for axis in range(len(shape)):
        ones = [own[axis] == 1 for own in full]
        if blocks and (all(ones) or not last or ones == last):
            blocks[-1].append(axis)
        else:
            blocks.append([axis])
        last = last if all(ones) else ones
    return blocks
