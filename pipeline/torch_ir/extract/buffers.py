"""Non-persistent buffers of a model on meta, computed again: no checkpoint has them, and meta has no numbers.

Models of `transformers` know how to fill such a buffer (`PreTrainedModel._init_weights`: rotary frequencies, position
ids), since `from_pretrained` makes them on meta too. A copy of the module that owns the buffer is filled, on the CPU;
the model itself is not touched. It is done twice, over different contents: what was not written is not known.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import nn

from pipeline.importers.from_torch.modules import every_module, every_path

__all__ = ["recomputed", "unsaved"]

Fill = Callable[[nn.Module], object]


def recomputed(model: nn.Module) -> dict[str, torch.Tensor]:
    """{name: value} of those non-persistent buffers on meta that their model can fill; empty for a real model."""
    found: dict[str, torch.Tensor] = {}
    if not any(_on_meta(module) for module in every_module(model) if module._non_persistent_buffers_set):
        return found
    for path, module, fill in _owners(model):
        first, second = (_filled(module, fill, content) for content in (0, 1))
        for name, value in first.items():
            if name in second and torch.equal(value, second[name]):
                found[f"{path}.{name}" if path else name] = value
    return found


def unsaved(model: nn.Module) -> frozenset[str]:
    """The names of all non-persistent buffers, which no checkpoint has."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in every_path(model)
        if module._non_persistent_buffers_set
        for name in _lasting(module)
    )


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, Fill]]:
    """Modules that hold such buffers, each with the way to fill it that its innermost model knows."""
    fills: dict[str, Fill] = {}
    for path, module in model.named_modules():
        fill = getattr(module, "_init_weights", None)
        if callable(fill):
            fills[path] = fill
        if _on_meta(module):
            known = [fills[above] for above in fills if not above or path == above or path.startswith(f"{above}.")]
            if known:
                yield path, module, known[-1]


def _on_meta(module: nn.Module) -> bool:
    return bool(module._non_persistent_buffers_set) and any(one.is_meta for one in _lasting(module).values())


def _lasting(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that no checkpoint has."""
    names = module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module._buffers.items() if name in names and buffer is not None}


def _filled(module: nn.Module, fill: Fill, content: int) -> dict[str, torch.Tensor]:
    shell = copy.copy(module)
    shell._parameters = {
        name: None if parameter is None else nn.Parameter(torch.empty_like(parameter), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    shell._buffers = {
        name: None if buffer is None else torch.full_like(buffer, content, device="cpu")
        for name, buffer in module._buffers.items()
    }
    try:
        with torch.no_grad(), torch.device("cpu"):
            fill(shell)
    except Exception:  # a model's own code, on a module without its weights: then it is not known
        return {}
    return _lasting(shell)
