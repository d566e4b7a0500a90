"""`onnxline plan`: what it prints, draws and traces of a run with a small model."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from click.testing import Result
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.errors import ConfigError, SourceError, UsageError
from pipeline.importers import from_onnx
from pipeline.lowering import lower
from pipeline.ops import emitter_of
from pipeline.planning import PlanFile, encode_plans, make_plan
from pipeline.stages.plan_files import write_plan_files
from pipeline.workspace import Workspace

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run: model.onnx with its plan. h and s take 256 bytes each, and y the place of s."""
    folder = tmp_path_factory.mktemp("run")
    w = numpy_helper.from_array(np.ones((8, 8), np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Softmax", ["h"], ["s"]),
        helper.make_node("Mul", ["s", "h"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 8]) for name in "xy")
    graph = helper.make_graph(nodes, "small", [x], [y], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), folder / "model.onnx")
    imported = from_onnx(folder / "model.onnx", emitter_of=emitter_of)
    plan = make_plan(imported, lower(imported))
    write_plan_files(plan, imported, folder / "model.onnx", Workspace(folder))
    (folder / "cut.plan").write_bytes((folder / "plan.bin").read_bytes()[:-1])
    (folder / "other.json").write_text('{"format_version": 0}')
    (folder / "two.bin").write_bytes(encode_plans(PlanFile({"prefill": plan, "decode": plan})))
    return folder


def call(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", ["", "plan.bin", "plan.json"])
def test_show(folder: Path, name: str) -> None:
    lines = call("show", folder / name).splitlines()
    assert lines[0].startswith("plan of graph 'small', digest ")
    assert lines[1:] == [
        "calls: 3, of which 0 are views and do nothing: 1 MatMul, 1 Softmax, 1 Mul",
        "called by name (Aten): 0",
        "arena: 512 B, at least 512 B are alive at once (1.000 x); 1 alias",
        "peak: 512 B in call 1, Softmax:",
        "        256 B  h  bytes 0 to 256, calls 0 to 2",
        "        256 B  s  bytes 256 to 512, calls 1 to 3",
    ]


def test_show_checks_weights_where_it_is_asked_to(folder: Path, tmp_path: Path) -> None:
    first = call("show", folder, "--check-weights").splitlines()[0]
    assert first == "weights: 1, 256 B, with the bytes that the plan was made with"
    (tmp_path / "plan.bin").write_bytes((folder / "plan.bin").read_bytes())
    (tmp_path / "model.onnx").write_bytes(
        (folder / "model.onnx").read_bytes().replace(np.float32(1).tobytes(), b"\0\0\0\0")
    )
    assert call("show", tmp_path).startswith("plan of graph")
    with pytest.raises(SourceError, match=rf"^{tmp_path}/plan\.bin: weight 'w' .* has not the bytes"):
        call("show", tmp_path, "--check-weights")
    with pytest.raises(UsageError, match=r"expected a plan\.bin"):
        call("show", folder / "plan.json", "--check-weights")


def test_show_regions_and_pins(folder: Path) -> None:
    lines = call("show", folder, "--regions", "sram:256B,dram", "--pin", "h=dram").splitlines()
    assert lines[-2:] == [
        "region sram: 256 B of 256 B used, 1 value, 0 copies into it (0 B)",
        "region dram: 256 B used, 1 value, 0 copies into it (0 B)",
    ]


def test_the_picture_has_a_bar_for_each_value(folder: Path, tmp_path: Path) -> None:
    assert call("show", folder, "--regions", "sram:1KiB,dram", "--svg", tmp_path / "a.svg").endswith("a.svg\n")
    panels = ElementTree.parse(tmp_path / "a.svg").getroot().findall(f"{SVG}g")
    titles = [[bar.findtext(f"{SVG}title") for bar in panel.findall(f"{SVG}rect")] for panel in panels]
    both = [
        "h: float32[8, 8], 256 B, made by MatMul, bytes 0 to 256, calls 0 to 2",
        "s: float32[8, 8], 256 B, made by Softmax, bytes 256 to 512, calls 1 to 2",
    ]
    assert titles == [both, both, []]
    (line,) = panels[0].findall(f"{SVG}polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert heights == [156.0, 156.0, 26.0, 26.0, 26.0, 26.0]  # half of 260, then all of it


def test_trace(folder: Path, tmp_path: Path) -> None:
    printed = call("trace", folder, "-o", tmp_path / "trace.json", "--runs", "2")
    assert printed.startswith("6 launches in 2 runs: ")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    launches = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in launches] == ["MatMul", "Softmax", "Mul"] * 2
    assert [event["args"]["bytes"] for event in events if event["ph"] == "C"] == [256, 512, 512] * 2
    ends = [event["ts"] + event["dur"] for event in launches]
    assert all(end <= event["ts"] + 0.001 for end, event in zip(ends, launches[1:], strict=False))
    assert launches[0]["args"]["reads"] == ["x: float32[8, 8]", "w: float32[8, 8]"]


def test_a_trace_runs_what_the_run_ran(tmp_path: Path) -> None:
    """With its fusions, and with what another runtime computes."""
    text = """<ir_version: 10, opset_import: ["": 20]> m
        (float[1, 2, 5, 5] x, float[1, 18, 4, 4] d) => (float[1, 1, 4, 4] y)
        <float[1, 2, 3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9}, float[4, 4] v = {
            1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7}>
        { c = DeformConv <kernel_shape = [3, 3], pads = [1, 0, 0, 1]> (x, w, d) p = MatMul (c, v) y = Relu (p) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    settings = {
        "model": {"onnx": "m.onnx"},
        "passes": {"recipe": []},
        "runtime": {"backends": ["plan"], "fusions": "all"},
    }
    (tmp_path / "m.yaml").write_text(json.dumps(settings))
    out = tmp_path / "out"
    assert CliRunner().invoke(app, ["run", str(tmp_path / "m.yaml"), "--out", str(out), "-q"]).exit_code == 0
    assert call("trace", out, "-o", tmp_path / "trace.json", "--runs", "1").startswith("2 launches in 1 run")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["DeformConv", "LinearPointwise"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["show", "two.bin"], UsageError, "has the entry points prefill, decode; choose one by --entry"),
        (["show", "two.bin", "--entry", "decod"], UsageError, "no entry point 'decod'; did you mean 'decode'"),
        (["show", "none.bin"], UsageError, "there is no file"),
        (["show", "model.onnx"], SourceError, r"/model\.onnx: it does not begin as a plan does"),
        (["show", "cut.plan"], SourceError, r"/cut\.plan: it has \d+ bytes and says \d+"),
        (["show", "other.json"], SourceError, r"/other\.json: found format_version 0, expected"),
        (["show", "plan.bin", "--pin", "h=sram"], UsageError, "no regions were given; add --regions"),
        (["show", "plan.bin", "--regions", "sram:1KiB,dram", "--pin", "h"], UsageError, "expected VALUE=REGION"),
        (
            ["show", "plan.bin", "--regions", "sram:1KiB,dram", "--pin", "h=sram", "--pin", "h=dram"],
            UsageError,
            "--pin: 'h' is pinned to 'sram' and to 'dram'; leave one of them out",
        ),
        (["show", "plan.bin", "--regions", ""], UsageError, "found '', expected NAME:SIZE"),
        (["trace", "none"], UsageError, "none does not exist; expected the folder of a run"),
        (["trace", "", "-o", "none/trace.json", "--runs", "1"], UsageError, r"cannot write to none/trace\.json"),
    ],
)
def test_mistakes_are_named(folder: Path, arguments: list[str], error: type[Exception], message: str) -> None:
    command, path, *rest = arguments
    with pytest.raises(error, match=message):
        call(command, folder / path, *rest)


def test_run_takes_regions_as_text_and_not_as_yaml(folder: Path, tmp_path: Path) -> None:
    """An empty variable of a shell is no wish for no regions, and a space after a colon makes no mapping."""

    def run(regions: str) -> Result:
        return CliRunner().invoke(
            app, ["run", str(folder / "model.onnx"), "--dry-run", "--out", str(tmp_path / "out"), "--regions", regions]
        )

    assert run("sram: 2MiB, dram").exit_code == 0
    for regions, found in (("", "found '', expected NAME:SIZE"), ("5", "found the name '5', expected one that begins")):
        error = run(regions).exception
        assert isinstance(error, ConfigError)
        assert f"runtime.regions: {found}" in str(error)


def test_an_entry_point_is_chosen(folder: Path) -> None:
    assert call("show", folder / "two.bin", "--entry", "decode") == call("show", folder)
