"""Train steps: forward, loss, backward and the optimizer's update as one Graph, run by the planned runtime.

batch.py        a batch, and what is refused            trace.py        record forward and backward
optimizer.py    a torch optimizer as data               graph.py        the Graph of a step
record.py       the entry point, phase by phase         program.py      the program, its states, snapshots and phases
state_dict.py   states ↔ torch's state dicts ↔ a file   step_function.py  the function that is recorded

frozen_numbers.py Python values that a step would freeze, and values that Python asks of tensors while recording
attributes.py   what a forward pass leaves in its modules and in the user's files
step_comparison.py  a step against eager torch

graph_module.py a Graph or an ONNX model as a torch module, which can be recorded like any other module
trained.py      which of its weights are trained       qdq.py          a quantized model in trainable form
with_weights.py trained weights → the ONNX model that they came from, or an export of the module
"""

from passes.doors import list_names
from pipeline.events import Phase as Phase
from pipeline.runtime.capture import Snapshot as Snapshot
from pipeline.training.graph_module import GraphModule as GraphModule
from pipeline.training.graph_module import as_module as as_module
from pipeline.training.program import PHASES as PHASES
from pipeline.training.program import NotFinite as NotFinite
from pipeline.training.program import TrainProgram as TrainProgram
from pipeline.training.record import record_step as record_step
from pipeline.training.step_comparison import StepComparison as StepComparison
from pipeline.training.step_comparison import compare_step as compare_step
from pipeline.training.with_weights import with_weights as with_weights

list_names(__name__)
