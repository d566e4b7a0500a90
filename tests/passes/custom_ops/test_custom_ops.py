"""Operators of the user's: inferred, computed, split out of models, and refused where what they say does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx.parser import parse_model as parse

import passes
from passes.custom_ops import ArrayType, CustomOp, declare_ops, declared_ops
from passes.diff import compare_models
from passes.errors import ModelError, PassError, PolicyError, UsageError
from passes.graph.inference import types_of
from passes.tools import compare, to_fp16
from passes.weights.detached import read_model
from passes.weights.sessions import Session
from passes.weights.split_run import names_computed_in_numpy
from tests.support.onnx_models import detached

OPS = """
import numpy as np
from passes.custom_ops import ArrayType, CustomOp

def swish(x, *, alpha):
    return (x / (1 + np.exp(-alpha * x.astype(np.float64)))).astype(x.dtype)

SWISH = CustomOp("com.acme", "Swish", infer=lambda x, *, alpha: x, compute=swish, attributes={"alpha": 1.0})
HALVES = CustomOp(
    "com.acme", "Halves",
    infer=lambda x: [ArrayType(x.dtype, (*x.shape[:-1], x.shape[-1] // 2))] * 2,
    compute=lambda x: np.split(x, 2, -1),
)
"""

CHAIN = """
<ir_version: 10, opset_import: ["" : 20, "com.acme" : 1]>
g (float[N, 4] x) => (float[N, 2] y) <float[4] w = {1, 2, 3, 4}> {
    i = Identity (x)
    a = Add (i, w)
    b = com.acme.Swish <alpha = 2.0> (a)
    c = Transpose <perm = [1, 0]> (b)
    d = Transpose <perm = [1, 0]> (c)
    e = Relu (d)
    left, right = com.acme.Halves (e)
    y = Add (left, right)
}
"""

NESTED = """
<ir_version: 10, opset_import: ["" : 20, "com.acme" : 1, "own" : 1]>
g (float[2, 4] x, bool c) => (float[2, 4] y) {
    i = Neg (x)
    a = If (c) <then_branch = t () => (float[2, 4] u) { u = com.acme.Swish (i) },
                else_branch = e () => (float[2, 4] v) { v = Abs (i) }>
    y = own.F (a)
}
<domain: "own", opset_import: ["" : 20, "com.acme" : 1]> F (x) => (y) { z = Neg (x)  y = com.acme.Swish (z) }
"""


@pytest.fixture
def ops(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "ops.py"
    file.write_text(OPS)
    with declare_ops([file]):
        yield file


def swish(x: np.ndarray, alpha: float = 1.0) -> np.ndarray:
    return (x / (1 + np.exp(-alpha * x.astype(np.float64)))).astype(x.dtype)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def expected(x: np.ndarray) -> np.ndarray:
    left, right = np.split(np.maximum(swish(x + np.array([1, 2, 3, 4], np.float32), 2.0), 0), 2, -1)
    return left + right


@pytest.mark.usefixtures("ops")
def test_types_follow_through_custom_operators() -> None:
    types = types_of(parse(CHAIN))
    dims = [dim.dim_param or dim.dim_value for dim in types["left"].type.tensor_type.shape.dim]
    assert dims == ["N", 2]
    assert types["b"].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize(
    ("declared", "found"),
    [
        ("float[N, 3] y", "float[N,3]"),
        ("float16[N, 2] y", "float16[N,2]"),
        ("float[2] y", "float[2]"),
        ("float[M, 2] y", ""),
    ],
)
def test_a_declared_type_that_infer_contradicts_is_refused(declared: str, found: str, tmp_path: Path) -> None:
    text = CHAIN.replace("float[N, 2] y", declared).replace("y = Add (left, right)", "")
    onnx.save(parse(text.replace("left, right", "y, right")), tmp_path / "m.onnx")
    if not found:
        assert read_model(tmp_path / "m.onnx")
        return
    words = f"makes 'y', which the model declares as {found}, and `infer` of com.acme::Halves says float[N,2]"
    with pytest.raises(ModelError, match=re.escape(words)):
        read_model(tmp_path / "m.onnx")


@pytest.mark.usefixtures("ops")
def test_a_model_is_split_at_them() -> None:
    x = draw(3, 4)
    found = Session.of(detached(parse(CHAIN)), ["b", "c"]).run({"x": x})
    np.testing.assert_allclose(found["y"], expected(x), rtol=1e-6, atol=1e-6)  # one rounding to float32 each
    np.testing.assert_array_equal(found["c"], found["b"].T)


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("branch", [True, False])
def test_bodies_and_functions_with_them_run(branch: bool) -> None:
    x = draw(2, 4)
    found = Session.of(detached(parse(NESTED))).run({"x": x, "c": np.array(branch)})["y"]
    np.testing.assert_allclose(found, swish(-(swish(-x) if branch else np.abs(x))), rtol=1e-6, atol=1e-6)


TURNS = """
<ir_version: 10, opset_import: ["" : 20, "com.acme" : 1]>
g (float[2, 4] x) => (float[2, 4] y, float[3, 2, 4] all) <int64 n = {3}> {
    y, all = Loop (n, , x) <body = b (int64 turn, bool goes, float[2, 4] a) => (bool c, float[2, 4] d, float[2, 4] e) {
        c = Identity (goes)
        d = com.acme.Swish (a)
        e = Neg (d)
    }>
}
"""


@pytest.mark.usefixtures("ops")
def test_the_turns_of_a_loop_with_them() -> None:
    x = draw(2, 4)
    found = Session.of(detached(parse(TURNS))).run({"x": x})
    turns = [swish(x), swish(swish(x)), swish(swish(swish(x)))]
    np.testing.assert_array_equal(found["y"], turns[-1])
    np.testing.assert_array_equal(found["all"], np.negative(turns))


@pytest.mark.usefixtures("ops")
def test_what_numpy_computes_is_counted_in_bodies_and_functions_too() -> None:
    assert names_computed_in_numpy(parse(NESTED)) == ("com.acme::Swish",) * 2


TEXTS = """
<ir_version: 10, opset_import: ["" : 20, "com.acme" : 1]>
g (string[2] x) => (string[2] y) { i = Identity (x)  j = com.acme.Upper (i)  y = Identity (j) }
"""


def test_texts_are_texts_in_every_runtime(tmp_path: Path) -> None:
    """A proof holds texts as bytes, and numpy's own texts are no objects."""
    (tmp_path / "ops.py").write_text(
        "import numpy as np\nfrom passes.custom_ops import CustomOp\n"
        "A = CustomOp('com.acme', 'Upper', infer=lambda x: x, compute=lambda x: np.char.upper(x.astype(str)))\n"
    )
    with declare_ops([tmp_path / "ops.py"]):
        found = Session.of(detached(parse(TEXTS))).run({"x": np.array(["a", "é"], object)})
        assert found["y"].tolist() == ["A", "É"]
        (row,) = passes.optimize(parse(TEXTS), ["eliminate_identity"]).rows
    assert row.status == "ran"


BFLOAT16 = """
<ir_version: 10, opset_import: ["" : 20, "com.acme" : 1]>
g (bfloat16[2, 4] x) => (bfloat16[2, 4] y) { i = Identity (x)  a = com.acme.Swish (i)  LAST }
"""


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("last", ["y = Relu (a)", "f = Cast <to = 1> (a)  r = Relu (f)  y = Cast <to = 16> (r)"])
def test_parts_take_and_give_bfloat16(last: str) -> None:
    """onnxruntime has no Relu of bfloat16, which ONNX's evaluator computes then."""
    model = parse(BFLOAT16.replace("LAST", last))
    (row,) = passes.optimize(model, ["eliminate_identity"]).rows
    assert row.status == "ran"
    x = draw(2, 4).astype(ml_dtypes.bfloat16)
    found = Session(model, {}, may_evaluate=True).run({"x": x})["y"]
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, np.maximum(swish(x), 0))


@pytest.mark.usefixtures("ops")
def test_passes_are_proven_around_them(tmp_path: Path) -> None:
    run = passes.optimize(parse(CHAIN), ["eliminate_identity", "fuse_consecutive_transposes", "onnxsim"])
    assert [node.op_type for node in run.to_proto().graph.node] == ["Add", "Swish", "Relu", "Halves", "Add"]
    assert all(row.errors["y"].max_abs == 0 for row in run.rows if row.changed)
    before, after = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(parse(CHAIN), before)
    onnx.save(run.to_proto(), after)
    assert len(compare_models(before, after).removed) == 3
    assert compare(before, after).ok


@pytest.mark.usefixtures("ops")
def test_a_pass_that_changes_an_attribute_is_reverted(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        "def sharpen(model):\n    model.graph.node[2].attribute[0].f = 3.0\n    return model\n"
    )
    (row,) = passes.optimize(parse(CHAIN), [f"{tmp_path / 'wrong.py'}:sharpen"]).rows
    assert row.status == "reverted"


@pytest.mark.usefixtures("ops")
def test_they_stay_in_float32() -> None:
    (row,) = to_fp16(parse(CHAIN)).rows
    assert "ONNX has no types for com.acme::Swish" in row.words


def test_without_a_declaration_the_way_out_is_named(tmp_path: Path) -> None:
    onnx.save(parse(CHAIN), tmp_path / "a.onnx")
    for run in (
        lambda: passes.optimize(parse(CHAIN), ["eliminate_identity"]),
        lambda: compare(tmp_path / "a.onnx", tmp_path / "a.onnx"),
    ):
        with pytest.raises(PassError, match=r"declare the operator .* --custom-ops ops\.py"):
            run()


def test_a_declaration_ends_and_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "ops.py"
    file.write_text(OPS)
    with declare_ops([f"{file}:SWISH"]):
        assert list(declared_ops()) == [("com.acme", "Swish")]
    assert declared_ops() == {}
    file.write_text(OPS.replace('"alpha": 1.0', '"alpha": 4.0'))
    with declare_ops([file]) as ops:
        assert [dict(op.attributes) for op in ops] == [{"alpha": 4.0}, {}]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NOPE", "no 'NOPE' there; it has: SWISH, "),
        ("SWIHS", "did you mean 'SWISH'"),
        ("np", "'np' is a module; it has"),
    ],
)
def test_operators_of_the_file_are_named_and_no_imports(name: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "ops.py"
    file.write_text(f"from pathlib import Path\nimport numpy as np\n{OPS}")
    with pytest.raises(PassError, match=said) as caught, declare_ops([f"{file}:{name}"]):
        pass
    assert "Path" not in str(caught.value)


WRONG = {
    "nothing": ("x = 1", "found no CustomOp"),
    "an import": ("import nothing_there", "raises ModuleNotFoundError"),
    "ONNX's domain": ("CustomOp('', 'Swish', infer=id, compute=id)", "which is ONNX's own"),
    "a domain that is no text": (
        "CustomOp(3, 'Swish', infer=id, compute=id)",
        "CustomOp 'Swish': domain is 3; expected a text",
    ),
    "a function that is none": (
        "CustomOp('com.acme', 'Swish', infer=4, compute=id)",
        "CustomOp 'Swish': infer is 4; expected a function of ArrayTypes",
    ),
    "a version": (
        "CustomOp('com.acme', 'Swish', infer=id, compute=id, version=0)",
        "version is 0; expected an opset version of 1 or more",
    ),
    "a version that the model does not import": (
        "A = CustomOp('com.acme', 'Swish', infer=lambda x, alpha: x, compute=lambda x, alpha: x, version=9, "
        "attributes={'alpha': 1.0})",
        "the model imports version 1 of com.acme, and com.acme::Swish is declared from version 9",
    ),
    "an attribute of another type": (
        "A = CustomOp('com.acme', 'Swish', infer=lambda x, alpha: x, compute=lambda x, alpha: x, "
        "attributes={'alpha': 1})",
        "has the attribute 'alpha' of type FLOAT; com.acme::Swish declares INT, by its default 1",
    ),
    "a default": (
        "CustomOp('com.acme', 'Swish', infer=id, compute=id, attributes={'alpha': object()})",
        "the attribute 'alpha' has the default <object",
    ),
    "an attribute": (
        "A = CustomOp('com.acme', 'Swish', infer=lambda x: x, compute=lambda x: x)",
        "has the attribute 'alpha', which com.acme::Swish does not declare",
    ),
    "infer": (
        "A = CustomOp('com.acme', 'Swish', infer=lambda x, alpha: 1 / 0, compute=lambda x, alpha: x, "
        "attributes={'alpha': 1.0})",
        "com.acme::Swish: `infer` raises ZeroDivisionError",
    ),
    "compute": (
        "A = CustomOp('com.acme', 'Swish', infer=lambda x, alpha: x, compute=lambda x, alpha: x[0, 9], "
        "attributes={'alpha': 1.0})",
        "com.acme::Swish: `compute` raises IndexError",
    ),
    "a dtype": (
        "A = CustomOp('com.acme', 'Swish', infer=lambda x, alpha: x, compute=lambda x, alpha: x.astype('f8'), "
        "attributes={'alpha': 1.0})",
        "`compute` returns float64[2, 4], and `infer` says float32[2, 4]",
    ),
    "syntax": ("def infer(:", "ops.py:2"),
    "two outputs": (
        "A = CustomOp('com.acme', 'Swish', infer=lambda x, alpha: x, compute=lambda x, alpha: [x, x], "
        "attributes={'alpha': 1.0})",
        "`compute` returns 2 outputs and `infer` 1",
    ),
    "a write": (
        "def double(x, alpha):\n    x *= 2\n    return x\n"
        "A = CustomOp('com.acme', 'Swish', infer=lambda x, alpha: x, compute=double, attributes={'alpha': 1.0})",
        "com.acme::Swish: `compute` raises ValueError",
    ),
    "a library": (
        "A = CustomOp('com.acme', 'Swish', infer=lambda x, alpha: x, compute=lambda x, alpha: x, "
        "shared_library='ops.py', "
        "attributes={'alpha': 1.0})",
        "onnxruntime cannot load the library",
    ),
}

ONE = """
<ir_version: 10, opset_import: ["" : 20, "com.acme" : 1]>
g (float[2, 4] x) => (float[2, 4] y) { i = Identity (x)  y = com.acme.Swish <alpha = 2.0> (i) }
"""


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_said_in_a_sentence(case: str, tmp_path: Path) -> None:
    text, words = WRONG[case]
    (tmp_path / "ops.py").write_text(f"from passes.custom_ops import CustomOp\n{text}\n")
    with pytest.raises(PassError) as caught, declare_ops([tmp_path / "ops.py"]):
        passes.optimize(parse(ONE), ["infer_shapes", "eliminate_identity"])
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_reference_that_is_right_for_one_row_alone_is_refused(tmp_path: Path) -> None:
    """No other batch is looked for at which the reference is what `infer` says."""
    text = "A = CustomOp('com.acme', 'Swish', infer=lambda x, **_: x, compute=lambda x, **_: x[:1], attributes=A)"
    text = text.replace("=A)", "={'alpha': 1.0})")
    (tmp_path / "ops.py").write_text(f"from passes.custom_ops import CustomOp\n{text}\n")
    with pytest.raises(PassError, match=r"returns float32\[1, 4\]"), declare_ops([tmp_path / "ops.py"]):
        passes.optimize(parse(ONE.replace("[2, 4]", "[N, 4]")), ["eliminate_identity"])


def test_a_name_twice_and_a_file_that_is_missing(ops: Path, tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text(OPS)
    with (
        pytest.raises(PolicyError, match="which another file"),
        declare_ops([tmp_path / "more.py"]),
    ):
        pass
    with pytest.raises(PolicyError, match=r"no file .*did you mean 'ops\.py'"), declare_ops([ops.with_name("opz.py")]):
        pass
    with pytest.raises(UsageError, match=r"a list of files"), declare_ops("ops.py"):  # type: ignore[arg-type]
        pass


def test_a_type_is_a_dtype_and_a_shape() -> None:
    assert ArrayType("f4", [2, "N"]) == ArrayType("float32", (2, "N"))  # type: ignore[arg-type] # a list is taken too
    assert CustomOp("a.b", "C", infer=lambda x: x, compute=np.abs).key == "a.b::C"
