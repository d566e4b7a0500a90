"""`export.dynamic_shapes`: names for axes, beside the shapes that `model.inputs` or an example give."""

from __future__ import annotations

from pipeline.config import ExportConfig, InputConfig, ModelConfig
from pipeline.errors import ConfigError

__all__ = ["named_axes", "with_dynamic_shapes"]


def with_dynamic_shapes(model: ModelConfig, settings: ExportConfig) -> ModelConfig:
    """The `model:` section with the axes of `export.dynamic_shapes` written into its inputs.

    Raises:
        ConfigError: there is no export, since the source is an ONNX file.
    """
    if not settings.dynamic_shapes:
        return model
    if model.onnx is not None:
        raise ConfigError("export.dynamic_shapes: an ONNX file keeps the dims that it has; leave this key out")
    inputs = dict(model.inputs)
    for name, axes in settings.dynamic_shapes.items():
        declared = inputs.get(name, InputConfig())
        inputs[name] = declared.model_copy(update={"dynamic": {**declared.dynamic, **axes}})
    return model.model_copy(update={"inputs": inputs})


def named_axes(name: str, shape: tuple[int | str, ...], declared: InputConfig) -> tuple[int | str, ...]:
    """`shape` with the names of `declared.dynamic` in their places.

    Raises:
        ConfigError: the shape has no such axis.
    """
    dims = list(shape)
    for axis, dim in declared.dynamic.items():
        if not -len(dims) <= axis < len(dims):
            raise ConfigError(f"input {name!r}: axis {axis} was asked to be {dim!r}, but its shape is {list(shape)}")
        dims[axis] = dim
    return tuple(dims)
