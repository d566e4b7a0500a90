"""Carry what is known of a node (torch module, source line, name, author) across a pass that drops it.

carry.py           all of it together, on the matching of `passes.matching`
module_path.py     where in the torch module a node lies: read, joined and written in the exporter's own keys
annotations.py     what onnxline writes beside that: author, replaced nodes, later changes; and who descends from whom
weight_origins.py  which of the source's weights a stored tensor was made of, and its name
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
from passes.provenance.weight_origins import form_of, name_weights

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
]
