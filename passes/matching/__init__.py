"""Match the nodes of two models, for `provenance` and `diff`.

flat_graph.py     a model as one flat list of nodes and values, with subgraphs and functions; `NodeMatching`: the pairs
                  of nodes that are known so far
match.py          finds the pairs, by what nodes compute, what they read, and their names
replacements.py   finds the old nodes that an unmatched new node replaces
"""
