"""Passes on the IR that join ops into one call, or avoid copies; each pass has a name, and runs only on request.

A pass is a function from Graph to Graph. Both graphs compute the same values up to rounding: a joined call may sum in
another order, and a normalisation is multiplied into the weights of its convolution when these are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from passes.suggest import nearest
from pipeline.errors import UsageError
from pipeline.ir.graph import Graph
from pipeline.lowering.fusion.attention import fuse_attention, keep_scores
from pipeline.lowering.fusion.compounds import join_compounds
from pipeline.lowering.fusion.gradients import (
    add_biases_in_products,
    compute_activations_again,
    join_parts,
    join_relu_with_products,
    scale_before_spreading,
    sum_rows_by_product,
    write_class_gradients,
)
from pipeline.lowering.fusion.layout import keep_channels_last, store_as_copied, store_images_by_channel
from pipeline.lowering.fusion.op_patterns import select_constant_indices
from pipeline.lowering.fusion.pointwise import (
    add_in_products,
    fuse_convolutions,
    fuse_epilogues,
    fuse_products,
)
from pipeline.lowering.fusion.rows import fuse_rows
from pipeline.ops.aten import AS_STRIDED

FUSIONS: Mapping[str, Callable[[Graph], Graph]] = {
    "select": select_constant_indices,
    "compounds": join_compounds,
    "attention": fuse_attention,
    "small-attention": keep_scores,
    "epilogues": fuse_epilogues,
    "rows": fuse_rows,
    "linear": fuse_products,
    "residual": add_in_products,
    "conv": fuse_convolutions,
    "channels-last": keep_channels_last,
}
"""By name, in the order in which they run."""

CUDA_FUSIONS = ("select", "attention", "epilogues", "rows")
"""What `all` stands for on a GPU; the others are for kernels of the CPU, which take packed weights or keep scores."""

CPU_FUSIONS = tuple(name for name in FUSIONS if name not in ("epilogues", "rows"))
"""What `all` stands for on the CPU, where a row program is one operator of torch after the other."""

TRAIN_PASSES: Mapping[str, Callable[[Graph], Graph]] = {
    "parts": join_parts,
    "spread": scale_before_spreading,
    "bias": add_biases_in_products,
    "sums": sum_rows_by_product,
    "images": store_images_by_channel,
    "order": store_as_copied,
}
"""Passes on train steps, by name, in the order in which they run."""

NATIVE_TRAIN_PASSES: Mapping[str, Callable[[Graph], Graph]] = {**TRAIN_PASSES, "relu": join_relu_with_products}
"""Passes on train steps whose kernels are in C++."""


def fuse(graph: Graph, names: Collection[str] = CPU_FUSIONS) -> Graph:
    """`graph` after the passes of these names, in the order of `FUSIONS`.

    A graph that counts through memory (`as_strided`) is left as it is: it depends on the strides of the trace.

    Raises:
        UsageError: there is no pass of a name.
    """
    unknown = [name for name in names if name not in FUSIONS]
    if unknown:
        raise UsageError(
            f"no fusion named {unknown[0]!r}; there are {', '.join(FUSIONS)}{nearest(unknown[0], FUSIONS)}"
        )
    if any(op.kind == AS_STRIDED for op in graph.ops):
        return graph
    for name, apply in FUSIONS.items():
        if name in names:
            graph = apply(graph)
    return graph


def fuse_train_step(graph: Graph, *, native: bool = False, rows: bool = False) -> Graph:
    """`graph`, a train step, after all of `TRAIN_PASSES`; as it is where it counts through memory (see `fuse`).

    Args:
        graph: the step.
        native: whether to run all of `NATIVE_TRAIN_PASSES`, for kernels in C++.
        rows: whether to make row programs, for a GPU.
    """
    if any(op.kind == AS_STRIDED for op in graph.ops):
        return graph
    for apply in (NATIVE_TRAIN_PASSES if native else TRAIN_PASSES).values():
        graph = apply(graph)
    return fuse_rows(compute_activations_again(write_class_gradients(graph))) if rows else graph
