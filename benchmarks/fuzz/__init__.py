"""Broken ONNX files, made from a seed, and the doors of onnxline that they are brought to.

    seeds.py          small valid models of many kinds
    mutations.py      one valid model and a number → the bytes of a broken one
    onnx_changes.py   the changes that know where an ONNX model hurts
    doors.py          what opens a model, and which ends are allowed
    campaign.py       thousands of files, a process that may die or hang, a table: `python -m benchmarks.fuzz`

`tests/fuzz` brings 3,000 of the same files to the same doors.
"""
