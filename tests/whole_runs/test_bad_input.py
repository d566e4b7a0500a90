"""Everything that can be given wrong, and everything that can stop a run: one message, the right exit code, no harm."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml

from pipeline.report import RuntimeReport
from pipeline.verify.references import has_nan
from pipeline.workspace import Workspace
from tests.support.processes import start_forked


@pytest.fixture
def command(command_line, tmp_path):
    """The command line into `out`: exit code, and what it says on standard error."""

    def ask(*words: str | Path) -> tuple[int, str]:
        code, _, said = command_line(*words, "--out", tmp_path / "out")
        return code, said

    return ask


def one_message(text: str) -> bool:
    return text.startswith("onnxline: ") and "Traceback" not in text


def test_malformed_yaml(command, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("model: {onnx: a.onnx\n")
    code, said = command("run", path)
    assert code == 2
    assert one_message(said)
    assert "bad.yaml:2" in said


def test_a_missing_configuration(command, tmp_path: Path) -> None:
    code, said = command("run", tmp_path / "none.yaml")
    assert (code, one_message(said)) == (2, True)
    assert "none.yaml" in said


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("passes.recipe=[fuse_qvk]", "no pass named 'fuse_qvk'; did you mean 'fuse_qkv'?"),
        ("passes.skip=[nothing_like_it]", "skip: no pass named 'nothing_like_it'"),
        ("passes.kep=[qkv]", "did you mean"),
        ("model.inputs.x.shape=[2, 8, 31]", "31"),
        ("model.factory=nowhere.py:make", "nowhere.py"),
    ],
)
def test_a_wrong_setting(config_file, command, override: str, words: str) -> None:
    code, said = command("run", config_file(), "--set", override)
    assert code == 2, said
    assert one_message(said)
    assert words in said


def test_a_factory_that_raises(config_file, command) -> None:
    code, said = command("run", config_file(factory="broken"))
    assert (code, one_message(said)) == (2, True)
    assert "no weights today" in said
    assert "factories.py" in said


@pytest.mark.parametrize("content", ["missing", "empty", "garbage", "truncated"])
def test_a_broken_onnx_file(command, tmp_path: Path, content: str) -> None:
    model = tmp_path / "model.onnx"
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { a = Neg (x) y = Abs (a) }'
    whole = onnx.parser.parse_model(text).SerializeToString()
    if content != "missing":
        model.write_bytes({"empty": b"", "garbage": b"\x07garbage" * 9, "truncated": whole[: len(whole) // 2]}[content])
    path = tmp_path / "file.yaml"
    path.write_text(f"model: {{onnx: {model}}}\n")
    code, said = command("run", path)
    assert (code, one_message(said)) == (2, True), said
    assert "model.onnx" in said


def from_text(tmp_path: Path, graph: str) -> Path:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g {graph}')
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    path = tmp_path / "file.yaml"
    path.write_text(f"model: {{onnx: {tmp_path / 'model.onnx'}}}\n")
    return path


@pytest.mark.parametrize(
    "graph",
    [
        "(float[2] x) => (float[2] y) { y = Abs (a) a = Neg (x) }",
        '(int64[2] x) => (string[2] y, int64[2] z) <string[3] s = {"a", "b", "c"}> { y = Gather (s, x) z = Neg (x) }',
        '(int64[2] x) => (string[2] y) { s = Constant <value = string[2] {"a", "b"}> () y = Gather (s, x) }',
        '(int64[2] x) => (string[2] y) { s = Constant <value_strings = ["a", "b"]> () y = Gather (s, x) }',
    ],
    ids=["unsorted", "string initializer", "string Constant", "value_strings"],
)
def test_an_odd_onnx_file_that_onnxruntime_takes(command, tmp_path: Path, graph: str) -> None:
    code, said = command("run", from_text(tmp_path, graph), "--set", "runtime.backends=[onnxruntime]")
    assert code == 0, said
    onnx.checker.check_model(str(tmp_path / "out/model.onnx"))


@pytest.mark.parametrize("setting", ["output_names=[q]", "opset=17", "functions=layers", "dynamic_shapes={x: {0: n}}"])
def test_export_settings_of_an_onnx_file_are_refused(command, tmp_path: Path, setting: str) -> None:
    path = from_text(tmp_path, "(float[2] x) => (float[2] y) { y = Neg (x) }")
    code, said = command("run", path, "--set", f"export.{setting}")
    key = setting.partition("=")[0]
    assert (code, one_message(said)) == (2, True)
    assert f"export.{key}: an ONNX file is not exported and stays as it is; leave this key out" in said


def test_a_final_model_that_is_not_valid(command, tmp_path: Path, monkeypatch) -> None:
    checked: list[object] = []

    def refuse_the_final_model(model: object, *_: object, **__: object) -> None:
        checked.append(model)
        if len(checked) > 2:  # after the result of the one step that changes something, and the source
            raise onnx.checker.ValidationError("no good")

    path = from_text(tmp_path, "(float[2] x) => (float[2] y) { y = Neg (x) }")
    monkeypatch.setattr(onnx.checker, "check_model", refuse_the_final_model)
    code, said = command("run", path)
    assert (code, one_message(said)) == (1, True), said
    assert "the final model is not valid ONNX, so it was not written: no good" in said
    assert not (tmp_path / "out/model.onnx").exists()


@pytest.mark.parametrize("entry", [{"offset": "-8"}, {"length": "banana"}, {"length": "4"}])
def test_external_data_that_is_described_wrongly(command, tmp_path: Path, entry: dict[str, str]) -> None:
    path = from_text(tmp_path, "(float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Add (x, w) }")
    model = onnx.load(tmp_path / "model.onnx")
    tensor = model.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": "w.bin", **entry}.items():
        tensor.external_data.add(key=key, value=value)
    (tmp_path / "w.bin").write_bytes(bytes(8))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    code, said = command("run", path)
    assert (code, one_message(said)) == (2, True), said
    assert "model.onnx" in said
    assert "'w'" in said


def test_nothing_finite_in_the_reference(command, tmp_path: Path) -> None:
    path = from_text(tmp_path, "(float[2] x) => (float[2] y) <float[1] z = {0}> { a = Div (x, z) y = Abs (a) }")
    code, said = command("run", path)
    assert (code, one_message(said)) == (2, True), said
    assert "no output of the reference holds a finite number" in said


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [complex(np.nan, 0), complex(0, np.nan)])
def test_complex_outputs_are_read_whole(bad: complex) -> None:
    assert has_nan(np.array([1j, bad]))
    assert not has_nan(np.array([1j, complex(np.inf, 0)]))


@pytest.mark.parametrize("content", ["[]", '"x"', "{}", '{"key": %s, "record": []}', "[" * 10000, "\x00"])
def test_a_damaged_record_is_none(tmp_path: Path, content: str) -> None:
    workspace = Workspace(tmp_path)
    workspace.stages.mkdir()
    (workspace.stages / "runtime.json").write_text(content.replace("%s", '"k"'))
    assert workspace.load("runtime", "k", RuntimeReport) is None


@pytest.mark.parametrize("name", ["model.onnx", ".stages/export.json", "report.json", "log.txt"])
def test_a_folder_where_a_file_goes(config_file, command, tmp_path: Path, name: str) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    code, said = command("run", config_file(passes={"recipe": []}, runtime={"backends": []}))
    assert name.rpartition("/")[2] in said or code == 0
    assert (code, one_message(said)) == (2, True) or name == "log.txt", said


def test_a_folder_name_that_is_too_long(config_file, command_line, tmp_path: Path) -> None:
    code, _, said = command_line("run", config_file(), "--out", tmp_path / ("n" * 300))
    assert (code, one_message(said)) == (2, True), said


def test_nan_in_the_reference(config_file, command) -> None:
    code, said = command("run", config_file(factory="root"))
    assert (code, one_message(said)) == (2, True)
    assert "output 'output' of the reference holds NaN" in said


def test_a_failed_check_is_exit_code_1(config_file, command) -> None:
    code, said = command("run", config_file(factory="baked"))
    assert (code, one_message(said)) == (1, True)


def test_a_folder_that_cannot_be_made(config_file, command_line, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    code, _, said = command_line("run", config_file(), "--out", tmp_path / "file")
    assert (code, one_message(said)) == (2, True)
    assert f"{tmp_path / 'file'} is a file; choose another folder" in said
    assert (tmp_path / "file").read_text() == "in the way"


class Started:
    """A run in a process of its own."""

    def __init__(self, path: Path, out: Path, file_limit: int = 0) -> None:
        self._said = path.with_suffix(".txt")
        self.process = start_forked("-m", "onnxline", "run", path, "--out", out, said=self._said, file_limit=file_limit)

    def wait_for(self, path: Path) -> None:
        deadline = time.monotonic() + 90
        while not path.exists():
            assert self.process.is_alive(), self.end()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self) -> tuple[int | None, str]:
        """The exit code, and all that it has said."""
        self.process.join(120)
        return self.process.exitcode, self._said.read_text(encoding="utf-8")


def wholesome(out: Path) -> None:
    """Whatever stands under a final name is whole."""
    for path in out.glob("*.onnx"):
        onnx.checker.check_model(str(path))
    for path in [*out.glob("*.json"), *out.glob(".stages/*.json")]:
        json.loads(path.read_text())
    for path in out.glob("*.yaml"):
        yaml.safe_load(path.read_text())


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
@pytest.mark.parametrize("moment", [".stages/lock", ".stages/export.json", ".stages/passes.json"])
def test_a_stopped_run_goes_on_where_it_was(
    config_file, command_line, tmp_path: Path, signal_: signal.Signals, moment: str
) -> None:
    passes = {"recipe": ["eliminate_identity", "onnxsim"], "keep": ["qkv"]}
    path, out = config_file(passes=passes, runtime={"backends": ["onnxruntime"]}), tmp_path / "out"
    started = Started(path, out)
    started.wait_for(out / moment)
    os.kill(started.process.pid or 0, signal_)
    code, said = started.end()
    if signal_ is signal.SIGINT:
        assert "Traceback" not in said
        if code != 0:  # it had finished before the signal came
            assert code == 130, said
            assert "onnxline: stopped; what was finished is kept, run the same command again to go on" in said
    wholesome(out)

    code, said, _ = command_line("run", path, "--out", out)

    assert code == 0, said
    wholesome(out)
    assert not list(out.rglob("*.tmp"))
    if moment == ".stages/passes.json":
        assert "export: unchanged" in said


def test_a_full_disk(config_file, command, tmp_path: Path) -> None:
    """The kernel refuses files over 64 KiB, as a full disk does, while an older run's files are there."""
    off = {"passes": {"recipe": []}, "runtime": {"backends": []}}
    path = config_file(model={"args": {"width": 256}, "inputs": {"x": {"shape": [2, 8, 256]}}}, **off)
    out = tmp_path / "out"
    assert command("run", config_file("small", **off))[0] == 0
    before = (out / "model.onnx").read_bytes()

    code, said = Started(path, out, file_limit=2**16).end()

    assert code == 2, said
    assert "Traceback" not in said
    assert "onnxline: " in said
    assert (out / "model.onnx").read_bytes() == before
    wholesome(out)


def test_two_runs_into_one_folder(tmp_path: Path, command) -> None:
    path = from_text(tmp_path, "(float[2] x) => (float[2] y) { y = Neg (x) }")
    first = Started(path, tmp_path / "out")
    first.wait_for(tmp_path / "out/.stages/lock")
    code, said = command("run", path)
    assert code == 2
    assert "another run is writing to" in said
    assert "files:" in first.end()[1]


def test_an_onnx_source_that_never_ends_or_dies_ends_in_one_message(command, tmp_path: Path, monkeypatch) -> None:
    """It runs in the proof worker, under the limit that its declared sizes explain."""
    monkeypatch.setattr("passes.load.values.LEAST_SECONDS", 1.0)
    text = """<ir_version: 10, opset_import: ["" : 21]>
    endless (float[2] x) => (float[2] y) {
        trips = Constant <value = int64 {9223372036854775807}> ()
        go = Constant <value = bool {1}> ()
        y = Loop (trips, go, x) <body = step (int64 i, bool c, float[2] s) => (bool c2, float[2] s2) {
            c2 = Identity (c)
            s2 = Add (s, s)
        }>
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "endless.onnx")
    config = tmp_path / "endless.yaml"
    config.write_text(yaml.safe_dump({"name": "endless", "model": {"onnx": str(tmp_path / "endless.onnx")}}))
    code, said = command("run", config)
    assert (code, one_message(said)) == (2, True), said
    assert "does not run as it is" in said and "was stopped" in said
