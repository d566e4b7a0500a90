"""The ONNX form of a convolution that torch's exporter has wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from onnxscript.onnx_opset import opset18

op: Final[Any] = opset18
"""Typed as Any: its annotations are for eager evaluation, and here it adds nodes to torch's graph."""


def translate_conv3d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Any:
    """`aten.conv3d`; torch 2.13 takes the form for complex numbers, whose bias has two columns where none is given."""
    strides, pads, dilations = (list(sizes) * (3 // len(sizes)) for sizes in (stride, padding, dilation))
    given = (input, weight) if bias is None else (input, weight, bias)
    return op.Conv(*given, strides=strides, pads=pads * 2, dilations=dilations, group=groups)
