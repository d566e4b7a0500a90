"""What users of pytorch-ir call, catch and look for: names of arguments, types of errors, and its sentences in ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeline.errors import SourceError, UsageError, message_with_notes
from pipeline.runtime import compile_graph
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


# Names of weights: a placeholder's and a checkpoint's are two namespaces, whatever a model calls its parameters.


class Named(nn.Module):
    """Parameters, buffers and non-persistent buffers by these names; each is read."""

    def __init__(self, parameters: str, buffers: str = "", inner: str = "") -> None:
        super().__init__()
        for name in parameters.split():
            self.register_parameter(name, nn.Parameter(torch.randn(3)))
        for name in buffers.split():
            self.register_buffer(name, torch.randn(3))
        for name in inner.split():
            self.add_module(name, Named("b"))

    def forward(self, x: Tensor) -> Tensor:
        for at, tensor in enumerate((*self._parameters.values(), *self._buffers.values())):
            x = x * (at + 2) + tensor + torch.tensor([1.0, 2.0, 3.0])
        for module in self.children():
            x = x * 7 + module(x)
        return x


MODELS = {
    "add p_add": ("add p_add",),
    "p_add first": ("p_add add",),
    "weight p_weight": ("weight p_weight",),
    "a chain": ("a p_a p_p_a p_p_p_a",),
    "buffers": ("", "x b_x"),
    "a buffer as a parameter's placeholder": ("add", "p_add"),
    "a parameter as a buffer's placeholder": ("b_x", "x"),
    "constants": ("c_x p_c_x", "c_lifted_tensor_0 lifted_tensor_0"),
    "as an input": ("x p_x",),
    "nested": ("a_b p_a_b", "", "a p_a"),
}


@pytest.mark.parametrize("names", MODELS.values(), ids=MODELS)
def test_a_name_in_the_checkpoint_is_no_placeholder(names: tuple[str, ...], tmp_path: Path) -> None:
    model, x = Named(*names), torch.randn(3)
    extracted = extract_ir(model, (x,), strict=False)
    extracted.save(tmp_path / "m.json")
    for ir in (extracted, IR.load(tmp_path / "m.json")):
        ok, report = verify_ir_with_state_dict(ir, model.state_dict(), model, (x,))
        assert ok, report
        for planned in (True, False):
            (actual,) = IRExecutor(ir, model.state_dict(), planned=planned).execute((x,))
            assert torch.equal(actual, model(x))
    (actual,) = compile_graph(extracted.graph, model.state_dict()).run({"x": x}).values()
    assert torch.equal(actual, model(x))


def test_a_checkpoint_without_a_weight_does_not_take_another_one_for_it() -> None:
    """The placeholder of `add` is called `p_add`, as another parameter is."""
    model, x = Named("add p_add"), torch.randn(3)
    extracted, weights = extract_ir(model, (x,), strict=False), {"p_add": model.get_parameter("p_add")}
    hint = "The weights lack 'add', whose placeholder is called 'p_add'; the weight 'p_add' is another one."
    for planned in (True, False):
        with pytest.raises(ExecutionError, match=f"(?s)Weight/input 'p_add' not found in registry.*{hint}"):
            IRExecutor(extracted, weights, planned=planned).execute((x,))
    with pytest.raises(UsageError, match="the feed lacks 'p_add'"):
        compile_graph(extracted.graph, weights).run({"x": x})


def test_two_names_of_one_weight_have_one_tensor() -> None:
    graph, one = extract_ir(Named("add"), (torch.randn(3),), strict=False).graph, torch.ones(3)
    for same in (one, one.clone()):
        (found,) = compile_graph(graph, {"add": one, "p_add": same}).run({"x": torch.zeros(3)}).values()
        assert torch.equal(found, torch.tensor([2.0, 3.0, 4.0]))
    with pytest.raises(SourceError, match="'add' and 'p_add' are names of one weight, and the two tensors differ"):
        compile_graph(graph, {"add": one, "p_add": 2 * one})


def test_placeholders_still_name_weights() -> None:
    model, x = Named("add other"), torch.randn(3)
    weights = {"p_add": model.get_parameter("add"), "other": model.get_parameter("other")}
    assert torch.equal(execute_ir(extract_ir(model, (x,), strict=False), (x,), weights)[0], model(x))
