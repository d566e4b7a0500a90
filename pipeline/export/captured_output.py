"""Keep torch and transformers from printing: what they say is collected, so that the caller can put it in a log."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

__all__ = ["capture_output"]

LOUD = ("torch", "transformers", "onnxscript", "onnx_ir", "huggingface_hub")


@contextlib.contextmanager
def capture_output() -> Iterator[list[str]]:
    """Within this block nothing reaches the terminal or the warning filters; the yielded list fills with the lines.

    Streams, loggers and warnings belong to the process, so two of these must not overlap in two threads.
    """
    notes: list[str] = []
    stream = io.StringIO()
    with (
        warnings.catch_warnings(record=True) as caught,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
        _loggers_into(notes),
    ):
        warnings.simplefilter("always")
        try:
            yield notes
        finally:
            notes += [line for line in stream.getvalue().splitlines() if line.strip()]
            notes += dict.fromkeys(f"{one.category.__name__}: {one.message}" for one in caught)


class _Collector(logging.Handler):
    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self.notes.append(f"{record.name}: {record.getMessage()}")


@contextlib.contextmanager
def _loggers_into(notes: list[str]) -> Iterator[None]:
    """torch hangs a handler on dozens of its loggers, and each holds the real stderr: swap them all."""
    collector = _Collector(notes)
    saved = {name: (logger.handlers, logger.propagate) for name, logger in _loud_loggers()}
    for name, logger in _loud_loggers():
        logger.handlers = [collector] if name in LOUD else []
        logger.propagate = name not in LOUD
    try:
        yield
    finally:
        for name, (handlers, propagate) in saved.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = handlers, propagate


def _loud_loggers() -> list[tuple[str, logging.Logger]]:
    roots = [(name, logging.getLogger(name)) for name in LOUD]
    known = [
        (name, logger)
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in LOUD
    ]
    return list(dict([*roots, *known]).items())
