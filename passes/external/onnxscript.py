"""onnxscript as steps: its optimizer (folding, rules, inlining, common subexpressions), and its rewrite rules alone.

The worker gives onnxscript an `onnx_ir.Model` with its weights mapped from their files. Nothing is copied: a tool reads
the weights that it needs, and untouched weights come back as stand-ins. Large new weights (a transposed weight is a
view until it is written) go to a file one by one. Weights that must stay unread become inputs of the graph during the
call, so no tool can read them.
"""

from __future__ import annotations

import importlib
import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import onnx

from passes.context import PassContext
from passes.errors import PolicyError, StepFailed
from passes.external.installed import ask, read_table, refuse_unknown, refuse_wrong_values, texts
from passes.external.onnxscript_rules import matching_by_operator, rebind
from passes.graph.index import GraphIndex, delete_named
from passes.graph.op_facts import MOVES
from passes.step import CompositeStep, PassResult
from passes.weights.detached import DetachedModel, detach
from passes.weights.mapped import release
from passes.weights.sharing import MappedModel, portable
from passes.weights.stand_ins import to_contiguous

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

STAGES: Final[Mapping[str, tuple[str, str]]] = {
    "inline": ("onnx_ir.passes.common", "InlinePass"),
    "constant_folding": ("onnxscript.optimizer._constant_folding", "FoldConstantsPass"),
    "rewrite_rules": ("onnxscript.rewriter", "RewritePass"),
    "common_subexpression_elimination": ("onnx_ir.passes.common", "CommonSubexpressionEliminationPass"),
}
"""Inner pass → module and class. One that is left out is replaced by a pass that does nothing; the rules one by one are
the step `onnxscript_rewrites`."""

TABLE: Final = read_table("onnxscript")

SHAPES: Final = "shape_inference"
"""An inner pass too; the option `onnx_shape_inference` leaves it out."""


@dataclass(frozen=True, slots=True)
class OnnxScriptOptimizer(CompositeStep, name="onnxscript", reads="values", source="onnxscript"):
    """Fold constants, inline functions and drop dead code by onnxscript's optimizer. The call is
    `onnxscript.optimizer.optimize`; options are its keyword arguments."""

    options: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    suspects: ClassVar[tuple[str, ...]] = ("constant_folding", SHAPES)
    destroys: ClassVar[Mapping[str, tuple[str, ...]]] = TABLE.destroys
    destroys_equals: ClassVar[tuple[str, ...]] = TABLE.destroys_equals
    limits: ClassVar[tuple[str, ...] | None] = ("output_size_limit",)
    hands_on_options: ClassVar[bool] = True

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        return PassResult(through_ir(model, context, optimize, self.build_arguments()))

    @staticmethod
    def import_library() -> None:
        importlib.import_module("onnxscript.optimizer")

    def call_library(self, model: onnx.ModelProto) -> onnx.ModelProto:
        return _call_on_ir(optimize, model, self.build_arguments())

    def build_arguments(self) -> dict[str, Any]:
        """What `optimize` takes besides the model."""
        return {**self.options, "left_out": list(self.left_out)}

    def inner(self, context: PassContext) -> tuple[str, ...]:
        off = {"inline": not self.options.get("inline", True)}
        off[SHAPES] = not self.options.get("onnx_shape_inference", True)
        return tuple(name for name in (*STAGES, SHAPES) if name not in self.left_out and not off.get(name))

    def check(self, context: PassContext) -> None:
        """Refuse options that this release's optimize does not take.

        Raises:
            PolicyError: naming the nearest; or a value of another type.
        """
        if not self.options:
            return
        known = ask(context, option_names, self.name)
        refuse_unknown(self.options, known, "onnxscript.optimizer.optimize has no option")
        refuse_wrong_values(context, hints, self.name, self.options)
        for name, value in self.options.items():
            if type(value) is int and value < 0:
                raise PolicyError(f"{self.name}: {name} is {value}; expected 0 or more")


def _call_on_ir(
    function: Callable[[ir.Model, Mapping[str, Any]], None], model: onnx.ModelProto, options: Mapping[str, Any]
) -> onnx.ModelProto:
    """Call onnxscript on a model in its own form."""
    import onnx_ir

    edited = onnx_ir.from_proto(model)
    function(edited, options)
    return onnx_ir.to_proto(edited)


def option_names() -> list[str]:
    """In the worker: what the installed release's optimize takes besides the model."""
    import onnxscript.optimizer

    return list(inspect.signature(onnxscript.optimizer.optimize).parameters)[1:]


def hints() -> dict[str, Any]:
    """In the worker: option → the type that optimize declares. Only options of simple types: the other types are names
    that only a type checker imports."""
    import onnxscript.optimizer

    declared = inspect.signature(onnxscript.optimizer.optimize).parameters
    return {name: SIMPLE[text] for name, parameter in declared.items() if (text := str(parameter.annotation)) in SIMPLE}


SIMPLE: Final[Mapping[str, type]] = {"int": int, "bool": bool, "str": str, "float": float}


def optimize(model: ir.Model, options: Mapping[str, Any]) -> None:
    """In the worker: optimize `model` in place, without the stages in `left_out`."""
    import onnx_ir
    import onnxscript.optimizer

    class DoNothingPass(onnx_ir.passes.InPlacePass):
        """Takes the place of a pass that is left out."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

        def call(self, model: onnx_ir.Model) -> onnx_ir.passes.PassResult:
            return onnx_ir.passes.PassResult(model, False)

    arguments = {name: value for name, value in options.items() if name != "left_out"}
    left_out = options["left_out"]
    if SHAPES in left_out:
        arguments["onnx_shape_inference"] = False
    stages = [STAGES[name] for name in left_out if name in STAGES]
    with (
        rebind((importlib.import_module(module), kind, DoNothingPass) for module, kind in stages),
        matching_by_operator(),
        folding_by_onnxruntime(),
    ):
        onnxscript.optimizer.optimize(model, **arguments)


@contextmanager
def folding_by_onnxruntime() -> Iterator[None]:
    """Inside the block, onnxscript folds floats by onnxruntime: to the bits that the model has when it runs.

    onnxscript asks ONNX's evaluator in numpy, which sums in another order. A vocoder with weight norms (VITS) amplifies
    the last bits of its weights to 16 times the tolerance. What onnxruntime lacks stays with numpy.
    """
    module = importlib.import_module(STAGES["constant_folding"][0])
    evaluator = module.ReferenceEvaluator
    evaluate_in_numpy = evaluator.evaluate

    def evaluate(self: Any, domain: str, op: str, version: int, *inputs: Any, **attributes: Any) -> Any:
        if op not in MOVES and any(array is not None and array.dtype.kind not in "biuOUS" for array in inputs):
            with suppress(StepFailed, TypeError, ValueError):
                return _run_node(domain, op, version, inputs, attributes)
        return evaluate_in_numpy(self, domain, op, version, *inputs, **attributes)

    with rebind([(evaluator, "evaluate", evaluate)]):
        yield


def _run_node(
    domain: str, op: str, version: int, inputs: Sequence[np.ndarray | None], attributes: Mapping[str, Any]
) -> np.ndarray:
    """What a node with one output computes from `inputs` on onnxruntime.

    Raises:
        StepFailed: onnxruntime has no kernel, or stops.
        TypeError, ValueError: a node cannot be made with `attributes`.
    """
    from passes.weights.sessions import Session  # takes onnxruntime along, which a model without such a node spares

    arrays = {f"in{index}": array for index, array in enumerate(inputs) if array is not None}
    names = [f"in{index}" if array is not None else "" for index, array in enumerate(inputs)]
    node = onnx.helper.make_node(op, names, ["out"], domain=domain, **attributes)
    kinds = {name: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in arrays.items()}
    fed = [onnx.helper.make_tensor_value_info(name, kind, arrays[name].shape) for name, kind in kinds.items()]
    graph = onnx.helper.make_graph([node], "folded", fed, [onnx.ValueInfoProto(name="out")])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(domain, version)])
    return Session(proto, {}).run(arrays)["out"]


@dataclass(frozen=True, slots=True)
class OnnxScriptRewrites(CompositeStep, name="onnxscript_rewrites", reads="values", source="onnxscript"):
    """Run onnxscript's rewrite rules, or its fusions.

    Args:
        rules: what to apply, in order: `default`, `ort_fusions`, `onnx_fusions`, or single rules by the names under
            which `onnxscript.rewriter.rules.common` has them.
    """

    rules: Sequence[str] = ("default",)
    left_out: tuple[str, ...] = ()
    limits: ClassVar[tuple[str, ...] | None] = ()
    destroys: ClassVar[Mapping[str, tuple[str, ...]]] = read_table("onnxscript_rewrites").destroys

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        return PassResult(through_ir(model, context, rewrite, self.build_arguments()))

    def call_library(self, model: onnx.ModelProto) -> onnx.ModelProto:
        return _call_on_ir(rewrite, model, self.build_arguments())

    def build_arguments(self) -> dict[str, Any]:
        """What `rewrite` takes besides the model."""
        return {"rules": list(self.rules), "left_out": list(self.left_out)}

    def inner(self, context: PassContext) -> tuple[str, ...]:
        known = self._known_rules(context)
        names = [name for entry in self.rules for name in known[entry]]
        return tuple(name for name in dict.fromkeys(names) if name not in self.left_out)

    def check(self, context: PassContext) -> None:
        """Refuse sets and rules that the installed release does not have.

        Raises:
            PolicyError: naming the nearest.
        """
        if self.rules != type(self)().rules:
            self._known_rules(context)

    def _known_rules(self, context: PassContext) -> dict[str, list[str]]:
        texts({"rules": self.rules}, "rules", self.name)
        known = ask(context, facts, self.name)
        refuse_unknown(self.rules, known, f"{self.name} has no rule or set")
        return known


@cache
def facts() -> dict[str, list[str]]:
    """In the worker: what `rules` may name → the rules that it stands for, in order."""
    from passes.external import onnxscript_rules

    sets = {name: [rule for rule, _ in rules] for name, rules in onnxscript_rules.rule_sets().items()}
    fusions = {name: list(parts) for name, parts in onnxscript_rules.fusion_sets().items()}
    return {**sets, **fusions}


def rewrite(model: ir.Model, options: Mapping[str, Any]) -> None:
    """In the worker: rewrite `model` in place."""
    from onnxscript import rewriter

    from passes.external import onnxscript_rules

    left_out = frozenset(options["left_out"])
    sets = onnxscript_rules.rule_sets()
    for entry in options["rules"]:
        if entry in sets:
            with onnxscript_rules.matching_by_operator():
                rewriter.rewrite(model, [rule for name, rule in sets[entry] if name not in left_out])
        else:
            with onnxscript_rules.fusions_without(entry, left_out) as fuse:
                fuse(model)


LARGE: Final = 2**18
"""Bytes from which a new tensor goes to a file."""


def through_ir(
    model: DetachedModel,
    context: PassContext,
    function: Callable[[Any, Mapping[str, Any]], None],
    options: Mapping[str, Any],
) -> DetachedModel:
    """Call `function(ir_model, options)` in the worker, which edits the model in place, and take over the result.

    Raises:
        StepFailed: the function raised, crashed or timed out.
    """
    hidden = {name: tensor for name, tensor in model.index.initializers.items() if model.is_unread(tensor)}
    shown = model.copy_proto()
    delete_named(shown.graph.initializer, hidden)
    added = hidden.keys() - GraphIndex(shown.graph).inputs.keys()
    shown.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims)
        for name, tensor in hidden.items()
        if name in added
    )
    folder = tempfile.mkdtemp(dir=context.folder, prefix="edited-")
    result = context.worker.call(
        edit_model,
        model=portable(model.with_proto(shown), context.spill),
        function=function,
        options=dict(options),
        folder=folder,
    )
    proto = onnx.load_from_string(result)
    delete_named(proto.graph.input, added)
    read = GraphIndex(proto.graph).reads
    proto.graph.initializer.extend(tensor for name, tensor in hidden.items() if name in read)
    detached = detach(proto, Path(folder), model.weights)
    return DetachedModel(proto, {**model.weights, **detached.weights})


def _copy_of(tensor: Any) -> Any:
    """A tensor of onnx_ir whose elements lie in their order."""
    import onnx_ir

    return onnx_ir.Tensor(to_contiguous(tensor.numpy()), tensor.dtype, name=tensor.name)


def edit_model(
    model: MappedModel, function: Callable[[Any, Mapping[str, Any]], None], options: dict[str, Any], folder: str
) -> bytes:
    """In the worker: let `function` edit the model; returns it serialized, with stand-ins for the weights that it had,
    and large new weights in a file in `folder`."""
    import onnx_ir

    edited = onnx_ir.from_proto(model.model())
    weights, mapped = model.map_weights(), {}
    stand_ins: dict[int, Any] = {}
    for name, weight in weights.items():
        value = edited.graph.initializers[name]
        mapped[name] = onnx_ir.Tensor(weight.array(), onnx_ir.DataType(weight.data_type), name=name)
        stand_ins[id(mapped[name])] = value.const_value
        value.const_value = mapped[name]
    function(edited, options)
    values = [(value, value.const_value) for value in edited.graph.initializers.values()]
    new_tensors = [(value, tensor) for value, tensor in values if tensor is not None and id(tensor) not in stand_ins]
    large = [(value, tensor) for value, tensor in new_tensors if tensor.nbytes >= LARGE]
    if large:
        # onnx_ir writes a transposed array element by element, which takes ten times as long as a copy of it.
        tensors = [
            onnx_ir.LazyTensor(
                partial(_copy_of, tensor), tensor.dtype, onnx_ir.Shape(tensor.shape.numpy()), name=tensor.name
            )
            for _, tensor in large
        ]
        moved = onnx_ir.external_data.convert_tensors_to_external(tensors, folder, "large.data")
        for (value, _), tensor in zip(large, moved, strict=True):
            value.const_value = tensor
    for value, tensor in values:
        if id(tensor) in stand_ins:
            value.const_value = stand_ins[id(tensor)]
    for weight in weights.values():
        release(weight.data)
    return onnx_ir.to_proto(edited).SerializeToString()
