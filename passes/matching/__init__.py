"""Which node of a model is which node of another one: what `provenance` and `diff` share.

graph_index.py    a model as one flat list of nodes and values, with subgraphs and functions
node_matching.py  what is known so far of which node is which
match.py          finds out, by what nodes compute, read and are called
replacements.py   what a node without a counterpart stands for
"""
