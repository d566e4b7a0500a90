"""The encodings of a file in place of calibrated ones: every tensor that is to be quantized has one, or is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from passes.encodings.encoding import Encoding, encode_bias, share_by_moves
from passes.encodings.fit import list_with_nearest
from passes.weights.detached import DetachedModel
from pipeline.errors import UsageError
from pipeline.quantsim.placement import PlacedSite, Placement


def adopt_encodings(
    placement: Placement, given: Mapping[str, Encoding], model: DetachedModel
) -> tuple[Placement, dict[str, Encoding]]:
    """The placement and the encodings that a file has for the model.

    The file decides the formats; a rule decides what stays in float. What only moves numbers shares the encoding of
    what it reads, and a bias without an encoding gets the scale of the products that it is added to.

    Raises:
        UsageError: a tensor is to be quantized, and the file has no encoding for it.
    """
    known = share_by_moves(model.proto.graph, given)
    wanted = [placed.site.tensor for placed in placement.quantized()]
    encodings = {name: known[name] for name in wanted if name in known}
    for placed in placement.quantized():
        bias = None if placed.site.tensor in known else _encode_bias(placed, encodings)
        if bias is not None:
            encodings[placed.site.tensor] = bias
    blocked = {placed.site.tensor for placed in placement.quantized() if _is_bias_of_blocks(placed, encodings)}
    missing = [name for name in wanted if name not in encodings and name not in blocked]
    if missing:
        raise UsageError(
            f"quantsim.encodings_from: {len(missing)} of {len(wanted)} tensors that are to be quantized have no "
            f"encoding in the file: {list_with_nearest(missing, given)}; leave them in float by a rule, such as "
            f"{{'tensor:{missing[0]}': {{activations: float}}}}"
        )
    return replace(placement, sites=tuple(_adopt(placed, encodings) for placed in placement.sites)), encodings


def _encode_bias(placed: PlacedSite, encodings: Mapping[str, Encoding]) -> Encoding | None:
    """The encoding of a bias by those of its factors; None where they do not give one."""
    factors = [encodings.get(name) for name in placed.site.bias_of or ()]
    if len(factors) != 2 or factors[0] is None or factors[1] is None or factors[1].precision.granularity == "block":
        return None
    return encode_bias(factors[0], factors[1])


def _is_bias_of_blocks(placed: PlacedSite, encodings: Mapping[str, Encoding]) -> bool:
    """Whether a bias has no scale because its weight has one for each block."""
    weight = encodings.get(placed.site.bias_of[1]) if placed.site.bias_of else None
    return placed.site.tensor not in encodings and weight is not None and weight.precision.granularity == "block"


def _adopt(placed: PlacedSite, encodings: Mapping[str, Encoding]) -> PlacedSite:
    encoding = encodings.get(placed.site.tensor)
    if encoding is not None:
        return replace(placed, precision=encoding.precision, asked=None)
    return replace(placed, precision=None, reason=placed.reason or "its weight has a scale for each block")
