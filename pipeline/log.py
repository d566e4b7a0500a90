"""Events as lines of text: `log.txt`, and the terminal's plain form."""

from __future__ import annotations

import time

from pipeline.events import Event, Note, Optimized, PassEnded, Progress, StageEnded, StageStarted

__all__ = ["RunLog", "line_of"]


class RunLog:
    """Collects one line for each event, with the seconds since the run began."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._lines: list[str] = []

    def add(self, event: Event) -> None:
        self._lines.append(f"{time.perf_counter() - self._begun:9.3f}  {line_of(event)}")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def line_of(event: Event) -> str:
    """One line for an event."""
    match event:
        case StageStarted(name):
            return f"{name} …"
        case StageEnded(name, seconds, cached, detail):
            how = "unchanged, taken from the last run" if cached else f"{seconds:.1f} s"
            return f"{name}: {how}" + (f" ({detail})" if detail else "")
        case Progress(stage, part, done, total):
            return f"{stage}: {part} ({done + 1} of {total})"
        case PassEnded(row):
            nodes = f"{row.nodes_before} → {row.nodes_after} nodes"
            return f"pass {row.name}: {row.status}, {nodes}" + (f" ({row.reason})" if row.reason else "")
        case Optimized(passes, structures):
            kept = sum(verdict.kept for verdict in structures)
            return f"passes: {len(passes)} rows, {kept} of {len(structures)} structures kept"
        case Note(text):
            return f"note: {text}"
