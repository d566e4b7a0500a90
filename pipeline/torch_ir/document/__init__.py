"""The JSON of an IR, with the keys of pytorch-ir.

writing.py   Graph → data                               files.py       data ↔ files, at once, packed or not
reader.py    data → Graph, ours or pytorch-ir's         constants.py   values of constants, exact to the bit
header.py    all but tensors and nodes, read at once    edits.py       edits in the view of an IR, applied
"""
