"""The site as `make docs` writes it: its pages can be searched in the folder, and ask no server for anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser


SITE = ROOT / "runs" / "site"


@pytest.mark.skipif(
    not SITE.is_dir(), reason="`make docs` has not built the site; `make test` builds it before the tests"
)
def test_search_works_in_the_folder_and_no_page_asks_a_server(browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for name in ("reference/api/ir.html", "index.html"):
        page.goto((SITE / name).as_uri(), wait_until="load")
    page.locator(".md-search__input").click(force=True)
    page.keyboard.type("clamp-mask")
    page.locator('.md-search-result__link[href*="how-to/four-bits.html"]').first.wait_for(state="attached")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
