"""Something else than was asked for is the caller's mistake; the message says what was found and what was expected."""

# pyright: reportArgumentType=false
from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from pipeline.errors import UsageError
from pipeline.torch_ir import (
    IR,
    ConversionError,
    ExecutionError,
    ExportError,
    IRExecutor,
    IRVerifier,
    SerializationError,
    WeightLoadError,
    convert_exported_program,
    deserialize_ir,
    execute_ir,
    export_model,
    extract_ir,
    generate_op_distribution_pie,
    ir_to_mermaid,
    load_weights,
    register_executor,
    save_ir,
    serialize_ir,
    validate_ir,
    validate_weights_against_ir,
    verify_ir,
    verify_ir_with_state_dict,
)
from tests.pipeline.torch_ir.small_modules import MaskedLinear

X = torch.ones(1, 4)
COUNT = "expected an integer of 0 or more"
MODEL = MaskedLinear()
STATE = MODEL.state_dict()


@pytest.fixture(scope="module")
def ir() -> IR:
    return extract_ir(MODEL, (X,), strict=False)


NAMED = "expected a mapping by name, as in {'x': tensor}"

TOLERANCE = "expected a finite number of 0 or more, or None for that of the dtype"

MISTAKES: dict[str, tuple[Callable[[Any], object], type[UsageError], str]] = {
    "weights: a module": (
        lambda ir: IRExecutor(ir, MODEL),
        ExecutionError,
        f"weights: found a MaskedLinear, {NAMED}; give what its state_dict() returns",
    ),
    "weights: a list": (lambda ir: execute_ir(ir, (X,), [X]), ExecutionError, f"weights: found a list, {NAMED}"),
    "weights: a path": (
        lambda ir: execute_ir(ir, (X,), "m.pt"),
        ExecutionError,
        f"weights: found a str, {NAMED}; load_weights reads a file",
    ),
    "weights: none of tensors": (
        lambda ir: execute_ir(ir, (X,), dict.fromkeys(STATE)),
        ExecutionError,
        "weight 'linear.weight': found None, expected a tensor\nweight 'linear.bias': found None, expected a tensor",
    ),
    "weights, later": (
        lambda ir: IRExecutor(ir).load_weights_from_state_dict(MODEL),
        ExecutionError,
        f"weights: found a MaskedLinear, {NAMED}; give what its state_dict() returns",
    ),
    "path: a mapping": (
        lambda ir: execute_ir(ir, (X,), weights_path=STATE),
        WeightLoadError,
        "weights: found an OrderedDict, expected a path, as text or a pathlib.Path; tensors by name are given as "
        "weights=",
    ),
    "path: a number": (
        lambda ir: load_weights(5),
        WeightLoadError,
        "weights: found an int, expected a path, as text or a pathlib.Path",
    ),
    "weights to validate": (
        lambda ir: validate_weights_against_ir([X], ir),
        WeightLoadError,
        f"weights: found a list, {NAMED}",
    ),
    "constants": (
        lambda ir: execute_ir(ir, (X,), STATE, constants=[X]),
        ExecutionError,
        f"constants: found a list, {NAMED}",
    ),
    "constants of a run": (
        lambda ir: IRExecutor(ir, STATE).execute((X,), constants=[X]),
        ExecutionError,
        f"constants: found a list, {NAMED}",
    ),
    "kwargs": (lambda ir: execute_ir(ir, (), STATE, kwargs=X), ExecutionError, f"kwargs: found a Tensor, {NAMED}"),
    "states": (lambda ir: IRExecutor(ir, STATE).give_states([X]), ExecutionError, f"states: found a list, {NAMED}"),
    "ir: a path": (
        lambda ir: execute_ir("m.json", (X,)),
        ExecutionError,
        "ir: found a str, expected an IR; IR.load reads a file",
    ),
    "ir: a graph": (
        lambda ir: IRExecutor(ir.graph),
        ExecutionError,
        "ir: found a Graph, expected an IR; IR.of(graph) is the IR of a graph",
    ),
    "ir: a module": (
        lambda ir: ir_to_mermaid(MODEL),
        UsageError,
        "ir: found a MaskedLinear, expected an IR; extract_ir makes one of a module",
    ),
    "save_ir, swapped": (
        lambda ir: save_ir("m.json", ir),
        SerializationError,
        "ir: found a str, expected an IR; IR.load reads a file",
    ),
    "validate_ir": (lambda ir: validate_ir(None), SerializationError, "ir: found None, expected an IR"),
    "file": (
        lambda ir: IR.load(5),
        SerializationError,
        "the IR: found an int, expected a path, as text or a pathlib.Path",
    ),
    "text": (
        lambda ir: deserialize_ir({}),
        SerializationError,
        "the text of the IR: found a dict, expected a str or bytes; IR.from_dict reads it",
    ),
    "half a character": (
        lambda ir: deserialize_ir("\ud800"),
        SerializationError,
        r"Invalid JSON: the text of the IR is no JSON: it begins with b'\xed\xa0\x80'; expected the JSON that IR.save "
        "writes: copy it again from where it was saved, or save the IR again",
    ),
    "data": (
        lambda ir: IR.from_dict([1]),
        SerializationError,
        "IR JSON: the top level: found [1], expected an object; save the IR again",
    ),
    "threshold": (
        lambda ir: ir.save("never.json", threshold="4k"),
        SerializationError,
        "threshold: found '4k', expected a number of bytes of 0 or more, as in 4096",
    ),
    "threshold below 0": (
        lambda ir: ir.save("never.json", threshold=-1),
        SerializationError,
        "threshold: found -1, expected a number of bytes of 0 or more, as in 4096",
    ),
    "threshold that is none": (
        lambda ir: ir.save("never.json", threshold=math.nan),
        SerializationError,
        "threshold: found nan, expected a number of bytes of 0 or more, as in 4096",
    ),
    "max_nodes": (lambda ir: ir_to_mermaid(ir, max_nodes=-1), UsageError, f"max_nodes: found -1, {COUNT}"),
    "max_nodes as text": (lambda ir: ir_to_mermaid(ir, max_nodes="x"), UsageError, f"max_nodes: found 'x', {COUNT}"),
    "top_n": (lambda ir: generate_op_distribution_pie(ir, top_n=-1), UsageError, f"top_n: found -1, {COUNT}"),
    "top_n as text": (lambda ir: generate_op_distribution_pie(ir, top_n="a"), UsageError, f"top_n: found 'a', {COUNT}"),
    "model: a function": (
        lambda ir: extract_ir((lambda x: x), (X,), strict=False),
        ExportError,
        "model: found a function, expected a torch.nn.Module; a module's forward can call it",
    ),
    "model: a class": (
        lambda ir: export_model(MaskedLinear, (X,)),
        ExportError,
        "model: found the class MaskedLinear, expected a torch.nn.Module; make one of this class",
    ),
    "example_inputs": (
        lambda ir: extract_ir(MODEL, None, strict=False),
        ExportError,
        "example_inputs: found None, expected a tuple of the positional arguments; () where all arguments come as "
        "kwargs=",
    ),
    "kwargs of an example": (
        lambda ir: extract_ir(MODEL, (), kwargs=[X], strict=False),
        ExportError,
        f"kwargs: found a list, {NAMED}",
    ),
    "kwargs by number": (
        lambda ir: extract_ir(MODEL, (), kwargs={1: X}, strict=False),
        ExportError,
        "kwargs: found the key 1, an int, expected names, as in {'x': tensor}",
    ),
    "weights by number": (
        lambda ir: execute_ir(ir, (X,), {1: X}),
        ExecutionError,
        "weights: found the key 1, an int, expected names, as in {'x': tensor}",
    ),
    "constants of another shape": (
        lambda ir: execute_ir(ir, (X,), STATE, constants={"mask": X, "linear.bias": X}),
        ExecutionError,
        "constant 'linear.bias': found float32[1, 4], expected float32[4]\n"
        "constant 'mask': found float32[1, 4], expected float32[4]",
    ),
    "model: a lazy one": (
        lambda ir: extract_ir(nn.Sequential(nn.LazyLinear(3)), (X,), strict=False),
        ExportError,
        "model: found '0.weight', which is lazy and has no shape yet, expected tensors with shapes; run the model "
        "once, which makes them",
    ),
    "model: a scripted one": (
        lambda ir: extract_ir(torch.jit.script(nn.Identity()), (X,), strict=False),
        ExportError,
        "model: found a RecursiveScriptModule, expected modules of Python, which torch.export can trace; give the "
        "module that it was scripted or traced from",
    ),
    "model: a traced one in it": (
        lambda ir: extract_ir(nn.Sequential(torch.jit.trace(nn.Identity(), X)), (X,), strict=False),
        ExportError,
        "model, in '0': found a TopLevelTracedModule, expected modules of Python, which torch.export can trace; give "
        "the module that it was scripted or traced from",
    ),
    "name": (
        lambda ir: extract_ir(MODEL, (X,), model_name=3, strict=False),
        ExportError,
        "model_name: found an int, expected a str",
    ),
    "program": (
        lambda ir: convert_exported_program(MODEL),
        ConversionError,
        "exported: found a MaskedLinear, expected a torch.export.ExportedProgram; export_model makes one of a module, "
        "extract_ir both at once",
    ),
    "model to verify": (
        lambda ir: verify_ir_with_state_dict(ir, STATE, (lambda x: x), (X,)),
        ExecutionError,
        "model: found a function, expected a torch.nn.Module; a module's forward can call it",
    ),
    "weights to verify": (
        lambda ir: verify_ir_with_state_dict(ir, MODEL, MODEL, (X,)),
        ExecutionError,
        f"weights: found a MaskedLinear, {NAMED}; give what its state_dict() returns",
    ),
    "atol": (
        lambda ir: verify_ir_with_state_dict(ir, STATE, MODEL, (X,), atol=math.nan),
        ExecutionError,
        f"atol: found nan, {TOLERANCE}",
    ),
    "rtol": (lambda ir: IRVerifier(rtol=-1.0), ExecutionError, f"rtol: found -1.0, {TOLERANCE}"),
    "atol that all pass": (lambda ir: IRVerifier(atol=math.inf), ExecutionError, f"atol: found inf, {TOLERANCE}"),
    "rtol as text": (
        lambda ir: verify_ir(ir, "never.pt", MODEL, (X,), rtol="x"),
        ExecutionError,
        f"rtol: found 'x', {TOLERANCE}",
    ),
    "executor without a name": (
        lambda ir: register_executor((lambda inputs, attrs: inputs)),
        UsageError,
        'the type of an op: found a function, expected text, as in "mylib.op"',
    ),
}


@pytest.mark.filterwarnings("ignore:.torch.jit")  # is deprecated
@pytest.mark.parametrize("do, error, said", MISTAKES.values(), ids=MISTAKES.keys())
def test_another_type_than_was_asked_for(
    do: Callable[[IR], object], error: type[UsageError], said: str, ir: IR
) -> None:
    with pytest.raises(error) as caught:
        do(ir)
    assert str(caught.value) == said


class Lifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@dataclass
class Pair:
    a: torch.Tensor


class Calls(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


@pytest.mark.parametrize("model, x", [(Calls(Pair), X), (Calls(lambda pair: pair.a + 1), Pair(X))], ids=["out", "in"])
def test_a_dataclass_that_torch_does_not_know(model: nn.Module, x: Any) -> None:
    with pytest.raises(ExportError, match=r"Pair is no type .* torch\.export\.register_dataclass\(Pair\)"):
        extract_ir(model, (x,), strict=False)


def test_fake_tensors_have_no_values_for_an_ir() -> None:
    """torch keeps a FakeTensor as the value of a constant where the model has one, or a mode is on."""
    mode = FakeTensorMode()
    with mode:
        fake = Lifts()
    with pytest.warns(UserWarning, match=r"Skipping 1 .*\['scale'\]"):
        ir = extract_ir(fake, (mode.from_tensor(X),), strict=False)
    with pytest.warns(UserWarning, match=r"Skipping 1 .*\['scale'\]"), mode:
        assert not extract_ir(Lifts(), (torch.ones(1, 4),), strict=False).constants
    assert serialize_ir(ir).count('"constants": {}') == 1
    scale = torch.arange(4.0)
    assert torch.equal(execute_ir(ir, (X,), constants={"scale": scale})[0], scale[None])
    said = "found a FakeTensor, which holds no values; expected one with values"
    for inputs, constants in (((mode.from_tensor(X),), {"scale": scale}), ((X,), {"scale": fake.scale})):
        with pytest.raises(ExecutionError, match=said):
            execute_ir(ir, inputs, constants=constants)
    for empty, described in ((fake.scale, "a FakeTensor"), (scale.to("meta"), "a tensor on meta")):
        with pytest.raises(SerializationError, match=f"constant 'scale': found {described}, expected one with values"):
            serialize_ir(replace(ir, constants={"scale": empty}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert extract_ir(Lifts(), (mode.from_tensor(X),), strict=False).constants.keys() == {"scale"}


class Narrowed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.T


def test_a_trace_where_autocast_does_nothing_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"autocast at .*test_mistakes.py:\d+ casts nothing on meta"):
        extract_ir(Narrowed(), (X.to("meta"),))
    ir = extract_ir(Narrowed(), (X,), strict=False)
    assert execute_ir(ir, (X,))[0].dtype is torch.bfloat16


def test_autocast_around_an_extraction_is_refused() -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ExportError, match="autocast is on around the extraction"),
    ):
        extract_ir(nn.Linear(4, 4), (X,), strict=False)


def test_the_default_dtype_of_a_trace_is_written_down_or_refused() -> None:
    """A graph is run with float32 as default, whatever it was in the trace."""
    filled, divided = Calls(lambda x: torch.full((4,), 0.1) + x), Calls(lambda x: torch.arange(4) / 3 + x)
    torch.set_default_dtype(torch.float64)
    try:
        ir, expected = extract_ir(filled, (X,), strict=False), filled(X)
        with pytest.raises(
            ConversionError, match=r"its result is torch.float64 because that was torch's default dtype"
        ):
            extract_ir(divided, (X,), strict=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(execute_ir(ir, (X,))[0], expected)
    assert expected.dtype is torch.float64


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_buffer_without_strides_is_named() -> None:
    model = Calls(lambda x: model.weight @ x)
    model.register_buffer("weight", torch.eye(4).to_sparse_csr())
    with pytest.raises(ConversionError, match=r"value 'b_weight' is torch.float32 and torch.sparse_csr"):
        extract_ir(model, (torch.ones(4, 4),), strict=False)


def test_a_tensor_inside_of_vmap_is_named() -> None:
    with pytest.raises(
        ExportError, match=r"argument 0 is a wrapper of torch.func \(vmap, grad, jvp\), expected a plain"
    ):
        torch.vmap(lambda x: extract_ir(Calls(torch.relu), (x,), strict=False))(X)


def test_a_warning_points_to_the_line_that_caused_it() -> None:
    """Python shows equal words of one line once; so each of these lines has its own."""
    with torch.device("meta"):
        model, x = MaskedLinear(), torch.ones(1, 4)
    with pytest.warns(UserWarning, match=r"Skipping 1|is traced whole") as caught:
        extract_ir(model, (x,))
        convert_exported_program(export_model(model, (x,)))
        extract_ir(model, (x,), stamp=True, dynamic_shapes={"x": None})
    start = test_a_warning_points_to_the_line_that_caused_it.__code__.co_firstlineno
    assert [(warning.filename, warning.lineno - start) for warning in caught] == [(__file__, at) for at in (5, 6, 7, 7)]
