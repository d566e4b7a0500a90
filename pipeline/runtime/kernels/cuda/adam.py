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
    place = step.device
    largest = groups[3] if len(groups) > 3 else [None] * len(gradients)
    rows = [
        [p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), 0 if top is None else top.data_ptr(), p.numel()]
        for g, p, m, v, top in zip(gradients, *groups[:3], largest, strict=True)
    ]
    blocks = [[number, first] for number, row in enumerate(rows) for first in range(0, row[5], BLOCK)]
    return partial(
        update[len(blocks),],
        torch.tensor(rows, dtype=torch.int64, device=place),
        torch.tensor(blocks, dtype=torch.int64, device=place),
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
