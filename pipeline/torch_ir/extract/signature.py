"""The signature of a program: how arguments and results nest, and the caller's names of dims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from pipeline.importers.from_torch.layer_dedup import Ends
from pipeline.torch_ir.errors import ConversionError
from pipeline.torch_ir.tree import CallSignature, Leaf, Tree, tree_of

__all__ = ["dim_names", "inputs_of", "signature_of", "signature_of_ends"]


def signature_of(program: ExportedProgram) -> CallSignature:
    """
    Raises:
        ConversionError: it takes or gives what is neither a tensor nor a constant.
    """
    call = program.call_spec
    signature = program.graph_signature
    inputs = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    outputs = [spec for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    return CallSignature(
        None if call.in_spec is None else tree_of(call.in_spec, _ends(inputs)),
        None if call.out_spec is None else tree_of(call.out_spec, _ends(outputs)),
    )


def signature_of_ends(inputs: Ends, outputs: Ends) -> CallSignature:
    """The signature after layer_dedup: meta tensors among the leaves are the graph's inputs and outputs."""
    return CallSignature(_tree(inputs), _tree(outputs))


def _tree(ends: Ends) -> Tree:
    count = iter(range(len(ends.leaves)))
    leaves = [Leaf(next(count)) if isinstance(leaf, torch.Tensor) else Leaf(None, leaf) for leaf in ends.leaves]
    return tree_of(ends.spec, leaves)


def _ends(specs: Sequence[Any]) -> list[Leaf]:
    """Tensors are numbered as the graph numbers its inputs and outputs; the rest are constants of the program."""
    ends: list[Leaf] = []
    count = 0
    for spec in specs:
        if isinstance(spec.arg, TensorArgument):
            ends.append(Leaf(count))
            count += 1
        elif isinstance(spec.arg, ConstantArgument):
            ends.append(Leaf(None, spec.arg.value))
        else:
            what = getattr(spec.arg, "class_fqn", "number that differs from run to run")
            raise ConversionError(
                f"{spec.arg.name!r} is a {what}, and a graph takes and gives tensors: "
                "give it as a tensor, leave it out of the result, or fix it in the trace"
            )
    return ends


def dim_names(program: ExportedProgram, dynamic_shapes: Any) -> dict[str, str]:
    """{torch's symbol: the caller's name}; a dim that the caller left to torch is called by its input and axis."""
    found: dict[str, str] = {}
    asked = dict(_requested_names(program, dynamic_shapes))
    for name, tensor in inputs_of(program):
        for axis, size in enumerate(tensor.shape):
            symbol = str(size)
            if isinstance(size, torch.SymInt) and symbol.isidentifier():
                found.setdefault(symbol, asked.get((name, axis)) or f"{name}_{axis}")
    return found


def inputs_of(program: ExportedProgram) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, fake tensor) of each tensor that the program is called with, in order."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if kinds.get(node.name) is InputKind.USER_INPUT and isinstance(value, torch.Tensor):
            yield node.name, value


def _requested_names(program: ExportedProgram, dynamic_shapes: Any) -> Iterator[tuple[tuple[str, int], str]]:
    """((input, axis), name) of every `Dim("batch")` in `dynamic_shapes`."""
    if dynamic_shapes is None:
        return
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    shapes = list(dynamic_shapes.values()) if isinstance(dynamic_shapes, Mapping) else list(dynamic_shapes)
    flat = pytree.tree_leaves(shapes, is_leaf=_is_shape)
    for spec, shape in zip(specs, flat, strict=False):
        axes = shape.items() if isinstance(shape, Mapping) else enumerate(shape or ())
        for axis, dim in axes:
            name = getattr(dim, "__name__", None)
            if isinstance(name, str) and name.isidentifier():
                yield (spec.arg.name, int(axis)), name


def _is_shape(item: Any) -> bool:
    """One tensor's entry: None, {axis: dim}, or a tuple of dims."""
    if item is None or (isinstance(item, Mapping) and all(isinstance(key, int) for key in item)):
        return True
    return isinstance(item, list | tuple) and not any(isinstance(part, Mapping | list | tuple) for part in item)
