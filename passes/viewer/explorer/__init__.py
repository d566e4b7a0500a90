"""The same scenes for Model Explorer (PyPI: ai-edge-model-explorer), which draws graphs on a server of its own.

main.py is the extension that Model Explorer loads (`model-explorer --extensions=passes.viewer.explorer model.onnx`).
This file makes plain data of the form that Model Explorer reads, and needs no package of it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ADAPTER: Final = "onnxline"
"""The id by which Model Explorer knows the extension."""

Box = Mapping[str, Any]


def graph_id(path: str | Path) -> str:
    """The id of the one graph of a file. Model Explorer renames the second of two graphs that have one id, finds no
    table for the new name, and gives models by their file names, which two folders may have in common."""
    return os.path.abspath(path)  # noqa: PTH100 # as Model Explorer does, without following links


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


def node_data(scene: Mapping[str, Any], path: str | Path) -> dict[str, str]:
    """Title → a table of one value for each node of the file, as JSON: structures, the passes that made nodes, the
    difference, and the SQNR; tables without an entry are left out."""
    boxes: Sequence[Box] = scene["boxes"]
    tables: dict[str, str] = {}
    for key, title in VALUES.items():
        known = {str(at): box[key] for at, box in enumerate(boxes) if box.get(key, "") != ""}
        if not known:
            continue
        if key == "db":
            results = {at: EQUAL if value is None else {"value": value} for at, value in known.items()}
            table = {"results": results, "gradient": GRADIENT}
        else:
            colours = _colours(known.values())
            table = {"results": {at: {"value": value, "bgColor": colours[value]} for at, value in known.items()}}
        tables[title] = json.dumps({graph_id(path): table})
    return tables


def _colours(words: Iterable[str]) -> dict[str, str]:
    """A colour for each word: Model Explorer has none of its own for a value that is no number."""
    ranked = [word for word, _ in Counter(words).most_common() if word not in STATES]
    return {**STATES, **{word: PALETTE[min(at, len(PALETTE) - 1)] for at, word in enumerate(ranked)}}


VALUES: Final = {"kind": "structure", "by": "made by", "state": "difference", "db": "SQNR in dB"}
GRADIENT: Final = [{"stop": 0, "bgColor": "#d1483e"}, {"stop": 1, "bgColor": "#3b9c6a"}]
EQUAL: Final = {"value": "equal", "bgColor": "#3b9c6a"}
STATES: Final = {"only": "#e58d86", "changed": "#e6c687", "same": "#c8cbd0"}
PALETTE: Final = ("#8fb0d6", "#93c9c4", "#b4d3a1", "#e6d290", "#efbd98", "#e3a5ae", "#c3b3d6", "#cab8a8", "#c8cbd0")
"""Light colours, since Model Explorer writes on them in black; the last one is that of all further words."""
