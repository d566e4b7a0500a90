"""`model.factory`: a function of the user's that makes the module. It runs because the user named it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from passes.suggest import describe_argument
from pipeline.config import ModelConfig, locate
from pipeline.errors import SourceError
from pipeline.export.build_source import assemble, draw_biases
from pipeline.export.checkpoint import read_checkpoint, without_weights
from pipeline.export.external_weights import best_rule, names_of
from pipeline.export.source import Example, TorchSource
from pipeline.export.user_code import call_user_code, load_function


def make_from_factory(model: ModelConfig, *, weightless: bool = False, keep_mode: bool = False) -> TorchSource:
    """Call the factory with `model.args`, and load `model.checkpoint`, if any; `weightless` makes it without weights.

    Raises:
        SourceError: the factory is missing, raises, or returns something else than a module, (module, args tuple)
            or (module, args tuple, kwargs dict).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        with without_weights() if weightless else nullcontext():
            value, example = call_factory(model)
    module, notes = plain_module(value, f"the factory {model.factory} returns")
    module, example, moved = _on_cpu(module, example)
    weights = f"as the factory makes them, with seed {model.seed}"
    if model.checkpoint is not None:
        weights = f"from {model.checkpoint}"
        if not weightless:
            notes += load_weights(module, model.checkpoint)
    if model.random_biases:
        draw_biases(module, model.seed)
        weights += ", random biases"
    source = assemble(module, example, model, keep_mode=keep_mode)
    return replace(source, notes=(*notes, *moved, *source.notes), weights=weights)


def call_factory(model: ModelConfig) -> tuple[Any, Example | None]:
    """Call the factory with `model.args`. Returns what it made, unchecked, and its example, if any.

    Raises:
        SourceError: the factory is missing, is a module, or raises.
    """
    text = model.factory or ""
    title = f"the factory {text}"
    factory = load_function(text, "model.factory", title)
    if isinstance(factory, nn.Module):
        raise SourceError(f"{title} is a module and no function; expected a function that returns it")
    return _split_example(call_user_code(lambda: factory(**model.args), f"{title} raises", text), title)


def _on_cpu(module: nn.Module, example: Example | None) -> tuple[nn.Module, Example | None, tuple[str, ...]]:
    """Move module and example to the CPU, where references are computed; tensors on the meta device stay there."""
    devices = {str(tensor.device) for tensor in (*module.parameters(), *module.buffers())} - {"cpu", "meta"}
    if example is not None:
        args, kwargs = pytree.tree_map_only(torch.Tensor, _to_cpu, (example.args, example.kwargs))
        example = Example(args, kwargs)
    if not devices:
        return module, example, ()
    return module.to("cpu"), example, (f"the model was on {', '.join(sorted(devices))} and is taken to the CPU",)


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta or tensor.is_cpu else tensor.cpu()


def load_weights(module: nn.Module, checkpoint: str) -> tuple[str, ...]:
    """Load a checkpoint; a prefix more or less, as DataParallel and Lightning save it, is fixed and noted.

    Raises:
        SourceError: it is missing or broken, or does not fit the module.
    """
    state = read_checkpoint(locate(checkpoint))
    wanted = names_of(module)
    rule = best_rule(wanted, state)
    is_renamed = bool(str(rule)) and all(rule.key(names, state) for names in wanted.values())
    if is_renamed:
        state = {rule.drop + name.removeprefix(rule.add): tensor for name, tensor in state.items()}
    for name, own in module.state_dict().items():  # torch casts whatever it finds there
        stored = state.get(name)
        if isinstance(own, torch.Tensor) and own.is_floating_point() and stored is not None:
            _refuse_other_numbers(checkpoint, name, own, stored)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise SourceError(f"checkpoint {checkpoint} does not fit: {' '.join(str(error).split())}") from error
    return (f"the checkpoint's names are the module's {rule}",) if is_renamed else ()


def _refuse_other_numbers(checkpoint: str, name: str, own: torch.Tensor, stored: torch.Tensor) -> None:
    if not stored.is_floating_point():
        found, expected = (str(tensor.dtype).removeprefix("torch.") for tensor in (stored, own))
        raise SourceError(
            f"checkpoint {checkpoint}: {name!r} is {found}, expected {expected} or other floats: integers without "
            "their scales, and complex numbers, are another weight"
        )


def _split_example(result: Any, title: str) -> tuple[Any, Example | None]:
    """Split what the factory returned into the module, unchecked, and its example, if any."""
    if not isinstance(result, tuple) or not 2 <= len(result) <= 3:
        return result, None
    args, kwargs = result[1], result[2] if len(result) == 3 else {}
    if isinstance(args, tuple) and isinstance(kwargs, dict):
        return result[0], Example(args, dict(kwargs))
    if isinstance(args, torch.Tensor):
        raise SourceError(
            f"{title} returns a tensor after the module, expected a tuple of arguments: return module, (x,)"
        )
    return result, None


def plain_module(value: Any, title: str) -> tuple[nn.Module, tuple[str, ...]]:
    """The module that torch.export can trace, and notes on the wrappers that were taken off.

    Args:
        title: where it comes from, with a verb: `the factory net.py:make returns`.

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
    """The module inside a wrapper of torch's; None where `value` is no such wrapper."""
    if isinstance(value, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return value.module
    original = getattr(value, "_orig_mod", None)  # of torch.compile's OptimizedModule
    return original if isinstance(value, nn.Module) and isinstance(original, nn.Module) else None


def _describe(value: Any) -> str:
    if value is None:
        return "None (is a `return` missing?)"
    if inspect.isclass(value):
        advice = f", which is not called: return {value.__name__}()" if issubclass(value, nn.Module) else ""
        return f"the class {value.__name__}{advice}"
    if isinstance(value, torch.export.ExportedProgram):
        return "an ExportedProgram, of which the module is .module()"
    if isinstance(value, torch.jit.ScriptFunction):
        return "a function of torch.jit, which torch.export cannot trace"
    if inspect.iscoroutine(value) or inspect.isgenerator(value):
        return f"{describe_argument(value)} (is it `async`, or does it `yield`?)"
    if isinstance(value, Mapping) and value and all(isinstance(item, torch.Tensor) for item in value.values()):
        return "a state dict, which holds weights and no code: make the module and call load_state_dict"
    if inspect.isroutine(value):
        return f"the function {value.__name__}: put it into the forward of an nn.Module"
    if isinstance(value, list | tuple):
        return f"{describe_argument(value)} ({', '.join(type(item).__name__ for item in value)})"
    return f"{type(value).__name__}"


QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")

EXPECTED = "an nn.Module, (module, args tuple) or (module, args tuple, kwargs dict)"
