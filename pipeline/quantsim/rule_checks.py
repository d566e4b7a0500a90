"""Selectors of `quantsim.rules` that match nothing whatever the run makes of the model, refused before it.

Steps rename tensors and write other operators, so whether a tensor or a node is there is known of the final model
alone. A kind of selector, a structure or an operator that does not exist is known before, and so is a module that no
node of an ONNX file names, since no step makes modules.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from passes.graph.traversal import every_node
from passes.load import load_model
from passes.provenance.annotations import module_path_of
from passes.suggest import is_named, nearest
from pipeline.config import QuantSimConfig, RunConfig, locate
from pipeline.errors import UsageError
from pipeline.quantsim.placement import refuse_selector


def check_rules(config: RunConfig) -> None:
    """Refuse selectors of which it is known before the run that they match nothing.

    Raises:
        UsageError: naming the selector, and what there is.
    """
    selectors = list((config.quantsim or QuantSimConfig()).rules)
    for selector in selectors:
        refuse_selector(selector)
    patterns = [selector.partition(":")[::2] for selector in selectors]
    is_file = config.model.onnx is not None and not config.model.part_names
    nodes = list[onnx.NodeProto]()
    if is_file and any(kind in ("op", "module") for kind, _ in patterns):
        model = load_model(locate(str(config.model.onnx)))
        nodes = [node for graph in (model.graph, *model.functions) for node in every_node(graph)]
    known = {"op": _operators() | {node.op_type for node in nodes}}
    if config.custom_ops:
        del known["op"]
    if is_file:
        places = filter(None, map(module_path_of, nodes))
        known["module"] = {path for place in places for path in place.paths}
    for kind, pattern in patterns:
        if kind in known and not _matches(pattern, known[kind]):
            there = "no module of the model has a name" if not known[kind] else f"there is no such {kind}"
            raise UsageError(
                f"quantsim.rules: '{kind}:{pattern}' matches no tensor; {there}{nearest(pattern, known[kind])}"
            )


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(is_named(name, pattern) for name in names)


def _operators() -> set[str]:
    """The operators of ONNX and onnxruntime, which steps may write."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema  # pyright: ignore

    return {schema.name for schema in (*onnx.defs.get_all_schemas(), *get_all_operator_schema())}
