"""Splitting and merging: which node is in which part, what feeds what, and that the chain computes the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

from passes.context import PassContext
from passes.encodings.aimet import read_aimet
from passes.encodings.encoding import Encoding, Precision
from passes.errors import PolicyError, StepFailed, UsageError
from passes.optimize import optimize
from passes.rewrites.interface import cut_out
from passes.tools import PartedModel, merge, parts, split
from passes.weights.detached import DetachedModel, attach
from tests.support.onnx_models import biased_attention, matrix, model_of

BRANCHES = """
g (float[2, 8] x) => (float[2, 8] y, float[2, 8] z) <float[8, 8] w, float[8, 8] v> {
  a = MatMul (x, w)
  two = Constant <value = float {2.0}> ()
  b = Mul (a, two)
  c = MatMul (b, v)
  d = Mul (c, two)
  y = Add (d, a)
  z = Relu (b)
}"""


def branches() -> onnx.ModelProto:
    model = model_of(BRANCHES, w=matrix(8, 8, 1), v=matrix(8, 8, 2))
    scopes = {"a": "enc", "b": "enc", "c": "dec.0", "d": "dec.0", "y": "head", "z": "head"}
    for node in model.graph.node:
        node.name = f"n_{node.output[0]}"
        if node.output[0] in scopes:
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(["", scopes[node.output[0]], "f"]))
    return model


def picture(found: PartedModel) -> list[tuple[list[str], list[str], list[str]]]:
    return [
        (part.inputs, [node.output[0] for node in part.model.proto.graph.node if node.input], part.outputs)
        for part in found.parts
    ]


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ({"at": ["b"]}, [(["x"], ["a", "b"], ["a", "b"]), (["a", "b"], ["c", "d", "y", "z"], ["y", "z"])]),
        (
            {"at": ["a", "c"]},
            [
                (["x"], ["a"], ["a"]),
                (["a"], ["b", "c"], ["b", "c"]),
                (["a", "b", "c"], ["d", "y", "z"], ["y", "z"]),
            ],
        ),
        ({"max_bytes": 256}, [(["x"], ["a", "b"], ["a", "b"]), (["a", "b"], ["c", "d", "y", "z"], ["y", "z"])]),
        (
            {"module": "dec.*"},
            [
                (["x"], ["a", "b", "z"], ["a", "b", "z"]),
                (["b"], ["c", "d"], ["d"]),
                (["a", "d"], ["y"], ["y"]),
            ],
        ),
        (
            {"runs_on": {"n_c": False}},
            [(["x"], ["a", "b", "z"], ["a", "b", "z"]), (["b"], ["c"], ["c"]), (["a", "c"], ["d", "y"], ["y"])],
        ),
    ],
)
def test_parts(way: Mapping[str, Any], expected: object, context: PassContext) -> None:
    """A constant is in each part that reads it, and no part is fed with one."""
    found = split(branches(), **way, context=context)
    assert picture(found) == expected
    assert {name: errors.max_abs for name, errors in found.errors.items()} == {"y": 0, "z": 0}


def test_values_to_cut_at_may_come_in_any_order(context: PassContext) -> None:
    assert picture(split(branches(), at=["c", "a"], context=context)) == picture(
        split(branches(), at=["a", "c"], context=context)
    )


def test_the_manifest_says_what_feeds_what(tmp_path: Path, context: PassContext) -> None:
    split(branches(), at=["b"], context=context).save(tmp_path)
    manifest = json.loads((tmp_path / parts.MANIFEST).read_text())
    known = {"x": np.float32(np.random.default_rng(0).standard_normal((2, 8)))}
    for part in manifest["parts"]:
        session = onnxruntime.InferenceSession(tmp_path / part["file"], providers=["CPUExecutionProvider"])
        made = session.run(part["outputs"], {name: known[name] for name in part["inputs"]})
        known |= dict(zip(part["outputs"], made, strict=True))
    whole = onnxruntime.InferenceSession(branches().SerializeToString(), providers=["CPUExecutionProvider"])
    expected = whole.run(["y", "z"], {"x": known["x"]})
    np.testing.assert_array_equal([known["y"], known["z"]], expected)
    assert [part["inputs"] for part in manifest["parts"]] == [{"x": "model"}, {"a": "part0", "b": "part0"}]
    assert manifest["outputs"] == {"y": "part1", "z": "part1"}


@pytest.mark.parametrize(
    ("way", "labels"),
    [
        ({"module": "dec.*"}, ["", "dec.0", ""]),
        ({"runs_on": {"n_c": False}}, ["taken", "refused", "taken"]),
        ({"at": ["b"]}, ["", ""]),
    ],
)
def test_a_part_says_what_it_is_for(way: Mapping[str, Any], labels: list[str]) -> None:
    found = split(branches(), **way, proof=False)
    assert [part["label"] for part in found.manifest()["parts"]] == labels
    for part, label in zip(found.parts, labels, strict=True):
        assert (f"{part.name} ({label})" in str(part)) == bool(label)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ({"at": ["q"]}, "no node makes a value 'q'"),
        ({"max_bytes": 100}, "'n_a' alone has 256 bytes of weights"),
        ({"module": "nope.*"}, "no torch module"),
        ({}, "expected one of"),
        ({"at": ["b"], "max_bytes": 5}, "expected one of"),
        ({"at": "b"}, "at is 'b'; expected a list of names"),
        ({"max_bytes": "1GB"}, "max_bytes is '1GB'; expected a number of bytes"),
        ({"max_bytes": 0}, "max_bytes is 0; expected a number of bytes"),
        ({"runs_on": {"n_cc": False}}, "runs_on has 'n_cc', which is no node of the model; did you mean 'n_c'"),
    ],
)
def test_what_split_refuses(way: Mapping[str, Any], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        split(branches(), **way)


def test_parts_merge_to_the_whole_again(context: PassContext) -> None:
    found = split(biased_attention(), at=["scores"], context=context)
    first, second = (part.model for part in found.parts)
    whole = merge(first, second, {name: name for name in found.parts[1].inputs}, context=context)
    merged = whole.model
    assert whole.errors["y"].max_abs == 0
    x = {"x": np.float32(np.random.default_rng(0).standard_normal((2, 8, 32)))}
    got, expected = (
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(["y"], x)[0]
        for model in (attach(merged), biased_attention())
    )
    np.testing.assert_array_equal(got, expected)


def test_an_input_of_both_models_stays_one(context: PassContext, tmp_path: Path) -> None:
    """The second part reads `x` of the whole too; without `--map x=x` the merged model would take `x_2`."""
    split(branches(), at=["c"], context=context).save(str(tmp_path / "parts"))
    whole = split(model_of(SKIP), at=["a"], context=context)
    assert whole.parts[1].inputs == ["x", "a"]
    merged = merge(*(part.model for part in whole.parts), {"a": "a", "x": "x"}, context=context)
    assert ([*merged.model.index.required_inputs], [*merged.model.index.outputs]) == (["x"], ["y"])
    assert [*merged.to_proto().graph.node] == [*model_of(SKIP).graph.node]
    merged.save(tmp_path / "merged.onnx")
    whole.parts[1].save(tmp_path / "second.onnx")
    first = str(tmp_path / "first.onnx")
    whole.parts[0].save(first)
    step = {"merge": {"model": str(tmp_path / "second.onnx"), "map": {"a": "a", "x": "x"}}}
    run = optimize(first, [step], context=context)
    assert [(node.op_type, [*node.input]) for node in run.model.proto.graph.node] == [
        ("Relu", ["x"]),
        ("Add", ["a", "x"]),
    ]
    with pytest.raises(UsageError, match=r"cannot write to .*first.onnx"):
        whole.save(first)
    beside = merge(model_of(SKIP), model_of(SKIP), {"x": "x"}, context=context)
    assert ([*beside.model.index.required_inputs], [*beside.errors]) == (["x"], ["y", "y_2"])


def test_a_value_that_feeds_two_inputs(context: PassContext, tmp_path: Path) -> None:
    both = model_of("g (float[2, 8] u, float[2, 8] v) => (float[2, 8] z) { z = Sub (u, v) }")
    merged = merge(model_of(SKIP), both, {"y": ["u", "v"]}, context=context)
    assert ([*merged.model.index.required_inputs], [*merged.errors]) == (["x"], ["z"])
    assert [*merged.model.index.producers["z"].input] == ["y", "y"]
    onnx.save(both, tmp_path / "both.onnx")
    step = {"merge": {"model": str(tmp_path / "both.onnx"), "map": {"y": ["u"], "x": "v"}}}
    run = optimize(model_of(SKIP), [step], context=context)
    assert [*run.model.index.producers["z"].input] == ["y", "x"]


SKIP = "g (float[2, 8] x) => (float[2, 8] y) { a = Relu (x) y = Add (a, x) }"

BODY = """
g (float[2, 8] x, bool c) => (float[2, 8] y) {
    a = Neg (x)
    y = If (c) <then_branch = t () => (float[2, 8] s) { b = Exp (a) s = Abs (b) },
                else_branch = e () => (float[2, 8] u) { b = Neg (a) u = Relu (b) }>
}"""
OUTER = "g (float[2, 8] b, float[2, 8] s) => (float[2, 8] u) { a = Relu (b) u = Add (a, s) }"


@pytest.mark.parametrize(("first", "second", "pairs"), [(BODY, OUTER, {"y": "b"}), (OUTER, BODY, {"u": "x"})])
def test_names_of_values_inside_of_a_body(first: str, second: str, pairs: dict[str, str], context: PassContext) -> None:
    """ONNX lets no body make a value whose name is one of the graph around it."""
    merged = merge(model_of(first), model_of(second), pairs, context=context)
    assert [errors.max_abs for errors in merged.errors.values()] == [0.0]


def test_a_model_after_itself(context: PassContext) -> None:
    """Each name of the second model is taken, weights and nodes too; its other output stays an output."""
    merged = merge(branches(), branches(), {"y": "x"}, context=context)
    assert [*merged.errors] == ["z", "y_2", "z_2"]
    assert all(found.max_abs == 0 for found in merged.errors.values())
    assert len(merged.model.proto.graph.initializer) == 4


def test_outputs_without_a_shape_get_theirs(context: PassContext) -> None:
    """ONNX's checker refuses outputs without one."""
    model = model_of("g (float[n, 8] x) => (float[n, 8] y) { a = Exp (x) y = Relu (a) }")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    merged = merge(model, model, {"y": "x"}, context=context)
    onnx.checker.check_model(attach(merged.model))


STORED = """
g (float[2, 8] x) => (float[2, 8] y, float[8, 8] w, float[2, 8] x) <float[8, 8] w> {
  a = MatMul (x, w)
  y = Relu (a)
}"""


def test_outputs_that_no_node_makes(context: PassContext) -> None:
    """A weight that is an output is one of the last part; an input that is an output stays one, fed by another model
    or by the user."""
    model = model_of(STORED, w=matrix(8, 8, 1))
    found = split(model, at=["a"], context=context)
    assert picture(found) == [(["x"], ["a"], ["a"]), (["a"], ["y"], ["y", "w"])]
    assert found.manifest()["outputs"] == {"y": "part1", "w": "part1", "x": "model"}
    for pairs in ({"y": "x"}, {"x": "x"}):
        merged = merge(model, model, pairs, context=context)
        assert [*merged.errors] == [*(name for name in ("y", "w", "x") if name not in pairs), "y_2", "w_2", "x_2"]
        assert all(errors.max_abs == 0 for errors in merged.errors.values())


def test_a_model_without_nodes_has_no_parts() -> None:
    with pytest.raises(PolicyError, match="the model has no node"):
        split(model_of("g (float[2] x) => (float[2] x) {}"), max_bytes=9)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ({"q": "x"}, "first model has no output or input 'q'"),
        ([("y", "x")], "expected a mapping of names"),
        ({"y": ["x", 3]}, "expected a mapping of names"),
        ({"y": []}, "found no pair"),
        ({"y": ["x", "x"]}, "'y' and 'y' are mapped to the input 'x'"),
        ({"y": "q"}, "second model has no input 'q'"),
        ({}, "found no pair"),
    ],
)
def test_what_merge_refuses(pairs: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        merge(branches(), branches(), pairs)


def test_models_that_do_not_fit() -> None:
    text = "g (float[3, 9] x) => (float[3, 9] y) { y = Relu (x) }"
    with pytest.raises(PolicyError, match="'y' of the first model is float\\[2,8\\]"):
        merge(branches(), model_of(text), {"y": "x"})


def test_versions_of_other_operators() -> None:
    text = '<ir_version: 9, opset_import: ["": 18, "ai.onnx.ml": {}]>'
    text += "g (float[2] x) => (float[2] y) {{ y = {} (x) }}"
    scaler = "ai.onnx.ml.Scaler <offset = [0.0], scale = [2.0]>"
    old, new = (onnx.parser.parse_model(text.format(version, scaler)) for version in (1, 3))
    with pytest.raises(
        PolicyError, match=r"first model has version 1 of the operators ai[.]onnx[.]ml, and the second 3"
    ):
        merge(old, new, {"y": "x"})
    unused = onnx.parser.parse_model(text.format(1, "Relu"))
    for pair in ((unused, new), (new, unused)):
        found = merge(*pair, {"y": "x"}, proof=False).model.proto.opset_import
        assert {entry.domain: entry.version for entry in found} == {"": 18, "ai.onnx.ml": 3}


def test_a_sequence_between_two_models_is_not_proven() -> None:
    first = model_of("g (float[2, 4] x) => (seq(float[2, 4]) s) { s = SequenceConstruct (x, x) }")
    second = model_of("g (seq(float[2, 4]) s) => (float[4, 4] y) { y = ConcatFromSequence <axis = 0> (s) }")
    with pytest.raises(PolicyError, match=r"'s' is no tensor, .*; leave the proof out: --no-proof"):
        merge(first, second, {"s": "s"})
    assert [*merge(first, second, {"s": "s"}, proof=False).model.index.outputs] == ["y"]


def encoding_of(scale: float) -> Encoding:
    return Encoding(Precision(8, signed=False, symmetric=False), np.array(scale, np.float32), np.array(128))


def test_encodings_go_with_their_tensors(context: PassContext, tmp_path: Path) -> None:
    """Each part has those of its tensors, a value at the cut in both; merged again they are what they were."""
    given = {name: encoding_of(place + 1.0) for place, name in enumerate(("x", "w", "b", "v", "y"))}
    found = split(branches(), at=["b"], encodings=given, proof=False, context=context)
    assert [sorted(part.encodings) for part in found.parts] == [["b", "w", "x"], ["b", "v", "y"]]
    found.save(tmp_path / "parts")
    assert sorted(read_aimet(tmp_path / "parts" / "part1.encodings")[0]) == ["b", "v", "y"]
    split(branches(), at=["b"], proof=False).save(tmp_path / "plain")
    assert not [*(tmp_path / "plain").glob("*.encodings")]
    first, second = found.parts
    pairs = {name: name for name in second.inputs}
    both = (first.encodings, second.encodings)
    merged = merge(first.model, second.model, pairs, encodings=both, proof=False, context=context)
    assert {name: float(encoding.scale) for name, encoding in merged.encodings.items()} == {
        name: float(encoding.scale) for name, encoding in given.items()
    }


def test_encodings_of_a_model_after_itself() -> None:
    given = {"x": encoding_of(1), "w": encoding_of(2), "y": encoding_of(1)}
    merged = merge(branches(), branches(), {"y": "x"}, encodings=(given, given), proof=False)
    assert sorted(merged.encodings) == ["w", "w_2", "x", "y", "y_2"]
    other = {"x": encoding_of(3)}
    with pytest.raises(
        PolicyError, match=r"first model makes 'y' with one encoding, and the second reads it with another"
    ):
        merge(branches(), branches(), {"y": "x"}, encodings=(given, other), proof=False)
    with pytest.raises(UsageError, match="nope"):
        split(branches(), at=["b"], encodings={"nope": encoding_of(1)}, proof=False)


def sparse() -> onnx.ModelProto:
    """Its weight is a sparse initializer."""
    model = model_of("g (float[2, 8] x) => (float[2, 8] y) { y = MatMul (x, w) }")
    values = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [2], [1.0, 2.0])
    places = onnx.helper.make_tensor("at", onnx.TensorProto.INT64, [2], [3, 9])
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, places, [8, 8]))
    return model


def bfloat16() -> onnx.ModelProto:
    """onnxruntime's CPU provider has no kernel for it."""
    text = "g (bfloat16[2, 8] x) => (bfloat16[2, 8] y) { a = MatMul (x, w) y = Relu (a) }"
    return model_of(text, w=matrix(8, 8, 1).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("make", [sparse, bfloat16])
def test_a_weight_of_an_odd_kind_after_itself(make: Callable[[], onnx.ModelProto], context: PassContext) -> None:
    merged = merge(make(), make(), {"y": "x"}, context=context)
    assert [found.max_abs for found in merged.errors.values()] == [0.0]
    assert len(merged.model.proto.graph.node) == 2 * len(make().graph.node)


def test_a_part_that_does_not_run_is_an_error_with_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was its own cause, and a reader of causes, such as the command line, went in a circle."""

    def cut_wrong(model: DetachedModel, inputs: Sequence[str], outputs: Sequence[str]) -> DetachedModel:
        part = cut_out(model, inputs, outputs)
        proto = part.copy_proto()
        for node in proto.graph.node:
            if node.op_type == "Mul" and "two" in node.input:
                node.op_type, node.domain = "Nothing", "nowhere"
        return part.with_proto(proto)

    monkeypatch.setattr(parts, "cut_out", cut_wrong)
    monkeypatch.setattr(parts, "what_is_invalid", lambda _: "")
    with pytest.raises(StepFailed, match="nowhere") as caught:
        split(branches(), at=["a"])
    causes: list[BaseException] = [caught.value]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        assert cause not in causes
        causes.append(cause)


SEQUENCES = """
g (float[3, 4] x) => (float[1, 12] y) {
    s = SplitToSequence <axis = 0, keepdims = 1> (x)
    c = ConcatFromSequence <axis = 1> (s)
    y = Relu (c)
}"""


def test_a_cut_at_a_sequence_is_refused() -> None:
    with pytest.raises(PolicyError, match="'s' is no tensor, and only tensors are fed to a part; cut at another value"):
        split(model_of(SEQUENCES), at=["s"])


def test_a_cut_at_a_value_of_unknown_rank(context: PassContext) -> None:
    """Shape inference gives up at a Loop; the standard allows inputs and outputs without a shape."""
    model = model_of(
        """
g (float[N, 4] x, int64 n) => (float[N, 4] y) {
    true = Constant <value = bool {1}> ()
    h = Loop (n, true, x) <body = b (int64 i, bool c, float[N, 4] p) => (bool go, float[N, 4] q) {
        go = Identity (c)
        q = Relu (p)
    }>
    y = Add (h, x)
}"""
    )
    assert picture(split(model, at=["h"], context=context))[1] == (["x", "h"], ["y"], ["y"])
