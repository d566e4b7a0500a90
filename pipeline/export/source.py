"""What a model comes from: its two kinds of source, and its inputs' names, shapes with named dims, and seeded draws.

Imports numpy, never torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from passes.proof.draws import Draw, DrawnInput, GivenDraw, dtype_named
from passes.suggest import nearest, plural
from passes.weights.detached import DetachedModel, read_model
from pipeline.config import ExportConfig, InputConfig, ModelConfig, VerifyConfig
from pipeline.errors import ConfigError, SourceError

if TYPE_CHECKING:  # torch takes seconds to import, and an ONNX file does not need it
    import torch
    from torch import nn
    from torch.export import ExportedProgram


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """The arguments of the one call that exports the module: trees of tensors and constants."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Lifted:
    """A buffer or an input that forward writes to, and the names of its value before and after in the graph.

    `target` is the path of the buffer, or the module's own name of the input.
    """

    target: str
    is_buffer: bool
    before: str
    after: str


@dataclass(frozen=True, slots=True, eq=False)
class TorchSource:
    """A module and its tensors in and out as flat names, in the order of the ONNX graph.

    It is in eval mode, unless the caller asked to keep the mode that it was made in.
    """

    module: nn.Module
    example: Example
    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The values of the buffers of a module without weights, which is on the meta device."""
    put_to_eval: tuple[str, ...] = ()
    """Modules that came in train mode, and that eval mode has changed."""
    notes: tuple[str, ...] = ()
    """For the report: settings that were filled in since the user left them open."""
    weights: str = ""
    """Where the weights come from, for the report: `random, seed 0`."""
    dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Sizes to try for named dims of derived inputs; `model.dims` takes precedence."""
    written_buffers: frozenset[str] = frozenset()
    """The buffers that a call of the module writes to, by the module's own names."""
    written_inputs: frozenset[str] = frozenset()
    """The inputs that it writes to."""
    lost_writes: tuple[str, ...] = ()
    """Sentences on writes that no graph of ONNX can make: an export is refused."""
    declared: Mapping[str, InputConfig] = field(default_factory=dict)
    """The entries of `model.inputs` that name buffers: how these are drawn where they become inputs."""
    lifted: tuple[Lifted, ...] = ()
    """The buffers and inputs whose new values are outputs, the last of `outputs`; the buffers are the last `inputs`."""
    program: ExportedProgram | None = None
    """The program to export, where it was traced to find `lifted`; it writes to none of these."""
    draws: Callable[[VerifyConfig], Sequence[GivenDraw]] | None = None
    """Makes the draws of a source whose inputs depend on each other, in place of independent ones."""
    way_out: str = ""
    """What to try where a named dim comes out constant; empty where the user declares the inputs."""

    @property
    def own_inputs(self) -> tuple[InputSpec, ...]:
        """The inputs that forward takes, without lifted buffers."""
        return self.inputs[: len(self.inputs) - sum(value.is_buffer for value in self.lifted)]

    @property
    def own_outputs(self) -> tuple[str, ...]:
        """The outputs that forward returns, without the new values of what it writes to."""
        return self.outputs[: len(self.outputs) - len(self.lifted)]


@dataclass(frozen=True)
class OnnxSource:
    """An ONNX file that parses, and whose external data is there."""

    path: Path
    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    opened: DetachedModel | None = None
    """The model, where somebody has read it, or where no file has it."""

    @cached_property
    def model(self) -> DetachedModel:
        """The model, read once for all stages before the passes; its file says which weights stay unread."""
        return self.opened or read_model(self.path)


Source = TorchSource | OnnxSource


def with_names(source: TorchSource, settings: ExportConfig) -> TorchSource:
    """The source under the names that `export.input_names` and `export.output_names` give; idempotent.

    Raises:
        ConfigError: there are more or fewer names than tensors.
    """
    inputs, outputs = source.inputs, source.outputs
    if settings.input_names is not None:
        _check_count("input_names", settings.input_names, [spec.name for spec in inputs])
        pairs = zip(inputs, settings.input_names, strict=True)
        inputs = tuple(replace(spec, name=name) for spec, name in pairs)
    if settings.output_names is not None:
        _check_count("output_names", settings.output_names, list(outputs))
        outputs = settings.output_names
    shared = {spec.name for spec in inputs} & set(outputs)
    if shared:
        raise ConfigError(f"export: {min(shared)!r} names an input and an output; a graph needs two names")
    return replace(source, inputs=inputs, outputs=outputs)


def _check_count(key: str, names: tuple[str, ...], tensors: list[str]) -> None:
    if len(names) != len(tensors):
        raise ConfigError(
            f"export.{key}: {plural(len(names), 'name')}, but the model has {plural(len(tensors), 'tensor')} there: "
            f"{', '.join(tensors)}"
        )


class NamedModel(ModelConfig):
    """The section `model` with what the section `export` says of inputs.

    Args:
        input_names: the names that `export.input_names` gives to the inputs, in order.
        only_dynamic: inputs that `export.dynamic_shapes` names, and `model.inputs` does not.
    """

    input_names: tuple[str, ...] = ()
    only_dynamic: frozenset[str] = frozenset()


def key_of_input(model: ModelConfig, name: str) -> str:
    """The key of the configuration that names the input `name`, for messages."""
    named = isinstance(model, NamedModel) and name in model.only_dynamic
    return "export.dynamic_shapes" if named else "model.inputs"


def hint_on_inputs(model: ModelConfig, wrong: str, own: Sequence[str], verb: str) -> str:
    """The name nearest to `wrong`, or all that a configuration may use: forward's `own`, and `export.input_names`."""
    new = [name for name in model.input_names if name not in own] if isinstance(model, NamedModel) else []
    named = f", under export.input_names: {', '.join(new)}" if new else ""
    return nearest(wrong, (*own, *new)) or f"; it {verb}: {', '.join(own)}{named}"


def with_own_names(model: ModelConfig, own: Sequence[str]) -> ModelConfig:
    """`model` with its inputs under forward's names `own`, also those under a name of `export.input_names`."""
    names = model.input_names if isinstance(model, NamedModel) else ()
    if len(names) != len(own):  # what the configuration says of names is checked where they are given
        return model
    renamed = {new: name for new, name in zip(names, own, strict=True) if new not in own}
    inputs: dict[str, InputConfig] = {}
    for name, entry in model.inputs.items():
        known = inputs.get(renamed.get(name, name), InputConfig())
        given = {key: getattr(entry, key) for key in entry.model_fields_set}
        merged = known.model_copy(update={**given, "dynamic": {**known.dynamic, **entry.dynamic}})
        inputs[renamed.get(name, name)] = merged
    return model.model_copy(update={"inputs": inputs})


def with_dynamic_shapes(model: ModelConfig, settings: ExportConfig) -> ModelConfig:
    """The `model:` section with the axes of `export.dynamic_shapes` written into its inputs.

    Raises:
        ConfigError: the source is an ONNX file, which is not exported.
    """
    if settings.dynamic_shapes and model.onnx is not None:
        raise ConfigError("export.dynamic_shapes: an ONNX file keeps the dims that it has; leave this key out")
    if model.onnx is not None or (settings.input_names is None and not settings.dynamic_shapes):
        return model
    new = {
        "input_names": settings.input_names or (),
        "only_dynamic": frozenset(settings.dynamic_shapes.keys() - model.inputs.keys()),
    }
    model = NamedModel.model_construct(**{**dict(model), **new})
    inputs = dict(model.inputs)
    for name, axes in settings.dynamic_shapes.items():
        declared = inputs.get(name, InputConfig())
        inputs[name] = declared.model_copy(update={"dynamic": {**declared.dynamic, **axes}})
    return model.model_copy(update={"inputs": inputs})


def named_axes(name: str, shape: tuple[int | str, ...], declared: InputConfig) -> tuple[int | str, ...]:
    """`shape` with the names of `declared.dynamic` at their axes.

    Raises:
        ConfigError: the shape has no such axis.
    """
    dims = list(shape)
    for axis, dim in declared.dynamic.items():
        if not -len(dims) <= axis < len(dims):
            raise ConfigError(f"input {name!r}: axis {axis} was asked to be {dim!r}, but its shape is {list(shape)}")
        dims[axis] = dim
    return tuple(dims)


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One flat input. A text in `shape` is a named dynamic dim.

    Floats are drawn uniformly from [low, high]; integers and bools from low up to, and without, high; where
    low equals high every element is low. With `padding` the first element of each row is one. `first` is the value of
    the first draw, and of draws of the user's own data that leave the input out.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    low: float
    high: float
    seed: int | None = None
    padding: bool = False
    is_assumed: bool = False
    """Whether neither a range nor an example says what the input holds."""
    example: np.ndarray | None = field(default=None, compare=False)
    """Integers of the factory's own example, unless a range was declared."""
    first: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def identity(self) -> str:
        """Key of its random stream, as well as the seed of each draw."""
        return f"{self.seed}:{self.name}"

    def shape_at(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with a number for every named dim.

        Raises:
            SourceError: `sizes` lacks one of the names.
        """
        missing = [dim for dim in self.shape if isinstance(dim, str) and dim not in sizes]
        if missing:
            raise SourceError(f"input {self.name!r}: no size for the dim {missing[0]!r}; put it into model.dims")
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{shape_text(self.shape)}"


def shape_text(shape: Sequence[int | str] | None) -> str:
    """`[batch, ?, 3]`, where `?` is a dim without a name; `unknown` for no shape."""
    return "unknown" if shape is None else f"[{', '.join(str(dim) or '?' for dim in shape)}]"


def input_spec(name: str, declared: InputConfig, shape: tuple[int | str, ...], dtype: str) -> InputSpec:
    """Make a spec from a declaration, with its final shape and dtype.

    Raises:
        SourceError: the range does not suit the dtype.
    """
    default = (-1.0, 1.0) if is_float(dtype) else (0.0, 2.0)
    low, high = declared.range or default
    if is_float(dtype):
        _check_float_range(name, low, high, dtype)
    else:
        _check_whole_range(name, low, high, dtype)
    if declared.padding and (is_float(dtype) or not shape or (low, high) != (0, 2)):
        raise SourceError(f"input {name!r}: found padding: true, which is for masks of zeros and ones with axes")
    return InputSpec(name, shape, dtype, low, high, declared.seed, declared.padding, declared.range is None)


def _check_float_range(name: str, low: float, high: float, dtype: str) -> None:
    most = float(ml_dtypes.finfo(dtype_named(dtype)).max)
    if max(-low, high, high - low) > most:
        raise SourceError(f"input {name!r}: range [{low:g}, {high:g}] leaves {dtype}, which ends at {most:g}")


def _check_whole_range(name: str, low: float, high: float, dtype: str) -> None:
    if low != int(low) or high != int(high):
        raise SourceError(f"input {name!r}: range [{low:g}, {high:g}] for {dtype}, expected integers")
    least, most = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if low < least or max(low, high - 1) > most:
        raise SourceError(f"input {name!r}: range [{low:g}, {high:g}] leaves {dtype}, which holds {least} to {most}")


def draw_inputs(inputs: Iterable[InputSpec], sizes: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Draw every input; a draw depends only on the seed, and on the input's own seed, name and shape.

    Raises:
        SourceError: a named dim has no size.
    """
    specs = list(inputs)
    sized = {dim: size for spec in specs for dim, size in zip(spec.shape, spec.shape_at(sizes), strict=True)}
    draw = Draw(seed, {dim: size for dim, size in sized.items() if isinstance(dim, str)})
    return {known.name: known.draw(draw) for known in drawn_inputs(specs)}


def drawn_inputs(inputs: Iterable[InputSpec]) -> tuple[DrawnInput, ...]:
    """The inputs in the form that a `DrawPlan` takes."""
    return tuple(
        DrawnInput(
            *(spec.name, spec.shape, spec.dtype, spec.low, spec.high, spec.identity),
            is_assumed=spec.is_assumed,
            is_padding=spec.padding,
            example=spec.example,
            first=spec.first,
        )
        for spec in inputs
    )


def is_float(dtype: str) -> bool:
    """Whether values are drawn from an interval."""
    return "float" in dtype


def named_dims(inputs: Iterable[InputSpec]) -> tuple[str, ...]:
    """The named dims, each once, in the order in which they appear."""
    return tuple(dict.fromkeys(dim for spec in inputs for dim in spec.shape if isinstance(dim, str)))
