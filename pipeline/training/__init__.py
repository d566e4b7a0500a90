"""Train steps: forward, loss, backward and the optimizer's update as one Graph, run by the planned runtime.

batch.py        what a batch is                         trace.py        record forward and backward
optimizer.py    a torch optimizer as data               graph.py        the Graph of a step
record.py       the entry point                         program.py      the program, its states and snapshots
state_dict.py   states ↔ torch's state dicts            checkpoint.py   states ↔ a file
blame.py        where a step broke
"""

from __future__ import annotations

from pipeline.runtime.capture import Snapshot
from pipeline.training.program import NotFinite, Phase, TrainProgram
from pipeline.training.record import record_step

__all__ = ["NotFinite", "Phase", "Snapshot", "TrainProgram", "record_step"]
