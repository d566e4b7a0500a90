"""Types, names and metadata that a step is there to write, although no operator changes."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import passes
from passes import Status
from passes.context import PassContext

BARE = """<ir_version: 8, opset_import: ["": 18]>
g (float[2, 3] x) => (float[2, 3] y) <int64[2] shape = {2, 3}> { r = Relu (x) s = Reshape (r, shape) y = Neg (s) }"""

CODE = """
def sign(model):
    model.metadata_props.add(key="signed", value="by me")
    del model.metadata_props[1:]
    return model

def doubt(model):
    info = model.graph.value_info.add(name="r")
    info.type.tensor_type.elem_type = 7
    return model
"""


def bare() -> onnx.ModelProto:
    return onnx.parser.parse_model(BARE)


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(CODE)
    return f"{tmp_path}/own.py:"


def test_inferred_shapes_are_there_for_the_next_step(context: PassContext) -> None:
    assert not passes.optimize(bare(), recipe=["eliminate_nop_reshape"], context=context).rows[0].changed
    run = passes.optimize(bare(), recipe=["infer_shapes", "infer_shapes", "eliminate_nop_reshape"], context=context)
    assert [row.changed for row in run.rows] == [True, False, True]
    assert [node.op_type for node in run.model.proto.graph.node] == ["Relu", "Neg"]
    assert [info.name for info in run.model.proto.graph.value_info][:1] == ["r"]


def test_metadata_that_a_pass_of_the_users_writes_stays(own: str, context: PassContext) -> None:
    run = passes.optimize(bare(), recipe=[f"{own}sign", f"{own}sign"], context=context)
    assert [(row.status, row.changed) for row in run.rows] == [(Status.RAN, True), (Status.RAN, False)]
    assert [(entry.key, entry.value) for entry in run.model.proto.metadata_props] == [("signed", "by me")]


def test_a_wrong_type_is_reverted(own: str, context: PassContext) -> None:
    run = passes.optimize(bare(), recipe=[f"{own}doubt"], context=context)
    assert run.rows[0].status is Status.REVERTED
    assert not run.model.proto.graph.value_info


def test_names_that_a_native_optimizer_writes_are_no_change(context: PassContext) -> None:
    run = passes.optimize(bare(), recipe=["set_unique_name_for_nodes"], context=context)
    assert not run.rows[0].changed
    assert {node.name for node in run.model.proto.graph.node} == {""}
