"""A module, its own example if it came with one, and the declared inputs → a `TorchSource` that was called once."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from pipeline.config import DTYPES, InputConfig, ModelConfig
from pipeline.errors import OnnxlineError, SourceError, Unsupported
from pipeline.export.call_watch import TensorBefore, Watch, capture_output, watch_call
from pipeline.export.checkpoint import is_weightless, take_buffers
from pipeline.export.reference import switch_to_eval
from pipeline.export.source import (
    Example,
    InputSpec,
    TorchSource,
    draw_inputs,
    hint_on_inputs,
    input_spec,
    is_float,
    key_of_input,
    named_axes,
    named_dims,
    shape_text,
    with_own_names,
)
from pipeline.export.tree import (
    input_tensors,
    named_leaves,
    not_dense,
    output_tensors,
    parameter_names,
    refill,
    register_caches,
)
from pipeline.export.user_code import first_line, where_raised
from pipeline.runtime.tensors import dtype_name, to_torch


@torch.no_grad()
def draw_biases(module: nn.Module, seed: int) -> None:
    """Move each vector of parameters that holds zeros or ones alone by normal numbers of deviation `SPREAD`, in place.

    Classes initialize biases and scales of norms like this; passes remove the nodes that add such a zero.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        is_vector = parameter.ndim == 1 and parameter.is_floating_point() and not parameter.is_meta
        if is_vector and any(bool((parameter == value).all()) for value in (0, 1)):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += SPREAD * noise.to(parameter.device, parameter.dtype)


SPREAD = 0.02
"""The deviation by which transformers initializes matrices."""


class NoInputs(SourceError):
    """The model has neither an example nor declared inputs. `takes` lists the parameters of forward."""

    def __init__(self, message: str, takes: str) -> None:
        super().__init__(message)
        self.takes = takes


def assemble(
    module: nn.Module,
    example: Example | None,
    model: ModelConfig,
    *,
    keep_mode: bool = False,
    given_in: str = "model.inputs",
) -> TorchSource:
    """Call the module once on its example and name its inputs and outputs; in eval mode unless `keep_mode`.

    Args:
        given_in: where messages send those whose inputs do not fit.

    Raises:
        SourceError: an input is undeclared, unknown or does not fit, or the module raises on the example.
        Unsupported: the module returns something that is not a tensor.
    """
    put_to_eval = () if keep_mode else tuple(mode_dependent_modules(module))
    if not keep_mode:
        switch_to_eval(module)
    register_caches(module)
    buffers = take_buffers(module) if is_weightless(module) else {}
    if example is None:
        example, inputs = _draw_example(module, model)
    else:
        names, _ = parameter_names(module)
        ordered = dict(sorted(example.kwargs.items(), key=lambda item: _position(item[0], names)))
        example, inputs = _check_example(module, Example(example.args, ordered), model)
    if is_weightless(module):
        example = _on_meta(module, example)
    outputs, watch = _call_once(module, example, inputs, given_in)
    input_names_taken = {spec.name for spec in inputs}
    unique = tuple(f"{name}_out" if name in input_names_taken else name for name in outputs)
    source = TorchSource(module, example, inputs, unique, buffers, put_to_eval, watch.notes(module, example))
    return replace(
        source,
        written_buffers=frozenset(watch.buffers),
        written_inputs=frozenset(watch.inputs),
        lost_writes=tuple(watch.lost_writes()),
        declared=_of_buffers(model, module),
    )


def _of_buffers(model: ModelConfig, module: nn.Module) -> dict[str, InputConfig]:
    """The entries of `model.inputs` that name a buffer of the module."""
    buffers = dict(module.named_buffers(remove_duplicate=False)) if model.inputs else {}
    return {name: entry for name, entry in model.inputs.items() if name in buffers}


def _on_meta(module: nn.Module, example: Example) -> Example:
    """The example on the meta device: a graph is traced on one device, and the module is there."""
    tensors = input_tensors(module, example)
    return refill(module, example, {name: tensor.to("meta") for name, tensor in tensors.items()})


def _draw_example(module: nn.Module, model: ModelConfig) -> tuple[Example, tuple[InputSpec, ...]]:
    names, anything = parameter_names(module)
    own = [name for name in model.inputs if name.partition(".")[0] in names]
    own = sorted(own, key=lambda name: _position(name.partition(".")[0], names))
    model = with_own_names(model, own or names[: len(model.inputs)])
    declared = {name: entry for name, entry in model.inputs.items() if name not in _of_buffers(model, module)}
    if not declared:
        takes = f"forward of {type(module).__name__} takes: {', '.join(names)}"
        raise NoInputs(f"model.inputs is empty; {takes}", takes)
    for name in declared:
        root = name.partition(".")[0]
        if root not in names and not anything:
            key, hint = key_of_input(model, name), hint_on_inputs(model, root, names, "takes")
            raise SourceError(f"{key}: forward of {type(module).__name__} has no parameter {root!r}{hint}")
    ordered = sorted(declared, key=lambda name: _position(name.partition(".")[0], names))
    specs = tuple(_declared_spec(name, declared[name]) for name in ordered)
    drawn = draw_inputs(specs, _sizes(specs, model), model.seed)
    kwargs: dict[str, Any] = {}
    for name, array in drawn.items():
        _insert(kwargs, name.split("."), to_torch(array))
    return Example((), kwargs), specs


def _position(name: str, names: list[str]) -> int:
    return names.index(name) if name in names else len(names)


def _declared_spec(name: str, declared: InputConfig) -> InputSpec:
    if declared.shape is None:
        raise SourceError(f"model.inputs.{name}: the key 'shape' is missing, and no example tells it")
    shape = _check_names(name, named_axes(name, declared.shape, declared))
    return input_spec(name, declared, shape, declared.dtype or "float32")


def _insert(tree: dict[str, Any], keys: list[str], tensor: torch.Tensor) -> None:
    *above, last = keys
    for key in above:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise SourceError(f"model.inputs: {key!r} is a tensor and a mapping; expected one of them")
    if last in tree:
        raise SourceError(f"model.inputs: {'.'.join(keys)!r} is a tensor and a mapping; expected one of them")
    tree[last] = tensor


def _check_example(module: nn.Module, example: Example, model: ModelConfig) -> tuple[Example, tuple[InputSpec, ...]]:
    tensors = input_tensors(module, example)
    model = with_own_names(model, list(tensors))
    for name, tensor in tensors.items():
        if other := not_dense(tensor):
            raise SourceError(f"the example's input {name!r}: found {other}")
        dtype = dtype_name(tensor.dtype)
        if dtype not in DTYPES:
            raise Unsupported(f"the example's input {name!r} is {dtype}; inputs can be drawn for {', '.join(DTYPES)}")
    for name, leaf in named_leaves(module, example):
        if isinstance(leaf, np.ndarray):
            raise SourceError(f"the example's input {name!r}: found a numpy array, expected torch.from_numpy(array)")
    unknown = sorted(set(model.inputs) - set(tensors) - set(_of_buffers(model, module)))
    if unknown:
        key = key_of_input(model, unknown[0])
        hint = hint_on_inputs(model, unknown[0], list(tensors), "has")
        raise SourceError(f"{key}: the example has no tensor {unknown[0]!r}{hint}")
    specs = tuple(_example_spec(name, tensor, model.inputs.get(name)) for name, tensor in tensors.items())
    sizes = _sizes(specs, model)
    # Where a dim is dynamic, the example's own size may be 1, or differ from its namesake elsewhere: draw these again.
    stale = [spec for spec in specs if spec.shape_at(sizes) != tuple(tensors[spec.name].shape)]
    redrawn = {name: to_torch(array) for name, array in draw_inputs(stale, sizes, model.seed).items()}
    return refill(module, example, {**tensors, **redrawn}), specs


def _example_spec(name: str, tensor: torch.Tensor, declared: InputConfig | None) -> InputSpec:
    """The spec from the example's shape, dtype and range of values, where the declaration does not replace them."""
    own, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
    declared = declared or InputConfig()
    shape = _check_names(name, named_axes(name, own if declared.shape is None else declared.shape, declared))
    fits = len(shape) == len(own) and all(isinstance(a, str) or a == b for a, b in zip(shape, own, strict=True))
    if not fits or declared.dtype not in (None, dtype):
        said = f"{declared.dtype or dtype}{shape_text(shape)}"
        raise SourceError(f"model.inputs.{name}: declared {said}, but the example is {dtype}{list(own)}")
    if declared.range is not None:
        return input_spec(name, declared, shape, dtype)
    spec = input_spec(name, declared.model_copy(update={"range": _range_of(tensor, dtype)}), shape, dtype)
    is_whole = not is_float(dtype) and dtype != "bool" and not tensor.is_meta
    return replace(spec, example=tensor.detach().cpu().numpy() if is_whole else None)


def _range_of(tensor: torch.Tensor, dtype: str) -> tuple[float, float] | None:
    """The range of the example's values, so that draws look like it: token ids stay below the largest one."""
    if tensor.numel() == 0 or tensor.is_meta:
        return None
    tensor = tensor.detach()  # one that requires a gradient warns when it becomes a number
    low, high = float(tensor.min()), float(tensor.max())
    if is_float(dtype):
        least = float(torch.finfo(tensor.dtype).min)  # what an additive mask of infinity does is done by it too
        low, high = max(low, least), max(high, least)
        return (low, high) if low < high else None  # a constant would prove nothing
    return low, high + 1


def _check_names(name: str, shape: tuple[int | str, ...]) -> tuple[int | str, ...]:
    wrong = [dim for dim in shape if isinstance(dim, str) and not dim.isidentifier()]
    if wrong:
        raise SourceError(f"model.inputs.{name}.shape: found {wrong[0]!r}, expected a name such as 'batch'")
    return shape


def _sizes(specs: tuple[InputSpec, ...], model: ModelConfig) -> dict[str, int]:
    return {dim: model.sizes(dim)[0] for dim in named_dims(specs)}


def _call_once(
    module: nn.Module, example: Example, inputs: tuple[InputSpec, ...], given_in: str
) -> tuple[dict[str, torch.Tensor], Watch]:
    """The module's outputs on its example, and what the call has changed."""
    fresh = refill(module, example, input_tensors(module, example))
    calls = iter([fresh, refill(module, example, input_tensors(module, example))])

    def call() -> dict[str, torch.Tensor]:
        arguments = next(calls)
        # Without weights no tensor has values: fake tensors raise where a module reads one, as in a trace.
        fake = FakeTensorMode(allow_non_fake_inputs=True) if is_weightless(module) else nullcontext()
        with fake:
            return output_tensors(module(*arguments.args, **arguments.kwargs))

    given = {name: TensorBefore(tensor) for name, tensor in input_tensors(module, fresh).items()}
    try:
        with capture_output(), torch.no_grad():
            outputs, watch = watch_call(module, call)
        watch.inputs = {name for name, before in given.items() if before.is_written}
        watch.rebound |= {("input", name) for name, before in given.items() if before.is_rebound}
        return outputs, watch
    except OnnxlineError:
        raise
    except (Exception, SystemExit) as error:  # a user's forward may raise anything
        place = where_raised(error, module)
        listing = "; ".join(map(str, inputs)) or "none, since the example holds no tensor"
        raise SourceError(
            f"the model raises on its example inputs{place}: {first_line(error)}\n"
            f"  the inputs are: {listing}\n  check shapes, dtypes and ranges in {given_in}"
        ) from error


def mode_dependent_modules(module: nn.Module) -> list[str]:
    """Paths of the modules of torch's own classes that are in train mode and that eval mode would change.

    The root is named by its class. Code of others that reads `self.training` is not seen.
    """
    return [
        path or type(part).__name__ for path, part in module.named_modules() if part.training and _depends_on_mode(part)
    ]


def describe_eval_mode(source: TorchSource) -> tuple[str, ...]:
    """A sentence on what eval mode has changed in the model; none where it changed nothing."""
    if not source.put_to_eval:
        return ()
    first, *others = source.put_to_eval
    more = f" and {len(others)} more" if others else ""
    return (f"the model came in train mode and was put into eval mode, which changes {first}{more}",)


def _depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    if isinstance(module, _NormBase):  # without statistics of earlier batches, those of this batch count in both
        return module.track_running_stats
    return isinstance(module, nn.RReLU)
