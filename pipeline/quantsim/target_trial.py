"""Operators that no table knows, tried on the target itself where that is a Python package.

A node is cut out as a model of its own, with its stored operands, and a process of its own opens it, since the package
may end the process. A model that is refused is the smallest one: it is saved.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Final

from onnx import NodeProto, ValueInfoProto

from passes.graph.index import extract
from passes.graph.inference import types_of
from passes.graph.op_facts import op_name
from passes.graph.traversal import reads_of
from passes.weights.detached import DetachedModel
from passes.weights.files import write_model
from pipeline.quantsim.profiles import TargetTable
from pipeline.quantsim.target_check import UNKNOWN, Obstruction, TargetReport, check_target
from pipeline.workspace import make_folder

TRIAL_S: Final = 120.0
"""Seconds for one node; to import a package takes most of them on a loaded machine."""

TRIALS: Final = {
    "onnxruntime": "onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])",
    "openvino": "openvino.Core().compile_model(openvino.Core().read_model(path), 'CPU')",
    "tensorrt": (
        "logger = tensorrt.Logger(tensorrt.Logger.ERROR); network = tensorrt.Builder(logger).create_network(0); "
        "parser = tensorrt.OnnxParser(network, logger); "
        "ok = parser.parse_from_file(path); assert ok, parser.get_error(0).desc()"
    ),
}
"""Package → a statement that opens the model at `path` or raises. coremltools is not among them: it reads no ONNX."""


def examine(model: DetachedModel, table: TargetTable, folder: Path) -> TargetReport:
    """Hold `model` against a table, and try the operators that it does not have on the target itself.

    Args:
        folder: where the smallest model of each refusal is saved; it is made when there is one.

    Returns:
        The report of `check_target` without the operators that the target takes, which are remarks.
    """
    report = check_target(model, table)
    unknown = [found for found in report.obstructions if found.reason == UNKNOWN]
    if not unknown or table.package not in TRIALS:
        return report
    version = _version_of(table.package)
    if not version:
        remark = f"{len(unknown)} operators that the table does not have were not tried: pip install {table.package}"
        return replace(report, remarks=(*report.remarks, remark))
    types = types_of(model.proto)
    left: list[Obstruction] = []
    remarks = [*report.remarks]
    for found in report.obstructions:
        part = _part_of(model, found.what, types) if found.reason == UNKNOWN else None
        if part is None:
            untried = f"{found.reason}; it was not tried alone, as the type of what it reads is not known"
            left.append(replace(found, reason=untried) if found.reason == UNKNOWN else found)
            continue
        path = folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', found.what)}.onnx"
        refusal = try_model(part, table.package, path)
        if refusal:
            reason = f"{found.reason}, and {table.package} {version} refuses it alone ({path}): {refusal}"
            left.append(replace(found, reason=reason))
        else:
            remarks.append(f"{found.what}: the table does not have it; {table.package} {version} takes it")
    return replace(report, obstructions=tuple(left), remarks=tuple(remarks))


def try_model(part: DetachedModel, package: str, path: Path) -> str:
    """Let `package` open a model in a process of its own; why it refuses the model, which is left at `path` then.

    Returns:
        One line; empty where the package takes the model, of which no file is left.
    """
    make_folder(path.parent)
    write_model(part, path)
    program = f"import sys, {package}; path = sys.argv[1]; {TRIALS[package]}"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=TRIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {TRIAL_S:.0f} s"
    if ended.returncode == 0:
        path.unlink()
        return ""
    lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    return lines[-1][:MOST_TEXT] if lines else f"its process ended with {ended.returncode}"


MOST_TEXT: Final = 300


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _part_of(model: DetachedModel, operator: str, types: dict[str, ValueInfoProto]) -> DetachedModel | None:
    """The first node of an operator as a model; None where a type is not known, or it stands in a body alone."""
    for node in (node for node in model.proto.graph.node if op_name(node) == operator):
        read = [name for name in reads_of(node) if name not in model.index.initializers]
        if all(name in types for name in read):
            outputs = list(_outputs(node, types))
            part = extract(model.proto, [node], inputs=[types[name] for name in dict.fromkeys(read)], outputs=outputs)
            return model.with_proto(part)
    return None


def _outputs(node: NodeProto, types: dict[str, ValueInfoProto]) -> Iterator[ValueInfoProto]:
    for name in filter(None, node.output):
        yield types.get(name, ValueInfoProto(name=name))
