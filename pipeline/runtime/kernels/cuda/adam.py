"""Launch Adam over all parameters at once: blocks of the kernel find their tensor in a table of addresses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from pipeline.runtime.kernels.base import Launch
from pipeline.runtime.tensors import dtype_name

BLOCK: Final = 1024
"""Elements of a parameter for a block of the kernel."""


def launch_adam(
    groups: Sequence[Sequence[torch.Tensor]],
    gradients: Sequence[torch.Tensor],
    step: torch.Tensor,
    rate: torch.Tensor,
    skip: torch.Tensor,
    attrs: Mapping[str, Any],
) -> Launch | None:
    """The launch that updates all parameters; None where they have several dtypes, or lie otherwise than gradients.

    Args:
        groups: parameters, first moments, second moments, and the largest second moments where there are any, each of
            one tensor for each parameter; they are updated where they are.
        gradients: one for each parameter, of its shape.
        step: float32, one element: the number of updates, this one included.
        rate: the learning rate, of any float dtype, one element.
        skip: float32, one element: 1 where nothing is updated.
        attrs: of `Kind.Adam`.
    """
    tensors = [*gradients, *(tensor for group in groups for tensor in group)]
    if len({tensor.dtype for tensor in tensors}) != 1 or not all(tensor.is_contiguous() for tensor in tensors):
        return None
    from pipeline.runtime.kernels.cuda import adam_kernel

    update: Any = adam_kernel.update
    largest = groups[3] if len(groups) > 3 else [None] * len(gradients)
    parts = [*zip(groups[0], gradients, *groups[1:3], largest, strict=True)]
    places = [[number, first] for number, part in enumerate(parts) for first in range(0, part[0].numel(), BLOCK)]
    blocks = torch.tensor(places, dtype=torch.int64, device=step.device)
    table = AddressTable(parts, step.device)
    return partial(
        _update_at,
        update[len(places),],
        table,
        parts,
        table.memory,  # a launch has to show all memory that it reads
        blocks,
        step,
        rate,
        skip,
        beta1=float(attrs["beta1"]),
        beta2=float(attrs["beta2"]),
        log_beta1=math.log(attrs["beta1"]) if attrs["beta1"] else -math.inf,
        log_beta2=math.log(attrs["beta2"]) if attrs["beta2"] else -math.inf,
        epsilon=float(attrs["epsilon"]),
        decay=float(attrs["weight_decay"]),
        dtype=getattr(adam_kernel.tl, dtype_name(tensors[0].dtype)),
        decoupled=attrs["decoupled"],
        maximize=attrs["maximize"],
        has_largest=len(groups) > 3,
        length=BLOCK,
        enable_fp_fusion=True,
    )


Part = tuple[torch.Tensor | None, ...]
"""Parameter, gradient, first moment, second moment, and the largest second moment so far if AMSGrad keeps it."""


class AddressTable:
    """A row for each part, on the device: the addresses of its tensors, and their number of elements.

    A run may point a gradient at other memory, so `follow` writes new addresses before a launch.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._addresses = addresses_of(parts)
        sizes = [0 if part[0] is None else part[0].numel() for part in parts]
        rows = [[*row, size] for row, size in zip(self._addresses, sizes, strict=True)]
        self.memory = torch.tensor(rows, dtype=torch.int64, device=device)

    def follow(self, parts: Sequence[Part]) -> None:
        """Write the addresses of `parts`, if any differs from the last launch; none does while a graph is recorded."""
        found = addresses_of(parts)
        if found != self._addresses:
            self._addresses = found
            self.memory[:, :-1].copy_(torch.tensor(found, dtype=torch.int64))


def addresses_of(parts: Sequence[Part]) -> list[list[int]]:
    """The addresses of each part's tensors; 0 for a tensor that it does not have."""
    return [[0 if tensor is None else tensor.data_ptr() for tensor in part] for part in parts]


def _update_at(update: Any, table: AddressTable, parts: Sequence[Part], *args: Any, **settings: Any) -> None:
    table.follow(parts)
    update(*args, **settings)
