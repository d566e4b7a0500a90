"""Run the model itself, on copies, and compare what it returned and wrote to with what an IR did.

Two results are compared as trees of tensors, and two tensors element by element.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from passes.proof.numbers import Tolerance, tolerance_for
from passes.suggest import describe_argument, with_article
from pipeline.export.tree import register_caches
from pipeline.importers.from_torch.modules import named_tensors
from pipeline.importers.from_torch.tensors import copy_with_strides, memory_of
from pipeline.runtime.tensors import dtype_name
from pipeline.torch_ir.arguments import feed
from pipeline.torch_ir.errors import ExecutionError
from pipeline.torch_ir.executor import IRExecutor
from pipeline.torch_ir.ir import IR
from pipeline.torch_ir.nodes import key_of
from pipeline.torch_ir.tree import Leaf, Tree, structure, under


@dataclass(frozen=True, slots=True)
class Pair:
    """One leaf on both sides. `why` says, without the path, how they differ if they cannot be compared as tensors."""

    path: str
    expected: Any
    found: Any
    why: str = ""


def pairs(result: Any, tree: Tree | None, outputs: Sequence[torch.Tensor]) -> Iterator[Pair]:
    """Every leaf of the model's `result` with that of the IR; a difference in structure is a pair with a reason.

    Without a recorded structure (an IR of pytorch-ir, or by hand) the tensors are paired in order.
    """
    if tree is None:
        yield from _in_order(result, outputs)
    else:
        yield from _walk(result, tree, outputs, "")


def _walk(result: Any, tree: Tree, outputs: Sequence[torch.Tensor], path: str) -> Iterator[Pair]:
    if isinstance(tree, Leaf):
        yield _leaf(result, tree, outputs, path)
        return
    kind, children = structure(result) or ("", {})
    if kind != tree.kind:
        yield Pair(path, result, None, f"the model gives {_describe_item(result)}, the IR {with_article(tree.kind)}")
        return
    if tree.keys is None and len(children) != len(tree.children):  # without names, only positions can be compared
        yield Pair(path, result, None, f"the model gives {len(children)} items, the IR {len(tree.children)}")
        return
    recorded = dict(zip(tree.keys or children, tree.children, strict=False))
    for key in dict.fromkeys([*children, *recorded]):
        below = under(path, key)
        if key not in recorded:
            yield Pair(below, children[key], None, f"the model gives {_describe_item(children[key])}, the IR nothing")
        elif key not in children:
            yield Pair(below, None, None, "the model gives nothing, the IR something")
        else:
            yield from _walk(children[key], recorded[key], outputs, below)


def _leaf(result: Any, leaf: Leaf, outputs: Sequence[torch.Tensor], path: str) -> Pair:
    if leaf.index is None:
        both_nan = result != result and leaf.value != leaf.value
        same = type(result) is type(leaf.value) and (result == leaf.value or both_nan)
        return Pair(path, result, leaf.value, "" if same else _constants(result, leaf.value))
    if not isinstance(result, torch.Tensor):
        return Pair(path, result, outputs[leaf.index], f"the model gives {_describe_item(result)}, the IR a tensor")
    return Pair(path, result, outputs[leaf.index])


def _constants(result: Any, recorded: Any) -> str:
    """The message for a constant; the model's value is shown if it is a number or a string."""
    plain = isinstance(result, bool | int | float | complex | str)
    return f"the model gives {repr(result) if plain else _describe_item(result)}, the IR the constant {recorded!r}"


def _in_order(result: Any, outputs: Sequence[torch.Tensor]) -> Iterator[Pair]:
    expected = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if len(expected) != len(outputs):
        yield Pair("", result, None, f"Output count mismatch: original={len(expected)}, ir={len(outputs)}")
        return
    for index, (left, right) in enumerate(zip(expected, outputs, strict=True)):
        yield Pair(str(index), left, right)


def _describe_item(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return "a tensor"
    return "None" if item is None else with_article(type(item).__qualname__)


OWN = {"float32": Tolerance(1e-5, 1e-5)}
"""As pytorch-ir: the same operators of torch run on both sides, so the order of sums differs in few places."""


@dataclass(frozen=True, slots=True)
class Difference:
    """`max_diff` and `mean_diff` are over elements that are finite on both sides, infinite where that says nothing."""

    is_close: bool
    max_diff: float
    mean_diff: float
    why: str = ""


def tolerance(dtype: torch.dtype, rtol: float | None = None, atol: float | None = None) -> Tolerance:
    """How far an element may be off, |a - b| ≤ atol + rtol·|a|: the caller's, else by dtype as
    docs/reference/tolerances.md says.

    A dtype that is listed nowhere, an integer or float8, has to be equal.
    """
    name = dtype_name(dtype)
    own = OWN.get(name) or tolerance_for(name)
    return Tolerance(own.atol if atol is None else atol, own.rtol if rtol is None else rtol)


def compare(
    expected: torch.Tensor, found: torch.Tensor, rtol: float | None = None, atol: float | None = None
) -> Difference:
    """`found` against `expected`: shape, dtype and values.

    NaN is equal to NaN, and an infinity to itself, in the same place; elsewhere they are counted in `why`. Integers and
    bools have to be equal whatever the tolerances.
    """
    if expected.shape != found.shape:
        return _report_mismatch(f"shape {list(found.shape)}, expected {list(expected.shape)}")
    if expected.dtype != found.dtype:
        return _report_mismatch(f"dtype {str(found.dtype)[6:]}, expected {str(expected.dtype)[6:]}")
    left, right = _wide(expected), _wide(found)
    if not left.numel():
        return Difference(True, 0.0, 0.0)
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return _compare_integers(left, right)
    return _compare_floats(left, right, tolerance(expected.dtype, rtol, atol))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, in a dtype that holds all its values and in which differences can be computed."""
    tensor = tensor.detach().to("cpu")
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.dtype.is_floating_point else tensor


def _compare_integers(left: torch.Tensor, right: torch.Tensor) -> Difference:
    unequal = left != right
    count = int(unequal.sum())
    if not count:
        return Difference(True, 0.0, 0.0)
    distance = (left[unequal].double() - right[unequal].double()).abs()
    # Two large integers may be one apart and the same as doubles; unequal is at least 1.
    worst, total = max(float(distance.max()), 1.0), max(float(distance.sum()), float(count))
    return Difference(False, worst, total / left.numel(), f"{count} of {left.numel()} elements differ")


def _compare_floats(left: torch.Tensor, right: torch.Tensor, allowed: Tolerance) -> Difference:
    finite = torch.isfinite(left) & torch.isfinite(right)
    same = (left == right) | (torch.isnan(left) & torch.isnan(right))
    odd = int((~finite & ~same).sum())
    if odd:
        return _report_mismatch(
            f"{odd} of {left.numel()} elements are NaN or infinite on one side only ({_counts(left, right)})"
        )
    error = (left[finite] - right[finite]).abs()
    if not error.numel():
        return Difference(True, 0.0, 0.0)
    over = int((error > allowed.atol + allowed.rtol * left[finite].abs()).sum())
    why = f"{over} of {left.numel()} elements differ by more than {_format_bound(allowed)}" if over else ""
    return Difference(not over, float(error.max()), float(error.mean()), why)


def _format_bound(allowed: Tolerance) -> str:
    return f"{allowed.atol:g} + {allowed.rtol:g} · |expected|" if allowed.rtol else f"{allowed.atol:g}"


def _counts(left: torch.Tensor, right: torch.Tensor) -> str:
    sides = (
        f"{int(torch.isnan(side).sum())} NaN and {int(torch.isinf(side).sum())} infinite {of}"
        for side, of in ((left, "expected"), (right, "found"))
    )
    return ", ".join(sides)


def _report_mismatch(why: str) -> Difference:
    return Difference(False, math.inf, math.inf, why)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model returned, and after the run: its buffers and parameters by name, its arguments and kwargs.

    `arguments` nest as they did before it, also where the model has put other tensors into a dict or a cache.
    """

    result: Any
    stored: dict[str, torch.Tensor]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]


def answer_of(model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
    """Run a deep copy of `model`, in the mode that it is in, on copies of the arguments.

    Raises:
        ExecutionError: the model cannot be copied, or does not take the arguments itself.
    """
    register_caches(model)
    own = copied_model(model)
    leaves, spec = pytree.tree_flatten(copy_arguments((tuple(inputs), dict(kwargs))))
    args, named = pytree.tree_unflatten(leaves, spec)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), same_randomness():
            result = own(*args, **named)
    except Exception as error:  # of whatever the model does
        raise ExecutionError(
            f"{type(model).__name__} itself does not run on these inputs, so there is nothing to compare with: "
            f"{type(error).__name__}: {error}"
        ) from error
    return Answer(result, stored_in(own), pytree.tree_unflatten(leaves, spec))


def stored_in(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all of their names."""
    return {name: tensor.detach() for name, tensor in named_tensors(model).items()}


def copied_model(model: nn.Module) -> nn.Module:
    """A deep copy of `model`, with buffers, parameters and plain attributes, but without gradients.

    Raises:
        ExecutionError: something in it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers(), *_with_history(model)):
        fresh = _copy(tensor)
        memo[id(tensor)] = nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception as error:  # of whatever the model holds
        raise ExecutionError(
            f"{type(model).__name__} cannot be copied, and verification runs nothing but a copy: "
            f"{_culprit(model, memo) or error}; take it out of the model for the time of the verification"
        ) from error


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with equal strides, since a model may read the memory between the elements of a slice."""
    return tensor.detach().clone() if memory_of(tensor) is None else copy_with_strides(tensor)


def _with_history(model: nn.Module) -> Iterator[torch.Tensor]:
    """Attributes with a gradient history, as weight_norm leaves them: torch does not deep-copy them."""
    for module in model.modules():
        yield from (held for held in vars(module).values() if isinstance(held, torch.Tensor) and not held.is_leaf)


def _culprit(model: nn.Module, memo: dict[int, Any]) -> str:
    """The first attribute that cannot be copied by itself, by its path."""
    for path, module in model.named_modules():
        for name, held in vars(module).items():
            if name == "_modules":
                continue
            try:
                copy.deepcopy(held, dict(memo))
            except Exception as error:  # of whatever it is
                return f"its attribute {f'{path}.{name}' if path else name!r}, {describe_argument(held)} ({error})"
    return ""


def copy_arguments(arguments: Any) -> Any:
    """The same tree with copied tensors, since a model may write to them; one in two places stays one.

    Caches are copied too, since a model writes into them.
    """
    made: dict[int, torch.Tensor] = {}

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = _copy(leaf)
        return made[id(leaf)]

    return pytree.tree_map(copy_leaf, arguments)


@contextmanager
def same_randomness() -> Iterator[None]:
    """Every run inside draws the same random values; afterwards the caller's generators have their former states. CUDA
    is asked where it is in use: a seed would wait for its begin, and be the caller's then."""
    on_cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=on_cards):
        torch.default_generator.manual_seed(0)
        for index in on_cards:
            torch.cuda.default_generators[index].manual_seed(0)
        yield


def pair_writes(
    ir: IR, model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any], answer: Answer, executor: IRExecutor
) -> Iterator[Pair]:
    """Pair the values, after the run, of everything that either side writes to.

    `model`, `inputs` and `kwargs` are as they were before the run.
    """
    yield from _pair_updated(ir, answer, executor)
    yield from _pair_left_out(ir, model, answer, executor)
    if not executor.writes:  # ops that write do so to copies, which nobody keeps
        yield from _pair_inputs(ir, feed(ir, inputs, kwargs).tensors, feed(ir, *answer.arguments).tensors, executor)


def _pair_updated(ir: IR, answer: Answer, executor: IRExecutor) -> Iterator[Pair]:
    """Buffers that the IR writes to."""
    graph = ir.graph
    for vid in graph.updates:
        value = graph.values[vid]
        expected = answer.stored.get(key_of(graph, value)) if vid in graph.sources else None
        if expected is not None:
            yield Pair(f"buffer {key_of(graph, value)}", expected, executor.updates[value.name])


def _pair_left_out(ir: IR, model: nn.Module, answer: Answer, executor: IRExecutor) -> Iterator[Pair]:
    """Buffers and parameters that the model writes to and the IR does not update."""
    graph, updates = ir.graph, executor.updates
    names = {key: graph.values[vid].name for vid, keys in graph.sources.items() for key in keys}
    updated = {key for vid in graph.updates for key in graph.sources.get(vid, ())}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for key, before in stored_in(model).items():
        after = answer.stored.get(key)
        if after is not None and key not in updated and not _same_bits(before, after):
            kind = "parameter" if key in parameters else "buffer"
            yield Pair(f"{kind} {key}", after, updates.get(names.get(key, ""), before))


def _pair_inputs(ir: IR, before: Mapping[str, Any], after: Mapping[str, Any], executor: IRExecutor) -> Iterator[Pair]:
    updates = executor.updates
    for vid in ir.graph.inputs:
        name = ir.graph.values[vid].name
        if name in updates or not _same_bits(before[name], after[name]):
            yield Pair(f"input {name}", after[name], updates.get(name, before[name]))


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit: cheaper than comparing values, and a NaN equals itself.

    Tensors without plain bits (sparse, quantized, meta, of a subclass) are taken to be equal.
    """
    if type(left) not in PLAIN or left.layout is not torch.strided or left.is_quantized or left.is_meta:
        return True
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


PLAIN = (torch.Tensor, nn.Parameter)
