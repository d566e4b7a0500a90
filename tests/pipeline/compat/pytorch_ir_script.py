"""Code as users of pytorch-ir write it. `test_compat.py` runs it in a process where `torch_ir` is our stand-in."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn
from torch_ir import (
    IR,
    ExecutionError,
    IRExecutor,
    OpNode,
    TensorMeta,
    __version__,
    execute_ir,
    export_model,
    extract_ir,
    generate_op_distribution_pie,
    get_model_name,
    ir_to_mermaid,
    list_registered_ops,
    load_ir,
    register_executor,
    register_op,
    save_ir,
    verify_ir,
    verify_ir_with_state_dict,
)
from torch_ir.analyzer import GraphAnalyzer, NodeInfo, _dtype_to_str
from torch_ir.cli import load_ir as load_for_cli
from torch_ir.cli import main
from torch_ir.converter import IRConverter, convert_node, get_op_type
from torch_ir.executor import TensorRegistry, load_weights
from torch_ir.exporter import is_meta_module, is_meta_tensor, validate_inputs_meta, validate_meta_device
from torch_ir.ops.registry import get_conversion_fn, get_execution_fn
from torch_ir.serializer import IRSerializer
from torch_ir.serializer import TensorMeta as MetaOfSerializer
from torch_ir.verifier import VerificationReport, _compare_tensors
from torch_ir.weight_loader import WeightLoader, validate_weights_against_ir


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.mask = torch.tensor([1.0, 0.0, 1.0, 0.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x)) * self.mask


def output_of(*words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(list(words))
    return out.getvalue()


def exit_of(*words: str) -> tuple[int | str | None, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            main(list(words))
        except SystemExit as end:
            return end.code, out.getvalue()
    return None, out.getvalue()


model = Mlp().eval()
state = model.state_dict()
with torch.device("meta"):
    meta = Mlp().eval()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ir = extract_ir(meta, (torch.randn(1, 8, device="meta"),), model_name="Mlp")

# Traced at a batch of 1, run at a batch of 2; a constant from outside.
x, constants = torch.randn(2, 8), {"mask": model.mask}
assert torch.equal(execute_ir(ir, (x,), weights=state, constants=constants)[0], model(x))
valid, report = verify_ir_with_state_dict(ir, state, model, (x,), rtol=1e-5, atol=1e-5, constants=constants)
assert valid and isinstance(report, VerificationReport), report
assert report.output_details[0]["shape"] == [2, 4]
valid, report = verify_ir_with_state_dict(ir, state, model, (x,))
assert not valid and "Weight/input 'c_mask' not found in registry for node 'mul'." in (report.error_message or "")
try:
    IRExecutor(ir).execute((x,))
except ExecutionError as error:
    assert "Weights not loaded" in str(error)

with tempfile.TemporaryDirectory() as folder:
    file = f"{folder}/mlp.json"
    save_ir(ir, file)
    assert [node.op_type for node in load_ir(file).nodes] == [
        "aten.linear.default",
        "aten.relu.default",
        "aten.mul.Tensor",
    ]
    torch.save(state, f"{folder}/w.pt")
    assert verify_ir(ir, f"{folder}/w.pt", model, (x,), constants=constants)[0]
    assert validate_weights_against_ir({**WeightLoader().load(f"{folder}/w.pt"), **constants}, ir) == []
    assert "Total parameters: 40" in output_of("info", file)
    assert json.loads(output_of("info", file, "--json"))["op_distribution"]["aten.mul.Tensor"] == 1
    assert output_of("visualize", file, "--no-weights") == ir_to_mermaid(ir, include_weights=False) + "\n"
    output_of("visualize", file, "-o", f"{folder}/g.mmd")
    assert Path(folder, "g.mmd").read_text().startswith("flowchart TD")
    assert exit_of("info", f"{folder}/none.json") == (1, f"Error: file not found: {folder}/none.json\n")
assert exit_of()[0] == 2
assert exit_of("--version") == (0, f"pytorch-ir {__version__}\n")

exported = export_model(model, (torch.randn(1, 8),), strict=False)
analyzer = GraphAnalyzer(exported)
assert [node.name for node in analyzer.get_call_function_nodes()] == ["linear", "relu", "mul"]
assert analyzer.get_weight_name_mapping()["p_fc_weight"] == "fc.weight"
assert analyzer.get_graph_inputs()[0].shape == (1, 8) and analyzer.get_graph_outputs()[0].shape == (1, 4)
again = IRSerializer().deserialize(IRSerializer().serialize(IRConverter(strict=False).convert(exported, "Mlp")))
assert torch.equal(again.constants["mask"], model.mask) and isinstance(again, IR)
linear = next(node for node in exported.graph.nodes if node.name == "linear")
assert [meta.producer_node for meta in analyzer.get_node_input_meta(linear)] == ["x", None, None]
assert [(meta.name, meta.shape) for meta in analyzer.get_node_output_meta("linear")] == [("linear", (1, 4))]
assert analyzer.get_node_output_meta("none") == []
assert convert_node(analyzer.get_call_function_nodes()[1]) == again.nodes[1]
assert get_op_type(linear.target) == "aten.linear.default" and get_model_name(model) == "Mlp"
assert callable(load_weights) and load_for_cli is load_ir and MetaOfSerializer is TensorMeta
assert get_execution_fn("<built-in function getitem>")([x, state], {"index": 0}) == [x]
assert generate_op_distribution_pie(ir).startswith("pie showData")

assert is_meta_module(meta) and not is_meta_module(model) and is_meta_tensor(torch.empty(1, device="meta"))
validate_meta_device(model=meta)
validate_inputs_meta((torch.empty(1, device="meta"),))
assert _dtype_to_str(torch.bfloat16) == "bfloat16"
assert _compare_tensors(torch.zeros(2), torch.ones(2), 1e-5, 1e-5) == (False, 1.0, 1.0)


@register_executor("custom.gate")
def run_gate(inputs: list[torch.Tensor], attrs: dict[str, object]) -> list[torch.Tensor]:
    return [torch.sigmoid(inputs[0]) * inputs[1]]


@register_op("custom.gate")
def convert_gate(info: NodeInfo) -> OpNode:
    return OpNode(info.name, "custom.gate", info.input_metas, info.output_metas, info.attrs)


metas = [TensorMeta(name=name, shape=(2,), dtype="float32") for name in ("a", "b", "gate")]
node = OpNode(name="gate", op_type="custom.gate", inputs=metas[:2], outputs=metas[2:])
by_hand = IR(nodes=[node], graph_inputs=metas[:2], graph_outputs=metas[2:], weights=[], model_name="hand")
assert OpNode.from_dict(node.to_dict()) == node
assert execute_ir(by_hand, (torch.zeros(2), torch.ones(2)), weights={})[0].tolist() == [0.5, 0.5]
assert get_execution_fn("custom.gate") is run_gate and get_conversion_fn("custom.gate") is convert_gate
assert list_registered_ops()["execution"] == ["custom.gate"]

registry = TensorRegistry()
registry["x"] = x
assert "x" in registry and registry.has("x") and registry.get("y") is None
registry.clear()
assert not registry.has("x")
sys.stdout.write("all of it\n")
