"""The quantized model in torch, quantized by torchao: a cross-check that shares no kernel with onnxruntime.

Floats are computed by torch's operators (gradient_functions.py), whole numbers by torchao's `quantize_affine` and
`dequantize_affine`. What holds no floats (sizes, indices, masks) comes from a run of onnxruntime, by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from onnx import NodeProto, TensorProto, helper
from torch import Tensor

from passes.graph.index import initializers_of
from passes.graph.inference import float_tensors
from passes.graph.op_facts import ONNX_DOMAINS
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.errors import Unsupported, UsageError
from pipeline.quantsim.gradient_functions import FUNCTIONS, count_parts
from pipeline.runtime.tensors import as_tensor

QUANTIZERS: Final = ("QuantizeLinear", "DequantizeLinear")


class TorchRun:
    """A quantized model that torch and torchao run.

    Raises:
        UsageError: torchao is not installed.
        Unsupported: torch has no function for an operator of floats; all are listed.
    """

    def __init__(self, model: DetachedModel) -> None:
        try:
            from torchao.quantization import quant_primitives  # type: ignore[import-not-found]
        except ImportError as error:
            raise UsageError("the cross-check in torch needs torchao: pip install torchao") from error
        self._primitives: Any = quant_primitives
        graph = count_parts(model).proto.graph
        floats = float_tensors(model.proto)
        self._nodes = [node for node in graph.node if node.op_type in QUANTIZERS or not floats.isdisjoint(node.output)]
        missing = {node.op_type for node in self._nodes if node.op_type not in (*FUNCTIONS, *QUANTIZERS)}
        missing |= {f"{node.domain}.{node.op_type}" for node in self._nodes if node.domain not in ONNX_DOMAINS}
        if missing:
            raise Unsupported(f"torch has no function for {', '.join(sorted(missing))}", sorted(missing))
        made = {name for node in self._nodes for name in node.output}
        stored = initializers_of(graph)
        quantizers = (node for node in self._nodes if node.op_type in QUANTIZERS)
        types = {stored[name].data_type for node in quantizers for name in node.input[::2] if name in stored}
        strange = sorted(TensorProto.DataType.Name(one).lower() for one in types - KNOWN_TYPES)
        if strange:
            raise Unsupported(f"torchao has no quantizers for {', '.join(strange)}", strange)
        inputs = {info.name for info in graph.input}
        read = {name for node in self._nodes for name in node.input if name}
        self._model, self._stored = model, {name: stored[name] for name in read & stored.keys()}
        self._reads = tuple(sorted(read - made - stored.keys() - inputs))
        self._outputs = tuple(info.name for info in graph.output)
        self._session = Session.of(model, self._reads)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of one sample."""
        found = self._session.run(feeds)
        slots = {name: _as_tensor(self._model.array(tensor)) for name, tensor in self._stored.items()}
        slots |= {name: as_tensor(array) for name, array in feeds.items()}
        slots |= {name: as_tensor(found[name]) for name in self._reads}
        with torch.no_grad():
            for node in self._nodes:
                attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
                ins = [slots.get(name) for name in node.input]
                if node.op_type in QUANTIZERS:
                    results: Any = self._quantize(node, attributes, ins)
                else:
                    results = FUNCTIONS[node.op_type](attributes, ins)
                several = results if isinstance(results, tuple | list) else (results,)
                slots.update((name, result) for name, result in zip(node.output, several, strict=False) if name)
        return {name: slots[name].numpy() if name in slots else found[name] for name in self._outputs}

    def _quantize(self, node: NodeProto, attributes: Mapping[str, Any], ins: Sequence[Any]) -> Tensor:
        data, scale = ins[0].contiguous(), ins[1]
        zero = ins[2] if len(ins) > 2 and ins[2] is not None else torch.zeros_like(scale, dtype=torch.int32)
        size = _block_size(data.shape, scale, attributes)
        if node.op_type == "DequantizeLinear":
            return self._primitives.dequantize_affine(data, size, scale, zero, torch.int32, LEAST, MOST)
        lowest, highest = _limits(self._stored.get(node.input[2]) if len(node.input) > 2 else None)
        return self._primitives.quantize_affine(data, size, scale, zero, torch.int32, lowest, highest)


def _as_tensor(array: np.ndarray) -> Tensor:
    """Whole numbers of any width as int32, which torchao takes; 4 bits have no dtype in torch."""
    is_float = array.dtype.kind == "f" or array.dtype in (np.dtype(np.int64), np.dtype(bool))
    return as_tensor(array if is_float else array.astype(np.int32))


def _block_size(shape: Sequence[int], scale: Tensor, attributes: Mapping[str, Any]) -> tuple[int, ...]:
    """How many neighbours along each axis share a scale."""
    if scale.numel() == 1:
        return tuple(shape)
    axis, block = attributes.get("axis", 1) % len(shape), attributes.get("block_size", 0)
    if block and shape[axis] % block:
        raise Unsupported(f"torchao has no blocks of {block} that do not divide an axis of {shape[axis]}")
    return tuple((block or 1) if place == axis else 1 if block else length for place, length in enumerate(shape))


def _limits(zero_point: TensorProto | None) -> tuple[int, int]:
    """The least and the greatest number of the dtype that QuantizeLinear makes."""
    dtype = TensorProto.UINT8 if zero_point is None else zero_point.data_type
    bits, signed = WIDTHS[dtype]
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)


WIDTHS: Final[Mapping[int, tuple[int, bool]]] = {
    TensorProto.INT4: (4, True), TensorProto.UINT4: (4, False), TensorProto.INT8: (8, True),
    TensorProto.UINT8: (8, False), TensorProto.INT16: (16, True), TensorProto.UINT16: (16, False),
}  # fmt: skip

KNOWN_TYPES: Final = frozenset({*WIDTHS, TensorProto.INT32, TensorProto.FLOAT})
"""Of weights and zero points; INT32 is that of biases."""

LEAST, MOST = -(2**31), 2**31 - 1
