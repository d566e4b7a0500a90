"""Models by hand: layers that emit to the IR, and their training by recorded steps.

builder.py       the Builder that modules emit to                     functional.py  the operations of a `forward`
tensors.py       IR tensors, and what arguments have to be            forms.py       torch's functions on IR tensors
module.py        Module, Sequential, parameters and buffers, emit     layers.py      the layers and losses of torch.nn
optimizers.py    optimizers as data                                   model.py       add, compile, fit, evaluate
fit.py           the loop over steps, for any train program

No gradient is written here: a graph that was emitted is a module by `training.as_module`, whose step is recorded.
"""

from __future__ import annotations

from pipeline.authoring import functional
from pipeline.authoring.builder import ModelBuilder
from pipeline.authoring.fit import FitLimits, TrainingHistory, TrainingLoop
from pipeline.authoring.layers import (
    GELU,
    BatchNorm2d,
    Conv2d,
    CrossEntropyLoss,
    Dropout,
    Embedding,
    Flatten,
    LayerNorm,
    Linear,
    LogSoftmax,
    LossModule,
    MaxPool2d,
    MSELoss,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
)
from pipeline.authoring.model import Evaluation, Model
from pipeline.authoring.module import Buffer, Module, Parameter, Sequential, emit
from pipeline.authoring.optimizers import SGD, Adam, AdamW, OptimizerSpec
from pipeline.authoring.tensors import IRTensor
from pipeline.report.model import StepRecord

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
    "emit",
    "functional",
]
