"""Makes what forward writes to inputs and outputs of the graph, which has no memory between two calls.

A buffer that forward writes to becomes an input, and its new value an output, if an output of the graph depends on what
it held before; a count that nobody reads is left alone. Of an input that forward writes to the new value is an output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from torch._decomp import get_decompositions
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec
from torch.fx import Node
from torch.utils import _pytree as pytree

from passes.graph.index import take_name
from passes.suggest import plural
from pipeline.config import ExportConfig, InputConfig
from pipeline.errors import ConfigError, Unsupported
from pipeline.export.call_watch import capture_output, shorten
from pipeline.export.source import InputSpec, Lifted, TorchSource, input_spec, is_float, with_names
from pipeline.export.trace import trace_module
from pipeline.export.tree import input_tensors
from pipeline.export.user_code import advice_on_trace, first_line
from pipeline.importers.from_torch.functionalize import functionalize_program
from pipeline.importers.from_torch.tensors import memory_of
from pipeline.runtime.tensors import dtype_name, to_numpy


def as_configured(source: TorchSource, settings: ExportConfig) -> TorchSource:
    """The source as `export:` asks for it: under its names, and with what forward writes to as inputs and outputs.

    Raises:
        ConfigError: there are more or fewer names than tensors; or `model.inputs` names a buffer that is no input.
        SourceError: torch.export cannot trace the module.
        Unsupported: forward writes to a buffer or an input, and `export.written_buffers` is refuse; or it writes to
            what cannot be an input and an output.
    """
    if source.program is not None:
        return source
    source = with_names(source, settings)
    if source.lost_writes:
        raise Unsupported(source.lost_writes[0])
    if source.written_buffers or source.written_inputs:
        source = _lift_writes(source, settings)
    unused = sorted(source.declared.keys() - {value.target for value in source.lifted})
    if unused:
        raise ConfigError(
            f"model.inputs: {unused[0]!r} is a buffer that no output depends on after a write of forward, so it is no "
            "input of the graph; leave this entry out"
        )
    return source


def _lift_writes(source: TorchSource, settings: ExportConfig) -> TorchSource:
    _check_memory(source)
    with capture_output():
        traced, checks = trace_module(source)
        program = _with_statistics_apart(_functionalize(traced))
    pairs = zip(input_tensors(source.module, source.example), source.own_inputs, strict=True)
    own = dict(zip(placeholders(program), pairs, strict=True))
    buffers = dict(source.module.named_buffers(remove_duplicate=False))
    taken = {*(spec.name for spec in source.inputs), *source.outputs}
    inputs, lifted, news = list(source.inputs), list[Lifted](), list[str]()
    for after, target, is_buffer in live_writes(program):
        if is_buffer:
            before = take_name(target, taken)
            value = source.buffers.get(target, buffers[target]).detach()
            inputs.append(_state_spec(before, target, value, source.declared.get(target, InputConfig())))
        else:
            target, spec = own[target]
            before = spec.name
            if _is_returned(program, after, source.outputs, f"{before}_out"):
                continue
        news.append(after)
        lifted.append(Lifted(target, is_buffer, before, take_name(f"{before}_out", taken)))
    if lifted and settings.written_buffers == "refuse":
        shown = ", ".join(f"{'the buffer' if value.is_buffer else 'the input'} {value.target!r}" for value in lifted)
        raise Unsupported(
            f"forward writes to {shown}, and export.written_buffers is refuse: an ONNX graph has no memory between "
            "two calls; return the new value from forward, or set export.written_buffers: lift, by which a buffer "
            "becomes an input and its new value an output"
        )
    lost = sorted(source.written_buffers - {*program.graph_signature.buffers_to_mutate.values()})
    if lost:
        raise Unsupported(
            f"forward changes the buffer {lost[0]!r}, and torch.export loses the change, as where forward sets "
            "self._buffers[…], or a module that assigns to its buffer stands in two places: write in place, as in "
            f"self.{lost[0]}.copy_(value)"
        )
    idle = sorted(source.written_buffers - {value.target for value in lifted if value.is_buffer})
    with capture_output():
        program = _returning(program, news)
    return replace(
        source,
        inputs=tuple(inputs),
        outputs=(*source.outputs, *(value.after for value in lifted)),
        lifted=tuple(lifted),
        program=program,
        notes=(*source.notes, *checks, *describe_lifted(lifted, idle)),
    )


def _functionalize(program: ExportedProgram) -> ExportedProgram:
    """
    Raises:
        Unsupported: a write that torch cannot turn into a value.
    """
    try:
        return functionalize_program(program)
    except Exception as error:  # torch's own, of any type
        advice = advice_on_trace(error) or "write in place to a buffer of the module, as in self.state.copy_(value)"
        raise Unsupported(
            f"torch cannot make a value of what forward writes: {advice}\n  {first_line(error)}"
        ) from error


def _check_memory(source: TorchSource) -> None:
    """Refuse a written buffer that shares its memory with another tensor of the module, which is a view of it."""
    stored = {**dict(source.module.named_parameters()), **dict(source.module.named_buffers())}
    for name in sorted(source.written_buffers & stored.keys()):
        memory = memory_of(stored[name])
        shared = (key for key, tensor in stored.items() if key != name and memory_of(tensor) == memory is not None)
        alias = next(shared, None)
        if alias is not None:
            raise Unsupported(
                f"forward writes to the buffer {name!r}, which shares its memory with {alias!r}: torch.export loses "
                f"such a write; keep one of the two as a buffer, and take the other from it in forward"
            )


def describe_lifted(lifted: Collection[Lifted], idle: Collection[str] = ()) -> Iterator[str]:
    """Sentences for the user on inputs and outputs that forward's signature does not show, and on writes left out."""
    states = [value for value in lifted if value.is_buffer]
    renamed = {value: f"{value.target} as " for value in states if value.target != value.before}
    written = [f"{value.before} as {value.after}" for value in lifted if not value.is_buffer]
    if states:
        pairs = shorten([f"{renamed.get(value, '')}{value.before} → {value.after}" for value in states])
        yield (
            f"forward writes to {plural(len(states), 'buffer')}, of which the graph takes the old value as an input "
            f"and returns the new one as an output ({pairs}): feed each output to the next call"
        )
    if written:
        yield f"forward writes to what it is given, and the graph returns the new value: {shorten(written)}"
    if idle:
        yield f"forward writes to {shorten(idle)}, on which no output depends: the graph leaves that out"


def _with_statistics_apart(program: ExportedProgram) -> ExportedProgram:
    """The program with BatchNorm in train mode as several operators, since its output reads no running statistics."""
    if not any(node.target is BATCH_NORM for node in program.graph.nodes):
        return program
    return program.run_decompositions(get_decompositions([BATCH_NORM]))


BATCH_NORM: Final = torch.ops.aten._native_batch_norm_legit_functional.default


def live_writes(program: ExportedProgram) -> Iterator[tuple[str, str, bool]]:
    """(new value, what it belongs to, whether that is a buffer) of each write of a functional program that can be seen.

    A write to an input always can. One to a buffer can if an output, or the new value of another such buffer, depends
    on what the buffer held before, and the new value is another one. Of an input the placeholder is named.
    """
    signature = program.graph_signature
    if not signature.buffers_to_mutate and not signature.user_inputs_to_mutate:
        return
    nodes = {node.name: node for node in program.graph.nodes}
    holders = {target: nodes[name] for name, target in signature.inputs_to_buffers.items()}
    seen: set[Node] = set()
    for name in (*(name for name in signature.user_outputs if isinstance(name, str)), *signature.user_inputs_to_mutate):
        _add_ancestors(nodes[name], seen)
    # `self.table = self.table.to(device)` writes what the buffer holds: its new value is the buffer itself.
    mutations = signature.buffers_to_mutate.items()
    waiting = {name: target for name, target in mutations if nodes[name] is not holders[target]}
    live = set[str]()
    while found := [name for name, target in waiting.items() if holders[target] in seen]:
        for name in found:
            live.add(name)
            del waiting[name]
            _add_ancestors(nodes[name], seen)
    yield from ((name, target, True) for name, target in signature.buffers_to_mutate.items() if name in live)
    yield from ((name, target, False) for name, target in signature.user_inputs_to_mutate.items())


def _add_ancestors(node: Node, seen: set[Node]) -> None:
    pending = [node]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += node.all_input_nodes


def _returning(program: ExportedProgram, news: Collection[str]) -> ExportedProgram:
    """The program whose last outputs are the new values `news`; it writes to nothing."""
    signature, output = program.graph_signature, program.graph.output_node()
    results: Any = output.args[0]
    pairs = list(zip(signature.output_specs, results, strict=True))
    kept = [pair for pair in pairs if pair[0].kind is OutputKind.USER_OUTPUT]
    by_name = {spec.arg.name: (spec, item) for spec, item in pairs if spec.kind is not OutputKind.USER_OUTPUT}
    kept += [
        (OutputSpec(OutputKind.USER_OUTPUT, spec.arg, None), item) for spec, item in map(by_name.__getitem__, news)
    ]
    output.args = (tuple(item for _, item in kept),)
    program.graph_module.recompile()
    entry = program.module_call_graph[0]
    assert entry.signature is not None
    out_spec = pytree.tree_structure(tuple(range(len(kept))))
    entry.signature = replace(entry.signature, outputs=[spec.arg for spec, _ in kept], out_spec=out_spec)
    return program._update(program.graph_module, replace(signature, output_specs=[spec for spec, _ in kept]))


def placeholders(program: ExportedProgram) -> list[str]:
    """The placeholders of the tensors among forward's arguments, in order."""
    values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    names = (name for name in program.graph_signature.user_inputs if isinstance(name, str))
    return [name for name in names if isinstance(values.get(name), torch.Tensor)]


def _is_returned(program: ExportedProgram, after: str, outputs: Collection[str], name: str) -> bool:
    """Whether forward returns the new value itself under the very name that it would get."""
    returned = [item for item in program.graph_signature.user_outputs if isinstance(item, str)]
    return (after, name) in zip(returned, outputs, strict=False)


def _state_spec(name: str, target: str, value: torch.Tensor, declared: InputConfig) -> InputSpec:
    dtype = dtype_name(value.dtype)
    if value.is_complex():
        raise Unsupported(
            f"forward writes to the buffer {target!r} of {dtype}, and a graph of ONNX takes no complex numbers; hold "
            "the parts in a buffer of floats (torch.view_as_real), and use torch.view_as_complex where they are read"
        )
    known: dict[str, Any] = {"shape": tuple(value.shape), "dtype": dtype}
    wrong = next((key for key, own in known.items() if getattr(declared, key) not in (None, own)), None)
    if wrong or declared.dynamic:
        raise ConfigError(
            f"model.inputs.{target}: found {wrong or 'dynamic'}, but this is a buffer of the module, whose shape and "
            "dtype are its own; expected range and seed only"
        )
    if declared.range is None:
        declared = declared.model_copy(update={"range": _range_of_state(value, dtype)})
    spec = input_spec(name, declared, tuple(value.shape), dtype)
    return spec if value.is_meta else replace(spec, first=to_numpy(value))


def _range_of_state(value: torch.Tensor, dtype: str) -> tuple[float, float] | None:
    """A range around the values that the buffer holds at first; None for the default of its dtype."""
    if value.is_meta or not value.numel() or dtype == "bool" or not torch.isfinite(value).all():
        return None
    low, high = float(value.min()), float(value.max())
    if is_float(dtype):
        if low == high:  # a variance of ones stays positive
            low, high = sorted((low / 2, low))
        return (low, high) if low < high else None
    most = torch.iinfo(value.dtype).max
    return low, min(high + (1 if low < high else 2), most)
