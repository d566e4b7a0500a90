"""AIMET's JSON configurations of a target, such as htp_quantsim_config_v73.json: read whole, or refused in a sentence.

They say what is quantized and which formats are symmetric. The numbers of bits come from the user. conventions.py
makes rules of both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictFloat, StrictInt, StrictStr, ValidationError, model_validator

from pipeline.config.mistakes import to_config_error
from pipeline.config.sections import Section
from pipeline.config.yaml_source import Document, Marks, describe
from pipeline.errors import ConfigError


def _read_flag(value: object) -> object:
    if value in ("True", "False"):
        return value == "True"
    if isinstance(value, bool):
        return value
    raise ValueError('expected "True" or "False"')


Flag = Annotated[bool, BeforeValidator(_read_flag)]


class AimetTensor(Section):
    """Whether a parameter is quantized, and how; None leaves it as a more general entry has it."""

    is_quantized: Flag | None = None
    is_symmetric: Flag | None = None


class AimetNumber(Section):
    """The format of a kernel's operand."""

    bitwidth: Annotated[StrictInt, Field(ge=2, le=32)]
    dtype: Literal["int", "float"]


class AimetKernel(Section):
    """Formats that a kernel of the target takes together."""

    activation: AimetNumber
    param: AimetNumber | None = None


class AimetLimits(Section):
    """The range of what an operator computes. AIMET measures the upper end where there is no `max`."""

    min: StrictFloat
    max: StrictFloat | None = None


class AimetOperator(Section):
    """What `op_type` says of one operator."""

    is_input_quantized: Flag | None = None
    is_output_quantized: Flag | None = None
    is_symmetric: Flag | None = None
    per_channel_quantization: Flag | None = None
    params: dict[StrictStr, AimetTensor] = Field(default_factory=dict)
    supported_kernels: tuple[AimetKernel, ...] = ()
    encoding_constraints: AimetLimits | None = None


class AimetDefaultOperator(Section):
    """What `defaults.ops` says of every operator."""

    is_output_quantized: Flag = False
    is_symmetric: Flag = False


class AimetDefaults(Section):
    """The section `defaults`."""

    ops: AimetDefaultOperator
    params: AimetTensor
    strict_symmetric: Flag | None = None
    unsigned_symmetric: Flag | None = None
    per_channel_quantization: Flag = False
    supported_kernels: tuple[AimetKernel, ...] = ()
    hw_version: StrictStr | None = None


class AimetSupergroup(Section):
    """Operators in a row whose inner results the target does not round."""

    op_list: Annotated[tuple[StrictStr, ...], Field(min_length=2)]


class AimetModelInput(Section):
    """What `model_input` says of the inputs."""

    is_input_quantized: Flag = False


class AimetModelOutput(Section):
    """What `model_output` says of the outputs."""

    is_output_quantized: Flag | None = None


Pattern = Literal["LayerNormalization", "RMSNormalization", "MatmulAdd", "MaskedSoftmax"]


class AimetConfig(Section):
    """One configuration; its keys are AIMET's own."""

    defaults: AimetDefaults
    params: dict[StrictStr, AimetTensor]
    op_type: dict[StrictStr, AimetOperator]
    supergroups: tuple[AimetSupergroup, ...]
    supergroup_pass_list: tuple[Pattern, ...] = ()
    model_input: AimetModelInput
    model_output: AimetModelOutput

    @model_validator(mode="after")
    def _refuse_what_aimet_refuses(self) -> AimetConfig:
        if not self.defaults.ops.is_output_quantized:
            raise ValueError('found defaults.ops without is_output_quantized "True", which AIMET does not support')
        for name, operator in self.op_type.items():
            if operator.is_input_quantized is False:
                raise ValueError(f'found op_type.{name}.is_input_quantized "False", which AIMET does not support')
            limits = operator.encoding_constraints
            if limits is not None and limits.max is None and limits.min != 0:
                raise ValueError(
                    f"found op_type.{name}.encoding_constraints with min {limits.min:g} and no max, expected both, or "
                    "a min of 0: a range is measured, or given as a whole"
                )
        if self.model_output.is_output_quantized is False:
            raise ValueError('found model_output.is_output_quantized "False", which AIMET does not support')
        if self.defaults.unsigned_symmetric:
            raise ValueError(
                'found defaults.unsigned_symmetric "True", expected "False": symmetric formats are signed here'
            )
        return self

    def operator(self, name: str) -> AimetOperator:
        """What is said of an operator; nothing for one that is not listed."""
        return self.op_type.get(name, AimetOperator())

    def kernels_of(self, name: str) -> tuple[AimetKernel, ...]:
        return self.operator(name).supported_kernels or self.defaults.supported_kernels

    def is_per_channel(self, name: str) -> bool:
        """Whether the parameters of an operator have a scale for each channel."""
        own = self.operator(name).per_channel_quantization
        return self.defaults.per_channel_quantization if own is None else own


def read_aimet_config(path: Path) -> AimetConfig:
    """Read a configuration file of AIMET.

    Raises:
        ConfigError: it is no such file, or has a key or a value that is not understood; the message names each.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_refuse_repeats)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a quantsim configuration of AIMET (JSON)") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: found no quantsim configuration of AIMET: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: found {describe(data)}, expected a quantsim configuration of AIMET")
    try:
        return AimetConfig.model_validate(data)
    except ValidationError as error:
        raise to_config_error(error, AimetConfig, Document(data, Marks.none(str(path))), str(path)) from None


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice; keep one of them")
        found[key] = value
    return found
