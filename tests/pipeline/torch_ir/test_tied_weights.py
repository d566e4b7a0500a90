"""A tied weight has a placeholder for each of its names, as in torch.export and pytorch-ir, and one tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim import SGD

from pipeline.errors import SourceError
from pipeline.runtime import compile_graph
from pipeline.torch_ir import IR, ExecutionError, IRExecutor, execute_ir, extract_ir
from pipeline.torch_ir.command_files import summary
from pipeline.training import as_module, record_step
from tests.pipeline.torch_ir.small_modules import Tied

IDS = torch.tensor([[1, 4]])


@pytest.fixture(scope="module")
def ir() -> IR:
    return extract_ir(Tied(), (IDS,), strict=False)


def test_placeholders_are_those_of_torch(ir: IR, tmp_path: Path) -> None:
    program = torch.export.export(Tied(), (IDS,))
    named = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.target is not None}
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    read = [[source.name for source in node.all_input_nodes] for node in calls]
    ir.save(tmp_path / "ir.json")
    for found in (ir, IR.load(tmp_path / "ir.json")):
        assert found.weight_name_mapping == named
        assert [meta.name for meta in found.weights] == list(named.values())
        assert [[meta.name for meta in node.inputs] for node in found.nodes] == read
        assert found.tied == {"embed.weight": ("head.weight",), "head.weight": ("embed.weight",)}
        assert summary(found)["total_parameters"] == sum(tensor.numel() for tensor in Tied().parameters())


@pytest.mark.parametrize("names", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]])
def test_any_name_gives_the_tensor_to_all(ir: IR, names: list[str]) -> None:
    model = Tied()
    weights = dict.fromkeys(names, model.embed.weight.detach())
    assert torch.equal(execute_ir(ir, (IDS,), weights)[0], model(IDS))
    assert torch.equal(IRExecutor(ir, weights, planned=False).execute((IDS,))[0], model(IDS))
    (found,) = compile_graph(ir.graph, weights=weights).run({ir.graph.values[ir.graph.inputs[0]].name: IDS}).values()
    assert torch.equal(found, model(IDS))


def test_two_tensors_for_one_weight_are_refused_once(ir: IR) -> None:
    weights = {"embed.weight": torch.zeros_like(Tied().embed.weight), "head.weight": Tied().embed.weight.detach()}
    with pytest.raises(ExecutionError) as refused:
        execute_ir(ir, (IDS,), weights)
    assert str(refused.value).count("the two tensors in the weights differ") == 1
    with pytest.raises(SourceError) as refused:
        compile_graph(ir.graph, weights=weights)
    assert str(refused.value).count("are names of one weight, and the two tensors differ") == 1


def test_it_is_trained_as_one_parameter(ir: IR) -> None:
    torch.manual_seed(0)
    model, target = Tied(), torch.tensor([[2, 3]])
    module = as_module(ir.graph, weights=model.state_dict())
    assert module.get_parameter("embed.weight") is module.get_parameter("head.weight")

    def loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    program = record_step(module, loss, SGD(module.parameters(), lr=0.1), (IDS, target))
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        expected = loss(model(IDS), target)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(program.step((IDS, target)), expected.detach())
    program.write_back()
    torch.testing.assert_close(module.get_parameter("head.weight"), model.embed.weight)
