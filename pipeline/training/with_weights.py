"""Training → ONNX: trained weights go into the model that they came from, or the trained module is exported."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import nn

from passes.graph.index import copy_of, initializers_of, producers_of
from passes.graph.op_facts import BIAS, BIASED
from passes.suggest import nearest
from pipeline.argument_checks import Check, a, expects
from pipeline.errors import UsageError
from pipeline.runtime.tensors import to_numpy
from pipeline.training.batch import Arguments
from pipeline.training.graph_module import GraphModule, whole_model
from pipeline.training.qdq import (
    DEQUANTIZE,
    QUANTIZE,
    NarrowQuantizer,
    StoredWeight,
    check_scale,
    has_quantizers,
    quantize_floats,
    read_quantizers,
)

if TYPE_CHECKING:
    from passes.run.result import PassRun
    from pipeline.result import RunResult


class TrainedModule(Protocol):
    """A module with trained weights, as a `TrainProgram` is."""

    @property
    def module(self) -> nn.Module: ...

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The trained weights are under the key `module`."""
        ...


ONNX_MODEL = a((onnx.ModelProto, str, Path), "an ONNX model or its path")
TRAINED = Check(
    lambda item: isinstance(getattr(item, "module", item), nn.Module) and hasattr(item, "state_dict"),
    "what was trained: a program of record_step, or a module of as_module",
)


@expects(model=ONNX_MODEL, trained=TRAINED)
def with_weights(model: onnx.ModelProto | str | Path, trained: TrainedModule | GraphModule) -> onnx.ModelProto:
    """A copy of `model` with the weights of `trained`, by name: nodes, names and metadata stay as they are.

    In a model with QuantizeLinear and DequantizeLinear the weights are quantized again, with their trained scales; and
    the limits of narrow formats follow the scales. The scale of a bias of 32 bits follows those of its product, whose
    kernels of integers take it for granted.

    Args:
        model: the ONNX model that was trained, or its path; it stays as it is.
        trained: a program that was recorded from `as_module(model)`, or that module itself.

    Returns:
        The copy, with its weights inside.

    Raises:
        UsageError: a trained weight is not one of the model, has another shape, or a scale is not above zero.
    """
    proto = copy_of(whole_model(model))
    arrays = _arrays(trained)
    tensors = initializers_of(proto.graph)
    tensors |= {
        node.output[0]: entry.t
        for node in proto.graph.node
        if node.op_type == "Constant"
        for entry in node.attribute
        if entry.name == "value"
    }
    if has_quantizers(proto):
        qdq = read_quantizers(proto)
        quantizers = [node for node in proto.graph.node if node.op_type == QUANTIZE]
        for name in {node.input[1] for node in quantizers} & arrays.keys():
            check_scale(name, arrays[name])
        arrays |= _bias_scales(proto, qdq.stored, arrays, tensors)
        for weight in qdq.stored:
            floats = arrays.pop(weight.name, None)
            if floats is None:
                continue
            like, scale = tensors[weight.integers], _array_of(weight.scale, arrays, tensors)
            like.CopyFrom(quantize_floats(weight, floats, scale, like))
        for quantizer in qdq.narrow:
            if quantizer.scale in arrays:
                _move_limits(quantizer, arrays[quantizer.scale], tensors)
    for name, array in arrays.items():
        _replace(name, array, tensors)
    return proto


def _arrays(trained: TrainedModule | GraphModule) -> dict[str, np.ndarray]:
    """Trained weights by the names of the model's initializers."""
    if isinstance(trained, GraphModule):
        module, found = trained, trained.state_dict()
    else:
        module, found = trained.module, trained.state_dict()["module"]
    if isinstance(module, GraphModule):
        return {name: to_numpy(tensor) for name, tensor in module.trained_numbers(found).items()}
    asked = [name for name, tensor in module.named_parameters() if tensor.requires_grad]
    return {name: to_numpy(found[name]) for name in asked}


def _replace(name: str, array: np.ndarray, tensors: dict[str, onnx.TensorProto]) -> None:
    tensor = tensors.get(name)
    if tensor is None:
        raise UsageError(
            f"the model has no initializer {name!r}, which was trained{nearest(name, tensors)}; give the model that "
            "the module was made of"
        )
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if tuple(tensor.dims) != array.shape or dtype != array.dtype:
        raise UsageError(
            f"{name!r} was trained as {array.dtype}{list(array.shape)}; the model has {dtype}{list(tensor.dims)}"
        )
    doc = tensor.doc_string
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    if doc:
        tensor.doc_string = doc


def _array_of(name: str, arrays: dict[str, np.ndarray], tensors: dict[str, onnx.TensorProto]) -> np.ndarray:
    return arrays[name] if name in arrays else numpy_helper.to_array(tensors[name])


def _bias_scales(
    proto: onnx.ModelProto,
    stored: Sequence[StoredWeight],
    arrays: dict[str, np.ndarray],
    tensors: dict[str, onnx.TensorProto],
) -> dict[str, np.ndarray]:
    """New scales of biases that had the product of the scales of a product's operands, by name."""
    producers = producers_of(proto.graph.node)
    biases = {weight.integers: weight.scale for weight in stored if weight.encoding.precision.bits == BIAS_BITS}
    found: dict[str, np.ndarray] = {}
    for node in proto.graph.node:
        for name in node.input:
            bias, product = producers.get(name), _product_with_bias(node, name, producers)
            if product is None or bias is None or bias.op_type != DEQUANTIZE or bias.input[0] not in biases:
                continue
            operands = [producers.get(operand) for operand in product.input[:2]]
            scales = [node.input[1] for node in operands if node is not None and node.op_type == DEQUANTIZE]
            if len(scales) < 2 or not all(scale in tensors for scale in scales):
                continue
            before = numpy_helper.to_array(tensors[bias.input[1]])
            first, second = (numpy_helper.to_array(tensors[scale]) for scale in scales)
            if first.size == 1 and second.size in (1, before.size) and np.allclose(before, first * second, rtol=1e-5):
                after = _array_of(scales[0], arrays, tensors) * _array_of(scales[1], arrays, tensors)
                found[bias.input[1]] = np.broadcast_to(after, before.shape).astype(before.dtype)
    return found


def _product_with_bias(node: onnx.NodeProto, bias: str, producers: dict[str, onnx.NodeProto]) -> onnx.NodeProto | None:
    """The product that `node` adds `bias` to."""
    if node.op_type in BIASED:
        return node if list(node.input).index(bias) == BIAS else None
    others = [producers.get(name) for name in node.input if name != bias] if node.op_type == "Add" else []
    return others[0] if others and others[0] is not None and others[0].op_type == "MatMul" else None


def _move_limits(quantizer: NarrowQuantizer, scale: np.ndarray, tensors: dict[str, onnx.TensorProto]) -> None:
    for name, number in zip(quantizer.limits, (quantizer.lowest, quantizer.highest), strict=True):
        limit = (number - quantizer.zero_point) * scale.astype(np.float64).reshape(())
        old = tensors[name]
        array = np.asarray(limit).astype(helper.tensor_dtype_to_np_dtype(old.data_type)).reshape(tuple(old.dims))
        old.CopyFrom(numpy_helper.from_array(array, name))


BIAS_BITS: Final = 32


class ExportableProgram(TrainedModule, Protocol):
    """A `TrainProgram`, as far as it takes part in its export."""

    @property
    def example(self) -> Arguments: ...

    def write_to(self, module: nn.Module) -> None: ...


def export_program(
    program: ExportableProgram,
    path: Path,
    args: Sequence[torch.Tensor] | None,
    kwargs: Mapping[str, torch.Tensor] | None,
    keep: Sequence[str],
    options: Mapping[str, Any],
) -> RunResult | PassRun:
    """Export and save; see `TrainProgram.export`."""
    from pipeline.optimize import optimize  # its configuration needs pydantic, and a training does not

    module = program.module
    if isinstance(module, GraphModule) and module.source is not None:
        if args is not None or kwargs is not None:
            raise UsageError("export: found args, expected none: the module came from ONNX, whose inputs are known")
        run = optimize(with_weights(module.source, program), keep=keep, **options)
    else:
        own_args, own_kwargs = program.example if args is None and kwargs is None else (args or (), kwargs or {})
        run = optimize(_trained_copy(module, program), tuple(own_args), dict(own_kwargs), keep=keep, **options)
    run.save(path)
    return run


def _trained_copy(module: nn.Module, program: ExportableProgram) -> nn.Module:
    found = copy.deepcopy(module)
    program.write_to(found)
    return found.eval()
