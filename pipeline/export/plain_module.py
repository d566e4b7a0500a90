"""What a factory may return in place of an `nn.Module`: wrappers are taken off, everything else is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pipeline.errors import SourceError

__all__ = ["plain_module"]


def plain_module(value: Any, title: str) -> tuple[nn.Module, tuple[str, ...]]:
    """The module that torch.export can trace, and notes on the wrappers that were taken off.

    Args:
        title: who gives it, with its verb: `the factory net.py:make returns`.

    Raises:
        SourceError: it is no module, or one that torch.export cannot trace.
    """
    notes: list[str] = []
    while True:
        wrapped = _inside(value)
        if wrapped is None:
            break
        notes.append(f"the model came in {type(value).__name__}; the module inside is exported")
        value = wrapped
    if not isinstance(value, nn.Module):
        raise SourceError(f"{title} {_describe(value)}, expected {EXPECTED}")
    quantized = next(
        (name for name, part in value.named_modules() if type(part).__module__.startswith(QUANTIZED)), None
    )
    if quantized is not None:
        raise SourceError(
            f"{title} {type(value).__name__}, whose module {quantized!r} is quantized by torch.ao, which torch.export "
            "cannot trace; return the module from before quantization"
        )
    scripted = next((name for name, part in value.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        place = f" with a module of torch.jit at {scripted!r}" if scripted else ""
        kind = type(value).__name__
        raise SourceError(
            f"{title} {kind}{place}: a module of torch.jit.trace, torch.jit.script or torch.jit.load, which "
            "torch.export cannot trace; return the original nn.Module, from before torch.jit"
        )
    return value, tuple(notes)


def _inside(value: Any) -> nn.Module | None:
    """The module that a wrapper of torch's runs; None where `value` is no such wrapper."""
    if isinstance(value, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return value.module
    original = getattr(value, "_orig_mod", None)  # of torch.compile's OptimizedModule
    return original if isinstance(value, nn.Module) and isinstance(original, nn.Module) else None


def _describe(value: Any) -> str:
    if value is None:
        return "None (is a `return` missing?)"
    if inspect.isclass(value):
        made = f", which is not called: return {value.__name__}()" if issubclass(value, nn.Module) else ""
        return f"the class {value.__name__}{made}"
    if isinstance(value, torch.export.ExportedProgram):
        return "an ExportedProgram, of which the module is .module()"
    if isinstance(value, torch.jit.ScriptFunction):
        return "a function of torch.jit, which torch.export cannot trace"
    if inspect.iscoroutine(value) or inspect.isgenerator(value):
        return f"a {type(value).__name__} (is it `async`, or does it `yield`?)"
    if isinstance(value, Mapping) and value and all(isinstance(item, torch.Tensor) for item in value.values()):
        return "a state dict, which holds weights and no code: make the module and call load_state_dict"
    if inspect.isroutine(value):
        return f"the function {value.__name__}: put it into the forward of an nn.Module"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} ({', '.join(type(item).__name__ for item in value)})"
    return f"{type(value).__name__}"


QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")

EXPECTED = "an nn.Module, (module, args tuple) or (module, args tuple, kwargs dict)"
