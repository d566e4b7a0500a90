"""`report.html` of a real run, clicked through in a headless Chromium that must have nothing to complain about."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import Pipeline, RunConfig
from pipeline.report import Drawing, Wire
from tests.pipeline.report.sample_report import html_of, pictures, report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PHONE = {"width": 360, "height": 740}


class Watched:
    """A page with all that it complains of, and all that it asks for."""

    def __init__(self, page: Page, file: Path) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.set_default_timeout(5000)
        page.goto(file.as_uri())

    def is_clean(self) -> bool:
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith(("file:", "data:"))] == []
        return True

    def fits(self) -> bool:
        """Whether nothing makes the page itself scroll sideways."""
        return self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_click_through_a_run(config_file, browser: Browser, tmp_path: Path) -> None:
    """One in which a pass is skipped, and another one is reverted since it merges Q, K and V all the same."""
    config = RunConfig.from_yaml(config_file(passes={"skip": ["fuse_qkv"]}, runtime={"backends": ["onnxruntime"]}))
    result = Pipeline(config, tmp_path / "out").run()
    seen = Watched(browser.new_page(viewport={"width": 1280, "height": 900}), tmp_path / "out/report.html")
    page = seen.page

    assert page.locator("h1").inner_text().startswith("block")
    assert page.evaluate("performance.getEntriesByName('onnxline-ready').length") == 1
    _open_every_pass(page, changed=sum(row.changed for row in result.passes))
    _choose_every_structure(page)
    _search_and_sort(page)
    _see_the_graph_drawn(page)
    _switch_the_light(page)
    page.set_viewport_size(PHONE)
    assert seen.fits()
    assert seen.is_clean()


def _open_every_pass(page: Page, changed: int) -> None:
    assert page.locator("details.pass").count() == changed
    assert "skip: fuse_qkv" in page.locator(".row.skipped .reason").first.inner_text()
    for entry in page.locator(".timeline details").all():
        entry.locator("summary").click()
        assert entry.locator(":scope > :not(summary)").first.is_visible()
    reverted = page.locator("details.pass.reverted")
    assert "Broke qkv" in reverted.locator(".lost").inner_text()
    assert "MatMul" in " ".join(reverted.locator(".diff del").all_inner_texts())
    page.get_by_role("button", name="Only what changed").click()
    assert not page.locator("details.quiet").first.is_visible()
    assert page.locator("details.pass").first.is_visible()


def _choose_every_structure(page: Page) -> None:
    for button in page.locator(".instance").all():
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        assert page.locator(".figure:visible").count() == page.locator(".group").count()
    titles = page.locator(".panel figcaption b").all_inner_texts()
    assert titles == ["source", "final model", "taken back"]
    shapes = page.locator(".panel figcaption code").all_inner_texts()
    assert shapes[:2] == ["3 × 32×32", "3 × 32×32"]
    assert "32×96" in shapes[2]


def _search_and_sort(page: Page) -> None:
    rows, ops = page.locator("#rows tr"), page.locator("#rows td:nth-child(2)")
    page.get_by_role("button", name="Table").click()
    everything = rows.count()
    page.locator("#query").fill("op:softmax")
    assert ops.all_inner_texts() == ["Softmax"]
    page.locator("#query").fill("pass:onnxsim op:gemm")
    assert 0 < rows.count() < everything
    assert set(ops.all_inner_texts()) == {"Gemm"}
    assert page.locator("#count").inner_text() == f"{rows.count()} of {everything} nodes"
    page.locator("#query").fill("nothing is called that")
    assert rows.count() == 0
    page.locator("#query").fill("")
    page.get_by_role("button", name="op", exact=True).click()
    assert ops.all_inner_texts() == sorted(ops.all_inner_texts())
    page.get_by_role("button", name="op", exact=True).click()
    assert ops.all_inner_texts() == sorted(ops.all_inner_texts(), reverse=True)
    box = page.locator(".panel:nth-child(2) .kept").first
    box.focus()
    page.keyboard.press("Enter")
    assert page.locator("#query").input_value() == f"name:{box.get_attribute('data-name')}"
    assert rows.count() >= 1


def _see_the_graph_drawn(page: Page) -> None:
    """The viewer of both models, in a frame that is made when it is asked for."""
    page.get_by_role("button", name="Drawn").click()
    viewer = page.frame_locator("#drawing")
    assert viewer.locator(".graph h2").all_inner_texts() == ["before the passes", "after the passes"]
    assert "added" in viewer.locator("#summary").inner_text()
    assert not page.locator("#query").is_visible()
    page.get_by_role("button", name="Table").click()
    assert page.locator("#query").is_visible()
    assert not page.locator("#drawing").is_visible()


def _switch_the_light(page: Page) -> None:
    colours = []
    for _ in range(2):
        page.get_by_role("button", name="Switch between light and dark").click()
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] != colours[1]


def test_names_are_only_names(browser: Browser, tmp_path: Path) -> None:
    """A script in a node's name is shown and not run; one long word does not push the page apart."""
    name = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"
    long = "encoder" * 60
    run_report = report(name=long, failure=name + long, exit_code=1)
    file = tmp_path / "report.html"
    file.write_text(html_of(run_report, pictures(name=name), tmp_path), encoding="utf-8")
    seen = Watched(browser.new_page(viewport=PHONE), file)
    seen.page.locator("#query").fill("_0")
    assert f"{name}_0" in seen.page.locator("#tree .op summary").first.inner_text()
    seen.page.get_by_role("button", name="Table").click()
    assert seen.page.locator("#rows td").first.inner_text() == f"{name}_0"
    assert seen.page.title().startswith("✗ failed · encoder")
    assert seen.fits()
    assert seen.is_clean()


def test_a_run_that_failed_has_a_page(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    run_report = report(failure="no ONNX file", exit_code=2, export=None, structures=(), runtime=None)
    file.write_text(html_of(run_report, type(pictures())(), tmp_path), encoding="utf-8")
    seen = Watched(browser.new_page(), file)
    assert "no ONNX file" in seen.page.locator(".failure").inner_text()
    assert seen.is_clean()


CHART = """() => {
    const chart = document.querySelector("#memory svg");
    const box = chart.getBoundingClientRect();
    return {
        fills: [...new Set([...chart.querySelectorAll("rect")].map((bar) => getComputedStyle(bar).fill))],
        cut: [...chart.querySelectorAll("text")].filter((text) => {
            const inside = text.getBoundingClientRect();
            return inside.left < box.left - 1 || inside.right > box.right + 1 || inside.bottom > box.bottom + 1;
        }).map((text) => text.textContent),
        texts: [...chart.querySelectorAll("text")].map((text) => text.textContent),
    };
}"""


def test_the_memory_of_a_plan_is_drawn_in_colours_with_modules_along_it(
    config_file, browser: Browser, tmp_path: Path
) -> None:
    config = RunConfig.from_yaml(config_file(passes={"recipe": []}, runtime={"backends": ["plan"]}))
    Pipeline(config, tmp_path / "out").run()
    seen = Watched(browser.new_page(viewport={"width": 1280, "height": 900}), tmp_path / "out/report.html")
    chart = seen.page.evaluate(CHART)
    assert len(chart["fills"]) > 1 and "rgb(255, 255, 255)" not in chart["fills"]
    assert chart["cut"] == []
    assert chart["texts"][-4:] == ["q", "k", "v", "out"]
    seen.page.set_viewport_size(PHONE)
    links = seen.page.locator(".bar nav a").all()
    assert all(link.bounding_box()["x"] + link.bounding_box()["width"] <= PHONE["width"] for link in links)
    assert seen.fits() and seen.is_clean()


MEASURE = """(figure) => {
    const drawings = [...figure.querySelectorAll("svg")];
    return {
        scales: drawings.map((one) => one.getBoundingClientRect().width / one.viewBox.baseVal.width),
        overfull: [...figure.querySelectorAll("text")].filter((text) =>
            text.getBoundingClientRect().width > text.parentElement.querySelector("rect").getBoundingClientRect().width
        ).map((text) => text.textContent),
    };
}"""


def test_drawings_have_one_scale_that_can_be_read_and_are_enlarged_by_keyboard(
    browser: Browser, tmp_path: Path
) -> None:
    shown = pictures()
    (structure,) = shown.structures
    before = structure.before.boxes
    wide = [replace(before[1], role="the role of a weight", op="com.microsoft::Att" + "W" * 30)] * 6
    drawing = Drawing((before[0], *wide), tuple(Wire(0, 1 + at) for at in range(6)))
    shown = replace(shown, structures=(replace(structure, before=drawing),))
    file = tmp_path / "report.html"
    file.write_text(html_of(report(), shown, tmp_path), encoding="utf-8")
    for size in ({"width": 1280, "height": 900}, PHONE):
        seen = Watched(browser.new_page(viewport=size), file)
        page = seen.page
        measured = page.locator(".figure").evaluate(MEASURE)
        assert len(measured["scales"]) == 3
        assert max(measured["scales"]) - min(measured["scales"]) < 0.01
        assert min(measured["scales"]) > 0.79, "letters of 12 px are 9.6 px at least"
        assert measured["overfull"] == []
        assert seen.fits()

        button = page.get_by_role("button", name="Enlarge: source of qkv")
        button.focus()
        page.keyboard.press("Enter")
        width = page.locator("#lightbox svg[role=img]").bounding_box()["width"]  # type: ignore[index]
        page.keyboard.press("+")
        assert page.locator("#lightbox svg[role=img]").bounding_box()["width"] > width * 1.2  # type: ignore[index]
        page.locator("#lightbox").get_by_role("button", name="taken back").click()
        assert page.locator("#lightbox svg[role=img] .made").count() == 2
        page.keyboard.press("Escape")
        assert not page.locator("#lightbox").is_visible()
        assert button.evaluate("(button) => document.activeElement === button")
        assert seen.is_clean()


def test_the_graph_folds_by_module_and_is_walked_along_its_values(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(html_of(report(), pictures(nodes=5000), tmp_path), encoding="utf-8")
    assert file.stat().st_size < 2_000_000
    seen = Watched(browser.new_page(viewport=PHONE), file)
    page, tree = seen.page, seen.page.locator("#tree")
    assert page.evaluate("document.querySelectorAll('#tree *').length") < 50, "what is folded is not in the page yet"
    assert tree.locator("summary").all_inner_texts()[0].split("\n")[0] == "model.layers"

    page.locator("#query").fill("name:node_4002")
    (nodes,) = tree.locator(".op").all()
    nodes.locator("summary").press("Enter")
    nodes.locator("tr").first.wait_for()  # the rows are made once the browser says that it is open
    rows = [" ".join(line.split()) for line in nodes.locator("tr").all_inner_texts()]
    assert rows == [
        "input v4002 ← MatMul node_4001 float 2×8",
        "input w4002 float 8×8",
        "output v4003 → MatMul node_4003 float 2×8",
        "module model.layers.1000.attention",
        "made by source",
    ]
    nodes.get_by_role("button", name="MatMul node_4003").press("Enter")
    assert page.evaluate("document.activeElement.innerText").split() == ["MatMul", "node_4003", "float", "2×8"]
    assert page.locator("#query").input_value() == "", "it was not among those that were looked for"
    assert page.locator("#count").inner_text() == "5000 nodes"
    assert seen.fits()
    assert seen.is_clean()
