"""The section `train`: what a training depends on, and the loss, optimizer and schedule that it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import onnx
from google.protobuf.message import DecodeError
from torch import nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from passes.weights.detached import inner_tensors
from pipeline.authoring.fit import Schedule
from pipeline.config import (
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    locate,
)
from pipeline.errors import UsageError
from pipeline.export.user_code import load_function
from pipeline.training.batch import LossFunction
from pipeline.versions import digest_of_file, own_code_digest, versions
from pipeline.workspace import key_of


def training_key(config: RunConfig, train: TrainConfig, quantized: Path | None) -> str:
    """Digest of all that the steps depend on: settings, the user's files, this code and its libraries.

    quantized: the file of the quantized model, where that is trained. `evaluate` and `export` follow the steps.
    """
    references = (config.model.factory, train.batches, train.loss)
    files = [Path(text.rpartition(":")[0]) for text in references if text and ".py:" in text]
    files += _files_of_model(config.model, config.checkpoint)
    files += _files_of_onnx(quantized) if quantized is not None else []
    steps = train.model_dump(mode="json", exclude={"evaluate", "export"})
    settings = (config.model.model_dump(mode="json"), steps)
    return key_of(*settings, [digest_of_file(file) for file in files], own_code_digest(), versions())


def _files_of_model(model: ModelConfig, checkpoint: str | None) -> list[Path]:
    """The files that the first weights come from, and the configuration of a model of transformers."""
    if model.onnx is not None:
        return _files_of_onnx(locate(model.onnx))
    section = model.transformers
    named = [checkpoint, section.config if section is not None and isinstance(section.config, str) else None]
    return [file for text in named if text is not None for file in _files_in(locate(text))]


def _files_in(path: Path) -> Iterator[Path]:
    """The file, or those of the folder; of an index of shards, the files in its folder."""
    is_index = path.name.endswith(".index.json")
    folder = path.parent if is_index else path
    yield from sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else [path]


def _files_of_onnx(path: Path) -> list[Path]:
    """The ONNX file, and the files in its folder that hold its weights."""
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except (OSError, DecodeError):  # as_module says what is wrong with it
        return [path]
    tensors = (*graph.initializer, *inner_tensors(graph))
    entries = [entry for tensor in tensors for entry in tensor.external_data if entry.key == "location"]
    return [path, *(path.parent / name for name in sorted({entry.value for entry in entries}))]


def make_loss(train: TrainConfig) -> LossFunction:
    """The loss by its name, or the user's function."""
    if train.loss == "cross-entropy":
        return nn.CrossEntropyLoss(label_smoothing=train.label_smoothing)
    if train.loss == "mse":
        return nn.MSELoss()
    return load_function(train.loss, "train.loss", f"train.loss {train.loss}")


def make_optimizer(settings: OptimizerConfig, module: nn.Module) -> optim.Optimizer:
    """torch's optimizer of the parameters that ask for a gradient."""
    asked = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not asked:
        raise UsageError("the module has no parameter with requires_grad; there is nothing to train")
    try:
        return OPTIMIZERS[settings.name](asked, **settings.settings)
    except ValueError as error:
        raise UsageError(f"train.optimizer: {error}") from None


def make_schedule(settings: ScheduleConfig | None) -> Schedule | None:
    """The schedule by its name."""
    if settings is None:
        return None
    if settings.name == "cosine":
        return lambda optimizer: CosineAnnealingLR(optimizer, settings.steps)
    return lambda optimizer: OneCycleLR(
        optimizer,
        max_lr=[group["lr"] for group in optimizer.param_groups],
        total_steps=settings.steps,
        cycle_momentum=False,
    )


OPTIMIZERS: Final[Mapping[str, Callable[..., optim.Optimizer]]] = {
    "sgd": optim.SGD,
    "adam": optim.Adam,
    "adamw": optim.AdamW,
}
