"""Where a model comes from: the two kinds of source, and `load_source`, which makes one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import ExportConfig, ModelConfig
from pipeline.errors import ConfigMistake
from pipeline.export.inputs import InputSpec, named_dims

if TYPE_CHECKING:  # torch takes seconds to import, and an ONNX file does not need it
    from torch import nn

__all__ = ["Example", "OnnxSource", "Source", "TorchSource", "load_source", "with_names"]


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """What the module is called with once, to export it. Trees of tensors and constants."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class TorchSource:
    """A module in eval mode, and its tensors in and out as flat names in the order of the ONNX graph."""

    module: nn.Module
    example: Example
    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OnnxSource:
    """An ONNX file that parses, and whose external data is there."""

    path: Path
    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]


Source = TorchSource | OnnxSource


def load_source(model: ModelConfig) -> Source:
    """Make the module, or read the ONNX file, that the configuration names.

    The module is made with `model.seed`, put into eval mode and called once on its example; torch's own random state
    is left as it was.

    Raises:
        SourceMistake: the model, its checkpoint or its inputs cannot be made or read.
        Unsupported: the module gives back something that an ONNX graph cannot.
    """
    source = _load(model)
    unused = sorted(set(model.dims) - set(named_dims(source.inputs)))
    if unused:
        names = ", ".join(named_dims(source.inputs)) or "none"
        raise ConfigMistake(f"model.dims: no input has a dim named {unused[0]!r}; the named dims are: {names}")
    return source


def _load(model: ModelConfig) -> Source:
    if model.onnx is not None:
        from pipeline.export.onnx_file import read_onnx_file

        return read_onnx_file(model.onnx, model)
    if model.transformers is not None:
        from pipeline.export.transformers_class import make_from_transformers

        return make_from_transformers(model.transformers, model)
    from pipeline.export.factory import make_from_factory

    return make_from_factory(model)


def with_names(source: TorchSource, settings: ExportConfig) -> TorchSource:
    """The source under the names that `export.input_names` and `export.output_names` give; doing it twice is once.

    Raises:
        ConfigMistake: there are more or fewer names than tensors.
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
        raise ConfigMistake(f"export: {min(shared)!r} names an input and an output; a graph needs two names")
    return replace(source, inputs=inputs, outputs=outputs)


def _check_count(key: str, given: tuple[str, ...], found: list[str]) -> None:
    if len(given) != len(found):
        raise ConfigMistake(
            f"export.{key}: {len(given)} names, but the model has {len(found)} tensors there: {', '.join(found)}"
        )
