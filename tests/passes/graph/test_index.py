"""The index of a graph, on one model with a body, a default of an input, and a Constant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
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
from passes.graph.op_facts import ONNX_DOMAINS, WITH_BODIES
from passes.graph.traversal import NearestSources, inline_functions, rename_twins
from passes.weights.detached import attach, open_model
from pipeline.onnx_backend import OnnxlineBackend

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
    bound = AttributeProto(name="value_float", type=AttributeProto.FLOAT, ref_attr_name="alpha")  # in a function
    assert constant_of(NodeProto(op_type="Constant", output=["c"], attribute=[bound])) is None


# The search for what a place is made from, against a walk from each place, on graphs with and without circles.

Graph = list[list[int]]

GRAPHS = st.integers(1, 7).flatmap(
    lambda count: st.lists(st.lists(st.integers(0, count - 1), max_size=3), min_size=count, max_size=count)
)
"""For each place, the places before it: any may be on a circle, and a place may be before itself."""


def walk(graph: Graph, place: int) -> dict[int, int]:
    """Place → distance from `place`, of all that it is made from."""
    distances, front = {place: 0}, [place]
    while front:
        following = [before for reached in front for before in graph[reached] if before not in distances]
        distance = distances[front[0]] + 1
        distances.update(dict.fromkeys(following, distance))
        front = list(dict.fromkeys(following))
    return distances


@given(GRAPHS, st.permutations(range(7)), st.sets(st.integers(0, 6)))
def test_each_place_has_the_sources_of_its_own_walk(graph: Graph, asked: list[int], sources: set[int]) -> None:
    search = NearestSources[int, int](lambda place: ({place: place} if place in sources else {}, graph[place]))
    for place in (place for place in asked if place < len(graph)):
        distances = walk(graph, place)
        found = search.of(place)
        assert sorted(found) == sorted(distances.keys() & sources)
    assert search.visits == len(graph)


@given(GRAPHS, st.integers(1, 3))
def test_of_many_sources_the_nearest_are_kept(graph: Graph, most: int) -> None:
    search = NearestSources[int, int](lambda place: ({place: place}, graph[place]), most)
    for place in range(len(graph)):
        distances, kept = walk(graph, place), set(search.of(place))
        assert len(kept) >= min(most, len(distances))
        farthest = max(distances[source] for source in kept)
        assert all(distances[source] >= farthest for source in distances.keys() - kept)


# Nodes of one name get names of their own at the door.


def model_with(names: list[str]) -> onnx.ModelProto:
    body = "x0 = Relu (x)" + "".join(f" x{at + 1} = Neg (x{at})" for at in range(len(names) - 1))
    text = f"g (float[N] x) => (float[N] x{len(names) - 1}) {{ {body} }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    return model


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["n", "n", "n"], ["n", "n_2", "n_3"]),
        (["n", "n_2", "n", "n"], ["n", "n_2", "n_3", "n_4"]),
        (["", "n", "", "n_2"], ["", "n", "", "n_2"]),
        (["n", "n", "n_2", "n_2"], ["n", "n_3", "n_2", "n_2_2"]),
    ],
)
def test_names(names: list[str], expected: list[str], tmp_path: Path) -> None:
    model = model_with(names)
    rename_twins(model.graph)
    assert [node.name for node in model.graph.node] == expected
    onnx.save(model_with(names), tmp_path / "model.onnx")
    for opened in (open_model(tmp_path / "model.onnx"), open_model(model_with(names))):
        assert [node.name for node in opened.proto.graph.node] == expected
        onnxruntime.InferenceSession(attach(opened).SerializeToString(), providers=["CPUExecutionProvider"])


# Functions whose attributes have defaults compute the same after they are inlined.

MODEL = """
<ir_version: 10, opset_import: ["": 20, "my": 1]>
g (float[2, 3] x, bool c) => (float[2, 3] y, float[2, 3] z) {
    a = my.twice (x)
    y = my.leaky <slope = 0.5> (a)
    z = If (c) <then_branch = t () => (float[2, 3] u) { u = my.leaky (x) },
                else_branch = e () => (float[2, 3] v) { v = my.twice (x) }>
}
<domain: "my", opset_import: ["": 20]>
leaky <slope: float = 0.25> (x) => (y) { y = LeakyRelu <alpha: float = @slope> (x) }
<domain: "my", opset_import: ["": 20, "my": 1]>
twice (x) => (y) { a = my.leaky (x)  y = my.leaky <slope = 0.125> (a) }
"""
X = np.array([[-1, 2, -4], [8, -16, 0.5]], np.float32)


def test_a_call_without_an_attribute_has_the_default_of_the_function() -> None:
    """ONNX's inliner drops the default, and LeakyRelu then has its own, 0.01."""
    model = onnx.parser.parse_model(MODEL)
    before = model.SerializeToString()
    inlined = inline_functions(model)
    assert not inlined.functions
    for branch in (True, False):
        feeds = {"x": X, "c": np.array(branch)}
        first, then = X * np.where(X < 0, 0.25, 1), X * np.where(X < 0, 0.03125, 1)
        for found in (model, inlined):
            session = onnxruntime.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
            y, z = session.run(None, feeds)
            assert np.array_equal(y, then * np.where(X < 0, 0.5, 1))
            assert np.array_equal(z, first if branch else then)
        assert np.array_equal(OnnxlineBackend.prepare(model).run(feeds)[1], first if branch else then)
    assert model.SerializeToString() == before, "the user's model has changed"


def test_operators_with_bodies_are_those_of_onnx() -> None:
    graphs = (onnx.defs.OpSchema.AttrType.GRAPH, onnx.defs.OpSchema.AttrType.GRAPHS)
    found = {
        schema.name
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain in ONNX_DOMAINS and any(entry.type in graphs for entry in schema.attributes.values())
    }
    assert found == WITH_BODIES
