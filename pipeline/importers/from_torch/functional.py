"""Writes become values: a program without in-place ops, whose updates of buffers and inputs are among its outputs.

torch functionalizes a program by running it again. Operators stay what they are, with two exceptions. What may be a
view of its argument or a copy (`reshape`, `contiguous`, `to`, `chunk`, `dropout`) becomes the one that it is: only so
is it known which writes reach it. And `batch_norm`, which may write too, becomes another operator also where it does
not; that one is put back.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pipeline.importers.from_torch.operators import RUNNING, WHEN_TRAINING, marks_vmap, operator_of

__all__ = ["functional", "mutates", "writing", "written"]


def mutates(program: ExportedProgram) -> bool:
    """Whether some op, in a body too, writes to one of its arguments."""
    return any(True for _ in writing(program))


def writing(program: ExportedProgram) -> Iterator[Node]:
    """The calls, in bodies too, that write to one of their arguments."""
    return (node for node in _calls(program) if isinstance(node.target, OpOverload) and written(node))


def written(node: Node) -> frozenset[str]:
    """The names of the arguments that this call changes."""
    operator = operator_of(node.target)
    return RUNNING if operator.kind in WHEN_TRAINING and trains(*node.args[3:6]) else operator.written


def functional(program: ExportedProgram) -> ExportedProgram:
    """`program` itself where nothing is written, else as torch functionalizes it, without decomposing anything else.

    What is written to a buffer or to an input is an output of the program then (`BUFFER_MUTATION`); a value that was
    read after the write reads the new one. Calls inside of `torch.vmap`, which a trace only marks, become calls on
    whole batches.
    """
    if not (mutates(program) or any(marks_vmap(node.target) for node in _calls(program))):
        return program
    asked = next((node for node in _calls(program) if node.target is BATCH_NORM), None)
    with warnings.catch_warnings():  # of torch's own copy of the program
        warnings.filterwarnings("ignore", r".*LeafSpec", FutureWarning)
        found = _one_name_each(program).run_decompositions({})
    if asked is not None:
        for node in list(_calls(found)):
            if node.target is NO_TRAINING:
                _put_back(node, cudnn=asked.args[8])
    return found


def _one_name_each(program: ExportedProgram) -> ExportedProgram:
    """`program` with one placeholder for each stored tensor, that of its first name, whichever is read.

    torch.export reads a tensor that the model has under several names by one of them. Functionalizing it trips over the
    others if it is written to (torch 2.13: `expected compiled_fn to be GraphModule`).
    """
    twins = _twins(program)
    if not twins:
        return program
    module = copy.deepcopy(program.graph_module)
    nodes = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    for name, first in twins.items():
        nodes[name].replace_all_uses_with(nodes[first])
        module.graph.erase_node(nodes[name])
    module.recompile()
    specs = [spec for spec in program.graph_signature.input_specs if spec.arg.name not in twins]
    return program._update(module, replace(program.graph_signature, input_specs=specs))


def _twins(program: ExportedProgram) -> dict[str, str]:
    """{a further placeholder of a stored tensor: the first}."""
    held = {**program.state_dict, **program.constants}
    first: dict[int, str] = {}
    twins: dict[str, str] = {}
    for spec in program.graph_signature.input_specs:
        name, tensor = spec.arg.name, held.get(spec.target or "")
        if isinstance(tensor, torch.Tensor) and first.setdefault(id(tensor), name) != name:
            twins[name] = first[id(tensor)]
    return twins


def trains(mean: object, variance: object, training: object) -> bool:
    return bool(training) and (mean is not None or variance is not None)


def _calls(program: ExportedProgram) -> Iterator[Node]:
    """All calls, in bodies too."""
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def _put_back(node: Node, *, cudnn: Any) -> None:
    """`batch_norm` in the place of `node`, if of its three results the first alone is read."""
    reads = list(node.users)
    if any(read.target is not getitem or read.args[1] != 0 for read in reads):
        return
    *tensors, momentum, eps = node.args
    with node.graph.inserting_before(node):
        norm = node.graph.call_function(BATCH_NORM, (*tensors, False, momentum, eps, cudnn))
    norm.meta = {**node.meta, "val": node.meta["val"][0]}
    for read in reads:
        read.replace_all_uses_with(norm)
        node.graph.erase_node(read)
    node.graph.erase_node(node)


BATCH_NORM = torch.ops.aten.batch_norm.default
NO_TRAINING = torch.ops.aten._native_batch_norm_legit_no_training.default
"""What functionalizing makes of it where it does not train: (input, weight, bias, mean, variance, momentum, eps)."""
