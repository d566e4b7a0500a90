"""States of a program ↔ the state dicts of a torch module and its optimizer, and ↔ a safetensors file.

A file is whole at every moment.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from passes.weights.files import replace_tensors
from pipeline.errors import UsageError
from pipeline.runtime.capture import RandomState, Snapshot
from pipeline.training.graph import STEP, moment_name, rate_name
from pipeline.training.optimizer import MOMENTS, RULES, rate_state, read_rate, refuse_changes, refuse_half_a_state

StateDict = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sources:
    """What a program was recorded from."""

    module: nn.Module
    optimizer: Optimizer
    constants: Mapping[str, torch.Tensor]
    """Parameters and buffers that no step changes, by the names of their values."""
    keys: Mapping[str, str]
    """{key of the module's state dict: name of the value}; tied parameters have several keys."""
    params: Mapping[int, str]
    """{number of a parameter in the optimizer's state dict: its name in the module}, of those that are trained."""
    options: Sequence[Mapping[str, object]]
    """The options of each group of the optimizer that are part of the graph."""
    idle: Mapping[int, Mapping[str, Any]]
    """{number of a parameter in the optimizer's state dict: its state there}, of those that no step changes."""


def _refuse_other_idle_state(sources: Sources, number: int, state: Mapping[str, Any]) -> None:
    own = sources.idle.get(number, {})
    same = state.keys() == own.keys() and all(torch.equal(*map(torch.as_tensor, (state[key], own[key]))) for key in own)
    if not same:
        raise UsageError(
            f"the optimizer's state dict has another state of its parameter {number}, which this program does not "
            "train: give it to the optimizer and record the step again"
        )


def to_state_dict(sources: Sources, states: Mapping[str, torch.Tensor]) -> StateDict:
    """`{"module": …, "optimizer": …}`; before the first step the optimizer has no state, as in torch.

    A momentum also counts as a state: SGD of torch does not count its steps, so a program that was recorded or loaded
    in the middle of a training begins with step 0. Without steps, a momentum of zeros and none are the same to torch.
    """
    held = {**sources.constants, **states}
    module = {key: held[name].clone() for key, name in sources.keys.items()}
    groups = copy.deepcopy(sources.optimizer.state_dict()["param_groups"])
    state: dict[int, dict[str, Any]] = {number: copy.deepcopy(dict(idle)) for number, idle in sources.idle.items()}
    for index, group in enumerate(groups):
        rate = states.get(rate_name(index))
        if rate is not None:
            own = group["lr"]
            group["lr"] = torch.full_like(own, float(rate)) if isinstance(own, torch.Tensor) else float(rate)
        for number in group["params"]:
            if number not in sources.params:
                continue
            moments = _moments_of(sources, group, sources.params[number], states)
            if states[STEP] > 0 or any(bool(moment.any()) for moment in moments.values()):
                counted = {"step": states[STEP].clone()} if RULES[type(sources.optimizer)] == "Adam" else {}
                if counted or moments:  # SGD without a momentum has no state, as in torch
                    state[number] = {**counted, **moments}
    return {"module": module, "optimizer": {"state": state, "param_groups": groups}}


def _moments_of(
    sources: Sources, group: Mapping[str, Any], param: str, states: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    sorts = MOMENTS[RULES[type(sources.optimizer)]](group)
    return {sort: states[moment_name(param, sort)].clone() for sort in sorts}


def from_state_dict(
    sources: Sources, found: Mapping[str, Mapping[str, Any]], states: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The states that `found` sets, by name.

    Raises:
        UsageError: it has other keys than this program, or other settings than its optimizer.
    """
    if not isinstance(found, Mapping) or not all(isinstance(part, Mapping) for part in found.values()):
        raise UsageError(
            "expected a state dict {'module': module.state_dict(), 'optimizer': optimizer.state_dict()}, found "
            + (f"the keys {sorted(map(str, found))}" if isinstance(found, Mapping) else type(found).__name__)
        )
    unknown = found.keys() - {"module", "optimizer"}
    if unknown or not found:
        raise UsageError(f"the state dict has the keys {sorted(found)}; expected 'module', 'optimizer', or both")
    given = _of_module(sources, found["module"], states) if "module" in found else {}
    return {**given, **(_of_optimizer(sources, found["optimizer"], states) if "optimizer" in found else {})}


def _of_module(
    sources: Sources, found: Mapping[str, torch.Tensor], states: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    missing, extra = sorted(sources.keys.keys() - found.keys()), sorted(found.keys() - sources.keys.keys())
    if missing or extra:
        raise UsageError(
            f"the module's state dict lacks {missing[:3]} and has {extra[:3]} beyond; expected that of the same module"
        )
    changed = [
        key
        for key, name in sources.keys.items()
        if name in sources.constants and not torch.equal(found[key], sources.constants[name])
    ]
    if changed:
        raise UsageError(
            f"{changed[0]!r} is a constant of this program, with other values in the state dict: record the step again"
        )
    return {name: found[key].detach() for key, name in sources.keys.items() if name in states}


def _of_optimizer(
    sources: Sources, found: Mapping[str, Any], states: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if found.keys() != {"state", "param_groups"}:
        raise UsageError(
            f"the optimizer's state dict has the keys {sorted(map(str, found))}; expected 'state' and 'param_groups'"
        )
    groups = found["param_groups"]
    own = sources.optimizer.state_dict()["param_groups"]
    if [group["params"] for group in groups] != [group["params"] for group in own]:
        raise UsageError("the optimizer's state dict has other groups of parameters than this program")
    refuse_changes(sources.options, groups, "the optimizer's state dict")
    rule = RULES[type(sources.optimizer)]
    rates = {rate_name(index): rate_state(read_rate(group)) for index, group in enumerate(groups)}
    given = {name: rate for name, rate in rates.items() if name in states}  # a frozen group has none
    steps = set[int]()
    for group in groups:
        for number in group["params"]:
            param, state = sources.params.get(number), found["state"].get(number) or {}
            if param is None:
                _refuse_other_idle_state(sources, number, state)
                continue
            refuse_half_a_state(rule, group, param, state)
            for sort in MOMENTS[rule](group):
                name, moment = moment_name(param, sort), state.get(sort)
                given[name] = torch.zeros_like(states[name]) if moment is None else moment
            steps.add(int(state.get("step", 0)))
    if len(steps) > 1:
        raise UsageError(
            f"the optimizer did {min(steps)} to {max(steps)} steps with its parameters; expected one number"
        )
    if rule == "Adam":  # SGD of torch does not count, and the number of steps that were done stays
        given[STEP] = torch.tensor(float(max(steps, default=0)), dtype=torch.float32)
    return given


FORMAT = "onnxline train states 1"

DEFAULT, KERNEL = "random.default", "random.kernel."
"""The names of the states of random generators: torch's own, and those of single kernels, by number."""


def check_place(path: Path) -> None:
    """
    Raises:
        UsageError: no file can be at `path`: its folder does not exist, or the path is a folder itself.
    """
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder; make it before saving to {path.name}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; expected the path of a file in it")


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write under a temporary name, then rename.

    Raises:
        UsageError: the folder does not exist, the path is a folder itself, or the disk is full.
    """
    import safetensors.torch  # here, since a step is recorded and replayed without it

    check_place(path)
    tensors = {name: tensor.contiguous() for name, tensor in snapshot.states.items()}
    tensors |= {f"{KERNEL}{number}": state for number, state in enumerate(snapshot.random.kernels)}
    if snapshot.random.default is not None:
        tensors[DEFAULT] = snapshot.random.default
    with replace_tensors(path) as temporary:
        safetensors.torch.save_file(tensors, temporary, metadata={"format": FORMAT})


def read_snapshot(path: Path, expected: Mapping[str, torch.Tensor]) -> Snapshot:
    """The snapshot in the file.

    Raises:
        UsageError: no such file, no file of this format, or other states than `expected`.
    """
    import safetensors

    if not path.is_file():
        raise UsageError(f"there is no file {path}; expected one that save() wrote")
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except safetensors.SafetensorError as error:
        raise UsageError(f"{path} is no safetensors file ({error}); expected one that save() wrote") from error
    if metadata.get("format") != FORMAT:
        raise UsageError(f"{path} has the format {metadata.get('format')!r}; expected {FORMAT!r}, as save() writes it")
    default = tensors.pop(DEFAULT, None)
    numbers = sorted(int(end) for name in tensors if (end := name.removeprefix(KERNEL)) != name and end.isdecimal())
    kernels = [tensors.pop(f"{KERNEL}{number}") for number in numbers]
    for name in sorted(tensors.keys() ^ expected.keys()):
        raise UsageError(f"{path} is of another program: {name!r} is only in one of them")
    for name, tensor in tensors.items():
        found, wanted = ((item.dtype, tuple(item.shape)) for item in (tensor, expected[name]))
        if found != wanted:
            raise UsageError(f"{path} is of another program: {name!r} is {found} there, and {wanted} here")
    return Snapshot(tensors, RandomState(tuple(kernels), default))
