"""The Graph of a train step: the recorded operators, a check for values that are not finite, and the updates.

A step changes nothing if its loss is not finite, or the norm of its gradients where they are clipped or checked: the
updates read the value `skip`, and what the forward pass wrote to keeps its old value.
`find_first_broken` then runs the step again, operator by operator, to name the first operator whose result is not
finite.

Each update is inserted as early as its operands allow: after the last operator that reads the parameter, and after the
operator that computes its gradient. So the memory of a large gradient is free again at once. The small parameters of a
group share one update op, since a launch takes longer than updating them. On a GPU one launch updates them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from pipeline.importers.from_torch.region import Region
from pipeline.importers.from_torch.tensors import Tensors
from pipeline.ir import Attr, Graph, InputRef, Op, Role, TensorSpec
from pipeline.ir.builder import GraphFacts, ValueDecl, assemble, declarations
from pipeline.runtime.capture import RandomState
from pipeline.runtime.devices import Device
from pipeline.runtime.eager import Observer, Own, run_eager
from pipeline.runtime.tensors import dtype_name, torch_dtype
from pipeline.training.optimizer import OptimizerGroup, OptimizerSettings
from pipeline.training.trace import TracedStep

LARGE = 1024 * 1024
"""On the CPU, the fewest bytes of a parameter that has an update op of its own."""

STEP = "optimizer.step"
"""The state that counts the steps, float32."""

LIMIT = "optimizer.limit"
"""The state that holds the limit of gradients, float32: of their norm, or of each element."""

SCALAR = TensorSpec((), "float32")
FLAG = TensorSpec((), "bool")
RATE = TensorSpec((), "float64")


def stored_name(name: str) -> str:
    """The name of the value that holds the parameter or buffer `name` of the module."""
    return f"module.{name}"


def moment_name(param: str, sort: str) -> str:
    """The name of the value that holds the moment `sort` of the parameter `param`, such as `exp_avg`."""
    return f"optimizer.{param}.{sort}"


def rate_name(group: int) -> str:
    """The name of the value that holds the learning rate of a group: a float64 scalar."""
    return f"optimizer.rate.{group}"


def make_graph(traced: TracedStep, settings: OptimizerSettings, *, large: int | None = LARGE) -> Graph:
    """The Graph of one step: its inputs are the batch, its output is the loss, and `updates` has all that it changes.

    Where the norm of the gradients is computed, the graph has a second output: the sum of loss and norm, which is
    finite only if both are.

    Args:
        traced: the recorded forward and backward pass.
        settings: rule and groups of the optimizer.
        large: the fewest bytes of a parameter that has an update op of its own; None where there is one op for all.

    Raises:
        Unsupported: an operator or a dtype that the IR cannot hold.
    """
    recorded, vids = _read(traced)
    edit = _Edit(recorded)
    gradients = {name: vids[node] for name, node in zip(traced.params, traced.gradients, strict=True)}
    params = {name: vids[traced.placeholders[name]] for name in traced.params}
    check = _FiniteCheck(edit, vids[traced.loss], None if traced.norm is None else vids[traced.norm])
    updates = {
        vids[traced.placeholders[name]]: check.keep(vids[traced.placeholders[name]], vids[node])
        for name, node in traced.updates.items()
    }
    if traced.limit is not None:
        updates[vids[traced.limit]] = vids[traced.limit]
    step = edit.declare(STEP, SCALAR, Role.STATE)
    updates[step] = after = check.count(step)
    for group in settings.groups:
        rate = edit.declare(rate_name(group.index), RATE, Role.STATE)
        updates[rate] = rate  # a step leaves it as it is, and the caller sets it
        scalars = [rate, check.skip] if settings.rule == "SGD" else [after, rate, check.skip]
        for names in _packs(group, {name: edit.spec(params[name]) for name in group.params}, large):
            updates |= _update(edit, settings.rule, replace(group, params=names), params, gradients, scalars)
    return edit.build(recorded, updates, [*recorded.outputs, *check.further])


def _read(traced: TracedStep) -> tuple[Graph, dict[object, int]]:
    """The recorded operators as a Graph without updates, and {fx node: vid} of placeholders, results and new values."""
    region = Region(traced.module, Tensors({}))
    names, roles = {}, {}
    for name, node in traced.placeholders.items():
        unchanged = Role.CONST if name in traced.buffers else Role.PARAM
        roles[node] = Role.STATE if name in traced.updates else unchanged
        names[node] = stored_name(name)
    for name, node in zip(traced.layout.names, traced.batch, strict=True):
        roles[node], names[node] = Role.INPUT, name
    if traced.limit is not None:
        roles[traced.limit], names[traced.limit] = Role.STATE, LIMIT
    vids: dict[object, int] = {node: region.declare(node, role) for node, role in roles.items()}
    region.read()
    leaving = [traced.loss, *traced.gradients, *traced.updates.values(), *([traced.norm] if traced.norm else [])]
    for node in leaving:
        vid = region.result_of(node)
        assert isinstance(vid, int)
        vids[node] = vid
    inputs = [vids[node] for node in traced.batch]
    graph = region.graph("train step", inputs, [vids[traced.loss]])
    by_vid = {vids[node]: name for node, name in names.items()}
    values = tuple(replace(value, name=by_vid.get(value.vid, value.name)) for value in graph.values)
    return replace(graph, values=values), vids


def _packs(group: OptimizerGroup, specs: Mapping[str, TensorSpec], large: int | None) -> list[tuple[str, ...]]:
    """The names of the group's parameters, a tuple for each update op: a large one alone, the small ones of a dtype
    together."""
    alone = [name for name in group.params if large is not None and specs[name].nbytes >= large]
    together: dict[str, list[str]] = {}
    for name in group.params:
        if name not in alone:
            together.setdefault(specs[name].dtype, []).append(name)
    return [*((name,) for name in alone), *map(tuple, together.values())]


def _update(
    edit: _Edit,
    rule: str,
    group: OptimizerGroup,
    params: Mapping[str, int],
    gradients: Mapping[str, int],
    scalars: Sequence[int],
) -> dict[int, int]:
    """Insert one update of the group's parameters. Returns {vid: vid of its new value} of parameters and moments."""
    kept = [params[name] for name in group.params]
    read = [gradients[name] for name in group.params]
    moments = [
        edit.declare(moment_name(name, sort), edit.spec(params[name]), Role.STATE)
        for sort in group.moments
        for name in group.params
    ]
    attrs = {"count": len(kept), **group.attrs}
    changed = [*kept, *moments]
    after = edit.insert(rule, [*kept, *read, *moments, *scalars], [edit.spec(vid) for vid in changed], attrs)
    return dict(zip(changed, after, strict=True))


class _FiniteCheck:
    """Inserts the operators that test whether loss and norm are finite, and that undo the step if they are not."""

    def __init__(self, edit: _Edit, loss: int, norm: int | None) -> None:
        self._edit = edit
        self.further: tuple[int, ...] = ()
        """The sum of loss and norm, if there is a norm."""
        if norm is not None:
            # Parameters in float64, or a loss computed by autocast, give the norm another dtype than the loss.
            dtypes = [torch_dtype(edit.spec(vid).dtype) for vid in (loss, norm)]
            spec = replace(edit.spec(loss), dtype=dtype_name(torch.promote_types(*dtypes)))
            self.further = (loss,) = edit.insert("aten.add.Tensor", [loss, norm], [spec], OF_TWO)
        (self.skip,) = edit.insert("NotFinite", [loss], [SCALAR], {})
        self._flags: list[int] = []
        """The vid of `skip` as a bool, once `keep` has been called; empty before."""

    def keep(self, old: int, new: int) -> int:
        """Insert a choice between two values: `new`, or `old` if the step is skipped. Returns its vid."""
        if not self._flags:
            self._flags += self._edit.insert("aten.ne.Scalar", [self.skip], [FLAG], {"self": InputRef(0), "other": 0})
        attrs: dict[str, Attr] = {"condition": InputRef(0), "self": InputRef(1), "other": InputRef(2)}
        return self._edit.insert("aten.where.self", [*self._flags, old, new], [self._edit.spec(old)], attrs)[0]

    def count(self, step: int) -> int:
        """Insert the count of steps, which a skipped step does not raise. Returns its vid."""
        return self._edit.insert("CountStep", [step, self.skip], [SCALAR], {})[0]


OF_TWO: Mapping[str, Attr] = {"self": InputRef(0), "other": InputRef(1)}


class _Edit:
    """Inserts ops into a graph, each as early as its operands allow, and after all consumers of what it replaces."""

    def __init__(self, graph: Graph) -> None:
        self._decls = declarations(graph)
        self._ops: list[tuple[int, Op]] = [(op.oid, op) for op in graph.ops]
        """(Index of the graph op that it follows, new op); equal indices keep the order of insertion."""
        self._made = {value.vid: -1 if value.producer is None else value.producer for value in graph.values}
        self._last = {value.vid: max(value.users, default=-1) for value in graph.values}

    def declare(self, name: str, spec: TensorSpec, role: Role) -> int:
        self._decls.append(ValueDecl(name, spec, role))
        vid = len(self._decls) - 1
        self._made[vid] = self._last[vid] = -1
        return vid

    def spec(self, vid: int) -> TensorSpec:
        return self._decls[vid].spec

    def insert(
        self, kind: str, inputs: Sequence[int], outputs: Sequence[TensorSpec], attrs: Mapping[str, Attr]
    ) -> tuple[int, ...]:
        """Insert an op after the producers of its inputs, and after the consumers of those inputs that are stored."""
        stored = [vid for vid in inputs if self._made[vid] < 0]
        after = max([*(self._made[vid] for vid in inputs), *(self._last[vid] for vid in stored), 0])
        number = len(self._ops)
        outs = tuple(
            self._declare_result(f"{kind.split('.')[-2] if '.' in kind else kind}_{number}_{index}", spec, after)
            for index, spec in enumerate(outputs)
        )
        self._ops.append((after, Op(number, kind, tuple(inputs), outs, attrs, name=f"{kind}_{number}")))
        return outs

    def _declare_result(self, name: str, spec: TensorSpec, after: int) -> int:
        vid = self.declare(name, spec, Role.TMP)
        self._made[vid] = after
        return vid

    def build(self, graph: Graph, updates: Mapping[int, int], outputs: Sequence[int]) -> Graph:
        ordered = sorted(self._ops, key=lambda entry: entry[0])
        ops = [replace(op, oid=oid) for oid, (_, op) in enumerate(ordered)]
        payloads = {graph.values[vid].name: payload for vid, payload in graph.payloads.items()}
        facts = GraphFacts(updates=dict(updates))
        return assemble(graph.name, self._decls, ops, graph.inputs, outputs, payloads, facts=facts)


def find_first_broken(
    graph: Graph, tensors: Mapping[str, torch.Tensor], device: Device, random: RandomState | None
) -> str:
    """A sentence on the first value that is not finite: a stored value or an input, else the result of an op.

    The step is run again, operator by operator. It draws the same random values as before, from `random`: the state of
    torch's generator for `device` when the step began.
    """
    names = {value.name: value.vid for value in graph.values}
    given = [name for name, tensor in tensors.items() if not _is_finite(tensor)]
    if given:
        said = f"{', '.join(sorted(given))} held such values before the step"
        stored = [name for name in given if graph.values[names[name]].role is not Role.INPUT]
        return f"{said}, since an earlier step had a finite loss and other gradients: {ADVICE}" if stored else said
    broken: list[Op] = []

    def observe(op: Op, results: Sequence[torch.Tensor]) -> None:
        if not broken and not all(map(_is_finite, results)):
            broken.append(op)

    run_again(graph, tensors, device, random, observe)
    if not broken:
        return "every result was finite when the step was run again operator by operator, which sums in another order"
    return f"the first operator whose result is not finite is {describe_op(broken[0])}"


def run_again(
    graph: Graph, tensors: Mapping[str, torch.Tensor], device: Device, random: RandomState | None, observe: Observer
) -> None:
    """Run a step operator by operator, from the state `random` of torch's generator for `device`, which the caller
    keeps."""
    with device.fork_random(random and random.default):
        run_eager(graph, tensors, observe=observe, own=OWN)


def describe_op(op: Op) -> str:
    """The name of an op, its operator, and the place in the user's code that it comes from."""
    place = " · ".join(filter(None, (op.origin, op.line)))
    return f"{op.name!r}, {op.operator}" + (f" ({place})" if place else "")


def _keep_operands(op: Op, ins: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The results of an update op when the step is run again: the old values, since nothing reads the new ones."""
    count = op.attrs.get("count", 1)
    assert isinstance(count, int)
    return [*ins[:count], *ins[2 * count :]][: len(op.outputs)]


def _do_not_skip(_: Op, ins: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [torch.zeros((), dtype=torch.float32, device=ins[0].device)]


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


ADVICE = "record with check_gradients=True to stop at that step"

OWN: Own = {**dict.fromkeys(("SGD", "Adam", "CountStep"), _keep_operands), "NotFinite": _do_not_skip}
"""How to run the kinds for which torch has no operator."""
