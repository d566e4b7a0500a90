"""The JSON of an IR, with the keys of pytorch-ir.

nodes.py       nodes and tensors, a view of a Graph       files.py       data ↔ files, at once, packed or not
document.py    all that a file holds, checked by type     constants.py   values of constants, exact to the bit
reader.py      the document → Graph                       parse.py       data → dataclasses, mistakes as sentences
signature.py   how arguments and results nest
"""
