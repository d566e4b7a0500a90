"""The formats that layers change to in a suggestion, which their targets run, and the opset that these need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import onnx

from passes.graph.op_facts import opset_of
from pipeline.config import FormatsConfig, SuggestConfig
from pipeline.config.quantsim import FLOAT, Precision
from pipeline.errors import UsageError
from pipeline.quantsim.profiles import TargetTable
from pipeline.quantsim.qdq import first_opset


def new_formats(settings: SuggestConfig, targets: Iterable[TargetTable | None] = ()) -> FormatsConfig:
    """What layers change to: as the settings say, or as it suits the goal; float where a target does not run that.

    Args:
        targets: of all models; None is one that runs everything.

    Raises:
        UsageError: the settings name a format that a target does not run.
    """
    default = FEWER_BITS if settings.size is not None else MORE_BITS if settings.sqnr_db else MORE_WEIGHT_BITS
    formats = settings.formats or default
    for table in filter(None, targets):
        for precision, is_weight in ((formats.weight_format(), True), (formats.activation_format(), False)):
            if isinstance(precision, Precision) and not table.runs(precision, is_weight=is_weight):
                if settings.formats is None:
                    return IN_FLOAT
                raise UsageError(
                    f"quantsim.suggest.formats: found {precision}, which {table.title} does not dequantize; give "
                    "another format, or float"
                )
    return formats


def new_precisions(settings: SuggestConfig, target: TargetTable | None) -> tuple[Precision, ...]:
    """The formats of weights and activations that `new_formats` gives, without those that stay as they are."""
    formats = new_formats(settings, [target])
    precisions = (formats.weight_format(), formats.activation_format())
    return tuple(precision for precision in precisions if isinstance(precision, Precision))


def check_new_formats(settings: SuggestConfig | None, proto: onnx.ModelProto, target: TargetTable | None) -> None:
    """Whether the model's opset has the formats that layers change to.

    Raises:
        UsageError: one needs a later opset.
    """
    if settings is None:
        return
    opset = opset_of(proto)
    for precision in new_precisions(settings, target):
        if opset < (needed := first_opset(precision))[0]:
            raise UsageError(
                f"quantsim.suggest: layers are to change to {precision}, for which QuantizeLinear needs opset "
                f"{needed[0]}, and the model has {opset}; put {{convert-opset: {{to: {needed[0]}}}}} into "
                "quantsim.prepare, or give other quantsim.suggest.formats"
            )


MORE_BITS: Final = FormatsConfig(weights="int16/channel", activations="uint16")
FEWER_BITS: Final = FormatsConfig(weights="int4/block32")
MORE_WEIGHT_BITS: Final = FormatsConfig(weights="int8/channel")
IN_FLOAT: Final = FormatsConfig(weights=FLOAT, activations=FLOAT)
