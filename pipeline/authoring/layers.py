"""Layers and losses: those of `torch.nn`, with arguments that are checked when they are made.

Each class inherits from the class of torch and from `Module`, so parameters, their initial values, state dicts and
results are torch's. Any other layer of `torch.nn` can stand in a model as it is
(`tests/pipeline/authoring/test_torch_layers.py` tries each).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from torch import nn

from passes.suggest import describe_argument
from pipeline.argument_checks import FLAG, NUMBER, WHOLE, Check
from pipeline.authoring.module import Module
from pipeline.authoring.tensors import FLOATS, IRTensor, check_dtype, text_of
from pipeline.errors import UsageError
from pipeline.ir import TensorSpec
from pipeline.runtime.tensors import torch_dtype


class TorchLayer(Module):
    """A layer of torch.nn. It takes the arguments of torch's class, but a dtype by its name, such as "float64"."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Arguments whose defaults differ from torch's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """
        Raises:
            UsageError: an argument is missing, unknown, or no such value.
            Unsupported: another dtype than float32 or float64.
        """
        kind = next(base for base in type(self).__mro__ if base.__module__.startswith("torch.nn"))
        title = type(self).__name__
        arguments = inspect.signature(kind)  # type: ignore[arg-type]
        arguments = arguments.replace(
            parameters=[own for name, own in arguments.parameters.items() if name not in ("device", "inplace")]
        )
        try:
            given = arguments.bind(*args, **{**_missing(self.defaults, arguments, args), **options}).arguments
        except TypeError as error:
            raise UsageError(f"{title}: {error}; expected {kind.__name__}{_text_of(arguments)}") from None
        for name, value in given.items():
            check = CHECKS.get(name)
            if check is not None and not check.accepts(value):
                found = repr(value) if isinstance(value, tuple | list) and len(value) < 5 else describe_argument(value)
                raise UsageError(f"{title}: found {name}={found}, expected {check.words}")
        own = dict(given)
        if "dtype" in own:
            own["dtype"] = torch_dtype(check_dtype(own["dtype"], FLOATS, title))
        places = arguments.parameters
        settings = [
            f"{value}" if places[name].default is places[name].empty else f"{name}={value}"
            for name, value in given.items()
            if value != places[name].default
        ]
        text = ", ".join(settings)
        try:
            super().__init__(**own)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{title}({text}): {error}") from None
        self._settings = text

    def describe(self) -> str:
        return self._settings


def _missing(defaults: Mapping[str, Any], arguments: inspect.Signature, args: tuple[Any, ...]) -> dict[str, Any]:
    given = list(arguments.parameters)[: len(args)]
    return {name: value for name, value in defaults.items() if name not in given}


def _text_of(arguments: inspect.Signature) -> str:
    plain = [own.replace(annotation=own.empty) for own in arguments.parameters.values()]
    return str(inspect.Signature(plain))


def _sizes(item: object, least: int) -> bool:
    pair = item if isinstance(item, tuple | list) else (item, item)
    return len(pair) == 2 and all(type(size) is int and size >= least for size in pair)


def _size_of_all(item: object) -> bool:
    sizes = item if isinstance(item, tuple | list) else (item,)
    return bool(sizes) and all(type(size) is int and size > 0 for size in sizes)


SIZE: Final = Check(lambda item: WHOLE.accepts(item) and item > 0, "an integer above zero")
SHARE: Final = Check(lambda item: NUMBER.accepts(item) and 0 <= item <= 1, "a number from 0 to 1")
PAIR: Final = Check(lambda item: _sizes(item, 1), "an integer of 1 or more, or a pair of them")

CHECKS: Final[Mapping[str, Check]] = {
    **dict.fromkeys(("in_features", "out_features", "in_channels", "out_channels"), SIZE),
    **dict.fromkeys(("num_embeddings", "embedding_dim", "num_features", "groups"), SIZE),
    **dict.fromkeys(("kernel_size", "dilation"), PAIR),
    "stride": Check(lambda item: item is None or _sizes(item, 1), PAIR.words),
    "padding": Check(
        lambda item: item in ("same", "valid") if isinstance(item, str) else _sizes(item, 0),
        "an integer of 0 or more, or a pair of them",
    ),
    "normalized_shape": Check(_size_of_all, "the size of one axis at least"),
    "eps": Check(lambda item: NUMBER.accepts(item) and 0 <= item < float("inf"), "a number that is not below zero"),
    "momentum": SHARE,
    "label_smoothing": SHARE,
    "p": Check(lambda item: NUMBER.accepts(item) and 0 <= item < 1, "0 ≤ p < 1"),
    **dict.fromkeys(("bias", "elementwise_affine", "affine"), FLAG),
    **dict.fromkeys(("dim", "start_dim", "end_dim"), WHOLE),
    "dtype": Check(lambda item: type(item) is str, 'a text such as "float32"'),
    "approximate": Check(lambda item: item in ("none", "tanh"), "'none' or 'tanh'"),
}
"""Name of an argument → what it has to be, in whatever layer has it."""


class Linear(TorchLayer, nn.Linear): ...


class Conv2d(TorchLayer, nn.Conv2d): ...


class Embedding(TorchLayer, nn.Embedding): ...


class LayerNorm(TorchLayer, nn.LayerNorm): ...


class BatchNorm2d(TorchLayer, nn.BatchNorm2d):
    def _check_input_dim(self, input: Any) -> None:
        if isinstance(input, IRTensor) and input.rank != 4:
            expected = f"[batch, {self.num_features}, height, width]"
            raise input.builder.refusal(f"found {text_of(input)}, expected {expected}")
        super()._check_input_dim(input)


class MaxPool2d(TorchLayer, nn.MaxPool2d): ...


class Dropout(TorchLayer, nn.Dropout): ...


class Flatten(TorchLayer, nn.Flatten): ...


class Softmax(TorchLayer, nn.Softmax):
    defaults = {"dim": -1}  # noqa: RUF012


class LogSoftmax(TorchLayer, nn.LogSoftmax):
    defaults = {"dim": -1}  # noqa: RUF012


class GELU(TorchLayer, nn.GELU): ...


class ReLU(TorchLayer, nn.ReLU): ...


class Tanh(TorchLayer, nn.Tanh): ...


class Sigmoid(TorchLayer, nn.Sigmoid): ...


class SiLU(TorchLayer, nn.SiLU): ...


class LossModule(Module):
    """A loss; a subclass has a `forward` of output and target, and says what its targets look like."""

    def target_of(self, output: TensorSpec) -> TensorSpec:
        """The shape and dtype of the targets for such an output: by default those of the output itself.

        Args:
            output: shape, dtype and device of the model's output.
        """
        return target_of(self, output)


class MSELoss(TorchLayer, nn.MSELoss, LossModule):
    """The mean of the squared differences."""


class CrossEntropyLoss(TorchLayer, nn.CrossEntropyLoss, LossModule):
    """The mean loss of logits [batch, classes, ...] for classes [batch, ...] of int64."""


def target_of(loss: object, output: TensorSpec) -> TensorSpec:
    """The shape and dtype of the targets of a loss, for such an output."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss | nn.MultiMarginLoss):
        return TensorSpec((*output.shape[:1], *output.shape[2:]), "int64")
    if isinstance(loss, nn.MultiLabelMarginLoss):
        return TensorSpec(output.shape, "int64")
    return output
