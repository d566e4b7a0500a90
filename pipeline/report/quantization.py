"""What the page shows of a quantization simulation, as data that is saved with the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


class _Ratios:
    """Data with ratios that may be infinite, which plain JSON does not have."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, str]] = {"ser_json_inf_nan": "strings"}


@dataclass(frozen=True, slots=True)
class QuantizedTensor(_Ratios):
    """A computed tensor, in graph order. `part` names the structure and the role in it, such as `qkv layer.0 q`; ratios
    are of signal to noise in dB, infinite where nothing differs."""

    tensor: str
    op: str
    module: str
    part: str
    precision: str
    local_db: float
    total_db: float


@dataclass(frozen=True, slots=True)
class QuantizedLayer(_Ratios):
    """A layer, known by its output: the ratio in the model's outputs if it alone is quantized, and its share of what
    all layers alone add to their noise. Worst first."""

    layer: str
    op: str
    module: str
    part: str
    sqnr_db: float
    share: float


@dataclass(frozen=True, slots=True)
class QuantizedStructure(_Ratios):
    """A structure with a result of its own, such as an attention or a GELU: the ratio of its worst step alone, and that
    of its result in the quantized model. Worst result first."""

    kind: str
    name: str
    result: str
    worst: str
    """The tensor that its worst step makes."""
    local_db: float
    total_db: float


@dataclass(frozen=True, slots=True)
class QuantizedOutput(_Ratios):
    """An output by the specification of the operators, and as onnxruntime runs it with all optimizations."""

    name: str
    sqnr_db: float
    max_abs: float
    device_db: float | None


@dataclass(frozen=True, slots=True)
class Quantization:
    """not_estimated: why there are no layers. not_measured: why there is no noise at all; empty where there is."""

    tensors: tuple[QuantizedTensor, ...]
    layers: tuple[QuantizedLayer, ...]
    outputs: tuple[QuantizedOutput, ...]
    left_in_float: Mapping[str, int]
    """Reason → how many tensors."""
    weight_bytes: int
    quantized_weight_bytes: int
    quantized: int
    found: int
    not_estimated: str = ""
    not_measured: str = ""
    structures: tuple[QuantizedStructure, ...] = ()
    suggestion: str = ""
    """A sentence, and rules in YAML on the lines after it; empty where none was asked for."""
    notes: tuple[str, ...] = ()
    """Where formats are coarser than their rule says, and where onnxruntime's optimizations go wrong."""
