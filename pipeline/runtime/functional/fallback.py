"""The forms of ONNX nodes that no importer knows: QuantizeLinear and DequantizeLinear, with gradients.

Rounding has no gradient, so it takes that of a straight line (Bengio et al. 2013); a number that is rounded beyond the
ends of the format has none. With that, the gradient of a scale that QuantizeLinear and DequantizeLinear share is that
of LSQ (Esser et al. 2020, "Learned step size quantization", equation 3), by the rules of calculus alone:

    q = clamp(round(x / s) + z)      y = (q - z) · s      dy/ds = round(x/s) - x/s  within,  q - z  beyond

Whole numbers travel between the two as floats, since torch gives integers no gradient.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from pipeline.errors import Unsupported
from pipeline.ops import Kind
from pipeline.runtime.functional.base import Attrs, Form, Ins, Specs
from pipeline.runtime.tensors import torch_dtype


def quantize(ins: Ins, node: Mapping[str, Any], outs: Specs) -> torch.Tensor:
    """The whole numbers of the format, as floats; ties go to the even number, as ONNX has it."""
    x, scale = ins[0], spread(ins[1], ins[0], node)
    numbers = x / scale.to(x.dtype)
    numbers = numbers + (numbers.round() - numbers).detach()
    if len(ins) == 3:
        numbers = numbers + spread(ins[2].to(x.dtype), x, node)
    dtype = torch_dtype(outs[0].dtype)
    return numbers.clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def dequantize(ins: Ins, node: Mapping[str, Any], outs: Specs) -> torch.Tensor:
    dtype = torch_dtype(outs[0].dtype)
    numbers = ins[0].to(dtype)
    if len(ins) == 3:
        numbers = numbers - spread(ins[2].to(dtype), numbers, node)
    return numbers * spread(ins[1], numbers, node).to(dtype)


def spread(parameters: torch.Tensor, x: torch.Tensor, node: Mapping[str, Any]) -> torch.Tensor:
    """Scales or zero points so that they broadcast to `x`: one for all, for each index of an axis, or each block."""
    if parameters.numel() == 1:
        return parameters.reshape(())
    axis, block = node.get("axis", 1) % x.dim(), node.get("block_size", 0)
    if block:
        return parameters.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    return parameters.view([-1 if own == axis else 1 for own in range(x.dim())])


def of_node(ins: Ins, attrs: Attrs, outs: Specs) -> torch.Tensor:
    """Raises Unsupported: another node, or one that rounds to floats."""
    form = NODES.get(attrs["op"])
    if form is None:
        raise Unsupported(f"{attrs['op']} has no form that torch differentiates; it is run by onnxruntime")
    if outs[0].dtype.startswith("float8"):
        raise Unsupported(f"{attrs['op']} to {outs[0].dtype} has no form; expected whole numbers of 8 or 16 bits")
    node = {entry["name"]: int(entry["i"]) for entry in json.loads(attrs["node"]).get("attribute", []) if "i" in entry}
    return form(ins, node, outs)


NODES = {"QuantizeLinear": quantize, "DequantizeLinear": dequantize}

FORMS: dict[Kind, Form] = {Kind.OnnxNode: of_node}
