"""The steps of `quantsim.optimize`: one class for each algorithm, whose fields are its options."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Final, Literal

from passes.recipe.recipe import check_fields
from passes.suggest import nearest
from pipeline.errors import UsageError
from pipeline.quantsim.placement import PlacedSite


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A step of `quantsim.optimize`.

    Args:
        seed: of what the library draws at random.
        python: an interpreter that has the library; by default onnxline's own.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    """The module of the library."""
    remedy: ClassVar[str]
    """What to do where the library is not installed."""
    takes_blocks: ClassVar[bool] = True
    formats: ClassVar[Literal["symmetric", "asymmetric of 4 bits", "all"]] = "symmetric"
    """The formats of integers that it knows."""
    products: ClassVar[bool] = False
    """Whether it knows products with a matrix alone."""
    is_whole: ClassVar[bool] = False
    """Whether it chooses for all weights together, so that all it has chosen is taken, or nothing."""
    seed: int = 0
    python: str | None = None

    def check(self) -> None:
        """Refuse a number that an option cannot have, and an interpreter or a library that is not there.

        Raises:
            UsageError: the message says what to install, or which option to give.
        """
        for option, least in LEAST.items():
            value = getattr(self, option, least)
            if not least <= value < math.inf:
                raise UsageError(
                    f"quantsim.optimize: {self.name}: {option} is {value}; expected a finite number of {least} or more"
                )
        if self.python is None:
            if find_spec(self.module) is None:
                raise UsageError(f"quantsim.optimize: {self.name} needs {self.module}: {self.remedy}")
        elif not isinstance(self.python, str) or shutil.which(self.python) is None:
            raise UsageError(
                f"quantsim.optimize: {self.name}: python is {self.python!r}, which is no program; expected the path "
                f"of an interpreter that has {self.module}"
            )

    def why_left(self, placed: PlacedSite, data: Sequence[str], dtypes: Collection[str] = ("float32",)) -> str:
        """Why a weight stays as it is; empty where the step takes it."""
        site, precision = placed.site, placed.precision
        assert precision is not None
        is_wrong = self.formats == "symmetric" and not precision.symmetric
        if precision.float_type or precision.scale_type or is_wrong:
            kind = "format" if self.formats == "all" else "symmetric format"
            return f"{precision} is no {kind} of integers with scales in float"
        if self.formats == "asymmetric of 4 bits" and (precision.symmetric or precision.bits != FOUR_BITS):
            return f"{precision} is no asymmetric format of 4 bits, such as uint4/channel"
        if site.dtype not in dtypes:
            return f"it is {site.dtype}"
        if site.lent_to:
            return f"{site.lent_to[0]} reads it as a table"
        if site.channel_axis is None:
            return site.disagreement or f"{site.op} has no channels of it"
        if precision.granularity == "block" and not self.takes_blocks:
            return f"{precision} has blocks"
        if self.products and not data:
            return f"{site.op} is no product of computed rows with a matrix"
        return ""


@dataclass(frozen=True, slots=True)
class Gptq(Optimizer):
    """GPTQ of onnxsim: columns are rounded one after the other, and the rest makes up for the error of each.

    Args:
        percdamp: what is added to the diagonal of the Hessian, as a part of its mean.
        act_order: whether the columns that meet the largest activations are rounded first, and not those at the left.
        proc_block_size: columns whose errors are handed on together; it decides speed, and no number.
        sequential: with `quantsim.shard_mib`: each piece of the model reads what the rounded pieces before it give, and
            not what the float model gives there.
        mse: whether each channel or block first gets the scale of least squared error of its numbers, in place of the
            scale that their range has.
    """

    name: ClassVar[str] = "gptq"
    module: ClassVar[str] = "onnxsim"
    remedy: ClassVar[str] = "pip install onnxsim"
    products: ClassVar[bool] = True
    formats = "all"
    percdamp: int | float = 0.01
    act_order: bool = False
    proc_block_size: int = 128
    sequential: bool = False
    mse: bool = False


AIMET: Final = "an extra: pip install 'onnxline[aimet]', or name an interpreter that has it: {{{}: {{python: PATH}}}}"


@dataclass(frozen=True, slots=True)
class SeqMse(Optimizer):
    """AIMET's SeqMSE: the scale of each channel or block by the error of its layer.

    Args:
        candidates: scales that are tried, from the largest down to that part of it.
    """

    name: ClassVar[str] = "seq-mse"
    module: ClassVar[str] = "aimet_onnx"
    remedy: ClassVar[str] = AIMET.format("seq-mse")
    candidates: int = 20


@dataclass(frozen=True, slots=True)
class AdaRound(Optimizer):
    """AIMET's AdaRound: each number is rounded up or down, as gradients of the layer's error say.

    Args:
        iterations: steps of gradient descent for each layer; AIMET advises 10,000, and 15,000 below 8 bits.
    """

    name: ClassVar[str] = "ada-round"
    module: ClassVar[str] = "aimet_onnx"
    remedy: ClassVar[str] = AIMET.format("ada-round")
    takes_blocks: ClassVar[bool] = False
    iterations: int = 10_000


@dataclass(frozen=True, slots=True)
class ScaleEstimation(Optimizer):
    """NNCF's scale estimation: scale and zero point of each channel or block by the error of its layer."""

    name: ClassVar[str] = "scale-estimation"
    module: ClassVar[str] = "nncf"
    remedy: ClassVar[str] = "name an interpreter that has it: {scale-estimation: {python: PATH}}"
    formats = "asymmetric of 4 bits"
    products: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class BiasCorrection(Optimizer):
    """onnxsim's empirical bias correction: what the mean of each channel has lost is added to the bias of its layer."""

    name: ClassVar[str] = "bias-correction"
    module: ClassVar[str] = "onnxsim"
    remedy: ClassVar[str] = "pip install onnxsim"


@dataclass(frozen=True, slots=True)
class Distill(Optimizer):
    """Integers and scales of all weights together, by gradients of the error of the model's outputs, with torch.

    Args:
        iterations: steps of gradient descent, each on a sample.
        rate: how far a step moves a weight, in parts of its scale; it falls to zero. Scales move a tenth of it, in
            parts of themselves.
    """

    name: ClassVar[str] = "distill"
    module: ClassVar[str] = "torch"
    remedy: ClassVar[str] = "pip install torch"
    formats = "all"
    is_whole: ClassVar[bool] = True
    iterations: int = 200
    rate: int | float = 0.01

    def check(self) -> None:
        if self.python is not None:
            raise UsageError("quantsim.optimize: distill: found python, expected none: it runs in onnxline's own")
        Optimizer.check(self)


FOUR_BITS: Final = 4

LEAST: Final = {"seed": 0, "candidates": 1, "iterations": 1, "proc_block_size": 1, "percdamp": 0, "rate": 0}
"""Option → the least number that it can have."""

OPTIMIZERS: Final[Mapping[str, type[Optimizer]]] = {
    step.name: step for step in (Gptq, SeqMse, AdaRound, ScaleEstimation, BiasCorrection, Distill)
}

PREPARING: Final = ("awq", "cross-layer-equalization", "smooth-quant", "rotate", "clamp-mask", "fold-batchnorm")
"""Steps from float to float, which belong to `quantsim.prepare`."""


def optimizers_of(items: Sequence[Any]) -> tuple[Optimizer, ...]:
    """The steps of `quantsim.optimize`, whose options and libraries are there.

    Raises:
        UsageError, PolicyError: there is no such step, no such option, or its library is missing.
    """
    steps: list[Optimizer] = []
    for item in items:
        name, options = (item, {}) if isinstance(item, str) else next(iter(item.items()))
        if name in PREPARING:
            raise UsageError(f"quantsim.optimize: {name} rounds nothing; put it into quantsim.prepare")
        if name not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise UsageError(f"quantsim.optimize: no step {name!r}{nearest(name, OPTIMIZERS) or f'; expected {known}'}")
        check_fields(name, OPTIMIZERS[name], options or {}, "quantsim.optimize:")
        steps.append(OPTIMIZERS[name](**options or {}))
        steps[-1].check()
    return tuple(steps)
