"""The quantized model in torch, quantized by torchao: a cross-check that shares no kernel with onnxruntime.

Floats are computed by torch's operators, integers by torchao's `quantize_affine` and `dequantize_affine`. What holds no
floats (sizes, indices, masks) comes from a run of onnxruntime, by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from passes.graph.inference import float_tensors
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.argument_checks import a, a_mapping, expects
from pipeline.errors import Unsupported, UsageError
from pipeline.ir import Op
from pipeline.quantsim.gradients import DEQUANTIZE, QUANTIZE, TorchNodes, read_stored
from pipeline.runtime.tensors import as_tensor, dtype_name, to_numpy

QUANTIZERS: Final = ("QuantizeLinear", "DequantizeLinear")


class TorchRun:
    """A quantized model that torch and torchao run.

    Raises:
        UsageError: torchao is not installed, or `model` is no DetachedModel.
    """

    @expects(model=a(DetachedModel, "a model, as read_model gives"))
    def __init__(self, model: DetachedModel) -> None:
        try:
            from torchao.quantization import quant_primitives  # type: ignore[import-not-found]
        except ImportError as error:
            raise UsageError("the cross-check in torch needs torchao: pip install torchao") from error
        self._primitives: Any = quant_primitives
        graph = model.proto.graph
        floats = float_tensors(model.proto)
        nodes = [node for node in graph.node if node.op_type in QUANTIZERS or not floats.isdisjoint(node.output)]
        made = {name for node in nodes for name in node.output}
        self._outputs = tuple(info.name for info in graph.output)
        self._nodes = TorchNodes(nodes, model.proto.opset_import, made.intersection(self._outputs), read_stored(model))
        inputs = {info.name for info in graph.input}
        self._session = Session.of(model, sorted(set(self._nodes.reads) - inputs))

    @expects(feeds=a_mapping("a mapping of the names of inputs to arrays"))
    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of one sample.

        Raises:
            Unsupported: torch has no function for an operator of floats, or torchao none for a type.
        """
        found = {**feeds, **self._session.run(feeds)}
        own = {QUANTIZE: self._quantize, DEQUANTIZE: self._dequantize}
        with torch.no_grad():
            made = self._nodes.compute({name: as_tensor(found[name]) for name in self._nodes.reads}, own=own)
        return {name: to_numpy(made[name]) if name in made else found[name] for name in self._outputs}

    def _quantize(self, op: Op, ins: Sequence[Tensor]) -> list[Tensor]:
        to = str(op.attrs["to"])
        size, scale, zero = _scales(op, ins, to)
        limits = torch.iinfo(getattr(torch, to))
        low, high = op.attrs.get("low", limits.min), op.attrs.get("high", limits.max)
        return [self._primitives.quantize_affine(ins[0].contiguous(), size, scale, zero, torch.int32, low, high)]

    def _dequantize(self, op: Op, ins: Sequence[Tensor]) -> list[Tensor]:
        size, scale, zero = _scales(op, ins, dtype_name(ins[0].dtype))
        integers = ins[0].contiguous().to(torch.int32)
        return [self._primitives.dequantize_affine(integers, size, scale, zero, torch.int32, LEAST, MOST)]


def _scales(op: Op, ins: Sequence[Tensor], dtype: str) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """How many neighbours along each axis share a scale; the scales, and the zero points as integers of 32 bits."""
    if dtype.startswith("float8"):
        raise Unsupported(f"torchao has no quantizers for {dtype}", [dtype])
    shape, scale = tuple(ins[0].shape), ins[1]
    zero = ins[2].to(torch.int32) if len(ins) > 2 else torch.zeros_like(scale, dtype=torch.int32)
    if scale.numel() == 1:
        return shape, scale, zero
    axis, block = int(str(op.attrs.get("axis", 1))) % len(shape), int(str(op.attrs.get("block_size", 0)))
    if block and shape[axis] % block:
        raise Unsupported(f"torchao has no blocks of {block} that do not divide an axis of {shape[axis]}")
    sizes = ((block or 1) if place == axis else 1 if block else length for place, length in enumerate(shape))
    return tuple(sizes), scale, zero


LEAST, MOST = -(2**31), 2**31 - 1
