"""The declared signature is a contract. Before and after as ONNX text."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import passes
from passes import Status
from passes.context import PassContext
from passes.errors import StepFailed
from passes.model.canonical import structure_fingerprint
from passes.model.signature import keep_signature
from tests.support.onnx_models import detached, model_of


def _model(signature: str) -> onnx.ModelProto:
    """Nothing is inferred in it."""
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g {signature} {{ y = Relu (x) }}')


def keep_declared(before: str, after: str, **how) -> str:
    """The signature of the model that a pass has made of `before`, once it is held to it."""
    old, new = (detached(_model(signature)) for signature in (before, after))
    keep_signature(old, new, **how)
    return onnx.printer.to_text(new.proto.graph).partition("{")[0].removeprefix("g ").split("\n")[0].strip()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            "(float[2,4] x) => (float[2,4] y)",
            "(float[2,4] x) => (float[7,7] y)",
            r"output y from float\[2,4\] to float\[7",
        ),
        (
            "(float[N,4] x) => (float[N,4] y)",
            "(float[N,5] x) => (float[N,4] y)",
            r"input x from float\[N,4\] to float\[N",
        ),
        (
            "(float[N,4] x) => (float[N,4] y)",
            "(float[N] x) => (float[N,4] y)",
            r"input x from float\[N,4\] to float\[N\]",
        ),
        ("(float[2] x) => (float[2] y)", "(float[2] x) => (int64[2] y)", r"output y from float\[2\] to int64\[2\]"),
        ("(float[2] x) => (float[2] y)", "(float[2] x) => (seq(float[2]) y)", r"output y from float\[2\] to sequence"),
        ("(float[2] x) => (float[2] y)", "(float[2] z) => (float[2] y)", r"inputs from \['x'\] to \['z'\]"),
    ],
)
def test_a_type_that_contradicts_the_declared_one_is_refused(before: str, after: str, words: str) -> None:
    with pytest.raises(StepFailed, match=f"changes the model's {words}"):
        keep_declared(before, after)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            "(float[N,4] x) => (float[N,4] y)",
            "(float[2,4] x) => (float[unk__0,4] y)",
            "(float[N,4] x) => (float[N,4] y)",
        ),
        ("(float[2] x) => (float[2] y)", "(float[N] x) => (float[] y)", "(float[2] x) => (float[2] y)"),
        ("(float[N,?] x) => (float[] y)", "(float[2,4] x) => (float[2,4] y)", "(float[N,?] x) => (float[2,4] y)"),
    ],
    ids=["narrowed", "widened", "unsaid"],
)
def test_what_is_declared_is_put_back_and_what_is_not_may_be_filled_in(before: str, after: str, expected: str) -> None:
    assert keep_declared(before, after) == expected


def test_who_was_asked_for_other_shapes_may_write_them() -> None:
    asked = "(float[2,4] x) => (float[2,4] y)"
    assert keep_declared("(float[N,4] x) => (float[N,4] y)", asked, narrows=True) == asked
    with pytest.raises(StepFailed):
        keep_declared("(float[N] x) => (float[N] y)", "(float[N] z) => (float[N] y)", narrows=True)


DYNAMIC = "g (float[N, 3] x) => (float[N, 3] y) { i = Identity (x) n = Neg (i) y = Neg (n) }"


def sizes(model: onnx.ModelProto) -> list[list[str | int]]:
    infos = (*model.graph.input, *model.graph.output)
    return [[dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in infos]


def test_a_pass_of_the_users_that_fixes_dims_has_changed_nothing(tmp_path, context: PassContext) -> None:
    (tmp_path / "own.py").write_text(
        "def fix(model):\n"
        "    for info in (*model.graph.input, *model.graph.output):\n"
        "        info.type.tensor_type.shape.dim[0].dim_value = 2\n"
        "    return model\n"
        "def shrink(model):\n"
        "    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 7\n"
        "    return model\n"
    )
    run = passes.optimize(
        model_of(DYNAMIC), recipe=[f"{tmp_path}/own.py:fix", f"{tmp_path}/own.py:shrink"], context=context
    )
    assert [(row.status, row.changed) for row in run.rows] == [(Status.RAN, False), (Status.FAILED, False)]
    assert run.rows[1].reason == "changes the model's output y from float[N,3] to float[N,7]"
    assert sizes(run.model.proto) == [["N", 3], ["N", 3]]


def test_onnxsim_writes_the_shapes_that_it_was_asked_for(context: PassContext) -> None:
    step = {"onnxsim": {"overwrite_input_shapes": {"x": [2, 3]}}}
    feeds = [{"x": np.ones((2, 3), np.float32)}]  # it runs on no other size then
    result = passes.optimize(model_of(DYNAMIC), recipe=[step], feeds=feeds, context=context).model.proto
    assert sizes(result) == [[2, 3], [2, 3]]
    assert sizes(passes.optimize(model_of(DYNAMIC), recipe=["onnxsim"], context=context).model.proto) == [
        ["N", 3],
        ["N", 3],
    ]


@pytest.mark.parametrize(
    ("step", "is_lost"),
    [("eliminate_identity", True), ("eliminate_deadend", False), ("to-fp16", True), ("canonical-gelu", False)],
)
def test_a_training_info_that_a_step_leaves_out_is_said(step: str, is_lost: bool, context: PassContext) -> None:
    model = model_of(
        "g (float[2] x) => (float[2] y) { a = Add (x, w) b = Identity (a) y = Relu (b) }", w=np.ones(2, "f")
    )
    model.training_info.add().initialization_binding.add(key="w", value="begin")
    run = passes.optimize(model, [step], context=context)
    assert bool(run.model.proto.training_info) is not is_lost
    assert any("training_info" in remark for remark in (*run.remarks, *run.rows[0].remarks)) is is_lost


def test_a_training_info_of_a_weight_that_a_step_of_ours_takes_in_is_left_out_and_said(context: PassContext) -> None:
    text = "d = Div (x, r) e = Erf (d) p = Add (e, one) q = Mul (x, p) y = Mul (q, half)"
    numbers = {"r": np.float32(np.sqrt(2)), "one": np.float32(1), "half": np.float32(0.5)}
    model = model_of(f"g (float[2] x) => (float[2] y) {{ {text} }}", 20, **numbers)
    model.training_info.add().initialization_binding.add(key="half", value="begin")
    run = passes.optimize(model, ["canonical-gelu"], context=context)
    assert [node.op_type for node in run.model.proto.graph.node] == ["Gelu"]
    assert not run.model.proto.training_info
    assert any("training_info" in remark for remark in run.remarks)


@pytest.mark.parametrize("step", ["onnxscript", "onnxsim"])
def test_an_output_may_become_a_constant(step: str, context: PassContext) -> None:
    model = model_of(
        "g (float[2] x) => (float[2] y, float[2] z) { y = Add(x, c)  z = Neg(c) }", c=np.array([1, 2], np.float32)
    )
    run = passes.optimize(model, recipe=[step], context=context)
    assert [(row.status, row.changed) for row in run.rows] == [(Status.RAN, True)]
    assert [node.op_type for node in run.model.proto.graph.node] == ["Add"]
    assert [output.name for output in run.model.proto.graph.output] == ["y", "z"]
    stored = {tensor.name: run.model.array(tensor).tolist() for tensor in run.model.proto.graph.initializer}
    assert stored["z"] == [-1, -2]


# A fingerprint says what a model is built like, on every machine and for every set of weights.

TEXT = "g (float[2, 32] x) => (float[2, 32] y) { a = MatMul (x, w) b = Reshape (a, shape) y = Mul (b, scale) }"


def fingerprint(text: str = TEXT, seed: int = 0, shape: tuple[int, int] = (2, 32), scale: float = 0.125) -> str:
    weights = {
        "w": np.random.default_rng(seed).standard_normal((32, 32)).astype(np.float32),
        "shape": np.array(shape, np.int64),
        "scale": np.float32([scale]),
    }
    return structure_fingerprint(detached(model_of(text, **weights)))


def test_it_is_short_and_always_the_same() -> None:
    assert fingerprint() == fingerprint()
    assert len(fingerprint()) == 12


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"scale": 0.125 * (1 + 1e-7)},
        {"text": TEXT.replace("b = ", "renamed = ").replace("(b,", "(renamed,")},
    ],
    ids=["weights", "the last bit of a scale", "names"],
)
def test_what_does_not_count(other: dict) -> None:
    assert fingerprint(**other) == fingerprint()


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (-1, 32)},
        {"scale": 0.25},
        {"text": TEXT.replace("Mul (b", "Add (b")},
        {"text": TEXT.replace("Reshape (a", "Reshape <allowzero = 1> (a")},
        {"text": TEXT.replace("Mul (b, scale)", "Mul (a, scale)")},
    ],
    ids=["a shape", "a scale", "an operator", "an attribute", "an edge"],
)
def test_what_counts(other: dict) -> None:
    assert fingerprint(**other) != fingerprint()


def test_the_shape_and_the_type_of_a_weight_count() -> None:
    def of(array: np.ndarray) -> str:
        return structure_fingerprint(
            detached(model_of("g (float[2, 32] x) => (float[2, N] y) { y = MatMul (x, w) }", w=array))
        )

    prints = {of(np.zeros(shape, dtype)) for shape in ((32, 32), (32, 16)) for dtype in (np.float32, np.float16)}
    assert len(prints) == 4


def test_text_counts_as_a_tensor() -> None:
    model = model_of("g (string[1] x) => (string[1] y) { y = StringConcat (x, w) }")
    model.graph.initializer.append(onnx.helper.make_tensor("w", onnx.TensorProto.STRING, [1], [b"\xff"]))
    assert structure_fingerprint(detached(model))
