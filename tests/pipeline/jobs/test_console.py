"""What is seen of jobs."""

from __future__ import annotations

from io import StringIO

from pipeline.jobs import JobProgress, JobStatus, Outcome
from pipeline.jobs.console import JobsConsole
from pipeline.terminal.screen import Screen

ENDED = (
    JobProgress(Outcome("known", JobStatus.DONE), 1, 3, known=True),
    JobProgress(Outcome("good", JobStatus.DONE, seconds=1.25), 2, 3, known=False),
    JobProgress(Outcome("[bad]", JobStatus.LOST, why="signal SIGKILL", seconds=2.0, attempts=2), 3, 3, known=False),
)


def screen_text(terminal: bool, quiet: bool = False) -> str:
    out = StringIO()
    with JobsConsole(3, Screen(file=out, force_terminal=terminal, width=80, color_system=None), quiet) as screen:
        for ended in ENDED:
            screen.show(ended)
    return out.getvalue()


def test_a_log_has_one_line_for_each_that_was_done_now() -> None:
    assert screen_text(terminal=False) == "[2/3] good done, 1.2 s\n[3/3] [bad] lost, attempt 2, 2.0 s: signal SIGKILL\n"
    assert screen_text(terminal=False, quiet=True) == ""


def test_a_terminal_has_one_bar_over_all() -> None:
    text = screen_text(terminal=True)
    assert "━" in text
    assert "3/3" in text
    assert "1 known before" in text
