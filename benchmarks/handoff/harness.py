"""Starts a tool in its own environment, and judges the model that it writes by onnxruntime with optimizations off."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from passes.weights.detached import DetachedModel, detach
from passes.weights.sessions import Session

Feeds = dict[str, np.ndarray]

SCRIPT: Final = Path(__file__).with_name("tools.py")

ENVIRONMENTS: Final = ("aimet", "quark", "nncf")
"""Tools with an environment of their own, whose interpreter an option names; the others are onnxline's."""


@dataclass(frozen=True, slots=True)
class ToolRun:
    """What a tool made of a model. `failure` is empty, or one line that says why there is nothing."""

    tool: str
    folder: Path
    failure: str = ""
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return str(self.found.get("version", ""))

    @property
    def model(self) -> Path:
        return self.folder / "model.onnx"

    def run(self, samples: Sequence[Feeds]) -> list[np.ndarray]:
        """The first output of each sample: as the tool computed it, or of the model that it wrote."""
        outputs = self.folder / "outputs.npz"
        if outputs.exists():
            arrays = np.load(outputs)
            return [arrays[str(index)] for index in range(len(samples))]
        runner = runner_of(onnx.load(self.model))
        return [runner(sample) for sample in samples]


def interpreter_options(add_argument: Callable[..., object]) -> None:
    """Options `--aimet PYTHON` and so on, or environment variables such as AIMET_PYTHON."""
    for tool in ENVIRONMENTS:
        variable = f"{tool.upper()}_PYTHON"
        add_argument(f"--{tool}", metavar="PYTHON", default=os.environ.get(variable, ""), help=f"or ${variable}")


def write_samples(samples: Iterable[Feeds], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index, sample in enumerate(samples):
        np.savez(folder / f"{index:03}.npz", **sample)  # type: ignore[arg-type]
    return folder


def run_tool(
    tool: str, python: str, model: Path, calibration: Path, evaluation: Path, folder: Path, **more: object
) -> ToolRun:
    """Run `tool` on the model file `model`, with folders of samples."""
    if not python:
        environment = tool.partition("-")[0]
        return ToolRun(tool, folder, f"{tool} is not there: name its interpreter with --{environment}")
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.iterdir():
        stale.unlink()
    job = folder / "job.json"
    paths = {"model": model, "calibration": calibration, "evaluation": evaluation, "out": folder}
    job.write_text(json.dumps({"tool": tool, **{key: str(path) for key, path in paths.items()}, **more}))
    child = subprocess.run(
        [python, str(SCRIPT), str(job)], capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"}
    )
    (folder / "log.txt").write_text(child.stdout + child.stderr)
    if child.returncode:
        last = next((line for line in reversed(child.stderr.splitlines()) if line.strip()), f"exit {child.returncode}")
        return ToolRun(tool, folder, f"{tool} fails: {last[:160]}")
    return ToolRun(tool, folder, found=json.loads((folder / "result.json").read_text()))


def runner_of(proto: onnx.ModelProto) -> Callable[[Feeds], np.ndarray]:
    """Gives the first output of the model on a sample."""
    session = Session.of(detach_copy(proto))
    first = session.outputs[0]
    return lambda sample: session.run(sample)[first]


def detach_copy(proto: onnx.ModelProto) -> DetachedModel:
    """The model with its weights apart; `proto` keeps its own."""
    return detach(onnx.ModelProto.FromString(proto.SerializeToString()))
