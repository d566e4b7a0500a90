"""Nodes as a drawing."""

from __future__ import annotations

import onnx

from passes.structures import structure_of
from passes.structures.subgraph import subgraph_of
from passes.structures.view import GraphView
from pipeline.report import BoxKind, Drawing
from pipeline.stages.pictures import MOST_NODES, draw, node_rows
from tests.support.onnx_models import attention, detached, matrix, model_of


def drawn(model, kind: str) -> Drawing:
    view = GraphView(detached(model))
    structure = structure_of(kind)
    assert structure is not None
    (instance,) = structure.find(view.model).instances
    return draw(subgraph_of(instance, view), view, instance)


def lines(drawing: Drawing) -> list[str]:
    """Kind, operator, role if it says something else, and detail."""
    told = ((one.kind[0], one.op, one.role.removeprefix(one.op), one.detail) for one in drawing.boxes)
    return [" ".join(filter(None, words)) for words in told]


def test_q_k_and_v_down_to_their_attention() -> None:
    drawing = drawn(attention(), "qkv")
    assert lines(drawing) == [
        "i h 2×8×32",
        *(f"n MatMul {role} 32×32" for role in "QKV"),
        *["n Reshape → 2×8×2×16"] * 3,
        "n Transpose → 2×2×8×16",
        "n Transpose → 2×2×16×8",
        "n Transpose → 2×2×8×16",
        "n MatMul",
        "n Mul",
        "n Softmax",
        "n MatMul",
        "n Transpose → 2×8×2×16",
        "n Reshape → 2×8×32",
        "o MatMul 2×8×32",
    ]
    assert [(wire.start, wire.end, wire.shape) for wire in drawing.wires[:3]] == [
        (0, place, "2×8×32") for place in (1, 2, 3)
    ]


def test_what_only_asks_for_a_shape_or_a_type_is_no_reader() -> None:
    model = model_of(
        """g (float[2, N, 32] x) => (float[2, N, 32] y, int64[3] s) {
            n = LayerNormalization <axis = -1> (x, w)
            s = Shape (n)
            one = Constant <value_float = 1.0> ()
            c = CastLike (one, n)
            y = Mul (n, c)
        }""",
        w=matrix(1, 32, 0)[0],
    )
    drawing = drawn(model, "layernorm")
    assert lines(drawing) == ["i x 2×N×32", "n LayerNormalization 32", "o Mul 2×N×32"]


def test_a_drawing_ends_somewhere() -> None:
    body = "\n".join(f"v{at + 1} = Relu (v{at})" for at in range(40))
    view = GraphView(detached(model_of(f"g (float[2] v0) => (float[2] v40) {{ {body} }}")))
    (instance, *_) = structure_of("op:Relu").find(view.model).instances  # type: ignore[union-attr]
    drawing = draw(view.nodes, view, instance)
    assert (sum(one.kind is BoxKind.NODE for one in drawing.boxes), drawing.omitted) == (MOST_NODES, 8)


def test_a_dim_that_only_inference_has_named() -> None:
    """Else layers that are alike would look different."""
    model = model_of("g (float[N] x) => (float[M, 1] y) { i = NonZero (x)  t = Transpose (i)  y = Cast <to = 1> (t) }")
    assert any(dim.dim_param.startswith("unk__") for info in model.graph.value_info for dim in _dims(info))
    assert [row.shapes for row in node_rows(GraphView(detached(model)))][:2] == [("int64 1×?",), ("int64 ?×1",)]


def _dims(info: onnx.ValueInfoProto) -> list[onnx.TensorShapeProto.Dimension]:
    return list(info.type.tensor_type.shape.dim)


def test_rows_of_nodes() -> None:
    model = model_of("g (float[2, N] x) => (float[2, N] y) { y = Relu (x) }")
    (row,) = node_rows(GraphView(detached(model)))
    assert (row.name, row.op, row.shapes, row.module, row.made_by) == ("y", "Relu", ("float 2×N",), None, "")
