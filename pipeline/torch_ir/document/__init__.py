"""The JSON of an IR, with the keys of pytorch-ir.

document.py    all that a file holds, checked by type     files.py       data ↔ files, at once, packed or not
reader.py      the document → Graph                       constants.py   values of constants, exact to the bit
signature.py   how arguments and results nest             parse.py       data → dataclasses, mistakes as sentences
"""
