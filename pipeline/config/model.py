"""The `model:` section: where the module or the ONNX file comes from, and what goes into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)

from pipeline.config.base import Count, Section, Seed

__all__ = ["DEFAULT_SIZES", "DTYPES", "InputConfig", "ModelConfig", "TransformersConfig"]

DTYPES = (
    "float64", "float32", "float16", "bfloat16",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
SOURCES = ("factory", "transformers", "onnx")
DEFAULT_SIZES = (2, 3)


def _known_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"expected one of {', '.join(DTYPES)}")
    return name


class InputConfig(Section):
    """One input of the model.

    shape: whole numbers, and names for the dims that stay dynamic. It may be left out where the factory's example
        or the ONNX file already tells it. Floats are drawn uniformly from [lo, hi] (default [-1, 1]), whole
        numbers from lo up to, and without, hi (default [0, 2]).
    dynamic: names for axes that stay dynamic, where the shape comes from elsewhere; `export.dynamic_shapes` adds to it.
    padding: of a mask of zeros and ones: the first of each row is always one, since a row that is masked as a whole
        has no defined attention.
    """

    shape: tuple[Annotated[StrictInt, Field(ge=0)] | Annotated[StrictStr, Field(min_length=1)], ...] | None = None
    dtype: Annotated[StrictStr, AfterValidator(_known_dtype)] | None = None
    range: tuple[StrictFloat, StrictFloat] | None = None
    seed: Seed | None = None
    dynamic: dict[int, Annotated[StrictStr, Field(min_length=1)]] = Field(default_factory=dict)
    padding: StrictBool = False

    @field_validator("range")
    @classmethod
    def _ordered(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] <= value[1]:
            raise ValueError("expected [lo, hi] with lo not above hi")
        return value


class TransformersConfig(Section):
    """A model class of `transformers`, its configuration (a mapping, or the path of a config.json), its weights.

    folder: of `save_pretrained`, with config.json and weights. Then the class is that of its `architectures` unless one
        is named, `config` holds keys that replace those of config.json, and weights come from there.
    """

    folder: StrictStr | None = None
    class_name: StrictStr | None = Field(default=None, alias="class")
    config: dict[str, Any] | StrictStr = Field(default_factory=dict)
    config_class: StrictStr | None = None
    checkpoint: StrictStr | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> TransformersConfig:
        if self.folder is None:
            if self.class_name is None:
                raise ValueError(
                    "the key 'class' is missing: expected the name of a model class, such as ViTModel, "
                    "or 'folder', one that save_pretrained wrote"
                )
            return self
        if self.checkpoint is not None:
            raise ValueError("found 'checkpoint' beside 'folder', expected one of them: the folder has the weights")
        if isinstance(self.config, str):
            raise ValueError("found a path as 'config' beside 'folder', expected a mapping of keys that differ")
        return self


def _folder_alone(value: object) -> object:
    if isinstance(value, str) and value:
        return {"folder": value}
    if value is None or isinstance(value, Mapping | TransformersConfig):
        return value
    raise ValueError("expected a folder that save_pretrained wrote, or a mapping with 'folder' or 'class'")


class ModelConfig(Section):
    """Exactly one source, the seed that it is made with, and its inputs.

    dims: the sizes that each named dim is tried at; the first is the one that the model is exported with.
    trainable: globs over initializer names that are parameters, beside those that trace to an nn.Parameter.
    checkpoint: safetensors for the module of a factory; `transformers` has a key of its own.
    """

    factory: StrictStr | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    checkpoint: StrictStr | None = None
    transformers: Annotated[
        TransformersConfig | None,
        BeforeValidator(_folder_alone, json_schema_input_type=StrictStr | TransformersConfig | None),
    ] = None
    onnx: StrictStr | None = None
    seed: Seed = 0
    inputs: dict[str, InputConfig] = Field(default_factory=dict)
    dims: dict[str, tuple[Count, ...]] = Field(default_factory=dict)
    trainable: tuple[StrictStr, ...] = ()

    @field_validator("dims")
    @classmethod
    def _exportable(cls, dims: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        for name, sizes in dims.items():
            # torch bakes a dim of 1 into the graph, silently.
            if not sizes or sizes[0] < 2:
                raise ValueError(f"expected the first size of {name!r} to be 2 or more: the model is exported with it")
        return dims

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        found = [name for name in SOURCES if getattr(self, name) is not None]
        if len(found) != 1:
            raise ValueError(f"found {' and '.join(found) or 'none'}, expected exactly one of {', '.join(SOURCES)}")
        if self.args and self.factory is None:
            raise ValueError(f"found 'args' beside {found[0]!r}, expected it with 'factory' only")
        if self.checkpoint and self.factory is None:
            raise ValueError(
                f"found 'checkpoint' beside {found[0]!r}, expected it with 'factory', or inside of 'transformers'"
            )
        return self

    def sizes(self, dim: str) -> tuple[int, ...]:
        """The sizes to try for one named dim; the first is the one to export with."""
        return self.dims.get(dim, DEFAULT_SIZES)
