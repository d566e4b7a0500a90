"""Trace each distinct layer once, and repeat it for the others.

A model of 61 layers of which 60 are equal is traced with three; each run of equal layers is shortened separately.
`layer_runs.py` finds layers that look equal, `meta_trace.py` runs the whole model on meta while `recorder.py` records
each call, `proof.py` compares the layers' calls, and `whole_graph.py` writes the whole graph from the graph of a short
model. `deduplicate.py` is the entry point, and builds the short model.
"""

from pipeline.importers.from_torch.layer_dedup.deduplicate import (
    DeduplicatedGraph,
    Ends,
    TracedWhole,
    deduplicate_layers,
)
from pipeline.importers.from_torch.layer_dedup.layer_runs import LayerRun
