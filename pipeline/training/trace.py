"""Forward, loss and backward of a module as one graph of torch operators that write to nothing.

torch's `make_fx` records what a function calls on fake tensors; autograd runs inside of it, so the backward operators
are recorded after the forward ones. Functionalizing it makes values of all writes: a BatchNorm's running statistics
are results of the graph. The module is not run on real data, and no random value is drawn, unless the
recording fails: then plain torch shows on copies whether the module or the batch is at fault.
"""

from __future__ import annotations

import logging
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from pipeline.errors import OnnxlineError, Unsupported, UsageError
from pipeline.training.attributes import ModuleAttributes
from pipeline.training.batch import Batch, BatchLayout, LossFunction, refuse_module
from pipeline.training.frozen_numbers import (
    NO_PLACE,
    AskedForNumber,
    CallLog,
    KnownValues,
    MixedNorms,
    RandomGuard,
    RefusedCalls,
    place_outside,
)
from pipeline.training.step_function import Clipping, StepFunction
from pipeline.turn import takes_turns


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The recorded graph.

    Its placeholders are parameters that ask for a gradient, other parameters, buffers, the tensors of the batch, and
    the limit of the gradients where they are clipped.

    Parameters have their names in the module; one with several names has the first.
    """

    module: GraphModule
    params: tuple[str, ...]
    """Parameters that get a gradient."""
    placeholders: Mapping[str, Node]
    """Parameters and buffers by name."""
    buffers: frozenset[str]
    batch: tuple[Node, ...]
    layout: BatchLayout
    loss: Node
    gradients: tuple[Node, ...]
    """The gradients of `params`, in the same order."""
    updates: Mapping[str, Node]
    """{buffer or parameter without a gradient that the forward pass writes to: its value afterwards}."""
    norm: Node | None = None
    """The norm of all gradients, if they are clipped or checked."""
    limit: Node | None = None
    """The limit of gradients."""
    unreached: tuple[str, ...] = ()
    """Parameters that ask for a gradient and get none."""


@takes_turns
def trace_step(
    module: nn.Module, loss: LossFunction, batch: Batch, *, clips: Clipping = "none", checks_gradients: bool = False
) -> TracedStep:
    """Record the loss of `module` on a batch like `batch`, and its gradients.

    Args:
        checks_gradients: record the norm of all gradients too; where that is clipped it is recorded anyway.

    Raises:
        UsageError: the batch has no form that is known, the loss is no single number, or does not depend on any
            parameter by operators that can be differentiated.
        Unsupported: torch cannot record the module or differentiate one of its operators.
    """
    layout = BatchLayout.of(module, batch)
    given = layout.tensors(batch)
    refuse_module(module, {name: given[name] for name in layout.names})
    asked = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    if not asked:
        raise UsageError("the module has no parameter with requires_grad; there is nothing to train")
    rest = {name: tensor for name, tensor in module.named_parameters() if not tensor.requires_grad}
    buffers = dict(module.named_buffers())
    stored = {**asked, **rest, **buffers}
    inputs = [given[name].detach() for name in layout.names]
    step = StepFunction(module, loss, layout, tuple(stored), len(asked), clips, checks_gradients)
    with ModuleAttributes(module, loss) as attributes:
        # In the widest dtype, for a limit such as 0.1 to be what torch has.
        is_wide = any(tensor.dtype == torch.float64 for tensor in asked.values())
        limits = [torch.ones((), dtype=torch.float64 if is_wide else torch.float32)] if clips != "none" else []
        recorded, decided_by = _record(step, stored, [*inputs, *limits], attributes)
    placeholders = [node for node in recorded.graph.nodes if node.op == "placeholder"]
    value, norm, *results = _results(recorded)
    if value is None:
        raise Unsupported("torch recorded a loss that follows from no input; expected one that depends on the batch")
    gradients, after = dict(zip(asked, results, strict=False)), dict(zip(stored, results[len(asked) :], strict=True))
    by_name = dict(zip(stored, placeholders, strict=False))
    reached = {name: node for name, node in gradients.items() if node is not None}
    updates = {name: node for name, node in after.items() if node is not None and node is not by_name[name]}
    _refuse_writes(updates.keys() & reached.keys())
    _refuse_decisions(decided_by & updates.keys())
    _refuse_constants(recorded, {name: stored[name] for name in (*reached, *updates)})
    return TracedStep(
        recorded,
        tuple(reached),
        by_name,
        frozenset(buffers),
        tuple(placeholders[len(stored) : len(stored) + len(layout.names)]),
        layout,
        value,
        tuple(reached.values()),
        updates,
        norm,
        placeholders[-1] if clips != "none" else None,
        tuple(name for name in asked if name not in reached),
    )


@takes_turns
def refuse_what_torch_refuses(module: nn.Module, loss: LossFunction, batch: Batch) -> None:
    """Compute the loss once by plain torch, on copies; for a step that could not be recorded or run.

    Raises:
        UsageError: torch refuses it too.
    """
    layout = BatchLayout.of(module, batch)
    stored = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    given = layout.tensors(batch)
    step = StepFunction(module, loss, layout, tuple(stored), 0)
    _refuse_what_torch_refuses(step, stored, [given[name].detach() for name in layout.names])


def _refuse_what_torch_refuses(
    step: StepFunction, stored: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]
) -> None:
    try:
        with _warnings_into(None):
            step.compute_loss(stored, batch)
    except OnnxlineError:
        return  # of this recording, not of torch
    except Exception as error:
        raise UsageError(f"torch itself cannot compute the loss of the example batch: {_describe(error)}") from error


def _record(
    step: StepFunction, stored: Mapping[str, torch.Tensor], feeds: Sequence[torch.Tensor], attributes: ModuleAttributes
) -> tuple[GraphModule, frozenset[str]]:
    """The recorded step, and the names of the stored tensors whose values Python branched on.

    `feeds` are the tensors of the batch and, where gradients are clipped, their limit.

    What cannot be recorded as it is written is first made a graph by torch.export.
    """
    try:
        return _record_twice(step, stored, feeds, attributes)
    except Exception as error:  # torch has errors of many kinds
        if _is_final(error):
            raise
        failed = error
    attributes.put_back()
    if NO_DERIVATIVE.search(str(failed)):
        place = _place_of_forward(step, stored, feeds)
        raise Unsupported(f"torch cannot differentiate the train step: {_describe(failed)}{place}") from failed
    _refuse_what_torch_refuses(step, stored, feeds[: len(step.layout.names)])
    tried = []
    for strict in (False, True):
        try:
            exported = _export(step, feeds, strict=strict)
            return _record_twice(replace(step, exported=exported), stored, feeds, attributes)
        except Exception as error:
            if _is_final(error):
                raise
            tried.append(f"strict={strict}: {_describe(error)}")
    sentence = _describe(failed)
    otherwise = [text for text in tried if not text.endswith(sentence)]
    details = f", which was tried with {' and with '.join(otherwise)}" if otherwise else ""
    raise Unsupported(
        f"torch cannot record the train step: {sentence}; nor could it after torch.export{details}"
    ) from failed


def _record_twice(
    step: StepFunction, stored: Mapping[str, torch.Tensor], feeds: Sequence[torch.Tensor], attributes: ModuleAttributes
) -> tuple[GraphModule, frozenset[str]]:
    """Record the step, and call forward and loss again.

    Raises:
        Unsupported: the second call has other operators or arguments, or reads something that the first call left.
    """
    attributes.put_back()  # left over from an attempt that failed
    random = RandomGuard()
    try:
        log = CallLog(random)
        recorded, known = _record_as_written(step, stored, feeds, log=log, name_of=attributes.name_of)
        random.refuse_changes()
        _refuse_new_parameters(step)
        attributes.take_out(log.is_constant)
        if log.are_remains_constant:
            attributes.clear_caches()
        # A branch that a random value takes may be the same the second time.
        for _ in range(8 if attributes.called_generator else 1):
            again = CallLog(random, log, attributes.name_of, lambda: attributes.left)
            _call_again(step, stored, feeds, attributes.name_of, again)
            attributes.take_out(again.is_constant)
            if again.are_remains_constant:
                attributes.clear_caches()
        if attributes.took_out:  # a constant to which the second call writes is none
            with attributes.second_call(known.numbers_of):
                _call_again(step, stored, feeds, attributes.name_of)
    finally:
        random.put_back()
    return recorded, frozenset(known.decided_by)


def _refuse_new_parameters(step: StepFunction) -> None:
    for name in sorted({name for name, _ in step.module.named_parameters()} - set(step.names)):
        raise Unsupported(
            f"the forward pass makes the parameter {name!r} at its first call, which the optimizer does not have: make "
            "it in __init__, or call the module once before the optimizer is made"
        )


def _place_of_forward(step: StepFunction, stored: Mapping[str, torch.Tensor], feeds: Sequence[torch.Tensor]) -> str:
    """The line of the call whose backward fails, in brackets: autograd's anomaly mode says it in a warning."""
    notes: list[str] = []
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        try:
            _record_as_written(step, stored, feeds, notes=notes)
        except Exception:
            frames = traceback.StackSummary.from_list(
                [(path, int(line), "", None) for path, line in FRAME.findall("\n".join(notes))]
            )
            place = place_outside(frames)
            return "" if place == NO_PLACE else f" ({place})"
    return ""


def _is_final(error: Exception) -> bool:
    """Whether the error says what is wrong with the step, so that another way of recording would not help."""
    return isinstance(error, OnnxlineError) and not isinstance(error, AskedForNumber)


def _record_as_written(
    step: StepFunction,
    stored: Mapping[str, torch.Tensor],
    feeds: Sequence[torch.Tensor],
    *,
    notes: list[str] | None = None,
    log: CallLog | None = None,
    name_of: Callable[[object], str] = lambda _: "",
) -> tuple[GraphModule, KnownValues]:
    """The recorded step, and the known values of its tensors; `name_of` names attributes."""
    known = KnownValues(name_of)
    with _recording(notes):
        function = _functional_step(step, stored, known, name_of, log)
        recorder = make_fx(function, tracing_mode="fake", record_stack_traces=True, _allow_non_fake_inputs=True)
        recorded = recorder(*stored.values(), *feeds)
    recorded.graph.eliminate_dead_code()
    recorded.recompile()
    return recorded, known


def _call_again(
    step: StepFunction,
    stored: Mapping[str, torch.Tensor],
    feeds: Sequence[torch.Tensor],
    name_of: Callable[[object], str],
    log: CallLog | None = None,
) -> None:
    """Call forward and loss as in a recording, for `log` and for what is refused; without a graph it is fast."""
    function = _functional_step(replace(step, until_loss=True), stored, KnownValues(name_of), name_of, log)
    with _recording(None), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        function(*(fake.from_tensor(tensor, static_shapes=True) for tensor in (*stored.values(), *feeds)))


def _functional_step(
    step: StepFunction,
    stored: Mapping[str, torch.Tensor],
    known: KnownValues,
    name_of: Callable[[object], str],
    log: CallLog | None,
) -> Callable[..., list[torch.Tensor | None]]:
    """The step without writes; `known` and `log` see each operator as the step calls it."""
    untrained = [(name, tensor.detach()) for name, tensor in stored.items()][step.trained :]

    def call(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
        for traced, (name, tensor) in zip(tensors[step.trained :], untrained, strict=False):
            known.add(traced, name, tensor)
        with known, log or nullcontext(), RefusedCalls(name_of), MixedNorms():
            return step(*tensors)

    return dispatch_functionalize(call, FunctionalTensorMode())


@contextmanager
def _recording(notes: list[str] | None) -> Iterator[None]:
    """Without mkldnn, whose LSTM is one operator that a plan cannot hold."""
    with _warnings_into(notes), enable_python_dispatcher(), torch.backends.mkldnn.flags(enabled=False):
        yield


@contextmanager
def _warnings_into(notes: list[str] | None) -> Iterator[None]:
    """Add what torch warns of to `notes`, or drop it; what it logs of an operator that fails is in the error too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            log.disabled = was_disabled
            if notes is not None:
                notes += [str(warning.message) for warning in found]


def _export(step: StepFunction, feeds: Sequence[torch.Tensor], *, strict: bool) -> nn.Module:
    """The module as a graph of torch.export, with the same parameters and buffers."""
    args, kwargs = step.layout.arguments(dict(zip(step.layout.names, feeds, strict=False)))
    from pipeline.export.call_watch import capture_output  # the room needs pydantic, and most recordings no export

    with capture_output():
        return torch.export.export(step.module, args, kwargs, strict=strict).module(check_guards=False)


def _refuse_writes(params: Collection[str]) -> None:
    for name in sorted(params):
        raise Unsupported(
            f"the forward pass or the loss writes to the parameter {name!r}, which has a gradient, so that a "
            "recorded step changes it by the optimizer alone: compute a value from the parameter in place of writing "
            "to it (for an embedding: max_norm=None), write between the steps, through state_dict and "
            "load_state_dict, or freeze it, where it is no weight to train: requires_grad_(False)"
        )


def _refuse_decisions(names: Collection[str]) -> None:
    for name in sorted(names):
        raise Unsupported(
            f"Python decides by the values of {name!r}, which the step changes, and a replay would not "
            "decide again: use torch.where or another operator in place of if, float(), int() or .item()"
        )


def _refuse_constants(recorded: GraphModule, changing: Mapping[str, torch.Tensor]) -> None:
    """Refuse a tensor that the recording took for a constant, if it shares memory with a tensor that steps change."""
    names = {tensor.untyped_storage()._cdata: name for name, tensor in changing.items()}
    for node in recorded.graph.find_nodes(op="get_attr"):
        held = getattr(recorded, node.target)
        name = names.get(held.untyped_storage()._cdata) if isinstance(held, torch.Tensor) else None
        if name is not None:
            raise Unsupported(
                f"the forward pass or the loss reads {name!r}, which a step changes, through a tensor that the module "
                "does not have as a parameter or buffer, such as a view or .data of it that was kept: read the "
                "parameter or buffer itself"
            )


def _results(recorded: GraphModule) -> list[Node | None]:
    """What the graph gives back; None stands for a gradient or a norm that there is not."""
    (results,) = recorded.graph.output_node().args
    return [node if isinstance(node, Node) else None for node in results]  # type: ignore[union-attr]


def _describe(error: BaseException) -> str:
    """The first sentence of an error, and the line of the user's code that it comes from."""
    sentence = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    place = place_outside(traceback.extract_tb(error.__traceback__))
    return sentence if place in (NO_PLACE, "") or place in sentence else f"{sentence} ({place})"


NO_DERIVATIVE = re.compile(r"derivative for .* not implemented|differentiation .* not implemented")

FRAME = re.compile(r'File "(.+?)", line (\d+)')
