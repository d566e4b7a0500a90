"""`report.html` of a real run, clicked through in a headless Chromium that must have nothing to complain about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import Pipeline, RunConfig
from tests.pipeline.report.made_up import html_of, pictures, report

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
    _switch_the_light(page)
    page.set_viewport_size(PHONE)
    assert seen.fits()
    assert seen.is_clean()


def _open_every_pass(page: Page, changed: int) -> None:
    assert page.locator("details.pass").count() == changed
    assert "skip: fuse_qkv" in page.locator(".row.skipped .reason").first.inner_text()
    for one in page.locator(".timeline details").all():
        one.locator("summary").click()
        assert one.locator(":scope > :not(summary)").first.is_visible()
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
    made = report(name=long, failure=name + long, exit_code=1)
    file = tmp_path / "report.html"
    file.write_text(html_of(made, pictures(name=name), tmp_path), encoding="utf-8")
    seen = Watched(browser.new_page(viewport=PHONE), file)
    assert seen.page.locator("#rows td").first.inner_text() == f"{name}_0"
    assert seen.page.title().startswith("encoder")
    assert seen.fits()
    assert seen.is_clean()


def test_a_run_that_failed_has_a_page(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    made = report(failure="no ONNX file", exit_code=2, export=None, structures=(), runtime=None)
    file.write_text(html_of(made, type(pictures())(), tmp_path), encoding="utf-8")
    seen = Watched(browser.new_page(), file)
    assert "no ONNX file" in seen.page.locator(".failure").inner_text()
    assert seen.is_clean()
