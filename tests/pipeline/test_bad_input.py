"""Everything that can be given wrong, and everything that can stop a run: one message, the right exit code, no harm."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
import yaml

from pipeline.cli import _exit_code

ROOT = Path(__file__).parents[2]


def onnxline(*words: str | Path, capsys, monkeypatch) -> tuple[int, str]:
    """The command line in this process: exit code and what it says on standard error."""
    monkeypatch.setattr(sys, "argv", ["onnxline", *map(str, words)])
    code = _exit_code()
    return code, capsys.readouterr().err


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    return lambda *words: onnxline(*words, "--out", tmp_path / "out", capsys=capsys, monkeypatch=monkeypatch)


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


def test_nan_in_the_reference(config_file, command) -> None:
    code, said = command("run", config_file(factory="root"))
    assert (code, one_message(said)) == (2, True)
    assert "output 'output' of the reference holds NaN" in said


def test_a_failed_check_is_exit_code_1(config_file, command) -> None:
    code, said = command("run", config_file(factory="baked"))
    assert (code, one_message(said)) == (1, True)


def test_a_folder_that_cannot_be_made(config_file, capsys, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    words = ("run", config_file(), "--out", tmp_path / "file")
    code, said = onnxline(*words, capsys=capsys, monkeypatch=monkeypatch)
    assert (code, one_message(said)) == (2, True)
    assert (tmp_path / "file").read_text() == "in the way"


def start(path: Path, out: Path, **options) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "pipeline.cli", "run", str(path), "--out", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd=ROOT, start_new_session=True, **pipes, **options)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
def test_a_stopped_run_goes_on_where_it_was(config_file, tmp_path: Path, signal_: signal.Signals, moment: str) -> None:
    path, out = config_file(passes={"keep": ["qkv"]}), tmp_path / "out"
    process = start(path, out)
    wait_for(out / moment, process)
    os.kill(process.pid, signal_)
    said, _ = process.communicate(timeout=60)
    if signal_ is signal.SIGINT:
        assert process.returncode in (130, 0), said
        assert "Traceback" not in said
    wholesome(out)

    again = start(path, out)
    said, _ = again.communicate(timeout=120)

    assert again.returncode == 0, said
    wholesome(out)
    assert not list(out.rglob("*.tmp"))
    if moment == ".stages/passes.json":
        assert "export: unchanged" in said


def test_a_full_disk(config_file, tmp_path: Path) -> None:
    """The kernel refuses files over 64 KiB, as a full disk does, while an older run's files are there."""
    path, out = config_file(model={"args": {"width": 256}, "inputs": {"x": {"shape": [2, 8, 256]}}}), tmp_path / "out"
    small = start(config_file("small"), out)
    assert "files:" in small.communicate(timeout=120)[0]
    before = (out / "model.onnx").read_bytes()

    def full() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))

    process = start(path, out, preexec_fn=full)
    said, _ = process.communicate(timeout=120)

    assert process.returncode == 2, said
    assert "Traceback" not in said
    assert "onnxline: " in said
    assert (out / "model.onnx").read_bytes() == before
    wholesome(out)


def test_two_runs_into_one_folder(config_file, tmp_path: Path, command) -> None:
    path = config_file()
    first = start(path, tmp_path / "out")
    wait_for(tmp_path / "out/.stages/lock", first)
    code, said = command("run", path)
    assert code == 2
    assert "another run is writing to" in said
    assert "files:" in first.communicate(timeout=120)[0]
