"""A step may return no model, or one that cannot be read or loaded: then it is named, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, helper

import passes
from passes.context import PassContext
from passes.policy.policy import Policy
from passes.proof.numeric import NumericProver
from passes.recipe.user_code import AdoptedStep
from passes.run.result import PassRun, Status
from passes.run.runner import run_passes
from passes.step import PassResult
from passes.weights.detached import DetachedModel
from passes.weights.files import save
from tests.support.onnx_models import detached, matrix, model_of

TEXT = "g (float[2, 8] x) => (float[2, 8] y) { h = MatMul (x, w) i = Identity (h) y = Relu (i) }"


def model() -> ModelProto:
    return model_of(TEXT, w=matrix(8, 8, 0))


@dataclass(frozen=True)
class Returns:
    """A step of the user's, which returns whatever `make` makes of the model."""

    make: Callable[[DetachedModel], Any]
    name: str = field(default="returns", init=False)
    source: str = field(default="tests", init=False)

    def apply(self, model: DetachedModel, context: PassContext) -> Any:
        return self.make(model)


def run_steps(steps: Sequence[Returns], context: PassContext) -> PassRun:
    prover = NumericProver.of_itself([{"x": matrix(2, 8, 1)}], context)
    return run_passes(detached(model()), [AdoptedStep(step) for step in steps], Policy(), prover, context)


def without_identity(proto: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(proto)
    identity = next(node for node in copy.graph.node if node.op_type == "Identity")
    next(node for node in copy.graph.node if node.op_type == "Relu").input[0] = identity.input[0]
    copy.graph.node.remove(identity)
    return copy


def not_utf8(model: DetachedModel) -> DetachedModel:
    return model.with_proto(ModelProto.FromString(model.proto.SerializeToString().replace(b"Relu", b"Re\xff\xfe")))


def without_outputs(model: DetachedModel) -> DetachedModel:
    copy = without_identity(model.proto)
    for node in copy.graph.node:
        del node.output[:]
    return model.with_proto(copy)


def with_an_output_more(model: DetachedModel) -> DetachedModel:
    """A pin is such an output, which goes when the step is done."""
    copy = without_identity(model.proto)
    copy.graph.output.append(helper.make_tensor_value_info("h", 1, [2, 8]))
    return model.with_proto(copy)


def raises(model: DetachedModel) -> DetachedModel:
    raise KeyError("no such layer")


UNREADABLE: dict[str, tuple[Callable[[DetachedModel], Any], str]] = {
    "a result of nothing": (lambda _: PassResult(None), "returned NoneType; expected a DetachedModel"),  # type: ignore[arg-type]
    "nothing": (lambda _: None, "returned NoneType; expected a DetachedModel"),
    "bytes": (lambda _: b"junk", "returned bytes; expected a DetachedModel"),
    "another type": (lambda model: model.proto, "returned ModelProto; expected a DetachedModel"),
    "no proto": (lambda model: model.with_proto(None), "returned NoneType; expected a DetachedModel"),  # type: ignore[arg-type]
    "junk": (lambda model: model.with_proto(onnx.load_from_string(b"\x08\xff junk")), "cannot be read"),
    "an empty model": (lambda model: model.with_proto(ModelProto()), "changes the model's inputs"),
    "no UTF-8": (not_utf8, "is not UTF-8"),
    "nodes without outputs": (without_outputs, "not valid ONNX"),
    "an output more": (with_an_output_more, "adds the outputs ['h'] to the model; the step `outputs`"),
    "raises": (raises, "KeyError: 'no such layer'"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_step_that_returns_no_model_is_named_and_the_next_one_runs(what: str, context: PassContext) -> None:
    make, reason = UNREADABLE[what]
    right = Returns(lambda model: model.with_proto(without_identity(model.proto)))
    run = run_steps([Returns(make), right], context)
    assert run.rows[0].status in (Status.FAILED, Status.REVERTED)
    assert reason in run.rows[0].reason
    assert (run.rows[1].status, run.rows[1].changed) == (Status.RAN, True)


FUNCTIONS = """
from onnx import ModelProto, TensorProto

def too_little_data(model):
    model.graph.initializer.append(TensorProto(name="t", data_type=1, dims=[100, 100], raw_data=b"123"))
    return model

def negative(model):
    model.graph.initializer.append(TensorProto(name="t", data_type=1, dims=[-1, -4], raw_data=bytes(16)))
    return model

def terabytes(model):
    model.graph.initializer.append(TensorProto(name="t", data_type=1, dims=[2**40, 2**40], raw_data=bytes(16)))
    return model

def elsewhere(model):
    tensor = model.graph.initializer.add(name="t", data_type=1, dims=[4], data_location=1)
    tensor.external_data.add(key="location", value="../nowhere")
    return model

def empty(model):
    return ModelProto()
"""


@pytest.mark.parametrize("name", ["too_little_data", "negative", "terabytes", "elsewhere", "empty"])
def test_a_pass_whose_file_cannot_be_read_back_is_named(name: str, tmp_path: Path, context: PassContext) -> None:
    file = tmp_path / "junk.py"
    file.write_text(FUNCTIONS)
    run = passes.optimize(model(), recipe=[f"{file}:{name}", "eliminate_identity"], context=context)
    assert run.rows[0].status is Status.FAILED
    assert run.rows[0].reason.startswith("made a model that cannot be read: ")
    assert run.rows[1].changed


def rebuilt(model: DetachedModel) -> DetachedModel:
    """As by `helper.make_model`, which stamps the version of the installed onnx on what it makes."""
    changed = without_identity(model.proto)
    restamped = helper.make_model(changed.graph, opset_imports=changed.opset_import)
    restamped.ir_version = max(restamped.ir_version, 99)
    return model.with_proto(restamped)


def test_what_is_delivered_has_the_ir_version_of_the_source_and_loads(context: PassContext, tmp_path: Path) -> None:
    run = run_steps([Returns(rebuilt)], context)
    assert (run.rows[0].status, run.rows[0].changed) == (Status.RAN, True)
    assert run.model.proto.ir_version == model().ir_version
    save(run.model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.zeros((2, 8), np.float32)})[0].shape == (2, 8)


@pytest.mark.parametrize(
    ("domain", "version"), [("", 99), ("", onnx.defs.onnx_opset_version() + 1), ("ai.onnx.ml", 99)]
)
def test_an_opset_that_onnxruntime_does_not_know_costs_the_step(
    domain: str, version: int, context: PassContext
) -> None:
    def newer(model: DetachedModel) -> DetachedModel:
        proto = without_identity(model.proto)
        entries = [entry for entry in proto.opset_import if entry.domain != domain]
        del proto.opset_import[:]
        proto.opset_import.extend([*entries, helper.make_opsetid(domain, version)])
        return model.with_proto(proto)

    run = run_steps([Returns(newer)], context)
    assert run.rows[0].status is not Status.RAN
    assert list(run.model.proto.opset_import) == list(model().opset_import)


def test_an_opset_that_needs_a_later_ir_version_keeps_it(context: PassContext) -> None:
    """Opset 21 came with IR version 10, and the source has 9."""

    def newer(model: DetachedModel) -> DetachedModel:
        proto = without_identity(model.proto)
        proto.opset_import[0].version, proto.ir_version = 21, 11
        return model.with_proto(proto)

    run = run_steps([Returns(newer)], context)
    assert run.rows[0].status is Status.RAN
    assert (run.model.proto.opset_import[0].version, run.model.proto.ir_version) == (21, 10)


def test_an_assertion_of_a_library_is_one_plain_sentence(context: PassContext) -> None:
    """onnxoptimizer's fuse_qkv fails an assertion where the shared input is a graph input."""
    text = """g (float[2, 8, 32] x) => (float[2, 8, 32] q, float[2, 8, 32] k, float[2, 8, 32] v) {
        q = MatMul (x, a) k = MatMul (x, b) v = MatMul (x, c)
    }"""
    merged = model_of(text, a=matrix(32, 32, 0), b=matrix(32, 32, 1), c=matrix(32, 32, 2))
    [row] = passes.optimize(merged, ["fuse_qkv"], context=context).rows
    said = "Assertion !inGraphList() && n->inGraphList() failed (ir.h:"
    words = (
        "onnxoptimizer does not handle a form that this model has, so the step changes nothing; onnxoptimizer said: "
    )
    assert row.status is Status.FAILED
    assert row.reason.startswith(words + said)
    assert "/" not in row.reason, "no path of the machine that built the library"
