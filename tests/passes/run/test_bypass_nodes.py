"""A node is taken out of the middle where the types still fit."""

from __future__ import annotations

import numpy as np
import onnx

from passes.run.reproduce import bypass_nodes, smallest
from passes.weights.detached import DetachedModel
from tests.support.onnx_models import detached, matrix, model_of


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


CHAIN = "g (float[2, 3] x) => (float[3, 2] y) { a = Relu (x) b = Transpose <perm = [1, 0]> (a) y = Neg (b) }"


def test_who_read_what_a_node_makes_reads_what_it_read() -> None:
    shorter = [candidate.proto for candidate in bypass_nodes(detached(model_of(CHAIN)))]
    assert [ops(result) for result in shorter] == [["Transpose", "Neg"], ["Relu", "Neg"], ["Neg"]]
    assert [list(result.graph.node[0].input) for result in shorter] == [["x"]] * 3
    shapes = [[dim.dim_value for dim in result.graph.output[0].type.tensor_type.shape.dim] for result in shorter]
    assert shapes == [[3, 2], [2, 3], [2, 3]], "the output has the type that it now has"
    for result in shorter:
        onnx.checker.check_model(result, full_check=True)


def test_what_does_not_fit_is_not_taken_out() -> None:
    text = "g (float[2, 3] x) => (float[3, 4] y) { b = Transpose <perm = [1, 0]> (x) y = MatMul (b, w) }"
    assert list(bypass_nodes(detached(model_of(text, w=matrix(2, 4, 0))))) == []


def test_two_in_a_row_go_together() -> None:
    """Neither Reshape can go alone, since then the product does not fit."""
    text = """
    g (float[2, 6] x) => (float[2, 6] y) {
        h = Relu (x)
        a = Reshape (h, threes)
        b = Reshape (a, back)
        y = MatMul (b, w)
    }
    """
    shapes = {"threes": np.array([2, 2, 3], np.int64), "back": np.array([2, 6], np.int64)}
    shorter = [candidate.proto for candidate in bypass_nodes(detached(model_of(text, w=matrix(6, 6, 0), **shapes)))]
    assert ["Relu", "MatMul"] in [ops(result) for result in shorter]
    assert ["Relu", "Reshape", "Reshape", "MatMul"] not in [ops(result) for result in shorter]


def test_what_is_left_is_as_small_as_what_is_asked_allows() -> None:
    """Relu has to be read by Neg: the nodes between them go, and those around."""
    text = (
        "g (float[4] x) => (float[4] y) { a = Abs (x) b = Relu (a) c = Ceil (b) d = Floor (c) e = Neg (d) y = Sin (e) }"
    )
    model = detached(model_of(text))

    def is_read(candidate: DetachedModel) -> bool:
        ops_by_value = {name: node.op_type for node in candidate.proto.graph.node for name in node.output}
        return any(
            node.op_type == "Sin" and ops_by_value.get(node.input[0]) == "Relu" for node in candidate.proto.graph.node
        )

    assert not is_read(model)
    whole = smallest(model, lambda candidate: {"Relu", "Sin"} <= set(ops(candidate.proto)))
    assert ops(whole.proto) == ["Relu", "Sin"] and not is_read(whole), "apart from each other"

    def is_behind(candidate: DetachedModel) -> bool:
        by_name = {name: node for node in candidate.proto.graph.node for name in node.output}
        node = next((node for node in candidate.proto.graph.node if node.op_type == "Sin"), None)
        while node is not None and node.op_type != "Relu":
            node = by_name.get(node.input[0])
        return node is not None

    chain = smallest(model, is_behind)
    assert ops(chain.proto) == ["Relu", "Ceil", "Floor", "Neg", "Sin"]
    short = smallest(model, is_behind, shorten=True)
    assert ops(short.proto) == ["Relu", "Sin"] and is_read(short)
