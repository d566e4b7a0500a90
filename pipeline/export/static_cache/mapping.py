"""Which tensor of prefill is which of decode: names, and the mapping that a runtime reads.

Source: seed document 000, `save_kv_mapping`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypedDict

from passes.weights.files import replace_when_done
from pipeline.errors import UsageError

__all__ = [
    "DECODE_INPUTS",
    "PREFILL_INPUTS",
    "KVMapping",
    "LayerMapping",
    "decode_input_names",
    "decode_output_names",
    "kv_mapping",
    "prefill_output_names",
    "save_kv_mapping",
]

PREFILL_INPUTS: Final = ("input_ids", "attention_mask", "position_ids")
DECODE_INPUTS: Final = (*PREFILL_INPUTS, "cache_position")
"""What decode takes before the caches."""


class LayerMapping(TypedDict):
    """The six names of one layer's K and V."""

    layer: int
    prefill_key_output: str
    prefill_value_output: str
    decode_key_input: str
    decode_value_input: str
    decode_key_output: str
    decode_value_output: str


class KVMapping(TypedDict):
    """One row a layer, in order."""

    num_layers: int
    layers: list[LayerMapping]


def prefill_output_names(layers: int) -> tuple[str, ...]:
    """Names for an ONNX export of `Prefill`; its inputs are PREFILL_INPUTS."""
    return ("logits", *_pairs("key_{}", "value_{}", layers))


def decode_input_names(layers: int) -> tuple[str, ...]:
    """Names for an ONNX export of `Decode`."""
    return (*DECODE_INPUTS, *_pairs("past_key_{}", "past_value_{}", layers))


def decode_output_names(layers: int) -> tuple[str, ...]:
    """Names for an ONNX export of `Decode`; as prefill's, since they mean the same."""
    return prefill_output_names(layers)


def _pairs(key: str, value: str, layers: int) -> tuple[str, ...]:
    return tuple(name.format(layer) for layer in range(layers) for name in (key, value))


def kv_mapping(
    prefill_outputs: Sequence[str], decode_inputs: Sequence[str], decode_outputs: Sequence[str]
) -> KVMapping:
    """The mapping of two graphs, from the names that they have.

    Args:
        prefill_outputs, decode_outputs: logits first, then K and V by layer.
        decode_inputs: those of DECODE_INPUTS that the graph has, and K and V by layer.

    Raises:
        UsageError: the three do not have the same number of layers.
    """
    sides = (prefill_outputs[1:], [name for name in decode_inputs if name not in DECODE_INPUTS], decode_outputs[1:])
    counts = [len(side) for side in sides]
    if len(set(counts)) > 1 or counts[0] % 2:
        raise UsageError(
            "prefill returns {}, decode takes {} and returns {} tensors of keys and values; expected the same even "
            "number; were both graphs made of one model?".format(*counts)
        )
    rows = zip(*(name for side in sides for name in (side[::2], side[1::2])), strict=True)
    return {"num_layers": counts[0] // 2, "layers": [_row(layer, *names) for layer, names in enumerate(rows)]}


def _row(layer: int, *names: str) -> LayerMapping:
    return LayerMapping(
        layer=layer,
        prefill_key_output=names[0],
        prefill_value_output=names[1],
        decode_key_input=names[2],
        decode_value_input=names[3],
        decode_key_output=names[4],
        decode_value_output=names[5],
    )


def save_kv_mapping(mapping: KVMapping, path: Path) -> None:
    """Write the mapping as JSON; a failed write leaves the old file."""
    with replace_when_done(path) as temporary:
        temporary.write_text(json.dumps(mapping, indent=2) + "\n", encoding="utf-8")
