"""Find the constants that mask attention: floats of -9000 or less that reach a Softmax and nothing else."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from onnx import NodeProto, TensorProto

from passes.graph.op_facts import ARRANGING, ONNX_DOMAINS, attribute_of
from passes.graph.traversal import reads_of, walk
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel

MASKING: Final = 9000.0
"""A constant this far below 0 masks: the usual ones are -1e4, -65504, -1e9, -3.4e38 and minus infinity."""

FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})


@dataclass(frozen=True, slots=True, order=True)
class MaskUse:
    """Where a mask constant is read, and the factor by which it is multiplied on its way to a Softmax."""

    node: int
    slot: int
    factor: float

    @property
    def spot(self) -> tuple[int, int]:
        return self.node, self.slot


class MaskedGraph:
    """A model with its Softmaxes and the mask constants that reach them. Nodes are known by their positions in it."""

    def __init__(self, model: DetachedModel) -> None:
        self.model = model
        index = self.view = GraphView(model)
        self.nodes, self.outputs, self._fed = index.nodes, index.outputs, index.required_inputs
        self.readers = index.readers
        self._softmaxes = [position for position, node in enumerate(self.nodes) if is_op(node, "Softmax")]

    @cached_property
    def uses(self) -> Mapping[int, Collection[MaskUse]]:
        """Softmax → the uses of mask constants whose effect nothing but a Softmax sees."""
        found = {position: set(self._trace(self.nodes[position].input[0])) for position in self._softmaxes}
        sound = {use for uses in found.values() for use in uses if self._ends_in_softmax(use, found)}
        kept = {position: [use for use in uses if use in sound] for position, uses in found.items()}
        return {position: uses for position, uses in kept.items() if uses}

    def all_uses(self) -> list[MaskUse]:
        """The uses before every Softmax, each use once, in the order of the graph."""
        return sorted({use for uses in self.uses.values() for use in uses})

    def constant_name(self, use: MaskUse) -> str:
        return self.nodes[use.node].input[use.slot]

    def values(self, use: MaskUse) -> np.ndarray:
        """The values of the constant that is used."""
        return self.stored_values(self.constant_name(use))

    def stored_values(self, name: str) -> np.ndarray:
        """The values of a constant in which a mask was found."""
        array = self.constant(name)
        if array is None:
            raise KeyError(name)
        return array

    def is_read_elsewhere(self, name: str, uses: Collection[MaskUse]) -> bool:
        """Whether anything else than `uses` reads a constant: another input, a body, or the caller."""
        reads = sum(reads_of(self.nodes[position]).count(name) for position in self.readers[name])
        return name in self.outputs or reads > len({use.spot for use in uses})

    def _trace(self, value: str) -> list[MaskUse]:
        """The mask constants that a value is computed from, backward through nodes that keep a mask recognizable."""
        found: list[MaskUse] = []

        def before(state: tuple[str, float]) -> Iterator[tuple[str, float]]:
            position = self.view.positions.get(state[0], -1)
            for slot, scale in self._inputs_to_follow(self.nodes[position], state[1]) if position >= 0 else ():
                name = self.nodes[position].input[slot]
                array = self.constant(name)
                if array is None:
                    yield name, scale
                elif _is_mask(array, scale):
                    found.append(MaskUse(position, slot, scale))

        list(walk([(value, 1.0)], before))
        return found

    def added_inputs(self) -> list[str]:
        """The float inputs of the model that are added before a Softmax, such as a mask that the caller makes."""

        def before(state: tuple[str, bool]) -> list[tuple[str, bool]]:
            node = self.view.producers.get(state[0])
            slots = () if node is None else self._inputs_to_follow(node, 1.0)
            return [(node.input[slot], state[1] or node.op_type in SUMS) for slot, _ in slots] if node else []

        reached = walk([(self.nodes[position].input[0], False) for position in self._softmaxes], before)
        added = {value for value, is_added in reached if is_added and value in self._fed}
        return sorted(name for name in added if self._fed[name].type.tensor_type.elem_type in FLOATS)

    def _inputs_to_follow(self, node: NodeProto, factor: float) -> Iterator[tuple[int, float]]:
        """The inputs of `node` that may bring a mask, each with the factor between that input and Softmax."""
        if node.domain not in ONNX_DOMAINS:
            return
        slots = [slot for slot, name in enumerate(node.input) if name]
        if node.op_type in LAYOUT:
            slots = [0]
        elif node.op_type == "Where":
            slots = [1, 2]
        elif node.op_type in LIMITS:  # a limit is no value of the tensor
            slots = [slot for slot in slots if self.constant(node.input[slot]) is None]
        elif node.op_type in ("Mul", "Div"):
            yield from self._scale_factors(node, factor)
            return
        elif node.op_type not in SUMS and node.op_type != "Concat":
            return
        for slot in slots:
            yield slot, -factor if node.op_type == "Sub" and slot == 1 else factor

    def _scale_factors(self, node: NodeProto, factor: float) -> Iterator[tuple[int, float]]:
        """A product of a mask with a number, or of a mask constant with values of 0 or 1."""
        arrays = [self.constant(name) for name in node.input]
        for slot in (0, 1) if node.op_type == "Mul" else (0,):
            array = arrays[1 - slot]
            if array is None:
                yield slot, factor
            elif array.size == 1 and 0 < abs(number := float(array.reshape(-1)[0])) < MASKING:
                yield slot, factor / number if node.op_type == "Div" else factor * number

    def constant(self, name: str) -> np.ndarray | None:
        """The values of a stored float, of a Constant, or of what ConstantOfShape fills."""
        tensor, node = self.view.constants.get(name), self.view.producers.get(name)
        if node is not None and is_op(node, "ConstantOfShape"):
            tensor = attribute_of(node, "value")
        if tensor is None or tensor.data_type not in FLOATS or self.model.is_unread(tensor):
            return None
        return self.model.array(tensor)

    def _ends_in_softmax(self, use: MaskUse, found: Mapping[int, Collection[MaskUse]]) -> bool:
        """Whether no other consumer sees the values between the constant and the Softmax."""
        reached = {node for node, uses in found.items() if use.spot in {known.spot for known in uses}}

        def readers(value: str) -> list[NodeProto]:
            nodes = (self.nodes[position] for position in self.readers[value] - reached)
            return [node for node in nodes if node.op_type not in SHAPES and not self._asks_sign(node, value)]

        def follows(node: NodeProto, value: str) -> bool:
            return any(node.input[slot] == value for slot, _ in self._inputs_to_follow(node, 1.0))

        def onwards(value: str) -> list[str]:
            return [name for node in readers(value) for name in node.output]

        values = walk(self.nodes[use.node].output, onwards)
        return all(
            value not in self.outputs and all(follows(node, value) for node in readers(value)) for value in values
        )

    def _asks_sign(self, node: NodeProto, value: str) -> bool:
        """Whether a node sees of `value` which elements are below 0, and no more."""
        zero = self.constant(node.input[1]) if is_op(node, "Less") and node.input[0] == value else None
        return zero is not None and not zero.any()

    def depends_on_input(self, value: str) -> bool:
        """Whether the elements of an input determine `value`, and not only its shape."""

        def before(name: str) -> list[str]:
            node = self.view.producers.get(name)
            return [] if node is None or node.op_type in SHAPES else reads_of(node)

        return any(name in self._fed for name in walk([value], before))

    def changes_whole_rows(self) -> bool:
        """Whether a row that an input masks as a whole gets other weights under a bound."""
        return any(self._may_change_row(use) for uses in self.uses.values() for use in uses)

    def _may_change_row(self, use: MaskUse) -> bool:
        path = self.path_nodes([use])
        changed = {name for position in path for name in self.nodes[position].output}
        is_added, is_decided = bool(np.isinf(self.values(use).astype(np.float32)).any()), False
        for position in path:
            node = self.nodes[position]
            others = [name for name in node.input if name not in changed and self.constant(name) is None]
            is_added |= node.op_type in SUMS and bool(others)
            deciding = [node.input[0]] if node.op_type == "Where" else others if node.op_type == "Mul" else []
            is_decided |= any(self.depends_on_input(name) for name in deciding)
        return is_added and is_decided

    def path_nodes(self, uses: Collection[MaskUse]) -> list[int]:
        """The nodes between these uses and the Softmaxes, in order."""

        def between(positions: Iterable[int]) -> list[int]:
            inner = (position for position in positions if position not in self._softmaxes)
            return [position for position in inner if self.nodes[position].op_type not in SHAPES]

        def consumers(position: int) -> list[int]:
            return between(reader for name in self.nodes[position].output for reader in self.readers[name])

        return sorted(walk(between(use.node for use in uses), consumers))

    def is_choice_of_zero(self, use: MaskUse) -> bool:
        """Whether the use is a choice between 0 and a constant in which a sum is lost."""
        node, mask = self.nodes[use.node], self.values(use)
        if not is_op(node, "Where") or use.factor != 1:
            return False
        other = self.constant(node.input[3 - use.slot])
        if other is None or mask.size != 1 or other.size != 1 or other.any():
            return False
        return float(mask.reshape(-1)[0]) <= -8 / epsilon_of(mask)


def is_op(node: NodeProto, op_type: str) -> bool:
    """Whether `node` is this operator of ONNX."""
    return node.op_type == op_type and node.domain in ONNX_DOMAINS


def _is_mask(array: np.ndarray, factor: float) -> bool:
    """Whether some elements mask, and no other one is as large."""
    wide = array.astype(np.float32) * np.float32(math.copysign(1.0, factor))
    return bool((wide <= -MASKING).any()) and not (wide >= MASKING).any()


def epsilon_of(array: np.ndarray) -> float:
    """The distance from 1 to the next number of the dtype."""
    return {"float32": 2.0**-23, "float16": 2.0**-10}.get(array.dtype.name, 2.0**-7)


SHAPES: Final = frozenset({"Shape", "Size", "ConstantOfShape"})
"""Operators whose result holds no element of their input."""

LIMITS: Final = frozenset({"Max", "Min", "Clip"})

SUMS: Final = frozenset({"Add", "Sub", "Sum"})

LAYOUT: Final = ARRANGING | {"CastLike", "Expand", "Tile", "Slice", "Gather", "Trilu", "Split", "Pad"}
"""Operators that pass on the elements of their first input."""
