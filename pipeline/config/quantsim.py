"""The section `quantsim:`: how the final model is quantized for a simulation.

A format says how one tensor is quantized: `int8/channel`, `uint16`, `int4/block32`, `int6/asymmetric`, `fp8e4m3`, or
`float`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_serializer,
    model_validator,
)

from passes.encodings.encoding import BLOCK_FLOATS, FLOAT_NAMES, FloatType, Granularity, Precision
from pipeline.config.paths import is_reference
from pipeline.config.sections import Count, Natural, Section, Step, as_list

FLOAT: Final = "float"

EVERYTHING: Final = "op:*"
"""The selector of a rule for all values."""

LEAST_BITS: Final = 2
MOST_BITS: Final = 16

FLOATS: Final[Mapping[str, FloatType]] = {name: kind for kind, name in FLOAT_NAMES.items()}

FLOAT_BITS: Final = {"fp4e2m1": 4}
"""Of floats with other than 8 bits."""

NARROW_FLOAT: Final = r"(mx|nv|b)?(fp|float|f)_?\d|e\dm\d"
"""How the names of floats of a few bits begin: fp8, float8e4m3fn, float4e2m1, nvfp4, mxfp4, e4m3 …"""


def parse_precision(text: str) -> Precision | None:
    """Read a format as a configuration writes it; None for `float`.

    Signed formats are symmetric and unsigned ones asymmetric, unless the text says otherwise.

    Raises:
        ValueError: the message says what was found and what was expected.
    """
    if text == FLOAT:
        return None
    if text in BLOCK_FLOATS:
        return BLOCK_FLOATS[text]
    if (size := re.fullmatch(r"lpbq([1-9]\d+)", text)) is not None:
        return Precision(4, signed=True, symmetric=True, granularity="block", block=int(size[1]), scale_type="UINT8")
    kind, *rest = text.split("/")
    float_type = FLOATS.get(kind)
    if float_type is None and re.match(NARROW_FLOAT, kind):
        raise ValueError(
            f"found the format {text!r}: of floats with few bits {', '.join((*FLOATS, *BLOCK_FLOATS))} are simulated; "
            "expected one of them, integers, int2 to int16 or uint2 to uint16, or float, which leaves a tensor as it is"
        )
    number = re.fullmatch(r"(u?)int(\d+)", kind)
    if float_type is None and (number is None or not LEAST_BITS <= int(number[2]) <= MOST_BITS):
        raise ValueError(
            f"found the format {text!r}, expected int2 to int16, uint2 to uint16, {', '.join(FLOATS)}, or float, and "
            "after it /channel or /block32 (a scale for each), /symmetric or /asymmetric; or a name that says all: "
            f"lpbq32 (or another size), {', '.join(BLOCK_FLOATS)}"
        )
    signed = number is None or not number[1]
    granularity: Granularity = "tensor"
    block, symmetric = 0, signed
    for part in rest:
        size = re.fullmatch(r"block(\d+)", part)
        if size is not None and int(size[1]) > 1:
            granularity, block = "block", int(size[1])
        elif part in ("tensor", "channel"):
            granularity = part
        elif part in ("symmetric", "asymmetric"):
            symmetric = part == "symmetric"
            if float_type and not symmetric:
                raise ValueError(f"found the format {text!r}: floats have no zero point, so they are symmetric")
        else:
            raise ValueError(
                f"found {part!r} in the format {text!r}, expected tensor, channel, block32 (or another size), "
                "symmetric or asymmetric"
            )
    bits = FLOAT_BITS.get(kind, 8) if number is None else int(number[2])
    return Precision(bits, signed, symmetric, granularity, block, float_type)


ProfileName = Literal["ort-cpu", "qnn-htp", "qnn-htp-w4a16", "tensorrt", "weight-only"]

Bits = Annotated[StrictInt, Field(ge=LEAST_BITS, le=MOST_BITS)]

DEFAULT_PERCENTILE: Final = 99.999
"""That of onnxruntime's calibrator."""

MethodName = Literal["minmax", "percentile", "entropy", "mse"]


def _check_format(text: str) -> str:
    parse_precision(text)
    return text


Format = Annotated[StrictStr, AfterValidator(_check_format)]

DataPaths = Annotated[
    tuple[Annotated[StrictStr, Field(min_length=1)], ...],
    BeforeValidator(as_list, json_schema_input_type=str | list[str]),
]


class FormatsConfig(Section):
    """The formats that one rule gives: such as int8/channel, int4/block32, uint16, or float. One that is left out stays
    as an earlier rule has it."""

    weights: Format | None = None
    activations: Format | None = None

    @model_validator(mode="after")
    def _check_formats(self) -> FormatsConfig:
        if self.weights is None and self.activations is None:
            raise ValueError("expected weights, activations, or both")
        found = parse_precision(self.activations) if self.activations else None
        if found is not None and (found.scale_type or found.float_type == "FLOAT4E2M1"):
            raise ValueError(
                f"found activations in {found}, expected it for weights alone: no kernel of onnxruntime rounds to it"
            )
        return self

    def weight_format(self) -> Precision | str | None:
        return _format_of(self.weights)

    def activation_format(self) -> Precision | str | None:
        return _format_of(self.activations)


class AimetProfile(Section):
    """The rules of a quantsim configuration of AIMET, such as htp_quantsim_config_v73.json.

    aimet_config: the file; or one of an installed AIMET by AIMET's own name of it, such as `htp_v73`.
    weight_bits, activation_bits: such a file does not say them.
    target: the target whose list of operators the model is held against, if any.
    """

    aimet_config: Annotated[StrictStr, Field(min_length=1)]
    weight_bits: Bits = 8
    activation_bits: Bits = 16
    target: ProfileName | None = None


class CalibrationConfig(Section):
    """The samples that ranges of activations are measured on.

    data: files (.npz, one sample each), folders and globs of such files, and loaders (`file.py:function`). Without it
        samples are drawn at random, which says nothing of the values that the model meets in use.
    args: what the loaders are called with, by name.
    samples: how many are taken at most.
    method: how a range follows from the values: their least and their greatest; onnxruntime's percentile or entropy
        calibrator, which leave rare values out; or the range that leaves the format the least squared error (mse).
    percentile: of the sizes of all values, the part that the range holds; with the method of that name.
    """

    data: DataPaths = ()
    args: dict[str, Any] = Field(default_factory=dict)
    samples: Count = 32
    method: MethodName = "minmax"
    percentile: Annotated[StrictFloat, Field(gt=0, le=100)] = DEFAULT_PERCENTILE
    seed: Natural = 0

    @model_validator(mode="after")
    def _check_percentile(self) -> CalibrationConfig:
        if "percentile" in self.model_fields_set and self.method != "percentile":
            raise ValueError(f"found percentile with the method {self.method}, expected it with percentile alone")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_percentile(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the percentile that another method does not take, so that what is written loads again."""
        found: dict[str, Any] = dump(self)
        return found if self.method == "percentile" else {key: found[key] for key in found if key != "percentile"}

    @model_validator(mode="after")
    def _check_args(self) -> CalibrationConfig:
        if self.args and not any(map(is_reference, self.data)):
            raise ValueError("found args without a loader in data; expected them for file.py:function")
        return self


class MetricConfig(Section):
    """The metric of the task: a function of the user's, or one that is there.

    use: `file.py:evaluate`, called with a model (inputs → outputs by name) and samples; or top-1, token-agreement,
        retrieval-agreement, perplexity, mean-iou or map.
    data: the samples, as `calibration.data`; without it those of the calibration that are judged.
    args: what the loaders in `data` are called with, by name.
    samples: how many are taken at most.
    target: arrays of each sample that are the truth, such as a label. Without it the float model is.
    output: the output that a built-in metric reads; the first one by default.
    lower_is_better: of a user's function whose value is better where it is lower.
    bound: the worst value that passes; below it the exit code is 1.
    """

    use: Annotated[StrictStr, Field(min_length=1)]
    data: DataPaths = ()
    args: dict[str, Any] = Field(default_factory=dict)
    samples: Count | None = None
    target: DataPaths = ()
    output: StrictStr | None = None
    lower_is_better: StrictBool = False
    bound: StrictFloat | None = None


def _expand_metric(value: object) -> object:
    return {"use": value} if isinstance(value, str) else value


class SuggestConfig(Section):
    """A target for mixed precision; one of `sqnr_db`, `size` and `metric_drop`.

    sqnr_db: the least ratio of signal to noise that an output may have. Layers that add most to the noise change first.
    size: bytes of the constants, as a part of those in float. Layers that add least change first.
    metric_drop: the part of the float model's metric that may be lost. The fewest bytes that keep the rest are sought.
    formats: what a layer changes to: `{weights: int16/channel, activations: uint16}` for a ratio, `{weights:
        int4/block32}` for a size, and `{weights: int8/channel}` for a metric.
    units: selectors of layers that change together, such as `module:encoder.layer.0.*`; each layer alone by default.
    """

    sqnr_db: Annotated[StrictFloat, Field(gt=0)] | None = None
    size: Annotated[StrictFloat, Field(gt=0, lt=1)] | None = None
    metric_drop: Annotated[StrictFloat, Field(ge=0, lt=1)] | None = None
    formats: FormatsConfig | None = None
    units: DataPaths = ()

    @model_validator(mode="after")
    def _check_target(self) -> SuggestConfig:
        if sum(target is not None for target in (self.sqnr_db, self.size, self.metric_drop)) != 1:
            raise ValueError("expected one target: sqnr_db or size or metric_drop")
        return self


Layout = Literal["gptq", "gptq_v2", "awq", "matmul-nbits"]


class QuantSimConfig(Section):
    """What `onnxline quantsim` does with the final model.

    profile: the rules of a target, which come before `rules`: its name, or a configuration of AIMET.
    prepare: steps after those of `passes.recipe`, such as clamp-mask or split-qkv.
    rules: selector → formats, in order; a later rule counts before an earlier one. A selector is op:GLOB, module:GLOB,
        node:GLOB, tensor:GLOB, or a structure such as qkv.
    unsupported: what happens if the target does not take an operator of the model: a note, or exit code 1.
    evaluation: how many samples the noise is measured on; the first ones of the calibration data.
    sensitivity: whether the cost of each layer alone is estimated, for which torch is loaded.
    encodings: the version of AIMET's format in which the encodings are written.
    encodings_from: a file of AIMET's encodings of the final model, whose scales are taken in place of calibrated ones.
    layouts: other layouts in which the weights of 4 bits are written, next to the quantized model: gptq, gptq_v2 and
        awq are checkpoints, and matmul-nbits is a model with onnxruntime's operator.
    shard_mib: with `verify.proof: structure`: weights are read and rounded in shards of so many MiB, each by a job of
        its own; to the nearest, or by `optimize: [gptq]` on the calibration data, for which the model runs in pieces.
    shard_jobs: how many of these jobs run at a time; as many as the cores allow by default.
    shard_ray: the address of a Ray cluster that runs the jobs in place of processes of this machine.
    metric: the metric of the task, measured on the float model and on the quantized one.
    suggest: a target for which formats of single layers are suggested.
    optimize: algorithms of libraries that round weights otherwise than to the nearest number, in order: seq-mse, gptq,
        ada-round, scale-estimation, bias-correction, distill. They see the calibration data without the samples that
        the result is judged on.
    """

    profile: ProfileName | AimetProfile = "ort-cpu"
    prepare: tuple[Step, ...] = ()
    optimize: tuple[Step, ...] = ()
    rules: dict[StrictStr, FormatsConfig] = Field(default_factory=dict)
    calibration: CalibrationConfig = Field(default_factory=CalibrationConfig)
    unsupported: Literal["note", "refuse"] = "note"
    evaluation: Count = 8
    sensitivity: StrictBool = True
    encodings: Literal["0.6.1", "1.0.0", "2.0.0", "2.1.0"] = "1.0.0"
    encodings_from: Annotated[StrictStr, Field(min_length=1)] | None = None
    layouts: tuple[Layout, ...] = ()
    shard_mib: Count | None = None
    shard_jobs: Count | None = None
    shard_ray: Annotated[StrictStr, Field(min_length=1)] | None = None
    metric: (
        Annotated[MetricConfig, BeforeValidator(_expand_metric, json_schema_input_type=str | MetricConfig)] | None
    ) = None
    suggest: SuggestConfig | None = None

    @model_validator(mode="after")
    def _check_consistency(self) -> QuantSimConfig:
        if self.suggest is not None and self.encodings_from is not None:
            raise ValueError("found suggest next to encodings_from, expected one of them: a suggestion needs ranges")
        if self.suggest is not None and not self.sensitivity:
            raise ValueError("found suggest next to sensitivity: false, expected true: a suggestion begins with it")
        if self.suggest is not None and self.suggest.metric_drop is not None and self.metric is None:
            raise ValueError("found suggest.metric_drop without metric, expected the metric that may drop")
        readers = {"suggest": self.suggest, "encodings_from": self.encodings_from}
        if self.shard_mib and (other := next((key for key, value in readers.items() if value), None)):
            raise ValueError(f"found {other} next to shard_mib, which rounds weights and runs no quantized model")
        if self.shard_mib and self.layouts:
            raise ValueError("found layouts next to shard_mib, which writes no other layouts; leave one of them out")
        steps = [step if isinstance(step, str) else next(iter(step)) for step in self.optimize]
        if self.shard_mib and steps not in ([], ["gptq"]):
            raise ValueError("found other steps than gptq in optimize next to shard_mib, expected [gptq] or none")
        options = [step.get("gptq") or {} for step in self.optimize if not isinstance(step, str)]
        if not self.shard_mib and any(found.get("sequential") for found in options):
            raise ValueError("found sequential of gptq without shard_mib, expected shard_mib, which cuts the model")
        if not self.shard_mib and (self.shard_jobs or self.shard_ray):
            raise ValueError("found shard_jobs or shard_ray without shard_mib, expected shard_mib to cut the weights")
        if self.shard_jobs and self.shard_ray:
            raise ValueError(
                "found shard_jobs next to shard_ray, expected one of them: the nodes of Ray say what they take"
            )
        if self.optimize and self.encodings_from is not None:
            raise ValueError("found optimize next to encodings_from, expected one of them: both choose the scales")
        return self


def _format_of(text: str | None) -> Precision | str | None:
    return None if text is None else parse_precision(text) or FLOAT
