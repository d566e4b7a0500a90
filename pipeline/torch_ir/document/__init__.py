"""The JSON of an IR, with the keys of pytorch-ir.

writing.py   Graph → data                               files.py       data ↔ files, at once, packed or not
reading.py   data → Graph, ours or pytorch-ir's         saving.py      an IR and its constants → files
reader.py    tensors and nodes, one after the other     constants.py   values of constants, exact to the bit
edited.py    what was changed in the view of an IR      signature.py   how arguments and the result nest
alike.py     whether something was changed              dims.py        named dims, and guards
head.py      all but tensors and nodes, read at once    expected.py    parts of the data, or what was found there
parse.py     bytes → data, or what is wrong with them   schema.py      calls, held to their operators
"""
