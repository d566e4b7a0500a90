"""Constants of torch by name, as an IR has them: only those that torch has, on whatever machine it runs."""

from __future__ import annotations

from functools import cache

import torch

from pipeline.ir import TorchConst

__all__ = ["KINDS", "word"]


@cache  # a model has many, and few that differ
def word(kind: str, name: str) -> TorchConst:
    """The dtype, device, layout or memory format `name`, with or without `torch.`.

    Raises:
        ValueError: torch has no such constant.
    """
    name = name.removeprefix("torch.")
    found = _device(name) if kind == "device" else getattr(torch, name, None)
    if not isinstance(found, KINDS[kind]):
        raise ValueError(f"torch has no {kind} {name!r}, expected one such as {EXAMPLES[kind]}")
    return TorchConst(kind, name)


def _device(name: str) -> torch.device | None:
    try:
        return torch.device(name)
    except RuntimeError:
        return None


KINDS: dict[str, type] = {
    "dtype": torch.dtype,
    "device": torch.device,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}

EXAMPLES = {
    "dtype": "'float32'",
    "device": "'cpu' and 'cuda:0'",
    "layout": "'strided'",
    "memory_format": "'contiguous_format'",
}
