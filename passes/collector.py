"""Python's garbage collector, paused while objects are made that stay, or go by themselves."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collector_paused"]


@contextlib.contextmanager
def collector_paused(*, stays: bool = False) -> Iterator[None]:
    """While a large model or graph is made or looked through, it would look through all of it again and again.

    `stays`: nothing that is made is left in circles, so that it need not be looked through once either: it is old then.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if stays and not gc.get_freeze_count():  # what somebody has frozen would come back
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
