"""The scene in the words of Model Explorer, whose own extension manager converts a file where it is installed."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType

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
    before, _ = view_data(model, optimize(model, ["onnxsim"]).model, errors={"scores": 33.0, "k": math.inf})["scenes"]
    nodes = {node["id"]: node for node in explorer.graph_nodes(before)}
    scores = next(node for node in nodes.values() if {"key": "name", "value": "scores"} in node["attrs"])
    assert scores["label"] == "MatMul"
    assert {"key": "structure", "value": "qkv"} in scores["attrs"]
    assert [edge["targetNodeInputId"] for edge in scores["incomingEdges"]] == ["0", "1"]
    assert {edge["sourceNodeId"] for edge in scores["incomingEdges"]} < nodes.keys()
    data = explorer.node_data(before, "/models/a.onnx")
    tables = {title: json.loads(text)["/models/a.onnx"] for title, text in data.items()}
    assert tables.keys() == {"structure", "difference", "SQNR in dB"}
    assert tables["SQNR in dB"]["results"].pop(scores["id"]) == {"value": 33.0}
    assert [row["value"] for row in tables["SQNR in dB"]["results"].values()] == ["equal"]
    assert {row["value"] for row in tables["difference"]["results"].values()} >= {"same", "only"}
    colours = {row["value"]: row["bgColor"] for row in tables["difference"]["results"].values()}
    assert len(set(colours.values())) == len(colours)  # words have no gradient


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "model_explorer", None)
    with pytest.raises(MissingExtra, match=r"pip install 'onnxline\[explorer\]'"):
        open_explorer([], {"scenes": []})


def test_its_extension_manager_converts_a_file(tmp_path: Path) -> None:
    manager = pytest.importorskip("model_explorer.extension_manager", reason="the extra explorer is not installed")
    file = tmp_path / "model.onnx"
    onnx.save(biased_attention(), file)
    extensions = manager.ExtensionManager([explorer.__name__])
    extensions.load_extensions()
    asked = {"cmdId": "convert", "extensionId": explorer.ADAPTER, "modelPath": str(file)}
    (graph,) = extensions.run_cmd({**asked, "settings": {}})["graphs"]
    assert graph["id"] == explorer.graph_id(file)
    assert "scores" in {attr["value"] for node in graph["nodes"] for attr in node["attrs"]}


def test_each_of_two_files_with_one_name_has_tables_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package, config = ModuleType("model_explorer"), Config()
    package.__dict__.update(config=lambda: config, visualize_from_config=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "model_explorer", package)
    model = open_model(biased_attention())
    files = [tmp_path / folder / "model.onnx" for folder in ("old", "new")]
    open_explorer(files, view_data(model, optimize(model, ["onnxsim"]).model))
    assert config.models == [str(file) for file in files]
    for file in files:
        assert any(str(file) in json.loads(table) for table in config.tables)


class Config:
    """Keeps what a command asks Model Explorer to show."""

    def __init__(self) -> None:
        self.models: list[str] = []
        self.tables: list[str] = []

    def add_model_from_path(self, path: str, adapterId: str) -> None:  # noqa: N803 # its name
        self.models.append(path)

    def add_node_data(self, name: str, table: str, model_name: str) -> None:
        self.tables.append(table)
