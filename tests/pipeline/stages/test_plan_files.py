"""plan.bin of a run says where the bytes of each weight are, and they are there."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from pydantic import ValidationError

import passes
from passes.weights.detached import read_model
from pipeline.config.sections import RuntimeConfig
from pipeline.errors import SourceError, UsageError
from pipeline.importers import from_onnx
from pipeline.ir.graph import Graph
from pipeline.lowering import lower
from pipeline.ops import emitter_of
from pipeline.planning import PlanFile, StoredBytes, check_weights, decode_plans, encode_plans, from_json, make_plan
from pipeline.stages.export import keys_of_parameters
from pipeline.stages.pictures import BrokenStructures, take_pictures
from pipeline.stages.plan_files import raw_data_places, stored_bytes, with_memory_map, write_plan_files
from pipeline.stages.runtime import find_trainable
from pipeline.workspace import Workspace
from tests.support.onnx_models import detached, model_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """`y = (x @ w + b) * 2`: a weight as raw data, one as floats in a field of their own."""
    w = numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(4, 3), "w")
    b = helper.make_tensor("b", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])
    two = numpy_helper.from_array(np.array(2, np.float32), "two")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["s"]),
        helper.make_node("Mul", ["s", "two"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, n]) for name, n in (("x", 4), ("y", 3)))
    graph = helper.make_graph(nodes, "small", [x], [y], [w, b, two])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def graph_of(model: Path) -> Graph:
    return from_onnx(model, emitter_of=emitter_of)


def bytes_at(folder: Path, stored: StoredBytes) -> bytes:
    if not stored.file:
        return stored.data
    return (folder / stored.file).read_bytes()[stored.offset : stored.offset + stored.nbytes]


def test_raw_data_is_found_in_the_file(model: Path) -> None:
    data, places = model.read_bytes(), raw_data_places(model)
    found = {name: data[begin : begin + size] for name, (begin, size) in places.items()}
    stored = onnx.load(model).graph.initializer
    assert found == {tensor.name: tensor.raw_data for tensor in stored if tensor.HasField("raw_data")}
    assert set(found) == {"w", "two"}


@pytest.mark.parametrize("external", [False, True])
def test_every_weight_has_its_bytes(model: Path, external: bool) -> None:
    if external:
        onnx.save(onnx.load(model), model, save_as_external_data=True, location="model.data", size_threshold=0)
    graph = graph_of(model)
    stored = stored_bytes(graph, model, model.parent)
    assert {name: one.file for name, one in stored.items()} == (
        {"w": "model.data", "b": "", "two": "model.data"}
        if external
        else {"w": "model.onnx", "b": "", "two": "model.onnx"}
    )
    expected = {graph.values[vid].name: payload.numpy().tobytes() for vid, payload in graph.payloads.items()}
    assert {name: bytes_at(model.parent, one) for name, one in stored.items()} == expected


def test_both_files_hold_one_plan(model: Path) -> None:
    graph = graph_of(model)
    plan = with_memory_map(make_plan(graph, lower(graph)), RuntimeConfig(regions="sram:64B,dram", pins={"h": "dram"}))
    workspace = Workspace(model.parent)
    files = write_plan_files(plan, graph, model, workspace)
    assert [file.name for file in files] == ["plan.json", "plan.bin"]
    assert from_json(json.loads(files[0].read_text())) == plan
    content = decode_plans(files[1].read_bytes())
    assert dict(content.entries) == {"main": plan}
    assert set(content.weights) == {"w", "b", "two"}
    assert plan.memory is not None


@pytest.mark.parametrize("external", [False, True])
def test_other_weights_are_refused(model: Path, external: bool) -> None:
    """A model that was trained on beside an old plan: the same names, places and sizes, and one other number."""
    if external:
        onnx.save(onnx.load(model), model, save_as_external_data=True, location="model.data", size_threshold=0)
    graph = graph_of(model)
    _, path = write_plan_files(make_plan(graph, lower(graph)), graph, model, Workspace(model.parent))
    content = decode_plans(path.read_bytes())
    check_weights(content, model.parent)
    file = model.parent / ("model.data" if external else "model.onnx")
    data, place = bytearray(file.read_bytes()), content.weights["w"].offset
    assert data[place + 4 : place + 8] == np.float32(1).tobytes()
    data[place + 4 : place + 8] = np.float32(1.5).tobytes()
    file.write_bytes(bytes(data))
    with pytest.raises(SourceError, match=r"weight 'w' \(48 bytes from \d+ of model\.\w+\) has not the bytes"):
        check_weights(content, model.parent)
    file.write_bytes(bytes(data[: place + 8]))
    with pytest.raises(SourceError, match="has not the bytes"):
        check_weights(content, model.parent)
    file.unlink()
    with pytest.raises(SourceError, match="No such file"):
        check_weights(content, model.parent)


@pytest.mark.parametrize("place", [{"offset": 2**63}, {"offset": 2**64 - 1}, {"file": "a\0b"}, {"file": "."}], ids=str)
def test_a_weight_at_no_place_of_a_file_is_refused(model: Path, place: dict[str, Any]) -> None:
    """A path or an offset that the operating system does not take ended in a traceback."""
    graph = graph_of(model)
    content = PlanFile({"main": make_plan(graph, lower(graph))}, stored_bytes(graph, model, model.parent))
    broken = replace(content, weights={"w": replace(content.weights["w"], **place)})
    with pytest.raises(SourceError, match=r"plan\.bin: weight 'w' is at \d+ of '.*': "):
        check_weights(decode_plans(encode_plans(broken)), model.parent)


def test_a_pin_of_no_value_is_refused(model: Path) -> None:
    graph = graph_of(model)
    with pytest.raises(UsageError, match="the plan has no value 'q'"):
        with_memory_map(make_plan(graph, lower(graph)), RuntimeConfig(regions="sram:1KiB,dram", pins={"q": "sram"}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regions": "sram:2MB,dram"}, "expected NAME:SIZE with a size such as 512KiB or 2MiB"),
        ({"regions": "sram,dram"}, "'sram' has no size"),
        ({"pins": {"h": "sram"}}, "found 'pins' without 'regions'"),
        (
            {"native": True, "backends": ["torch"]},
            "found 'native', which is for the backend plan, with backends torch;",
        ),
        ({"fusions": "all", "backends": ["onnxruntime"]}, "add plan to 'backends', or leave 'fusions' out"),
    ],
)
def test_options_of_plans_are_checked_with_the_configuration(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RuntimeConfig(**settings)


# Which initializers of the final model are the module's parameters.

TEXT = """<ir_version: 10, opset_import: ["": 20]>
g (float[2, 2] x) => (float[2, 2] y) <float[2] bias = {0, 0}, int64[1] start = {0}, int64[1] end = {2}> {
    s = Slice (x, start, end)
    y = Add (s, bias)
}"""


def test_two_zeros_of_float32_are_not_the_start_of_a_slice(tmp_path: Path) -> None:
    """They have the same eight bytes; a start that may be trained is no constant, and was refused (SAM)."""
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "model.onnx")
    parameters = keys_of_parameters(read_model(tmp_path / "model.onnx"), frozenset({"bias"}))
    assert find_trainable(tmp_path / "model.onnx", parameters, ()) == {"bias"}


def test_a_weight_whose_name_has_brackets_is_trainable_by_its_name(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(TEXT)
    model.graph.initializer[0].name = model.graph.node[1].input[1] = "bias[0]"
    onnx.save(model, tmp_path / "model.onnx")
    assert find_trainable(tmp_path / "model.onnx", frozenset(), ("bias[0]",)) == {"bias[0]"}


# What the report's page shows of a model, and up to which size.


@pytest.mark.parametrize(("count", "is_drawn"), [(5_000, True), (5_001, False)])
def test_the_graph_is_drawn_up_to_5000_nodes(count: int, is_drawn: bool) -> None:
    nodes = " ".join(f"v{place + 1} = Relu (v{place})" for place in range(count))
    model = detached(model_of(f"g (float[4] v0) => (float[4] v{count}) {{ {nodes} }}"))
    pictures = take_pictures(passes.optimize(model, [], proof="structure"), model, BrokenStructures())
    assert bool(pictures.view) == is_drawn
    if is_drawn:
        before, after = json.loads(zlib.decompress(b64decode(pictures.view)))["scenes"]
        assert len(before["boxes"]) == len(after["boxes"]) == count + 2  # the input and the output
