"""The kernel of an ONNX node that another runtime computes. Its operands pass through numpy; it cannot be captured."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import onnx
import torch
from google.protobuf import json_format

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Launch, Outs
from pipeline.runtime.onnx_op import ForeignNode, type_of
from pipeline.runtime.tensors import as_tensor, to_numpy


def onnx_node(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    proto = json_format.ParseDict(json.loads(attrs["node"]), onnx.NodeProto())
    given = iter(ins)
    types = [type_of(to_numpy(next(given))) if mark else None for mark in attrs["inputs"]]
    node = ForeignNode(proto, {proto.domain: attrs["opset"]}, types, outputs=len(attrs["outputs"]))
    wanted = [place for place, mark in enumerate(attrs["outputs"]) if mark]
    return partial(_compute, node, list(ins), list(outs), [bool(mark) for mark in attrs["inputs"]], wanted)


def _compute(
    node: ForeignNode, ins: list[torch.Tensor], outs: list[torch.Tensor], given: list[bool], wanted: list[int]
) -> None:
    arrays = iter([to_numpy(tensor) for tensor in ins])
    found = node.run([next(arrays) if mark else None for mark in given])
    for place, out in zip(wanted, outs, strict=True):
        out.copy_(as_tensor(np.asarray(found[place])).reshape(out.shape))


KERNELS: dict[Kind, Kernel] = {Kind.OnnxNode: onnx_node}
