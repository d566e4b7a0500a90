"""Carry what is known of a node (torch module, source line, name, author) across a pass that drops it.

carry.py           carries all of it, on the matching of `passes.matching`: read this first
annotations.py     a node: its torch module, in the keys of the exporter; its author, sources and later changes, in
                   keys of onnxline; the names of a source in its final model
weight_origins.py  the source's weights that a stored tensor was made of, and its name
"""

from passes.provenance.annotations import (
    AUTHOR_KEY,
    CHANGED_KEY,
    COUNT_KEY,
    REPLACED_KEY,
    Descendants,
    ModulePath,
    NodeAnnotations,
    annotations_of,
    known_as,
    module_path_of,
)
from passes.provenance.carry import Carrier, carry
from passes.provenance.weight_origins import form_of, name_weights, part_of, untransposed_name
