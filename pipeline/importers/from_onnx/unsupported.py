"""Say everything that cannot be imported in one error, so that nobody has to find it out one by one."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import onnx

from pipeline.errors import Unsupported
from pipeline.importers.from_onnx.source import op_key

__all__ = ["module_path", "refuse_all"]


def refuse_all(nodes: Iterable[onnx.NodeProto], graph: str) -> None:
    """Raise Unsupported for `nodes`: each op type, how often it occurs, and where."""
    places: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        places.setdefault(op_key(node.domain, node.op_type), []).append(node)
    lines = [
        f"  - {kind}{NOTES.get(kind, '')}: {len(found)} × at {where(found)}" for kind, found in sorted(places.items())
    ]
    raise Unsupported(
        f"the model {graph!r} has {len(places)} op type{'s' if len(places) > 1 else ''} that onnxline cannot import:\n"
        + "\n".join(lines)
        + "\n"
        "Expected ops of the tables in pipeline/importers/from_onnx, or nodes that fold because their inputs are "
        "constants. Rewrite or skip the pass that made them, or add a function to the family file.",
        operators=sorted(places),
    )


def where(nodes: list[onnx.NodeProto]) -> str:
    first = [f"{node.name or node.output[0]!r}{f' in {path}' if (path := module_path(node)) else ''}" for node in nodes]
    return ", ".join(first[:3]) + (", …" if len(first) > 3 else "")


def module_path(node: onnx.NodeProto) -> str:
    """The torch module that `node` was exported from, e.g. "layers.0.attention.q_proj"; "" where it is not written.

    torch's exporter writes the scopes from the root inwards, and after the innermost module the name of the FX node.
    """
    written = next((prop.value for prop in node.metadata_props if prop.key == "pkg.torch.onnx.name_scopes"), "")
    try:
        scopes = ast.literal_eval(written) if written else []
    except (SyntaxError, ValueError):
        return ""
    return str(scopes[-2]) if isinstance(scopes, list) and len(scopes) > 1 else ""


NOTES = {"If": " (its condition is known only at run time)"}
