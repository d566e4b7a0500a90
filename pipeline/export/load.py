"""`load_source`: from the `model:` section to the one kind of source that it names."""

from __future__ import annotations

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from pipeline.export.inputs import named_dims
from pipeline.export.source import Source

__all__ = ["check_dims", "load_source"]


def load_source(model: ModelConfig, *, weightless: bool = False, keep_mode: bool = False) -> Source:
    """Make the module, or read the ONNX file, that the configuration names.

    The module is made with `model.seed`, put into eval mode (unless `keep_mode`) and called once on its example;
    torch's own random state is left as it was.

    Args:
        keep_mode: leave the module in train or eval mode as it was made.
        weightless: make the module on the meta device, without its weights; a checkpoint is not read.

    Raises:
        SourceError: the model, its checkpoint or its inputs cannot be made or read.
        Unsupported: the module gives back something that an ONNX graph cannot.
    """
    source = _load(model, weightless, keep_mode)
    check_dims(model, source)
    return source


def check_dims(model: ModelConfig, source: Source) -> None:
    """Raises ConfigError when `model.dims` has a name that no input has."""
    unused = sorted(set(model.dims) - set(named_dims(source.inputs)))
    if unused:
        names = ", ".join(filter(None, named_dims(source.inputs))) or "none"
        raise ConfigError(f"model.dims: no input has a dim named {unused[0]!r}; the named dims are: {names}")


def _load(model: ModelConfig, weightless: bool, keep_mode: bool) -> Source:
    if model.onnx is not None:
        from pipeline.export.onnx_file import read_onnx_file

        return read_onnx_file(model.onnx, model)
    if model.transformers is not None:
        from pipeline.export.transformers_class import make_from_transformers

        return make_from_transformers(model.transformers, model, weightless=weightless, keep_mode=keep_mode)
    from pipeline.export.factory import make_from_factory

    return make_from_factory(model, weightless=weightless, keep_mode=keep_mode)
