"""`Model`: layers in a row, which are compiled to a train step and trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch

from passes.suggest import describe_argument
from passes.visible import Table, TableResult
from pipeline.authoring.builder import ModelBuilder
from pipeline.authoring.fit import Batches, FitLimits, Schedule, TrainingHistory, TrainingLoop
from pipeline.authoring.layers import LossModule, target_of
from pipeline.authoring.module import Module, Sequential, check_module, check_state_dict, emit
from pipeline.authoring.optimizers import OptimizerSpec, copy_optimizer
from pipeline.authoring.tensors import FLOATS, IRTensor, text_of, typed
from pipeline.console import RunConsole
from pipeline.errors import UsageError
from pipeline.events import Observer, Phase
from pipeline.ir import Graph, TensorSpec, check
from pipeline.runtime import CompiledProgram, compile_graph
from pipeline.runtime.tensors import dtype_name, torch_dtype
from pipeline.training import GraphModule, TrainProgram, as_module, record_step

Loss: TypeAlias = torch.nn.Module | Callable[..., Any]
"""A module, or a function of IR tensors: (output, target) → one number."""

Metric: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | float]
"""(output, target) → a number for a batch; the evaluation has the mean over all samples."""


@dataclass(frozen=True, slots=True)
class Evaluation(TableResult):
    """The mean `loss` and the means of the `metrics`, by name, over all `samples`."""

    loss: float
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    def tables(self) -> Iterable[Table]:
        rows = [("samples", str(self.samples)), ("loss", f"{self.loss:.4g}")]
        yield Table("evaluation", [*rows, *((name, f"{value:.4g}") for name, value in self.metrics.items())])


class Model:
    """A model by hand: its inputs, and the layers that follow them.

        model = Model((64, 64))                      # batches of 64 samples with 64 features each
        model.add(Linear(64, 128)).add(ReLU()).add(Linear(128, 10))
        model.compile(Adam(lr=1e-3), CrossEntropyLoss())
        history = model.fit(batches, epochs=3)

    inputs: the shape of each input, of float32, or its TensorSpec; the first size is that of the batch.
    module: the whole model, where it is no row of layers.
    """

    @typed
    def __init__(
        self, *inputs: Sequence[int] | TensorSpec, module: torch.nn.Module | None = None, name: str = "model"
    ) -> None:
        if not inputs:
            raise UsageError("Model: found no input, expected the shape of one at least: Model((64, 784))")
        self.name = name
        self.inputs = tuple(item if isinstance(item, TensorSpec) else _spec_of(item) for item in inputs)
        if module is not None:
            check_module(module)
        self.module = Sequential() if module is None else module
        self._grows = module is None
        self._program: TrainProgram | None = None
        self._loop: TrainingLoop | None = None
        self._loss: Loss | None = None
        self._compiled: dict[tuple[object, ...], CompiledProgram] = {}

    def __repr__(self) -> str:
        return f"Model({', '.join(map(str, self.inputs))}): {self.module!r}"

    def add(self, layer: torch.nn.Module) -> Self:
        """Append `layer`, of `onnxline.authoring` or of `torch.nn`; its shapes are checked at once.

        Raises:
            UsageError: it is no layer, or does not fit the output of the last layer.
        """
        if not isinstance(self.module, Sequential) or not self._grows:
            raise UsageError("add: the model was made of a module of its own; expected Model(shape) without module=")
        if self._program is not None:
            raise UsageError("add: the model is compiled; expected all layers before compile()")
        check_module(layer)
        extended = Sequential(*self.module, layer)
        self._emit(extended, training=False)
        self.module = extended
        return self

    @typed
    def graph(self, *, training: bool = False, batch: int | None = None) -> Graph:
        """The Graph that the layers emit, for inference or `training`, with `batch` samples or as many as the inputs.

        Raises:
            UsageError: there is no layer, or one does not fit.
        """
        builder, output = self._emit(self.module, training=training, batch=batch)
        return _check(builder.build([output.vid]))

    @typed
    def compile(
        self,
        optimizer: OptimizerSpec | torch.optim.Optimizer,
        loss: Loss,
        *,
        schedule: Schedule | None = None,
        max_norm: float | None = None,
        target: TensorSpec | None = None,
        native: bool = False,
        quiet: bool = False,
        observer: Observer | None = None,
    ) -> Self:
        """Make the train step: Trace → Compile → Warmup → Capture. `fit` replays it.

        Args:
            optimizer: SGD(), Adam() or AdamW(), or one of torch.optim over the layers' parameters, which is copied.
            loss: a module of torch, or a function of (output, target) that returns one number.
            schedule: makes a scheduler of torch.optim.lr_scheduler of the optimizer.
            max_norm: clip the norm of all gradients.
            target: what targets look like, where the loss does not say it; by default like the output.
            native: kernels in C++ compute what they can.
            quiet: print no line for each phase.
            observer: gets the event of each phase in place of the console.

        Raises:
            UsageError: no layer, a loss that is no single number of a parameter, or no compiler for `native`.
            Unsupported: something that the runtime cannot train.
        """
        if not isinstance(optimizer, OptimizerSpec | torch.optim.Optimizer):
            raise UsageError(
                f"compile: found {describe_argument(optimizer)} as optimizer, expected SGD(), Adam() or AdamW()"
            )
        step = self.step_graph(loss, training=True, target=target)
        module = as_module(step).train()
        feed = {step.values[vid].name: _zeros(step.values[vid].spec) for vid in step.inputs}
        made = self._make_optimizer(optimizer, module)
        self._program = record_step(module, lambda output, _: output, made, feed, max_norm=max_norm, native=native)
        self._loss, self._loop = loss, TrainingLoop(self._program, schedule, self._name_tensors)
        show = observer or RunConsole(quiet=quiet).show
        for phase in self.phases[:-1]:
            show(phase)
        return self

    @typed
    def fit(
        self,
        batches: Batches,
        epochs: int = 1,
        *,
        steps: int | None = None,
        until: float | None = None,
        path: str | Path | None = None,
        resume: bool = False,
        save_every: int | None = None,
        quiet: bool = False,
        observer: Observer | None = None,
    ) -> TrainingHistory:
        """Train on `batches`, each `(*inputs, target)`: a list, a DataLoader, or a function from an epoch to batches.

        Args:
            batches: what to train on; a function is called with each epoch's index.
            epochs: how often all batches are used.
            steps: the most steps.
            until: stop when the mean loss of the last 50 steps is below it.
            path: a file for the states, which are whole at every moment, also after Ctrl-C.
            resume: go on from the states in `path`, if there is such a file.
            save_every: the number of steps after which the states are saved, as well as after each epoch.
            quiet: show no progress.
            observer: gets the events in place of the console.

        Raises:
            UsageError: the model is not compiled, or a batch does not fit.
            NotFinite: the loss of a step is not finite; the states are those before it.
            KeyboardInterrupt: after Ctrl-C, when the states are saved.
        """
        if self._loop is None:
            raise UsageError("fit: the model is not compiled; call compile(optimizer, loss) before")
        limits = FitLimits(epochs, steps, until)
        screen = RunConsole(quiet=quiet or observer is not None)
        self._loop.observer = observer or screen.show
        with screen:
            try:
                return self._loop.run(
                    batches, limits, None if path is None else Path(path), resume=resume, save_every=save_every
                )
            finally:
                self.take_numbers(self.program.module, self.program.state_dict()["module"])

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.predict(*inputs)

    def evaluate(self, batches: Iterable[Sequence[torch.Tensor]], **metrics: Metric) -> Evaluation:
        """The loss of the model as it is at inference, and `metrics` by name, over all samples of `batches`.

        Raises:
            UsageError: the model is not compiled, there is no batch, or one does not fit.
        """
        if self._loss is None:
            raise UsageError("evaluate: the model is not compiled; call compile(optimizer, loss) before")
        if not isinstance(batches, Iterable):
            raise UsageError(f"evaluate: found {describe_argument(batches)}, expected batches, each (*inputs, target)")
        for name, metric in metrics.items():
            if not callable(metric):
                raise UsageError(f"evaluate: the metric {name} is {describe_argument(metric)}, expected a function")
        rows = [self._evaluate_batch(batch, metrics) for batch in batches]
        samples = sum(size for size, _ in rows)
        if not samples:
            raise UsageError("evaluate: found no batch, expected one at least")
        names = ("loss", *metrics)
        means = {name: sum(size * found[name] for size, found in rows) / samples for name in names}
        return Evaluation(means.pop("loss"), samples, means)

    def predict(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The output for `inputs` of any number of samples, by the planned runtime."""
        names = _input_names(len(self.inputs))
        if len(inputs) != len(names):
            raise UsageError(f"predict: found {len(inputs)} tensors, expected {len(names)} ({', '.join(names)})")
        batch = _check_inputs(inputs, self.inputs)
        program = self._program_for(("predict", batch), lambda: self.graph(batch=batch))
        return next(iter(program.run(dict(zip(names, inputs, strict=True))).values()))

    @typed
    def step_graph(
        self,
        loss: Loss,
        *,
        training: bool = False,
        target: TensorSpec | None = None,
        batch: int | None = None,
        with_output: bool = False,
    ) -> Graph:
        """The Graph of `loss`: inputs and target → the loss, after the output of the model `with_output`.

        `target` is the spec of the targets, by default that of `loss`; `batch` the first size, open by default. Layers
        such as Dropout work as in `training`, if it is true.

        Raises:
            UsageError: there is no layer, one does not fit, or the loss is no single number.
        """
        builder, output = self._emit(self.module, training=training, batch=batch)
        if target is None:
            own = loss.target_of if isinstance(loss, LossModule) else partial(target_of, loss)
            target = own(output.spec)
        value = emit(builder, _as_loss(loss), output, builder.add_input("target", target), path="loss")
        if value.rank or value.spec.dtype not in FLOATS:
            raise UsageError(
                f"the loss is {text_of(value)}, expected a single floating-point number: take its mean or its sum"
            )
        return _check(builder.build([*([output.vid] if with_output else []), value.vid]))

    @property
    def program(self) -> TrainProgram:
        """The train step.

        Raises:
            UsageError: the model is not compiled.
        """
        if self._program is None:
            raise UsageError("program: the model is not compiled; call compile(optimizer, loss) before")
        return self._program

    @property
    def history(self) -> TrainingHistory:
        """The steps so far; of no model that is not compiled."""
        return self._loop.history if self._loop is not None else TrainingHistory()

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Trace, Compile, Warmup, Capture and Replay, with what each took."""
        return self.history.phases

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, as torch's module of the same layers has them."""
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    @typed
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the parameters and buffers of a state dict, `state`; the state of the optimizer stays.

        Raises:
            UsageError: a name, a shape or a dtype is another; nothing has changed.
        """
        check_state_dict(self.module, state)
        self.module.load_state_dict(state)
        self._compiled.clear()
        if self._program is not None:
            found, own = self._program.state_dict()["module"], self.state_dict()
            names = _value_names(self._program.module)
            self._program.load_state_dict({"module": {key: own.get(names[key], found[key]) for key in found}})

    @typed
    def to_torch(self, *, training: bool = False) -> GraphModule:
        """A module of torch that computes the same, in the mode `training`, with copies of the weights."""
        return as_module(self.graph(training=training)).train(training)

    def _emit(
        self, module: torch.nn.Module, *, training: bool, batch: int | None = None
    ) -> tuple[ModelBuilder, IRTensor]:
        builder = ModelBuilder(self.name, training=training)
        specs = self.inputs if batch is None else [_with_batch(spec, batch) for spec in self.inputs]
        inputs = [builder.add_input(name, spec) for name, spec in zip(_input_names(len(specs)), specs, strict=True)]
        output = emit(builder, module, *inputs, path="")
        if not isinstance(output, IRTensor):
            raise UsageError(
                f"the model gives {describe_argument(output)}, expected one tensor: take the part of it that is meant "
                "in the forward of a Module, as in `return self.lstm(x)[0]`"
            )
        return builder, output

    def _name_tensors(self, batch: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors of a batch `(*inputs, target)` by the names of the graph's inputs."""
        names = [*_input_names(len(self.inputs)), "target"]
        if not isinstance(batch, tuple | list) or len(batch) != len(names):
            found = f"{len(batch)} tensors" if isinstance(batch, tuple | list) else describe_argument(batch)
            raise UsageError(f"found a batch of {found}, expected ({', '.join(names)})")
        return dict(zip(names, batch, strict=True))

    def _make_optimizer(
        self, optimizer: OptimizerSpec | torch.optim.Optimizer, module: torch.nn.Module
    ) -> torch.optim.Optimizer:
        if isinstance(optimizer, OptimizerSpec):
            return optimizer.make(module.parameters())
        names = _value_names(module)
        others = {names[key]: tensor for key, tensor in module.named_parameters()}
        return copy_optimizer(optimizer, dict(self.module.named_parameters()), others)

    def take_numbers(self, module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        """Take parameters and buffers over from `state`, a state dict of `module`, which `to_torch` made."""
        names = _value_names(module)
        found = {names[key]: tensor for key, tensor in state.items()}
        for name, stored in (*self.module.named_parameters(), *self.module.named_buffers()):
            if name in found:
                stored.data = found[name].detach().clone()
        self._compiled.clear()

    def _evaluate_batch(
        self, batch: Sequence[torch.Tensor], metrics: Mapping[str, Metric]
    ) -> tuple[int, dict[str, float]]:
        """The number of samples, and the loss and the metrics of a batch."""
        assert self._loss is not None
        loss, feed = self._loss, self._name_tensors(batch)
        if not isinstance(batch[-1], torch.Tensor):
            raise UsageError(f"evaluate: the target is {describe_argument(batch[-1])}, expected a tensor")
        size = _check_inputs(batch[:-1], self.inputs)
        target = TensorSpec(tuple(batch[-1].shape), dtype_name(batch[-1].dtype))
        program = self._program_for(
            ("evaluate", size, target), lambda: self.step_graph(loss, target=target, batch=size, with_output=True)
        )
        output, value = program.run(feed).values()
        found = {name: float(metric(output, batch[-1])) for name, metric in metrics.items()}
        return size, {**found, "loss": float(value)}

    def _program_for(self, key: tuple[object, ...], make: Callable[[], Graph]) -> CompiledProgram:
        if key not in self._compiled:
            self._compiled[key] = compile_graph(make())
        return self._compiled[key]


def _value_names(module: torch.nn.Module) -> Mapping[str, str]:
    """{key of the module's state dict: name of the value in the graph}."""
    if not isinstance(module, GraphModule):
        raise UsageError(f"found {describe_argument(module)}, expected the module that to_torch made")
    return module.value_names


class FunctionLoss(Module):
    """A loss that the user wrote as a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def forward(self, output: IRTensor, target: IRTensor) -> IRTensor:
        return self._function(output, target)

    def describe(self) -> str:
        return getattr(self._function, "__name__", "")


def _as_loss(loss: Loss) -> torch.nn.Module:
    if isinstance(loss, type) or not callable(loss):
        raise UsageError(
            f"found {describe_argument(loss)} as loss, expected MSELoss(), CrossEntropyLoss(), another module, or a "
            "function of output and target"
        )
    if not isinstance(loss, torch.nn.Module):
        return FunctionLoss(loss)
    arguments = inspect.signature(loss.forward)
    try:
        arguments.bind("output", "target")
    except TypeError as error:
        raise UsageError(
            f"the loss {type(loss).__name__} takes {', '.join(arguments.parameters)}, and a loss gets the output and "
            "the target of a batch; expected a function of these two, such as `lambda output, target: loss(…)`"
        ) from error
    return loss


def _check(graph: Graph) -> Graph:
    check(graph, read_payloads=False)
    return graph


def _spec_of(shape: Sequence[int]) -> TensorSpec:
    if (
        not isinstance(shape, tuple | list)
        or not shape
        or not all(isinstance(size, int) and size > 0 for size in shape)
    ):
        raise UsageError(f"Model: found the input {shape!r}, expected sizes above zero, that of the batch first")
    return TensorSpec(tuple(shape), "float32")


def _with_batch(spec: TensorSpec, batch: int) -> TensorSpec:
    if batch < 1:
        raise UsageError(f"found batch={batch}, expected an integer above zero")
    return TensorSpec((batch, *spec.shape[1:]), spec.dtype, spec.device)


def _check_inputs(tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> int:
    """The number of samples of inputs that fit."""
    for name, tensor in zip(_input_names(len(specs)), tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{name!r} is {describe_argument(tensor)}, expected a tensor")
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    for name, tensor, spec in zip(_input_names(len(specs)), tensors, specs, strict=True):
        if tuple(tensor.shape[1:]) != spec.sizes[1:] or dtype_name(tensor.dtype) != spec.dtype or len(sizes) > 1:
            expected = ", ".join(["batch", *map(str, spec.sizes[1:])])
            raise UsageError(
                f"{name!r} is {dtype_name(tensor.dtype)}{list(tensor.shape)}, expected {spec.dtype}[{expected}]"
            )
    return sizes.pop()


def _input_names(count: int) -> list[str]:
    return ["input"] if count == 1 else [f"input_{index}" for index in range(count)]


def _zeros(spec: TensorSpec) -> torch.Tensor:
    return torch.zeros(spec.sizes, dtype=torch_dtype(spec.dtype))
