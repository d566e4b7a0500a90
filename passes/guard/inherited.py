"""How a child process begins the guards that it was given; `startup/sitecustomize.py` calls it."""

from __future__ import annotations

from passes.guard.active import inherit

__all__ = ["begin"]


def begin() -> None:
    """Called when a module of an optimizer has been imported."""
    inherit()
