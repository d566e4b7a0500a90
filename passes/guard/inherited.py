"""How a child process begins the guards that its environment asks for; `startup/sitecustomize.py` calls it."""

from __future__ import annotations

from passes.guard.active import inherit

__all__ = ["begin"]


def begin() -> None:
    """Called when the first optimizer has been imported."""
    inherit()
