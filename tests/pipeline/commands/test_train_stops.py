"""`onnxline train` is killed, stopped, or finds the disk full: what has a final name is whole, and it goes on."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import pytest
import safetensors.torch
import torch
import yaml
from typer.testing import CliRunner, Result

from pipeline.cli import app
from pipeline.errors import UsageError
from pipeline.training import record_step
from tests.support.processes import run_forked

CODE = """
import os, signal
import torch
from torch import nn


class Wide(nn.Module):
    def __init__(self, stop):
        super().__init__()
        self.first, self.second, self.stop = nn.Linear(4, 4000), nn.Linear(4000, 3), stop

    def forward(self, x):
        if not self.training:
            interrupt(self.stop)
        return self.second(torch.relu(self.first(x)))


def make(stop="no file"):
    return Wide(stop)


def batches(epoch):
    draw = torch.Generator().manual_seed(epoch)
    for _ in range(4):
        x = torch.randn(6, 4, generator=draw)
        yield x, x.argmax(1) % 3


def evaluate_or_stop(module):
    interrupt(module.stop)
    return {"bias": module.second.bias.sum()}


def interrupt(path):
    if os.path.exists(path):
        os.remove(path)
        os.kill(os.getpid(), signal.SIGINT)
"""

KILL = """
import os, signal, sys

name = sys.argv.pop(1)


def kill(event, arguments):
    if event == "os.rename" and os.path.basename(arguments[1]) == name:
        os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(kill)
from pipeline.cli import main

main()
"""
"""Runs the command line, and is killed when a file is whole and about to get the given name."""


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, also where these tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def write_config(folder: Path) -> Path:
    (folder / "net.py").write_text(CODE)
    data = {
        "name": "wide",
        "model": {"factory": "net.py:make", "args": {"stop": str(folder / "stop")}},
        "passes": {"recipe": []},
        "runtime": {"backends": ["onnxruntime"]},
        "train": {"batches": "net.py:batches", "epochs": 2, "optimizer": {"name": "adam"}, "export": False},
    }
    (folder / "wide.yaml").write_text(yaml.safe_dump(data))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a training that nothing stops."""
    folder = write_config(tmp_path_factory.mktemp("whole"))
    assert call(folder, "out").exit_code == 0
    return weights(folder / "out")


def assert_same_weights(folder: Path, whole: dict[str, torch.Tensor]) -> None:
    found = weights(folder)
    assert found.keys() == whole.keys() and all(torch.equal(found[key], whole[key]) for key in whole)


def call(folder: Path, out: str, *overrides: str) -> Result:
    settings = [word for override in overrides for word in ("--set", override)]
    return CliRunner().invoke(
        app, ["train", str(folder / "wide.yaml"), "--quiet", "--out", str(folder / out), *settings]
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "weights.safetensors")


def refuse_halves(folder: Path) -> None:
    """Read each file that has a final name."""
    for path in folder.rglob("*"):
        if path.name.startswith("."):
            continue
        if path.suffix == ".safetensors":
            safetensors.torch.load_file(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".onnx":
            onnx.checker.check_model(path)


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file gets longer than `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["train.safetensors", "weights.safetensors", "model.onnx", "report.json"])
def test_a_killed_training_goes_on_to_the_same_bits(name: str, folder: Path, whole: dict[str, torch.Tensor]) -> None:
    exported = name == "model.onnx"  # the first such file is that of the main job
    settings = f"train.export={str(exported).lower()}"
    words = ("-c", KILL, name, "train", "wide.yaml", "--quiet", "--out", "killed", "--set", settings)
    assert run_forked(*words, folder=folder).returncode == -signal.SIGKILL
    refuse_halves(folder / "killed")
    assert not (folder / "killed" / name).exists()
    (folder / "killed" / ".tmpzyavh3").touch()  # which safetensors leaves where it is killed
    result = call(folder, "killed", settings)
    assert result.exit_code == 0, result.output
    assert_same_weights(folder / "killed", whole)
    assert not [*(folder / "killed").rglob(".*.tmp"), *(folder / "killed").glob(".tmp*")]
    assert not (folder / "killed" / "earlier").exists()
    if exported:
        assert call(folder, "whole", settings).exit_code == 0
        assert (folder / "whole" / name).read_bytes() == (folder / "killed" / name).read_bytes()


@pytest.mark.parametrize("where", ["evaluate", "export"])
def test_ctrl_c_after_the_steps_is_reported_and_leaves_the_weights(
    where: str, folder: Path, whole: dict[str, torch.Tensor]
) -> None:
    settings = (
        ("train.export=true",) if where == "export" else (f"train.evaluate={folder / 'net.py'}:evaluate_or_stop",)
    )
    (folder / "stop").touch()
    assert call(folder, "out", *settings).exit_code == 130
    assert not (folder / "stop").exists()
    report = json.loads((folder / "out" / "report.json").read_text())
    assert (report["exit_code"], report["failure"], report["training"]["steps"]) == (130, "stopped", 8)
    assert "weights.safetensors" in report["files"]
    assert "model.onnx" not in report["files"]
    assert call(folder, "out", *settings).exit_code == 0
    assert_same_weights(folder / "out", whole)


def test_a_full_disk_is_one_sentence_and_the_training_goes_on(folder: Path, whole: dict[str, torch.Tensor]) -> None:
    with full_disk(100_000):  # less than the weights, more than the reports
        result = call(folder, "out")
    assert isinstance(result.exception, UsageError)
    path = folder / "out" / "train.safetensors"
    assert str(result.exception) == f"cannot write to {path}: File too large; what was there before is unharmed"
    assert not path.exists()
    assert json.loads((folder / "out" / "report.json").read_text())["failure"] == str(result.exception)
    with full_disk(300):  # less than the report of the failure, which hides nothing
        result = call(folder, "out")
    assert isinstance(result.exception, UsageError)
    assert str(path) in str(result.exception)
    refuse_halves(folder / "out")
    assert call(folder, "out").exit_code == 0
    assert_same_weights(folder / "out", whole)


def test_a_full_disk_while_onnx_is_written_leaves_the_training(folder: Path) -> None:
    """Without moments the states are hardly more than the weights, and the exported model has more beside these."""
    simple = "train.optimizer.name=sgd"
    assert call(folder, "out", simple).exit_code == 0
    with full_disk((folder / "out" / "train.safetensors").stat().st_size + 100):
        result = call(folder, "out", simple, "train.export=true")
    assert isinstance(result.exception, UsageError)
    assert "File too large" in str(result.exception)
    assert "only its ONNX file was not made" in "".join(result.exception.__notes__)
    refuse_halves(folder / "out")
    assert not (folder / "out" / "model.onnx").exists()
    assert call(folder, "out", simple, "train.export=true").exit_code == 0
    onnx.checker.check_model(folder / "out" / "model.onnx")


def test_states_that_do_not_fit_onto_the_disk_leave_those_before(tmp_path: Path) -> None:
    module = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    batch = torch.randn(4, 100), torch.randn(4, 100)
    program = record_step(module, torch.nn.MSELoss(), optimizer, batch)
    path = tmp_path / "states.safetensors"
    program.save(path)
    before = path.read_bytes()
    program.step(batch)
    with full_disk(1000), pytest.raises(UsageError, match="File too large; what was there before is unharmed"):
        program.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
