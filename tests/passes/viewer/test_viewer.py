"""The page of a graph: what it shows of one model and of two, in Chromium that must have nothing to complain about."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import pytest

from passes.diff import match_models
from passes.optimize import optimize
from passes.viewer import scene_of, view_models
from passes.viewer.scene import mark_difference
from passes.weights.detached import DetachedModel, open_model
from tests.support.browser import browser
from tests.support.onnx_models import biased_attention

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from passes.context import PassContext

__all__ = ["browser"]

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028\x1b[2J"


def layers(count: int, size: int) -> onnx.ModelProto:
    """A chain in `count` modules of `size` nodes."""
    nodes = []
    for place in range(count * size):
        node = onnx.helper.make_node(("Relu", "Tanh")[place % 2], [f"v{place}"], [f"v{place + 1}"], name=f"n{place}")
        scopes = ["", "layers", f"layers.{place // size}", f"n{place}"]
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(scopes))
        nodes.append(node)
    ends = [onnx.helper.make_tensor_value_info(name, 1, [4]) for name in ("v0", f"v{count * size}")]
    return onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:]))


def boxes_of(page: Page) -> list[dict[str, Any]]:
    return page.evaluate("onnxlineViews.flatMap(view => view.cy.nodes().map(node => node.data()))")


class Opened:
    """A page, with all that it complains of and asks for."""

    def __init__(self, browser: Browser, content: str, folder: Path, width: int = 1280) -> None:
        (folder / "view.html").write_text(content, encoding="utf-8")
        self.page = browser.new_page(viewport={"width": width, "height": 800})
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append("a dialog"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto((folder / "view.html").as_uri())

    def close(self) -> None:
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith(("file:", "data:"))] == []
        self.page.close()


PRESS_DOWN = """() => {
    const cy = onnxlineViews[0].cy, before = cy.pan().y;
    document.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowDown", bubbles: true}));
    return [cy.pan().y - before, cy.renderer().data.wheelZooming];
}"""
"""How far a key moves the graph, and whether a picture of the graph moves, until the keys rest."""


def test_a_graph_folds_and_is_searched(browser: Browser, tmp_path: Path) -> None:
    opened = Opened(browser, view_models(layers(60, 10)), tmp_path)
    page = opened.page
    shown = boxes_of(page)
    assert {"58\n10 nodes", "59\n10 nodes"} <= {box["label"] for box in shown if box.get("group")}
    page.fill("#search", "n444")
    page.press("#search", "Enter")
    assert page.locator("#panel h3").inner_text() == "Relu n444"
    assert {box["label"] for box in boxes_of(page)} >= {"Relu", "Tanh", "43\n10 nodes"}
    assert "44\n10 nodes" not in {box["label"] for box in boxes_of(page)}
    page.locator("body").press("Escape")
    page.locator("h1").click()
    page.keyboard.press("+")
    assert len(boxes_of(page)) == 602
    assert page.evaluate(PRESS_DOWN) == [-80, True]
    while page.evaluate("onnxlineViews[0].cy.renderer().data.wheelZooming"):
        page.wait_for_timeout(20)  # the page forbids to evaluate texts, which wait_for_function does
    page.keyboard.press("-")
    assert len(boxes_of(page)) < 10
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") in ("dark", "light")
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    opened.close()


def test_two_models_and_hostile_names(browser: Browser, tmp_path: Path, context: PassContext) -> None:
    model = biased_attention()
    model.graph.node[0].name = HOSTILE
    model.graph.input[0].name = model.graph.node[0].input[0] = HOSTILE + "x"
    after = optimize(model, ["onnxsim"], context=context).model
    opened = Opened(browser, view_models(model, after, errors={"scores": 33.0}, titles=(HOSTILE, "b")), tmp_path)
    page = opened.page
    assert page.locator(".graph").count() == 2
    assert {box["state"] for box in boxes_of(page)} == {"only", "same", "changed"}
    page.select_option("#colour", "kind")
    assert "qkv" in page.locator("#legend").inner_text()
    page.select_option("#colour", "db")
    page.fill("#search", "scores")
    page.press("#search", "Enter")
    assert "33 dB" in page.locator("#panel").inner_text()
    opened.close()


def test_what_is_drawn_of_a_difference(context: PassContext) -> None:
    model = open_model(biased_attention())
    after = optimize(model, ["onnxsim"], context=context).model
    scenes = scene_of(model), scene_of(after)
    mark_difference(*scenes, match_models(model, after))
    states = {box["makes"]: box["state"] for box in scenes[0].boxes if "makes" in box}
    assert (states["scores"], states["q0"]) == ("same", "only")
    twins = {box["name"]: box["twin"] for box in scenes[0].boxes if "twin" in box}
    assert set(twins.values()) <= {box["name"] for box in scenes[1].boxes}


@pytest.mark.parametrize("name", [HOSTILE, "/*script*/", "a.b.c"])
def test_names_stay_data(name: str) -> None:
    model = layers(1, 2)
    model.graph.node[0].name = name
    page = view_models(model)
    text = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert text is not None
    (scene,) = json.loads(text[1])["scenes"]
    assert scene["boxes"][1]["name"].startswith(name[:8])
    assert page.count("<script") == 3


def test_constants_are_counted() -> None:
    boxes = scene_of(open_model(biased_attention())).boxes
    weight = next(box for box in boxes if box.get("makes") == "q0")["weights"][0]
    assert (weight["name"], sum(weight["bars"])) == ("wq", 32 * 32)
    assert weight["low"] < 0 < weight["high"]
    assert isinstance(open_model(biased_attention()), DetachedModel)
