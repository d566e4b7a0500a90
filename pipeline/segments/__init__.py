"""Run models whose shapes or branches depend on the data, in segments: a plan for each static part, and steps between.

model.py       `SegmentedModel`: an ONNX model that runs on whatever it is fed, by remainders (the nodes that are left)
               and steps (a plan, or one node that no plan can hold)
host_ops.py    the nodes that no plan can hold: on sequences and optionals, with results whose size depends on input
               values, and Loop, Scan and SequenceMap, whose bodies are remainders of their own
"""

from pipeline.segments.host_ops import FallbackCount
from pipeline.segments.model import SegmentedModel
