"""A progress bar for the events of a run, on a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from pipeline import events
from pipeline.errors import UsageError
from pipeline.events import Event, Observer, line_of
from pipeline.terminal import ProgressBar, Screen


class StageBar:
    """A bar with the name of the running stage and of its part; it is gone when the run has ended.

    Args:
        console: where the bar is drawn.
        shown: whether it is drawn at all.
    """

    def __init__(self, console: Screen, *, shown: bool) -> None:
        self._bar = ProgressBar(
            TextColumn("{task.description:<10}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[part]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not shown,
        )
        self._task = self._bar.add_task("", total=None, part="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    def update(self, event: Event) -> None:
        """Move the bar, if the event is the start of a stage or of a part of it."""
        match event:
            case events.StageStarted(name):
                self._bar.reset(self._task, description=name, total=None, part="")
            case events.Progress(_, part, done, total):
                self._bar.update(self._task, completed=done, total=total, part=part)
            case _:
                pass


@contextmanager
def show_progress(progress: bool | None, observer: Observer | None = None) -> Iterator[Observer]:
    """Show the events of the block on stderr; the yielded observer hands each event on to `observer`.

    Args:
        progress: None shows a bar on a terminal and in a notebook, where lines take its place without ipywidgets; True
            shows lines elsewhere too; False shows nothing.

    Raises:
        UsageError: `progress` is something else.
    """
    if progress is not None and not isinstance(progress, bool):
        raise UsageError(f"progress is {progress!r}, expected True, False or None")
    console = Screen(stderr=True)
    in_notebook = console.is_jupyter
    draws_bar = find_spec("ipywidgets") is not None if in_notebook else console.is_terminal
    has_bar = progress is not False and draws_bar
    has_lines = not has_bar and (progress or (in_notebook and progress is None))
    lines = Screen(stderr=True, force_jupyter=False)
    with StageBar(console, shown=has_bar) as bar:

        def observe(event: Event) -> None:
            bar.update(event)
            if has_lines and isinstance(event, events.StageEnded | events.Note):
                lines.print_line(line_of(event))
            if observer is not None:
                observer(event)

        yield observe
