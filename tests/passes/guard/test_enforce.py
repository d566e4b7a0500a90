"""What the caller gets when the guarded call, the unguarded one or both do not work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import onnx
import pytest
from onnx import TensorProto

from passes.context import PassContext
from passes.errors import StepFailed
from passes.external.onnxoptimizer import OnnxOptimizerPass
from passes.guard.call_log import GuardedCall, Returned
from passes.guard.calls.base import CallPlan, InterceptedCall, Skips
from passes.guard.enforce import Enforced, RefusedByOptimizer, enforce
from passes.guard.settings import CombinedPolicy, Settings
from passes.step import PassResult, Step
from passes.weights.detached import DetachedModel
from tests.support import worker_faults as faults
from tests.support.onnx_models import attention, detached

Work = Callable[[DetachedModel, PassContext], DetachedModel]


@dataclass(frozen=True)
class CallStep(Step):
    work: Work
    name: str = "the call"
    source: str = "a test"

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        made = self.work(model, context)
        return PassResult(made, changed=made is not model)


@dataclass(frozen=True)
class Example(InterceptedCall):
    """A call that does one thing with a guard and another one without."""

    guarded: Work
    alone: Work
    model: DetachedModel = field(default_factory=lambda: detached(attention()), kw_only=True)

    def plan(self, skips: Skips, context: PassContext) -> CallPlan:
        return CallPlan((CallStep(self.guarded),))

    def run_unguarded(self, context: PassContext) -> DetachedModel:
        return self.alone(self.model, context)

    def deliver(self, model: DetachedModel, *, proven: bool) -> onnx.ModelProto:
        return model.proto


def dies(model: DetachedModel, context: PassContext) -> DetachedModel:
    context.worker.call(faults.die)
    return model


def refuses(model: DetachedModel, context: PassContext) -> DetachedModel:
    raise StepFailed("ValueError: no")


def merges(model: DetachedModel, context: PassContext) -> DetachedModel:
    return OnnxOptimizerPass("fuse_qkv").apply(model, context).model


def drops_a_dead_end(model: DetachedModel, context: PassContext) -> DetachedModel:
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    proto.graph.node.add(op_type="Relu", input=["x"], output=["dead"])
    return OnnxOptimizerPass("eliminate_deadend").apply(model.with_proto(proto), context).model


def says_another_type(model: DetachedModel, context: PassContext) -> DetachedModel:
    proto = model.copy_proto()
    declared = next(info for info in proto.graph.value_info if info.name == "scores")
    declared.type.tensor_type.elem_type = TensorProto.DOUBLE
    return model.with_proto(proto)


def enforced(guarded: Work, alone: Work, context: PassContext, *, compare: bool = True) -> Enforced:
    policy = CombinedPolicy((Settings(keep=("qkv",), compare=compare),))
    return enforce(Example(guarded, alone), policy, context, CALL)


CALL = GuardedCall("optimize", "script.py", 1, "main", 1, "MainThread", "", Returned.NOT_JUDGED)


def test_a_crash_costs_the_call(context: PassContext) -> None:
    model, record = enforced(dies, dies, context)
    assert record.reverted is not None and record.reverted.keys() == {"the call"}
    assert "SIGABRT" in record.reverted["the call"]
    assert record.compared and record.unguarded_fault.startswith("crashed: ")
    assert model.proto.graph.node == attention().graph.node


@pytest.mark.parametrize("compare", [True, False])
def test_a_sound_result_of_the_optimizer_alone_is_better_than_none(compare: bool, context: PassContext) -> None:
    _, record = enforced(refuses, drops_a_dead_end, context, compare=compare)
    assert (record.returned, record.proof, record.kept) == (Returned.UNGUARDED, "numbers", {"qkv": 1})
    assert record.notes == ("the guarded run did not work: the call: ValueError: no",)


def test_one_that_has_lost_something_is_not(context: PassContext) -> None:
    model, record = enforced(refuses, merges, context)
    assert (record.returned, record.kept) == (Returned.AS_GIVEN, {"qkv": 1})
    assert model.proto.graph.node == attention().graph.node


def test_nor_is_one_that_runs_in_pieces_alone(context: PassContext) -> None:
    """No digest says of which type a value is declared to be; onnxruntime refuses the whole model for it."""
    _, record = enforced(refuses, says_another_type, context)
    assert record.returned is Returned.AS_GIVEN


def test_nor_is_one_that_skips_nothing_where_something_is_to_be_skipped(context: PassContext) -> None:
    policy = CombinedPolicy((Settings(skip=("fuse_pad_into_conv",)),))
    _, record = enforce(Example(refuses, drops_a_dead_end), policy, context, CALL)
    assert record.returned is Returned.AS_GIVEN


def test_what_fails_both_ways_is_the_optimizers_to_tell(context: PassContext) -> None:
    with pytest.raises(RefusedByOptimizer, match="ValueError: no"):
        enforced(refuses, refuses, context)


def test_pins_keep_what_the_same_call_would_merge(context: PassContext) -> None:
    model, record = enforced(merges, merges, context)
    assert (record.returned, record.proof, record.reverted) == (Returned.GUARDED, "numbers", {})
    assert record.compared and len(record.would_have_lost) == 1
    assert sum(node.op_type == "MatMul" for node in model.proto.graph.node) == 6
