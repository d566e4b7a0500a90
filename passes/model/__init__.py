"""Analysis of whole models; their weights are stored apart (`passes/weights/`).

    canonical.py   digests of what a model and its values compute: names and order do not count
    signature.py   declared inputs and outputs, and annotations
    analysis.py    a model with facts on it that are computed once
    extraction.py  some nodes of a model as a model of their own; functions inlined
    rounding.py    sums that identify a matrix up to rounding

Imports only `passes/weights/`, `passes/graph/` and `passes/load/`.
"""
