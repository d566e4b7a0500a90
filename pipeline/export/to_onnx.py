"""The export stage: a torch source → ONNX, unoptimized, with the names and the dynamic dims that were asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import onnx_ir as ir
import torch
from torch.export import ExportedProgram

from pipeline.config import ExportConfig
from pipeline.errors import Unsupported
from pipeline.export.blame import first_line
from pipeline.export.capture import capture
from pipeline.export.dims import name_dims
from pipeline.export.exported import ExportedModel
from pipeline.export.names import name_inputs_and_outputs
from pipeline.export.quiet import quiet
from pipeline.export.source import TorchSource, with_names

__all__ = ["export_onnx"]


def export_onnx(source: TorchSource, settings: ExportConfig, path: Path | None = None) -> ExportedModel:
    """Export the module; nothing is optimized, since passes do that and are proven.

    Args:
        source: the module in eval mode with its example, whose named dims have two elements or more.
        path: where to save the model, if anywhere. Weights are not copied before that.

    Raises:
        SourceMistake: torch.export cannot trace the module.
        Unsupported: an operator has no ONNX form, or the opset cannot be had.
        UserMistake: a dim that was asked to be dynamic came out constant.
    """
    source = with_names(source, settings)
    with quiet() as notes:
        program = capture(source)
        model = _translated(program, settings.opset)
    parameters = _parameters(model, source)  # before renaming, while names are torch's
    name_inputs_and_outputs(model, [spec.name for spec in source.inputs], source.outputs)
    name_dims(model, source.inputs)
    names = frozenset(str(value.name) for value in parameters)
    exported = ExportedModel(model, source, names, tuple(dict.fromkeys(notes)), _ranges(program, source))
    if path is not None:
        exported.save(path)
    return exported


@torch.no_grad()  # with gradients attention may take another way (T5), with strides that have no translation
def _translated(program: ExportedProgram, opset: int) -> ir.Model:
    try:
        made = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False, opset_version=opset)
    except Exception as error:  # the exporter's own errors have private types
        raise Unsupported(_untranslatable(error, program)) from error
    if made is None:
        raise Unsupported("torch.onnx.export returned no program; expected one with dynamo=True")
    got = made.model.opset_imports.get("")
    if got != opset:
        raise Unsupported(f"export.opset: asked for {opset}, torch could make {got} only; set it to 18 or more")
    return made.model


def _untranslatable(error: Exception, program: ExportedProgram) -> str:
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    op = _op(error)
    lines = [f"torch.onnx has no translation for {op}" if op else "torch.onnx cannot translate the model"]
    if op:
        lines += _whereabouts(op, program)
    lines.append(f"  {first_line(root)}")
    lines.append("  what to try: another opset (export.opset), or other torch operators that compute the same")
    return "\n".join(lines)


def _op(error: BaseException | None) -> str | None:
    """`aten._linalg_eigh.default`, from the sentences of the chain of exceptions."""
    while error is not None:
        found = re.search(r"target=torch\.ops\.([\w.]+)", str(error))
        if found:
            return found[1]
        error = error.__cause__
    return None


def _whereabouts(op: str, program: ExportedProgram) -> list[str]:
    """Module path and source line of the op in the traced program.

    The exporter decomposes ops first, so the name may differ by a leading underscore: compare without.
    """
    wanted = op.split(".")[1].lstrip("_")
    for node in program.graph.nodes:
        parts = str(node.target).split(".")
        if node.op != "call_function" or len(parts) < 2 or parts[1].lstrip("_") != wanted:
            continue
        stack = node.meta.get("nn_module_stack") or {}
        path, kind = list(stack.values())[-1] if stack else ("", "")
        frames = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if "File" in line]
        return [f"  in module {path or 'the top'!r} ({kind})", *(f"  at {frame}" for frame in frames[-1:])]
    return []


def _ranges(program: ExportedProgram, source: TorchSource) -> dict[str, tuple[int, int | None]]:
    """The sizes that each named dim may have in the traced program, as far as torch knows them."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    tensors = [values.get(name) for name in program.graph_signature.user_inputs if isinstance(name, str)]
    shapes = [tensor.shape for tensor in tensors if isinstance(tensor, torch.Tensor)]
    found: dict[str, tuple[int, int | None]] = {}
    if len(shapes) != len(source.inputs):
        return found
    for shape, spec in zip(shapes, source.inputs, strict=True):
        for size, name in zip(shape, spec.shape, strict=False):
            node = getattr(size, "node", None)
            limits = program.range_constraints.get(node.expr) if node is not None else None
            if isinstance(name, str) and limits is not None:
                largest = int(limits.upper) if limits.upper < NO_LARGEST else None
                found[name] = (int(limits.lower), largest)
    return found


NO_LARGEST: Final = 2**31
"""From here on torch's bounds stand for none."""


def _parameters(model: ir.Model, source: TorchSource) -> list[ir.Value]:
    """A tied weight has one initializer under one of its names: all of the names are compared."""
    named = {name for name, _ in source.module.named_parameters(remove_duplicate=False)}
    return [value for name, value in model.graph.initializers.items() if name in named]
