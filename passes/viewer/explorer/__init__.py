"""The same scenes for Model Explorer (PyPI: ai-edge-model-explorer), which draws graphs on a server of its own.

main.py is the extension that Model Explorer loads (`model-explorer --extensions=passes.viewer.explorer model.onnx`).
This file makes plain data of the form that Model Explorer reads, and needs no package of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

ADAPTER: Final = "onnxline"
"""The id by which Model Explorer knows the extension."""

GRAPH: Final = "graph"
"""The id of the one graph of a model."""

Box = Mapping[str, Any]


def graph_nodes(scene: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The nodes of a scene, as `view_data` gives it, in Model Explorer's words."""
    boxes: Sequence[Box] = scene["boxes"]
    edges: list[list[dict[str, str]]] = [[] for _ in boxes]
    for source, target, value, _ in scene["edges"]:
        outputs = [text.partition(" ")[0] for text in boxes[source].get("outs", ())]
        place = outputs.index(value) if value in outputs else 0
        edges[target].append(
            {
                "sourceNodeId": str(source),
                "sourceNodeOutputId": str(place),
                "targetNodeInputId": str(len(edges[target])),
            }
        )
    return [
        {
            "id": str(place),
            "label": box["op"],
            "namespace": box.get("module", "").replace(".", "/"),
            "attrs": [{"key": key, "value": text} for key, text in _facts(box)],
            "incomingEdges": edges[place],
            "outputsMetadata": [
                {"id": str(at), "attrs": [{"key": "tensor", "value": text}]}
                for at, text in enumerate(box.get("outs", ()))
            ],
        }
        for place, box in enumerate(boxes)
    ]


def _facts(box: Box) -> list[tuple[str, str]]:
    facts = [("name", box["name"])]
    facts += [(name, text) for name, _, text in (line.partition(" = ") for line in box.get("attrs", ()))]
    facts += [(title, str(box[key])) for key, title in TITLES.items() if box.get(key)]
    return facts + [(f"constant {weight['name']}", weight["type"]) for weight in box.get("weights", ())]


TITLES: Final = {
    "module": "module",
    "by": "made by",
    "kind": "structure",
    "state": "difference",
    "twin": "in the other",
    "was": "type in the other",
}
"""What a box may say → how the panel calls it."""


def node_data(scene: Mapping[str, Any]) -> dict[str, str]:
    """Title → a table of one value for each node, as JSON: structures, the passes that made nodes, the difference, and
    the SQNR; tables without an entry are left out."""
    boxes: Sequence[Box] = scene["boxes"]
    tables: dict[str, str] = {}
    for key, title in VALUES.items():
        results = {str(at): {"value": box[key]} for at, box in enumerate(boxes) if box.get(key) not in (None, "")}
        if results:
            table = {"results": results, **({"gradient": GRADIENT} if key == "db" else {})}
            tables[title] = json.dumps({GRAPH: table})
    return tables


VALUES: Final = {"kind": "structure", "by": "made by", "state": "difference", "db": "SQNR in dB"}
GRADIENT: Final = [{"stop": 0, "bgColor": "#d1483e"}, {"stop": 1, "bgColor": "#3b9c6a"}]
