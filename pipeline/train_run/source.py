"""What a training starts from, and how its trained model becomes ONNX: one class for each kind of model.

key of `model`          what is trained                how it becomes ONNX
factory, transformers   a module of torch              the main job exports it
factory                 a `Model` by hand              the main job exports its Graph
onnx                    the weights of the file        they go back into it, then the main job
any, with `quantized`   the simulated quantized model  as for onnx, without passes: those came before

The section `train` says what else a training depends on: the loss, optimizer and schedule that it names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from passes.weights.detached import detach
from passes.weights.files import files_of_model, save
from pipeline.authoring import Model
from pipeline.authoring.fit import Schedule
from pipeline.config import ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig, locate
from pipeline.errors import SourceError, UsageError
from pipeline.events import Note, Observer
from pipeline.export.build_source import assemble, draw_biases
from pipeline.export.checkpoint import read_checkpoint
from pipeline.export.factory import call_factory, load_weights, plain_module
from pipeline.export.load import check_dims, load_source, read_onnx_file
from pipeline.export.source import Example, TorchSource, with_dynamic_shapes
from pipeline.export.user_code import load_function
from pipeline.export.writes import as_configured
from pipeline.quantsim import QuantSim
from pipeline.result import RunResult
from pipeline.run import Pipeline
from pipeline.training import TrainProgram, as_module, with_weights
from pipeline.training.batch import LossFunction
from pipeline.training.qdq import has_quantizers
from pipeline.workspace import digest_of_file, key_of, own_code_digest, versions

TRAINED: Final = "trained.onnx"
"""In the folder of the main job: the model with its new weights, before the passes."""

ROUNDED: Final = (
    "the trained model is quantized and run by onnxruntime alone: where another backend adds up in another order, a "
    "number is rounded to its neighbour, which no tolerance of floats allows (runtime.backends asks for others)"
)


class TrainSource(ABC):
    """A model that is trained.

    Args:
        module: the module to record, in training mode.
        notes: sentences on what was chosen because the configuration leaves it open.
    """

    def __init__(self, config: RunConfig, module: nn.Module, notes: tuple[str, ...] = ()) -> None:
        self.config, self.module, self.notes = config, module, notes

    @property
    def rivals(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Models that `train.evaluate` measures as well as the trained one, by what the report calls them."""
        return {}

    def finish(self) -> nn.Module | Model:
        """The trained model as it is evaluated, once the program has written its states to `module`."""
        return self.module.eval()

    @abstractmethod
    def export(self, program: TrainProgram, folder: Path, observer: Observer) -> RunResult:
        """Run the main job on the trained model; its files go to `folder`."""


class _FactoryModule(TrainSource):
    """A module of torch that a factory made, perhaps with the weights of a checkpoint."""

    def __init__(self, config: RunConfig, module: nn.Module, example: Example | None, notes: tuple[str, ...]) -> None:
        super().__init__(config, module.train(), notes)
        self._example = example

    def export(self, program: TrainProgram, folder: Path, observer: Observer) -> RunResult:
        source = _to_source(self.config, self.module.eval(), self._example, program)
        return Pipeline(self.config, folder, observer, source).run()


class _TransformersModule(TrainSource):
    """A model of transformers, which knows its inputs."""

    def __init__(self, config: RunConfig) -> None:
        source = load_source(with_dynamic_shapes(config.model, config.export), keep_mode=True)
        assert isinstance(source, TorchSource)
        super().__init__(config, source.module.train(), source.notes)
        self._source = source

    def export(self, program: TrainProgram, folder: Path, observer: Observer) -> RunResult:
        source = replace(self._source, module=self.module.eval(), weights=_describe_weights(program))
        return Pipeline(self.config, folder, observer, as_configured(source, self.config.export)).run()


class _HandModel(TrainSource):
    """A `Model` by hand."""

    def __init__(self, config: RunConfig, model: Model) -> None:
        super().__init__(config, model.to_torch(training=True))
        self._model = model

    def finish(self) -> Model:
        self._model.take_numbers(self.module, self.module.state_dict())
        return self._model

    def export(self, program: TrainProgram, folder: Path, observer: Observer) -> RunResult:
        source = _to_source(self.config, self.finish().to_torch(), None, program)
        return Pipeline(self.config, folder, observer, source).run()


class _OnnxModel(TrainSource):
    """An ONNX file, whose nodes and names stay as they are."""

    def __init__(self, config: RunConfig, path: Path, batch: object) -> None:
        self._path, self._sizes = path, _sizes_of(path, batch)
        super().__init__(config, as_module(path, train=config.model.trainable or None, shapes=self._sizes).train())

    def export(self, program: TrainProgram, folder: Path, observer: Observer) -> RunResult:
        trained, proto = folder.absolute() / TRAINED, with_weights(self._path, program)
        save(detach(proto), trained)
        own = self.config.model
        model = ModelConfig(onnx=str(trained), seed=own.seed, inputs=own.inputs, dims=own.dims, trainable=own.trainable)
        config = self._config_of(model)
        if has_quantizers(proto) and "backends" not in config.runtime.model_fields_set:
            runtime = config.runtime.model_copy(update={"backends": ("onnxruntime",)})
            config = config.model_copy(update={"runtime": runtime})
            observer(Note(ROUNDED))
        return Pipeline(config, folder, observer).run()

    def _config_of(self, model: ModelConfig) -> RunConfig:
        return self.config.model_copy(update={"model": model})


class _QuantizedModel(_OnnxModel):
    """The model that a simulation of quantization made of another one."""

    @property
    def rivals(self) -> Mapping[str, Callable[[], nn.Module]]:
        in_float = self._path.with_name("model.onnx")
        return {
            "in float": lambda: as_module(in_float, shapes=self._sizes).eval(),
            "before training": lambda: as_module(self._path, shapes=self._sizes).eval(),
        }

    def _config_of(self, model: ModelConfig) -> RunConfig:
        passes = self.config.passes.model_copy(update={"recipe": ()})  # they ran before the simulation
        export = type(self.config.export)()
        return self.config.model_copy(update={"model": model, "passes": passes, "export": export})


def quantize(config: RunConfig, folder: Path, observer: Observer) -> Path:
    """Simulate the quantization of the model, as `onnxline quantsim` does; returns the file of the quantized model.

    Raises:
        UsageError, PassError: something that was given is wrong, such as a rule that matches nothing.
        CheckFailed: the run before the simulation failed.
    """
    result = QuantSim(config, folder, observer, progress=False).run()
    return result.folder / "model.qdq.onnx"


def open_train_source(config: RunConfig, batch: object, quantized: Path | None) -> TrainSource:
    """Make the model, in training mode, for batches like `batch`.

    Args:
        quantized: what `quantize` returned, where that is trained.

    Raises:
        SourceError: the model cannot be made or read.
    """
    model = config.model
    torch.manual_seed(model.seed)  # for the initial weights, and what the steps draw
    if quantized is not None:
        return _QuantizedModel(config, quantized, batch)
    if model.onnx is not None:
        return _OnnxModel(config, locate(model.onnx), batch)
    if model.transformers is not None:
        return _TransformersModule(config)
    made, example = call_factory(model)
    if isinstance(made, Model):
        if model.random_biases:
            raise SourceError("model.random_biases: found a model by hand, expected a torch module; leave this key out")
        if model.checkpoint is not None:
            made.load_state_dict(read_checkpoint(locate(model.checkpoint)))
        return _HandModel(config, made)
    module, notes = plain_module(made, f"the factory {model.factory} returns")
    if model.checkpoint is not None:
        notes += load_weights(module, model.checkpoint)
    if model.random_biases:
        draw_biases(module, model.seed)
    return _FactoryModule(config, module, example, notes)


def _sizes_of(path: Path, batch: object) -> dict[str, tuple[int, ...]]:
    """The shapes of the inputs of an ONNX model in a batch, as far as it has any; the recording says what is wrong."""
    names = [spec.name for spec in read_onnx_file(str(path)).inputs]
    given = dict(zip(names, batch, strict=False)) if isinstance(batch, tuple | list) else batch
    tensors = given if isinstance(given, Mapping) else {}
    return {name: tuple(tensors[name].shape) for name in names if isinstance(tensors.get(name), torch.Tensor)}


def _to_source(config: RunConfig, module: nn.Module, example: Example | None, program: TrainProgram) -> TorchSource:
    """The trained module with inputs for its export: from its factory, else from the section `model`, else from the
    first batch."""
    model = with_dynamic_shapes(config.model, config.export)
    is_declared = model.inputs and all(entry.shape is not None for entry in model.inputs.values())
    if example is None and not is_declared:
        example = Example(*program.example)
    source = assemble(module, example, model)
    check_dims(model, source)
    return as_configured(replace(source, weights=_describe_weights(program)), config.export)


def _describe_weights(program: TrainProgram) -> str:
    return f"trained for {program.steps_done} steps"


def training_key(config: RunConfig, train: TrainConfig, quantized: Path | None) -> str:
    """Digest of all that the steps depend on: settings, the user's files, this code and its libraries.

    Args:
        quantized: the file of the quantized model, where that is trained. `evaluate` and `export` follow the steps.
    """
    references = (config.model.factory, train.batches, train.loss)
    files = [Path(text.rpartition(":")[0]) for text in references if text and ".py:" in text]
    files += _files_of_model(config.model, config.checkpoint)
    files += files_of_model(quantized) if quantized is not None else []
    steps = train.model_dump(mode="json", exclude={"evaluate", "export"})
    settings = (config.model.model_dump(mode="json"), steps)
    return key_of(*settings, [digest_of_file(file) for file in files], own_code_digest(), versions())


def _files_of_model(model: ModelConfig, checkpoint: str | None) -> list[Path]:
    """The files that the first weights come from, and the configuration of a model of transformers."""
    if model.onnx is not None:
        return files_of_model(locate(model.onnx))
    section = model.transformers
    named = [checkpoint, section.config if section is not None and isinstance(section.config, str) else None]
    return [file for text in named if text is not None for file in _files_in(locate(text))]


def _files_in(path: Path) -> Iterator[Path]:
    """The file itself, or the files of a folder; for an index of shards, the files in the folder of the index."""
    is_index = path.name.endswith(".index.json")
    folder = path.parent if is_index else path
    yield from sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else [path]


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
    return OPTIMIZERS[settings.name](asked, **settings.settings)


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
