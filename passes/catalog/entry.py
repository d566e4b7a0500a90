"""One row of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from passes.catalog.about import Reads

__all__ = ["UNDESCRIBED", "Entry", "Runs"]

Runs = Literal["default", "extra", "never", "missing"]
"""`default`: the library's default set has it. `extra`: it runs only where it is named. `never`: the library lists it
and takes it out each time. `missing`: the library is not installed."""

UNDESCRIBED = "not described by this release of onnxline"
"""What is said of a pass that the installed library has and our tables do not have."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One pass, with its `name` as a recipe or a skip list writes it; a pass inside a step is called `STEP/NAME`.

    `does` is one sentence; `destroys` are the kinds of structures that the pass is known to break, of a composite
    step those that any pass breaks that runs inside of it by default; `note` says why a pass never runs, or what to
    install.
    """

    name: str
    source: str
    runs: Runs
    does: str
    reads: Reads
    groups: tuple[str, ...] = ()
    destroys: tuple[str, ...] = ()
    note: str = ""

    @property
    def bare(self) -> str:
        """The name without the step that the pass runs in."""
        return self.name.rpartition("/")[2]

    @property
    def described(self) -> bool:
        return self.does != UNDESCRIBED
