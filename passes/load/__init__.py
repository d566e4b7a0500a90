"""The door: what every command, pass and importer asks before it trusts an ONNX model. Read `load.py` first.

    load.py       a path, bytes or a message → a model that is whole, or one sentence that says what is wrong with it
    graphs.py     names: unique, made before they are read, no circles; the graphs inside of nodes
    nodes.py      one node against what it calls: an operator's schema, or a function of the model without recursion
    values.py     text that is UTF-8; types and dims of values
    tensors.py    one tensor: dtype, dims, and data of just that size, inline or in a file
    budget.py     what a machine can hold: nobody allocates what a file merely declares

ONNX's own checker is not asked. It takes a model as one message (weights included), refuses operators that onnxruntime
adds to ONNX's domain, and lets pass what breaks a reader: text that is no UTF-8, segments, data of another size,
functions that call themselves.
Nothing here knows of anything else in `passes` but the errors and `passes/graph/`.
"""

from passes.load.budget import MOST_DRAWN, check_bytes, check_drawn, check_drawn_together, memory_budget, seconds_to_run
from passes.load.load import check_model, load_model
from passes.load.tensors import byte_count, check_payload

__all__ = [
    "MOST_DRAWN",
    "byte_count",
    "check_bytes",
    "check_drawn",
    "check_drawn_together",
    "check_model",
    "check_payload",
    "load_model",
    "memory_budget",
    "seconds_to_run",
]
