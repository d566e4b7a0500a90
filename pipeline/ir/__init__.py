"""The static IR: a Graph of Values and Ops, the checker, and the text and JSON forms.

A graph by hand is made by `onnxline.Builder`, which holds each op against its operator.
"""

from pipeline.ir.check import check
from pipeline.ir.dims import as_states, dims_of, fix_dims
from pipeline.ir.graph import (
    DTYPE_BITS,
    Attr,
    BodyRef,
    Dim,
    DimRange,
    Graph,
    InputRef,
    KernelSpec,
    Op,
    Payload,
    Role,
    SymExpr,
    TensorSpec,
    TorchConst,
    Value,
)
from pipeline.ir.json import from_json, to_json
from pipeline.ir.parse import IRSyntaxError, from_text
from pipeline.ir.text import to_text

__all__ = [
    "DTYPE_BITS",
    "Attr",
    "BodyRef",
    "Dim",
    "DimRange",
    "Graph",
    "IRSyntaxError",
    "InputRef",
    "KernelSpec",
    "Op",
    "Payload",
    "Role",
    "SymExpr",
    "TensorSpec",
    "TorchConst",
    "Value",
    "as_states",
    "check",
    "dims_of",
    "fix_dims",
    "from_json",
    "from_text",
    "to_json",
    "to_text",
]
