"""What users of pytorch-ir call, catch and look for: names of arguments, types of errors, and its sentences in ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline.errors import message_with_notes
from pipeline.torch_ir import (
    IR,
    ExecutionError,
    ExportError,
    IRExecutor,
    OpNode,
    SerializationError,
    TensorMeta,
    WeightLoadError,
    convert_exported_program,
    deserialize_ir,
    execute_ir,
    extract_ir,
    load_ir,
    load_weights,
    register_executor,
    register_op,
    save_ir,
    serialize_ir,
    verify_ir_with_state_dict,
)

X = torch.ones(1, 4)
META = X.to("meta")
MODEL = nn.Linear(4, 4)
STATE = MODEL.state_dict()
VALUE = TensorMeta("x", (1, 4), "float32")
UNKNOWN = IR([OpNode("a", "nolib.op.default", [VALUE], [TensorMeta("a", (1, 4), "float32")])], [VALUE])


@pytest.fixture(scope="module")
def ir() -> IR:
    return extract_ir(MODEL, (X,), strict=False)


SAID: dict[str, tuple[Callable[[IR], object], type[Exception], str]] = {
    "model": (
        lambda ir: extract_ir(MODEL, (META,)),
        ExportError,
        "Model must be on meta device for weight-free IR extraction",
    ),
    "input": (
        lambda ir: extract_ir(nn.Bilinear(4, 4, 4, device="meta"), (META, X)),
        ExportError,
        "Input tensor at index 1 must be on meta device",
    ),
    "input by name": (
        lambda ir: extract_ir(nn.Linear(4, 4, device="meta"), (), kwargs={"input": X}),
        ExportError,
        "Input tensor 'input' must be on meta device",
    ),
    "no file": (lambda ir: load_ir("none.json"), FileNotFoundError, "IR file not found: none.json"),
    "no file, as ours": (lambda ir: IR.load("none.json"), SerializationError, "none.json cannot be read"),
    "no weights": (lambda ir: load_weights("none.pt"), FileNotFoundError, "Weight file not found: none.pt"),
    "no weights, as ours": (
        lambda ir: execute_ir(ir, (X,), weights_path="none.pt"),
        WeightLoadError,
        "Weight file not found: none.pt",
    ),
    "no weights file": (
        lambda ir: load_weights(__file__),
        WeightLoadError,
        f"Failed to load weights from {__file__}: ",
    ),
    "no JSON": (lambda ir: deserialize_ir("{nope"), SerializationError, "Invalid JSON: "),
    "no inputs": (lambda ir: execute_ir(ir, (), STATE), ExecutionError, "Expected 1 inputs, got 0"),  # as a note
    "two inputs": (lambda ir: execute_ir(ir, (X, X), STATE), ExecutionError, "Expected 1 inputs, got 2"),
    "two in a row": (lambda ir: execute_ir(UNKNOWN, (X, X)), ExecutionError, "Expected 1 inputs, got 2"),
    "not loaded": (
        lambda ir: IRExecutor(ir).execute((X,)),
        ExecutionError,
        "Weights not loaded. Call load_weights() or load_weights_from_state_dict() first",
    ),
    "neither": (lambda ir: execute_ir(ir, (X,)), ValueError, "Either weights or weights_path must be provided"),
    "operator": (lambda ir: execute_ir(UNKNOWN, (X,)), ExecutionError, "torch has no operator nolib.op.default"),
}


@pytest.mark.parametrize("do, error, said", SAID.values(), ids=SAID.keys())
def test_errors(do: Callable[[IR], object], error: type[Exception], said: str, ir: IR) -> None:
    with pytest.raises(error) as caught:
        do(ir)
    assert said in message_with_notes(caught.value)


def test_arguments_and_results(ir: IR, tmp_path: Path) -> None:
    assert deserialize_ir(json_str=serialize_ir(ir)).nodes == ir.nodes
    assert all(callable(register(op_pattern="a.b")) for register in (register_op, register_executor))
    assert (VALUE.producer_output_idx, TensorMeta.from_dict(VALUE.to_dict())) == (0, VALUE)
    assert inspect.signature(convert_exported_program).parameters["strict"].default is False
    assert verify_ir_with_state_dict(ir, STATE, MODEL, (X,))[1].output_details[0]["shape"] == [1, 4]
    torch.save(STATE, tmp_path / "last.ckpt")
    assert load_weights(tmp_path / "last.ckpt").keys() == STATE.keys()
    save_ir(ir, tmp_path / "new" / "m.json")
    assert load_ir(tmp_path / "new" / "m.json").nodes == ir.nodes
