"""Functions on ONNX graphs that need no weights. Imports nothing else of `passes`.

traversal.py        bodies of nodes, the values that a node reads, live nodes, topological order
float_tensors.py    the float tensors of a model, and the axes of a weight
moved_constants.py  stored tensors as layout operators hand them on
op_facts.py         tables of operators: which move elements, draw random numbers or ask for a size
formatting.py       types, tensors and attributes as text
"""
