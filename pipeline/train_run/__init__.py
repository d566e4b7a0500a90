"""`onnxline train`: a training from a configuration, with its report, and its model as ONNX. Read `TrainRun` first.

run.py     record, train, evaluate, export, report
source.py  what is trained, its way to ONNX, and the section `train` → torch's loss, optimizer and schedule
"""

from pipeline.train_run.run import TrainResult as TrainResult
from pipeline.train_run.run import TrainRun as TrainRun
