"""`RunConfig`: all settings of one run, read once, at the edge."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Final, cast

import yaml
from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StrictStr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from passes.errors import check_type
from passes.suggest import describe_absence
from passes.visible import HIDDEN
from pipeline.config.mistakes import to_config_error
from pipeline.config.model import ModelConfig
from pipeline.config.paths import anchor_paths, apply_overrides, is_reference, merge, read_with_bases, take_part
from pipeline.config.quantsim import QuantSimConfig
from pipeline.config.recipe import default_recipe, write_out_earlier
from pipeline.config.sections import ExportConfig, Files, PassesConfig, RuntimeConfig, Section, VerifyConfig
from pipeline.config.train import TrainConfig
from pipeline.config.yaml_source import Document, Marks, check_plain, describe
from pipeline.errors import ConfigError, OnnxlineError

# The name becomes the folder runs/<name>.
NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}$"

SCHEMA_ID: Final = "urn:onnxline:run-config:1"
"""The number rises when a release refuses a configuration that was valid before."""


@dataclass(frozen=True, eq=False)
class _ConfigOrigin:
    """What a configuration was read from, which does not count when two are compared."""

    document: Document

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ConfigOrigin)

    __hash__ = None  # type: ignore[assignment]


class PartConfig(Section):
    """The keys in which one part of a model differs; they are merged over those of the whole run."""

    export: dict[str, Any] = Field(default_factory=dict)
    passes: dict[str, Any] = Field(default_factory=dict)
    verify: dict[str, Any] = Field(default_factory=dict)
    runtime: dict[str, Any] = Field(default_factory=dict)
    quantsim: dict[str, Any] = Field(default_factory=dict)


class RunConfig(Section):
    """One run, as resolved: bases merged, overrides applied, relative paths made absolute."""

    name: Annotated[StrictStr, Field(pattern=NAME)] = "run"
    """The name of the run, and of the run's folder."""
    model: ModelConfig
    """Where the model comes from: a torch module or an ONNX file."""
    export: ExportConfig = Field(default_factory=ExportConfig)
    """How the torch module is exported."""
    passes: PassesConfig = Field(default_factory=PassesConfig)
    """The recipe, and what the passes keep and skip."""
    verify: VerifyConfig = Field(default_factory=VerifyConfig)
    """How the results are compared with the source's: draws, tolerances, proof."""
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    """The backends that run the final model, and the settings of the plan."""
    quantsim: QuantSimConfig | None = None
    """What `onnxline quantsim` does with the final model; None where it is not simulated."""
    train: TrainConfig | None = None
    """What `onnxline train` does with the module; None where it is not trained."""
    parts: dict[str, PartConfig] = Field(default_factory=dict)
    """The parts of a model that is exported in parts, by name: each has settings of its own."""
    custom_ops: Files = ()
    """Files that declare operators of the user's own."""
    report: Section = Field(default_factory=Section)
    """Reserved: the section has no keys yet."""
    _origin: _ConfigOrigin = PrivateAttr(default_factory=lambda: _ConfigOrigin(Document({})))

    @model_validator(mode="before")
    @classmethod
    def _leave_out_backends(cls, data: Any) -> Any:
        """Under a proof by structure no backend runs; one that is named explicitly is refused later."""
        match data:
            case {"verify": {"proof": "structure"}}:
                runtime = data.get("runtime") or {}
                return {**data, "runtime": {"backends": [], **runtime} if isinstance(runtime, Mapping) else runtime}
        return data

    @model_validator(mode="before")
    @classmethod
    def _fill_in_recipe(cls, data: Any) -> Any:
        """Fill in the default recipe, which depends on where the model comes from."""
        if not isinstance(data, Mapping) or "model" not in data or _has_own_parts(data["model"]):
            return data
        match data.get("passes", {}):
            case PassesConfig() as passes if "recipe" not in passes.model_fields_set:
                return {**data, "passes": passes.model_copy(update={"recipe": default_recipe(data["model"])})}
            case PassesConfig() as passes:
                recipe = write_out_earlier(data["model"], passes.recipe)
                return {**data, "passes": passes.model_copy(update={"recipe": recipe})}
            case {"recipe": recipe}:
                passes = {**data["passes"], "recipe": write_out_earlier(data["model"], recipe)}
                return {**data, "passes": passes}
            case Mapping() as passes:
                return {**data, "passes": {"recipe": default_recipe(data["model"]), **passes}}
        return data

    @model_validator(mode="after")
    def _check_consistency(self) -> RunConfig:
        if self.verify.proof == "structure" and self.runtime.backends:
            raise ValueError(
                f"found runtime.backends {', '.join(self.runtime.backends)} with verify.proof structure, which runs "
                "nothing; leave runtime.backends out, or prove by numbers"
            )
        is_single = self.model.parts is None
        if self.export.weights == "referenced" and is_single and not self.checkpoint and self.model.onnx is None:
            raise ValueError(
                "found export.weights referenced without a checkpoint to refer to, expected "
                "model.transformers.folder or .checkpoint, or model.checkpoint next to model.factory"
            )
        if self.weightless and self.model.task not in (None, "text-generation"):
            raise ValueError(
                f"found export.weights referenced and verify.proof structure with task {self.model.task}, expected "
                "text-generation, or a proof by numbers: this task's parts are found by calls with weights"
            )
        return self

    @model_validator(mode="after")
    def _check_parts(self, info: ValidationInfo) -> RunConfig:
        known, marks = self.model.part_names, info.context["document"].marks if info.context else Marks({})
        unknown = next((name for name in self.parts if name not in known), None)
        if unknown is not None:
            listing = f"expected one of {', '.join(known)}" if known else "expected model.task or model.parts with it"
            raise ConfigError(f"{marks.place(('parts', unknown))}: parts: found the part {unknown!r}, {listing}")
        if self.model.parts is not None and self.export.weights == "referenced" and known:
            raise ValueError(
                "found export.weights referenced with model.parts, expected copied, since parts are written over files "
                f"of their own; or run a part by itself: --set model.part={known[0]}"
            )
        for name in known if self.model.parts is not None else self.parts:
            if "weights" in self.parts.get(name, PartConfig()).export:
                raise ValueError(
                    f"found export.weights in the part {name!r}, expected it under 'export', for all parts"
                )
            self._part(name, marks)
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _explain_mistakes(cls, data: Any, validate: ModelWrapValidatorHandler[RunConfig], info: ValidationInfo) -> Any:
        """Raise the sentences of a ConfigError, for a file as for the class that is called with keywords."""
        known = info.context or {"document": Document(data, Marks.none("RunConfig")), "title": "RunConfig"}
        try:
            config = validate(data)
        except ValidationError as error:
            raise to_config_error(error, cls, known["document"], known["title"]) from None
        config._origin = _ConfigOrigin(known["document"])
        return config

    @contextmanager
    def name_keys(self) -> Iterator[None]:
        """Add file, line and key to an error that is raised inside, if the first name in quotes stands in a file."""
        try:
            yield
        except OnnxlineError as error:
            said = str(error)
            quoted = re.search(r"'([^']+)'", said)
            place, key = self._origin.document.find(quoted[1]) if quoted else ("", "")
            if place:
                name = key.partition("[")[0]
                said = said.removeprefix(f"{name}: ").removeprefix(f"{name.rpartition('.')[2]}: ")
                error.args = (f"{place}: {key}: {said}",)
            raise

    def of_part(self, name: str) -> RunConfig:
        """The configuration of one part, which is a run like any other.

        Args:
            name: a key of `parts`.

        Raises:
            ConfigError: a key of `parts.NAME` is wrong.
        """
        return self._part(name, self._origin.document.marks)

    def _part(self, name: str, marks: Marks) -> RunConfig:
        whole = self.to_mapping()
        whole["model"]["part"], whole["name"] = name, f"{self.name}-{name}"[:100]
        title = f"parts.{name}"
        places = {**marks.places, (): title}  # where no file has a key, the part says where a mistake is
        return _validate(RunConfig, Document(whole, Marks(places)), title)

    def refuse_parts(self, what: str) -> None:
        """Refuse a configuration of several runs where `what` works on one.

        Raises:
            ConfigError: `model.task` or `model.parts` is set without `model.part`.
        """
        if self.model.part_names:
            parts = ", ".join(self.model.part_names)
            raise ConfigError(
                f"{what}: found the parts {parts}, expected one: --set model.part={self.model.part_names[0]}"
            )

    @property
    def checkpoint(self) -> str | None:
        """The file or folder that the weights of a torch module come from, if any."""
        section = self.model.transformers
        return (section.folder or section.checkpoint) if section else self.model.checkpoint

    @property
    def weightless(self) -> bool:
        """Whether the module is made without its weights, since the run never reads them."""
        is_torch = self.model.onnx is None and self.model.parts is None
        return is_torch and self.export.weights == "referenced" and self.verify.proof == "structure"

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Read a configuration file.

        Args:
            path: a YAML file. Relative paths inside it are relative to its folder; `name` defaults to its stem.
            overrides: `key.path=value`, the value in YAML; paths in it are relative to the working directory.

        Raises:
            ConfigError: naming every problem with its file and line.
        """
        if not isinstance(path, str | PathLike):
            raise ConfigError(f"from_yaml: found {describe(path)}, expected the path of a YAML configuration")
        _check_overrides(overrides)
        return _build_config(cls, read_with_bases(Path(path)), path, overrides, {})

    @classmethod
    def from_source(
        cls, source: str | Path, overrides: Sequence[str] = (), wishes: Mapping[str, Sequence[Any]] | None = None
    ) -> RunConfig:
        """Read a configuration file, or make a configuration for a model by itself.

        Args:
            source: a YAML file; or `model.onnx`, `file.py:make` or `package.module:make`, with all else by default.
            overrides: as for `from_yaml`.
            wishes: keys of the section `passes`, such as `keep`, that replace what the file says.

        Raises:
            ConfigError: naming every problem with its file and line.
        """
        check_type(source, (str, PathLike), "from_source", "the path of a configuration or a model")
        _check_overrides(overrides)
        document = _document_of_model(str(source)) or read_with_bases(Path(source))
        return _build_config(cls, document, source, overrides, wishes or {})

    @classmethod
    def from_mapping(
        cls, data: Mapping[str, Any], base_dir: str | Path = ".", *, title: str = "configuration"
    ) -> RunConfig:
        """Check a configuration that Python gives as a dict; relative paths in it are relative to `base_dir`.

        Args:
            data: the keys of a configuration file, nested.
            base_dir: a folder.
            title: what messages call it.

        Raises:
            ConfigError: naming every problem by its key.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"{title}: found {describe(data)}, expected a mapping of sections: {{'model': …}}")
        check_type(base_dir, (str, PathLike), f"{title}: base_dir", "the path of a folder")
        check_plain(data, title)
        anchored = anchor_paths(dict(data), Path(base_dir))
        return _validate(cls, Document(anchored, Marks.none(title)), title)

    def to_mapping(self) -> dict[str, Any]:
        """The configuration as data that JSON can hold, in the order of the fields; unset keys are left out."""
        data = self.model_dump(mode="json", by_alias=True, exclude_unset=False, exclude_none=True)
        if self.model.parts is not None and "recipe" not in self.passes.model_fields_set:
            del data["passes"]["recipe"]  # each part has that of its source
        return data

    def to_yaml(self) -> str:
        """The configuration as YAML that loads back to an equal one."""
        text = yaml.safe_dump(self.to_mapping(), sort_keys=False, allow_unicode=True, width=110)
        if HIDDEN.search(text):  # such as a mark of bidirectional text, which YAML may hold as it is
            text = yaml.safe_dump(self.to_mapping(), sort_keys=False, width=110)
        return text


def _check_overrides(overrides: object) -> None:
    check_type(overrides, (list, tuple), "overrides", "a list of texts such as ['passes.skip=[fuse_qkv]']")
    for text in cast(Sequence[object], overrides):
        check_type(text, str, "overrides", "texts such as 'passes.skip=[fuse_qkv]'")


def _build_config(
    cls: type[RunConfig],
    document: Document,
    source: str | Path,
    overrides: Sequence[str],
    wishes: Mapping[str, Sequence[Any]],
) -> RunConfig:
    document = apply_overrides(document, overrides)
    for key, value in wishes.items():
        data = anchor_paths({"passes": {key: list(value)}}, Path.cwd())
        document = merge(document, Document(data, Marks({("passes", key): f"--{key}"})))
    document.data.setdefault("name", Path(source).stem)
    return _validate(cls, document, str(source))


def _document_of_model(source: str) -> Document | None:
    """A configuration for an ONNX file or a factory; None where `source` names a configuration file."""
    place, _, function = source.rpartition(":")
    if is_reference(source):
        if place.endswith(".py") and not Path(place).is_file():
            raise ConfigError(f"{source}: no file {place!r}")
        name = f"{Path(place).stem if place.endswith('.py') else place}-{function}"
        return _document_named(name, {"factory": source}, source)
    path = Path(source)
    if path.suffix == ".onnx":
        if not path.is_file():
            raise ConfigError(f"{source}: {describe_absence(path)}; expected an ONNX file")
        return _document_named(path.stem, {"onnx": source}, source)
    if path.suffix == ".py" or not path.is_file():
        found = "a file of Python without a function" if path.is_file() else describe_absence(path)
        raise ConfigError(
            f"{source}: {found}; expected a YAML configuration, model.onnx, file.py:function or package.module:function"
        )
    return None


def _document_named(name: str, model: dict[str, str], title: str) -> Document:
    data = {"name": re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:100].lstrip(".-") or "model", "model": model}
    return Document(anchor_paths(data, Path.cwd()), Marks.none(title))


def _has_own_parts(model: object) -> bool:
    """Whether the section `model` is of several sources: there each part has the default recipe of its source."""
    parts, part = (
        (model.get("parts"), model.get("part"))
        if isinstance(model, Mapping)
        else (getattr(model, "parts", None), getattr(model, "part", None))
    )
    return parts is not None and part is None


def _validate(cls: type[RunConfig], document: Document, title: str) -> RunConfig:
    document = take_part(document, PartConfig.model_fields)
    return cls.model_validate(document.data, context={"document": document, "title": title})


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a configuration, for editors; `extends` is added here, since only the loader knows it."""
    schema = RunConfig.model_json_schema(by_alias=True)
    extends = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}], "title": "Extends"}
    properties = {"extends": extends, **schema["properties"]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID}
    return {**head, **schema, "properties": properties}
