"""Weights of 4 bits as DequantizeLinear and as MatMulNBits: the same integers and names both ways, equal outputs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from passes.optimize import optimize
from passes.rewrites.matmul_nbits import pack_nibbles, unpack_nibbles
from passes.weights.detached import DetachedModel, attach, detach
from passes.weights.sessions import Session

K, N, BLOCK = 80, 6, 32


def quantized(
    op: str = "MatMul", signed: bool = True, by_channel: bool = False, transposed: bool = False, bias: bool = False
) -> DetachedModel:
    """A product of x [2, 80] with a weight of 4 bits; 80 is no multiple of the block."""
    draw = np.random.default_rng(0)
    blocks = -(-K // BLOCK)
    low = -8 if signed else 0
    integers = draw.integers(low, low + 16, size=(K, N))
    shape = (N,) if by_channel else (blocks, N)
    scales = draw.uniform(0.5, 2, size=shape).astype(np.float32)
    zeros = draw.integers(0, 16, size=shape)
    dtype = ml_dtypes.int4 if signed else ml_dtypes.uint4
    turn = (lambda array: array.T if array.ndim == 2 else array) if transposed else (lambda array: array)
    tensors = {"w_quantized": turn(integers).astype(dtype), "w_scale": turn(scales)}
    if not signed:
        tensors["w_zero_point"] = turn(zeros).astype(dtype)
    axis = (1 if by_channel else 0) ^ transposed
    block: dict[str, Any] = {} if by_channel else {"block_size": BLOCK}
    turned: dict[str, Any] = {"transB": 1} if transposed else {}
    nodes = [helper.make_node("DequantizeLinear", list(tensors), ["w_dequantized"], axis=axis, **block)]
    reads = ["x", "w_dequantized"] + ["b"] * bias
    nodes.append(helper.make_node(op, reads, ["y"], "fc", **turned))
    tensors |= {"b": draw.normal(size=N).astype(np.float32)} if bias else {}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, [2, K])],
        [helper.make_tensor_value_info("y", 1, [2, N])],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return detach(model)


def stored(model: DetachedModel) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in attach(model).graph.initializer}


def outputs(model: DetachedModel) -> np.ndarray:
    x = np.random.default_rng(1).normal(size=(2, K)).astype(np.float32)
    return Session.of(model).run({"x": x})["y"]


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"signed": False},
        {"op": "Gemm", "transposed": True, "bias": True},
        {"op": "Gemm", "signed": False, "transposed": True},
    ],
)
def test_there_and_back_again_is_bit_for_bit_what_it_was(case: dict[str, bool]) -> None:
    model = quantized(**case)  # type: ignore[arg-type]
    packed = optimize(attach(model), ["to-matmul-nbits"])
    assert [row.status.value for row in packed.rows] == ["ran"]
    there = detach(packed.model.proto) if not isinstance(packed.model, DetachedModel) else packed.model
    assert [node.op_type for node in there.proto.graph.node] == ["MatMulNBits"] + ["Add"] * case.get("bias", False)
    assert there.proto.graph.node[0].name == "fc"
    np.testing.assert_allclose(outputs(there), outputs(model), rtol=1e-5, atol=1e-4)
    back = optimize(attach(there), ["from-matmul-nbits"]).model
    found, known = stored(back), stored(model)
    assert found.keys() == known.keys()
    for name, array in found.items():
        before = known[name].T if case.get("transposed") and known[name].ndim == 2 else known[name]
        assert array.dtype == before.dtype and (array == before).all(), name


def test_channels_become_blocks_of_one_scale() -> None:
    model = quantized(by_channel=True)
    there = optimize(attach(model), [{"to-matmul-nbits": {"block_size": 16}}]).model
    scales = stored(there)["w_scale"]
    assert scales.shape == (N, K // 16) and (scales == scales[:, :1]).all()
    np.testing.assert_allclose(outputs(there), outputs(model), rtol=1e-5, atol=1e-4)


def test_what_matmulnbits_does_not_take_stays_with_its_reason() -> None:
    model = quantized("Gemm", bias=True)
    model.proto.graph.node[1].attribute.append(helper.make_attribute("alpha", 2.0))
    run = optimize(attach(model), ["to-matmul-nbits"])
    assert not run.rows[0].changed
    assert run.rows[0].reason == "1 product left as they are, the first is fc: its factors are transposed or scaled"


def test_nibbles_of_an_odd_row_end_with_a_zero() -> None:
    rows = np.array([[1, 2, 15]])
    assert pack_nibbles(rows).tolist() == [[0x21, 0x0F]]
    assert unpack_nibbles(pack_nibbles(rows)).tolist() == [[1, 2, 15, 0]]
