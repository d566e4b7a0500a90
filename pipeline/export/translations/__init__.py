"""Forms in ONNX for operators that torch's exporter has none for, as its `custom_translation_table` takes them.

A file has the operators of one idea. An operator is found by name, since a library enters its own when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from pipeline.export.translations.grouped_mm import GROUPED_MM

__all__ = ["translation_table"]


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Operator → translation, of the operators that this process knows."""
    found = ((_operator(name), translate) for name, translate in TRANSLATIONS.items())
    return {operator: translate for operator, translate in found if operator is not None}


def _operator(name: str) -> Any:
    """`aten._grouped_mm.default` of `torch.ops`; None where no library has entered it."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)


TRANSLATIONS: Final[Mapping[str, Callable[..., Any]]] = {**GROUPED_MM}
