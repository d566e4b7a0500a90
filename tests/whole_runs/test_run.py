"""Whole runs on a small attention block: every artifact, the second run, and what each setting changes."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from functools import partial
from pathlib import Path

import onnx
import onnxruntime
import pytest
import yaml
from torch import nn

from passes.weights.detached import read_model
from passes.weights.files import save
from pipeline import Pipeline, RunConfig, RunResult
from pipeline.errors import CheckFailed, ConfigError
from pipeline.events import Event, Note, StageEnded, StageStarted
from pipeline.ir import Role, from_text, to_text

ARTIFACTS = {
    *("exported.onnx", "model.onnx", "log.txt", "run.yaml", "report.html", "report.json"),
    *("ir.json", "ir.txt", "plan.bin", "plan.json"),
}


def run(path: Path, out: Path, *overrides: str) -> tuple[RunResult, list[Event]]:
    events: list[Event] = []
    return Pipeline(RunConfig.from_yaml(path, overrides), out, events.append).run(), events


@pytest.fixture(scope="module")
def journey(config_in, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, list[Event]]:
    """A run that keeps Q, K and V; to be read."""
    folder = tmp_path_factory.mktemp("journey")
    return run(config_in(folder, passes={"keep": ["qkv"]}), folder / "out")


@pytest.fixture(scope="module")
def first(config_in, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, and what came out of it."""
    folder = tmp_path_factory.mktemp("first")
    run(config_in(folder, passes={"recipe": ["eliminate_identity"]}), folder / "out")
    return folder


@pytest.fixture
def ran(first: Path, tmp_path: Path) -> Path:
    """The configuration of a run whose artifacts lie in `out`; for one test to change."""
    shutil.copytree(first, tmp_path, dirs_exist_ok=True)
    return tmp_path / "block.yaml"


def test_the_whole_journey(journey: tuple[RunResult, list[Event]]) -> None:
    result, events = journey

    assert {path.name for path in result.model.parent.iterdir() if path.is_file()} == ARTIFACTS
    ended = [event.name for event in events if isinstance(event, StageEnded)]
    assert ended == ["source", "reference", "export", "passes", "runtime"]
    (source,) = (event.detail for event in events if isinstance(event, StageEnded) and event.name == "source")
    assert source.startswith("1 input, weights: ")
    assert [(verdict.kept, verdict.broken_by) for verdict in result.structures] == [(True, None)]
    assert [backend.name for backend in result.runtime.backends] == ["onnxruntime", "plan"]
    assert all(errors.ok for backend in result.runtime.backends for errors in backend.errors.values())
    onnx.checker.check_model(str(result.model), full_check=True)
    onnxruntime.InferenceSession(str(result.model), providers=["CPUExecutionProvider"])


def test_a_large_module_whose_file_is_of_an_earlier_run_is_gone_when_the_passes_begin(
    config_in, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export moves the weights of its module into the file; here they would stay in memory."""
    settings = {"factory": "circular_attention", "runtime": {"backends": []}}
    config = config_in(tmp_path, passes={"recipe": ["nop"]}, **settings)
    Pipeline(RunConfig.from_yaml(config), tmp_path / "out").run()
    before = {id(module) for module in live_modules()}
    made: list[weakref.ref[nn.Module]] = []
    left: list[nn.Module | None] = []

    def observe(event: Event) -> None:
        if isinstance(event, StageEnded) and event.name == "source":
            made.extend(weakref.ref(module) for module in live_modules() if id(module) not in before)
        if isinstance(event, StageStarted) and event.name == "passes":
            left.extend(reference() for reference in made)

    monkeypatch.setattr("pipeline.model_run.WORTH_COLLECTING", 0)  # a small model stands for a large one
    config = config_in(tmp_path, passes={"recipe": ["eliminate_identity"]}, **settings)
    Pipeline(RunConfig.from_yaml(config), tmp_path / "out", observe).run()

    assert made
    assert left == [None] * len(made)


def live_modules() -> list[nn.Module]:
    return [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]


def test_the_report_keeps_its_promised_keys(journey: tuple[RunResult, list[Event]]) -> None:
    report = json.loads(journey[0].model.with_name("report.json").read_text(), parse_constant=pytest.fail)
    step = next(entry for entry in report["passes"] if entry["name"] == "onnxsim")
    assert {"name", "source", "status", "reason", "nodes_before", "nodes_after", "seconds", "changed"} <= set(step)
    (errors,) = step["errors"].values()
    assert {"max_abs", "max_rel", "cosine", "sqnr_db"} <= set(errors)
    (structure,) = report["structures"]
    assert set(structure) == {"kind", "name", "module", "kept", "broken_by"}
    assert {"onnx", "onnxsim", "onnxoptimizer", "onnxruntime", "torch", "onnxline"} <= set(report["versions"])
    assert (report["format_version"], report["exit_code"], report["failure"]) == (1, 0, "")


def test_the_ir_knows_what_is_a_parameter(journey: tuple[RunResult, list[Event]]) -> None:
    result, _ = journey
    params = result.graph.with_role(Role.PARAM)
    assert sorted(value.spec.shape for value in params) == [(32,)] * 4 + [(32, 32)] * 4
    text = result.model.with_name("ir.txt").read_text()
    assert to_text(from_text(text)) == text


def test_trainable_globs_make_params_of_an_onnx_source(first: Path, tmp_path: Path) -> None:
    model, path = first / "out/model.onnx", tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump({"model": {"onnx": str(model), "trainable": ["q.*"]}, "passes": {"recipe": []}}))
    result, _ = run(path, tmp_path / "second")
    assert result.export.origin == "onnx"
    assert {value.name for value in result.graph.with_role(Role.PARAM)} == {"q.weight", "q.bias"}


def test_a_second_run_does_nothing_again(journey: tuple[RunResult, list[Event]], tmp_path: Path) -> None:
    first, _ = journey
    shutil.copytree(first.model.parents[1], tmp_path, dirs_exist_ok=True)
    before = (tmp_path / "out/model.onnx").stat().st_mtime_ns
    second, events = run(tmp_path / "block.yaml", tmp_path / "out")

    assert first.cached == ()
    assert second.cached == ("export", "passes", "runtime")
    assert [event.cached for event in events if isinstance(event, StageEnded)] == [False, False, True, True, True]
    assert (tmp_path / "out/model.onnx").stat().st_mtime_ns == before
    assert (second.passes, second.structures, second.runtime) == (first.passes, first.structures, first.runtime)


@pytest.mark.parametrize(
    ("override", "again"),
    [
        ("passes.skip=[eliminate_identity]", ("export",)),
        ("runtime.backends=[plan]", ("export", "passes")),
        ("export.opset=19", ()),
        ("model.seed=1", ()),
        ("verify.seed=3", ()),
    ],
)
def test_what_depends_on_a_change_is_done_again(ran: Path, override: str, again) -> None:
    result, _ = run(ran, ran.with_name("out"), override)
    assert result.cached == again


HELPED = """
import json
from pathlib import Path
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
    def forward(self, x):
        return x * self.factor

def make():
    return Scaled(json.loads(Path(__file__).with_name("factor.json").read_text()))
"""


def test_a_model_that_reads_another_file_is_seen_to_have_changed(config_file, tmp_path: Path) -> None:
    (tmp_path / "helped.py").write_text(HELPED)
    (tmp_path / "factor.json").write_text("2.0")
    only = {"passes": {"recipe": []}, "runtime": {"backends": ["onnxruntime"]}}
    path = config_file(**only, model={"factory": str(tmp_path / "helped.py") + ":make"})
    run(path, tmp_path / "out")
    assert run(path, tmp_path / "out")[0].cached == ("export", "passes", "runtime")
    (tmp_path / "factor.json").write_text("7.0")
    assert run(path, tmp_path / "out")[0].cached == ()


def test_a_dtype_that_onnxruntime_cannot_run_is_said_so(config_file, tmp_path: Path) -> None:
    """The evaluator of ONNX proves the passes; onnxruntime is no error unless somebody named it."""
    path = config_file(
        factory="half", model={"inputs": {"x": {"dtype": "bfloat16"}}}, passes={"recipe": ["eliminate_deadend"]}
    )
    result, _ = run(path, tmp_path / "out")
    found = {backend.name: backend.status for backend in result.runtime.backends}
    assert found == {"onnxruntime": "unsupported", "plan": "ran"}
    with pytest.raises(CheckFailed, match="does not run on onnxruntime: onnxruntime refuses the model"):
        run(path, tmp_path / "out", "runtime.backends=[onnxruntime]")


def test_a_model_that_somebody_touched_is_made_again(ran: Path) -> None:
    model = ran.with_name("out") / "model.onnx"
    good = model.read_bytes()
    model.write_bytes(b"not a model")
    second, _ = run(ran, ran.with_name("out"))
    assert second.cached == ("export",)
    assert second.model.read_bytes() == good


def test_weights_are_stored_once_and_every_stage_is_still_known(
    config_file, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a model of more than 100 MB; a change of the recipe brings another data file, into which both point."""
    monkeypatch.setattr("pipeline.export.exported.EXTERNAL_DATA_BYTES", 0)
    monkeypatch.setattr("pipeline.stages.passes.save", partial(save, external_from=0))
    path, out = config_file(passes={"recipe": []}, runtime={"backends": ["onnxruntime"]}), tmp_path / "out"

    def digests() -> set[str]:
        onnx.checker.check_model(str(out / "exported.onnx"))
        return {weight.digest for weight in read_model(out / "exported.onnx").weights.values()}

    first, _ = run(path, out)
    before, (data,) = digests(), out.glob("*.data")
    assert data.name.startswith("model.onnx.")
    assert data.stat().st_size == pytest.approx(first.export.weight_bytes, rel=0.1)
    assert run(path, out)[0].cached == ("export", "passes", "runtime")
    assert run(path, out, "passes.recipe=[onnxsim]")[0].cached == ("export",)
    assert run(path, out, "passes.recipe=[onnxsim]")[0].cached == ("export", "passes", "runtime")
    assert digests() == before
    next(out.glob("model.onnx.*.data")).unlink()
    assert run(path, out)[0].cached == ()
    assert digests() == before


def test_notes_come_again_with_the_stage_that_noted_them(config_file, tmp_path: Path) -> None:
    path = config_file(passes={"recipe": []}, runtime={"backends": ["onnxruntime"]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.stages.passes.take_pictures", lambda *_: 1 / 0)
        run(path, tmp_path / "out")
    again, events = run(path, tmp_path / "out")
    assert again.cached == ("export", "passes", "runtime")
    said = "report.html has no drawings: ZeroDivisionError: division by zero"
    assert [event.text for event in events if isinstance(event, Note)] == [said]
    assert again.report.notes == (said,)


def test_the_resolved_configuration_runs_to_the_same_model(first: Path, tmp_path: Path) -> None:
    second, _ = run(first / "out/run.yaml", tmp_path / "again")
    assert second.model.read_bytes() == (first / "out/model.onnx").read_bytes()


def test_named_dims_are_verified_at_several_sizes(config_file, tmp_path: Path) -> None:
    path = config_file(
        model={"inputs": {"x": {"shape": ["batch", "length", 32]}}, "dims": {"batch": [2, 1, 3], "length": [8, 5]}}
    )
    result, _ = run(path, tmp_path / "out", "passes.keep=[qkv]", "passes.recipe=[fuse_qkv]")
    assert result.export.draws == (
        "draw 0 (batch=2, length=8)",
        "draw 1 (batch=1, length=5)",
        "draw 2 (batch=3, length=5)",
        "draw 3 (batch=2, length=8, floats of ten times their range)",
        "draw 4 (batch=8, length=1)",
        "draw 5 (batch=4, length=7)",
        "draw 6 (batch=7, length=13)",
        "draw 7 (batch=9, length=8)",
    )
    (value,) = onnx.load(result.model).graph.input
    assert [dim.dim_param for dim in value.type.tensor_type.shape.dim] == ["batch", "length", ""]
    assert result.structures[0].kept


def test_strict_makes_a_reverted_step_a_failure(config_file, tmp_path: Path) -> None:
    path = config_file(passes={"skip": ["fuse_qkv"], "recipe": ["onnxsim"]})
    assert run(path, tmp_path / "out")[0].structures[0].broken_by == "onnxsim/fuse_attention"
    with pytest.raises(CheckFailed, match=r"1 step was reverted or failed: onnxsim/fuse_attention reverted"):
        run(path, tmp_path / "out", "passes.strict=true")


def test_an_export_that_differs_is_a_failure_and_leaves_everything_in_place(config_file, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="the exported model does not compute what torch computes"):
        run(config_file(factory="baked"), tmp_path / "out")
    assert (tmp_path / "out/exported.onnx").is_file()
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["exit_code"] == 1
    assert "does not compute what torch computes" in report["failure"]
    assert "does not compute what torch computes" in (tmp_path / "out/report.html").read_text()
    assert report["export"]["errors"]["output"]["max_abs"] > 0


@pytest.mark.parametrize("shape", [{"shape": [4, 8, 32]}, {}], ids=["declared shape", "shape of the example"])
def test_dynamic_shapes_are_an_export_setting(config_file, tmp_path: Path, shape) -> None:
    factory = "attention" if shape else "attention_with_example"
    off = {"passes": {"recipe": []}, "runtime": {"backends": []}}
    path = config_file(factory=factory, **off, export={"dynamic_shapes": {"x": {0: "batch"}}})
    data = yaml.safe_load(path.read_text())
    data["model"]["inputs"] = {"x": shape} if shape else {}
    path.write_text(yaml.safe_dump(data))
    result, _ = run(path, tmp_path / "out")
    assert result.export.inputs == ("x: float32[batch, 8, 32]",)
    (value,) = onnx.load(result.model).graph.input
    assert [dim.dim_param for dim in value.type.tensor_type.shape.dim] == ["batch", "", ""]


def test_dynamic_shapes_of_an_axis_that_is_not_there(config_file, tmp_path: Path) -> None:
    path = config_file(export={"dynamic_shapes": {"x": {3: "batch"}}})
    with pytest.raises(ConfigError, match="axis 3 was asked to be 'batch', but its shape is"):
        run(path, tmp_path / "out")


def test_what_torch_writes_as_sequences_is_taken_apart_or_named(config_file, tmp_path: Path) -> None:
    """By the default recipe of a torch model; a recipe without onnxscript leaves them, and the report says so."""
    path = config_file(factory="modulated", runtime={"backends": ["torch"]})
    result, _ = run(path, tmp_path / "out")
    assert (result.passes[0].name, result.passes[0].status) == ("onnxscript", "ran")
    ops = {node.op_type for node in onnx.load(result.model).graph.node}
    assert ops == {"MatMul", "Split", "Mul", "Add"}, "no Gemm between two Reshapes: these would be more nodes"
    assert result.report.notes == ()

    left, events = run(path, tmp_path / "out", "passes.recipe=[default]")
    [note] = left.report.notes
    assert note.startswith("left over: 3 SequenceAt, 1 SplitToSequence: a sequence is no tensor")
    assert Note(note) in events
    _, events = run(path, tmp_path / "out", "passes.recipe=[default]")
    assert Note(note) in events, "and is said again where nothing is done again"


@pytest.mark.parametrize(("contrib", "count"), [("refuse", 1), ("keep", 0)])
def test_operators_that_onnx_lacks_are_named_where_they_are_refused(contrib: str, count: int, tmp_path: Path) -> None:
    header = '<ir_version: 9, opset_import: ["": 20, "com.microsoft": 1]>'
    body = "g (float[2, 8] x) => (float[2, 8] y) { a = com.microsoft.Gelu (x) y = Relu (a) }"
    onnx.save(onnx.parser.parse_model(header + body), tmp_path / "gelu.onnx")
    settings = {"model": {"onnx": "gelu.onnx"}, "passes": {"recipe": [], "contrib": contrib}}
    notes = Pipeline(RunConfig.from_mapping(settings, tmp_path), tmp_path / "out").run().report.notes
    left = [note for note in notes if note.startswith("passes.contrib: com.microsoft::Gelu 'a' is left of the source")]
    assert len(left) == count
