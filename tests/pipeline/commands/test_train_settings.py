"""What the section `train` makes of torch's losses and optimizers, and what belongs to the settings of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeline.config import RunConfig, TrainConfig
from pipeline.errors import UsageError
from pipeline.train_run.source import make_loss, make_optimizer, training_key


def make_config(folder: Path, model: dict[str, Any] | None = None, **train: Any) -> tuple[RunConfig, TrainConfig]:
    (folder / "code.py").write_text("")
    section = {"batches": f"{folder / 'code.py'}:batches", **train}
    model = model or {"factory": f"{folder / 'code.py'}:make"}
    config = RunConfig.from_mapping({"name": "small", "model": model, "train": section})
    assert config.train is not None
    return config, config.train


@pytest.mark.parametrize(
    ("settings", "is_other"),
    [
        ({}, False),
        ({"evaluate": "code.py:evaluate"}, False),
        ({"export": False}, False),
        ({"epochs": 2}, True),
        ({"args": {"count": 3}}, True),
    ],
)
def test_what_comes_after_the_steps_is_no_part_of_their_key(
    settings: dict[str, Any], is_other: bool, tmp_path: Path
) -> None:
    keys = [training_key(*make_config(tmp_path, **train), None) for train in ({}, settings)]
    assert (keys[0] != keys[1]) == is_other


def test_shards_beside_an_index_belong_to_the_key(tmp_path: Path) -> None:
    for name in ("code.py", "weights.index.json", "first.safetensors"):
        (tmp_path / name).write_text("")
    model = {"factory": f"{tmp_path / 'code.py'}:make", "checkpoint": str(tmp_path / "weights.index.json")}
    before = training_key(*make_config(tmp_path, model), None)
    (tmp_path / "first.safetensors").write_text("other")
    assert training_key(*make_config(tmp_path, model), None) != before


def test_losses_by_their_names(tmp_path: Path) -> None:
    output, labels, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), torch.randn(4, 3)
    smooth = make_loss(make_config(tmp_path, label_smoothing=0.25)[1])(output, labels)
    assert torch.equal(smooth, functional.cross_entropy(output, labels, label_smoothing=0.25))
    square = make_loss(make_config(tmp_path, loss="mse")[1])(output, target)
    assert torch.equal(square, functional.mse_loss(output, target))


def test_an_optimizer_has_the_parameters_that_ask_for_a_gradient(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    optimizer = make_optimizer(make_config(tmp_path)[1].optimizer, module)
    assert [parameter is module.weight for group in optimizer.param_groups for parameter in group["params"]] == [True]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"device": "gpu"}, "found the device 'gpu', expected cpu, cuda, or cuda: and a number, such as cuda:1"),
        ({"device": "cuda", "native": True}, "found 'native' with the device cuda, expected one of them"),
    ],
)
def test_devices_of_a_training(train: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert make_config(tmp_path, device="cuda:1")[1].device == "cuda:1"
    with pytest.raises(UsageError, match=message):
        make_config(tmp_path, **train)
