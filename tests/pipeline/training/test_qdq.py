"""Quantized models train: their form, the gradients of their scales, and the quantized model that comes back."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import printer
from torch.optim import SGD, Adam

from passes.weights.detached import attach, detach
from pipeline.config.quantsim import parse_precision
from pipeline.errors import UsageError
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.placement import PlacementRule, place
from pipeline.quantsim.qdq import insert_qdq
from pipeline.training import GraphModule, as_module, record_step, with_weights
from pipeline.training.qdq import read_quantizers, trainable_form
from tests.pipeline.training.steps import LOSS

RANGES: dict[str, tuple[float, float]] = dict.fromkeys(["x", "h", "r", "t", "y"], (-4.0, 4.0))

BATCH = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2])


MLP = """<ir_version: 10, opset_import: ["" : 21]> mlp (float[2, 4] x) => (float[2, 3] y) {
    h = Gemm (x, first, bias)
    r = Relu (h)
    t = Reshape (r, shape)
    y = MatMul (t, second)
}"""


def quantized(weights: str, activations: str) -> onnx.ModelProto:
    """Two products with a Relu and a Reshape between them; the bias has 32 bits where activations have 8."""
    model, draw = onnx.parser.parse_model(MLP), np.random.default_rng(0)
    for name, shape in {"first": (4, 8), "bias": 8, "second": (8, 3)}.items():
        array = draw.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2, 8]), "shape"))
    whole = detach(model)
    placement = place(whole, [PlacementRule("op:*", parse_precision(weights), parse_precision(activations))])
    return attach(insert_qdq(whole, encode(placement, RANGES, whole)))


def nodes_of(model: onnx.ModelProto) -> list[str]:
    for node in model.graph.node:
        node.ClearField("name")
    return [" ".join(printer.to_text(node).split()) for node in model.graph.node]


def outputs_of(model: onnx.ModelProto, x: torch.Tensor) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x.numpy()})[0])


def test_the_trainable_form_has_floats_in_front_of_8_bits() -> None:
    model = trainable_form(read_quantizers(quantized("int4/channel", "uint6")))
    assert nodes_of(model)[:4] == [
        "first_dequantized_numbers_wide = QuantizeLinear <axis: int = 1> (first, first_scale, first_zero_point_wide)",
        "first_dequantized_numbers = Clip "
        "(first_dequantized_numbers_wide, first_dequantized_numbers_lowest, first_dequantized_numbers_highest)",
        "first_dequantized = DequantizeLinear <axis: int = 1> "
        "(first_dequantized_numbers, first_scale, first_zero_point_wide)",
        "bias_dequantized = Identity (bias)",
    ]  # fmt: skip


FORMATS = [("int8/channel", "uint8"), ("int4/channel", "uint8"), ("int4/block2", "uint16"), ("int6/channel", "uint5")]


@pytest.mark.parametrize(("weights", "activations"), FORMATS)
def test_the_trainable_form_computes_the_same(weights: str, activations: str) -> None:
    """Sums run in other orders, and a sum at the edge between two numbers may go to either."""
    before = quantized(weights, activations)
    after = trainable_form(read_quantizers(before))
    x = torch.randn(2, 4) * 2
    step = 8 / (2 ** int(activations.removeprefix("uint")) - 1)
    np.testing.assert_allclose(outputs_of(after, x), outputs_of(before, x), atol=step * 1.01)
    np.testing.assert_allclose(as_module(before)(x).detach(), outputs_of(before, x), atol=step * 1.01)


@pytest.mark.parametrize(("weights", "activations"), FORMATS)
def test_training_lowers_the_loss_and_onnxruntime_runs_what_comes_back(weights: str, activations: str) -> None:
    before = quantized(weights, activations)
    module = as_module(before)
    program = record_step(module, LOSS, Adam(module.parameters(), lr=1e-2), BATCH)
    losses = [program.step(BATCH).item() for _ in range(20)]
    assert losses[-1] < losses[0]
    after = with_weights(before, program)
    onnx.checker.check_model(after)
    program.write_back()
    assert share_of_equal_values(after, module) > 0.9
    if "block" not in weights:
        numbers = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in after.graph.initializer}
        np.testing.assert_allclose(numbers["bias_scale"], numbers["x_scale"] * numbers["first_scale"], rtol=1e-6)
    assert [node.op_type for node in after.graph.node] == [node.op_type for node in before.graph.node]
    names = {tensor.name for tensor in changed_tensors(before, after)}
    bias = "bias" if "block" in weights else "bias_quantized"  # which has no scale where products have one for a block
    assert {"first_quantized", "first_scale", bias, "x_scale"} <= names
    assert ("r_highest" in names) == (activations == "uint5")
    assert not any(name.endswith("zero_point") for name in names)


def share_of_equal_values(model: onnx.ModelProto, module: GraphModule) -> float:
    """Nearly all are: the model has the bias in whole numbers too, so a sum beside an edge may go to the other side."""
    equal = [
        np.isclose(outputs_of(model, x), module(x).detach(), atol=1e-4)
        for x in torch.randn(100, *BATCH[0].shape, generator=torch.Generator().manual_seed(1)) * 2
    ]
    return float(np.mean(equal))


def changed_tensors(before: onnx.ModelProto, after: onnx.ModelProto) -> list[onnx.TensorProto]:
    pairs = zip(before.graph.initializer, after.graph.initializer, strict=True)
    return [new for old, new in pairs if old.SerializeToString() != new.SerializeToString()]


ONE = """<ir_version: 10, opset_import: ["" : 21]> g (float[4, 3] x) => (float[4, 3] y)
    <float s = {0.5}, int8 z = {3}>
{ q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z) }"""


@given(st.lists(st.floats(-200, 200, width=32), min_size=12, max_size=12), st.sampled_from([0.5, 0.37, 2.0]))
@settings(max_examples=20)
def test_the_gradients_are_those_of_lsq(numbers: list[float], scale: float) -> None:
    """Esser et al. 2020, equations 3 and 5, and section 2.2: the scale's gradient, times 1 / sqrt(N · Q).

    A number is within the format where its rounded one is, as torch has it; the paper looks before it rounds.
    What is trained is a factor of the first scale, so that a step of SGD, times that scale, is LSQ's step.
    """
    x = torch.tensor(numbers).reshape(4, 3).requires_grad_()
    module = scaled(scale)
    module(x).sum().backward()
    low, high = -128 - 3, 127 - 3
    ratio = x.detach() / torch.tensor(scale)
    rounded = ratio.round()
    within = (rounded >= low) & (rounded <= high)
    of_scale = torch.where(within, rounded - ratio, rounded.clamp(low, high))
    (factor,) = module.scale_parameters()
    found = factor.grad
    assert found is not None and x.grad is not None
    torch.testing.assert_close(found * scale, of_scale.sum() / (3 * 127) ** 0.5, rtol=1e-4, atol=1e-4)
    assert torch.equal(x.grad, within.float())


def test_the_gradients_are_those_of_torchs_own_operator() -> None:
    x = (torch.randn(4, 3, generator=torch.Generator().manual_seed(0)) * 60).requires_grad_()
    scale, twin = torch.tensor([0.5], requires_grad=True), x.detach().clone().requires_grad_()
    module, gradient = scaled(0.5), torch.arange(12.0).reshape(4, 3)
    (module(x) * gradient).sum().backward()
    factor = 1 / (3 * 127) ** 0.5
    learnable = torch._fake_quantize_learnable_per_tensor_affine  # pyright: ignore[reportPrivateImportUsage]
    wanted = learnable(twin, scale, torch.tensor([3.0]), -128, 127, factor)
    (wanted * gradient).sum().backward()
    torch.testing.assert_close(module(x), wanted, rtol=0, atol=0)
    found = module.scale_parameters()[0].grad
    assert x.grad is not None and twin.grad is not None and found is not None and scale.grad is not None
    assert torch.equal(x.grad, twin.grad)
    torch.testing.assert_close(found * 0.5, scale.grad.reshape(()))


def scaled(scale: float) -> GraphModule:
    model = onnx.parser.parse_model(ONE)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.array(scale, np.float32), "s"))
    return as_module(model)


def test_a_scale_at_or_below_zero_is_refused() -> None:
    before = quantized("int8/channel", "uint8")
    module = as_module(before)
    with torch.no_grad():
        module.get_parameter("relative.x_scale").zero_()
    with pytest.raises(UsageError, match=r"the scale 'x_scale' was trained down to 0\.0; expected scales above zero"):
        with_weights(before, module)


def test_what_is_not_trained_comes_back_bit_for_bit() -> None:
    """No weight moves by being quantized again."""
    for weights, activations in FORMATS:
        before = quantized(weights, activations)
        changed = {tensor.name for tensor in changed_tensors(before, with_weights(before, as_module(before)))}
        assert changed == set()


def test_chosen_scales_alone() -> None:
    before = quantized("int8/channel", "uint8")
    module = as_module(before, train=["*_scale"])
    program = record_step(module, LOSS, SGD(module.parameters(), lr=1e-4), BATCH)
    program.step(BATCH)
    names = [tensor.name for tensor in changed_tensors(before, with_weights(before, program))]
    assert names and all(name.endswith(("_scale", "_quantized")) for name in names)
