"""`report.html`: a run on one page, in one file that needs no network.

page.py        what the page shows, as data, and as HTML: page.html.j2 with page.css and page.js inlined
quantization.py  after a simulation: what dominates its noise, and the noise along the model
headline.py    the verdict and the main results at the top (its sentences are in lead.html.j2)
timeline.py    a row for each pass: the operators of the model after it, and what the pass changed
figures.py     structures, and drawings, equal ones only once, with the position of each box
parts.py       the page of a run in parts, with a row and a tab for each
curves.py      error and SQNR by layer, ratios along the model, the loss of a training
"""

from pipeline.report.html.page import Page, page_of, render
