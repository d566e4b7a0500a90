"""Access to a program of torch.export: its graphs, its stored tensors, and the source of each node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node


def bodies_of(module: GraphModule) -> Iterator[GraphModule]:
    """`module` itself and all graph modules nested in it."""
    return (body for body in module.modules() if isinstance(body, GraphModule))


def calls_in(module: GraphModule) -> Iterator[Node]:
    """All calls of operators, in bodies too."""
    return (node for body in bodies_of(module) for node in body.graph.nodes if node.op == "call_function")


def recompile(module: GraphModule) -> None:
    """Regenerate the code of all graphs in `module`, after some were changed."""
    for body in bodies_of(module):
        body.recompile()


def held_tensors(program: ExportedProgram) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(placeholder, its name in the model, the tensor), in order; a tensor with two names is listed twice."""
    held = {**program.state_dict, **program.constants}
    for spec in program.graph_signature.input_specs:
        tensor = None if spec.target is None else held.get(spec.target)
        if isinstance(tensor, torch.Tensor):
            yield spec.arg.name, str(spec.target), tensor


FRAME = 'File "'
TORCH = str(Path(torch.__file__).parent)
PACKAGES = "site-packages/"


def module_of(node: Node) -> str:
    """The path of the innermost module, `encoder.layer.3.output`; empty at the top, or where torch did not say."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = next(reversed(stack.values()))
    return path.partition("@")[0]  # torch marks a second call of the same module as `layer@1`


def line_of(node: Node) -> str:
    """The innermost line that is not torch's own, as `transformers/models/bert/modeling_bert.py:175`."""
    trace = node.meta.get("stack_trace") or ""
    end = len(trace)
    while (start := trace.rfind(FRAME, 0, end)) >= 0:
        path, _, rest = trace[start + len(FRAME) : end].partition('", line ')
        if not path.startswith((TORCH, "<")):  # "<eval_with_key>.3" is code that torch wrote itself
            number = rest.partition(",")[0]
            return f"{path.rpartition(PACKAGES)[2]}:{number}"
        end = start
    return ""
