"""`RunConfig`: everything that one run is told. Read once, at the edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import Field, StrictStr, ValidationError, model_validator

from pipeline.config.base import Section
from pipeline.config.explain import explain
from pipeline.config.extends import read_with_bases
from pipeline.config.marks import Document, Marks
from pipeline.config.model import ModelConfig
from pipeline.config.overrides import apply_overrides
from pipeline.config.paths import anchor_paths
from pipeline.config.sections import ExportConfig, PassesConfig, ReportConfig, RuntimeConfig, VerifyConfig
from pipeline.errors import ConfigMistake

__all__ = ["RunConfig", "json_schema"]

# The name becomes the folder runs/<name>.
NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}$"

SCHEMA_ID: Final = "urn:onnxline:run-config:1"
"""The number is raised when a configuration that was right is refused."""


class RunConfig(Section):
    """One run, as resolved: bases merged, overrides applied, relative paths made absolute."""

    name: Annotated[StrictStr, Field(pattern=NAME)] = "run"
    model: ModelConfig
    export: ExportConfig = Field(default_factory=ExportConfig)
    passes: PassesConfig = Field(default_factory=PassesConfig)
    verify: VerifyConfig = Field(default_factory=VerifyConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    report: ReportConfig = Field(default_factory=ReportConfig)

    @model_validator(mode="before")
    @classmethod
    def _nothing_runs(cls, data: Any) -> Any:
        """Under a proof by structure no backend runs, unless one is asked for, which is a mistake."""
        match data:
            case {"verify": {"proof": "structure"}}:
                runtime = data.get("runtime") or {}
                return {**data, "runtime": {"backends": [], **runtime} if isinstance(runtime, Mapping) else runtime}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.verify.proof == "structure" and self.runtime.backends:
            raise ValueError(
                f"found runtime.backends {', '.join(self.runtime.backends)} with verify.proof structure, which runs "
                "nothing; leave runtime.backends out, or prove by numbers"
            )
        if self.export.weights == "referenced" and not self.checkpoint and self.model.onnx is None:
            raise ValueError(
                "found export.weights referenced without a checkpoint to refer to, expected "
                "model.transformers.checkpoint, or model.checkpoint beside model.factory"
            )
        return self

    @property
    def checkpoint(self) -> str | None:
        """The file or folder that the weights of a torch module come from, if any."""
        return self.model.transformers.checkpoint if self.model.transformers else self.model.checkpoint

    @property
    def weightless(self) -> bool:
        """Whether the module is made without its weights: nobody reads them."""
        is_torch = self.model.onnx is None
        return is_torch and self.export.weights == "referenced" and self.verify.proof == "structure"

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Read a configuration file.

        Args:
            path: a YAML file. Relative paths inside it are relative to its folder; `name` defaults to its stem.
            overrides: `key.path=value`, the value in YAML; paths in it are relative to the working directory.

        Raises:
            ConfigMistake: naming every problem with its file and line.
        """
        document = read_with_bases(Path(path))
        document = apply_overrides(document, overrides)
        document.data.setdefault("name", Path(path).stem)
        return _validated(cls, document, str(path))

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], base_dir: str | Path = ".") -> RunConfig:
        """The same from Python: relative paths in `data` are relative to `base_dir`.

        Raises:
            ConfigMistake: naming every problem by its key.
        """
        anchored = anchor_paths(dict(data), Path(base_dir))
        return _validated(cls, Document(anchored, Marks.none("configuration")), "configuration")

    def resolved(self) -> dict[str, Any]:
        """The configuration as data that JSON can hold, in the order of the fields; unset keys are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=False, exclude_none=True)

    def to_yaml(self) -> str:
        """The configuration as YAML that loads back to an equal one."""
        return yaml.safe_dump(self.resolved(), sort_keys=False, allow_unicode=True, width=110)


def _validated(cls: type[RunConfig], document: Document, title: str) -> RunConfig:
    try:
        return cls.model_validate(document.data)
    except ValidationError as error:
        lines = explain(error, cls, document)
        if len(lines) == 1:
            raise ConfigMistake(lines[0]) from None
        listing = "\n".join(f"  {line}" for line in lines)
        raise ConfigMistake(f"{title} has {len(lines)} mistakes:\n{listing}") from None


def json_schema() -> dict[str, Any]:
    """The JSON Schema that editors complete a configuration from; `extends` is the loader's own key."""
    schema = RunConfig.model_json_schema(by_alias=True)
    extends = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}], "title": "Extends"}
    properties = {"extends": extends, **schema["properties"]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID}
    return {**head, **schema, "properties": properties}
