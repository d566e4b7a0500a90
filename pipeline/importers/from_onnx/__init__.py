"""ONNX → Graph. Read `model.py` first; each family file turns ONNX nodes into IR ops; `model.py` joins their tables.

Before the families:

    source.py         a path or a ModelProto → a model without functions, its opset and its folder, its initializers
    specs.py          element types, declared and inferred shapes, the sizes that the caller fixes
    resolve.py        a static spec for every value; small constants folded (fold.py); branches taken
    replacements.py   nodes that stand for another one: a branch, the standard's body, an older opset's spelling
    node.py           one node as the family files see it, and names → vids while the graph is built
    definitions.py    operators as expressions: `lambda x, slope: where(x < 0, x * slope, x)`
    shape.py          calls of torch that move elements, which all families share

`pipeline.ir` does not import `onnx`: only this package knows ONNX.
"""

from pipeline.importers.from_onnx.model import from_onnx
