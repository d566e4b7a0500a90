"""ONNX text in, IR text out: the helper that every picture test uses."""

from __future__ import annotations

import re
import textwrap

import onnx
from onnx import parser

from pipeline.importers import from_onnx
from pipeline.ir import Graph, check, to_text


def model(text: str, opset: int = 20) -> onnx.ModelProto:
    """A model of one graph: `g (float[2, 3] x) => (float[2, 3] y) { y = Relu(x) }`."""
    header = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'
    return parser.parse_model(header + text)


def graph_from(text: str, opset: int = 20, **options) -> Graph:
    """The graph of `text`, checked."""
    graph = from_onnx(model(text, opset), **options)
    check(graph)
    return graph


def ops(text: str, opset: int = 20, **options) -> str:
    """The IR text of `text`, between the signature and the return, for comparing with a picture.

    Left out are the types of the nodes, and operands that are in the order of a signature: `aten.add.Tensor(%0, %1)`.
    """
    lines = [
        NODE_TYPE.sub("", OPERANDS.sub("", line)) for line in to_text(graph_from(text, opset, **options)).splitlines()
    ]
    body = [line for line in lines[1:-1] if line and not line.startswith("  return")]
    return textwrap.dedent("\n".join(body))


NODE_TYPE = re.compile(r' of "[^"]*"')
OPERANDS = re.compile(r" \{(?:\w+: \$\d+(?:, )?)+\}|(?<=\{)(?:\w+: (?:\$\d+|\[\$[^]]*\]), )+")
