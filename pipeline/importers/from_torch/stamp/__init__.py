"""Trace each distinct layer once, and stamp the others.

A model of 61 layers of which 60 are equal is traced with three; each run of equal layers is shortened for itself.
`run.py` finds the equal ones, `walk.py` runs the whole model without numbers and writes down each call, `proof.py`
holds the layers against each other (`difference.py` tells what differs), `shorten.py` makes the model that is traced
(`walked.py` which of them it is), and `repeat.py` writes the whole graph from its graph. `model.py` is the way in.
"""

from pipeline.importers.from_torch.stamp.model import Ends, Stamped, TracedWhole, stamped
from pipeline.importers.from_torch.stamp.run import Run

__all__ = ["Ends", "Run", "Stamped", "TracedWhole", "stamped"]
