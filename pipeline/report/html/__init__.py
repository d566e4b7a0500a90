"""`report.html`: a run on one page, in one file that needs no network.

page.py        what the page shows, as data, from the report and its pictures
headline.py    the verdict and the numbers at the top
timeline.py    a row for each pass: what the model consists of after it     diffs.py   what the pass changed
figures.py     structures, and drawings of which equal ones are drawn once  layout.py  where each box goes
nodes.py       the table of the final model's nodes, packed
words.py       numbers in words
render.py      the page as HTML: page.html.j2 with page.css and page.js inlined
"""

from __future__ import annotations

from pipeline.report.html.page import Page, page_of
from pipeline.report.html.render import render

__all__ = ["Page", "page_of", "render"]
