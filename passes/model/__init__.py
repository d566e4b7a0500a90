"""What a model computes, says and is worth running as; its weights lie in files (`passes/weights/`).

    canonical.py   what it computes, as digests: names and order do not count
    signature.py   what its caller relies on, and what it says of itself
    analysis.py    a model on trial, with what has been found out about it
    extraction.py  some nodes of it as a model of their own
    rounding.py    sums by which a matrix is known again to rounding

Stands on `passes/weights/`, `passes/graph/` and the door (`passes/load/`) alone.
"""
