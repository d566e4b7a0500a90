"""Why layers are not repeated."""

from __future__ import annotations

__all__ = ["Unsuited"]


class Unsuited(Exception):
    """Why a model has to be traced whole; a sentence without its end."""
