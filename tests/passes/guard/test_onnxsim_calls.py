"""Each way to call onnxsim returns what it returns without a guard, and keeps what is to be kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxsim import simplify

import passes
from passes.guard import GuardedCall, GuardLog, Returned
from tests.support.onnx_models import attention, biased_attention, model_of, op_counts

pytestmark = pytest.mark.usefixtures("workers")


@pytest.fixture
def log() -> Iterator[GuardLog]:
    with passes.guard(keep=["qkv"], compare=False, quiet=True) as log:
        yield log


def only(log: GuardLog) -> GuardedCall:
    (call,) = log.calls
    return call


def weights(model: onnx.ModelProto) -> list[bytes]:
    arrays = [numpy_helper.to_array(tensor) for tensor in model.graph.initializer]
    return sorted(array.tobytes() for array in arrays if array.shape == (32, 32))


def test_from_memory(log: GuardLog) -> None:
    model = biased_attention()
    given = model.SerializeToString()
    simplified, sound = simplify(model)
    assert (sound, op_counts(simplified)["MatMul"] + op_counts(simplified)["Gemm"]) == (True, 6)
    assert weights(simplified) == weights(model)
    assert model.SerializeToString() == given
    assert (only(log).function, only(log).kept, only(log).proof) == ("onnxsim.simplify", {"qkv": 1}, "numbers")


def test_what_it_would_have_lost(log: GuardLog) -> None:
    with passes.guard(quiet=True):
        simplify(biased_attention(), skipped_optimizers=["fuse_qkv", "fuse_qvk"])
    call = only(log)
    assert len(call.would_have_lost) == 1
    assert call.unguarded_nodes == 4  # one com.microsoft.Attention, although fuse_qkv is skipped
    assert "did you mean 'fuse_qkv'?" in call.notes[0]


def test_skipped_optimizers_stay_in_force() -> None:
    text = "g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y) { a = Transpose <perm = [0, 1, 3, 2]> (x) "
    model = model_of(text + "b = Transpose <perm = [0, 1, 3, 2]> (a) y = Relu (b) }")
    with passes.guard(quiet=True, compare=False) as log:
        assert op_counts(simplify(model)[0]) == Counter(Relu=1)
        skipped = simplify(model, skipped_optimizers=["fuse_consecutive_transposes"])[0]
    with passes.guard(skip=["fuse_consecutive_transposes"], quiet=True, compare=False) as policy:
        assert op_counts(skipped) == op_counts(simplify(model)[0]) == op_counts(model)
    assert [call.skipped for call in log.calls] == [{}, {}]
    assert list(only(policy).skipped or ()) == ["onnxsim/fuse_consecutive_transposes"]


def test_from_a_file_into_a_file(log: GuardLog, tmp_path: Path) -> None:
    source, target = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(biased_attention(), source, save_as_external_data=True, location="in.data", size_threshold=0)
    simplified, _ = simplify(str(source))
    simplify(str(source), output_path=str(target), external_data_threshold="1KB")
    assert weights(simplified) == weights(onnx.load(target)) == weights(biased_attention())
    assert (tmp_path / "out.onnx.data").is_file()
    assert [call.model for call in log.calls] == [str(source)] * 2


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (FileNotFoundError, {"model": "nothing.onnx"}),
        (TypeError, {"model": attention(), "skipped": []}),
        (ValueError, {"model": attention(), "output_path": "out.onnx"}),
        (ValueError, {"model": attention(), "tensor_size_threshold": "large"}),
        (Exception, {"model": attention(), "extra_optimizers": ["no_such_pass"]}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_mistakes_of_the_caller_are_onnxsims_to_tell(error: type[Exception], arguments: dict, log: GuardLog) -> None:
    with pytest.raises(error) as guarded:
        simplify(**arguments)
    assert only(log).returned is Returned.RAISED
    assert type(guarded.value).__module__ != "passes.errors"


def test_inputs_and_shapes_that_the_caller_gave_are_what_is_compared_on(log: GuardLog) -> None:
    model = biased_attention()
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_param = "batch"
    simplified, sound = simplify(model, overwrite_input_shapes={"x": [2, 8, 32]})
    assert (sound, simplified.graph.input[0].type.tensor_type.shape.dim[0].dim_value) == (True, 2)
    assert simplify(model, 1, input_data={"x": np.ones((2, 8, 32), np.float32)})[1] is True
    assert [call.proof for call in log.calls] == ["numbers"] * 2


def test_outputs_that_the_caller_does_not_want_are_gone(log: GuardLog) -> None:
    model = biased_attention()
    model.graph.output.add().CopyFrom(helper.make_tensor_value_info("merged", onnx.TensorProto.FLOAT, None))
    simplified, _ = simplify(model, unused_output=["merged"])
    assert [output.name for output in simplified.graph.output] == ["y"]
    assert only(log).kept == {"qkv": 1}


def test_a_rewriter_of_the_callers_runs_in_this_process(log: GuardLog) -> None:
    seen: list[int] = []

    def rewriter(model: onnx.ModelProto) -> bool:
        seen.append(len(model.graph.node))
        return False

    simplified, _ = simplify(biased_attention(), custom_rewriter=rewriter)
    assert seen
    assert weights(simplified) == weights(biased_attention())
    assert only(log).notes == ("custom_rewriter cannot be sent to another process, so the call ran in this one",)


def test_an_operator_that_the_script_registered_is_known(log: GuardLog) -> None:
    schema = onnx.defs.OpSchema(
        *("Sharpen", "of.guards", 1),
        inputs=[onnx.defs.OpSchema.FormalParameter("x", "T")],
        outputs=[onnx.defs.OpSchema.FormalParameter("y", "T")],
        type_constraints=[("T", ["tensor(float)"], "")],
    )
    onnx.defs.register_schema(schema)
    try:
        model = attention()
        model.graph.node.add(op_type="Sharpen", domain="of.guards", input=["y"], output=["z"])
        model.graph.output[0].name = "z"
        model.opset_import.add(domain="of.guards", version=1)
        simplified, _ = simplify(model)
    finally:
        onnx.defs.deregister_schema("Sharpen", 1, "of.guards")
    assert (op_counts(simplified)["Sharpen"], weights(simplified)) == (1, weights(model))
    assert (only(log).returned, only(log).proof, only(log).kept) == (Returned.GUARDED, "structure", {"qkv": 1})


def test_shapes_that_were_inferred_are_there_although_no_node_changed(log: GuardLog) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> g (float[2, 3] x) => (float[2, 3] y) { a = Relu (x) y = Neg (a) }'
    )
    simplified, _ = simplify(model)
    assert [info.name for info in simplified.graph.value_info] == ["a"]
