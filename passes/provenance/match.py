"""Match the nodes of a model with those of the model that a pass made of it.

The evidence, strongest first: a node computes the same (a digest from the inputs up); its result goes to the same
places; it is the only one of its kind on the same weights; it reads the same values, or makes one for the same reader;
it has the same name. Names come last, since some tools number what they make afresh, and then a name is another node's.
"""

from __future__ import annotations

from passes.provenance.naming import NAMING
from passes.provenance.same import Same
from passes.provenance.structure import by_meaning, by_readers, by_weights, spread
from passes.provenance.wiring import Wiring

__all__ = ["match"]


def match(before: Wiring, after: Wiring) -> Same:
    """Match the nodes and values of two wirings that share their meanings."""
    same = Same(before, after)
    by_meaning(same)
    by_readers(same)
    by_weights(same)
    spread(same)
    while any(found(same) for found in NAMING):
        spread(same)
    return same
