"""The section `train:`: how `onnxline train` trains the model of the section `model`, or its quantized form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictStr, model_validator

from pipeline.config.sections import Count, DeviceName, Fraction, Section

Rate = Annotated[StrictFloat, Field(gt=0)]
Decay = Annotated[StrictFloat, Field(ge=0, lt=1)]

Reference = Annotated[StrictStr, Field(min_length=1)]
"""`path/to/file.py:function` or `package.module:function`."""


class OptimizerConfig(Section):
    """An optimizer of torch, with its own defaults for what is left out."""

    name: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: Rate = 1e-3
    weight_decay: Fraction | None = None
    momentum: Fraction | None = None
    nesterov: StrictBool | None = None
    betas: tuple[Decay, Decay] | None = None
    eps: Fraction | None = None
    amsgrad: StrictBool | None = None

    @model_validator(mode="after")
    def _check_settings(self) -> OptimizerConfig:
        others = ("betas", "eps", "amsgrad") if self.name == "sgd" else ("momentum", "nesterov")
        foreign = [name for name in others if getattr(self, name) is not None]
        if foreign:
            raise ValueError(f"found {foreign[0]!r}, which {self.name} does not have; leave it out")
        if self.nesterov and not self.momentum:
            raise ValueError("found nesterov without momentum, expected a momentum above 0")
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are given, by torch's names."""
        return self.model_dump(exclude={"name"}, exclude_none=True)


class ScheduleConfig(Section):
    """How the learning rate changes within `steps` steps: up and down again (one-cycle), or down (cosine)."""

    name: Literal["one-cycle", "cosine"]
    steps: Count


class TrainConfig(Section):
    """What `onnxline train` does with the module.

    batches: a function from the epoch, counted from 0, and `args` to batches `(*inputs, target)`; in the same order at
        each call, so that a training that was stopped goes on as it would have.
    loss: cross-entropy, mse, or a function of output and target.
    epochs, steps, until: when the training ends: after these epochs or steps, or when the mean loss of 50 steps is
        below `until`.
    max_norm: the norm of all gradients is clipped to it.
    native: kernels in C++ compute what they can; the compiler of this machine builds them once.
    device: where the steps run: cpu, cuda or cuda:1.
    save_every: the number of steps after which the states are saved; they are saved after each epoch too.
    evaluate: a function from the trained module, or `Model`, and `args` to numbers by name, which the report shows.
    quantized: train the model that a simulation of quantization makes, by the section `quantsim`, and not the floats.
    export: write the trained model to an ONNX file, by the main job with the other sections.
    """

    batches: Reference
    args: dict[str, Any] = Field(default_factory=dict)
    loss: Reference = "cross-entropy"
    label_smoothing: Annotated[StrictFloat, Field(ge=0, le=1)] = 0.0
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig | None = None
    epochs: Count = 1
    steps: Count | None = None
    until: StrictFloat | None = None
    max_norm: Rate | None = None
    native: StrictBool = False
    device: DeviceName = "cpu"
    save_every: Count | None = None
    evaluate: Reference | None = None
    quantized: StrictBool = False
    export: StrictBool = True

    @model_validator(mode="after")
    def _check_device(self) -> TrainConfig:
        if self.native and self.device != "cpu":
            raise ValueError(f"found 'native' with the device {self.device}, expected one of them: C++ is for the CPU")
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> TrainConfig:
        schedule = self.schedule
        if schedule and schedule.name == "one-cycle" and (self.steps or 0) > schedule.steps:
            raise ValueError(
                f"found {self.steps} steps with a one-cycle schedule of {schedule.steps}, expected as many in "
                "schedule.steps, since its rate ends there"
            )
        return self

    @model_validator(mode="after")
    def _check_loss(self) -> TrainConfig:
        if self.loss not in ("cross-entropy", "mse") and ":" not in self.loss:
            raise ValueError(f"found loss {self.loss!r}, expected cross-entropy, mse, or path/to/file.py:function")
        if self.label_smoothing and self.loss != "cross-entropy":
            raise ValueError(f"found label_smoothing with the loss {self.loss!r}, expected it with cross-entropy only")
        return self
