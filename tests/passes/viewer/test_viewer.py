"""The page of a graph: what it shows of one model and of two, in Chromium that must have nothing to complain about."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx.parser import parse_model as parse

from passes.optimize import optimize
from passes.viewer import scene_of, view_data, view_models
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

    def __init__(
        self, browser: Browser, content: str, folder: Path, system: Literal["light", "dark"] = "light"
    ) -> None:
        (folder / "view.html").write_text(content, encoding="utf-8")
        self.page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=system)
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


BEFORE = """
<ir_version: 10, opset_import: ["" : 20, "own" : 1]>
g (float[2, 4] x, float[2, 4] old, float[4] z) =>
(float[2, 4] y, float[2, 4] kept, float[2, 4] p, float[2, 4] q, float[2, 4] gone)
<float[4] w = {1, 2, 3, 4}, float s = {2}> {
    a = Add (x, w)
    b = Mul (a, s)
    kept = own.F (b)
    y = Relu (a)
    p = Exp (b)
    q = Log (b)
    gone = Sub (old, z)
}
<domain: "own", opset_import: ["" : 20]> F (x) => (y) { n = Neg (x)  y = Abs (n) }
"""

AFTER = """
<ir_version: 10, opset_import: ["" : 20, "own" : 1]>
g (float[N, 4] x, float[4] new, float[4] z) =>
(float[2, 4] y, float[2, 4] kept, float[2, 4] p, float[2, 4] q, float[4] more)
<float[4] w = {1, 2, 3, 5}, float s = {2}> {
    a = Add (x, w)
    b = Mul (a, s)
    kept = own.F (b)
    y = Tanh (a)
    p = Log (b)
    q = Exp (b)
    more = Exp (new)
}
<domain: "own", opset_import: ["" : 20]> F (x) => (y) { n = Neg (x)  y = Abs (n) }
"""

DRAWN = """
changed input x      in the other: x float[N,4]   | changed input x      in the other: x float[2,4]
only    input old                                 | only    input new
same    input z                                   | same    input z
changed Add a        w: w float32[4]              | changed Add a        w: w float32[4]
same    Mul b                                     | same    Mul b
same    Neg          (kept)                       | same    Neg          (kept)
same    Abs kept                                  | same    Abs kept
only    Relu y                                    | only    Tanh y
same    Exp p                                     | same    Log p
same    Log q                                     | same    Exp q
only    Sub gone                                  | only    Exp more
same    output y                                  | same    output y
same    output kept                               | same    output kept
changed output p                                  | changed output p
changed output q                                  | changed output q
only    output gone                               | only    output more
"""


def drawn_rows(boxes: list[dict[str, Any]]) -> list[str]:
    """A line for each box: its state, what it is, and what the other model has in place of it."""
    rows = []
    for box in boxes:
        name = "(kept)" if box["op"] == "Neg" else box["name"]  # a node of an inlined function
        constants = [f"{weight['name']}: {weight['was']}" for weight in box.get("weights", ()) if "was" in weight]
        other = [f"in the other: {box['was']}"] if "was" in box else []
        rows.append(" ".join([box["state"], box["op"], name, *other, *constants]))
    return rows


def test_the_picture_of_a_difference() -> None:
    """Inputs and outputs that one model has alone or otherwise, constants with other values, nodes of functions.

    The node that makes `y` is another, and is drawn so; `p` and `q` are made by nodes of both models, in turn.
    """
    scenes = view_data(open_model(parse(BEFORE)), open_model(parse(AFTER)))["scenes"]
    for side, scene in enumerate(scenes):
        expected = [" ".join(line.split("|")[side].split()) for line in DRAWN.strip().splitlines()]
        assert drawn_rows(scene["boxes"]) == expected
        twins = {box["name"]: box["twin"] for box in scene["boxes"] if "twin" in box}
        assert {*twins} >= {*"xzabypq", "kept"} and twins == {name: name for name in twins}


def test_a_model_and_itself_are_the_same() -> None:
    scenes = view_data(open_model(parse(BEFORE)), open_model(parse(BEFORE)))["scenes"]
    assert {box["state"] for scene in scenes for box in scene["boxes"]} == {"same"}


CHOOSE = """(name) => {
    const view = onnxlineViews[0];
    view.choose(view.reveal(view.scene.boxes.findIndex((box) => box.name === name)));
}"""


def test_the_panel_shows_what_the_other_model_has(browser: Browser, tmp_path: Path) -> None:
    opened = Opened(browser, view_models(parse(BEFORE), parse(AFTER)), tmp_path)
    colours = {(box["label"], box["colour"]) for box in boxes_of(opened.page)}
    assert {
        ("input\nz", "#8a8f98"),
        ("input\nx", "#d8a13a"),
        ("output\nmore", "#d1483e"),
        ("Add", "#d8a13a"),
    } <= colours
    for name, words in (("x", "x float[N,4]"), ("a", "changed; in the other: w float32[4]")):
        opened.page.evaluate(CHOOSE, name)
        assert words in opened.page.locator("#panel").inner_text()
    opened.close()


PLACES = """() => [...document.querySelectorAll(".graph > *")].map((part) => {
    const box = part.getBoundingClientRect();
    return [part.tagName, box.top, box.bottom];
})"""


def test_headings_of_two_models_stand_above_their_graphs(browser: Browser, tmp_path: Path) -> None:
    """However long they are, on a phone too; one model is named at the top alone."""
    titles = ("folder/" * 30 + "a.onnx", "b.onnx")
    opened = Opened(browser, view_models(layers(1, 4), layers(1, 5), titles=titles), tmp_path)
    for width in (1280, 360):
        opened.page.set_viewport_size({"width": width, "height": 740})
        first, graph, second, other = opened.page.evaluate(PLACES)
        assert [part[0] for part in (first, graph, second, other)] == ["H2", "DIV", "H2", "DIV"]
        assert first[2] <= graph[1] < graph[2] and second[2] <= other[1] < other[2]
        assert opened.page.evaluate("onnxlineViews.every((view) => view.cy.height() > 50)")
    opened.close()
    alone = Opened(browser, view_models(layers(1, 4), titles=titles), tmp_path)
    assert alone.page.locator("h2").count() == 0
    alone.close()


LUMINANCE = """() => {
    const parts = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const light = (text) => parts(text).map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const sum = (text) => light(text).reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
    const style = (element) => getComputedStyle(document.querySelector(element));
    const of = (element) => [style(element).color, style(element).backgroundColor];
    const drawn = (items, ...names) => names.map((name) => items[0].style(name));
    const cy = onnxlineViews[0].cy;
    return Object.entries({
        body: of("body"), header: of("header"), search: of("#search"), panel: of("#panel"),
        node: drawn(cy.nodes(), "color", "background-color"), edge: drawn(cy.edges(), "color", "text-background-color"),
    }).map(([name, pair]) => [name, ...pair.map(sum)]);
}"""
"""What has text → the relative luminance (WCAG 2) of the text and of what is behind it."""


@pytest.mark.parametrize("system", ["light", "dark"])
def test_text_is_read_in_light_and_in_dark(system: Literal["light", "dark"], browser: Browser, tmp_path: Path) -> None:
    """The page follows the system; the key `t` turns it to the other theme."""
    opened = Opened(browser, view_models(layers(1, 4)), tmp_path, system)
    for theme in (system, "light" if system == "dark" else "dark"):
        for name, ink, paper in opened.page.evaluate(LUMINANCE):
            assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 4.5, f"{name} cannot be read in {theme}"
            assert (ink > paper) == (theme == "dark"), f"{name} is not {theme}"
        opened.page.keyboard.press("t")
    opened.close()


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


def test_a_dim_that_inference_named_has_no_name() -> None:
    text = "(float[N, 4] x, int64[2] s) => (float[A, B] z) { y = Reshape (x, s) z = Relu (y) }"
    scene = scene_of(open_model(parse(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')))
    assert {(value, kind) for _, _, value, kind in scene.edges if value in "xy"} == {
        ("x", "float[N,4]"),
        ("y", "float[?,?]"),
    }


def test_constants_are_counted() -> None:
    boxes = scene_of(open_model(biased_attention())).boxes
    weight = next(box for box in boxes if box.get("makes") == "q0")["weights"][0]
    assert (weight["name"], sum(weight["bars"])) == ("wq", 32 * 32)
    assert weight["low"] < 0 < weight["high"]
    assert isinstance(open_model(biased_attention()), DetachedModel)


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        ("float16", -3, 3),
        ("bfloat16", -3, 3),
        ("int4", -3, 3),
        ("uint4", 0, 3),
        ("int2", -2, 1),
        ("float8_e4m3fn", -3, 3),
        ("float8_e4m3fnuz", -3, 3),
        ("float8_e5m2", -3, 3),
        ("float8_e5m2fnuz", -3, 3),
        ("float4_e2m1fn", -3, 3),
    ],
)
def test_constants_of_small_types_are_counted(dtype: str, low: int, high: int) -> None:
    """Each element once, also where two share a byte, and from the least value to the largest."""
    values = np.resize(np.arange(low, high + 1), (65, 33)).astype(
        dtype if dtype == "float16" else getattr(ml_dtypes, dtype)
    )
    weight = onnx.numpy_helper.from_array(values, "w")
    end = onnx.helper.make_tensor_value_info("y", weight.data_type, [65, 33])
    node = onnx.helper.make_node("Identity", ["w"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [], [end], [weight])
    opset = onnx.helper.make_opsetid("", 25)
    boxes = scene_of(open_model(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=13))).boxes
    (shown,) = boxes[0]["weights"]
    assert (shown["type"], shown["low"], shown["high"]) == (f"{dtype}[65, 33]", low, high)
    assert sum(shown["bars"]) == 65 * 33
    assert len([count for count in shown["bars"] if count]) == high - low + 1
