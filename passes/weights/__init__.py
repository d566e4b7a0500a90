"""Weights outside of the graph: mapped from files, shared between processes, and unread where nothing needs their
values.

    detached.py       take large initializers out of a model, and put them back
    stand_ins.py      the few elements left in place of a weight, made from its digest
    mapped.py         files mapped into memory; external data in a model's folder
    sharing.py        models whose weights other processes map without a copy
    files.py          write a model, with its weights in a file next to it
    sessions.py       run a model on onnxruntime, on weights that are already mapped
    relations.py      whether a tensor is another one transposed, reshaped, cut, joined or scaled
    weight_stacks.py  collapse stacks of unread weights into one weight for the time of a run

Imports nothing else of `passes` but the errors, the worker's platform functions, `passes/load/` and `passes/graph/`.
"""
