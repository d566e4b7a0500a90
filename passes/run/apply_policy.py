"""Leave inner passes out of steps, for a policy or for unread weights; check that all names are known."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from passes.catalog import pass_names
from passes.context import PassContext
from passes.errors import PolicyError
from passes.graph.index import copy_of
from passes.policy.policy import Policy
from passes.recipe.recipe import known_names
from passes.step import Repeat, Step
from passes.suggest import nearest


def check_names(steps: Sequence[Step], policy: Policy, context: PassContext) -> None:
    """Refuse every unknown name and option, before a model is opened.

    A library is asked only for what onnxline does not know itself, since its import takes a second.

    Raises:
        PolicyError: an unknown pass, structure or option, with the nearest; or a value of the wrong type.
    """
    used = [step.name for step in steps]
    Policy(keep=policy.keep).check((), ())
    for step in steps:
        step.check(context)
    try:
        policy.check((*known_names(), *used), used)
    except PolicyError:
        policy.check(pass_names(steps, context), used)


def with_skips(step: Step, policy: Policy, context: PassContext) -> Step:
    """The step without the inner passes that the policy skips.

    Raises:
        PolicyError: options that the installed release does not take.
    """
    step.check(context)
    refused = step.writes_contrib if policy.contrib == "refuse" else ()
    names = step.inner(context)
    return step.without([name for name in names if name in refused or policy.skips(f"{step.name}/{name}")])


def fix_input_shapes(steps: Sequence[Step], model: onnx.ModelProto) -> onnx.ModelProto | None:
    """`model` with the input shapes that a step was asked for, to draw inputs that fit; None where none was.

    A named dim that is fixed in one input is fixed in all.

    Raises:
        PolicyError: there is no such input, or its declared shape contradicts the requested shape.
    """
    asked = {name: (step, shape) for step in steps for name, shape in step.input_shapes.items()}
    if not asked:
        return None
    fixed = copy_of(model)
    inputs = {info.name: info.type.tensor_type.shape.dim for info in fixed.graph.input}
    sizes: dict[str, int] = {}
    for name, (step, shape) in asked.items():
        if name not in inputs:
            hint = nearest(name, inputs) or f"; it has: {', '.join(inputs)}"
            raise PolicyError(f"{step.name}: the model has no input {name!r}{hint}")
        dims = inputs[name]
        if len(dims) != len(shape) or any(
            dim.HasField("dim_value") and dim.dim_value != size for dim, size in zip(dims, shape, strict=False)
        ):
            declared = [dim.dim_param or dim.dim_value or "?" for dim in dims]
            raise PolicyError(f"{step.name}: {name} is to be {list(shape)}, and the model declares {declared}")
        for dim, size in zip(dims, shape, strict=True):
            sizes |= {dim.dim_param: size} if dim.dim_param else {}
            dim.dim_value = size
    for dims in inputs.values():
        for dim in dims:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    return fixed


def without_weight_readers(recipe: Sequence[Step | Repeat]) -> list[Step | Repeat]:
    """`recipe` without the inner passes that would join weights that are to stay unread; each row of the report says
    what was left out."""
    return [
        Repeat(tuple(map(_without_weight_readers, item.steps)), item.limit)
        if isinstance(item, Repeat)
        else _without_weight_readers(item)
        for item in recipe
    ]


def _without_weight_readers(step: Step) -> Step:
    return step.without(step.joins_weights) if step.joins_weights else step
