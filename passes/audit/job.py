"""The jobs of an audit: each tries all passes on some cases, and their results become the tables of the audit.

Also bug reports for the authors of a library: for each pass and kind of finding, the smallest model that shows it, with
the call. Arguments and results of a job are JSON, so that a job can run on any machine.
"""

from __future__ import annotations

import base64
import dataclasses
import fnmatch
import hashlib
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from passes.advisories import UNSAFE, AuditFinding, AuditTable, table_of
from passes.advisories.table import to_one_line
from passes.audit.cases import Case, load_case
from passes.audit.trial import AuditTarget, AuditTrial
from passes.context import worker_memory
from passes.errors import ModelError, PolicyError
from passes.graph.formatting import graph_text
from passes.optimize import draw_feeds
from passes.recipe.recipe import OWN_STEPS, SINGLE_PASS_LIBRARY
from passes.run.reproduce import smallest
from passes.suggest import nearest
from passes.weights.detached import DetachedModel
from passes.worker.client import Worker

CHUNK: Final = 64
"""Cases of one job: some seconds to some tens of seconds."""

JUDGES: Final = ("onnx", "onnxruntime", "numpy")
"""The libraries that decide what is a finding."""

PRELOAD: Final = (SINGLE_PASS_LIBRARY, "passes.audit.trial")
"""What a worker imports as it starts; other libraries take seconds, and not every job tries them."""


@contextmanager
def open_trial(timeout_s: float, memory_gib: float | None) -> Iterator[AuditTrial]:
    """A trial with its two workers; neither is started before it is needed."""
    limit = worker_memory(memory_gib)
    with Worker(timeout_s, limit, PRELOAD) as libraries, Worker(timeout_s, limit, ("passes.audit.judge",)) as judges:
        yield AuditTrial(libraries, judges)


def run_job(
    cases: Sequence[str],
    targets: Sequence[Mapping[str, Any]],
    models: str | None = None,
    timeout_s: float = 60.0,
    memory_gib: float | None = 4.0,
) -> dict[str, Any]:
    """Try `targets` on `cases`, which are named as in `passes.audit.cases`.

    Args:
        cases: names, as in `passes.audit.cases`.
        targets: what to try, as `AuditTarget.data` gives it.
        models: the folder of the user's own models.
        timeout_s: seconds for one call of one pass.
        memory_gib: memory limit of each of the two workers.

    Returns:
        `findings`: lists of name, kind, case and why; `unjudged`: case → why its outputs were not judged; `unread`:
        case → why the model cannot be read.
    """
    tried = [AuditTarget(**data) for data in targets]
    findings: list[list[str]] = []
    unjudged: dict[str, str] = {}
    unread: dict[str, str] = {}
    with open_trial(timeout_s, memory_gib) as trial:
        for name in cases:
            try:
                case = load_case(name, Path(models) if models else None)
            except ModelError as mistake:
                unread[name] = str(mistake)
                continue
            outcome = trial.of(case, tried)
            findings += [list(dataclasses.astuple(finding)) for finding in outcome.findings]
            if outcome.unjudged:
                unjudged[name] = outcome.unjudged
    return {"findings": findings, "unjudged": unjudged, "unread": unread}


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """Try `targets` on `cases`. `models` is the user's folder; `timeout_s` and `memory_gib` limit each call."""

    targets: Sequence[AuditTarget]
    cases: Sequence[str]
    models: Path | None = None
    timeout_s: float = 60.0
    memory_gib: float | None = 4.0

    def jobs(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Key and arguments of `run_job`, for each job."""
        names = [target.data() for target in self.targets]
        passes = hashlib.sha256(json.dumps(names, sort_keys=True).encode()).hexdigest()[:12]
        for start in range(0, len(self.cases), CHUNK):
            cases = list(self.cases[start : start + CHUNK])
            yield (
                f"{to_one_line(cases[0])} … {to_one_line(cases[-1])}, {passes}",
                {
                    "cases": cases,
                    "targets": names,
                    "models": str(self.models.resolve()) if self.models else None,
                    "timeout_s": self.timeout_s,
                    "memory_gib": self.memory_gib,
                },
            )

    def tables(self, values: Iterable[Mapping[str, Any]]) -> tuple[AuditTable, ...]:
        """A table of findings for each library. `values` are the results of the jobs."""
        done = list(values)
        findings = [AuditFinding(*fields) for value in done for fields in value["findings"]]
        unjudged = {case for value in done for case in value["unjudged"]}
        unread = unread_of(done)
        tried = Counter(name.partition("/")[0] for name in self.cases if name not in unread)
        facts = tried, {name: metadata.version(name) for name in JUDGES}, unjudged, unread
        libraries = sorted({target.distribution for target in self.targets})
        return tuple(
            table_of(library, metadata.version(library), self._names(library), findings, *facts)
            for library in libraries
        )

    def _names(self, library: str) -> list[str]:
        return [target.name for target in self.targets if target.distribution == library]


def unread_of(values: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Case → reason, for the models that the jobs could not read."""
    return {case: why for value in values for case, why in value["unread"].items()}


def chosen_targets(
    targets: Sequence[AuditTarget], only: Sequence[str], missing: Mapping[str, str] | None = None
) -> tuple[AuditTarget, ...]:
    """Select the targets that `only` names by library, pass or glob; all if `only` is empty.

    Args:
        targets: what there is to try.
        only: names of libraries or passes, or globs; empty for all.
        missing: the steps whose library is not installed → the sentence that says so.

    Raises:
        PolicyError: an entry names nothing, with the nearest, or nothing that is installed.
    """
    for entry in only:
        if not any(_is_meant(target, entry) for target in targets):
            absent = [why for name, why in (missing or {}).items() if _is_meant(_absent_target(name), entry)]
            if absent:
                raise PolicyError(f"--only: {'; '.join(absent)}")
            known = [name for target in targets for name in (target.name, target.distribution)]
            raise PolicyError(f"--only: no pass and no library named {entry!r}{nearest(entry, known)}")
    return tuple(target for target in targets if not only or any(_is_meant(target, entry) for entry in only))


def _absent_target(name: str) -> AuditTarget:
    return AuditTarget(name, OWN_STEPS[name]().source, name)


def _is_meant(target: AuditTarget, entry: str) -> bool:
    return target.distribution == entry or fnmatch.fnmatchcase(target.name, entry)


KINDS: Final = (*sorted(UNSAFE), "raised")

BUDGET_S: Final = 30.0
"""Seconds for reducing one model."""


def reproductions_of(tables: Iterable[AuditTable], targets: Iterable[AuditTarget]) -> Iterator[dict[str, Any]]:
    """Arguments of `reproduce`, for each pass and kind of finding in `KINDS`.

    Node tests go before whole models, since they are small already.
    """
    by_name = {target.name: replace(target, inner=()) for target in targets}
    cases: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for table in tables:
        for entry in table.entries:
            if entry.kind in KINDS:
                cases[entry.name, entry.kind] += entry.cases
    for (name, kind), candidates in cases.items():
        target = by_name.get(name) or by_name[name.partition("/")[0]]
        yield {"name": name, "target": target.data(), "kind": kind, "case": min(candidates, key=_simplicity)}


def _simplicity(case: str) -> tuple[bool, int, str]:
    return (not case.startswith("node/"), len(case), case)


def reproduce(
    name: str,
    target: Mapping[str, Any],
    kind: str,
    case: str,
    models: str | None = None,
    timeout_s: float = 60.0,
    memory_gib: float | None = 4.0,
) -> dict[str, str]:
    """Reduce the model of `case` to the smallest one on which `target` still shows `kind`.

    Args:
        name: of the pass at fault: that of `target`, or of a pass inside of it.
        target: what was tried, as `AuditTarget.data` gives it.
        kind: the kind of the finding.
        case: the name of the case.
        models: the folder of the user's own models.
        timeout_s: seconds for one call of one pass.
        memory_gib: memory limit of each of the two workers.

    Returns:
        `name` of the files, the `model` in base64, and a `text` that says what happens, and how. It is the whole model
        if no smaller part shows the finding.
    """
    tried = AuditTarget(**target)
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


def _shows(trial: AuditTrial, case: Case, target: AuditTarget, kind: str) -> list[str]:
    """The reasons of the findings of that kind; empty if there are none."""
    return [finding.why or kind for finding in trial.of(case, [target]).findings if finding.kind == kind]
