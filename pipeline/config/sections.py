"""The sections of a configuration, one class for each stage; `model:` is in model.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from passes.proof import numbers
from passes.proof.draws import FURTHER_SIZES
from passes.recipe import DEFAULT_RECIPE
from passes.worker.platforms import LEAST_GIB
from pipeline.errors import UsageError

Natural = Annotated[StrictInt, Field(ge=0)]
Seed = Annotated[StrictInt, Field(ge=0, lt=2**63)]
Count = Annotated[StrictInt, Field(ge=1)]
Seconds = Annotated[StrictFloat, Field(gt=0)]
Fraction = Annotated[StrictFloat, Field(ge=0)]


def _check_memory(gib: float) -> float:
    if 0 < gib < LEAST_GIB:
        raise ValueError(f"expected at least {LEAST_GIB}, which a worker process needs to start, or 0 for no limit")
    return gib


class Section(BaseModel):
    """A mapping of the YAML file: unknown keys are refused, and nothing changes after loading."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False, protected_namespaces=()
    )


DTYPES = (
    "float64", "float32", "float16", "bfloat16",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip


MOST_DRAWS: Final = 1000
"""The most draws, inputs of the user's own and sizes that a proof takes."""

Backend = Literal["torch", "onnxruntime", "plan"]

Fusion = Literal[
    "select", "compounds", "attention", "small-attention", "epilogues", "rows", "linear", "residual", "conv",
    "channels-last",
]  # fmt: skip
"""A pass of `pipeline.lowering.fusion`."""

DEVICE: Final = re.compile(r"cpu|cuda(:[0-9]+)?")


def _check_device(value: str) -> str:
    if not DEVICE.fullmatch(value):
        raise ValueError(f"found the device {value!r}, expected cpu, cuda, or cuda: and a number, such as cuda:1")
    return value


DeviceName = Annotated[StrictStr, AfterValidator(_check_device)]

DEFAULT_BACKENDS: Final[tuple[Backend, ...]] = ("onnxruntime", "plan")


def _expand_step(value: object) -> object:
    """A pass by name, or one name with its options; `{onnxsim: }` is the name alone."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Mapping) and len(value) == 1:
        [(name, options)] = value.items()
        if isinstance(name, str) and (options is None or isinstance(options, Mapping)):
            return {name: dict(options or {})}
        raise ValueError(
            f"found {options!r} as options of {name!r}, expected a mapping, as in {{onnxsim: {{check_n: 1}}}}"
        )
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
Step = Annotated[Any, BeforeValidator(_expand_step), WithJsonSchema(_STEP_SCHEMA)]


def _refuse_repeats(names: tuple[str, ...]) -> tuple[str, ...]:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"expected each name once; found twice: {', '.join(repeated)}")
    return names


Names = Annotated[tuple[Annotated[StrictStr, Field(min_length=1)], ...], AfterValidator(_refuse_repeats)]


class ExportConfig(Section):
    """torch → ONNX. Which dims are dynamic follows from the names in `model.inputs.*.shape`, and from
    `dynamic_shapes`: input → axis → name.

    weights: `copied` into files of the run, or `referenced` where they lie, in the safetensors shards of the checkpoint
        (or the data of the ONNX file); then the final model is written into their folder.
    pieces: name of a parameter → names of its pieces in the checkpoint; `pieces_of` in
        export/external_weights.py says what they may be.
    functions: `layers` makes one ONNX function of equal layers, which is called with the weights of each; passes then
        run once for each function.
    written_buffers: of a buffer or an input that forward writes to: `lift` makes the buffer an input, and the new value
        an output; `refuse` stops the run.
    """

    opset: Annotated[StrictInt, Field(ge=7)] = 20
    dynamic_shapes: dict[StrictStr, dict[int, StrictStr]] = Field(default_factory=dict)
    input_names: Names | None = None
    output_names: Names | None = None
    weights: Literal["copied", "referenced"] = "copied"
    pieces: dict[StrictStr, tuple[StrictStr, ...]] = Field(default_factory=dict)
    written_buffers: Literal["lift", "refuse"] = "lift"
    functions: Literal["layers"] | None = None


class PassesConfig(Section):
    """The recipe in order, what must not run, and what must survive. Names are checked by `passes`.

    recipe: where nothing is said, `RunConfig` fills in the default recipe of the model's source.
    encodings: a file of AIMET's encodings of the exported model, which are carried to the final one.
    contrib: whether steps may bring in operators that ONNX does not have; by default `keep`, and `refuse` before a
        simulation of quantization.
    strip_metadata: write the final model without the metadata that `onnxline why` reads; it can be a fifth of a file.
    """

    strict: StrictBool = False
    recipe: Annotated[tuple[Step, ...], Field(json_schema_extra={"default": None})] = DEFAULT_RECIPE
    skip: tuple[StrictStr, ...] = ()
    keep: tuple[StrictStr, ...] = ()
    watch: StrictBool = True
    timeout_s: Seconds = 600.0
    memory_gib: Annotated[Fraction, AfterValidator(_check_memory)] | None = None
    encodings: StrictStr | None = None
    contrib: Literal["keep", "refuse"] | None = None
    strip_metadata: StrictBool = False


class ToleranceConfig(Section):
    """What one dtype may differ by: the largest |found - expected| <= atol + rtol · the largest |expected|."""

    atol: Fraction
    rtol: Fraction


def as_list(value: object) -> object:
    if not isinstance(value, str | list | tuple):
        raise ValueError("expected a .npz file, a glob or file.py:function, or a list of them")
    return [value] if isinstance(value, str) else value


def _as_files(value: object) -> object:
    if not isinstance(value, str | list | tuple):
        raise ValueError("expected a file that declares operators, ops.py or ops.py:NAME, or a list of such files")
    return [value] if isinstance(value, str) else value


Files = Annotated[
    tuple[Annotated[StrictStr, Field(min_length=1)], ...],
    BeforeValidator(_as_files, json_schema_input_type=str | list[str]),
]


class VerifyConfig(Section):
    """How many seeded draws to compare, inputs of the user's own, and tolerances that differ from the documented ones.

    inputs: files (.npz, one draw each), folders and globs of such files, and loaders (`file.py:function`).
    max_inputs: how many draws are taken from `inputs` at most.
    sizes: what every named dim is drawn as besides those of `model.dims`, where the reference runs so.
    proof: `numbers`, or `structure` for a model that cannot be run here: then nothing is run and no number is compared.
    """

    proof: Literal["numbers", "structure"] = "numbers"
    draws: Natural = 2
    inputs: Annotated[
        tuple[Annotated[StrictStr, Field(min_length=1)], ...],
        BeforeValidator(as_list, json_schema_input_type=str | list[str]),
    ] = ()
    max_inputs: Count = 8
    sizes: tuple[Count, ...] = FURTHER_SIZES
    seed: Natural = 0
    tolerances: dict[str, ToleranceConfig] = Field(default_factory=dict)

    @field_validator("draws", "max_inputs")
    @classmethod
    def _check_count(cls, value: int) -> int:
        if value > MOST_DRAWS:
            raise ValueError(
                f"found {value:,}, expected {MOST_DRAWS:,} at most: every proof of a pass runs on each of them"
            )
        return value

    @field_validator("sizes")
    @classmethod
    def _check_sizes(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(value) > MOST_DRAWS:
            raise ValueError(f"found {len(value):,} sizes, expected {MOST_DRAWS:,} at most: each takes a draw")
        return value

    @model_validator(mode="after")
    def _check_draws(self) -> VerifyConfig:
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
        return {
            dtype: numbers.Tolerance(tolerance.atol, tolerance.rtol) for dtype, tolerance in self.tolerances.items()
        }

    @field_validator("tolerances")
    @classmethod
    def _check_dtypes(cls, tolerances: dict[str, ToleranceConfig]) -> dict[str, ToleranceConfig]:
        known = dict.fromkeys((*DTYPES, *numbers.TOLERANCES))
        unknown = sorted(set(tolerances) - set(known))
        if unknown:
            raise ValueError(f"found the dtype {unknown[0]!r}, expected one of {', '.join(known)}")
        return tolerances


class RuntimeConfig(Section):
    """Which backends run the final model.

    backends: where nothing is said, onnxruntime, and `plan` if it can take the model. Who names `plan` needs it.
        `torch` runs the final model op by op with torch's operators.
    regions: memories of a machine from the fastest to the slowest, such as `sram:2MiB,dram`; the plan then has a memory
        map, which says what is in which of them during which calls.
    pins: {name of a value: name of the region that holds it as long as it lives}.
    fusions: passes on the IR before `plan` runs it, or `all` that pay on the device.
    native: kernels in C++, which the compiler of this machine builds once, compute what they can of `plan`.
    device: where `plan` runs: cpu, cuda or cuda:1.
    debug: `plan` waits for the device after each launch, so that an error names the launch that caused it.
    """

    backends: tuple[Backend, ...] | None = None
    regions: StrictStr | None = None
    pins: dict[str, StrictStr] = Field(default_factory=dict)
    fusions: tuple[Fusion, ...] | Literal["all"] = ()
    native: StrictBool = False
    device: DeviceName = "cpu"
    debug: StrictBool = False

    @field_validator("regions")
    @classmethod
    def _check_regions(cls, value: str | None) -> str | None:
        if value is not None:
            from pipeline.planning import parse_regions  # only a configuration that names regions needs it

            try:
                parse_regions(value)
            except UsageError as error:
                raise ValueError(str(error).removeprefix("regions: ")) from error
        return value

    @model_validator(mode="after")
    def _check_pins(self) -> RuntimeConfig:
        if self.pins and self.regions is None:
            raise ValueError("found 'pins' without 'regions', expected both: a pin names a region")
        return self

    @model_validator(mode="after")
    def _check_options_of_plan(self) -> RuntimeConfig:
        given = [name for name in ("native", "fusions", "debug") if getattr(self, name)]
        given += ["device"] if self.device != "cpu" else []
        if given and "plan" not in self.chosen:
            raise ValueError(
                f"found {given[0]!r}, which is for the backend plan, with backends {', '.join(self.chosen)}; "
                f"add plan to 'backends', or leave {given[0]!r} out"
            )
        if self.native and self.device != "cpu":
            raise ValueError(f"found 'native' with the device {self.device}, expected one of them: C++ is for the CPU")
        return self

    @property
    def program_options(self) -> dict[str, Any]:
        """The options of `compile_graph` for `plan`."""
        return {"native": self.native, "device": self.device, "debug": self.debug}

    @property
    def chosen(self) -> tuple[Backend, ...]:
        """The backends to try, in order."""
        return DEFAULT_BACKENDS if self.backends is None else self.backends

    @property
    def chosen_fusions(self) -> tuple[Fusion, ...]:
        if self.fusions != "all":
            return self.fusions
        from pipeline.lowering.fusion import CPU_FUSIONS, CUDA_FUSIONS  # only a configuration that names them needs it

        names = CPU_FUSIONS if self.device == "cpu" else CUDA_FUSIONS
        return tuple(name for name in get_args(Fusion) if name in names)

    def is_default(self, backend: str) -> bool:
        """Whether nobody named `backend`, and the run is right without it."""
        return backend != "onnxruntime" and self.backends is None

    def requires(self, backend: str) -> bool:
        """Whether a model that `backend` cannot take is an error: of `plan` only where somebody named it.

        `torch` never fails a run by what it lacks: configurations that name it are older than this backend.
        """
        return backend == "onnxruntime" or (backend == "plan" and self.backends is not None)
