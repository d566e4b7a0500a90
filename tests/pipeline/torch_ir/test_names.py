"""Names of weights: a placeholder's and a checkpoint's are two namespaces, whatever a model calls its parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeline.errors import SourceError, UsageError
from pipeline.runtime import compile_graph
from pipeline.torch_ir import IR, ExecutionError, IRExecutor, execute_ir, extract_ir, verify_ir_with_state_dict


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
