"""`python -m benchmarks.viewer [NODES…]`: how soon a graph is drawn, and frames a second while it moves.

The models are chains of modules with ten nodes each, ten modules in a block. A row has the milliseconds to the first
paint and until the page answers; then frames a second at dragging, at the wheel, and at the keys, a key a frame:
folded, and with every node unfolded where a graph may be (up to 6,000).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import onnx
from onnx import TensorProto, helper

from benchmarks.browser import open_browser

if TYPE_CHECKING:
    from playwright.sync_api import Page

SCOPES: Final = "pkg.torch.onnx.name_scopes"
OPERATORS: Final = ("Relu", "Tanh", "Abs", "Neg", "Sigmoid")
UNFOLDED_MOST: Final = 6000

WATCH: Final = """() => {
    window.times = [];
    const note = (now) => { window.times.push(now); window.next = requestAnimationFrame(note); };
    window.next = requestAnimationFrame(note);
}"""
RATE: Final = """() => {
    cancelAnimationFrame(window.next);
    return 1000 * (window.times.length - 1) / (window.times.at(-1) - window.times[0]);
}"""
PRESS: Final = """([keys, frames]) => new Promise((end) => {
    let frame = 0;
    const press = () => {
        document.dispatchEvent(new KeyboardEvent("keydown", {key: keys[frame % keys.length], bubbles: true}));
        frame += 1;
        if (frame < frames) requestAnimationFrame(press); else end();
    };
    requestAnimationFrame(press);
})"""


def make_model(count: int) -> onnx.ModelProto:
    """A chain of `count` nodes in modules, each tenth an Add of what its module began with."""
    nodes, start = [], "x"
    for at in range(count):
        before, module = f"v{at - 1}" if at else "x", ["", f"blocks.{at // 100}", f"blocks.{at // 100}.{at // 10}"]
        start = before if at % 10 == 0 else start
        inputs, operator = ([before, start], "Add") if at % 10 == 9 else ([before], OPERATORS[at % len(OPERATORS)])
        node = helper.make_node(operator, inputs, [f"v{at}"], name=f"n{at}")
        node.metadata_props.add(key=SCOPES, value=str([*module, node.name]))
        nodes.append(node)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", f"v{count - 1}")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def drag(page: Page) -> None:
    page.mouse.move(30, 300)
    page.mouse.down()
    for at in range(120):
        page.mouse.move(30 + 4 * (at % 60), 300 + (at % 40) * 5)
    page.mouse.up()


def turn_wheel(page: Page) -> None:
    page.mouse.move(600, 400)
    for at in range(60):
        page.mouse.wheel(0, 60 if at % 20 < 10 else -60)


def press_keys(page: Page) -> None:
    page.evaluate(PRESS, [["ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft", "z", "Z"], 120])


def rate_of(page: Page, move: Callable[[Page], None]) -> str:
    page.wait_for_timeout(1000)  # the page at rest
    page.evaluate(WATCH)
    move(page)
    return f"{page.evaluate(RATE):.0f}"


def measure(page: Page, file: Path, count: int) -> None:
    page.goto(file.as_uri())
    begins = "(name) => performance.getEntriesByName(name)[0].startTime"
    found = [f"{page.evaluate(begins, name):.0f}" for name in ("first-contentful-paint", "onnxline-ready")]
    for state in ("folded", "unfolded") if count <= UNFOLDED_MOST else ("folded",):
        if state == "unfolded":
            page.keyboard.press("+")
            found = ["", ""]
        rates = [rate_of(page, move) for move in (drag, turn_wheel, press_keys)]
        print(f"| {count:,} {state} | {' | '.join([*found, *rates])} |", flush=True)


def main(counts: list[int]) -> None:
    print("| nodes | first paint, ms | ready, ms | drag | wheel | keys |\n| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        for count in counts:
            model, page = Path(folder, f"{count}.onnx"), Path(folder, f"{count}.html")
            onnx.save(make_model(count), model)
            subprocess.run(
                [sys.executable, "-m", "onnxline", "view", model, "-o", page], check=True, capture_output=True
            )
            measure(browser.new_page(viewport={"width": 1280, "height": 800}), page, count)


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [5000, 100_000])
