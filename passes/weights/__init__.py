"""Weights lie in files, outside of the graph, and may stay unread: then they are known by their place in a file.

    detached.py       take large initializers out of a model, and put them back
    stand_ins.py      what is left in their place, spelled from their digest
    mapped.py         files mapped into memory; external data of a model's own folder
    sharing.py        let other processes read them without a copy
    files.py          write a model, with its weights in a file beside it
    sessions.py       run a model on onnxruntime, with the weights that are mapped already
    weight_stacks.py  stacks of unread weights as one weight for the time of a run

Knows of nothing else in `passes` but the errors, the door (`passes/load/`) and `passes/graph/`.
"""
