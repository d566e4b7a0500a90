"""The two kinds of source that a model comes from, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from passes.suggest import plural
from pipeline.config import ExportConfig, InputConfig
from pipeline.errors import ConfigError
from pipeline.export.inputs import InputSpec

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

    @property
    def own_inputs(self) -> tuple[InputSpec, ...]:
        """The inputs that forward takes, without lifted buffers."""
        return self.inputs[: len(self.inputs) - sum(value.is_buffer for value in self.lifted)]

    @property
    def own_outputs(self) -> tuple[str, ...]:
        """The outputs that forward returns, without the new values of what it writes to."""
        return self.outputs[: len(self.outputs) - len(self.lifted)]


@dataclass(frozen=True, slots=True)
class OnnxSource:
    """An ONNX file that parses, and whose external data is there."""

    path: Path
    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]


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
