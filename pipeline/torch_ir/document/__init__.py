"""The JSON of an IR, with the keys of pytorch-ir.

writing.py   Graph → data                               files.py       data ↔ files, at once, packed or not
reading.py   data → Graph, ours or pytorch-ir's         constants.py   values of constants, exact to the bit
hand.py      nodes that were put together by hand       signature.py   how arguments and the result nest
head.py      all but tensors and nodes, read at once    dims.py        named dims, and guards
parse.py     bytes → data, or what is wrong with them   expected.py    parts of the data, or what was found there
schema.py    calls, held to their operators
"""
