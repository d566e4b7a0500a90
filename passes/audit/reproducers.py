"""For each pass and kind of finding, the smallest model that shows it, with the call: a bug report for its authors."""

from __future__ import annotations

import base64
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from passes.advisories import UNSAFE, AuditTable
from passes.advisories.table import to_one_line
from passes.audit.cases import Case, load_case
from passes.audit.job import open_trial
from passes.audit.target import AuditTarget
from passes.audit.trial import AuditTrial
from passes.errors import ModelError
from passes.graph.formatting import graph_text
from passes.optimize import draw_feeds
from passes.run.reproduce import smallest
from passes.weights.detached import DetachedModel

KINDS: Final = (*sorted(UNSAFE), "raised")

BUDGET_S: Final = 30.0
"""Seconds for reducing one model."""


def reproductions_of(tables: Iterable[AuditTable], subjects: Iterable[AuditTarget]) -> Iterator[dict[str, Any]]:
    """Arguments of `reproduce`, for each pass and kind of finding in `KINDS`.

    Node tests go before whole models, since they are small already.
    """
    by_name = {subject.name: replace(subject, inner=()) for subject in subjects}
    cases: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for table in tables:
        for entry in table.entries:
            if entry.kind in KINDS:
                cases[entry.name, entry.kind] += entry.cases
    for (name, kind), candidates in cases.items():
        subject = by_name.get(name) or by_name[name.partition("/")[0]]
        yield {"name": name, "subject": subject.data(), "kind": kind, "case": min(candidates, key=_simplicity)}


def _simplicity(case: str) -> tuple[bool, int, str]:
    return (not case.startswith("node/"), len(case), case)


def reproduce(
    name: str,
    subject: Mapping[str, Any],
    kind: str,
    case: str,
    models: str | None = None,
    timeout_s: float = 60.0,
    memory_gib: float | None = 4.0,
) -> dict[str, str]:
    """Reduce the model of `case` to the smallest one on which `subject` still shows `kind`.

    Args:
        name: of the pass at fault: that of `subject`, or of a pass inside of it.

    Returns:
        `name` of the files, the `model` in base64, and a `text` that says what happens, and how. It is the whole model
        if no smaller part shows the finding.
    """
    tried = AuditTarget(**subject)
    deadline = time.monotonic() + BUDGET_S
    with open_trial(timeout_s, memory_gib) as trial:
        given = load_case(case, Path(models) if models else None)
        source = DetachedModel(given.model, {})

        def fails(part: DetachedModel) -> bool:
            return bool(_shows(trial, _with_own_outputs(part, given), tried, kind))

        model = smallest(source, fails, deadline).proto if fails(source) else given.model
        small = _with_own_outputs(DetachedModel(model, {}), given) if model is not given.model else given
        why = _shows(trial, small, tried, kind) or ["the whole model, with the inputs of its test"]
    file = _file(name, kind)
    call = f'    model = onnx.load("{file}.onnx")\n    {tried.make_step().format_call()}'
    text = f"{name}: {kind}; {why[0]}\nfound on {to_one_line(case)}\n\n{call}\n\n{graph_text(model)}\n"
    return {"name": file, "model": base64.b64encode(model.SerializeToString()).decode(), "text": text}


def parse_heading(stem: str, text: str) -> tuple[str, str] | None:
    """Pass and kind of a reproducer, by its file name and text; None if the file is no reproducer."""
    head = re.match(rf"(\S+): ({'|'.join(KINDS)}); .*\nfound on ", text)
    return (head[1], head[2]) if head and _file(head[1], head[2]) == stem else None


def _file(name: str, kind: str) -> str:
    return f"{name.replace('/', '-')}-{kind}"


def _with_own_outputs(part: DetachedModel, given: Case) -> Case:
    """A part of a case with drawn inputs; what it computes unoptimized is the reference."""
    try:
        feeds: Mapping[str, Any] = draw_feeds(part, 0)
    except ModelError:
        feeds = {}
    return replace(given, model=part.proto, feeds=feeds, expected=None, rtol=None, atol=None)


def _shows(trial: AuditTrial, case: Case, subject: AuditTarget, kind: str) -> list[str]:
    """The reasons of the findings of that kind; empty if there are none."""
    return [finding.why or kind for finding in trial.of(case, [subject]).findings if finding.kind == kind]
