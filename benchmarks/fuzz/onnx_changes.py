"""Changes that know where an ONNX model hurts: sizes, data, wiring, attributes, versions, functions, types."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from benchmarks.fuzz.seeds import DATA_FILE

NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    5,
    7,
    13,
    127,
    255,
    2**16,
    2**24,
    2**31 - 1,
    -(2**31),
    2**31,
    2**40,
    2**62,
    2**63 - 1,
    -(2**63),
)
FLOATS = (0.0, -1.0, 1e-30, 1e38, math.nan, math.inf, -math.inf)
BAD_TEXT = "BADUTF8!"
"""What is written into a string field in the place of bytes that are no UTF-8."""


def walk_messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in value if field.is_repeated else (value,):
                yield from walk_messages(item)


def value_names(messages: Sequence[Message]) -> list[str]:
    names = [name for item in messages if isinstance(item, NodeProto) for name in (*item.input, *item.output)]
    return names or ["x"]


def _graphs(model: ModelProto) -> list[GraphProto]:
    return [item for item in walk_messages(model) if isinstance(item, GraphProto)] or [model.graph]


def _nodes(model: ModelProto) -> list[NodeProto]:
    return [item for item in walk_messages(model) if isinstance(item, NodeProto)] or [
        model.graph.node.add(op_type="Relu")
    ]


def _tensors(model: ModelProto) -> list[TensorProto]:
    tensors = [item for item in walk_messages(model) if isinstance(item, TensorProto)]
    return tensors or [model.graph.initializer.add(name="late", data_type=1, dims=[1], float_data=[1.0])]


def _terabytes(model: ModelProto, rng: random.Random) -> None:
    """A dim of an input or a value that no memory holds."""
    infos = [item for graph in _graphs(model) for item in (*graph.input, *graph.output, *graph.value_info)]
    dims = [dim for info in infos for dim in info.type.tensor_type.shape.dim]
    if dims:
        rng.choice(dims).dim_value = rng.choice((2**31, 2**38, 2**45, 2**62, -1, -5))


def _size_in_a_constant(model: ModelProto, rng: random.Random) -> None:
    """A number that sizes are computed from: what Reshape, Expand, Tile, Range, Loop and others read."""
    constants = [
        item for item in _tensors(model) if item.data_type == TensorProto.INT64 and (item.int64_data or item.raw_data)
    ]
    attributes = [
        item
        for node in _nodes(model)
        for item in node.attribute
        if item.type in (AttributeProto.INT, AttributeProto.INTS)
    ]
    if constants and rng.random() < 0.6:
        tensor = rng.choice(constants)
        count = len(tensor.int64_data) or len(tensor.raw_data) // 8
        if not count:
            return
        values = list(tensor.int64_data) or [
            int.from_bytes(tensor.raw_data[8 * i : 8 * i + 8], "little", signed=True) for i in range(count)
        ]
        values[rng.randrange(count)] = rng.choice(NUMBERS)
        tensor.ClearField("raw_data")
        tensor.int64_data[:] = values
    elif attributes:
        attribute = rng.choice(attributes)
        if attribute.type == AttributeProto.INT:
            attribute.i = rng.choice(NUMBERS)
        elif attribute.ints:
            attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(NUMBERS)


def _tensor_data(model: ModelProto, rng: random.Random) -> None:
    """Data, dims and dtype of a tensor that do not fit each other."""
    tensor = rng.choice(_tensors(model))
    match rng.randrange(8):
        case 0:
            tensor.segment.begin, tensor.segment.end = 0, rng.choice((1, 10, -1))
        case 1:
            tensor.raw_data = b"\0\0\0\0"
            tensor.float_data.append(1.0)
        case 2:
            tensor.data_type = rng.choice((0, 99, -1, *TensorProto.DataType.values()))
        case 3:
            tensor.dims.append(rng.choice(NUMBERS))
        case 4:
            tensor.dims[:] = [2**32, 2**32]
        case 5:
            tensor.dims[:] = [0, *([2**62] * 3)]
        case 6:
            tensor.ClearField("raw_data")
        case 7:
            tensor.dims[:] = [1] * rng.choice((33, 65, 300))


def _external_data(model: ModelProto, rng: random.Random) -> None:
    """External data: other files, offsets, lengths."""
    tensors = [item for item in _tensors(model) if item.external_data]
    tensor = rng.choice(tensors) if tensors else rng.choice(_tensors(model))
    tensor.data_location = TensorProto.EXTERNAL
    key = rng.choice(("location", "offset", "length", "checksum", "what"))
    values = {
        "location": ("../" + DATA_FILE, "/etc/passwd", "", ".", "none.bin", "a\0b", "/dev/zero", "x" * 5000, BAD_TEXT),
        "offset": (str(2**63), "-4", "four", "1", "٣", "", "0x10"),
        "length": (str(2**70), "-1", "0", "1", "1e3"),
    }
    chosen = rng.choice(values.get(key, ("x",)))
    for entry in tensor.external_data:
        if entry.key == key:
            entry.value = chosen
            return
    tensor.external_data.add(key=key, value=chosen)


def _wiring(model: ModelProto, rng: random.Random) -> None:
    """Inputs and outputs of nodes: swapped, renamed, read from elsewhere, circles, names made twice."""
    nodes = _nodes(model)
    node, other = rng.choice(nodes), rng.choice(nodes)
    names = list(rng.choice((node.input, node.output, node.input)))
    target = rng.choice((node.input, node.output, node.input))
    match rng.randrange(7):
        case 0:
            rng.shuffle(names)
            del node.input[:]
            node.input.extend(names)
        case 1 if target:
            target[rng.randrange(len(target))] = rng.choice(("nowhere", "", *other.output, *other.input))
        case 2 if node.input and node.output:
            node.input[0] = node.output[0]
        case 3:
            target.extend(rng.choice(nodes).output)
        case 4:
            del target[:]
        case 5 if target:
            target.pop()
        case 6:
            target.extend([""] * rng.choice((1, 3)))


def _order(model: ModelProto, rng: random.Random) -> None:
    """Nodes, inputs, outputs or initializers of a graph: reordered, dropped, doubled."""
    graph = rng.choice(_graphs(model))
    items = rng.choice((graph.node, graph.node, graph.input, graph.output, graph.initializer))
    kept = list(items)
    match rng.randrange(4):
        case 0:
            rng.shuffle(kept)
        case 1:
            kept = kept[1:]
        case 2:
            kept += kept[:1]
        case 3:
            kept = []
    copies = [type(item).FromString(item.SerializeToString()) for item in kept]
    del items[:]
    items.extend(copies)


def _operator(model: ModelProto, rng: random.Random) -> None:
    """Another op type or domain, with the inputs and attributes of before."""
    node = rng.choice(_nodes(model))
    if rng.random() < 0.75:
        node.op_type = rng.choice(OP_TYPES)
    else:
        node.domain = rng.choice(("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "own", "nowhere", "ai.onnx.training"))


def _attribute(model: ModelProto, rng: random.Random) -> None:
    """An attribute of another type, another name, twice, without a value, or one more."""
    node = rng.choice(_nodes(model))
    if not node.attribute or rng.random() < 0.25:
        value = rng.choice((1, -1, 2**62, 0.5, math.nan, "text", b"\xff", [1, 2], [0.5], ["a"], []))
        name = rng.choice(("axis", "to", "perm", "axes", "value", "kernel_shape", "body", "alpha", "what", ""))
        kind = AttributeProto.INTS if value == [] else None
        node.attribute.append(helper.make_attribute(name or "named", value, attr_type=kind))
        if not name:
            node.attribute[-1].name = ""
        return
    attribute = rng.choice(node.attribute)
    match rng.randrange(6):
        case 0:
            attribute.type = rng.choice(AttributeProto.AttributeType.values())
        case 1:
            attribute.name = rng.choice(("", "axis", "to", "value", "body", "then_branch"))
        case 2:
            node.attribute.append(attribute)
        case 3:
            name, kind = attribute.name, attribute.type
            attribute.Clear()
            attribute.name, attribute.type = name, kind
        case 4:
            attribute.ref_attr_name = "alpha"
        case 5:
            attribute.i, attribute.f, attribute.s = rng.choice(NUMBERS), rng.choice(FLOATS), b"\xff\xfe"


def _versions(model: ModelProto, rng: random.Random) -> None:
    """Opsets and the IR version: too old, too new, twice, none."""
    match rng.randrange(5):
        case 0:
            model.ir_version = rng.choice((0, 1, 2, 3, 4, 99, -1, 2**62))
        case 1 if model.opset_import:
            rng.choice(model.opset_import).version = rng.choice((0, 1, 5, 6, 7, 8, 11, 13, 17, 22, 23, 99, -1, 2**62))
        case 2:
            model.opset_import.add(domain=rng.choice(("", "ai.onnx", "nowhere")), version=rng.choice((1, 13, 99)))
        case 3:
            del model.opset_import[:]
        case 4 if model.opset_import:
            del model.opset_import[rng.randrange(len(model.opset_import))]


def _depth(model: ModelProto, rng: random.Random) -> None:
    """The graph inside of the branches of an If, inside of an If, …"""
    for _ in range(rng.choice((1, 3, 20, 25))):
        inner = GraphProto()
        inner.CopyFrom(model.graph)
        if inner.ByteSize() > 2**20:
            break
        del inner.input[:]
        node = NodeProto(op_type="If", input=["deep"], output=[item.name for item in inner.output])
        for name in ("then_branch", "else_branch")[: rng.choice((1, 2)) if inner.ByteSize() < 2**16 else 1]:
            node.attribute.add(name=name, type=AttributeProto.GRAPH).g.CopyFrom(inner)
        del model.graph.node[:]
        model.graph.node.append(node)
    model.graph.initializer.append(helper.make_tensor("deep", TensorProto.BOOL, [], [rng.choice((0, 1))]))


def _functions(model: ModelProto, rng: random.Random) -> None:
    """Functions that call themselves, each other, twenty times twice, nobody, or with other arguments."""
    if not model.functions:
        function = model.functions.add(name="f", domain="own", input=["a"], output=["b"])
        function.node.add(op_type="Relu", input=["a"], output=["b"])
        function.opset_import.add(domain="", version=21)
        model.opset_import.add(domain="own", version=1)
        node = rng.choice(_nodes(model))
        node.op_type, node.domain = "f", "own"
    function = rng.choice(model.functions)
    call = NodeProto(op_type=rng.choice(model.functions).name, domain=function.domain, input=["a"], output=["b"])
    match rng.randrange(7):
        case 0:
            function.node.append(call)
        case 1:
            del function.node[:]
            function.node.append(call)
        case 2:
            model.functions.append(function)
        case 3:
            function.input.append(rng.choice(("a", "z", "")))
        case 4:
            function.name, function.domain = rng.choice((("Relu", ""), ("Add", ""), ("", "own"), ("f", "")))
        case 5:
            del function.opset_import[:]
        case 6:
            _grown(model, rng.choice((8, 30)))


def _grown(model: ModelProto, levels: int) -> None:
    """Functions that each call the one before twice: 2 ** levels nodes once they are inlined."""
    for level in range(levels):
        function = model.functions.add(name=f"level{level}", domain="own", input=["a"], output=["c"])
        function.opset_import.add(domain="", version=21)
        function.opset_import.add(domain="own", version=1)
        for source, target in (("a", "b"), ("b", "c")):
            callee, domain = (f"level{level - 1}", "own") if level else ("Relu", "")
            function.node.add(op_type=callee, domain=domain, input=[source], output=[target])
    last = model.graph.output[0].name if model.graph.output else "y"
    model.graph.node.add(op_type=f"level{levels - 1}", domain="own", input=[last], output=["grown"])


def _value_types(model: ModelProto, rng: random.Random) -> None:
    """Types of inputs, outputs and values: none, sequences, maps, other dtypes."""
    infos = [item for graph in _graphs(model) for item in (*graph.input, *graph.output, *graph.value_info)]
    if not infos:
        return
    info = rng.choice(infos)
    match rng.randrange(6):
        case 0:
            info.ClearField("type")
        case 1:
            info.type.tensor_type.elem_type = rng.choice((0, 99, -1, *TensorProto.DataType.values()))
        case 2:
            info.type.tensor_type.ClearField("shape")
        case 3:
            info.type.sequence_type.elem_type.tensor_type.elem_type = 1
        case 4:
            info.type.map_type.key_type = 7
        case 5:
            info.type.tensor_type.shape.dim.add(dim_param=rng.choice(("batch", "", "n + 1", BAD_TEXT)))


def _bad_text(model: ModelProto, rng: random.Random) -> None:
    """A string field that is no UTF-8."""
    messages = list(walk_messages(model))
    rng.shuffle(messages)
    for message in messages:
        texts = [
            field
            for field, _ in message.ListFields()
            if field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated
        ]
        if texts:
            setattr(message, rng.choice(texts).name, BAD_TEXT)
            return


def graft(model: ModelProto, other: ModelProto, rng: random.Random) -> None:
    """Nodes, initializers or outputs of another model among its own."""
    for field in rng.choice((("node",), ("initializer",), ("node", "initializer", "input"), ("output",))):
        getattr(model.graph, field).extend(getattr(other.graph, field))


CHANGES: Sequence[Callable[[ModelProto, random.Random], None]] = (
    _terabytes,
    _size_in_a_constant,
    _size_in_a_constant,
    _tensor_data,
    _tensor_data,
    _external_data,
    _wiring,
    _wiring,
    _order,
    _operator,
    _attribute,
    _attribute,
    _versions,
    _depth,
    _functions,
    _value_types,
    _bad_text,
)
OP_TYPES = sorted({schema.name for schema in onnx.defs.get_all_schemas()} | {"NoSuchOp", "", "FusedMatMul"})
