"""One job of an audit: some cases, all passes. JSON in, JSON out, so that it can run on any machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from passes.audit.cases import load_case
from passes.audit.subject import Subject
from passes.audit.trial import Trial
from passes.context import memory_limit
from passes.errors import ModelError
from passes.worker.client import Worker

__all__ = ["PRELOAD", "open_trial", "run_chunk"]

PRELOAD: Final = ("onnxoptimizer", "passes.audit.attempts")


@contextmanager
def open_trial(timeout_s: float, memory_gib: float | None) -> Iterator[Trial]:
    """The two workers; neither is started before it is needed."""
    limit = memory_limit(memory_gib)
    with (
        Worker(timeout_s, limit, PRELOAD) as libraries,
        Worker(timeout_s, limit, ("passes.audit.judge",)) as judges,
    ):
        yield Trial(libraries, judges)


def run_chunk(
    cases: Sequence[str],
    subjects: Sequence[Mapping[str, Any]],
    models: str | None = None,
    timeout_s: float = 60.0,
    memory_gib: float | None = 4.0,
) -> dict[str, Any]:
    """Try `subjects` on `cases`, which are named as in `passes.audit.cases`.

    Args:
        models: the folder of the user's own models.
        timeout_s: seconds for one call of one pass.
        memory_gib: what each of the two workers may allocate.

    Returns:
        `findings`: lists of name, kind, case and why; `unjudged`: case → why its numbers are not; `unread`: case → why
        there is no model.
    """
    tried = [Subject(**data) for data in subjects]
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
            findings += [list(dataclasses.astuple(one)) for one in outcome.findings]
            if outcome.unjudged:
                unjudged[name] = outcome.unjudged
    return {"findings": findings, "unjudged": unjudged, "unread": unread}
