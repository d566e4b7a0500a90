"""How large is report.html, and how soon can one work with it? In a headless Chromium, on a page from a file.

    python -m benchmarks.report_html [--config configs/vit_base_keep_qkv.yaml] [--repeats 5] [--markdown FILE]

The run comes first, in runs/benchmarks/report_html/; what has not changed since is not done again. Then the page is
opened `repeats` times, each in a fresh context. Ready is when its script has done its work and has marked that.
Searched is when the first search among the nodes has filtered the table and the frame is painted; the way of the
request into the browser is in it. Both count from the start of the navigation.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.browser import NoBrowser, open_browser
from benchmarks.measure import machine, run_child

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FOLDER: Final = Path("runs/benchmarks/report_html")

LIMIT_BYTES: Final = 2_000_000
LIMIT_MS: Final = 1000.0

SEARCH: Final = """async () => {
    const query = document.querySelector("#query");
    if (!query) return performance.now();
    query.value = "op:MatMul";
    query.dispatchEvent(new Event("input"));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    return performance.now();
}"""


@dataclass(frozen=True, slots=True)
class Opened:
    """One visit, in milliseconds from the start of the navigation. `complaints` are what the console said."""

    ready_ms: float
    searched_ms: float
    complaints: tuple[str, ...]


def open_page(browser: Browser, file: Path) -> Opened:
    """Open `file` in a context of its own and search in it."""
    complaints: list[str] = []
    with browser.new_context() as context:
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(file.resolve().as_uri(), wait_until="domcontentloaded")  # then its script has run
        ready = page.evaluate("performance.getEntriesByName('onnxline-ready')[0].startTime")
        return Opened(float(ready), float(page.evaluate(SEARCH)), tuple(complaints))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("configs/vit_base_keep_qkv.yaml"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--markdown", type=Path, default=FOLDER.parent / "report_html.md")
    options = parser.parse_args()
    out = FOLDER / options.config.stem
    run_child(["-m", "onnxline", "run", str(options.config), "--out", str(out)], memory=False)
    file = out / "report.html"
    try:
        with open_browser() as browser:
            visits = [open_page(browser, file) for _ in range(options.repeats)]
            version = browser.version
    except NoBrowser as why:
        raise SystemExit(str(why)) from why
    text = _markdown(options.config.stem, file.stat().st_size, visits, version)
    options.markdown.parent.mkdir(parents=True, exist_ok=True)
    options.markdown.write_text(text, encoding="utf-8")
    print(text)
    if any(visit.complaints for visit in visits):
        raise SystemExit("the console complained: " + "; ".join(one for visit in visits for one in visit.complaints))


def _markdown(name: str, size: int, visits: list[Opened], version: str) -> str:
    rows = {
        "size": (f"{size:,} bytes", f"{LIMIT_BYTES:,} bytes"),
        "ready": (_told([visit.ready_ms for visit in visits]), f"{LIMIT_MS:.0f} ms"),
        "searched": (_told([visit.searched_ms for visit in visits]), f"{LIMIT_MS:.0f} ms"),
        "said by the console": (str(sum(len(visit.complaints) for visit in visits)), "0"),
    }
    lines = [f"| {name} | measured | limit |", "| --- | --- | --- |"]
    lines += [f"| {what} | {found} | {limit} |" for what, (found, limit) in rows.items()]
    load = os.getloadavg()[0]
    told = f"Chromium {version}, headless. {machine()}; load average {load:.1f} in that minute."
    return "\n".join([*lines, "", told, ""])


def _told(times: list[float]) -> str:
    """The median, and each."""
    return f"{statistics.median(times):.0f} ms ({', '.join(f'{one:.0f}' for one in times)})"


if __name__ == "__main__":
    main()
