"""Structures that a policy can keep: subgraphs with a meaning, found by shape and judged by independent checkers.

kinds.py        the table of kinds: read this first; types.py, what finders and checkers share
view.py         an index over a graph, for finders
candidates.py   from what a finder has seen to instances
attention.py, norms.py, activations.py, embeddings.py, residual.py    finders by shape
selectors.py    finders by name
qkv.py          the finder of separate Q, K and V, on projection.py, matrices.py, axes.py
*_check.py      the checkers
subgraph.py     which nodes an instance is made of, to draw it
"""

from __future__ import annotations

from passes.structures.kinds import SELECTORS, STRUCTURES, Structure, structure_of
from passes.structures.types import Found, Instance, KeptWeight

__all__ = ["SELECTORS", "STRUCTURES", "Found", "Instance", "KeptWeight", "Structure", "structure_of"]
