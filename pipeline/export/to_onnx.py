"""The export stage: a torch source → ONNX, unoptimized, with the configured names and dynamic dims."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from traceback import walk_tb
from typing import Final

import onnx_ir as ir
import torch
from sympy import Basic, Integer, false
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind, TensorArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from pipeline.config import ExportConfig
from pipeline.errors import Unsupported
from pipeline.export.call_watch import capture_output
from pipeline.export.custom_ops import custom_translations
from pipeline.export.exported import ExportedModel, name_dims, name_inputs_and_outputs
from pipeline.export.program_rewrites import (
    cast_subtrahends,
    copy_reduced_outputs,
    decompose_complex,
    move_complex_as_real,
    unsqueeze_scalars,
)
from pipeline.export.source import TorchSource
from pipeline.export.trace import forget_trace, trace_module
from pipeline.export.translations import translation_table
from pipeline.export.tree import input_tensors
from pipeline.export.user_code import advice_on_trace, first_line
from pipeline.export.writes import as_configured, live_writes, placeholders
from pipeline.runtime.tensors import dtype_name
from pipeline.turn import takes_turns


@takes_turns
def export_onnx(source: TorchSource, settings: ExportConfig, path: Path | None = None) -> ExportedModel:
    """Export the module; nothing is optimized here: passes do that, with proof.

    Args:
        source: the module in eval mode with its example, whose named dims have two elements or more.
        path: where to save the model, if anywhere. Weights are not copied before that.

    Raises:
        SourceError: torch.export cannot trace the module.
        Unsupported: an operator has no ONNX form, or torch cannot make this opset.
        UsageError: a dim that was asked to be dynamic came out constant.
    """
    with capture_output() as notes:
        source = as_configured(source, settings)
        program, checks = (source.program, ()) if source.program else trace_module(source)
        translated = _translate(program, settings.opset)
    forget_trace()
    model = translated.model
    _drop_constant_outputs(translated)
    _lift_buffers(translated, source)
    parameters = _parameters(model, source)  # before renaming, while names are torch's
    name_inputs_and_outputs(model, [spec.name for spec in source.inputs], source.outputs)
    name_dims(model, source.inputs, source.way_out)
    names = frozenset(str(value.name) for value in parameters)
    notes = (*source.notes, *checks, *dict.fromkeys(notes))
    ranges, unheld = _ranges(program, source)
    exported = ExportedModel(model, source, names, notes, find_computed_types(program), ranges, unheld)
    if path is not None:
        exported.save(path)
    return exported


@torch.no_grad()  # with gradients attention may take another way (T5), whose strides have no translation
def _translate(program: ExportedProgram, opset: int) -> torch.onnx.ONNXProgram:
    try:
        program = decompose_complex(program)
        move_complex_as_real(program)
        unsqueeze_scalars(program)
        cast_subtrahends(program)
        copy_reduced_outputs(program)
        result = torch.onnx.export(
            program,
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=opset,
            custom_translation_table={**translation_table(), **custom_translations()},
        )
    except Exception as error:  # the exporter's own errors have private types
        raise Unsupported(explain_untranslatable(error)) from error
    if result is None:
        raise Unsupported("torch.onnx.export returned no program; expected one with dynamo=True")
    got = result.model.opset_imports.get("")
    if got != opset:
        more = " or more" if got and opset < got else ""
        raise Unsupported(f"export.opset: asked for {opset}, torch could make {got} only; set it to {got}{more}")
    return result


def _drop_constant_outputs(translated: torch.onnx.ONNXProgram) -> None:
    """Remove the graph outputs that stand for no tensor, such as the length that a cache counts as a Python int.

    A call of the module gives no output tensor for them.
    """
    program, graph = translated.exported_program, translated.model.graph
    assert program is not None
    specs = [spec for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    kinds = [spec.arg for spec in specs if not isinstance(spec.arg, ConstantArgument)]
    if len(kinds) == len(graph.outputs):
        graph.outputs[:] = [
            value for value, kind in zip(list(graph.outputs), kinds, strict=True) if isinstance(kind, TensorArgument)
        ]


def _lift_buffers(translated: torch.onnx.ONNXProgram, source: TorchSource) -> None:
    """Make the lifted buffers inputs of the graph; their new values are outputs of the program already.

    Raises:
        Unsupported: the traced program writes to a buffer or an input that a call of the module does not write to.
    """
    program, graph = translated.exported_program, translated.model.graph
    assert program is not None
    own = dict(zip(placeholders(program), input_tensors(source.module, source.example), strict=False))
    written = ((own.get(target, target), is_buffer) for _, target, is_buffer in live_writes(program))
    known = {True: source.written_buffers, False: source.written_inputs}
    unseen = next((name for name, is_buffer in written if name not in known[is_buffer]), None)
    if unseen is not None:
        raise Unsupported(
            f"forward writes to {unseen!r} while torch exports it, and in a plain call it does not; let it do the same "
            "where torch.compiler.is_compiling() is true"
        )
    for value in source.lifted:
        if value.is_buffer:
            graph.inputs.append(graph.initializers.pop(value.target))
            graph.inputs[-1].const_value = None


def find_computed_types(program: ExportedProgram) -> tuple[str, ...]:
    """The floating types that the traced module computes in, its inner graphs included."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    values = [node.meta.get("val") for graph in graphs for node in graph.nodes if node.op == "call_function"]
    tensors = [leaf for value in values for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    floats = {tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point or tensor.dtype.is_complex}
    return tuple(sorted(map(dtype_name, floats)))


def _ranges(
    program: ExportedProgram, source: TorchSource
) -> tuple[dict[str, tuple[int, int | None]], dict[str, frozenset[int]]]:
    """The sizes of named dims for which the traced program holds, as far as torch knows.

    A trace may hold for fewer sizes than torch's range constraints say: the trace of a state space model may have fixed
    its number of chunks, or that the last chunk is full. torch then has a guard, which is not in the graph.

    Returns:
        Dim → (least size, largest size or None for no limit).
        Dim → the sizes below `SMALL` for which a guard fails; the program may compute something else there.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    tensors = [values.get(name) for name in program.graph_signature.user_inputs if isinstance(name, str)]
    shapes = [tensor.shape for tensor in tensors if isinstance(tensor, torch.Tensor)]
    ranges: dict[str, tuple[int, int | None]] = {}
    unheld: dict[str, frozenset[int]] = {}
    if len(shapes) != len(source.own_inputs):
        return ranges, unheld
    sizes = [size for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
    traced = {size.node.expr: int(size.node.hint) for size in sizes if size.node.expr.is_symbol}
    environment = sizes[0].node.shape_env if sizes else None
    guards = [guard.expr.xreplace(environment.replacements) for guard in environment.guards] if environment else []
    named = [
        (name, size.node.expr)
        for shape, spec in zip(shapes, source.own_inputs, strict=True)
        for size, name in zip(shape, spec.shape, strict=False)
        if isinstance(name, str) and isinstance(size, torch.SymInt)
    ]
    for name, symbol in named:
        limits = program.range_constraints.get(symbol)
        if limits is not None:
            largest = int(limits.upper) if limits.upper < NO_LARGEST else None
            equal = {other for known, other in named if known == name and other in traced}
            relevant = [guard for guard in guards if guard.free_symbols & equal and guard.free_symbols <= traced.keys()]
            if source.draws is not None:  # sizes follow from each other: a guard of several symbols says how
                relevant = [guard for guard in relevant if guard.free_symbols <= equal]
            guarded = _largest_size(relevant, traced, equal) if symbol in traced else None
            ranges[name] = (int(limits.lower), min(filter(None, (largest, guarded)), default=None))
            unheld[name] = frozenset(
                size for size in range(1, SMALL) if not all(_holds(guard, traced, equal, size) for guard in relevant)
            )
    return ranges, unheld


def _holds(guard: Basic, traced: Mapping[Basic, int], symbols: Set[Basic], size: int) -> bool:
    """Whether a guard holds if all `symbols` have this size, and the other symbols the size they were traced with."""
    values = {symbol: Integer(value) for symbol, value in {**traced, **dict.fromkeys(symbols, size)}.items()}
    return guard.xreplace(values) != false


def _largest_size(guards: Sequence[Basic], traced: Mapping[Basic, int], symbols: Set[Basic]) -> int | None:
    """The largest size for which the guards hold, given to all `symbols` together; None if there is no limit.

    Only a guard that fails at both of two large neighbouring sizes sets a limit: one that fails at some sizes, such as
    odd ones, concerns strides or a divisor.

    Args:
        guards: conditions on the symbols.
        traced: the size of each symbol in the trace.
        symbols: torch's symbols for one named dim.
    """
    ends = [guard for guard in guards if not any(_holds(guard, traced, symbols, size) for size in (FAR, FAR + 1))]
    if not ends:
        return None
    sizes = range(max(traced[symbol] for symbol in symbols), FAR)
    first = bisect_left(sizes, True, key=lambda size: not all(_holds(guard, traced, symbols, size) for guard in ends))
    return sizes[first - 1]


SMALL: Final = 65
"""Greater than any size that a draw chooses freely."""
FAR: Final = 2**14
"""Longer than any chunk, and short enough that no count of bytes reaches the bounds of an index."""
NO_LARGEST: Final = 2**31
"""An upper bound of torch that is at least this large means: no bound."""


def _parameters(model: ir.Model, source: TorchSource) -> list[ir.Value]:
    """The initializers that are parameters. A tied weight has one initializer and several names; any of them counts."""
    named = {name for name, _ in source.module.named_parameters(remove_duplicate=False)}
    return [value for name, value in model.graph.initializers.items() if name in named]


def explain_untranslatable(error: Exception) -> str:
    """The message for `error`, which `torch.onnx.export` raised; its second line is torch's own reason."""
    chain = list(_causes(error))
    reason = first_line(chain[-1])
    if advice := next(filter(None, map(advice_on_trace, chain)), None):
        return f"{advice}\n  {reason}"
    node = _failed_node(chain)
    if node is None:
        return f"torch.onnx cannot translate the model; another opset (export.opset) may do\n  {reason}"
    operator = _operator_name(node)
    return f"torch.onnx has no translation for {operator}{_caller(node)}; {_way_out(operator, reason)}\n  {reason}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _failed_node(chain: list[BaseException]) -> Node | None:
    """The node at which torch's exporter failed, from its frames: its message names a decomposed node only."""
    for error in reversed(chain):
        for frame, _ in reversed(list(walk_tb(error.__traceback__))):
            node = frame.f_locals.get("node")
            if isinstance(node, Node) and node.op == "call_function":
                return node
    return None


def _operator_name(node: Node) -> str:
    """`aten.unsqueeze.default`, or `_operator.floordiv` of a Python function; before torch decomposed it to prims."""
    target = node.target
    if str(target).startswith("prims."):
        target = node.meta.get("original_aten", target)
    if isinstance(target, str) or "OpOverload" in type(target).__name__:
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _caller(node: Node) -> str:
    """The end of a sentence, such as `, which module 'layers.0.mlp' (MLP) calls at model.py:12`."""
    stack = node.meta.get("nn_module_stack") or {}
    path, kind = list(stack.values())[-1] if stack else ("", "")
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if "File" in line]
    place = f" at {lines[-1]}" if lines else ""
    who = f"module {path!r} ({name.rpartition('.')[2]})" if path else f"the model ({name.rpartition('.')[2]})"
    return f", which {who if name else 'the model'} calls{place}"


def _way_out(operator: str, reason: str) -> str:
    """What to do about an operator without a translation; `reason` is torch's message."""
    if operator.partition(".")[0] not in TORCHS_OWN:
        return (
            "the operator belongs to another library: where torch.compiler.is_exporting() is true, let the module "
            "compute the same by torch's operators"
        )
    if "complex-valued" in reason:
        return "on complex tensors there is none: compute with their parts (torch.view_as_real)"
    if "No ONNX function found" in reason:
        return (
            "no opset has a form of it: compute the same by other torch operators, or compute it before the module and "
            "hand the result in as an input or a buffer"
        )
    return "try another opset (export.opset), or other torch operators that compute the same"


TORCHS_OWN = frozenset({"aten", "prims", "_operator", "math", "higher_order"})
