"""Analysis of whole models; their weights are stored apart (`passes/weights/`).

    canonical.py   digests of what a model and its values compute: names and order do not count
    signature.py   declared inputs and outputs, initializers that are inputs, and annotations
    analysis.py    a model with facts on it that are computed once; some nodes as a model of their own

Imports only `passes/weights/`, `passes/graph/` and `passes/load/`.
"""
