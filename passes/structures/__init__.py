"""Structures that a policy can keep, one file each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from passes.structures.attention import attentions
from passes.structures.base import Found, Instance, KeptWeight, Searches, Structure
from passes.structures.embedding import embeddings
from passes.structures.gelu import gelus
from passes.structures.module import Modules
from passes.structures.norms import batch_norms, layer_norms, rms_norms
from passes.structures.qkv import SeparateQKV
from passes.structures.residual import residuals
from passes.structures.rope import rotary_embeddings
from passes.structures.selectors import ChosenNodes, name_of, op_of
from passes.structures.sketch import ShapedStructure
from passes.structures.swiglu import swiglus

__all__ = ["SELECTORS", "STRUCTURES", "Found", "Instance", "KeptWeight", "Searches", "Structure", "structure_of"]


def structure_of(entry: str) -> Structure | None:
    """What an entry of `keep` means, its question mark taken off; None if it means nothing."""
    prefix, colon, pattern = entry.partition(":")
    if colon:
        return SELECTORS[prefix](entry, pattern) if prefix in SELECTORS and pattern else None
    return STRUCTURES.get(entry)


_NORMS: Final = tuple(f"{name}Normalization" for name in ("Batch", "Layer", "RMS", "Instance", "Group"))
_CURVES: Final = ("Gelu", "Erf", "Tanh", "Sigmoid", "Relu", "LeakyRelu", "HardSwish", "Mish", "Clip")

_SHAPED: Final = (
    ShapedStructure("attention", "softmax between two products of computed values", attentions, ("Softmax", "MatMul")),
    ShapedStructure("batchnorm", "BatchNormalization", batch_norms, _NORMS),
    ShapedStructure("layernorm", "layer norm", layer_norms, (*_NORMS, "ReduceMean", "Sqrt")),
    ShapedStructure("rmsnorm", "RMS norm", rms_norms, (*_NORMS, "ReduceMean", "Sqrt")),
    ShapedStructure("gelu", "GELU", gelus, _CURVES),
    ShapedStructure("swiglu", "product of silu(x·W) and x·V", swiglus, _CURVES),
    ShapedStructure("embedding", "lookup of rows in a table of weights", embeddings, ("Gather", "GatherND")),
    ShapedStructure("rope", "rotary embedding", rotary_embeddings, ("Cos", "Sin", "Neg", "Softmax")),
    ShapedStructure(
        "residual", "sum of a value and of what a sublayer makes of it", residuals, ("Add", "Sum", "Concat")
    ),
)

STRUCTURES: Final[Mapping[str, Structure]] = {"qkv": SeparateQKV(), **{one.kind: one for one in _SHAPED}}

SELECTORS: Final[Mapping[str, Callable[[str, str], Structure]]] = {
    "op": lambda entry, pattern: ChosenNodes(entry, pattern, op_of),
    "node": lambda entry, pattern: ChosenNodes(entry, pattern, name_of),
    "module": Modules,
}
"""Prefix → what makes the structure of an entry such as `op:Softmax`."""
