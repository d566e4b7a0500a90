"""The section `model:` of a configuration: one source and its inputs, the task whose parts it is exported in, or parts
of one's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)

from pipeline.config.diffusion import DiffusersConfig
from pipeline.config.sections import DTYPES, Count, Section, Seed

SOURCES = ("factory", "transformers", "diffusers", "onnx", "parts")
DEFAULT_SIZES = (2, 3)


PART_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_-]{0,49}"
"""Without a dot: the name is a key of `--set model.parts.NAME.seed=1`, and never that of another file of the run."""


def _check_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"expected one of {', '.join(DTYPES)}")
    return name


class InputConfig(Section):
    """One input of the model.

    shape: integers, and names for the dims that stay dynamic. It may be left out where the factory's example
        or the ONNX file already tells it. Floats are drawn uniformly from [lo, hi] (default [-1, 1]),
        integers from lo up to, and without, hi (default [0, 2]).
    dynamic: names for axes that stay dynamic, where the shape comes from elsewhere; `export.dynamic_shapes` adds to it.
    padding: of a mask of zeros and ones: the first of each row is always one, since a row that is masked as a whole
        has no defined attention.
    """

    shape: tuple[Annotated[StrictInt, Field(ge=0)] | Annotated[StrictStr, Field(min_length=1)], ...] | None = None
    dtype: Annotated[StrictStr, AfterValidator(_check_dtype)] | None = None
    range: tuple[StrictFloat, StrictFloat] | None = None
    seed: Seed | None = None
    dynamic: dict[int, Annotated[StrictStr, Field(min_length=1)]] = Field(default_factory=dict)
    padding: StrictBool = False

    @field_validator("range")
    @classmethod
    def _check_range(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
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
    def _check_origin(self) -> TransformersConfig:
        if self.folder is None:
            if self.class_name is None:
                raise ValueError(
                    "the key 'class' is missing: expected the name of a model class, such as ViTModel, "
                    "or 'folder', one that save_pretrained wrote"
                )
            return self
        if self.checkpoint is not None:
            raise ValueError("found 'checkpoint' next to 'folder', expected one of them: the folder has the weights")
        if isinstance(self.config, str):
            raise ValueError("found a path as 'config' next to 'folder', expected a mapping of keys that differ")
        return self


def _expand_folder(value: object) -> object:
    if isinstance(value, str) and value:
        return {"folder": value}
    if value is None or isinstance(value, Mapping | Section):
        return value
    raise ValueError("expected a folder that save_pretrained wrote, or a mapping with 'folder' or 'class'")


Task = Literal[
    "text-generation",
    "text2text-generation",
    "automatic-speech-recognition",
    "image-text-to-text",
    "feature-extraction",
]

PARTS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("text-generation", "dynamic"): ("decoder",),
    ("text-generation", "static"): ("prefill", "decode"),
    ("text2text-generation", "dynamic"): ("encoder", "decoder"),
    ("automatic-speech-recognition", "dynamic"): ("encoder", "decoder"),
    ("image-text-to-text", "dynamic"): ("vision", "embedding", "decoder"),
    ("feature-extraction", "dynamic"): ("model",),
}
"""Task and kind of cache → the parts, in the order in which an application runs them."""

LONGEST_CHUNK: Final = 128
"""Tokens that prefill takes at once, unless `cache.chunk` says otherwise or the cache is short."""


class CacheConfig(Section):
    """How the parts keep what they have seen.

    kind: `dynamic` is a cache that grows with each token; `static` one of fixed length, which is updated in place.
    length: tokens that a static cache holds.
    chunk: tokens that `prefill` takes at once; by default 128, or half of a shorter cache.
    dtype: of the keys and values in a static cache; by default as the model computes them.
    scales: of a cache in int8: one for each head (the default), one for each channel of a head, one for a tensor, or
        one for each token of a head, which is found as the token is written.
    data: of a cache in int8: files with prompts, whose keys and values say the scales.
    """

    kind: Literal["dynamic", "static"] = "dynamic"
    length: Annotated[StrictInt, Field(ge=2)] | None = None
    chunk: Count | None = None
    dtype: Literal["float32", "float16", "int8"] | None = None
    scales: Literal["head", "channel", "token", "tensor"] | None = None
    data: tuple[StrictStr, ...] = ()

    @model_validator(mode="after")
    def _check_kind(self) -> CacheConfig:
        given = [key for key in ("length", "chunk", "dtype", "scales", "data") if getattr(self, key)]
        if self.dtype != "int8" and (alone := next((key for key in ("scales", "data") if key in given), None)):
            raise ValueError(f"found {alone!r} without dtype: int8, expected it with a cache of integers")
        if self.scales == "token" and self.data:
            raise ValueError("found 'data' with scales: token, expected none: each token has the scale of its values")
        if self.kind == "dynamic":
            if given:
                raise ValueError(f"found {given[0]!r} with kind: dynamic, expected it with kind: static")
        elif self.length is None:
            raise ValueError(
                "found no 'length' with kind: static, expected the tokens that the cache holds: length: 2048"
            )
        elif self.tokens > self.length:
            raise ValueError(
                f"found chunk {self.chunk} with length {self.length}, expected a chunk that fits into the cache"
            )
        return self

    @property
    def tokens(self) -> int:
        """The tokens that `prefill` takes at once into a static cache."""
        assert self.length is not None
        return self.chunk or min(LONGEST_CHUNK, max(1, self.length // 2))


class ModelConfig(Section):
    """Exactly one source, the seed that it is made with, and its inputs; or a source for each of several parts.

    dims: the sizes that each named dim is tried at; the model is exported with the first.
    trainable: globs over initializer names that are parameters, besides those that trace to an nn.Parameter.
    checkpoint: safetensors for the module of a factory; `transformers` has a key of its own.
    random_biases: of a model with random weights: draw the biases and scales that its class makes zero or one, by which
        passes would remove nodes that a trained model needs.
    diffusers: a pipeline; each of its models is a part.
    task: what a model of `transformers` is for. It is exported in parts, with a cache; the task says their inputs.
    cache: of a task; a dynamic one by default.
    part: only this part, as a run by itself.
    logits: of a task: those of all tokens, or of the last one.
    parts: of one's own: the name of each part → its section, which is that of a model by itself.
    chain: of one's own parts: a function that calls them one after the other, by which they are proven together.
    """

    factory: StrictStr | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    checkpoint: StrictStr | None = None
    transformers: Annotated[
        TransformersConfig | None,
        BeforeValidator(_expand_folder, json_schema_input_type=StrictStr | TransformersConfig | None),
    ] = None
    diffusers: Annotated[
        DiffusersConfig | None,
        BeforeValidator(_expand_folder, json_schema_input_type=StrictStr | DiffusersConfig | None),
    ] = None
    onnx: StrictStr | None = None
    seed: Seed = 0
    inputs: dict[str, InputConfig] = Field(default_factory=dict)
    dims: dict[str, tuple[Count, ...]] = Field(default_factory=dict)
    trainable: tuple[StrictStr, ...] = ()
    random_biases: StrictBool = False
    task: Task | None = None
    cache: CacheConfig | None = None
    part: StrictStr | None = None
    logits: Literal["all", "last"] = "all"
    parts: dict[StrictStr, ModelConfig] | None = None
    chain: StrictStr | None = None

    @field_validator("parts")
    @classmethod
    def _check_parts(cls, parts: dict[str, ModelConfig] | None) -> dict[str, ModelConfig] | None:
        if parts is None:
            return None
        if not parts:
            raise ValueError("found no part, expected a name and a source of each: parts: {encoder: {onnx: FILE}}")
        for name, part in parts.items():
            if not re.fullmatch(PART_NAME, name):
                raise ValueError(
                    f"found the part {name!r}, expected a name that begins with a letter or a digit and has letters, "
                    "digits, '_' and '-', at most 50: it names files"
                )
            if part.parts is not None:
                raise ValueError(f"found 'parts' in the part {name!r}, expected a source; write all parts in one list")
            if part.part_names:
                listing = " or ".join(f"part: {inner}" for inner in part.part_names)
                raise ValueError(
                    f"found the parts {', '.join(part.part_names)} as the part {name!r}, expected one model: add "
                    f"{listing} to {name}"
                )
        return parts

    @field_validator("dims")
    @classmethod
    def _check_first_sizes(cls, dims: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        for name, sizes in dims.items():
            # torch bakes a dim of 1 into the graph, silently.
            if not sizes or sizes[0] < 2:
                raise ValueError(f"expected the first size of {name!r} to be 2 or more: the model is exported with it")
        return dims

    @model_validator(mode="after")
    def _check_source(self) -> ModelConfig:
        found = [name for name in SOURCES if getattr(self, name) is not None]
        if len(found) != 1:
            raise ValueError(f"found {' and '.join(found) or 'none'}, expected exactly one of {', '.join(SOURCES)}")
        if self.parts is not None:
            self._refuse_next_to_parts(self.parts)
            return self
        if self.chain is not None:
            raise ValueError(f"found 'chain' next to {found[0]!r}, expected it with 'parts', which it calls")
        if self.args and self.factory is None:
            raise ValueError(f"found 'args' next to {found[0]!r}, expected it with 'factory' only")
        section = self.transformers
        with_weights = self.checkpoint or self.onnx or (section and (section.checkpoint or section.folder))
        with_weights = with_weights or (self.diffusers and self.diffusers.folder)
        if self.random_biases and with_weights:
            raise ValueError("found random_biases: true, but the model comes with its weights; leave this key out")
        if self.checkpoint and self.factory is None:
            raise ValueError(
                f"found 'checkpoint' next to {found[0]!r}, expected it with 'factory', or inside of 'transformers'"
            )
        return self

    def _refuse_next_to_parts(self, parts: Mapping[str, ModelConfig]) -> None:
        """Refuse keys of a model by itself next to own parts, and a part that is not there."""
        if self.task is not None:
            raise ValueError(
                "found 'task' next to 'parts': a task says its parts itself; leave out 'task', or give the source "
                "of the task in place of 'parts'"
            )
        fields = type(self).model_fields
        default = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
        key = next(
            (key for key in fields if key not in ("parts", "part", "chain") and getattr(self, key) != default[key]),
            None,
        )
        if key is not None:
            raise ValueError(f"found {key!r} next to 'parts', expected it in a part: parts.{next(iter(parts))}.{key}")
        if self.part is not None and self.part not in parts:
            raise ValueError(f"found the part {self.part!r}, expected one of {', '.join(parts)}")

    @model_validator(mode="after")
    def _check_task(self) -> ModelConfig:
        if self.parts is not None:
            return self
        source = next(name for name in SOURCES if getattr(self, name) is not None)
        if self.task is None and self.diffusers is None:
            alone = next((key for key in ("cache", "part") if getattr(self, key) is not None), None)
            if self.logits != "all":
                alone = "logits"
            if alone is not None:
                raise ValueError(f"found {alone!r} without 'task', expected both: task: text-generation")
            return self
        if self.diffusers is not None:
            given = next((key for key in ("task", "cache") if getattr(self, key) is not None), None)
            if given is not None or self.random_biases or self.logits != "all":
                raise ValueError(f"found {given or 'a key of another source'!r} next to 'diffusers', expected none")
        elif self.transformers is None:
            raise ValueError(f"found 'task' next to {source!r}, expected it with 'transformers'")
        extra = next((key for key in ("inputs", "dims") if getattr(self, key)), None)
        if extra is not None:
            key = "diffusers" if self.diffusers else "task"
            raise ValueError(f"found {extra!r} next to {key!r}, which says the inputs of each part; leave it out")
        known = self.known_parts
        if not known:
            raise ValueError(f"found cache.kind static with task {self.task}, expected dynamic: only it is there")
        if self.part is not None and self.part not in known:
            raise ValueError(f"found the part {self.part!r}, expected one of {', '.join(known)}")
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _take_part(cls, data: Any, validate: ModelWrapValidatorHandler[ModelConfig]) -> ModelConfig:
        """The section of `part`, where it is a part of one's own. Runs after all that is above."""
        model = validate(data)
        return model.parts[model.part] if model.parts is not None and model.part is not None else model

    @property
    def known_parts(self) -> tuple[str, ...]:
        """All parts, also where `part` names one of them."""
        if self.parts is not None:
            return tuple(self.parts)
        if self.diffusers is not None:
            return self.diffusers.parts
        kind = (self.cache or CacheConfig()).kind
        return PARTS.get((self.task, kind), ()) if self.task is not None else ()

    @property
    def part_names(self) -> tuple[str, ...]:
        """The parts of which each is a run of its own; none for a model by itself, or for one part."""
        return self.known_parts if self.part is None else ()

    def sizes(self, dim: str) -> tuple[int, ...]:
        """The sizes to try for one named dim; the first is the one to export with."""
        return self.dims.get(dim, DEFAULT_SIZES)
