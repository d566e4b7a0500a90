"""The three models of seed document 001 give the JSON and the flowcharts that it shows."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from pipeline.torch_ir import IR, OpNode, TensorMeta, extract_ir, generate_op_distribution_pie, ir_to_mermaid, ir_to_svg
from tests.pipeline.torch_ir.small_modules import BufferVsConstant, GatherWithIndex, MaskedLinear

FLOWCHARTS = {
    MaskedLinear: """flowchart TD
    input_x[/"Input: x<br/>1x4"/]
    op_linear["linear<br/>1x4"]
    input_x -->|"1x4"| op_linear
    w_p_linear_weight[/"p_linear_weight<br/>4x4"/]
    w_p_linear_weight -.->|"4x4"| op_linear
    w_p_linear_bias[/"p_linear_bias<br/>4"/]
    w_p_linear_bias -.->|"4"| op_linear
    op_mul["mul.Tensor<br/>1x4"]
    op_linear -->|"1x4"| op_mul
    w_c_mask[/"c_mask<br/>4"/]
    w_c_mask -.->|"4"| op_mul
    output_0[\\"Output<br/>1x4"/]
    op_mul --> output_0""",
    GatherWithIndex: """flowchart TD
    input_x[/"Input: x<br/>1x8"/]
    op_linear["linear<br/>1x8"]
    input_x -->|"1x8"| op_linear
    w_p_linear_weight[/"p_linear_weight<br/>8x8"/]
    w_p_linear_weight -.->|"8x8"| op_linear
    w_p_linear_bias[/"p_linear_bias<br/>8"/]
    w_p_linear_bias -.->|"8"| op_linear
    op_index["index.Tensor<br/>1x4"]
    op_linear -->|"1x8"| op_index
    w_c_indices[/"c_indices<br/>4"/]
    w_c_indices -.->|"4"| op_index
    output_0[\\"Output<br/>1x4"/]
    op_index --> output_0""",
    BufferVsConstant: """flowchart TD
    input_x[/"Input: x<br/>1x4"/]
    op_linear["linear<br/>1x4"]
    input_x -->|"1x4"| op_linear
    w_p_linear_weight[/"p_linear_weight<br/>4x4"/]
    w_p_linear_weight -.->|"4x4"| op_linear
    w_p_linear_bias[/"p_linear_bias<br/>4"/]
    w_p_linear_bias -.->|"4"| op_linear
    op_mul["mul.Tensor<br/>1x4"]
    op_linear -->|"1x4"| op_mul
    w_b_scale[/"b_scale<br/>4"/]
    w_b_scale -.->|"4"| op_mul
    op_add["add.Tensor<br/>1x4"]
    op_mul -->|"1x4"| op_add
    w_c_offset[/"c_offset<br/>4"/]
    w_c_offset -.->|"4"| op_add
    output_0[\\"Output<br/>1x4"/]
    op_add --> output_0""",
}


def extract(kind: type[nn.Module]) -> IR:
    model = kind().eval()
    return extract_ir(model, (torch.randn(1, model.linear.in_features),), strict=False)


def tensor(name: str, *shape: int, dtype: str = "float32", by: str | None = None) -> dict[str, Any]:
    meta: dict[str, Any] = {"name": name, "shape": list(shape), "dtype": dtype}
    return meta if by is None else {**meta, "producer_node": by, "producer_output_idx": 0}


@pytest.mark.parametrize("kind", FLOWCHARTS, ids=lambda kind: kind.__name__)
def test_flowchart(kind: type[nn.Module]) -> None:
    assert ir_to_mermaid(extract(kind)) == FLOWCHARTS[kind]


def test_json_of_masked_linear() -> None:
    actual = extract(MaskedLinear).to_dict()
    seed_keys = ("model_name", "graph_inputs", "graph_outputs", "weights", "weight_name_mapping", "constants")
    assert {key: actual[key] for key in seed_keys} == {
        "model_name": "MaskedLinear",
        "graph_inputs": [tensor("x", 1, 4)],
        "graph_outputs": [tensor("mul", 1, 4)],
        "weights": [tensor("linear.weight", 4, 4), tensor("linear.bias", 4), tensor("mask", 4)],
        "weight_name_mapping": {"p_linear_weight": "linear.weight", "p_linear_bias": "linear.bias", "c_mask": "mask"},
        "constants": {"mask": {"data": [1.0, 0.0, 1.0, 0.0], "dtype": "float32"}},
    }
    linear, mul = [
        {key: node[key] for key in ("name", "op_type", "inputs", "outputs", "attrs")} for node in actual["nodes"]
    ]
    assert linear == {
        "name": "linear",
        "op_type": "aten.linear.default",
        "inputs": [tensor("x", 1, 4, by="x"), tensor("p_linear_weight", 4, 4), tensor("p_linear_bias", 4)],
        "outputs": [tensor("linear", 1, 4)],
        "attrs": {},
    }
    assert mul == {
        "name": "mul",
        "op_type": "aten.mul.Tensor",
        "inputs": [tensor("linear", 1, 4, by="linear"), tensor("c_mask", 4)],
        "outputs": [tensor("mul", 1, 4)],
        "attrs": {},
    }


def test_json_of_the_other_two() -> None:
    gather, buffer = extract(GatherWithIndex).to_dict(), extract(BufferVsConstant).to_dict()
    index = gather["nodes"][1]
    assert index["inputs"] == [tensor("linear", 1, 8, by="linear"), tensor("c_indices", 4, dtype="int64")]
    assert index["attrs"] == {"_tensor_list_sizes": [1], "_tensor_list_none_masks": [[True, False]]}
    assert gather["constants"] == {"indices": {"data": [0, 2, 4, 6], "dtype": "int64"}}
    mapping = {"p_linear_weight": "linear.weight", "p_linear_bias": "linear.bias"}
    assert buffer["weight_name_mapping"] == {**mapping, "b_scale": "scale", "c_offset": "offset"}
    assert list(buffer["constants"]) == ["offset"]
    assert [node["inputs"][1]["name"] for node in buffer["nodes"][1:]] == ["b_scale", "c_offset"]


def test_a_constant_on_meta_is_warned_of() -> None:
    with torch.device("meta"):
        model = MaskedLinear()
    said = r"Skipping 1 meta-device constant\(s\) \(shape/dtype already in weights\): \['mask'\]"
    with pytest.warns(UserWarning, match=said):
        ir = extract_ir(model, (torch.randn(1, 4, device="meta"),))
    assert ir.constants == {}


def test_flowcharts_end_at_the_limit_and_names_cannot_break_them() -> None:
    x, y = TensorMeta('a"b.0', (2,), "float32"), TensorMeta("a_b_0", (2,), "float32")
    nodes = [OpNode(f"n{i}", "aten.add.Tensor", [x, y], [TensorMeta(f"s{i}", (2,), "float32")]) for i in range(3)]
    ir = IR(nodes, [x, y], [nodes[2].outputs[0]])
    assert ir_to_mermaid(ir, max_nodes=1, include_weights=False).splitlines() == [
        "flowchart TD",
        '    input_a_b_0[/"Input: a#quot;b.0<br/>2"/]',
        '    input_a_b_0_[/"Input: a_b_0<br/>2"/]',
        '    op_n0["add.Tensor<br/>2"]',
        '    input_a_b_0 -->|"2"| op_n0',
        '    input_a_b_0_ -->|"2"| op_n0',
        '    output_0[\\"Output<br/>2"/]',
        '    note["... 2 more nodes ..."]',
    ]
    assert generate_op_distribution_pie(ir).splitlines()[2:] == ['    "add.Tensor" : 3']


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.tanh(x)


@pytest.fixture(scope="module")
def stack() -> IR:
    return extract_ir(Stack().eval(), (torch.randn(2, 4),), strict=False)


def texts(svg: str, kind: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.get("class") == kind]


def test_an_svg_frames_modules(stack: IR) -> None:
    svg = ir_to_svg(stack)
    assert texts(svg, "title") == ["blocks", *map(str, range(6))]
    assert texts(svg, "op") == [*["linear up", "relu", "linear down", "add.Tensor"] * 6, "tanh", "x", "output"]
    assert texts(svg, "shape")[:2] == ["8x4, 8 → 2x8", "→ 2x8"]
    assert texts(ir_to_svg(stack, include_weights=False), "shape")[0] == "→ 2x8"


def test_modules_that_look_the_same_are_folded_but_for_the_first(stack: IR) -> None:
    svg = ir_to_svg(stack, max_nodes=12)
    assert texts(svg, "title") == ["blocks", "0"]
    assert texts(svg, "op")[4:] == ["1 … 5", "tanh", "x", "output"]
    assert texts(svg, "shape")[4] == "like blocks.0"
    assert texts(ir_to_svg(stack, max_nodes=5), "title") == ["blocks"], "there is no room for what is in 0"
    assert texts(ir_to_svg(stack, max_nodes=1), "note") == ["… and 1 more nodes"]


def test_a_flowchart_by_module(stack: IR) -> None:
    lines = ir_to_mermaid(stack, 12, False, by_module=True).splitlines()
    assert lines == [
        "flowchart TD",
        '    input_x[/"Input: x<br/>2x4"/]',
        '    subgraph frame_blocks_linear["blocks"]',
        '        subgraph frame_blocks_0_linear["0"]',
        '            op_linear["linear<br/>2x8"]',
        '            op_relu["relu<br/>2x8"]',
        '            op_linear_1["linear<br/>2x4"]',
        '            op_add["add.Tensor<br/>2x4"]',
        "        end",
        '        module_blocks_1_linear_2[["1 … 5<br/>like blocks.0"]]',
        "    end",
        '    op_tanh["tanh<br/>2x4"]',
        '    input_x -->|"2x4"| op_linear',
        '    op_linear -->|"2x8"| op_relu',
        '    op_relu -->|"2x8"| op_linear_1',
        '    input_x -->|"2x4"| op_add',
        '    op_linear_1 -->|"2x4"| op_add',
        '    op_add -->|"2x4"| module_blocks_1_linear_2',
        '    module_blocks_1_linear_2 -->|"2x4"| op_tanh',
        '    output_0[\\"Output<br/>2x4"/]',
        "    op_tanh --> output_0",
    ]


def test_names_do_not_break_an_svg() -> None:
    x = TensorMeta('a<b>&"c', (2,), "float32")
    ir = IR([OpNode("n<", "aten.relu.default", [x], [TensorMeta("y", (2,), "float32")])], [x], [x], model_name="<m>")
    assert 'a<b>&"c' in texts(ir_to_svg(ir), "op")
