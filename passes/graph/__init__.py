"""Questions about a bare ONNX graph, whoever holds its weights. Knows of nothing else in `passes`.

traversal.py    the graphs inside of nodes, what a node reads, what is live, an order
op_facts.py     what operators do with elements: move them, draw them, ask for their number
formatting.py   types, tensors and attributes in words
"""
