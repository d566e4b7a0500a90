"""Models by hand: layers that emit to the IR, and their training by recorded steps.

builder.py       the Builder that modules emit to, and IR tensors     storage.py     parameters and buffers
functional.py    the operations of a `forward`                        module.py      Module and Sequential
layers.py        the layers of torch.nn                               losses.py      losses
optimizers.py    optimizers as data                                   model.py       add, compile, fit, evaluate
fit.py           the loop over steps, for any train program

No gradient is written here: a graph that was emitted is a module by `training.as_module`, whose step is recorded.
"""

from __future__ import annotations

from pipeline.authoring import functional
from pipeline.authoring.builder import IRTensor, ModelBuilder
from pipeline.authoring.fit import FitLimits, StepRecord, TrainingHistory, TrainingLoop
from pipeline.authoring.layers import (
    GELU,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Embedding,
    Flatten,
    LayerNorm,
    Linear,
    LogSoftmax,
    MaxPool2d,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
)
from pipeline.authoring.losses import CrossEntropyLoss, LossModule, MSELoss
from pipeline.authoring.model import Evaluation, Model
from pipeline.authoring.module import Module, Sequential
from pipeline.authoring.optimizers import SGD, Adam, AdamW, OptimizerSpec
from pipeline.authoring.storage import Buffer, Parameter

__all__ = [
    "GELU",
    "SGD",
    "Adam",
    "AdamW",
    "BatchNorm2d",
    "Buffer",
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "Evaluation",
    "FitLimits",
    "Flatten",
    "IRTensor",
    "LayerNorm",
    "Linear",
    "LogSoftmax",
    "LossModule",
    "MSELoss",
    "MaxPool2d",
    "Model",
    "ModelBuilder",
    "Module",
    "OptimizerSpec",
    "Parameter",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "StepRecord",
    "Tanh",
    "TrainingHistory",
    "TrainingLoop",
    "functional",
]
