"""Models by hand: layers that emit to the IR, and their training by recorded steps.

builder.py       the Builder that modules emit to                     functional.py  the operations of a `forward`
tensors.py       IR tensors, and what arguments have to be            forms.py       torch's functions on IR tensors
module.py        Module, Sequential, parameters and buffers, emit     layers.py      the layers and losses of torch.nn
optimizers.py    optimizers as data                                   model.py       add, compile, fit, evaluate
fit.py           the loop over steps, for any train program

No gradient is written here: a graph that was emitted is a module by `training.as_module`, whose step is recorded.
"""

from passes.doors import list_names
from pipeline.authoring import functional as functional
from pipeline.authoring.builder import ModelBuilder as ModelBuilder
from pipeline.authoring.fit import FitLimits as FitLimits
from pipeline.authoring.fit import TrainingHistory as TrainingHistory
from pipeline.authoring.fit import TrainingLoop as TrainingLoop
from pipeline.authoring.layers import GELU as GELU
from pipeline.authoring.layers import BatchNorm2d as BatchNorm2d
from pipeline.authoring.layers import Conv2d as Conv2d
from pipeline.authoring.layers import CrossEntropyLoss as CrossEntropyLoss
from pipeline.authoring.layers import Dropout as Dropout
from pipeline.authoring.layers import Embedding as Embedding
from pipeline.authoring.layers import Flatten as Flatten
from pipeline.authoring.layers import LayerNorm as LayerNorm
from pipeline.authoring.layers import Linear as Linear
from pipeline.authoring.layers import LogSoftmax as LogSoftmax
from pipeline.authoring.layers import LossModule as LossModule
from pipeline.authoring.layers import MaxPool2d as MaxPool2d
from pipeline.authoring.layers import MSELoss as MSELoss
from pipeline.authoring.layers import ReLU as ReLU
from pipeline.authoring.layers import Sigmoid as Sigmoid
from pipeline.authoring.layers import SiLU as SiLU
from pipeline.authoring.layers import Softmax as Softmax
from pipeline.authoring.layers import Tanh as Tanh
from pipeline.authoring.model import Evaluation as Evaluation
from pipeline.authoring.model import Model as Model
from pipeline.authoring.module import Buffer as Buffer
from pipeline.authoring.module import Module as Module
from pipeline.authoring.module import Parameter as Parameter
from pipeline.authoring.module import Sequential as Sequential
from pipeline.authoring.module import emit as emit
from pipeline.authoring.optimizers import SGD as SGD
from pipeline.authoring.optimizers import Adam as Adam
from pipeline.authoring.optimizers import AdamW as AdamW
from pipeline.authoring.optimizers import OptimizerSpec as OptimizerSpec
from pipeline.authoring.tensors import IRTensor as IRTensor
from pipeline.report.model import StepRecord as StepRecord

list_names(__name__)
