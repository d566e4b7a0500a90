"""Carry what is known of a node (torch module, source line, name, author) across a pass that drops it.

carry.py           carries all of it, on the matching of `passes.matching`: read this first
module_path.py     the torch module that a node belongs to: read, joined and written in the exporter's own keys
annotations.py     what onnxline writes beside that: author, replaced nodes, later changes; descendants of a node
weight_origins.py  the source's weights that a stored tensor was made of, and its name
"""

from __future__ import annotations

from passes.provenance.annotations import (
    AUTHOR_KEY,
    CHANGED_KEY,
    COUNT_KEY,
    REPLACED_KEY,
    Descendants,
    NodeAnnotations,
    annotations_of,
    known_as,
)
from passes.provenance.carry import Carrier, carry
from passes.provenance.module_path import ModulePath, module_path_of
from passes.provenance.weight_origins import form_of, name_weights, part_of

__all__ = [
    "AUTHOR_KEY",
    "CHANGED_KEY",
    "COUNT_KEY",
    "REPLACED_KEY",
    "Carrier",
    "Descendants",
    "ModulePath",
    "NodeAnnotations",
    "annotations_of",
    "carry",
    "form_of",
    "known_as",
    "module_path_of",
    "name_weights",
    "part_of",
]
