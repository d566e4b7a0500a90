"""`onnxline why` on a run and on a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
from typer.testing import CliRunner, Result

from pipeline import Pipeline, RunConfig
from pipeline.cli import app

MODULE = "(Attention › Linear)"


def ask(*words: str) -> Result:
    return CliRunner().invoke(app, ["why", *words])


def test_a_run_knows_module_line_pass_and_errors(config_file, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = Pipeline(RunConfig.from_yaml(config_file(passes={"recipe": ["default", "onnxsim"]})), out).run()
    (step,) = [row for row in result.passes if row.name == "onnxsim"]
    (attention,) = [node for node in onnx.load(out / "model.onnx").graph.node if node.op_type == "Attention"]

    shown = ask(str(out), attention.name)
    assert shown.exit_code == 0
    lines = dict(line.strip().split("  ", 1) for line in shown.stdout.splitlines()[1:])
    assert shown.stdout.splitlines()[0] == f"com.microsoft::Attention {attention.name}"
    assert lines["module"].strip() == "Attention (the model itself)"
    assert lines["made by"].strip().startswith("onnxsim, in place of ")
    assert f"onnxsim ran: {step.nodes_before} → {step.nodes_after} nodes, max error" in lines["step"]

    (node,) = json.loads(ask(str(out / "model.onnx"), attention.name, "--json").stdout)["nodes"]
    assert node["replaced_count"] > len(node["replaced"]) == 8
    assert node["steps"][0]["errors"]["output"]["max_abs"] == step.errors["output"].max_abs

    everything = json.loads(ask(str(out), "*", "--json").stdout)
    assert everything["format_version"] == 1
    assert len(everything["nodes"]) == result.optimize.nodes
    assert all(node["module"] is not None for node in everything["nodes"])


def test_a_node_of_the_export(config_file, tmp_path: Path) -> None:
    Pipeline(RunConfig.from_yaml(config_file(passes={"recipe": []})), tmp_path).run()
    shown = ask(str(tmp_path), "node_linear_3").stdout.splitlines()
    assert shown[0] == "Add node_linear_3"
    assert f"  module      out {MODULE}" in shown
    assert "  made by     no pass: it comes from the export" in shown
    code = next(line for line in shown if line.startswith("  code "))
    assert "factories.py:" in code
    assert code.endswith("in forward: return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))")


def test_a_weight_and_all_nodes_of_a_module_or_an_operator(config_file, tmp_path: Path) -> None:
    Pipeline(RunConfig.from_yaml(config_file(passes={"recipe": ["fold_constants"]})), tmp_path).run()
    assert ask(str(tmp_path), "q.weight_transposed").stdout.splitlines()[:4] == [
        "initializer q.weight_transposed float[32,32]",
        "  weight      q.weight, transposed",
        "  made by     fold_constants",
        "  read by     MatMul node_MatMul_1",
    ]
    (weight,) = json.loads(ask(str(tmp_path), "q.bias", "--json").stdout)["weights"]
    assert (weight["sources"], weight["made_by"], weight["steps"]) == (["q.bias"], "", [])
    assert [line for line in ask(str(tmp_path), "module:q").stdout.splitlines() if not line.startswith("  ")] == [
        "MatMul node_MatMul_1",
        "",
        "Add node_linear",
        "",
        "1 node of q merged into others, or removed:",
    ]
    assert "is gone: fold_constants made q.weight_transposed" in str(ask(str(tmp_path), "q.weight").exception)


EXPORTED = """<ir_version: 9, opset_import: ["": 20]> g (float[2] x) => (float[2] y) {
    [node_q] a = Neg (x)  [node_q_2] b = Abs (a)  [node_k] c = Neg (b)  [node_out] y = Relu (c)
}"""
FINAL = """<ir_version: 9, opset_import: ["": 20]> g (float[2] x) => (float[2] y) {
    [merged] c = Tanh (x)  [node_out] y = Relu (c)
}"""
SHOWN = """\
2 nodes of q merged into others, or removed:
  Neg node_q: in Tanh merged, by fuse_them
  Abs node_q_2: no node says that it stands in its place
"""


def test_the_nodes_that_were_merged_away_from_a_module(tmp_path: Path) -> None:
    exported, final = onnx.parser.parse_model(EXPORTED), onnx.parser.parse_model(FINAL)
    for node, module in zip(exported.graph.node, ("q", "q", "k", "out"), strict=True):
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=f"['', '{module}', 'call']")
    final.graph.node[0].metadata_props.add(key="onnxline.pass", value="fuse_them")
    final.graph.node[0].metadata_props.add(key="onnxline.from", value='["node_q", "node_k"]')
    onnx.save(exported, tmp_path / "exported.onnx"), onnx.save(final, tmp_path / "model.onnx")
    shown = ask(str(tmp_path), "module:q")
    assert (shown.exit_code, shown.stdout) == (0, SHOWN)
    first, second = json.loads(ask(str(tmp_path), "module:q", "--json").stdout)["merged"]
    assert first == {"name": "node_q", "op": "Neg", "into": ["Tanh merged"], "made_by": "fuse_them"}
    assert second["into"] == []
    assert ask(str(tmp_path), "module:v").exit_code == 1  # a PolicyError of the runner: no such module anywhere


PLAIN = '<ir_version: 9, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { [last] y = Neg (x) }'


def test_a_file_without_torch_metadata(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(PLAIN), tmp_path / "plain.onnx")
    shown = ask(str(tmp_path / "plain.onnx"), "last").stdout
    assert "unknown (the source is an ONNX file without torch metadata)" in shown
    assert "no pass: it comes from the source" in shown


def test_a_report_that_cannot_be_read_is_left_aside(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(PLAIN), tmp_path / "model.onnx")
    for text in ("", "[]", '{"passes": 3}', '{"passes": [3, {}]}'):
        (tmp_path / "report.json").write_text(text)
        assert ask(str(tmp_path), "last").exit_code == 0


def test_an_unknown_node_is_exit_code_2_and_needs_no_torch(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(PLAIN), tmp_path / "model.onnx")
    program = "import sys; sys.modules['torch'] = None; from pipeline.cli import main; main()"
    words = [sys.executable, "-c", program, "why", str(tmp_path)]
    good = subprocess.run([*words, "last"], capture_output=True, text=True, timeout=120)
    assert (good.returncode, good.stdout.splitlines()[0]) == (0, "Neg last")
    bad = subprocess.run([*words, "lost"], capture_output=True, text=True, timeout=120)
    assert (bad.returncode, bad.stderr) == (
        2,
        "onnxline: no node, value or initializer named 'lost'; did you mean 'last'?\n",
    )
