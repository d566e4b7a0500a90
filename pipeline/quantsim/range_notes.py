"""Sentences about ranges that leave a tensor few numbers, cut some off, or were measured on no element."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from passes.rewrites.mask_constants import MASKING, MaskedGraph
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from pipeline.config import OptionNames
from pipeline.quantsim.encodings import Encoding, Range, encode_range, find_limited_biases
from pipeline.quantsim.placement import PlacedSite, Placement


def describe_ranges(
    model: DetachedModel, placement: Placement, reached: Mapping[str, Range], ranges: Mapping[str, Range]
) -> Iterator[str]:
    """What the functions for ties, masks and tensors without elements say.

    Args:
        reached: the least and the greatest value of each tensor that is computed.
        ranges: by the name of a group.
    """
    yield from describe_ties(placement, reached, ranges)
    yield from describe_masks(placement, reached)
    yield from describe_mask_constants(model, placement, ranges)
    yield from describe_unmeasured(placement, reached)
    yield from describe_divisors(model, placement, ranges)


def describe_divisors(model: DetachedModel, placement: Placement, ranges: Mapping[str, Range]) -> Iterator[str]:
    """A sentence for each stored divisor with elements of few steps: the error of a quotient is that of its divisor as
    a part of it, and a divisor that becomes zero has no quotient.

    Args:
        model: the float model.
        placement: which tensors are quantized.
        ranges: by the name of a group.
    """
    stored = model.index.initializers
    divisors = {node.input[1]: node for node in model.index.nodes if node.op_type == "Div" and node.input[1] in stored}
    for placed in placement.quantized_sites():
        name, node = placed.site.tensor, divisors.get(placed.site.tensor)
        if node is None or placed.site.group not in ranges:
            continue
        if placed.precision is None or placed.precision.float_type:  # the steps of a float are finer for small numbers
            continue
        sizes = np.abs(model.array(stored[name]).astype(np.float64))
        step = float(encode_range(ranges[placed.site.group], placed.precision).scale)
        small = int((sizes < FEW_STEPS * step).sum())
        if small:
            yield (
                f"the divisor {name} of {node.name or node.output[0]} has {plural(small, 'element')} of {sizes.size} "
                f"below {FEW_STEPS} steps of its {placed.precision}, the least is {sizes.min():.3g}, so quotients "
                f"are far off; leave it in float: {placement.names.in_float.format(f'tensor:{name}', 'activations')}"
            )


def describe_unmeasured(placement: Placement, reached: Mapping[str, Range]) -> Iterator[str]:
    """A sentence where no sample has an element of a group of tensors, as of a batch of 0 rows: its scale fits nothing.

    Args:
        placement: which tensors are quantized.
        reached: the least and the greatest value of each tensor that has elements in a sample.
    """
    sites = [placed.site for placed in placement.quantized_sites()]
    measured = {site.group for site in sites if site.tensor in reached or site.role not in ("input", "activation")}
    unmeasured = [site.tensor for site in sites if site.group not in measured]
    if unmeasured:
        yield (
            f"no sample has an element of {plural(len(unmeasured), 'tensor')} ({unmeasured[0]}"
            f"{', …' if unmeasured[1:] else ''}), so the scale is 1 there, which fits no data; give "
            f"{placement.names.data} samples with elements there"
        )


def describe_ties(placement: Placement, reached: Mapping[str, Range], ranges: Mapping[str, Range]) -> Iterator[str]:
    """A sentence for each tensor that uses few values of its format, since it shares a scale with tensors of a far
    wider range, as class scores do with boxes in one Concat. A tensor with a range of its own, as of a Sigmoid, is
    rounded by the scale of the Concat's result all the same.

    Args:
        reached: the least and the greatest value of each tensor that is computed.
        ranges: by the name of a group.
    """
    names, groups = placement.names, {placed.site.tensor: placed.site.group for placed in placement.sites}
    joins = {placed.site.group: placed for placed in placement.quantized_sites() if len(placed.site.shares) > 1}
    for placed in placement.quantized_sites():
        site = placed.site
        if site.group in joins and not site.moves and site.tensor in reached:
            yield from _describe_few(site.tensor, reached[site.tensor], joins[site.group], ranges[site.group], names)
    for group, join in joins.items():
        for name in join.site.shares:  # an input with a range of its own, which the scale of the result rounds again
            source = groups.get(name, group)
            limits = reached.get(name) or reached.get(source) or ranges.get(source)
            if source != group and limits is not None:
                yield from _describe_few(name, limits, join, ranges[group], names)


def _describe_few(tensor: str, limits: Range, join: PlacedSite, joined: Range, names: OptionNames) -> Iterator[str]:
    """A sentence if a tensor with these limits uses few values of the format that `join` has for a range."""
    precision, site = join.precision, join.site
    assert precision is not None
    if precision.float_type:  # whose steps are finer for small values
        return
    steps = (max(limits[1], 0) - min(limits[0], 0)) / float(encode_range(joined, precision).scale)
    if steps < FEW_STEPS <= 2**precision.bits:
        yield (
            f"{tensor} uses {round(steps)} of the {2**precision.bits} values of its format, since {site.op} "
            f"{site.node} gives it one scale with tensors of a wider range; leave that node in float: "
            f"{names.in_float.format(f'node:{site.node}', 'activations')}"
        )


def describe_masks(placement: Placement, reached: Mapping[str, Range]) -> Iterator[str]:
    """A sentence for each input of floats that reaches what masks attention, and so takes all values of its format.

    Args:
        placement: says which inputs are quantized.
        reached: the least and the greatest value of each tensor.

    Returns:
        The sentences.
    """
    for placed in placement.quantized_sites():
        name = placed.site.tensor
        lowest = reached.get(name, (0.0, 0.0))[0]
        if placed.site.role == "input" and lowest <= -MASKING:
            yield (
                f"the input {name} reaches {lowest:g}, as a mask does that is added to scores, so tensors in its range "
                f"keep no values for the scores; feed a bound such as -30 there (clamp-mask raises constants alone), "
                "or leave the mask and the sum in float: "
                f"{placement.names.in_float.format(f'tensor:{name}', 'activations')}"
            )


def describe_mask_constants(model: DetachedModel, placement: Placement, ranges: Mapping[str, Range]) -> Iterator[str]:
    """A sentence where constants that mask attention, such as -3.4e38, are in the range of a tensor that is rounded.

    Args:
        model: the float model.
        placement: which tensors are quantized.
        ranges: (lowest, highest) by the group of a tensor.

    Returns:
        One sentence at most.
    """
    graph = MaskedGraph(model)
    uses = graph.all_uses()
    names = {graph.constant_name(use) for use in uses}
    names |= {name for position in graph.path_nodes(uses) for name in graph.nodes[position].output}
    sites = (placed.site for placed in placement.quantized_sites() if placed.site.tensor in names)
    wide = [site.tensor for site in sites if ranges.get(site.group, NO_RANGE)[0] <= -MASKING]
    if wide:
        lowest = {graph.constant_name(use): float(graph.values(use).min()) for use in uses}
        name = min(lowest, key=lowest.__getitem__)
        yield (
            f"the constant {name} masks attention with {lowest[name]:g}, which is in the range of "
            f"{plural(len(wide), 'tensor')} ({wide[0]}{', …' if wide[1:] else ''}), so scores keep no values of the "
            f"format; {placement.names.step.format('clamp-mask')}, which raises the mask to a bound such as -30"
        )


def describe_limited_biases(
    encodings: Mapping[str, Encoding], model: DetachedModel, names: OptionNames
) -> Iterator[str]:
    """A sentence for each bias that 32 bits do not hold."""
    for name, beyond, size in find_limited_biases(encodings, model):
        yield (
            f"{beyond} of the {plural(size, 'number')} of the bias {name} are beyond 32 bits in the "
            "scale of its products, and become the largest there; leave it in float: "
            f"{names.in_float.format(f'tensor:{name}', 'activations')}"
        )


NO_RANGE: Final[Range] = (0.0, 0.0)

FEW_STEPS: Final = 16
"""The fewest values of a format of 8 bits or more that a tensor should use: as many as 4 bits have."""
