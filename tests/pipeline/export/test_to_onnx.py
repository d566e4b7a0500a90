"""torch → ONNX: numbers by onnxruntime, names, dynamic dims, metadata, parameters."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch

from pipeline.config import ExportConfig, ModelConfig
from pipeline.errors import ConfigError, SourceError, Unsupported, UsageError
from pipeline.export import ExportedModel, TorchSource, export_onnx, load_source, named_dims, run_torch

Make = Callable[..., ModelConfig]
Agrees = Callable[..., None]

NESTED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.register_buffer("shift", torch.full((4,), 0.5))
        self.constant = torch.full((4,), 2.0)

    def forward(self, x, batch=None, *, scale=2.0, mask=None):
        y = self.b(self.a(x)) * scale + self.shift + self.constant
        y = torch.where(mask, y, batch["bias"])
        return {"y": y, "same": y, "none": None, "more": (y + 1, [batch["k"] * 2, x]), "shift": self.shift}

def make():
    batch = {"k": torch.ones(2), "bias": torch.rand(2, 3, 4)}
    return Net(), (torch.rand(2, 3, 4),), {"mask": torch.rand(2, 3, 4) > 0.5, "batch": batch, "scale": 3.0}
"""
OPEN = {
    "x": {"shape": ["batch", "seq", 4]},
    "batch.bias": {"shape": ["batch", "seq", 4]},
    "batch.k": {"shape": ["batch"]},
    "mask": {"shape": ["batch", "seq", 4]},
}


def export(config: ModelConfig, **settings: Any) -> ExportedModel:
    source = load_source(config)
    assert isinstance(source, TorchSource)
    return export_onnx(source, ExportConfig(**settings))


def shapes(exported: ExportedModel) -> dict[str, str]:
    graph = exported.ir_model.graph
    return {str(value.name): str(value.shape) for value in (*graph.inputs, *graph.outputs)}


def test_nested_inputs_and_outputs(factory: Make, assert_agrees: Agrees, capfd: pytest.CaptureFixture[str]) -> None:
    exported = export(factory(NESTED, inputs=OPEN))
    assert capfd.readouterr() == ("", "")
    assert shapes(exported) == {
        "x": "[batch,seq,4]",
        "batch.k": "[batch]",
        "batch.bias": "[batch,seq,4]",
        "mask": "[batch,seq,4]",
        "y": "[batch,seq,4]",
        "same": "[batch,seq,4]",
        "more.0": "[batch,seq,4]",
        "more.1.0": "[batch]",
        "more.1.1": "[batch,seq,4]",
        "shift": "[4]",
    }
    assert tuple(value.name for value in exported.ir_model.graph.inputs) == ("x", "batch.k", "batch.bias", "mask")
    assert named_dims(exported.source.inputs) == ("batch", "seq")
    assert_agrees(exported, batch=2, seq=3)
    assert_agrees(exported, batch=5, seq=7)


def test_parameters_are_distinguished_from_buffers_and_constants(factory: Make) -> None:
    exported = export(factory(NESTED))
    initializers = set(exported.ir_model.graph.initializers)
    tied = {"a.weight", "b.weight"} & initializers
    assert len(tied) == 1
    assert exported.parameters == {"a.bias", "b.bias", *tied}
    assert len(initializers - exported.parameters) >= 2  # the buffer and the constant


def test_weights_are_torchs_own_memory(factory: Make) -> None:
    exported = export(factory(NESTED))
    bias = exported.ir_model.graph.initializers["a.bias"].const_value
    assert bias is not None
    parameter = dict(exported.source.module.named_parameters())["a.bias"]
    assert np.shares_memory(bias.numpy(), parameter.detach().numpy())


def test_weights_can_move_into_the_saved_file(factory: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that those of a large model are in memory once; the module computes what it did before."""
    monkeypatch.setattr("pipeline.export.exported.EXTERNAL_DATA_BYTES", 0)
    exported = export(factory("def make(): return nn.Linear(64, 64), (torch.rand(2, 64),)"))
    module: Any = exported.source.module
    x, path = torch.rand(3, 64), tmp_path / "model.onnx"
    before, place = module(x), module.weight.data_ptr()
    exported.save(path)
    exported.move_weights(path)
    assert module.weight.data_ptr() != place
    assert torch.equal(module(x), before)
    with path.with_name("model.onnx.data").open("r+b") as file:  # a view shows what the file holds
        file.write(bytes(4 * 64 * 64))
    assert not module.weight.any()


def test_no_traced_graph_stays_after_an_export(factory: Make) -> None:
    def count_nodes() -> int:
        gc.collect()
        return sum(type(found) is torch.fx.Node for found in gc.get_objects())

    config, before = factory(NESTED), count_nodes()
    export(config)
    assert count_nodes() <= before


def test_names_of_the_settings(factory: Make, assert_agrees: Agrees) -> None:
    code = """
class Net(nn.Module):
    def forward(self, x, y):
        z = x @ y
        return z, z.relu()

make = lambda: (Net(), (torch.rand(2, 2), torch.rand(2, 2)))
"""
    config = factory(code)
    assert export(config).source.outputs == ("output_0", "output_1")
    exported = export(config, input_names=["relu", "right"], output_names=["matmul", "last"])
    assert tuple(value.name for value in exported.ir_model.graph.inputs) == ("relu", "right")
    assert exported.source.outputs == ("matmul", "last")
    assert_agrees(exported)
    with pytest.raises(ConfigError) as caught:
        export(config, output_names=["one"])
    assert str(caught.value) == "export.output_names: 1 name, but the model has 2 tensors there: output_0, output_1"
    with pytest.raises(ConfigError, match="'x' names an input and an output; a graph needs two names"):
        export(config, output_names=["x", "z"])


def test_an_intermediate_gives_way_to_an_output(factory: Make, assert_agrees: Agrees) -> None:
    code = "class Net(nn.Module):\n    def forward(self, x):\n        return {'relu': x.relu().exp()}\n\nmake = Net\n"
    exported = export(factory(code, inputs={"x": {"shape": [3]}}))
    assert exported.source.outputs == ("relu",)
    assert_agrees(exported)


def test_a_weight_gives_way_to_an_output_and_stays_a_parameter(factory: Make, assert_agrees: Agrees) -> None:
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return {"weight": x * self.weight, "raw": self.weight}

make = lambda: (Net(), (torch.rand(3),))
"""
    exported = export(factory(code))
    assert exported.source.outputs == ("weight", "raw")
    assert exported.parameters == {"weight_1"} == set(exported.ir_model.graph.initializers)
    assert_agrees(exported)


BAKED = """
class Head(nn.Module):
    def forward(self, x):
        return x.reshape(int({size}), 4) + torch.zeros({size}, 4)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = Head()

    def forward(self, x):
        return self.head(x)

make = Net
"""


def test_a_dim_that_came_out_constant_is_named(factory: Make) -> None:
    with pytest.raises(UsageError) as caught:
        export(factory(BAKED.format(size=2), inputs={"x": {"shape": ["batch", 4]}}))
    assert str(caught.value).startswith(
        "input 'x', axis 0: the dim 'batch' was asked to be dynamic and came out as the constant 2"
    )
    assert str(caught.value).endswith("for this size alone: model.inputs.x.shape: [2, 4]")


def test_two_names_for_one_dim(factory: Make) -> None:
    code = "class Net(nn.Module):\n    def forward(self, x, y):\n        return x + y\n\nmake = Net\n"
    inputs = {"x": {"shape": ["rows", 4]}, "y": {"shape": ["lines", 4]}}
    with pytest.raises(UsageError, match="the dims 'rows' and 'lines' are always equal in this model"):
        export(factory(code, inputs=inputs))


def test_equal_sizes_stay_two_dims_and_a_bounded_dim_stays_open(factory: Make, assert_agrees: Agrees) -> None:
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, x):
        return x + self.table(torch.arange(x.shape[1]))

make = Net
"""
    exported = export(factory(code, inputs={"x": {"shape": ["batch", "seq", 4]}}))
    assert shapes(exported) == {"x": "[batch,seq,4]", "output": "[batch,seq,4]"}
    assert_agrees(exported, batch=3, seq=9)


STARRED = """
class Net(nn.Module):
    def forward(self, *xs, **more):
        return sum(xs) * more["scale"]

make = lambda: (Net(), (torch.rand(2, 4), torch.rand(2, 4)), {"scale": torch.rand(4)})
"""


def test_starred_parameters(factory: Make, assert_agrees: Agrees) -> None:
    exported = export(factory(STARRED))
    assert tuple(value.name for value in exported.ir_model.graph.inputs) == ("xs.0", "xs.1", "scale")
    assert_agrees(exported)
    dynamic = factory(STARRED, inputs={"xs.0": {"shape": ["batch", 4]}, "xs.1": {"shape": ["batch", 4]}})
    if torch.__version__ >= "2.14":
        assert_agrees(export(dynamic), batch=3)
        return
    with pytest.raises(SourceError, match=r"name the input in forward's signature: torch 2\.13 fails on"):
        export(dynamic)


def test_node_metadata_is_kept(factory: Make) -> None:
    code = "def make():\n    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.rand(2, 4),)\n"
    relu = next(node for node in export(factory(code)).ir_model.graph if node.op_type == "Relu")
    assert "'1'" in relu.metadata_props["pkg.torch.onnx.name_scopes"]
    assert "torch.nn.modules.activation.ReLU" in relu.metadata_props["pkg.torch.onnx.class_hierarchy"]
    assert "activation.py" in relu.metadata_props["pkg.torch.onnx.stack_trace"]


@pytest.mark.parametrize("opset", [18, 23])
def test_opset(factory: Make, assert_agrees: Agrees, opset: int) -> None:
    exported = export(factory(NESTED), opset=opset)
    assert exported.ir_model.opset_imports[""] == opset
    assert_agrees(exported)


def test_an_opset_that_cannot_be_had(factory: Make) -> None:
    code = """
class Net(nn.Module):
    def forward(self, x):
        return x.reshape(x.shape[0] // 2, 2, -1)

make = Net
"""
    with pytest.raises(Unsupported) as caught:
        export(factory(code, inputs={"x": {"shape": ["batch", 4]}}, dims={"batch": [4]}), opset=13)
    assert str(caught.value) == "export.opset: asked for 13, torch could make 18 only; set it to 18 or more"


FAILING = """
class Inner(nn.Module):
    def forward(self, x):
        {body}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x)

make = lambda: (Net(), (torch.rand(4, 4),))
"""


def test_a_model_that_cannot_be_traced(factory: Make, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SourceError) as caught:
        export(factory(FAILING.format(body="return x + 1 if x.sum() > 0 else x")))
    message = str(caught.value)
    assert message.startswith("torch.export cannot trace the model in module 'inner'\n  at ")
    assert "net.py:7: return x + 1 if" in message
    assert "use torch.where, torch.cond or a fixed size; where an input decides it" in message
    assert capfd.readouterr() == ("", "")


SHAPELESS = """
from torch import library

@library.custom_op("trace_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x
"""


@pytest.mark.parametrize(
    ("body", "operator", "advice"),
    [
        (
            "return x + 1 if torch.equal(x, 2 * x) else x",
            "aten.equal.default",
            "use torch.where, torch.cond or a fixed",
        ),
        ("return twice(x)", "trace_test.twice.default", "register that by register_fake of torch's library"),
    ],
)
def test_an_operator_that_cannot_be_traced_is_named(body: str, operator: str, advice: str, factory: Make) -> None:
    with pytest.raises(SourceError) as caught:
        export(factory((SHAPELESS if "twice" in body else "") + FAILING.format(body=body)))
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("in module 'inner'") and lines[2] == f"  operator {operator}" and advice in lines[-1]


def test_an_op_without_translation(factory: Make, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unsupported) as caught:
        export(factory(FAILING.format(body="return torch.linalg.eigh(x)[0]")))
    sentence, reason = str(caught.value).splitlines()
    call, advice = sentence.split("; ")
    assert call.startswith(
        "torch.onnx has no translation for aten._linalg_eigh.default, which module 'inner' (Inner) calls at "
    )
    assert call.endswith('net.py", line 7, in forward')
    assert advice.startswith(
        "no opset has a form of it: compute the same by other torch operators, or compute it before"
    )
    assert reason.startswith("  DispatchError: No ONNX function found for")
    assert capfd.readouterr() == ("", "")


def test_half_precision(factory: Make) -> None:
    code = "def make():\n    return nn.Linear(4, 4).bfloat16(), (torch.rand(2, 4).bfloat16(),)\n"
    exported = export(factory(code))
    feed = np.ones((2, 4), ml_dtypes.bfloat16)
    assert run_torch(exported.source, {"input": feed})["output"].dtype == ml_dtypes.bfloat16
    assert exported.ir_model.graph.outputs[0].dtype is not None
    assert exported.ir_model.graph.outputs[0].dtype.name == "BFLOAT16"


def test_saved_files_pass_the_checker(factory: Make, tmp_path: Any) -> None:
    source = load_source(factory(NESTED, inputs=OPEN))
    assert isinstance(source, TorchSource)
    export_onnx(source, ExportConfig(), tmp_path / "out" / "model.onnx")
    onnx.checker.check_model(tmp_path / "out" / "model.onnx", full_check=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.onnx"]
