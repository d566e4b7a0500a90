"""The page of a viewer: data, script, style and the two bundled libraries in one file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import onnx

from passes.diff import match_models
from passes.diff.compare import compare_matched
from passes.diff.formats import summarize
from passes.viewer.scene import Scene, mark_difference, scene_of
from passes.visible import visible_data, visible_markup
from passes.weights.detached import DetachedModel, open_model

HERE: Final = Path(__file__).parent


def view_models(
    model: onnx.ModelProto | str | Path | DetachedModel,
    other: onnx.ModelProto | str | Path | DetachedModel | None = None,
    *,
    errors: Mapping[str, float] | None = None,
    titles: tuple[str, str] = ("", ""),
) -> str:
    """The page of a model, or of two models with their difference drawn, as HTML.

    Args:
        model, other: paths, messages or DetachedModels.
        errors: value of `model` → SQNR in dB, such as a comparison or a simulation measures, as a colour.
        titles: of the models.

    Raises:
        ModelError: a model cannot be read.
    """
    first = open_model(model)
    scenes = [scene_of(first, titles[0], errors=errors)]
    summary = ""
    if other is not None:
        second = open_model(other)
        matched = match_models(first, second)
        scenes.append(scene_of(second, titles[1]))
        mark_difference(scenes[0], scenes[1], matched)
        summary = summarize(compare_matched(matched))
    return render(scenes, summary)


def render(scenes: list[Scene], summary: str = "") -> str:
    """The page of one or two scenes."""
    title = " and ".join(scene.title for scene in scenes if scene.title) or "model"
    data = {"scenes": [scene.as_data() for scene in scenes], "summary": summary}
    parts = {
        "title": visible_markup(title),
        "style": _read("viewer.css"),
        "data": script_json(data),
        "libraries": "\n".join(_library(name) for name in ("cytoscape", "dagre")),
        "script": _read("viewer.js"),
    }
    return re.sub(
        r"/\*(\w+)\*/", lambda mark: parts[mark[1]], _read("viewer.html")
    )  # once: a name may look like a mark


def script_json(data: Any) -> str:
    """JSON that no name can end early: it has no `<`, and no separator of lines."""
    text = json.dumps(visible_data(data), ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _library(name: str) -> str:
    """A bundled library, with its licence before it."""
    return f"/* {name}\n{_read(f'{name}.LICENSE')}*/\n{_read(f'{name}.min.js')}"


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
