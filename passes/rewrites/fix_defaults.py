"""Initializers that are inputs, too, become constants, which callers cannot override and passes can fold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from passes.context import PassContext
from passes.model.defaults import drop_default_inputs
from passes.step import Description, PassResult, Step, structure
from passes.suggest import plural
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class FixDefaults(Step):
    """Take every input away that has a default. Exporters of Keras, mxnet and older torch declare all weights so."""

    name: str = field(default="fix-defaults", init=False)
    source: str = field(default="onnxline", init=False)
    description: ClassVar[Description] = structure("Make constants of initializers that are inputs of the model, too")
    fixes_defaults: ClassVar[bool] = True

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        proto = model.copy_proto()
        fixed = drop_default_inputs(proto.graph)
        if not fixed:
            return PassResult(model, changed=False)
        return PassResult(model.with_proto(proto), why=f"{plural(len(fixed), 'input')} made constant")
