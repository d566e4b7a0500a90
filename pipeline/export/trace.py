"""Trace a torch module: module → ExportedProgram, with errors that name the module and the line."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from pipeline.errors import SourceError
from pipeline.export.patches import apply_patches
from pipeline.export.program_rewrites import drop_checks
from pipeline.export.source import TorchSource
from pipeline.export.transformers_defaults import is_switchable_experts
from pipeline.export.tree import input_tensors, named_leaves
from pipeline.export.user_code import advice_on_trace, first_line, module_frame
from pipeline.importers.from_torch.modules import every_tensor, preserve_module_state
from pipeline.importers.from_torch.tensors import copy_with_strides, memory_of
from pipeline.turn import takes_turns

T = TypeVar("T")


def separate_memory(module: nn.Module, arguments: T) -> T:
    """Copy each tensor of `arguments` that shares memory with an earlier one or with a weight; strides are kept.

    Args:
        module: whose parameters and buffers count.
        arguments: a tree of any types that torch flattens.

    Returns:
        The tree with the copies; `arguments` itself if no tensor shares memory.
    """
    memories = [memory for leaf in pytree.tree_leaves(arguments) if (memory := memory_of(leaf)) is not None]
    weights = {memory_of(tensor) for tensor in every_tensor(module)} if memories else set()
    if len(set(memories)) == len(memories) and weights.isdisjoint(memories):
        return arguments
    seen = set(weights)

    def copy_if_shared(leaf: Any) -> Any:
        memory = memory_of(leaf)
        if memory is None or memory not in seen:
            seen.add(memory)
            return leaf
        return copy_with_strides(leaf)

    return pytree.tree_map(copy_if_shared, arguments)


@takes_turns
def trace_module(source: TorchSource) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Trace the module on its example, with every named dim left open; the model's checks of values are left out.

    Returns:
        The program, and notes for the report.

    Raises:
        SourceError: torch.export cannot trace the module.
    """
    args, kwargs = separate_memory(source.module, (source.example.args, source.example.kwargs))
    try:
        with preserve_module_state(source.module), apply_patches(source.module, is_traced=True):
            program = torch.export.export(
                source.module,
                args,
                kwargs,
                dynamic_shapes=_dynamic_shapes(source),
                strict=False,
                # If deferred, `reshape(2, 4)` on a dim of 2 would become an assertion, which ONNX cannot express: the
                # graph would call its batch dynamic and compute with 2. A guard makes the dim constant instead, and
                # `name_dims` reports it.
                prefer_deferred_runtime_asserts_over_guards=False,
            )
    except Exception as error:  # a user's forward and torch's tracer may raise anything
        where = module_frame(error, source.module)
        failed = dict(source.module.named_modules()).get(where[0]) if where else None
        place = f" in module {where[0]!r}\n  at {where[1]}" if where else ""
        operator = _operator_of(error)
        place += f"\n  operator {operator}" if operator else ""
        advice = _advice(error, failed)
        raise SourceError(
            f"torch.export cannot trace the model{place}\n  {first_line(error)}\n  what to try: {advice}"
        ) from error
    return program, drop_checks(program)


def forget_trace() -> None:
    """Let go of the last graph, whose nodes torch holds until it traces again: 300 MiB for 61 layers."""
    getattr(proxy_tensor, "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", {}).clear()


def _operator_of(error: BaseException) -> str:
    """The torch operator whose call raised: `aten.equal.default`; empty where none was running."""
    running = [frame.f_locals.get("func") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((str(found) for found in reversed(running) if isinstance(found, torch._ops.OpOverload)), "")


def _dynamic_shapes(source: TorchSource) -> dict[str, Any] | None:
    """The tree of the arguments with {axis: AUTO} in place of each tensor; None if no input has a named dim.

    AUTO and not a named Dim: a named one is refused as soon as the model bounds it (a table of positions, a stride),
    though the graph would be dynamic. Dims that AUTO silently makes constant are found by `name_dims`.
    """
    specs = dict(zip(input_tensors(source.module, source.example), source.own_inputs, strict=True))
    if not any(isinstance(dim, str) for spec in source.own_inputs for dim in spec.shape):
        return None
    axes = (
        {axis: torch.export.Dim.AUTO for axis, dim in enumerate(specs[name].shape) if isinstance(dim, str)}
        if isinstance(leaf, torch.Tensor)
        else None
        for name, leaf in named_leaves(source.module, source.example)
    )
    args = _in_place_of_leaves(source.example.args, axes)
    kwargs = _in_place_of_leaves(source.example.kwargs, axes)
    # torch wants one mapping by parameter name: positional ones take theirs from the signature.
    return dict(inspect.signature(source.module.forward).bind_partial(*args, **kwargs).arguments)


def _in_place_of_leaves(tree: Any, leaves: Iterator[Any]) -> Any:
    """The tree with the next of `leaves` at each leaf, in the order of flattening.

    torch wants a plain list where the example has a registered type, such as a cache.
    """
    kind = type(tree)
    if kind is dict:
        return {key: _in_place_of_leaves(child, leaves) for key, child in tree.items()}
    if kind in (tuple, list):
        return kind(_in_place_of_leaves(child, leaves) for child in tree)
    registered = pytree.SUPPORTED_NODES.get(kind)
    if registered is not None:
        return [_in_place_of_leaves(child, leaves) for child in registered.flatten_fn(tree)[0]]
    return next(leaves)


def _advice(error: Exception, failed: nn.Module | None) -> str:
    """What to try; `failed` is the module whose code raised, if known."""
    said = f"{type(error).__name__} {error}"
    if failed is not None and DATA_DEPENDENT.search(said) and is_switchable_experts(failed):
        return (
            "the model's experts are computed in a loop over those that a token was routed to; set "
            "experts_implementation to batched_mm or grouped_mm in the model's configuration"
        )
    return advice_on_trace(error) or next((advice for word, advice in ADVICE if word.search(said)), ADVICE_ON_ANY)


DATA_DEPENDENT = re.compile("data-dependent|DataDependent|DynamicOutputShape")

ADVICE = (
    (
        DATA_DEPENDENT,
        "an `if`, a loop or a size depends on values in a tensor: use torch.where, torch.cond or a fixed size; where "
        "an input decides it, as a grid of image patches does, hold its value in a module around the model",
    ),
    (
        re.compile("Couldn't swap"),
        "forward moves or converts the module's own weights (`self.proj.to(...)`): do that in the constructor",
    ),
    (
        re.compile("no fake impl|UnsupportedOperator|no meta (function|implementation)"),
        "the operator does not say the shape of its result: register that by register_fake of torch's library, or name "
        "a file with its infer in custom_ops",
    ),
    (
        re.compile("Must provide a tree_name"),
        "name the input in forward's signature: torch 2.13 fails on dynamic ones in **kwargs",
    ),
)

ADVICE_ON_ANY = "make torch.export.export(module, args, kwargs) work on its own, or export a submodule"
