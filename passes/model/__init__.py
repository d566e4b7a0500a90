"""What a model is to us: a graph without its weights, which lie in files and are mapped where they are read.

    weights.py, external_data.py               take large initializers out of a graph, and put them back
    files.py, sharing.py                       write a model; let other processes read it without a copy
    sessions.py                                run it on onnxruntime, with the weights that are mapped already
    canonical.py, fingerprint.py               what it computes, as digests: names and order do not count
    reads.py, bodies.py, order.py, spelled.py  what a node reads, the graphs inside of it, an order, types in words
    signature.py, annotations.py, validity.py  what its caller relies on; what it says of itself; which rules it breaks
    cut.py                                     some nodes of it as a model of their own
    subject.py                                 a model on trial, with what has been found out about it

Knows of nothing else in `passes` but the errors and the door (`passes/load/`).
"""
