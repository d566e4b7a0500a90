"""The comparison with the reference evaluator, node by node, on a small quantized block."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference.op_run import OpRun

from benchmarks.quantsim_specification import compare_nodes, count_moved_steps, operators_of_onnxruntime
from passes.weights.detached import DetachedModel
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.placement import place
from pipeline.quantsim.qdq import insert_qdq
from tests.pipeline.quantsim.pictures_of_qdq import model_of, rule

BLOCK = """block (float[4, 64] x) => (float[4, 32] y) {
    n = LayerNormalization <axis = -1> (x, scale)
    h = Gemm <transB = 1> (n, first, bias)
    g = Gelu(h)
    y = MatMul(g, second)
}"""


@pytest.fixture(scope="module")
def quantized() -> DetachedModel:
    draw = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape).astype(np.float32)

    model = model_of(BLOCK, scale=weight(64), first=weight(96, 64), bias=weight(96), second=weight(96, 32))
    placement = place(model, [rule("op:*", "int8/channel", "uint16")])
    return insert_qdq(model, encode(placement, calibrate(model, placement, [sample()]), model))


def sample() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)}


def test_every_node_is_that_of_the_evaluator(quantized: DetachedModel) -> None:
    nodes = list(compare_nodes(quantized, sample()))
    exact = [node for node in nodes if node.op in ("QuantizeLinear", "DequantizeLinear")]
    products = [node for node in nodes if node.summed]
    assert (len(nodes), len(exact), [node.summed for node in products]) == (18, 14, [64, 96])
    assert all(node.is_equal and not node.error for node in exact)
    assert all(node.error <= node.summed for node in products)
    assert all(node.error < 16 for node in nodes)


def test_the_whole_model_differs_by_a_step_at_most_where_it_first_does(quantized: DetachedModel) -> None:
    _, count, steps, size = count_moved_steps(quantized, sample())
    assert steps <= 1
    assert count <= size // 10


def test_the_whole_model_is_equal_where_the_evaluator_has_the_same_products(quantized: DetachedModel) -> None:
    operators = operators_of_onnxruntime(quantized.proto.opset_import)
    assert count_moved_steps(quantized, sample(), operators) == ("", 0, 0, 5)


def test_a_quantizer_that_rounds_otherwise_is_found(quantized: DetachedModel) -> None:
    class QuantizeLinear(OpRun):
        """Rounds down."""

        op_domain = ""

        def _run(self, x: np.ndarray, scale: np.ndarray, zero: np.ndarray, **_: object) -> tuple[np.ndarray]:
            return (np.floor(x / scale + zero).clip(0, 65535).astype(zero.dtype),)

    operators = operators_of_onnxruntime(quantized.proto.opset_import)
    name, count, steps, _ = count_moved_steps(quantized, sample(), [*operators, QuantizeLinear])
    assert (name, steps) == ("x_quantized", 1)
    assert count > 50
