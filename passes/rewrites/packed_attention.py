"""Rewrite onnxruntime's attention operators that take packed Q, K and V as operators with separate inputs.

A packed input becomes three by the layout ops that the operator stands for, and a weight inside of `Attention` and
`QAttention` becomes a product before `MultiHeadAttention`. Products merged in the graph itself are split elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from passes.graph.index import replace_entries
from passes.graph.op_facts import attribute_of, input_of, op_of
from passes.provenance.weight_origins import take_name
from passes.rewrites.decompose_attention import is_attention
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel

DOMAIN: Final = "com.microsoft"


@dataclass(frozen=True, slots=True)
class UnpackedModel:
    """`unpacked` maps the output of each operator that was written out to the node that takes Q, K and V apart now."""

    model: DetachedModel
    unpacked: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def unpack_attentions(model: DetachedModel, left: Collection[str] = ()) -> UnpackedModel:
    """`model` with packed attention operators written out, except the operators with an output in `left`."""
    view = GraphView(model)
    packed = [node for node in view.own if op_of(node) in RULES and node.output[0] not in left]
    replaced: dict[int, _UnpackedOperator] = {}
    notes: list[str] = []
    names = {*view.initializers, *view.producers, *view.inputs}
    for node in packed:
        build = _UnpackedOperator(view, node, names)
        try:
            RULES[op_of(node)](build)
        except _NotWrittenOut as why:
            notes.append(f"{node.name or node.output[0]} is a {op_of(node)} {why}")
            continue
        if build.nodes:
            replaced[id(node)] = build
    if not replaced:
        return UnpackedModel(model, {}, tuple(notes))
    proto = model.copy_proto()
    written = (replaced[id(node)].nodes if id(node) in replaced else [node] for node in view.own)
    replace_entries(proto.graph.node, chain.from_iterable(written))
    for build in replaced.values():
        proto.graph.initializer.extend(build.tensors)
    markers = {build.node.output[0]: build.marker for build in replaced.values()}
    return UnpackedModel(model.with_proto(proto), markers, tuple(notes))


class _NotWrittenOut(Exception):
    """Why an operator stays, in words that follow its name."""


@dataclass(slots=True)
class _UnpackedOperator:
    """The nodes in place of one attention operator."""

    view: GraphView
    node: NodeProto
    names: set[str]
    nodes: list[NodeProto] = field(default_factory=list)
    tensors: list[TensorProto] = field(default_factory=list)
    marker: str = ""
    """The output of the node that takes the packed value apart."""

    def input(self, at: int) -> str:
        return input_of(self.node, at)

    def dims(self, at: int) -> tuple[int | str, ...]:
        dims = self.view.dims(self.input(at))
        if dims is None:
            raise _NotWrittenOut(f"whose input {self.input(at)} has no known shape")
        return dims

    def number_of(self, attribute: str) -> int:
        return int(attribute_of(self.node, attribute, 0))

    def refuse(self, inputs: Mapping[str, int], attributes: Sequence[str] = (), outputs: int = 1) -> None:
        """Raise where the operator has an input, an attribute or an output that the new operator does not take."""
        for what, at in inputs.items():
            if self.input(at):
                raise _NotWrittenOut(f"with {what}, which is not taken apart{self.advice()}")
        for name in attributes:
            if self.number_of(name):
                raise _NotWrittenOut(f"with {name}, which is not taken apart")
        if any(self.node.output[outputs:]):
            raise _NotWrittenOut(f"with a second output, which is not taken apart{self.advice()}")

    def advice(self) -> str:
        """The end of a message: the step that takes the operator apart; empty for an operator without such a step."""
        return "; decompose-attention before split-qkv does" if is_attention(self.node) else ""

    def add(self, op: str, inputs: Sequence[str], *outputs: str, domain: str = "", **attributes: Any) -> list[str]:
        names = [self.free(output) for output in outputs]
        made = onnx.helper.make_node(op, inputs, names, domain=domain, **attributes)
        self._append(made, op.lower())
        return names

    def give(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> None:
        """Add a node that computes an output of the operator other than the first output."""
        self._append(onnx.helper.make_node(op, inputs, [output], **attributes), op.lower())

    def constant(self, array: np.ndarray[Any, Any], name: str) -> str:
        name = self.free(name)
        self.tensors.append(numpy_helper.from_array(array, name))
        return name

    def free(self, name: str) -> str:
        return take_name(name, self.names)

    def split(self, value: str, sizes: Sequence[int], names: Sequence[str] = ("q", "k", "v")) -> list[str]:
        stem = self.node.output[0]
        parts = self.constant(np.array(sizes, np.int64), f"{stem}.sizes")
        made = self.add("Split", [value, parts], *(f"{stem}.{name}" for name in names), axis=-1)
        self.marker = made[0]
        return made

    def attend(self, op: str, inputs: Sequence[str], keep: Collection[str] = (), outputs: Sequence[str] = ()) -> None:
        """End with an attention operator on separate inputs; `keep` are the attributes that stay, by default all."""
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        made = onnx.helper.make_node(op, inputs, outputs or list(self.node.output), domain=DOMAIN)
        made.attribute.extend(attribute for attribute in self.node.attribute if not keep or attribute.name in keep)
        self._append(made, "")

    def _append(self, node: NodeProto, ending: str) -> None:
        node.metadata_props.extend(self.node.metadata_props)
        node.name = f"{self.node.name}.{ending}".rstrip(".") if self.node.name else ""
        self.nodes.append(node)


def _multi_head(build: _UnpackedOperator) -> None:
    """MultiHeadAttention with (batch, length, heads, 3, size) as Q, or (…, 2, size) as K."""
    rest = list(build.node.input[3:])
    if build.input(0) and not build.input(1) and not build.input(2):
        inputs = [*_unstack(build, 0, ("q", "k", "v")), *rest]
    elif build.input(1) and not build.input(2):
        inputs = [build.input(0), *_unstack(build, 1, ("k", "v")), *rest]
    else:
        return
    build.attend("MultiHeadAttention", inputs)


def _unstack(build: _UnpackedOperator, at: int, names: Sequence[str]) -> list[str]:
    dims, stem = build.dims(at), build.node.output[0]
    if len(dims) != 5 or dims[3] != len(names) or not isinstance(dims[2], int) or not isinstance(dims[4], int):
        raise _NotWrittenOut(f"whose input {build.input(at)} is not packed in {len(names)}")
    shape = build.constant(np.array([0, 0, dims[2] * dims[4]], np.int64), f"{stem}.shape")
    made: list[str] = []
    for place, name in enumerate(names):
        index = build.constant(np.array(place, np.int64), f"{stem}.{place}")
        (part,) = build.add("Gather", [build.input(at), index], f"{stem}.{name}.heads", axis=3)
        build.marker = build.marker or part
        made += build.add("Reshape", [part, shape], f"{stem}.{name}")
    return made


def _group_query(build: _UnpackedOperator) -> None:
    """GroupQueryAttention with Q, K and V joined in its first input."""
    if build.input(1) or build.input(2):
        return
    width, heads, groups = build.dims(0)[-1], build.number_of("num_heads"), build.number_of("kv_num_heads")
    if not isinstance(width, int) or not heads or not groups or width % (heads + 2 * groups):
        raise _NotWrittenOut("whose width is not that of its heads")
    size = width // (heads + 2 * groups)
    parts = build.split(build.input(0), [heads * size, groups * size, groups * size])
    build.attend("GroupQueryAttention", [*parts, *build.node.input[3:]])


def _attention(build: _UnpackedOperator) -> None:
    """Attention multiplies with one weight for Q, K and V."""
    build.refuse({"past": 4, "past_sequence_length": 6}, ("do_rotary", "past_present_share_buffer"))
    stem = build.node.output[0]
    (value,) = build.add("MatMul", [build.input(0), build.input(1)], f"{stem}.qkv_product")
    _attend_to_product(build, value, build.input(2), build.input(3), build.input(5))


def _quantized_attention(build: _UnpackedOperator) -> None:
    """QAttention multiplies integers: the products are exact, and are scaled as the operator scales them."""
    build.refuse({}, ("do_rotary", "past_present_share_buffer"), outputs=2)
    stem = build.node.output[0]
    integers = [build.input(0), build.input(1), build.input(6), build.input(7)]
    while not integers[-1]:
        integers.pop()
    (value,) = build.add("MatMulInteger", integers, f"{stem}.qkv_product")
    (value,) = build.add("Cast", [value], f"{stem}.qkv_float", to=TensorProto.FLOAT)
    (value,) = build.add("Mul", [value, build.input(3)], f"{stem}.qkv_of_input")
    (value,) = build.add("Mul", [value, build.input(4)], f"{stem}.qkv_scaled")
    _attend_to_product(build, value, build.input(2), build.input(5), "", build.input(8))


def _attend_to_product(
    build: _UnpackedOperator, value: str, bias: str, mask: str, scores_bias: str, past: str = ""
) -> None:
    """MultiHeadAttention on the parts of `value`. It has the keys and the values of a cache apart."""
    width, stem = build.dims(1)[-1], build.node.output[0]
    if not isinstance(width, int):
        raise _NotWrittenOut("whose weight has no known shape")
    if mask and len(build.dims(list(build.node.input).index(mask))) not in (2, 3):
        raise _NotWrittenOut(f"with a mask of lengths, which is not taken apart{build.advice()}")
    if bias:
        (value,) = build.add("Add", [value, bias], f"{stem}.qkv_biased")
    sizes = attribute_of(build.node, "qkv_hidden_sizes") or [width // 3] * 3
    if sum(sizes) != width:
        raise _NotWrittenOut("whose weight is not that of its heads")
    parts = build.split(value, list(sizes))
    keep = ("num_heads", "scale", "mask_filter_value", "unidirectional")
    inputs = [*parts, "", mask, scores_bias]
    if not past and not any(build.node.output[1:]):
        build.attend("MultiHeadAttention", inputs, keep)
        return
    for place, name in enumerate(("key", "value") if past else ()):
        index = build.constant(np.array(place, np.int64), f"{stem}.past_{name}.place")
        inputs += build.add("Gather", [past, index], f"{stem}.past_{name}", axis=0)
    present = [build.free(f"{stem}.present_{name}") for name in ("key", "value")]
    build.attend("MultiHeadAttention", inputs, keep, [stem, *present])
    if any(build.node.output[1:]):
        axis = build.constant(np.array([0], np.int64), f"{stem}.first_axis")
        apart = [build.add("Unsqueeze", [name, axis], f"{name}_apart")[0] for name in present]
        build.give("Concat", apart, build.node.output[1], axis=0)


RULES: Final[Mapping[str, Callable[[_UnpackedOperator], None]]] = {
    f"{DOMAIN}.MultiHeadAttention": _multi_head,
    f"{DOMAIN}.GroupQueryAttention": _group_query,
    f"{DOMAIN}.Attention": _attention,
    f"{DOMAIN}.QAttention": _quantized_attention,
}
"""Operator → the function that writes it with separate inputs; it adds no nodes if no input is packed."""
