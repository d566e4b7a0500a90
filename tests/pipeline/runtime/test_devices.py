"""Devices by name, what is refused without a card, and what the runtime imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.errors import Unsupported
from pipeline.ir.graph import TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.runtime import compile_graph
from pipeline.runtime.devices import CPU, CudaDevice, find_device
from pipeline.runtime.kernels.cuda import launches
from pipeline.runtime.recording import RecordingDevice
from pipeline.runtime.recording_memory import DeviceGenerator

WITHOUT_CARD = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


def test_the_cpu_is_one_device() -> None:
    assert find_device("cpu") is find_device(torch.device("cpu")) is find_device(CPU) is CPU


@pytest.mark.parametrize("name", ["mps", "cuda:one", "gpu"])
def test_a_device_without_kernels_is_refused(name: str) -> None:
    with pytest.raises(Unsupported, match=f"device '{name}': this release has kernels for cpu and cuda"):
        find_device(name)


@WITHOUT_CARD
@pytest.mark.parametrize(
    "command",
    [
        ("run", "run.yaml", "--device", "cuda"),
        ("check", "run.yaml", "--set", "runtime.device=cuda"),
        ("train", "run.yaml", "--out", "out", "--set", "train.device=cuda"),
        ("train", "run.yaml", "--out", "out", "--set", "runtime.device=cuda"),
    ],
)
def test_without_a_card_one_sentence_says_so_before_anything_is_opened(
    command: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that was built, a batch that was drawn, or a folder of an earlier training: nothing is lost."""
    monkeypatch.chdir(tmp_path)
    code = "def make():\n    open('opened', 'w')\ndef batches(epoch):\n    open('opened', 'w')\n"
    Path("code.py").write_text(code)
    train = "{batches: code.py:batches}"
    Path("run.yaml").write_text(f"name: x\nmodel: {{factory: code.py:make}}\ntrain: {train}\n")
    Path("out").mkdir()
    Path("out", "weights.safetensors").write_text("of an earlier training")
    found = CliRunner().invoke(app, command)
    assert isinstance(found.exception, Unsupported)
    assert found.exception.exit_code == 2
    assert "device 'cuda': torch" in str(found.exception)
    assert "sees no CUDA device on this machine" in str(found.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code.py", "out", "run.yaml"]
    assert Path("out", "weights.safetensors").read_text() == "of an earlier training"


def test_values_on_two_devices_have_no_plan() -> None:
    builder = GraphBuilder("two")
    x = builder.input("x", TensorSpec((2,), "float32", "cuda:0"))
    graph = builder.build(builder.emit("aten.neg.default", [x], [("y", TensorSpec((2,), "float32"))]))
    with pytest.raises(Unsupported, match="has values on cuda:0, cpu, and a plan runs on one device"):
        compile_graph(graph)
    found = compile_graph(graph, device="cpu").run({"x": torch.ones(2)})["y"]
    assert found.tolist() == [-1, -1]


def test_parts_of_an_arena_are_storages_of_their_own() -> None:
    """`CudaDevice.cut`, on memory of the CPU: a part keeps the arena alive, and cannot be resized."""
    memory = torch.zeros(64, dtype=torch.uint8)
    part = CudaDevice.slice_bytes(CPU, memory, 16, 32)  # type: ignore[arg-type]
    assert part.data_ptr() == memory.data_ptr() + 16
    assert part.untyped_storage().nbytes() == 16
    del memory
    assert part.sum() == 0
    with pytest.raises(RuntimeError):
        part.resize_(64)


def test_triton_counts_as_there_only_with_what_builds_its_launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some systems have a compiler of C and no headers of Python: the first launch of each kernel would fail."""
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setattr(launches, "get_path", lambda _: str(tmp_path))
    assert not launches.has_triton.__wrapped__()
    (tmp_path / "Python.h").touch()
    assert launches.has_triton.__wrapped__()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not launches.has_triton.__wrapped__()


BLOCKED = (
    *("onnxsim", "onnxoptimizer", "pydantic", "transformers", "typer", "rich", "yaml", "safetensors"),
    *("blake3", "orjson", "zstandard"),
)
"""What the machine of benchmarks/cuda/run.sh need not have."""


def test_plans_run_and_steps_are_recorded_without_what_other_commands_need() -> None:
    code = f"""
import sys
for name in {BLOCKED}: sys.modules[name] = None
import torch
from pipeline.importers.from_torch import from_torch
from pipeline.importers.from_torch.functionalize import functionalize_program
from pipeline.runtime import compile_graph
graph = from_torch(functionalize_program(torch.export.export(torch.nn.Linear(2, 1), (torch.ones(1, 2),), strict=False)))
assert graph.ops
# 43 MiB, for graphs that have no such node.
assert not {{"onnxruntime", "onnxscript", "onnx.reference"}} & sys.modules.keys()
import benchmarks.cuda.rows
from benchmarks.cuda.checks import CHECKS
from pipeline.runtime.recording import RecordingDevice
from pipeline.runtime.recording_memory import DeviceGenerator
CHECKS["capture"](RecordingDevice(2**22))
CHECKS["train-mlp"](RecordingDevice(2**24))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


class DeviceWithDraws(RecordingDevice):
    """Its generator is one of its own, as a card has."""

    default_generator = DeviceGenerator()


def test_a_fork_of_random_numbers_leaves_those_of_the_caller() -> None:
    device, state = DeviceWithDraws(), DeviceGenerator().manual_seed(3).get_state()
    here, before = device.default_generator.get_state(), torch.get_rng_state()
    for begin, expected in ((state, state), (None, here)):
        with device.fork_random(begin):
            assert torch.equal(device.default_generator.get_state(), expected)
            device.default_generator.manual_seed(4)
            torch.rand(3)
        assert torch.equal(device.default_generator.get_state(), here)
        assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError, match="a generator of the host"), device.fork_random(before):
        raise AssertionError
    assert torch.equal(torch.get_rng_state(), before)
