"""The index of a graph, on one model with a body, a default of an input, and a Constant."""

from __future__ import annotations

from onnx import AttributeProto, ModelProto, NodeProto, parser

from passes.graph.index import (
    GraphIndex,
    constant_of,
    extract,
    replace_all_uses_with,
    replace_entries,
    required_inputs,
    values_read,
)
from passes.graph.inference import dims_of, infer_types, types_of

TEXT = """<ir_version: 10, opset_import: ["" : 20]>
main (float[N,2] x, bool c, float[2] shift) => (float[N,2] y, float[N,2] z)
<float[2,2] w = {1, 2, 3, 4}, float[2] shift = {5, 6}>
{
    half = Constant <value_float = 0.5> ()
    p = MatMul (x, w)
    s = Add (p, shift)
    y = Mul (s, s)
    z = If (c) <
        then_branch = g () => (float[N,2] t) { t = Mul (p, half) },
        else_branch = h () => (float[N,2] p) { p = Identity (x) }
    >
}"""


def model() -> ModelProto:
    return parser.parse_model(TEXT)


def test_index_says_who_makes_and_who_reads() -> None:
    index = GraphIndex(model().graph)
    assert {name: node.op_type for name, node in index.producers.items()} == {
        **{"half": "Constant", "p": "MatMul", "s": "Add", "y": "Mul", "z": "If"}
    }
    assert index.producer("x") is None and index.positions["s"] == 2
    assert [node.op_type for node in index.consumers["s"]] == ["Mul"]
    assert index.uses["s"] == [(3, 0), (3, 1)]
    assert index.reads["s"] == 2 and index.reads["y"] == 1  # an output is read once more
    assert index.consumers["half"] == [] and index.reads["half"] == 1  # in a body


def test_index_says_what_is_stored_and_what_is_fixed() -> None:
    index = GraphIndex(model().graph)
    assert list(index.initializers) == ["w", "shift"]
    assert list(index.constants) == ["w", "half"]  # callers may override shift
    assert list(index.required_inputs) == [info.name for info in required_inputs(model().graph)] == ["x", "c"]
    assert list(index.outputs) == ["y", "z"]


def test_index_of_a_body_knows_the_values_around_it() -> None:
    outer = GraphIndex(model().graph)
    body = outer.producers["z"].attribute[0].g
    index = GraphIndex(body, outer=outer)
    assert [node.op_type for node in index.ancestors(["t"])] == ["Constant", "MatMul", "Mul"]
    assert list(index.initializers) == ["w", "shift"]
    assert GraphIndex(body).producer("p") is None


def test_ancestors_stay_within_the_values_that_are_allowed() -> None:
    index = GraphIndex(model().graph)
    assert [node.op_type for node in index.ancestors(["y"])] == ["MatMul", "Add", "Mul"]
    assert [node.op_type for node in index.ancestors(["y"], within={"y", "s"})] == ["Add", "Mul"]


def test_constants_are_found_in_another_layout_and_type() -> None:
    index = GraphIndex(
        parser.parse_graph("""g (float[2,2] x) => (float[2,2] y, int64[2] size) <float[2,2] w = {1, 2, 3, 4}> {
            turned = Transpose (w)
            half = Cast <to = 10> (turned)
            twice = Add (half, half)
            noise = RandomNormalLike (w)
            y = Identity (x)
            size = Shape (x)
        }""")
    )
    found = index.tensor_at("half")
    assert found is not None and found.name == "w"
    assert index.tensor_at("twice") is None and index.tensor_at("y") is None
    assert index.origin_of("half", {"Cast"}) == "turned" and index.origin_of("twice", {"Cast"}) == "twice"
    assert index.folded == {"", "w", "turned", "half", "twice"}  # a random value differs from run to run


def test_readers_of_a_value_read_another_one_also_in_bodies() -> None:
    proto = model()
    replace_all_uses_with(proto.graph.node, {"p": "q", "x": "r"})
    read = {node.op_type: list(node.input) for node in proto.graph.node}
    assert read["MatMul"] == ["r", "w"] and read["Add"] == ["q", "shift"]
    then, other = (attribute.g for attribute in proto.graph.node[4].attribute)
    assert list(then.node[0].input) == ["q", "half"]
    assert (list(other.node[0].input), other.output[0].name) == (["r"], "p")  # its own p


def test_nodes_are_cut_out_with_what_they_store() -> None:
    proto = model()
    nodes = list(proto.graph.node[1:4])
    assert values_read(nodes) == ["x", "w", "shift"]
    part = extract(proto, nodes, inputs=[proto.graph.input[0]], outputs=["y"])
    assert [node.op_type for node in part.graph.node] == ["MatMul", "Add", "Mul"]
    assert [info.name for info in part.graph.input] == ["x"] and part.graph.input[0].type == proto.graph.input[0].type
    assert [tensor.name for tensor in part.graph.initializer] == ["w", "shift"]
    assert part.opset_import == proto.opset_import and not part.graph.output[0].HasField("type")


def test_a_field_is_replaced_by_some_of_its_own_entries() -> None:
    graph = model().graph
    replace_entries(graph.node, (node for node in reversed(graph.node) if node.op_type != "If"))
    assert [node.op_type for node in graph.node] == ["Mul", "Add", "MatMul", "Constant"]


def test_types_are_inferred_and_a_model_that_cannot_be_inferred_has_its_own() -> None:
    types = types_of(model())
    assert dims_of(types["p"]) == ("N", 2)
    broken = parser.parse_model(TEXT.replace("MatMul (x, w)", "Reshape (x, x)"))
    assert [info.name for info in infer_types(broken).output] == ["y", "z"]


def test_a_constant_without_its_value_is_no_constant() -> None:
    broken = NodeProto(op_type="Constant", output=["c"], attribute=[AttributeProto(name="value_int")])
    assert constant_of(broken) is None
