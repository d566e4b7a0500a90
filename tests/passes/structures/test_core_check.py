"""The checker: names, order, layout and how a constant is stored do not matter; ops, weights and their wiring do."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from passes.structures.projection_check import computed_constant, computed_digest
from passes.weights.stand_ins import digest_of
from tests.support.onnx_models import detached
from tests.support.structure_models import drawn, found, lost, names

NORM = """
g (float[2, 4, 8] x) => (float[2, 4, 8] y) <float[8] w, float[8] u, int64[1] last = {-1}> {
    two = Constant <value_float = 2.0> ()
    eps = Constant <value_float = 1e-6> ()
    r = Relu (x)
    q = Pow (r, two)
    v = ReduceMean (q, last)
    e = Add (v, eps)
    s = Sqrt (e)
    n = Div (r, s)
    m = Mul (n, w)
    y = Neg (m)
}"""


def change_norm(old: str, new: str) -> onnx.ModelProto:
    assert old in NORM
    return drawn(NORM.replace(old, new))


def rename_values(model: onnx.ModelProto) -> onnx.ModelProto:
    """Every value and weight under another name, the inputs and outputs apart."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    own = {info.name for info in (*model.graph.input, *model.graph.output)}
    for tensor in model.graph.initializer:
        tensor.name = f"other_{tensor.name}"
    for node in model.graph.node:
        node.input[:] = [name if name in own else f"other_{name}" for name in node.input]
        node.output[:] = [name if name in own else f"other_{name}" for name in node.output]
    del model.graph.value_info[:]
    return model


def in_other_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Constants as initializers, of other shapes."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for node in [node for node in model.graph.node if node.op_type == "Constant"]:
        array = np.array([node.attribute[0].f], np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, node.output[0]))
        model.graph.node.remove(node)
    for tensor in model.graph.initializer:
        if tensor.name == "w":
            tensor.dims[:] = [1, 1, 8]
    return model


HARMLESS = {
    "as it was": drawn(NORM),
    "renamed": rename_values(drawn(NORM)),
    "constants as initializers of other shapes": in_other_shapes(drawn(NORM)),
    "Identity between": change_norm("n = Div (r, s)", "s1 = Identity (s) r1 = Identity (r) n = Div (r1, s1)"),
    "layout between": change_norm(
        "m = Mul (n, w)",
        "i = Constant <value_ints = [8, 8]> () o = Constant <value_ints = [2, 4, 8]> () n1 = Reshape (n, i) "
        "n2 = Reshape (n1, o) m = Mul (w, n2)",
    ),
    "the rest of the model": change_norm("y = Neg (m)", "z = Abs (m) y = Neg (z)"),
}
HARMFUL = {
    "one op": change_norm("m = Mul (n, w)", "m = Add (n, w)"),
    "another weight": change_norm("m = Mul (n, w)", "m = Mul (n, u)"),
    "another epsilon": change_norm("1e-6", "1e-5"),
    "a scale that is computed": change_norm("m = Mul (n, w)", "w1 = Add (w, eps) m = Mul (n, w1)"),
    "no epsilon": change_norm("s = Sqrt (e)", "s = Sqrt (v)"),
    "read by nobody": change_norm("y = Neg (m)", "y = Neg (x)"),
    "read for its Shape alone": change_norm("y = Neg (m)", "s2 = Shape (m) o = Relu (x) y = Expand (o, s2)"),
    "read for its Size alone": change_norm(
        "y = Neg (m)", "s2 = Size (m) f = Cast <to = 1> (s2) o = Relu (x) y = Mul (o, f)"
    ),
    "times zero": change_norm("y = Neg (m)", "no = Constant <value_float = 0.0> () z = Mul (m, no) y = Sub (x, z)"),
    "less itself": change_norm("y = Neg (m)", "k = Abs (m) z = Sub (k, k) y = Add (z, x)"),
    "to the power of zero": change_norm(
        "y = Neg (m)", "no = Constant <value = float {0.0}> () z = Pow (m, no) y = Mul (z, x)"
    ),
}


@pytest.mark.parametrize("change", HARMLESS)
def test_stands(change: str) -> None:
    instances = found("rmsnorm", drawn(NORM))
    assert names(instances) == ["m"]
    assert lost("rmsnorm", instances, HARMLESS[change]) == {}


@pytest.mark.parametrize("change", HARMFUL)
def test_is_lost(change: str) -> None:
    instances = found("rmsnorm", drawn(NORM))
    (why,) = lost("rmsnorm", instances, HARMFUL[change]).values()
    assert "'m'" in why
    assert "Sqrt → Div" in why


def test_one_bit_of_a_weight() -> None:
    model = drawn(NORM)
    instances = found("rmsnorm", model)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "w")
    array = numpy_helper.to_array(tensor).copy()
    array[3] = np.nextafter(array[3], np.float32(9))
    tensor.CopyFrom(numpy_helper.from_array(array, "w"))
    assert list(lost("rmsnorm", instances, model)) == ["rmsnorm"]


THREE = """
g (float[2, 4] x) => (float[2, 4] y) <float[4] w> {
    a = Softmax (x)
    b = Neg (a)
    c = Softmax (b)
    d = Neg (c)
    e = Softmax (d)
    y = Mul (e, w)
}"""


def test_the_value_says_which_of_several_is_lost() -> None:
    instances = found("op:Softmax", drawn(THREE))
    gone = drawn(THREE.replace("c = Softmax (b)", "c = Sigmoid (b)"))
    assert lost("op:Softmax", instances, gone) == {
        "c": "'c' is made by Sigmoid, and no more by Softmax with the same weights"
    }
    assert len(lost("op:Softmax", instances, rename_values(gone))) == 1
    assert lost("op:Softmax", instances, rename_values(drawn(THREE))) == {}


def test_others_that_look_alike_do_not_stand_in() -> None:
    """One of three equal nodes is kept. When it goes, the other two are still there, and are none of it."""
    model = drawn(THREE)
    for node in model.graph.node:
        node.name = f"node_{node.output[0]}"
    (instance,) = found("node:node_c", model)
    gone = drawn(THREE.replace("c = Softmax (b)", "c = Sigmoid (b)"))
    assert list(lost("node:node_c", (instance,), gone)) == ["node_c"]
    assert list(lost("node:node_c", (instance,), rename_values(gone))) == ["node_c"]
    assert lost("node:node_c", (instance,), rename_values(model)) == {}
    other = drawn(THREE.replace("a = Softmax (x)", "a = Sigmoid (x)"))
    assert lost("node:node_c", (instance,), other) == {}


def test_a_transposed_matrix_is_the_same_matrix() -> None:
    text = "g (float[2, 4] x) => (float[2, 6] y) <float[4, 6] w> { y = MatMul (x, w) }"
    model = drawn(text)
    instances = found("op:MatMul", model)
    array = np.ascontiguousarray(numpy_helper.to_array(model.graph.initializer[0]).T)
    turned = drawn("g (float[2, 4] x) => (float[2, 6] y) { w2 = Transpose (w) y = MatMul (x, w2) }")
    turned.graph.initializer.append(numpy_helper.from_array(array, "w"))
    assert lost("op:MatMul", instances, turned) == {}


def test_a_weight_that_was_cast_may_be_stored_as_cast() -> None:
    text = "g (float[2, 4] x) => (float[2, 4] y) <float16[4] w> { w2 = Cast <to = 1> (w) y = Mul (x, w2) }"
    model = drawn(text)
    instances = found("op:Mul", model)
    stored = drawn("g (float[2, 4] x) => (float[2, 4] y) { y = Mul (x, w) }")
    array = numpy_helper.to_array(model.graph.initializer[0]).astype(np.float32)
    stored.graph.initializer.append(numpy_helper.from_array(array, "w"))
    assert lost("op:Mul", instances, model) == {}
    assert lost("op:Mul", instances, stored) == {}
    rounded = drawn(
        text.replace("Cast <to = 1> (w)", "Cast <to = 16> (w) w3 = Cast <to = 1> (w2)").replace("(x, w2)", "(x, w3)")
    )
    assert list(lost("op:Mul", instances, rounded)) == ["y"]


GEMMA = NORM.replace("m = Mul (n, w)", "one = Constant <value_float = 1.0> () w1 = Add (one, w) m = Mul (n, w1)")


def test_a_scale_that_is_computed_may_be_folded_and_not_changed() -> None:
    """As Gemma has it: 1 + w."""
    model = drawn(GEMMA)
    instances = found("rmsnorm", model)
    assert lost("rmsnorm", instances, model) == {}
    folded = drawn(NORM)
    tensor = next(tensor for tensor in folded.graph.initializer if tensor.name == "w")
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(1), "w"))
    assert lost("rmsnorm", instances, folded) == {}
    for other in (drawn(NORM), drawn(GEMMA.replace("Add (one, w)", "Add (one, u)"))):
        assert list(lost("rmsnorm", instances, other)) == ["rmsnorm"]


def test_a_sum_of_constants_stands_for_no_residual() -> None:
    """A pass takes the sum into the convolution, and leaves a sum that computes a bias."""
    text = """
    g (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] z) <float[4, 4, 3, 3] k, float[4] a, float[4] b> {
        f = Conv <pads = [1, 1, 1, 1]> (x, k) y = Add (f, x) z = Relu (y) }"""
    instances = found("residual", drawn(text))
    taken_in = drawn(
        text.replace(
            "f = Conv <pads = [1, 1, 1, 1]> (x, k) y = Add (f, x)",
            "c = Neg (a) d = Neg (b) e = Add (c, d) y = Conv <pads = [1, 1, 1, 1]> (x, k, e)",
        )
    )
    assert list(lost("residual", instances, taken_in)) == ["residual"]


def test_the_digest_of_a_computed_constant_is_that_of_its_elements() -> None:
    model = detached(
        onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["": 20]>
g (float[3, 4] x) => (float[3, 4] y) <int64[2] sizes = {3, 4}, float[2] w = {1, 2}> {
    zeros = ConstantOfShape (sizes)
    grown = Expand (w, sizes)
    y = Add (x, zeros)
}""")
    )
    zeros = computed_constant(model, "zeros", model.index)
    assert zeros is not None and computed_digest(model, "zeros", model.index) == digest_of(zeros)
    assert computed_digest(model, "w", model.index) == digest_of(np.array([1, 2], np.float32))
    assert computed_digest(model, "grown", model.index) is None  # 2 elements do not become 4
