"""onnxruntime's own ops, taken apart, against onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from pipeline.errors import Unsupported
from pipeline.importers import from_onnx
from pipeline.ops import emitter_of
from pipeline.runtime import compile_graph
from tests.pipeline.importers.from_onnx.import_text import graph_from, model

INPUTS = "float[2, 5, 6] x, float[6, 24] w, float[24] b"

ATTENTIONS = ["num_heads = 2", "num_heads = 2, qkv_hidden_sizes = [6, 6, 12]", "num_heads = 4, scale = 0.25"]


@pytest.mark.parametrize("attributes", ATTENTIONS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_attention_like_onnxruntime(attributes: str, with_bias: bool) -> None:
    hidden = 12 if "qkv" in attributes else 8
    node = f"y = com.microsoft.Attention <{attributes}> (x, w, b)"
    proto = model(f"g ({INPUTS}) => (float[2, 5, {hidden}] y) {{ {node} }}")
    random = np.random.default_rng(0)
    feeds = {
        value.name: random.normal(size=[dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in proto.graph.input
    }
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    if not with_bias:
        feeds["b"][:] = 0  # onnxruntime 1.31 crashes where the bias is left out
    wanted = session.run(None, feeds)[0]
    if not with_bias:
        proto.graph.node[0].input.pop()
    actual = compile_graph(from_onnx(proto, emitter_of=emitter_of)).run(feeds)["y"].numpy()
    # float32: dot products of six terms, and a softmax over five.
    np.testing.assert_allclose(actual, wanted, atol=2e-6, rtol=2e-5)


ODD = [
    "y = com.microsoft.Attention <num_heads = 2, unidirectional = 1> (x, w, b)",
    "y = com.microsoft.Attention <num_heads = 2> (x, w, b, m)",
]


@pytest.mark.parametrize("node", ODD)
def test_the_odd_cases_are_taken_apart_as_the_step_does(node: str) -> None:
    """test_contrib_nodes.py compares their numbers with onnxruntime."""
    graph = graph_from(f"g ({INPUTS}, int32[2] m) => (float[2, 5, 8] y) {{ {node} }}")
    assert "aten.softmax.int" in [op.kind for op in graph.ops]


def test_rotary_attention_is_refused() -> None:
    node = "y = com.microsoft.Attention <num_heads = 2, do_rotary = 1> (x, w, b)"
    with pytest.raises(Unsupported, match="expected none of them"):
        graph_from(f"g ({INPUTS}) => (float[2, 5, 8] y) {{ {node} }}")


def test_the_proto_is_left_as_it_is() -> None:
    proto = model(f"g ({INPUTS}) => (float[2, 5, 8] y) {{ y = com.microsoft.Attention <num_heads = 2> (x, w, b) }}")
    before = onnx.ModelProto()
    before.CopyFrom(proto)
    from_onnx(proto)
    assert proto == before
