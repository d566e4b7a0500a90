"""`onnxline train` writes its model as ONNX by the main job, whatever it started from; and a quantized model trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.torch
import torch

from pipeline.config import RunConfig
from pipeline.errors import OnnxlineError, SourceError
from pipeline.events import Event, Note
from pipeline.train_run import TrainResult, TrainRun
from tests.support.paths import ROOT

CODE = """
import torch
from torch import nn
from pipeline.authoring import Linear, Model, ReLU


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = torch.softmax(q @ k.transpose(-1, -2) / 2, -1)
        return self.out((self.drop(scores) @ v).transpose(1, 2).flatten(-2))


def make():
    return Attention()


class Plain(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


def make_plain():
    return Plain(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def make_by_hand():
    return Model((6, 5, 8)).add(Linear(8, 8)).add(ReLU()).add(Linear(8, 8))


class Odd(Attention):
    def forward(self, x):
        result = super().forward(x)
        return result if self.training else result * float(result.sum() > 0)  # which no export takes


def make_odd():
    return Odd()


def batches(epoch, count=4):
    draw = torch.Generator().manual_seed(epoch)
    for _ in range(count):
        x = torch.randn(6, 5, 8, generator=draw)
        yield x, x.flip(1)


def texts(epoch):
    draw = torch.Generator().manual_seed(epoch)
    for _ in range(4):
        ids = torch.randint(20, (2, 6), generator=draw)
        yield {"input_ids": ids, "labels": ids.roll(-1, 1)}


def token_loss(output, batch):
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())


def error(module):
    x, target = next(batches(99))
    return {"error": (module(x) - target).square().mean()}
"""


def judged_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """That of `error`."""
    x = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(99))
    return x, x.flip(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(CODE)
    return tmp_path


def train(folder: Path, model: dict[str, Any], out: str = "out", **sections: Any) -> tuple[TrainResult, list[Event]]:
    given = sections.pop("train", {})
    optimizer = {"name": "sgd", "lr": 0.3}
    own = {"batches": "net.py:batches", "loss": "mse", "epochs": 3, "optimizer": optimizer, **given}
    events: list[Event] = []
    main_job = {"passes": {"recipe": ["fuse_qkv"], "keep": ["qkv?"]}, "runtime": {"backends": ["onnxruntime"]}}
    config = RunConfig.from_mapping({"name": "small", "model": model, "train": own, **main_job, **sections}, folder)
    return TrainRun(config, folder / out, events.append).run(), events


def outputs(path: Path, x: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def test_a_module_goes_to_onnx_and_that_file_trains_on(folder: Path) -> None:
    """Q, K and V are apart in both, weights keep their names, and the batch stays open."""
    sections: dict[str, Any] = {"passes": {"keep": ["qkv"]}}
    model = {"factory": "net.py:make", "inputs": {"x": {"shape": ["batch", 5, 8]}}}
    result, _ = train(folder, model, "first", **sections, train={"evaluate": "net.py:error"})
    first = folder / "first" / "model.onnx"
    assert "1 structure kept" in result.training.onnx
    report = json.loads((folder / "first" / "report.json").read_text())
    assert report["training"]["onnx"] == result.training.onnx
    assert "model.onnx" in report["files"]
    assert "onnx/report.html" in (folder / "first" / "report.html").read_text()
    x, target = judged_batch()
    error = np.square(outputs(first, x) - target.numpy()).mean()
    assert error == pytest.approx(result.training.metrics["error"], rel=1e-4)

    again, _ = train(folder, {"onnx": "first/model.onnx"}, "second", **sections, train={"evaluate": "net.py:error"})
    second = folder / "second" / "model.onnx"
    assert "1 structure kept" in again.training.onnx
    assert np.square(outputs(second, x) - target.numpy()).mean() == pytest.approx(
        again.training.metrics["error"], rel=1e-4
    )
    assert again.training.metrics["error"] < result.training.metrics["error"]
    trained = safetensors.torch.load_file(folder / "second" / "weights.safetensors")
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(second).graph.initializer}
    before = {tensor.name for tensor in onnx.load(first).graph.initializer}
    assert stored.keys() == before
    assert all(np.array_equal(stored[name], trained[name]) for name in trained)
    assert onnx.load(second).graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_a_model_by_hand_goes_to_onnx(folder: Path) -> None:
    result, _ = train(folder, {"factory": "net.py:make_by_hand"}, train={"evaluate": "net.py:error"})
    x, target = judged_batch()
    error = np.square(outputs(folder / "out" / "model.onnx", x) - target.numpy()).mean()
    assert error == pytest.approx(result.training.metrics["error"], rel=1e-4)


GPT2 = {
    "class": "GPT2LMHeadModel",
    "config": {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "use_cache": False},
}


def test_a_model_of_transformers_trains_and_goes_on_from_a_checkpoint(folder: Path) -> None:
    settings = {"batches": "net.py:texts", "loss": "net.py:token_loss", "optimizer": {"name": "adam", "lr": 0.01}}
    first, _ = train(folder, {"transformers": GPT2}, "first", train=settings)
    weights = folder / "first" / "weights.safetensors"
    inputs = onnx.load(folder / "first" / "model.onnx").graph.input
    assert [value.name for value in inputs] == ["input_ids", "attention_mask"]
    on = {**settings, "export": False}
    second, _ = train(folder, {"transformers": {**GPT2, "checkpoint": str(weights)}}, "second", train=on)
    assert second.history.losses[0] < first.history.losses[0] - 0.05
    assert not (folder / "second" / "model.onnx").exists()


def test_a_factory_goes_on_from_a_checkpoint(folder: Path) -> None:
    model, short = {"factory": "net.py:make"}, {"export": False}
    whole, _ = train(folder, model, "whole", train=short)
    model["checkpoint"] = "whole/weights.safetensors"
    again, _ = train(folder, model, "again", train=short)
    assert again.history.losses[0] < whole.history.losses[0]
    numbers = safetensors.torch.load_file(folder / "whole" / "weights.safetensors")
    safetensors.torch.save_file({name: 2 * numbers[name] for name in numbers}, folder / "whole" / "weights.safetensors")
    other, events = train(folder, model, "again", train=short)  # the same settings, and other weights
    assert other.history.losses[0] != again.history.losses[0]
    assert not [event for event in events if isinstance(event, Note) and "going on" in event.text]


def test_a_quantized_model_trains_and_is_written_with_its_scales(folder: Path) -> None:
    sections: dict[str, Any] = {"quantsim": {"rules": {"op:*": {"weights": "int4/channel", "activations": "uint8"}}}}
    model = {"factory": "net.py:make_plain", "inputs": {"x": {"shape": ["batch", 5, 8]}}}
    asked = {"quantized": True, "evaluate": "net.py:error", "optimizer": {"name": "adam", "lr": 0.003}}
    result, _ = train(folder, model, train=asked, **sections)
    metrics = result.training.metrics
    assert list(metrics) == ["error in float", "error before training", "error"]
    assert metrics["error"] < metrics["error before training"]
    assert len(result.training.losses) == 12
    assert "<polyline" in (folder / "out" / "report.html").read_text()
    x, target = judged_batch()
    trained, untrained = folder / "out" / "model.onnx", folder / "out" / "quantsim" / "model.qdq.onnx"
    errors = [np.square(outputs(path, x) - target.numpy()).mean() for path in (trained, untrained)]
    assert errors == pytest.approx([metrics["error"], metrics["error before training"]], rel=0.02)
    before, after = (
        {tensor.name: tensor for tensor in onnx.load(path).graph.initializer} for path in (untrained, trained)
    )
    assert after.keys() == before.keys()
    assert sum(tensor.data_type == onnx.TensorProto.INT4 for tensor in after.values()) >= 2
    moved = {name for name in after if after[name].SerializeToString() != before[name].SerializeToString()}
    assert {name.rpartition("_")[2] for name in moved} == {"quantized", "scale"}


def test_an_export_that_fails_leaves_the_training(folder: Path) -> None:
    model = {"factory": "net.py:make_odd"}
    with pytest.raises(OnnxlineError) as raised:
        train(folder, model)
    assert "only its ONNX file was not made" in "".join(raised.value.__notes__)
    report = json.loads((folder / "out" / "report.json").read_text())
    assert (report["exit_code"], report["training"]["steps"]) == (raised.value.exit_code, 12)
    assert "weights.safetensors" in report["files"]
    assert "model.onnx" not in report["files"]
    (folder / "out" / "model.onnx").write_text("of the same training, before its factory was changed")
    with pytest.raises(OnnxlineError):
        train(folder, model)
    assert not (folder / "out" / "model.onnx").exists()


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no simulation": ({"train": {"quantized": True}}, "found quantized without a section 'quantsim'"),
    "weights elsewhere": (
        {"model": {"factory": "net.py:make", "checkpoint": "net.py"}, "export": {"weights": "referenced"}},
        "found export.weights referenced, expected copied: a training changes the weights",
    ),
    "no checkpoint": ({"model": {"factory": "net.py:make", "checkpoint": "no.safetensors"}}, "no file or folder"),
    "a pass that is none": ({"passes": {"skip": ["fuse_qvk"]}}, "did you mean 'fuse_qkv'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_before_anything_is_trained(folder: Path, name: str) -> None:
    sections, said = MISTAKES[name]
    with pytest.raises(OnnxlineError, match=said) as raised:
        train(folder, sections.pop("model", {"factory": "net.py:make"}), **sections)
    assert raised.value.exit_code == 2
    assert not (folder / "out" / "train.safetensors").exists()


def test_a_checkpoint_that_another_training_writes_names_that_training(tmp_path: Path) -> None:
    own = [f"model.checkpoint={tmp_path / 'cnn-train' / 'weights.safetensors'}"]
    with pytest.raises(SourceError, match=r"no file or folder '.*/cnn-train/weights\.safetensors'") as raised:
        TrainRun(RunConfig.from_yaml(ROOT / "configs" / "digits_qat.yaml", own), tmp_path / "qat").run()
    [note] = raised.value.__notes__
    assert "`onnxline train` writes such a file at the end, as runs/NAME-train/weights.safetensors" in note


def test_the_shipped_configuration_trains_the_quantized_digits(tmp_path: Path) -> None:
    configs = ROOT / "configs"
    short = ("train.epochs=1", "train.steps=3", "train.export=false")
    TrainRun(RunConfig.from_yaml(configs / "digits_cnn.yaml", short), tmp_path / "cnn").run()
    own = (*short, f"model.checkpoint={tmp_path / 'cnn' / 'weights.safetensors'}", "quantsim.calibration.samples=8")
    result = TrainRun(RunConfig.from_yaml(configs / "digits_qat.yaml", own), tmp_path / "qat").run()
    assert list(result.training.metrics) == ["accuracy in float", "accuracy before training", "accuracy"]
    assert len(result.training.losses) == 3


def test_a_quantized_training_goes_on(folder: Path) -> None:
    """The simulation is made again, gives the same file, and so the same training."""
    sections: dict[str, Any] = {"quantsim": {"rules": {"op:*": {"weights": "int4/channel"}}}}
    model = {"factory": "net.py:make_plain", "inputs": {"x": {"shape": ["batch", 5, 8]}}}
    asked = {"quantized": True, "export": False}
    first, _ = train(folder, model, train=asked, **sections)
    again, events = train(folder, model, train={**asked, "evaluate": "net.py:error"}, **sections)
    assert [event for event in events if isinstance(event, Note) and "going on" in event.text]
    assert again.history.records == first.history.records
