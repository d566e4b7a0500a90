"""The scene in the words of Model Explorer, whose own extension manager converts a file where it is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest

from passes.optimize import optimize
from passes.viewer import explorer, view_data
from passes.weights.detached import open_model
from pipeline.commands.view import open_explorer
from pipeline.errors import MissingExtra
from tests.support.onnx_models import biased_attention


def test_nodes_edges_and_tables() -> None:
    model = open_model(biased_attention())
    before, _ = view_data(model, optimize(model, ["onnxsim"]).model, errors={"scores": 33.0})["scenes"]
    nodes = {node["id"]: node for node in explorer.graph_nodes(before)}
    scores = next(node for node in nodes.values() if {"key": "name", "value": "scores"} in node["attrs"])
    assert scores["label"] == "MatMul"
    assert {"key": "structure", "value": "qkv"} in scores["attrs"]
    assert [edge["targetNodeInputId"] for edge in scores["incomingEdges"]] == ["0", "1"]
    assert {edge["sourceNodeId"] for edge in scores["incomingEdges"]} < nodes.keys()
    tables = {title: json.loads(text)[explorer.GRAPH] for title, text in explorer.node_data(before).items()}
    assert tables.keys() == {"structure", "difference", "SQNR in dB"}
    assert tables["SQNR in dB"]["results"] == {scores["id"]: {"value": 33.0}}
    assert {row["value"] for row in tables["difference"]["results"].values()} >= {"same", "only"}


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "model_explorer", None)
    with pytest.raises(MissingExtra, match=r"pip install 'onnxline\[explorer\]'"):
        open_explorer([], {"scenes": []})


def test_its_extension_manager_converts_a_file(tmp_path: Path) -> None:
    manager = pytest.importorskip("model_explorer.extension_manager", reason="the extra explorer is not installed")
    onnx.save(biased_attention(), tmp_path / "model.onnx")
    extensions = manager.ExtensionManager([explorer.__name__])
    extensions.load_extensions()
    asked = {"cmdId": "convert", "extensionId": explorer.ADAPTER, "modelPath": str(tmp_path / "model.onnx")}
    (graph,) = extensions.run_cmd({**asked, "settings": {}})["graphs"]
    assert "scores" in {attr["value"] for node in graph["nodes"] for attr in node["attrs"]}
