"""Losses: modules of an output and a target, whose result is one number."""

from __future__ import annotations

from pipeline.authoring import functional
from pipeline.authoring.builder import IRTensor, typed
from pipeline.authoring.module import Module
from pipeline.errors import UsageError
from pipeline.ir import TensorSpec


class LossModule(Module):
    """A loss; a subclass has a `forward` of output and target, and says what its targets look like."""

    def target_of(self, output: TensorSpec) -> TensorSpec:
        """The shape and dtype of the targets for such an output: by default those of the output itself."""
        return output


class MSELoss(LossModule):
    """The mean of the squared differences."""

    def forward(self, output: IRTensor, target: IRTensor) -> IRTensor:
        return functional.mse_loss(output, target)


@typed
class CrossEntropyLoss(LossModule):
    """The mean loss of logits [batch, classes, ...] for classes [batch, ...] of int64."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        if not 0 <= label_smoothing <= 1:
            raise UsageError(f"CrossEntropyLoss: found label_smoothing={label_smoothing}, expected 0 to 1")
        self._smoothing = label_smoothing

    def forward(self, output: IRTensor, target: IRTensor) -> IRTensor:
        return functional.cross_entropy(output, target, self._smoothing)

    def target_of(self, output: TensorSpec) -> TensorSpec:
        return TensorSpec((*output.shape[:1], *output.shape[2:]), "int64")
