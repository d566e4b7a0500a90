"""Carry what is known of a node (torch module, source line, name, author) across a pass that drops it.

wiring.py     a model as one flat list of nodes and values, with subgraphs and functions
same.py       which node after the pass is which one from before it
weight_readers.py  which lost nodes put the weights of a made product to use
replaced.py   what a node that the pass made stands for
places.py     where in the torch module a node lies: read, joined and written in the exporter's own keys
marks.py      what onnxline writes beside that: author, replaced nodes, later changes
weight_origins.py  which of the source's weights a stored tensor was made of, and its name
names.py      node names given back
heirs.py      what stands in a later model for nodes of the source
carry.py      all of it together
"""

from __future__ import annotations

from passes.provenance.carry import Carrier, carry
from passes.provenance.heirs import Heirs, known_as
from passes.provenance.marks import AUTHOR_KEY, CHANGED_KEY, COUNT_KEY, REPLACED_KEY, Marks, marks_of
from passes.provenance.places import Place, place_of
from passes.provenance.weight_origins import form_of, name_weights

__all__ = [
    "AUTHOR_KEY",
    "CHANGED_KEY",
    "COUNT_KEY",
    "REPLACED_KEY",
    "Carrier",
    "Heirs",
    "Marks",
    "Place",
    "carry",
    "form_of",
    "known_as",
    "marks_of",
    "name_weights",
    "place_of",
]
