"""A tied weight has a placeholder for each of its names, as in torch.export and pytorch-ir, and one tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from pipeline.errors import SourceError, Unsupported
from pipeline.runtime import RecordingDevice, compile_graph
from pipeline.torch_ir import IR, ExecutionError, IRExecutor, execute_ir, extract_ir, verify_ir_with_state_dict
from pipeline.torch_ir.command_files import summary
from pipeline.training import as_module, record_step
from tests.pipeline.torch_ir.small_modules import Cache, MaskedLinear, Tied, cache_call

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


# Buffers that no checkpoint has, of a model on meta: computed again where the model knows how.


class Filling(nn.Module):
    """Fills one of its buffers, takes another by what it holds, and leaves a third."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("filled", "scaled", "left"):
            self.register_buffer(name, torch.empty(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("filled") + self.get_buffer("scaled") + self.get_buffer("left")

    def _init_weights(self, module: nn.Module) -> None:
        module.get_buffer("filled").copy_(torch.arange(4.0))
        module.get_buffer("scaled").mul_(2)


def test_what_was_not_written_is_not_known() -> None:
    with torch.device("meta"):
        ir = extract_ir(Filling(), (torch.empty(2, 4),))
    assert {name: value.tolist() for name, value in ir.constants.items()} == {"filled": [0, 1, 2, 3]}


def test_a_checkpoint_has_the_persistent_buffers() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(4))
            self.register_buffer("own", torch.full((4,), 2.0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.get_buffer("kept") + self.get_buffer("own")

    ir = extract_ir(Scaling(), (torch.zeros(2, 4),), strict=False)
    assert {name: value.tolist() for name, value in ir.constants.items()} == {"own": [2, 2, 2, 2]}


# An IR on a device of its own, by the recording device.


def test_a_plan_runs_there_and_its_outputs_are_there() -> None:
    device, model, x = RecordingDevice(), torch.nn.Linear(4, 2), torch.randn(3, 4)
    ir = extract_ir(model, (x,), strict=False)
    (found,) = execute_ir(ir, (x,), model.state_dict(), device=device)
    torch.testing.assert_close(found, model(x))
    assert device.holds(found)


def test_states_stay_there_from_run_to_run() -> None:
    model = Cache().eval()
    args, kwargs = cache_call(2)
    ir = extract_ir(model, args, kwargs=kwargs, strict=False)
    device = RecordingDevice()
    valid, report = verify_ir_with_state_dict(ir, model.state_dict(), model, args, kwargs=kwargs, device=device)
    assert valid, report
    assert device.synchronizations, "the plan was bound there"


def test_a_run_op_by_op_is_refused_there() -> None:
    model, x = MaskedLinear(), torch.randn(2, 4)
    ir = extract_ir(model, (x,), strict=False)
    executor = IRExecutor(ir, model.state_dict(), planned=False, device=RecordingDevice())
    with pytest.raises(ExecutionError, match=r"this run goes op by op .*, and only a plan runs on a device"):
        executor.execute((x,))


def test_a_device_that_is_not_there_is_named_and_no_run_op_by_op_is_tried() -> None:
    model, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
    with pytest.raises(Unsupported, match="device 'warp': this release has kernels for cpu and cuda"):
        execute_ir(extract_ir(model, (x,), strict=False), (x,), model.state_dict(), device="warp")
