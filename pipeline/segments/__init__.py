"""Run models whose shapes or branches depend on the data, in segments: a plan for each static part, and steps between.

model.py       `SegmentedModel`: an ONNX model that runs on whatever it is fed, by remainders (the nodes that are left)
               and steps (a plan, or one node that no plan can hold)
control.py     Loop and Scan, whose bodies are remainders of their own
host_ops.py    sequences, optionals, and operators whose result has a size that depends on input values
"""

from pipeline.segments.model import FallbackCount, SegmentedModel

__all__ = ["FallbackCount", "SegmentedModel"]
