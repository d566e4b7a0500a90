"""Validation of ONNX models, which every command, pass and importer calls first. Read `load.py` first.

    load.py       a path, bytes or a message → a valid model, or an error of one sentence; the names of its graphs and
                  bodies: unique, defined before they are read, no cycles
    nodes.py      a node against an operator's schema, or against a function of the model, without recursion
    values.py     text in UTF-8; types and dims of values; memory limits, so that nobody allocates what a file declares
    tensors.py    a tensor: dtype, dims, and data of exactly that size, inline or in a file

ONNX's own checker is not used. It takes a model as one message (weights included), refuses operators that onnxruntime
adds to ONNX's domain, and accepts models that break readers: text that is no UTF-8, segments, data of another size,
recursive functions.
Imports nothing else of `passes` but the errors, the memory limit and `passes/graph/`.
"""

from passes.load.load import check_model, free_dims, load_model, to_path
from passes.load.tensors import byte_count, check_payload
from passes.load.values import MOST_DRAWN, check_bytes, check_drawn, check_drawn_together, memory_budget, seconds_to_run
