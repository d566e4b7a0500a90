"""The page of a viewer: data, script, style and the two bundled libraries in one file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from passes.viewer.scene import mark_difference, scene_of
from passes.visible import HIDDEN, visible_data, visible_markup
from passes.weights.detached import DetachedModel, OpenableModel, open_model

if TYPE_CHECKING:
    from passes.diff.model_matching import ModelMatching

HERE: Final = Path(__file__).parent


def view_models(
    model: OpenableModel,
    other: OpenableModel | None = None,
    *,
    errors: Mapping[str, float] | None = None,
    titles: tuple[str, str] = ("", ""),
) -> str:
    """The page of a model, or of two models with their difference drawn, as HTML.

    Args:
        model: a path, a message, a DetachedModel, or a result that has a model, such as a PassRun.
        other: the second model, in any of these forms; None for the page of one model.
        errors: value of `model` → SQNR in dB, such as a comparison or a simulation measures, as a colour.
        titles: of the models.

    Raises:
        ModelError: a model cannot be read.
    """
    first = open_model(model)
    second = None if other is None else open_model(other)
    return render(view_data(first, second, errors=errors, titles=titles))


def view_data(
    first: DetachedModel,
    second: DetachedModel | None = None,
    *,
    errors: Mapping[str, float] | None = None,
    titles: tuple[str, str] = ("", ""),
    matched: ModelMatching | None = None,
) -> dict[str, Any]:
    """What the page of one or two models draws, as plain data; the arguments are those of `view_models`. `matched`
    is used if it is the matching of `first` and `second`."""
    first = first.without_functions()
    scenes, summary = [scene_of(first, titles[0], errors=errors)], ""
    if second is not None:
        second = second.without_functions()  # nodes of functions are drawn, so they are matched
        from passes.diff import match_models  # not above: the page of one model needs no comparison
        from passes.diff.compare import compare_matched
        from passes.diff.formats import summarize

        if matched is None or matched.before is not first or matched.after is not second:
            matched = match_models(first, second)
        scenes.append(scene_of(second, titles[1]))
        mark_difference(scenes[0], scenes[1], matched)
        summary = summarize(compare_matched(matched))
    return {"scenes": [scene.as_data() for scene in scenes], "summary": summary}


def render(data: Mapping[str, Any]) -> str:
    """The page of what `view_data` gives."""
    title = " and ".join(scene["title"] for scene in data["scenes"] if scene["title"]) or "model"
    parts = {
        "title": visible_markup(title),
        "style": _read("viewer.css"),
        "data": script_json(data),
        "libraries": "\n".join(_library(name) for name in ("cytoscape", "dagre")),
        "script": _read("viewer.js"),
    }
    # All marks in one call: a name in the data may look like a mark.
    return re.sub(r"/\*(\w+)\*/", lambda mark: parts[mark[1]], _read("viewer.html"))


def script_json(data: Any) -> str:
    """JSON that no name can end early: it has no `<`, and no separator of lines."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    if HIDDEN.search(text) or ESCAPED.search(text):  # a walk over the data of 100,000 nodes takes seconds
        text = json.dumps(visible_data(data), ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


ESCAPED: Final = re.compile(r"\\[ubfr]")
"""How JSON begins the escape of a character that may be hidden; a name that holds a backslash may look like it."""


def _library(name: str) -> str:
    """A bundled library, with its licence before it."""
    return f"/* {name}\n{_read(f'{name}.LICENSE')}*/\n{_read(f'{name}.min.js')}"


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
