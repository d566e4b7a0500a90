"""Make the matrices of adapters inputs of the model, so that one file serves every adapter of their shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from onnx import TensorProto, helper

from passes.context import PassContext
from passes.step import Description, PassResult, Relation, Step, structure
from passes.structures import STRUCTURES
from passes.suggest import ELLIPSIS, join_first, plural
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class LoraInputs(Step):
    """Declare the two matrices of each adapter as inputs, under their names; what they hold is the default.

    A caller that feeds none of them has the outputs of before.
    """

    name: str = field(default="lora-inputs", init=False)
    makes_reference: ClassVar[bool] = True
    keeps_outputs: ClassVar[bool] = True
    description: ClassVar[Description] = structure("Make the matrices of adapters inputs, whose defaults they stay")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        instances = STRUCTURES["lora"].find(model).instances
        names = dict.fromkeys(weight.name for instance in instances for weight in instance.weights)
        index = model.index
        new = [index.initializers[name] for name in names if name in index.initializers and name not in index.inputs]
        if not new:
            why = "no product with matrices of low rank is added to another"
            return PassResult(model, changed=False, why="the adapters are inputs already" if names else why)
        proto = model.copy_proto()
        proto.graph.input.extend(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in new
        )
        shown = join_first(list(map(_describe, new)), SHOWN, ELLIPSIS)
        counts = f"{plural(len(new), 'input')} of {plural(len(instances), 'adapter')}"
        inputs = {name: name for name in index.required_inputs}
        outputs = {info.name: info.name for info in proto.graph.output}
        return PassResult(
            model.with_proto(proto),
            why=f"{counts}, with their values as defaults: {shown}",
            relation=Relation(inputs, outputs),
        )


SHOWN: Final = 4


def _describe(tensor: TensorProto) -> str:
    dtype = TensorProto.DataType.Name(tensor.data_type).lower()
    return f"{tensor.name} {dtype}{list(tensor.dims)}"
