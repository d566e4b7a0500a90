"""Parameters, buffers and constants of a program: which placeholder stands for which tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.export import ExportedProgram

__all__ = ["held_tensors"]


def held_tensors(program: ExportedProgram) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(placeholder, its name in the model, the tensor), in order; a tensor with two names comes twice."""
    held = {**program.state_dict, **program.constants}
    for spec in program.graph_signature.input_specs:
        tensor = None if spec.target is None else held.get(spec.target)
        if isinstance(tensor, torch.Tensor):
            yield spec.arg.name, str(spec.target), tensor
