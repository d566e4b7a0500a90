"""Keeps torch and transformers from printing, and collects what they say of the model for the caller's notes."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

from pipeline.export.error_location import is_user_code

DEPRECATIONS = (DeprecationWarning, FutureWarning, PendingDeprecationWarning)

ABOUT_LIBRARIES = {
    "torch.onnx._internal.exporter._registration",  # operators of packages that are not installed
    "torch.onnx._internal.exporter._compat",  # an opset below 18 is made by a conversion
    "onnxscript.version_converter",  # which of two converters does that
}
"""Loggers whose warnings say nothing of the user's model. An opset that was not reached is an error of its own."""

ASSIGNED = "assigned during export"
"""In torch's warning of each tensor that forward leaves in an attribute. `Watch.carried` has those that matter."""

LOUD = ("torch", "transformers", "onnxscript", "onnx_ir", "huggingface_hub")


@contextlib.contextmanager
def capture_output() -> Iterator[list[str]]:
    """Collect what is printed, logged or warned of in this block; the yielded list gets the lines when it ends.

    What libraries say of themselves is left out: deprecations in code that is not the user's, and `ABOUT_LIBRARIES`.
    Streams, loggers and warnings belong to the process, so blocks in two threads must not overlap.
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
            notes += dict.fromkeys(
                f"{warning.category.__name__}: {warning.message}" for warning in caught if is_about_model(warning)
            )


def is_about_model(warning: warnings.WarningMessage) -> bool:
    """Whether a warning says something of the user's model or code, and nothing else says it."""
    if issubclass(warning.category, DEPRECATIONS):
        return is_user_code(warning.filename)
    return ASSIGNED not in str(warning.message)


class _Collector(logging.Handler):
    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        if record.name not in ABOUT_LIBRARIES:
            self.notes.append(f"{record.name}: {record.getMessage()}")


@contextlib.contextmanager
def _loggers_into(notes: list[str]) -> Iterator[None]:
    """Send loud loggers into `notes`. Dozens of torch's loggers have a handler with the real stderr: swap them all."""
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
