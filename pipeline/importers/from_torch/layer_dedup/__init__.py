"""Trace each distinct layer once, and repeat it for the others.

A model of 61 layers of which 60 are equal is traced with three; each run of equal layers is shortened for itself.
`layer_runs.py` finds the equal ones, `meta_trace.py` runs the whole model without numbers while `recorder.py` writes
down each call, `proof.py` holds the layers against each other, `shortened.py` makes the model that is traced, and
`whole_graph.py` and `repeat.py` write the whole graph from its graph. `deduplicate.py` is the way in.
"""

from pipeline.importers.from_torch.layer_dedup.deduplicate import (
    DeduplicatedGraph,
    Ends,
    TracedWhole,
    deduplicate_layers,
)
from pipeline.importers.from_torch.layer_dedup.layer_runs import LayerRun

__all__ = ["DeduplicatedGraph", "Ends", "LayerRun", "TracedWhole", "deduplicate_layers"]
