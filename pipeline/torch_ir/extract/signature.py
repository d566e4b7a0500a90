"""What goes into a program and what comes out, as the caller nests it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from pipeline.importers.from_torch.stamp import Ends
from pipeline.torch_ir.errors import ConversionError
from pipeline.torch_ir.tree import Leaf, Signature, Tree, tree_of

__all__ = ["signature_of", "signature_of_ends"]


def signature_of(program: ExportedProgram) -> Signature:
    """
    Raises:
        ConversionError: it takes or gives what is neither a tensor nor a constant.
    """
    call = program.call_spec
    signature = program.graph_signature
    inputs = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    outputs = [spec for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    return Signature(
        None if call.in_spec is None else tree_of(call.in_spec, _ends(inputs)),
        None if call.out_spec is None else tree_of(call.out_spec, _ends(outputs)),
    )


def signature_of_ends(inputs: Ends, outputs: Ends) -> Signature:
    """The same for what stamping tells: tensors without numbers stand for those of the graph."""
    return Signature(_tree(inputs), _tree(outputs))


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
