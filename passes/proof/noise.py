"""Fixed noise: a model whose random nodes are replaced by nodes that compute the same values in every run.

Two models can be compared after a RandomNormal only if both draw the same values. So each random node becomes a
few operators that read values from a pool, at offsets that follow from the node's key. Nothing is fed: shapes are those
that the model computes, and nodes in If and Loop are replaced in place. In a Loop the values differ in each iteration.

The key of a node is the name of its result in the source. If a pass renames random nodes, nodes of the same
operator and attributes are matched in their order. Random nodes that a pass merges or copies have one key instead of
two, or a key that the source does not have, so that their values differ from the source's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from passes.graph.index import GraphIndex, replace_entries
from passes.graph.inference import types_of
from passes.graph.op_facts import ONNX_DOMAINS, RANDOM_OPS, first_output, opset_of
from passes.graph.traversal import bodies_in, every_node, inline_functions
from passes.weights.detached import DetachedModel

POOL: Final = 8191
"""The number of values in a pool; a prime, so that any step through the pool meets all of them."""

LEAST_OPSET: Final = 11
"""The first opset that has Range and CumSum."""

CAST_LIKE: Final = 15
"""The first opset that has CastLike; before it, a type that inference does not find is taken for float32."""

NOISE: Final = "onnxline.noise/"
"""Prefix of the names that are added."""


@dataclass(frozen=True, slots=True)
class _RandomNode:
    """The key that distinguishes random nodes: the name of the result, and operator and attributes."""

    name: str
    op: str
    attributes: tuple[bytes, ...]
    seed: bytes


@dataclass(frozen=True, slots=True)
class FixedNoise:
    """The random nodes of a source, in order; `apply` fixes the noise of a model that passes made of the source."""

    nodes: tuple[_RandomNode, ...]

    @classmethod
    def of(cls, source: DetachedModel) -> FixedNoise:
        if not _has_random(source.proto):
            return cls(())
        return cls(tuple(map(_describe, _random_nodes(_without_random_functions(source.proto).graph))))

    def apply(self, model: DetachedModel) -> DetachedModel:
        """`model` with fixed noise; `model` itself if it draws no random values.

        Random nodes before opset 11 are left as they are.
        """
        if not _has_random(model.proto):
            return model
        proto = ModelProto()
        proto.CopyFrom(_without_random_functions(model.proto))
        if opset_of(proto) < LEAST_OPSET:
            return model
        found = list(map(_describe, _random_nodes(proto.graph)))
        _NoiseWriter(proto, dict(zip(found, self._match(found), strict=True))).write()
        return model.with_proto(proto)

    def _match(self, found: Sequence[_RandomNode]) -> list[str]:
        """A key for each of `found`: by name, else by operator and attributes, else by operator, else of its own."""
        keys: dict[int, str] = {}
        free = list(self.nodes)
        for alike in (_has_name, _has_attributes, _has_operator):
            for index, node in enumerate(found):
                known = next((source for source in free if alike(source, node)), None) if index not in keys else None
                if known is not None:
                    keys[index] = known.name
                    free.remove(known)
        return [keys.get(index, f"{NOISE}new/{index}") for index in range(len(found))]


def _has_name(source: _RandomNode, node: _RandomNode) -> bool:
    return source.name == node.name


def _has_attributes(source: _RandomNode, node: _RandomNode) -> bool:
    return (source.op, source.attributes) == (node.op, node.attributes)


def _has_operator(source: _RandomNode, node: _RandomNode) -> bool:
    return source.op.removesuffix("Like") == node.op.removesuffix("Like")


def _describe(node: NodeProto) -> _RandomNode:
    attributes = {attribute.name: attribute.SerializeToString(deterministic=True) for attribute in node.attribute}
    return _RandomNode(
        first_output(node),
        node.op_type,
        tuple(attributes[name] for name in sorted(attributes)),
        attributes.get("seed", b""),
    )


def draws_numbers(node: NodeProto, false: Iterable[str]) -> bool:
    """Whether `node` draws random values: a Dropout does so in training mode only.

    Args:
        node: a node of the graph.
        false: constants that are False.
    """
    if node.domain not in ONNX_DOMAINS or node.op_type not in RANDOM_OPS:
        return False
    return node.op_type != "Dropout" or (len(node.input) > 2 and node.input[2] not in ("", *false))


def false_constants(graph: GraphProto) -> Iterator[str]:
    """The scalar constants of `graph` that are False."""
    index = GraphIndex(graph)
    for name, tensor in {**index.initializers, **index.constants}.items():
        if tensor.data_type == TensorProto.BOOL and not tensor.dims and not numpy_helper.to_array(tensor).any():
            yield name


def _has_random(proto: ModelProto) -> bool:
    graphs = (proto.graph, *proto.functions)
    return any(node.op_type in RANDOM_OPS for graph in graphs for node in every_node(graph))


def _without_random_functions(proto: ModelProto) -> ModelProto:
    """The model with its functions inlined if one of them draws: two calls of a function draw different values."""
    if any(node.op_type in RANDOM_OPS for function in proto.functions for node in every_node(function)):
        return inline_functions(proto)
    return proto


def _random_nodes(graph: GraphProto, false: frozenset[str] = frozenset()) -> Iterator[NodeProto]:
    """Each random node of `graph` and its bodies; `false` are outer constants that are False."""
    false |= frozenset(false_constants(graph))
    for node in graph.node:
        if draws_numbers(node, false) and any(node.output):
            yield node
        for body in bodies_in(node):
            yield from _random_nodes(body, false)


@dataclass(slots=True)
class _NoiseWriter:
    """Replaces the random nodes of one model."""

    proto: ModelProto
    keys: Mapping[_RandomNode, str]
    pools: set[str] = field(default_factory=set)
    types: Mapping[str, int] | None = None
    """Value → its element type, where there is no CastLike."""

    def write(self) -> None:
        if opset_of(self.proto) < CAST_LIKE:
            self.types = {name: info.type.tensor_type.elem_type for name, info in types_of(self.proto).items()}
        self._write_graph(self.proto.graph, (), frozenset())
        for pool in sorted(self.pools):
            self.proto.graph.initializer.append(numpy_helper.from_array(POOLS[pool](), NOISE + pool))

    def _write_graph(self, graph: GraphProto, turns: tuple[str, ...], false: frozenset[str]) -> None:
        """Replace the random nodes of `graph` and its bodies.

        Args:
            graph: the graph, which is changed.
            turns: the iteration counters of the Loops around the graph.
            false: outer constants that are False.
        """
        false |= frozenset(false_constants(graph))
        nodes: list[NodeProto] = []
        for node in graph.node:
            for body in bodies_in(node):
                own = (body.input[0].name,) if node.op_type == "Loop" else ()
                self._write_graph(body, (*turns, *own), false)
            is_random = draws_numbers(node, false) and any(node.output)
            nodes.extend(self._replace(node, turns) if is_random else [node])
        replace_entries(graph.node, nodes)

    def _replace(self, node: NodeProto, turns: tuple[str, ...]) -> list[NodeProto]:
        """The nodes that compute the results of `node`."""
        known = _describe(node)
        steps = _NoiseSteps(known.name, self.types)
        key = f"{self.keys[known]} {known.seed.hex()}"
        pool, write = WRITERS[node.op_type]
        self.pools.add(pool)
        write(steps, node, lambda shape: self._noise(steps, pool, key, shape, turns))
        return steps.nodes

    @staticmethod
    def _noise(steps: _NoiseSteps, pool: str, key: str, shape: str, turns: tuple[str, ...]) -> str:
        """float32 values of `shape`, from the pool: element i is read at offset `start + i · step` of the pool."""
        digest = hashlib.sha256(key.encode()).digest()
        start, step, *further = (int.from_bytes(digest[at : at + 4], "big") % (POOL - 1) + 1 for at in (0, 4, 8, 12))
        count = steps.add("ReduceProd", [shape], keepdims=0)
        indices = steps.add("Range", [steps.int64(0), count, steps.int64(1)])
        offset = steps.add("Add", [steps.add("Mul", [indices, steps.int64(step)]), steps.int64(start)])
        for depth, turn in enumerate(turns):
            offset = steps.add(
                "Add", [offset, steps.add("Mul", [turn, steps.int64(further[depth % len(further)] + depth)])]
            )
        picked = steps.add("Gather", [NOISE + pool, steps.add("Mod", [offset, steps.int64(POOL)])])
        return steps.add("Reshape", [picked, shape])


@dataclass(slots=True)
class _NoiseSteps:
    """The nodes that replace one random node."""

    name: str
    types: Mapping[str, int] | None
    nodes: list[NodeProto] = field(default_factory=list)

    def add(self, op: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        output = output or f"{NOISE}{self.name}/{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def constant(self, array: np.ndarray) -> str:
        return self.add("Constant", [], value=numpy_helper.from_array(array))

    def int64(self, value: int | Sequence[int]) -> str:
        return self.constant(np.array(value, np.int64))

    def float32(self, value: float) -> str:
        return self.constant(np.array(value, np.float32))


Noise = Callable[[str], str]
"""Name of a shape → name of noise of that shape."""


def _attribute(node: NodeProto, name: str, default: float) -> float:
    found = next((attribute for attribute in node.attribute if attribute.name == name), None)
    return default if found is None else helper.get_attribute_value(found)


def _write_normal(steps: _NoiseSteps, node: NodeProto, noise: Noise) -> None:
    scale, mean = _attribute(node, "scale", 1.0), _attribute(node, "mean", 0.0)
    _write_scaled(steps, node, noise, scale, mean)


def _write_uniform(steps: _NoiseSteps, node: NodeProto, noise: Noise) -> None:
    low, high = _attribute(node, "low", 0.0), _attribute(node, "high", 1.0)
    _write_scaled(steps, node, noise, high - low, low)


def _write_scaled(steps: _NoiseSteps, node: NodeProto, noise: Noise, scale: float, offset: float) -> None:
    shape = steps.add("Shape", [node.input[0]]) if node.input else steps.int64(_shape_attribute(node))
    scaled = steps.add("Mul", [noise(shape), steps.float32(scale)])
    _cast(steps, steps.add("Add", [scaled, steps.float32(offset)]), node, node.output[0])


def _cast(steps: _NoiseSteps, value: str, node: NodeProto, output: str = "") -> str:
    """`value` in the type of the result of `node`: that of its attribute `dtype`, or that of its input."""
    dtype = int(_attribute(node, "dtype", 0)) or DEFAULT_TYPES.get(node.op_type, 0)
    if not dtype and steps.types is not None:
        dtype = steps.types.get(node.input[0]) or TensorProto.FLOAT
    if dtype:
        return steps.add("Cast", [value], output, to=dtype)
    return steps.add("CastLike", [value, node.input[0]], output)


def _shape_attribute(node: NodeProto) -> list[int]:
    return next((list(attribute.ints) for attribute in node.attribute if attribute.type == AttributeProto.INTS), [])


def _write_bernoulli(steps: _NoiseSteps, node: NodeProto, noise: Noise) -> None:
    uniform = noise(steps.add("Shape", [node.input[0]]))
    chance = steps.add("Cast", [node.input[0]], to=TensorProto.FLOAT)
    _cast(steps, steps.add("Less", [uniform, chance]), node, node.output[0])


def _write_multinomial(steps: _NoiseSteps, node: NodeProto, noise: Noise) -> None:
    """The first class at which the sum of probabilities exceeds a uniform random value."""
    logits = steps.add("Cast", [node.input[0]], to=TensorProto.FLOAT)
    sums = steps.add("CumSum", [steps.add("Softmax", [logits], axis=1), steps.int64(1)])
    batch = steps.add("Gather", [steps.add("Shape", [logits]), steps.int64([0])])
    samples = int(_attribute(node, "sample_size", 1))
    uniform = noise(steps.add("Concat", [batch, steps.int64([samples])], axis=0))
    by_class = steps.add("Reshape", [sums, steps.int64([0, 1, -1])])
    by_sample = steps.add("Reshape", [uniform, steps.int64([0, samples, 1])])
    beyond = steps.add("Cast", [steps.add("Less", [by_sample, by_class])], to=TensorProto.INT32)
    _cast(steps, steps.add("ArgMax", [beyond], axis=2, keepdims=0), node, node.output[0])


def _write_dropout(steps: _NoiseSteps, node: NodeProto, noise: Noise) -> None:
    value, ratio, training = node.input[0], node.input[1], node.input[2]
    ratio = steps.add("Cast", [ratio], to=TensorProto.FLOAT) if ratio else steps.float32(0.5)
    uniform = noise(steps.add("Shape", [value]))
    is_kept = steps.add("Or", [steps.add("Not", [steps.add("Less", [uniform, ratio])]), steps.add("Not", [training])])
    one = steps.float32(1.0)
    factor = steps.add("Where", [training, steps.add("Div", [one, steps.add("Sub", [one, ratio])]), one])
    kept = steps.add("Mul", [steps.add("Cast", [is_kept], to=TensorProto.FLOAT), factor])
    if node.output[0]:
        steps.add("Mul", [value, _cast(steps, kept, node)], node.output[0])
    if len(node.output) > 1 and node.output[1]:
        steps.add("Identity", [is_kept], node.output[1])


def _normal_pool() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(POOL).astype(np.float32)


def _uniform_pool() -> np.ndarray:
    return np.random.default_rng(1).uniform(0, 1, POOL).astype(np.float32)


POOLS: Final[Mapping[str, Callable[[], np.ndarray]]] = {"normal": _normal_pool, "uniform": _uniform_pool}

WRITERS: Final[Mapping[str, tuple[str, Callable[[_NoiseSteps, NodeProto, Noise], None]]]] = {
    "RandomNormal": ("normal", _write_normal),
    "RandomNormalLike": ("normal", _write_normal),
    "RandomUniform": ("uniform", _write_uniform),
    "RandomUniformLike": ("uniform", _write_uniform),
    "Bernoulli": ("uniform", _write_bernoulli),
    "Multinomial": ("uniform", _write_multinomial),
    "Dropout": ("uniform", _write_dropout),
}
"""Random operator → the pool that it reads, and the function that writes the nodes for it."""

DEFAULT_TYPES: Final[Mapping[str, int]] = {
    "Multinomial": TensorProto.INT32,
    "RandomNormal": TensorProto.FLOAT,
    "RandomUniform": TensorProto.FLOAT,
}
"""Operator → the type of its result without an attribute `dtype`; other operators take the type of their input."""
