"""`onnxline train`: a training from a configuration, its files, its report, and what it refuses."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
import yaml
from typer.testing import CliRunner, Result

from pipeline.cli import app
from pipeline.config import RunConfig
from pipeline.errors import ConfigError, SourceError, UsageError
from pipeline.events import Event, Note, Phase
from pipeline.runtime.kernels import load_library
from pipeline.train_run import TrainRun
from pipeline.training import NotFinite
from tests.support.paths import ROOT

CODE = """
import os, signal
import torch
from torch import nn
from pipeline.authoring import Linear, Model, ReLU


def make(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(0.1), nn.ReLU(), nn.Linear(width, 3))


def make_by_hand():
    return Model((6, 4)).add(Linear(4, 8)).add(ReLU()).add(Linear(8, 3))


def make_nothing():
    return None


def make_frozen():
    return make().requires_grad_(False)


def batches(epoch, count=4, interrupt=None):
    draw = torch.Generator().manual_seed(epoch)
    for number in range(count):
        if interrupt is not None and os.path.exists(interrupt) and (epoch, number) == (1, 2):
            os.remove(interrupt)
            os.kill(os.getpid(), signal.SIGINT)
        x = torch.randn(6, 4, generator=draw)
        yield x, x.argmax(1) % 3


def breaking(epoch):
    yield from batches(epoch, 2)
    yield from broken(epoch)


def broken(epoch):
    yield torch.full((6, 4), float("nan")), torch.zeros(6, dtype=torch.int64)


def no_batches(epoch):
    return 5


def say_good(module):
    return {"accuracy": "good"}


def evaluate(module, **args):
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(99))
    return {"accuracy": (module(x).argmax(1) == x.argmax(1) % 3).float().mean()}


def half(output, target):
    return torch.nn.functional.cross_entropy(output, target) / 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(CODE)
    return tmp_path


def settings(folder: Path, make: str = "make", **train: Any) -> Path:
    data = {
        "name": "small",
        "model": {"factory": f"net.py:{make}"},
        "train": {
            "batches": "net.py:batches",
            "epochs": 3,
            "optimizer": {"name": "adam", "lr": 0.01},
            "export": False,
            **train,
        },
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.mark.parametrize("make", ["make", "make_by_hand"])
def test_a_training_has_a_report_with_its_losses_and_phases(folder: Path, make: str) -> None:
    result = call(settings(folder, make, evaluate="net.py:evaluate"), "--out", folder / "out")
    assert result.exit_code == 0, result.output
    assert "epoch 3 of 3: mean loss" in result.output
    assert "accuracy: 0." in result.output
    report = json.loads((folder / "out" / "report.json").read_text())
    training = report["training"]
    assert (report["exit_code"], report["failure"], training["steps"]) == (0, "", 12)
    assert [point["step"] for point in training["losses"]] == list(range(1, 13))
    names = [phase["name"] for phase in training["phases"]]
    assert (names[0], names[-1]) == ("Trace", "Replay")
    assert list(report["seconds"]) == names
    assert training["optimizer"] == "adam(lr=0.01)"
    assert set(training["metrics"]) == {"accuracy"}
    assert 'id="training"' in (folder / "out" / "report.html").read_text()
    assert "phase Trace: " in (folder / "out" / "log.txt").read_text()
    assert "0.weight" in safetensors.torch.load_file(folder / "out" / "weights.safetensors")


def run(path: Path, out: Path, *overrides: str, anew: bool = False) -> tuple[list[float], list[Event]]:
    events: list[Event] = []
    result = TrainRun(RunConfig.from_yaml(path, overrides), out, events.append, anew=anew).run()
    return list(result.history.losses), events


def test_a_training_that_was_stopped_goes_on(folder: Path) -> None:
    path = settings(folder, args={"interrupt": str(folder / "stop")}, schedule={"name": "cosine", "steps": 12})
    losses, events = run(path, folder / "whole")
    assert [event.name for event in events if isinstance(event, Phase)][-1] == "Replay"
    (folder / "stop").touch()
    with pytest.raises(KeyboardInterrupt):
        run(path, folder / "stopped")
    report = json.loads((folder / "stopped" / "report.json").read_text())
    assert (report["exit_code"], report["failure"], report["training"]["steps"]) == (130, "stopped", 6)
    first_log = (folder / "stopped" / "log.txt").read_text()
    again, _ = run(path, folder / "stopped")
    assert again == losses
    assert re.fullmatch(
        re.escape(first_log) + r" *[\d.]+  note: going on from .*\n(.*\n)+",
        (folder / "stopped" / "log.txt").read_text(),
    )
    whole, stopped = (
        safetensors.torch.load_file(folder / name / "weights.safetensors") for name in ("whole", "stopped")
    )
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


def test_the_log_of_an_object_that_runs_again_has_each_line_once(folder: Path) -> None:
    path = settings(folder, args={"interrupt": str(folder / "stop")})
    (folder / "stop").touch()
    training, log = TrainRun(RunConfig.from_yaml(path), folder / "out"), folder / "out" / "log.txt"
    with pytest.raises(KeyboardInterrupt):
        training.run()
    first_log = log.read_text()
    training.run()
    assert log.read_text().startswith(first_log)
    assert log.read_text().count("phase Trace: ") == first_log.count("phase Trace: ") + 1
    assert log.read_text().count("going on from") == 1


def test_other_settings_begin_anew(folder: Path) -> None:
    path, out = settings(folder), folder / "out"
    losses, _ = run(path, out)
    other, _ = run(path, out, "train.optimizer.lr=0.02")
    assert other[0] == losses[0]
    assert other[1] != losses[1]
    again, _ = run(path, out, anew=True)
    assert again == losses


def test_what_begins_anew_leaves_no_file_of_the_training_before(folder: Path) -> None:
    path, out = settings(folder), folder / "out"
    run(path, out)
    (out / "model.onnx").write_text("the model of the training before")
    states = ("train.safetensors", "train.safetensors.history.json")
    rest = ("log.txt", "report.html", "report.json", "weights.safetensors")
    _, events = run(path, out, anew=True)  # though its settings are the same
    assert not says_that_it_goes_on(events)
    assert not (out / "model.onnx").exists()
    assert sorted(file.name for file in (out / "earlier" / "1").iterdir()) == sorted(("model.onnx", *rest, *states))
    (out / states[0]).unlink()
    _, events = run(path, out)
    assert not says_that_it_goes_on(events)
    assert sorted(file.name for file in (out / "earlier" / "2").iterdir()) == sorted((*rest, states[1]))
    for name in (*rest, states[0]):
        (out / name).unlink()
    run(path, out)  # a history alone is of a training that saved nothing
    assert not (out / "earlier" / "3").exists()
    _, events = run(path, out)
    assert says_that_it_goes_on(events)


def says_that_it_goes_on(events: list[Event]) -> bool:
    return any(isinstance(event, Note) and "going on" in event.text for event in events)


def test_a_failed_training_lists_no_file_of_another_one(folder: Path) -> None:
    """The first training's files are set aside, and the report is of the second one alone."""
    path, out = settings(folder), folder / "out"
    run(path, out)
    kept = {
        name: (out / name).read_bytes()
        for name in ("train.safetensors", "weights.safetensors", "report.json", "log.txt")
    }
    with pytest.raises(SourceError):
        run(settings(folder, make="make_nothing"), out)
    assert all((out / name).read_bytes() == data for name, data in kept.items())  # nothing was trained
    with pytest.raises(NotFinite):
        run(settings(folder, batches="net.py:breaking"), out)
    assert f"the files of the previous training are in {out / 'earlier' / '1'}" in (out / "log.txt").read_text()
    report = json.loads((out / "report.json").read_text())
    assert (report["exit_code"], report["training"]["steps"]) == (1, 2)
    states = ["train.safetensors", "train.safetensors.history.json"]
    assert report["files"] == ["log.txt", "report.html", "report.json", *states]
    assert all((out / "earlier" / "1" / name).read_bytes() == data for name, data in kept.items())
    run(settings(folder), out)
    assert sorted(file.name for file in (out / "earlier").iterdir()) == ["1", "2"]


def test_weights_beside_an_onnx_belong_to_its_settings(folder: Path) -> None:
    """The same model file with other numbers in its data file is another training."""
    path = settings(folder)
    data = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**data, "model": {"onnx": str(folder / "model.onnx")}}))
    values = [onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", [6, 4]), ("y", [6, 3]))]
    found = []
    for number in (0.0, 1.0):
        weight = onnx.numpy_helper.from_array(np.full((4, 3), number, np.float32), "w")
        nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])]
        graph = onnx.helper.make_graph(nodes, "graph", values[:1], values[1:], [weight])
        (folder / "model.data").unlink(missing_ok=True)
        opsets = [onnx.helper.make_opsetid("", 17)]
        onnx.save(
            onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8),
            folder / "model.onnx",
            save_as_external_data=True,
            location="model.data",
            size_threshold=0,
        )
        found.append((folder / "model.onnx").read_bytes())
        _, events = run(path, folder / "out")
        assert not says_that_it_goes_on(events)
    assert found[0] == found[1]


def test_a_loss_of_ones_own_and_a_limit(folder: Path) -> None:
    losses, _ = run(settings(folder), folder / "one")
    halves, _ = run(settings(folder, loss="net.py:half", steps=5), folder / "two")
    assert len(halves) == 5
    assert halves[0] == pytest.approx(losses[0] / 2)


@pytest.mark.parametrize(
    ("limits", "sought"),
    [({"steps": 5}, "train.steps 5"), ({"steps": 4}, ""), ({"until": 0.0}, "train.until 0.0"), ({}, "")],
)
def test_epochs_that_end_before_the_limit_that_was_asked_for_are_told(
    folder: Path, limits: dict[str, Any], sought: str
) -> None:
    """train.epochs is 1 by default: a training of 3,000 steps ended after its first epoch without a word."""
    _, events = run(settings(folder, epochs=1, **limits), folder / "out")
    notes = [event.text for event in events if isinstance(event, Note) and "ended with train.epochs" in event.text]
    said = f"the training ended with train.epochs 1 after 4 steps, before {sought}; raise train.epochs to train further"
    assert notes == ([said] if sought else [])


def test_native_asks_for_a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match=r"needs a C\+\+ compiler, and did not find 'no-such-compiler' of \$CXX"):
        run(settings(folder, native=True), folder / "out")


def test_a_loss_that_is_not_finite_is_exit_code_1(folder: Path) -> None:
    with pytest.raises(NotFinite, match="step 1: the loss is nan") as raised:
        run(settings(folder, batches="net.py:broken"), folder / "out")
    assert raised.value.exit_code == 1


MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no function": ({"batches": "net.py:batch"}, "make", "no function 'batch' there"),
    "no module": ({}, "make_nothing", "returns None (is a `return` missing?)"),
    "a loss by name": ({"loss": "hinge"}, "make", "found loss 'hinge', expected cross-entropy, mse, or"),
    "smoothing of squares": (
        {"loss": "mse", "label_smoothing": 0.1},
        "make",
        "found label_smoothing with the loss 'mse', expected it with cross-entropy only",
    ),
    "momentum of adam": (
        {"optimizer": {"name": "adam", "momentum": 0.9}},
        "make",
        "found 'momentum', which adam does not have; leave it out",
    ),
    "no epoch": ({"epochs": 0}, "make", "train.epochs"),
    "no batch": ({"args": {"count": 0}}, "make", "gives no batch in the first epoch"),
    "a batch that cannot be made": ({"args": {"count": "4"}}, "make", "raises TypeError"),
    "batches that are none": (
        {"batches": "net.py:no_batches"},
        "make",
        "returns int, expected the batches of an epoch",
    ),
    "an evaluation without data": ({"evaluate": "net.py:say_good"}, "make", "returns what is no number"),
    "nothing to train": (
        {},
        "make_frozen",
        "the module has no parameter with requires_grad; there is nothing to train",
    ),
    "an unknown key": ({"epoch": 3}, "make", "epochs"),
    "a schedule that ends": ({"schedule": {"name": "one-cycle", "steps": 5}}, "make", "the schedule refuses step 6"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_exit_code_2(folder: Path, name: str) -> None:
    train, make, message = MISTAKES[name]
    with pytest.raises((ConfigError, SourceError, UsageError)) as raised:
        run(settings(folder, make, **train), folder / "out")
    assert message in str(raised.value)
    assert raised.value.exit_code == 2


def test_a_configuration_without_the_section_is_refused(folder: Path) -> None:
    path = folder / "plain.yaml"
    path.write_text(yaml.safe_dump({"model": {"factory": "net.py:make"}}))
    with pytest.raises(ConfigError, match="the configuration has no section 'train'"):
        TrainRun(RunConfig.from_yaml(path))


@pytest.mark.parametrize(("name", "classes"), [("digits_mlp", 10), ("digits_cnn", 10), ("characters_gpt", 76)])
def test_the_shipped_configurations_train(name: str, classes: int, tmp_path: Path) -> None:
    """A model that knows nothing yet has about the loss of a guess among all classes."""
    short = ("train.epochs=1", "train.steps=3", "train.export=false")
    losses, _ = run(ROOT / "configs" / f"{name}.yaml", tmp_path / "out", *short)
    assert losses[0] == pytest.approx(math.log(classes), abs=0.5)
    assert len(set(losses)) == 3


def test_a_step_is_compared_with_eager_torch(folder: Path) -> None:
    path = settings(folder, loss="net.py:half", schedule={"name": "cosine", "steps": 12}, max_norm=0.5)
    found = CliRunner().invoke(app, ["debug", "compare", "torch", "plan", str(path), "--step", "6"])
    assert (found.exit_code, found.output) == (0, "step 6: no difference, torch and the program agree on 13 values\n")
    assert not (folder / "runs").exists()
    wrong = CliRunner().invoke(app, ["debug", "compare", "torch", "plan", str(path), "--step", "13"])
    assert isinstance(wrong.exception, UsageError)
    assert str(wrong.exception) == "the training has 12 steps, so there is no step 13"
