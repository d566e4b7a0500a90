"""ONNX → Graph. Read `model.py` first; each family file turns ONNX nodes into IR ops; `tables.py` joins them.

Before the families come into play:

    source.py      a path or a ModelProto → a model that holds no functions, its opset and its folder
    stored.py      initializers → params and consts that reference their bytes
    resolve.py     a static spec for every value; small constants folded (fold.py); shapes inferred (infer.py)
    scope.py       what a name means while the graph is built
    node.py        one node, as the family files see it

`onnx` is imported nowhere in `pipeline.ir`: this package is where ONNX ends.
"""

from pipeline.importers.from_onnx.model import from_onnx

__all__ = ["from_onnx"]
