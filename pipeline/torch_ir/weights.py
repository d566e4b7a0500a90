"""Load weights from a checkpoint, match them to the weights of an IR, and compute buffers that no checkpoint has.

A checkpoint names tensors as the model does; an IR has the names of torch.export's placeholders, one for each name of a
tensor. So a tied weight has several placeholders, and each takes the tensor that is given under any of its names.

Non-persistent buffers of a model on meta have no data, and are computed again: models of `transformers` can fill such
buffers (`PreTrainedModel._init_weights`: rotary frequencies, position ids), since `from_pretrained` makes them on meta
too. A CPU copy of the module that owns the buffer is filled; the model itself is not changed. The copy is filled twice,
over different contents: an element that differs was not written.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.export import ExportedProgram

from pipeline.errors import SourceError
from pipeline.export.checkpoint import read_checkpoint, read_pickle, read_safetensors
from pipeline.export.tree import not_dense
from pipeline.importers.from_torch.modules import every_module, every_path, every_tensor
from pipeline.importers.from_torch.tensors import holds_values
from pipeline.ir import Graph, Role, Value
from pipeline.runtime.tensors import dtype_name, is_same, torch_dtype
from pipeline.torch_ir.errors import NoWeightFile, WeightLoadError, a_type, by_name, path_of
from pipeline.torch_ir.ir import IR, an_ir
from pipeline.torch_ir.nodes import key_of, stored_values

Tensors = Mapping[str, torch.Tensor]

ABSENT: Final = object()
"""Marks a tensor that was not given; None may have been given for one."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Weights by the names of their values in the graph, and what is wrong, a line each.

    `missing` are lines in pytorch-ir's words; `wrong` concerns shapes and dtypes; `hints` may say why some are missing.
    `unloaded` is whether weights are among these, which a checkpoint would have.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hints: tuple[str, ...] = ()
    unloaded: bool = False

    @property
    def problems(self) -> list[str]:
        return [*self.missing, *self.wrong, *self.hints]


def bind_stored(ir: IR, weights: Tensors, constants: Tensors) -> Bound:
    """Find every weight, buffer and constant of `ir`.

    `constants` go before `weights`, and these before what the IR holds itself; both go by the name in the checkpoint,
    by any other name of a tied weight, or by the placeholder's.
    """
    graph = ir.graph
    bound = Bound()
    lacking: list[Value] = []
    differing: dict[frozenset[str], tuple[str, str]] = {}
    names_by_vid = graph.weight_names()
    for value in stored_values(graph):
        names = names_by_vid[value.vid]
        tensor = _first(names, (constants, weights, ir.constants))
        if tensor is ABSENT and 0 in value.spec.shape:  # as caches begin; without elements, it is known
            tensor = torch.empty(value.spec.sizes, dtype=torch_dtype(value.spec.dtype))
        if tensor is ABSENT and value.vid not in graph.payloads and _is_needed(graph, value):
            lacking.append(value)
        elif tensor is not ABSENT:
            bound.tensors[value.name] = tensor
            kind = "constant" if any(name in constants for name in names) else _kind(value)
            wrong = [*misfit(f"{kind} {key_of(graph, value)!r}", tensor, value, value.spec.shape)]
            bound.wrong.extend(wrong)
            for pair in () if wrong else _differing_aliases(names, weights):
                differing.setdefault(frozenset(pair), pair)  # found again at the other placeholder
    bound.wrong.extend(
        f"weight {first!r}: the model has it as {name!r} too, and the two tensors in the weights differ; "
        "remove the tensor that is not meant"
        for first, name in differing.values()
    )
    bound.wrong.extend(_unknown(graph, constants))
    bound.missing.extend(missing_message(graph, value) for value in lacking)
    keys = {key_of(graph, value): _kind(value) for value in lacking}
    hints = (
        _prefix(list(keys), weights),
        _explain_unsaved([key for key in keys if key in ir.unsaved]),
        _explain_placeholder(graph, lacking),
    )
    unloaded = any(kind == "weight" and key not in ir.unsaved for key, kind in keys.items())
    return Bound(bound.tensors, bound.missing, bound.wrong, tuple(filter(None, hints)), unloaded)


def _explain_placeholder(graph: Graph, lacking: Sequence[Value]) -> str:
    """A hint where a message names a placeholder, and another weight has that very name in the checkpoint."""
    owners = {key: vid for vid, keys in graph.sources.items() for key in keys}
    for value in lacking:
        if owners.get(value.name, value.vid) != value.vid:
            return (
                f"The weights lack {key_of(graph, value)!r}, whose placeholder is called {value.name!r}; the weight "
                f"{value.name!r} is another one."
            )
    return ""


def missing_message(graph: Graph, value: Value) -> str:
    """pytorch-ir's message for a missing tensor."""
    reader = graph.ops[value.users[0]].name if value.users else "output"
    return f"Weight/input '{value.name}' not found in registry for node '{reader}'."


def misfit(what: str, tensor: object, value: Value, shape: Sequence[int | str]) -> Iterator[str]:
    """How `tensor` differs from what the graph declares for `value`; a size that is still a name fits any."""
    if not isinstance(tensor, torch.Tensor):
        yield f"{what}: found {a_type(tensor)}, expected a tensor"
        return
    if other := not_dense(tensor):
        yield f"{what}: found {other}"
        return
    dtype = dtype_name(tensor.dtype)
    if not fits_shape(tensor, shape) or dtype != value.spec.dtype:
        expected = f"{value.spec.dtype}[{', '.join(map(str, value.spec.shape))}]"
        yield f"{what}: found {dtype}{list(tensor.shape)}, expected {expected}"
    elif not holds_values(tensor):
        found = "a tensor on meta" if tensor.is_meta else a_type(tensor)
        yield f"{what}: found {found}, which holds no values; expected one with values"


def fits_shape(tensor: torch.Tensor, shape: Sequence[int | str]) -> bool:
    """Whether `tensor` has this shape, where a size that is still a name fits any."""
    return len(shape) == tensor.dim() and all(
        isinstance(size, str) or size == found for size, found in zip(shape, tensor.shape, strict=True)
    )


def _first(names: Sequence[str], places: Sequence[Tensors]) -> Any:
    """The first entry under one of `names` in one of `places`, of any type; ABSENT if there is none."""
    return next((place[name] for place in places for name in names if name in place), ABSENT)


def _is_needed(graph: Graph, value: Value) -> bool:
    return bool(value.users) or value.vid in graph.outputs or value.vid in graph.updates.values()


def _kind(value: Value) -> str:
    return "constant" if value.role is Role.CONST and value.name.startswith("c_") else "weight"


def _unknown(graph: Graph, constants: Tensors) -> Iterator[str]:
    """Report constants that the IR does not have; they would be ignored silently otherwise."""
    known = {name for names in graph.weight_names().values() for name in names}
    for name in constants:
        if name not in known:
            yield f"constant {name!r}: the IR has no such constant, buffer or weight"


def _differing_aliases(names: Sequence[str], weights: Tensors) -> Iterator[tuple[str, str]]:
    """Two names of a weight that have different tensors in `weights`: either could be meant."""
    first, *others = [name for name in names if name in weights] or [""]
    yield from ((first, name) for name in others if not _same(weights[first], weights[name]))


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit; one without values counts as equal."""
    if not isinstance(right, torch.Tensor):
        return False
    if left is right or not holds_values(right):
        return True
    if not_dense(right) or left.shape != right.shape or left.dtype != right.dtype:
        return False
    return is_same(left, right)


def _explain_unsaved(missing: Sequence[str]) -> str:
    if not missing:
        return ""
    names = ", ".join(map(repr, missing))
    what = "is a non-persistent buffer" if len(missing) == 1 else "are non-persistent buffers"
    return (
        f"{names} {what}: no checkpoint has such values, and the IR has none either, since the model was on meta; "
        f"give them by name, as in constants={{{missing[0]!r}: tensor}}"
    )


def _prefix(missing: Sequence[str], weights: Tensors) -> str:
    """A hint if all missing weights are there with or without a common prefix; nothing is renamed by guessing."""
    if not missing:
        return ""
    first = missing[0]
    for name in weights:
        prefix = name.removesuffix(first)
        if name.endswith(f".{first}") and all(prefix + key in weights for key in missing):
            return f"The weights have them under the prefix {prefix!r}; remove it from their names."
        prefix = first.removesuffix(name)
        if first.endswith(f".{name}") and all(key.removeprefix(prefix) in weights for key in missing):
            return f"The weights have them without the prefix {prefix!r}; add it to their names."
    return ""


State = dict[str, torch.Tensor]


def load_weights(path: str | Path) -> State:
    """Name → tensor, of a .pt, .pth, .bin or .safetensors, an .index.json of shards, or a folder with one of these.

    A file of `torch.save` may have any other name too, as `last.ckpt`. Nothing but tensors is unpickled.

    Args:
        path: the file or folder.

    Raises:
        NoWeightFile: there is no such file (a FileNotFoundError too).
        WeightLoadError: it is broken, or it holds something else than tensors.
    """
    return _load(path, read_checkpoint)


def load_weights_pt(path: str | Path) -> State:
    """Name → tensor, of a file of `torch.save`, whatever it is called. Nothing but tensors is unpickled.

    Args:
        path: the file.

    Raises:
        WeightLoadError: it cannot be read, or holds something else than tensors.
    """
    return _load(path, read_pickle)


def load_weights_safetensors(path: str | Path) -> State:
    """Name → tensor, of a safetensors file, whatever it is called.

    Args:
        path: the file.

    Raises:
        WeightLoadError: it cannot be read.
    """
    return _load(path, read_safetensors)


def validate_weights_against_ir(weights: Mapping[str, torch.Tensor], ir: IR) -> list[str]:
    """What hinders `weights` from being those of `ir`: tensors that are absent, or of another shape or dtype.

    Empty where they fit. Constants that the IR holds itself need not be among them; what the IR does not use may be.
    """
    weights = by_name("weights", weights, WeightLoadError)
    return bind_stored(an_ir(ir, WeightLoadError), weights, {}).problems


def _load(path: str | Path, read: Callable[[Path], State]) -> State:
    path = path_of("weights", path, WeightLoadError)
    if not path.exists():
        raise NoWeightFile(f"Weight file not found: {path}; expected .pt, .pth, .bin or .safetensors")
    try:
        return read(path)
    except SourceError as error:
        said = str(error).removeprefix(f"checkpoint {path}: ")
        raise WeightLoadError(f"Failed to load weights from {path}: {said}") from error


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """{name: the other names of the same parameter or buffer}, for those that have any."""
    shared = _find_shared(model)
    if not shared:
        return {}
    names: dict[int, list[str]] = {}
    for walk in (model.named_parameters, model.named_buffers):
        for name, tensor in walk(remove_duplicate=False):
            if id(tensor) in shared:
                names.setdefault(id(tensor), []).append(name)
    return _others(names)


def tied_in(program: ExportedProgram) -> dict[str, list[str]]:
    """The `tied_names` of a program without its model."""
    names: dict[int, list[str]] = {}
    for name, tensor in program.state_dict.items():
        names.setdefault(id(tensor), []).append(name)
    return _others(names)


def _others(names: Mapping[int, list[str]]) -> dict[str, list[str]]:
    groups = [group for group in names.values() if len(group) > 1]
    return {name: [alias for alias in group if alias != name] for group in groups for name in group}


def _find_shared(model: nn.Module) -> set[int]:
    """Ids of tensors in more than one place. Builds no names: a model may have 100,000 of them."""
    places = Counter(map(id, every_tensor(model)))
    return {tensor for tensor, count in places.items() if count > 1}


Fill = Callable[[nn.Module], object]


def recompute_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """{name: value} of those non-persistent buffers on meta that their model can fill; empty for a real model."""
    found: dict[str, torch.Tensor] = {}
    if not any(_on_meta(module) for module in every_module(model) if module._non_persistent_buffers_set):
        return found
    for path, module, fill in _owners(model):
        first, second = (_fill_copy(module, fill, content) for content in (0, 1))
        for name, value in first.items():
            if name in second and torch.equal(value, second[name]):
                found[f"{path}.{name}" if path else name] = value
    return found


def find_unsaved_buffers(model: nn.Module) -> frozenset[str]:
    """The names of all non-persistent buffers, which no checkpoint has."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in every_path(model)
        if module._non_persistent_buffers_set
        for name in _lasting(module)
    )


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, Fill]]:
    """Modules that hold such buffers, each with the way to fill it that its innermost model knows."""
    fills: dict[str, Fill] = {}
    for path, module in model.named_modules():
        fill = getattr(module, "_init_weights", None)
        if callable(fill):
            fills[path] = fill
        if _on_meta(module):
            known = [fills[above] for above in fills if not above or path == above or path.startswith(f"{above}.")]
            if known:
                yield path, module, known[-1]


def _on_meta(module: nn.Module) -> bool:
    return bool(module._non_persistent_buffers_set) and any(buffer.is_meta for buffer in _lasting(module).values())


def _lasting(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that no checkpoint has."""
    names = module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module._buffers.items() if name in names and buffer is not None}


def _fill_copy(module: nn.Module, fill: Fill, content: int) -> dict[str, torch.Tensor]:
    shell = copy.copy(module)
    shell._parameters = {
        name: None if parameter is None else nn.Parameter(torch.empty_like(parameter), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    shell._buffers = {
        name: None if buffer is None else torch.full_like(buffer, content, device="cpu")
        for name, buffer in module._buffers.items()
    }
    try:
        with torch.no_grad(), torch.device("cpu"):
            fill(shell)
    except Exception:  # the model's own code, on a module without its weights: the buffer stays unknown
        return {}
    return _lasting(shell)
