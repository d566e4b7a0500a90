"""What a torch optimizer does, as data: its rule, the settings of its groups of parameters, and its moments."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from passes.suggest import describe_argument
from pipeline.errors import Unsupported, UsageError
from pipeline.runtime.tensors import dtype_name
from pipeline.training.batch import refuse_optimizer_hooks

Rule = Literal["SGD", "Adam"]


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """Parameters that share settings. `attrs` are those of the update's kernel, without the count."""

    index: int
    """The index of the group in the optimizer."""
    params: tuple[str, ...]
    attrs: Mapping[str, float | bool]
    moments: tuple[str, ...]
    """The names of the moments in the optimizer's state, in the order of the kernel's operands."""
    learning_rate: float


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """A rule, and its groups. `step` counts the steps that were done before; only Adam reads it."""

    rule: Rule
    groups: tuple[OptimizerGroup, ...]
    step: int
    moments: Mapping[tuple[str, str], torch.Tensor]
    """{(parameter, name of the moment): value}, for the moments that the optimizer has a value of."""


def read_optimizer(optimizer: Optimizer, module: nn.Module, trained: Sequence[str]) -> OptimizerSettings:
    """The settings of `optimizer` for the parameters `trained` of `module`.

    Parameters that the optimizer does not have are not trained; parameters without a gradient are left out.

    Raises:
        Unsupported: another optimizer than SGD, Adam and AdamW, or an option that is not handled.
        UsageError: a parameter of the optimizer is not one of the module, or is in a group twice.
    """
    rule = RULES.get(type(optimizer))
    if rule is None:
        raise Unsupported(
            f"the optimizer is {describe_argument(optimizer)}; expected a torch.optim.SGD, torch.optim.Adam or "
            "torch.optim.AdamW of the module's parameters"
        )
    refuse_optimizer_hooks(optimizer)
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    unknown = [param for group in optimizer.param_groups for param in group["params"] if id(param) not in names]
    if unknown:
        raise UsageError(
            f"the optimizer has a parameter of shape {list(unknown[0].shape)} that the module has not; "
            "make the optimizer from module.parameters()"
        )
    groups, moments, steps = [], {}, set[int]()
    for number, options in enumerate(optimizer.param_groups):
        _refuse_options(options, number)
        own = [(names[id(param)], param) for param in options["params"] if names[id(param)] in trained]
        _refuse_repeats([name for name, _ in own], number)
        _refuse_dtypes(rule, own)
        sorts = MOMENTS[rule](options)
        groups.append(
            OptimizerGroup(number, tuple(name for name, _ in own), ATTRS[rule](options), sorts, read_rate(options))
        )
        for name, tensor in own:
            state = optimizer.state.get(tensor) or {}
            refuse_half_a_state(rule, options, name, state)
            moments |= {(name, sort): state[sort] for sort in sorts if isinstance(state.get(sort), torch.Tensor)}
            steps.add(int(state.get("step", 0)))
    if len(steps) > 1:
        raise Unsupported(
            f"the optimizer did {min(steps)} to {max(steps)} steps with its parameters; expected one count, since a "
            "program counts once for all: train those with fewer steps by an optimizer of their own first"
        )
    return OptimizerSettings(rule, tuple(group for group in groups if group.params), max(steps, default=0), moments)


def learning_rates(optimizer: Optimizer) -> list[float]:
    """The current learning rate of each group."""
    return [read_rate(options) for options in optimizer.param_groups]


def has_rate_in_tensor(optimizer: Optimizer) -> bool:
    """Whether a learning rate is a tensor, which may be written in place."""
    return any(isinstance(options["lr"], torch.Tensor) for options in optimizer.param_groups)


def fixed_options(optimizer: Optimizer) -> list[dict[str, object]]:
    """The options of each group that are part of the recorded graph."""
    return [{name: options[name] for name in FIXED if name in options} for options in optimizer.param_groups]


def refuse_changes(recorded: Sequence[Mapping[str, object]], now: Sequence[Mapping[str, object]], title: str) -> None:
    """Compare the fixed options of all groups with those of the recorded step.

    Raises:
        UsageError: an option other than a learning rate is different.
    """
    if len(recorded) != len(now):
        raise UsageError(f"{title} has {len(now)} groups, this program {len(recorded)}: record the step again")
    for index, (mine, other) in enumerate(zip(recorded, now, strict=True)):
        changed = [name for name in mine if other.get(name) != mine[name]]
        if changed:
            raise UsageError(
                f"group {index} of {title} has {changed[0]}={other.get(changed[0])}, this program {mine[changed[0]]}; "
                f"only learning rates may differ: record the step again{ADVICE.get(changed[0], '')}"
            )


def refuse_half_a_state(rule: Rule, options: Mapping[str, Any], param: str, state: Mapping[str, Any]) -> None:
    """
    Raises:
        UsageError: Adam did steps with the parameter `param`, and a moment of it is missing in its state.
    """
    missing = [sort for sort in MOMENTS[rule](options) if not isinstance(state.get(sort), torch.Tensor)]
    if rule == "Adam" and missing and int(state.get("step", 0)):
        raise UsageError(
            f"the optimizer did {int(state['step'])} steps with {param!r}, and has no {missing[0]} of it; expected all "
            f"of {', '.join(MOMENTS[rule](options))}"
        )


def rate_state(rate: float) -> torch.Tensor:
    """The state that holds a learning rate: float64, as Python has it."""
    return torch.tensor(rate, dtype=torch.float64)


def read_rate(options: Mapping[str, Any]) -> float:
    """The learning rate of a group.

    Raises:
        UsageError: the rate is no finite number. A step with it would spoil the parameters, and its loss would not show
            that.
    """
    rate = options["lr"]
    if not isinstance(rate, Real | torch.Tensor) or not math.isfinite(rate):
        raise UsageError(f"the learning rate of a group of the optimizer is {rate!r}; expected a finite number")
    return float(rate)


def _refuse_dtypes(rule: Rule, params: Sequence[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in params:
        if tensor.dtype not in DTYPES[rule]:
            expected = " or ".join(map(dtype_name, DTYPES[rule]))
            raise Unsupported(
                f"parameter {name!r} is {dtype_name(tensor.dtype)}; expected {expected} in what {rule} trains: freeze "
                "it, or convert the module"
            )


def _refuse_repeats(params: Sequence[str], number: int) -> None:
    # torch.optim only warns, and updates such a parameter several times in a step.
    repeated = [name for name, count in Counter(params).items() if count > 1]
    if repeated:
        raise UsageError(
            f"group {number} of the optimizer has the parameter {repeated[0]!r} several times; expected each once: "
            "take module.parameters()"
        )


def _refuse_options(options: Mapping[str, Any], number: int) -> None:
    for name, handled in HANDLED.items():
        if options.get(name, handled) != handled:
            raise Unsupported(f"group {number} of the optimizer has {name}={options[name]}; only {handled} is handled")


def _sgd_attrs(options: Mapping[str, Any]) -> dict[str, float | bool]:
    return {
        "momentum": float(options["momentum"]),
        "weight_decay": float(options["weight_decay"]),
        "nesterov": bool(options["nesterov"]),
        "maximize": bool(options["maximize"]),
    }


def _adam_attrs(options: Mapping[str, Any]) -> dict[str, float | bool]:
    beta1, beta2 = options["betas"]
    return {
        "beta1": float(beta1),
        "beta2": float(beta2),
        "epsilon": float(options["eps"]),
        "weight_decay": float(options["weight_decay"]),
        "decoupled": bool(options["decoupled_weight_decay"]),
        "maximize": bool(options["maximize"]),
    }


DTYPES: Final[Mapping[Rule, tuple[torch.dtype, ...]]] = {
    "SGD": (torch.float32, torch.float64),
    "Adam": (torch.float32, torch.float64, torch.bfloat16),
}
"""The dtypes of trained parameters. torch's fused SGD on the CPU hardly moves those of half precision (torch 2.13), and
Adam's second moments are too small for float16."""

HANDLED: Final[Mapping[str, object]] = {"dampening": 0, "differentiable": False}
"""Options with the one value that is handled. `foreach`, `fused` and `capturable` choose how torch computes, and change
nothing here."""

RULES: Final[Mapping[type[Optimizer], Rule]] = {SGD: "SGD", Adam: "Adam", AdamW: "Adam"}

FIXED: Final = ("betas", "eps", "weight_decay", "amsgrad", "maximize", "momentum", "nesterov", "dampening")
"""Options that are part of the recorded graph."""

ADVICE: Final[Mapping[str, str]] = dict.fromkeys(
    ("betas", "momentum"), ", or give a scheduler that cycles it cycle_momentum=False"
)

ATTRS: Final = {"SGD": _sgd_attrs, "Adam": _adam_attrs}

MOMENTS: Final = {
    "SGD": lambda options: ("momentum_buffer",) if options["momentum"] else (),
    "Adam": lambda options: ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options["amsgrad"] else ())),
}
