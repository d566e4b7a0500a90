"""Encodings that a file gives in place of calibrated ones: every tensor that is to be quantized has one there, is a
value of an adapter, or is named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from passes.encodings.aimet import read_aimet
from passes.encodings.encoding import Encoding, encode_bias, fit_encodings, list_with_nearest, share_by_moves
from passes.structures.adapters import find_adapted, find_adapter_values, find_reused_names
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel
from pipeline.config import OptionNames
from pipeline.errors import UsageError
from pipeline.quantsim.placement import PlacedSite, Placement


def read_given(path: str, model: DetachedModel, names: OptionNames) -> dict[str, Encoding]:
    """The encodings of a file of AIMET's for the model, by tensor; `names` are the words of messages.

    Raises:
        UsageError: the file has none for the model, or has them of a base whose values were numbered otherwise.
    """
    known = read_aimet(Path(path))[0]
    try:
        given = fit_encodings(known, model)
    except UsageError as error:
        raise UsageError(f"{error}{_explain_names(model, known)}") from error
    if reused := find_reused_names(GraphView(model), given):
        raise UsageError(
            f"{names.encodings}: {reused[0]} is a value of an adapter, and the file, which has no such adapter, "
            f"has an encoding of another value by that name; {NUMBERED}"
        )
    return given


def find_calibrated(model: DetachedModel, given: Mapping[str, Encoding], placement: Placement) -> frozenset[str]:
    """The tensors of adapters, whose base every one of them shares, that the file has no encodings of: those with
    scales of 1 are of zeros."""
    zeros = {name for name, encoding in given.items() if (encoding.scale == 1).all()}
    return find_adapter_values(GraphView(model), given, zeros) & placement.formats().keys()


NUMBERED: Final = (
    "torch's exporter numbers values, so an adapter changes the names of others; make the file of the same network "
    "with zeros for B"
)


def _explain_names(model: DetachedModel, given: Collection[str]) -> str:
    """Why names differ, where the model has adapters and the file none of their matrices; else nothing."""
    adapted = find_adapted(GraphView(model))
    return f"; {NUMBERED}" if adapted and adapted.keys().isdisjoint(given) else ""


def adopt_encodings(
    placement: Placement,
    given: Mapping[str, Encoding],
    model: DetachedModel,
    own: Mapping[str, Encoding] = MappingProxyType({}),
) -> tuple[Placement, dict[str, Encoding]]:
    """The placement and the encodings that a file has for the model.

    The file decides the formats; a rule decides what stays in float. An operator that only moves elements shares the
    encoding of what it reads, and a bias without an encoding gets the scale of the products that it is added to.

    Args:
        placement: which tensors are quantized.
        given: the encodings of the file.
        model: in float.
        own: the encodings of adapters, which are no part of their base.

    Raises:
        UsageError: a tensor is to be quantized, and the file has no encoding for it.
    """
    known = share_by_moves(model.proto.graph, {**given, **own})
    quantized = placement.quantized_sites()
    wanted = [placed.site.tensor for placed in quantized]
    of_groups = {
        placed.site.group: known[placed.site.tensor]
        for placed in quantized
        if placed.site.role != "weight" and placed.site.tensor in known
    }
    encodings = {
        placed.site.tensor: found
        for placed in quantized
        if (found := known.get(placed.site.tensor) or (of_groups.get(placed.site.group) if placed.site.moves else None))
    }
    for placed in placement.quantized_sites():
        bias = None if placed.site.tensor in known else _encode_bias(placed, encodings)
        if bias is not None:
            encodings[placed.site.tensor] = bias
    blocked = {placed.site.tensor for placed in placement.quantized_sites() if _is_bias_of_blocks(placed, encodings)}
    missing = [name for name in wanted if name not in encodings and name not in blocked]
    if missing:
        roles = {placed.site.tensor: placed.site.role for placed in quantized}
        kind = "weights" if roles[missing[0]] == "weight" else "activations"
        raise UsageError(
            f"{placement.names.encodings}: {len(missing)} of {len(wanted)} tensors that are to be quantized have no "
            f"encoding in the file: {list_with_nearest(missing, given)}; leave them in float: "
            f"{placement.names.in_float.format(f'tensor:{missing[0]}', kind)}{_explain_names(model, given)}"
        )
    return replace(placement, sites=tuple(_adopt(placed, encodings) for placed in placement.sites)), encodings


def _encode_bias(placed: PlacedSite, encodings: Mapping[str, Encoding]) -> Encoding | None:
    """The encoding of a bias by those of its factors; None where they do not give one."""
    factors = [encodings.get(name) for name in placed.site.bias_of or ()]
    if len(factors) != 2 or factors[0] is None or factors[1] is None or factors[1].precision.granularity == "block":
        return None
    return encode_bias(factors[0], factors[1], placed.site.bias_rank)


def _is_bias_of_blocks(placed: PlacedSite, encodings: Mapping[str, Encoding]) -> bool:
    """Whether a bias has no scale because its weight has one for each block."""
    weight = encodings.get(placed.site.bias_of[1]) if placed.site.bias_of else None
    return placed.site.tensor not in encodings and weight is not None and weight.precision.granularity == "block"


def _adopt(placed: PlacedSite, encodings: Mapping[str, Encoding]) -> PlacedSite:
    encoding = encodings.get(placed.site.tensor)
    if encoding is not None:
        return replace(placed, precision=encoding.precision, asked=None)
    return replace(placed, precision=None, reason=placed.reason or "its weight has a scale for each block")
