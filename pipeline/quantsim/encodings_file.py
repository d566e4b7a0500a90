"""The file of AIMET's encodings that a simulation writes, as AIMET's strict loader and a converter want it.

AIMET has quantizers in places of its own, whose entries are not what the simulation rounds by: an input that a Concat
reads and another node too, and a constant of infinity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np

from passes.encodings.aimet import WITHOUT_QUANTIZER, AimetVersion, aimet_text, is_listed
from passes.encodings.encoding import NOWHERE, Encoding, Precision, find_axes, is_same_encoding, stored_shapes
from passes.graph.index import computed_values
from passes.graph.op_facts import PRODUCTS
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from pipeline.quantsim.placement import Placement
from pipeline.quantsim.sites import Site


def encodings_text(
    model: DetachedModel,
    encodings: Mapping[str, Encoding],
    version: AimetVersion,
    unsigned: Collection[str] = frozenset(),
) -> tuple[str, tuple[str, ...]]:
    """The file of AIMET's, and a sentence for each format that it leaves out.

    Args:
        model: in float.
        encodings: by tensor.
        version: of AIMET's format.
        unsigned: tensors whose quantizer in AIMET is asymmetric whatever they share. A symmetric encoding is written
            with the same scale and the zero point of the unsigned format there.
    """
    encodings = {name: _as_unsigned(own) if name in unsigned else own for name, own in encodings.items()}
    moved = computed_values(node for node in model.proto.graph.node if node.op_type in WITHOUT_QUANTIZER)
    own = {name: encoding for name, encoding in encodings.items() if name not in moved}
    axes = find_axes(model, stored_shapes(model))
    listed = {name: known for name, known in own.items() if is_listed(known, version, axes.get(name, NOWHERE))}
    left = Counter(str(own[name].precision) for name in own.keys() - listed.keys())
    notes = (
        f"leaves {plural(count, 'tensor')} of {what} out, for which version {version} of AIMET's files has no form"
        for what, count in left.items()
    )
    return aimet_text(listed, {*model.index.initializers}, version, axes), tuple(notes)


def _as_unsigned(encoding: Encoding) -> Encoding:
    """The encoding with the same values in the unsigned, asymmetric format; an asymmetric encoding is unchanged."""
    precision = encoding.precision
    if not precision.symmetric or precision.float_type or not precision.signed:
        return encoding
    shifted = encoding.zero_point + (1 << (precision.bits - 1))
    return replace(encoding, precision=Precision(precision.bits, signed=False, symmetric=False), zero_point=shifted)


def find_own_quantizers(model: DetachedModel, sites: Iterable[Site]) -> frozenset[str]:
    """The tensors that keep a quantizer of their own in AIMET although a Concat or the like reads them, since another
    node reads them too, such as a Shape (aimet_onnx 2.42, `QuantizationSimModel._propagate_output_encodings`).

    In a simulation they share the encoding of the result, so that a cache is the same before and after. Where the
    shared encoding is symmetric, as for the second factor of a product, the quantizer in AIMET is asymmetric.
    """
    known, consumers = {site.tensor: site for site in sites}, model.index.consumers
    found = set[str]()
    for site in known.values():
        for name in site.shares if len(site.shares) > 1 else ():
            is_read_twice = len(consumers[name]) > 1
            while len(known[name].shares) == 1:
                name = known[name].shares[0]
                is_read_twice |= len(consumers[name]) > 1
            is_second = any(node.op_type in PRODUCTS and name == node.input[1] for node in consumers[name])
            if is_read_twice and not is_second:
                found.add(name)
    return frozenset(found)


def encode_chosen_infinities(
    model: DetachedModel, placement: Placement, encodings: Mapping[str, Encoding]
) -> dict[str, Encoding]:
    """Encodings of constants that stay in float since they hold infinity, where only a Where reads them.

    Such a constant has the encoding of what the Where gives, which rounds infinity to the end of its range in any case.
    A converter that has no encoding of the constant would calibrate one of infinity.
    """
    found: dict[str, Encoding] = {}
    for placed in placement.left_in_float():
        consumers = model.index.consumers[placed.site.tensor] if placed.site.role == "constant" else ()
        results = [encodings.get(node.output[0]) for node in consumers if node.op_type == "Where"]
        first = results[0] if results else None
        if first is None or len(results) < len(consumers) or not all(is_same_encoding(first, own) for own in results):
            continue
        array = model.array(model.index.initializers[placed.site.tensor])
        if np.isinf(array).any() and not np.isnan(array).any():
            found[placed.site.tensor] = first
    return found
