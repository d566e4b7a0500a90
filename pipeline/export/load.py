"""`load_source`: makes or reads the source that the `model:` section names; ONNX files are read here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from onnx import ModelProto, TensorProto, ValueInfoProto

from passes.errors import ModelError
from passes.graph.index import required_inputs
from passes.load import load_model
from passes.suggest import nearest
from passes.weights.detached import DetachedModel
from pipeline.config import DTYPES, InputConfig, ModelConfig, locate
from pipeline.errors import ConfigError, SourceError, Unsupported
from pipeline.export.source import InputSpec, OnnxSource, Source, input_spec, named_dims, shape_text

if TYPE_CHECKING:  # it imports torch
    from pipeline.export.transformers_class import LoadedModel


def load_source(
    model: ModelConfig, *, weightless: bool = False, keep_mode: bool = False, loaded: LoadedModel | None = None
) -> Source:
    """Make the module, or read the ONNX file, that the configuration names.

    The module is made with `model.seed`, put into eval mode (unless `keep_mode`) and called once on its example;
    torch's own random state is left as it was.

    Args:
        keep_mode: leave the module in train or eval mode as it was made.
        weightless: make the module on the meta device, without its weights; a checkpoint is not read.
        loaded: the model that the parts of `model.task` share; it is loaded where there is none.

    Raises:
        SourceError: the model, its checkpoint or its inputs cannot be made or read.
        Unsupported: the module returns something that an ONNX graph cannot return.
    """
    source = _load(model, weightless, keep_mode, loaded)
    check_dims(model, source)
    return source


def check_dims(model: ModelConfig, source: Source) -> None:
    """Raise ConfigError when `model.dims` has a name that no input has."""
    unused = sorted(set(model.dims) - set(named_dims(source.inputs)))
    if unused:
        names = ", ".join(filter(None, named_dims(source.inputs))) or "none"
        raise ConfigError(f"model.dims: no input has a dim named {unused[0]!r}; the named dims are: {names}")


def _load(model: ModelConfig, weightless: bool, keep_mode: bool, loaded: LoadedModel | None) -> Source:
    if model.onnx is not None:
        return read_onnx_file(model.onnx, model)
    if model.task is not None or model.diffusers is not None:
        from pipeline.export.parts import load_for_parts, make_part

        return make_part(model, loaded or load_for_parts(model, weightless=weightless))
    if model.transformers is not None:
        from pipeline.export.transformers_class import make_from_transformers

        return make_from_transformers(model.transformers, model, weightless=weightless, keep_mode=keep_mode)
    from pipeline.export.factory import make_from_factory

    return make_from_factory(model, weightless=weightless, keep_mode=keep_mode)


def read_onnx_file(text: str, model: ModelConfig | None = None, opened: ModelProto | None = None) -> OnnxSource:
    """Check that the file is complete, and make its input specs from its declarations and `model.inputs`, where there
    is a configuration; `opened` is the model in it, where somebody has read it.

    Raises:
        SourceError: the file is broken, its external data is missing, or a dim has neither size nor name.
        Unsupported: an input is not a tensor of a dtype that we can draw.
    """
    path = locate(text)
    try:
        proto = load_model(path) if opened is None else opened
    except ModelError as mistake:
        raise SourceError(str(mistake)) from mistake
    return describe_onnx(proto, path, model)


def describe_onnx(
    proto: ModelProto, path: Path, model: ModelConfig | None, opened: DetachedModel | None = None
) -> OnnxSource:
    """The source that a model is; `opened` is the model itself, where it has no file, or was read. Raises as
    `read_onnx_file`, which calls it `path`."""
    values = {value.name: value for value in required_inputs(proto.graph)}
    for name in model.inputs if model else ():
        if name not in values:
            hint = nearest(name, values) or f"; it has: {', '.join(values)}"
            raise SourceError(f"model.inputs: {path.name} has no input {name!r}{hint}")
    inputs = _inputs(list(values.values()), model, path)
    return OnnxSource(path, inputs, tuple(value.name for value in proto.graph.output), opened)


def _inputs(values: list[ValueInfoProto], model: ModelConfig | None, path: Path) -> tuple[InputSpec, ...]:
    inputs, mistakes = [], []
    for value in values:
        try:
            inputs.append(_input(value, model, path))
        except SourceError as mistake:
            mistakes.append(str(mistake))
    if mistakes:
        raise SourceError("\n".join(mistakes))
    return tuple(inputs)


def _input(value: ValueInfoProto, model: ModelConfig | None, path: Path) -> InputSpec:
    own, dtype = _own_shape(value), _dtype(value)
    declared = model.inputs.get(value.name, InputConfig()) if model else InputConfig()
    title = f"input {value.name!r} of {path.name}"
    if declared.dtype not in (None, dtype):
        raise SourceError(f"{title} is {dtype}, but model.inputs.{value.name} says {declared.dtype}")
    if declared.shape is not None:
        if not _fits(declared.shape, own):
            raise SourceError(
                f"{title} has the shape {shape_text(own)}, but model.inputs says {shape_text(declared.shape)}"
            )
        return input_spec(value.name, declared, declared.shape, dtype)
    if own is None:
        by_command = f"give it one: onnxline fix-shapes MODEL -o OUT --shape {value.name}=SIZES"
        advice = f"declare model.inputs.{value.name}.shape" if model else by_command
        raise SourceError(f"{title} has no shape, not even a rank; {advice}")
    return input_spec(value.name, declared, own, dtype)


def _own_shape(value: ValueInfoProto) -> tuple[int | str, ...] | None:
    """The declared shape: numbers, and names of open dims; open dims without a name share the empty name."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    # Paddle's exporter writes -1 for a dim that is open.
    return tuple(
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param for dim in tensor.shape.dim
    )


def _dtype(value: ValueInfoProto) -> str:
    number = value.type.tensor_type.elem_type
    name = TensorProto.DataType.Name(number).lower() if value.type.HasField("tensor_type") else "no tensor"
    name = {"float": "float32", "double": "float64"}.get(name, name)
    if name not in DTYPES:
        raise Unsupported(
            f"input {value.name!r} is {name}, expected a tensor of {', '.join(DTYPES)}; let the model begin after it: "
            "onnxline extract MODEL -o OUT --from VALUE (--proof structure where it is no tensor)"
        )
    return name


def _fits(declared: tuple[int | str, ...], own: tuple[int | str, ...] | None) -> bool:
    """Whether `declared` may replace `own`: a number may fix a dynamic dim, and a fixed dim takes no name."""
    if own is None:
        return True
    pairs = zip(declared, own, strict=False)
    return len(declared) == len(own) and all(a == b if isinstance(b, int) else True for a, b in pairs)
