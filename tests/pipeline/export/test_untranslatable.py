"""What torch's exporter cannot translate: one sentence with the operator, the module and the way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.config import ExportConfig, ModelConfig
from pipeline.errors import SourceError, Unsupported
from pipeline.export import TorchSource, export_onnx, load_source

CODE = """from torch import library
@library.custom_op("onnxline_tests::{name}", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@opaque.register_fake
def _(x):
    return torch.empty_like(x)

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        return {body}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), Inner())

    def forward(self, x):
        return self.blocks(x.unsqueeze(0))

make = lambda: (Net(), (torch.rand(4, 4),))
"""


def refusal(factory: Callable[..., ModelConfig], name: str, body: str) -> list[str]:
    source = load_source(factory(CODE.format(name=name, body=body)))
    assert isinstance(source, TorchSource)
    with pytest.raises((Unsupported, SourceError)) as caught:
        export_onnx(source, ExportConfig())
    return str(caught.value).splitlines()


def test_an_operator_of_a_library_s_own(factory: Callable[..., ModelConfig]) -> None:
    first, reason = refusal(factory, "one", "self.proj(opaque(x))")
    head, _, way_out = first.partition("; ")
    assert head.startswith(
        "torch.onnx has no translation for onnxline_tests.one.default, which module 'blocks.1' (Inner) calls at File "
    )
    assert head.endswith('net.py", line 19, in forward')
    assert way_out == (
        "the operator belongs to another library: where torch.compiler.is_exporting() is true, let the module "
        "compute the same by torch's operators"
    )
    assert "No ONNX function found" in reason


def test_that_way_out(factory: Callable[..., ModelConfig], assert_agrees: Callable[..., None]) -> None:
    source = load_source(factory(CODE.format(name="two", body="x * 2 if torch.compiler.is_exporting() else opaque(x)")))
    assert isinstance(source, TorchSource)
    assert_agrees(export_onnx(source, ExportConfig()))


def test_the_very_call_is_named(factory: Callable[..., ModelConfig]) -> None:
    """`unsqueeze` of real numbers, in the module above, is not what fails."""
    first, _ = refusal(factory, "three", "torch.complex(x, x).cumsum(-1).abs().unsqueeze(-1)")
    assert "aten.cumsum.default, which module 'blocks.1' (Inner) calls at File" in first
    assert first.endswith("; on complex tensors there is none: compute with their parts (torch.view_as_real)")


def test_weights_that_forward_converts(factory: Callable[..., ModelConfig]) -> None:
    """As SwitchTransformers' and NLLB-MoE's routers do."""
    lines = refusal(factory, "four", "self.proj.to(torch.float64)(x.double())")
    assert lines[0] == (
        "forward points the parameter 'blocks.1.proj.bias' at other memory (`.data = …`, `set_`, a module's `to(…)`), "
        "which torch.export does not see; compute the new value as a tensor of its own, or write it in the constructor"
    )
