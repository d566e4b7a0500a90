"""What two models say of themselves: inputs, outputs, opsets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnx import ModelProto, ValueInfoProto

from passes.diff.found import HeaderChange
from passes.graph.formatting import spelled_type

__all__ = ["header_changes"]


def header_changes(before: ModelProto, after: ModelProto) -> Iterator[HeaderChange]:
    """Inputs and outputs are compared by name, since that is how callers find them, and by their order."""
    for said in (_versions, _inputs, _outputs):
        old, new = said(before), said(after)
        for what in dict.fromkeys((*old, *new)):
            follows = what.startswith("order") and old.keys() != new.keys()
            if old.get(what) != new.get(what) and not follows:
                yield HeaderChange(what, old.get(what, ""), new.get(what, ""))


def _versions(model: ModelProto) -> Mapping[str, str]:
    opsets = {f"opset {entry.domain or 'ai.onnx'}": str(entry.version) for entry in model.opset_import}
    return {"IR version": str(model.ir_version), **opsets}


def _inputs(model: ModelProto) -> Mapping[str, str]:
    stored = {tensor.name for tensor in model.graph.initializer}
    found = _signature("input", [info for info in model.graph.input if info.name not in stored])
    optional = [info for info in model.graph.input if info.name in stored]
    return {**found, **{f"input {info.name}": f"{spelled_type(info)}, has a default" for info in optional}}


def _outputs(model: ModelProto) -> Mapping[str, str]:
    return _signature("output", list(model.graph.output))


def _signature(what: str, infos: list[ValueInfoProto]) -> Mapping[str, str]:
    types = {f"{what} {info.name}": spelled_type(info) for info in infos}
    return {**types, f"order of {what}s": ", ".join(info.name for info in infos)}
