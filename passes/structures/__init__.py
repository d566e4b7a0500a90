"""Structures that a policy can keep: subgraphs that users know by a name, found by pattern and judged by independent
checkers.

kinds.py        the table of kinds: read this first; types.py, the data that finders and checkers share
view.py         an index over a graph, for finders
candidates.py   builds instances from the candidates of a finder
samples.py      a few elements of a value, by which finders know a norm or a curve in any spelling
attention.py, norms.py, activations.py, rotary.py, adapters.py, short_patterns.py   finders by pattern
selectors.py    finders by name
qkv.py          the finder of separate Q, K and V, on projection.py, matrices.py, axes.py
*_check.py      the checkers
subgraph.py     the nodes of an instance, to draw it
"""

from passes.structures.kinds import SELECTORS, STRUCTURES, Structure, structure_of
from passes.structures.types import Instance, KeptWeight, SearchResult
