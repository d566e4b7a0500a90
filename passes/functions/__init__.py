"""Layers as functions: equal layers become one ONNX function, called with the weights of each; passes run once on each
body.

    find.py           which layers are equal, by module paths and nodes
    fold.py           functions and calls in place of them, proven
    side_by_side.py   the graph that passes get, the way back, and the prover for it
"""

from passes.functions.fold import describe_layers, fold_layers
from passes.functions.side_by_side import FunctionLayout, LayoutProver, fold_run, lay_out
