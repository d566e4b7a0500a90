"""The sections after `model:`, one class a stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from passes.proof import numbers
from passes.proof.draws import FURTHER_SIZES
from passes.recipe.defaults import DEFAULT_RECIPE
from pipeline.config.base import Count, Fraction, Natural, Seconds, Section
from pipeline.config.model import DTYPES

__all__ = [
    "Backend",
    "ExportConfig",
    "PassesConfig",
    "ReportConfig",
    "RuntimeConfig",
    "Step",
    "Tolerance",
    "VerifyConfig",
]

Backend = Literal["torch", "onnxruntime", "plan"]

DEFAULT_BACKENDS: Final[tuple[Backend, ...]] = ("onnxruntime", "plan")


def _step(value: object) -> object:
    """A pass by name, or one name with its options; `{onnxsim: }` is the name alone."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Mapping) and len(value) == 1:
        [(name, options)] = value.items()
        if isinstance(name, str) and (options is None or isinstance(options, Mapping)):
            return {name: dict(options or {})}
    raise ValueError("expected the name of a pass, or one name with a mapping of options: {onnxsim: {check_n: 1}}")


_STEP_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "object",
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": {"type": ["object", "null"]},
        },
    ]
}
Step = Annotated[Any, BeforeValidator(_step), WithJsonSchema(_STEP_SCHEMA)]


def _no_repeats(names: tuple[str, ...]) -> tuple[str, ...]:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"expected each name once; found twice: {', '.join(repeated)}")
    return names


Names = Annotated[tuple[Annotated[StrictStr, Field(min_length=1)], ...], AfterValidator(_no_repeats)]


class ExportConfig(Section):
    """torch → ONNX. Which dims are dynamic follows from the names in `model.inputs.*.shape`, and from
    `dynamic_shapes`: input → axis → name.

    weights: `copied` into files of the run, or `referenced` where they lie, in the safetensors shards of the checkpoint
        (or the data of the ONNX file); then the final model is written into their folder.
    pieces: name of a parameter → names of its pieces in the checkpoint; see `pipeline.export.checkpoint_names.pieces_of`.
    """

    opset: Annotated[StrictInt, Field(ge=7)] = 20
    dynamic_shapes: dict[StrictStr, dict[int, StrictStr]] = Field(default_factory=dict)
    input_names: Names | None = None
    output_names: Names | None = None
    weights: Literal["copied", "referenced"] = "copied"
    pieces: dict[StrictStr, tuple[StrictStr, ...]] = Field(default_factory=dict)


class PassesConfig(Section):
    """The recipe in order, what must not run, and what must survive. Names are checked by `passes`.

    recipe: where nothing is said, `RunConfig` fills in the default recipe of the model's source.
    """

    strict: StrictBool = False
    recipe: Annotated[tuple[Step, ...], Field(json_schema_extra={"default": None})] = DEFAULT_RECIPE
    skip: tuple[StrictStr, ...] = ()
    keep: tuple[StrictStr, ...] = ()
    watch: StrictBool = True
    timeout_s: Seconds = 600.0
    memory_gib: Fraction | None = None


class Tolerance(Section):
    """What one dtype may differ by: the largest |found - expected| <= atol + rtol · the largest |expected|."""

    atol: Fraction
    rtol: Fraction


def _as_list(value: object) -> object:
    if not isinstance(value, str | list | tuple):
        raise ValueError("expected a .npz file, a glob or file.py:function, or a list of them")
    return [value] if isinstance(value, str) else value


class VerifyConfig(Section):
    """How many seeded draws to compare, inputs of the user's own, and tolerances that differ from the documented ones.

    inputs: files (.npz, one draw each), globs of such files, and loaders (`file.py:function`).
    max_inputs: how many draws are taken from `inputs` at most.
    sizes: what every named dim is drawn as beside those of `model.dims`, where the reference runs so.
    proof: `numbers`, or `structure` for a model that cannot be run here: then nothing is run and no number is compared.
    """

    proof: Literal["numbers", "structure"] = "numbers"
    draws: Natural = 2
    inputs: Annotated[
        tuple[Annotated[StrictStr, Field(min_length=1)], ...],
        BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
    ] = ()
    max_inputs: Count = 8
    sizes: tuple[Count, ...] = FURTHER_SIZES
    seed: Natural = 0
    tolerances: dict[str, Tolerance] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_draws(self) -> VerifyConfig:
        if self.inputs and self.proof == "structure":
            raise ValueError(
                "found verify.inputs with verify.proof structure, which runs nothing; leave inputs out, or prove by "
                "numbers (verify.proof: numbers)"
            )
        if not self.draws and not self.inputs:
            raise ValueError("found verify.draws 0 without verify.inputs, so that nothing would be compared")
        return self

    @property
    def compared_within(self) -> dict[str, numbers.Tolerance]:
        """The tolerances by dtype that replace the documented ones."""
        return {dtype: numbers.Tolerance(one.atol, one.rtol) for dtype, one in self.tolerances.items()}

    @field_validator("tolerances")
    @classmethod
    def _dtypes(cls, tolerances: dict[str, Tolerance]) -> dict[str, Tolerance]:
        known = dict.fromkeys((*DTYPES, *numbers.TOLERANCES))
        unknown = sorted(set(tolerances) - set(known))
        if unknown:
            raise ValueError(f"found the dtype {unknown[0]!r}, expected one of {', '.join(known)}")
        return tolerances


class RuntimeConfig(Section):
    """Which backends run the final model.

    backends: where nothing is said, onnxruntime, and `plan` if it can take the model. Who names `plan` needs it.
    """

    backends: tuple[Backend, ...] | None = None

    @property
    def chosen(self) -> tuple[Backend, ...]:
        """The backends to try, in order."""
        return DEFAULT_BACKENDS if self.backends is None else self.backends

    @property
    def needs_plan(self) -> bool:
        """Whether a model that `plan` cannot take is an error: only where somebody asked for `plan` by its name."""
        return self.backends is not None and "plan" in self.backends


class ReportConfig(Section):
    """Nothing to set yet; the key is reserved."""
