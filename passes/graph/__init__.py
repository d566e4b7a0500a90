"""Functions on ONNX graphs that need no weights. Imports nothing else of `passes`.

traversal.py        bodies of nodes, the values that a node reads, live nodes, topological order
index.py            `GraphIndex`: producers, consumers, constants; cut nodes out, and let them read other values
inference.py        types of values by shape inference, the float tensors among them, and constants by ONNX's evaluator
op_facts.py         tables of operators: which move elements, draw random values or ask for a size; the axes along
                    which a product reads its weight, also after layout operators
formatting.py       types, tensors and attributes as text
"""
