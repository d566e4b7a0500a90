"""Build the catalogue by asking the installed libraries which passes they have."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from passes.context import PassContext
from passes.errors import PolicyError
from passes.policy.known_passes import DESTROYS, groups_of
from passes.recipe import TORCH_RECIPE
from passes.recipe.steps import OWN_STEPS, default_passes, known_names, single_passes
from passes.recipe.user_passes import installed_passes
from passes.step import UNDESCRIBED, Description, Reads, Step

Runs = Literal["default", "extra", "never", "missing"]
"""`default`: the library's default set has it. `extra`: it runs only where it is named. `never`: the library lists it
and takes it out each time. `missing`: the library is not installed."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One pass, with its `name` as a recipe or a skip list writes it; a pass inside a step is called `STEP/NAME`.

    `does` is one sentence; `destroys` are the kinds of structures that the pass is known to break; for a composite
    step, the kinds that any of its default passes breaks. `note` says why a pass never runs, or what to install.
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
        return self.does != UNDESCRIBED.does


def catalog(context: PassContext, *, steps: Collection[str] | None = None) -> tuple[CatalogEntry, ...]:
    """All passes: the passes that a recipe names one by one, then each step with its inner passes as `STEP/NAME`.

    Args:
        steps: whose inner passes to list; None for all. Asking a library starts the worker and takes seconds.
    """
    defaults = set(default_passes())
    rows = [_single_entry(step, "default" if step in defaults else "extra") for step in single_passes()]
    for name, make in OWN_STEPS.items():
        step = make()
        rows += rows_of(step, context) if steps is None or name in steps else [_step_entry(step)]
    return (*rows, *_user_entries())


def pass_names(steps: Sequence[Step], context: PassContext) -> tuple[str, ...]:
    """Every name that a skip list may hold in a run of `steps`; only their libraries are asked.

    Raises:
        PolicyError: a library that a step needs is not installed, or cannot be asked.
    """
    names = [*known_names()]
    for step in steps:
        names.append(step.name)
        names += [f"{step.name}/{name}" for name in step.known_inner(context)]
    return tuple(dict.fromkeys(names))


def rows_of(step: Step, context: PassContext) -> list[CatalogEntry]:
    """The entry of one step, and those of its inner passes. The step's entry says if its library is missing."""
    if not step.is_composite:
        try:
            step.check(context)
        except PolicyError as error:
            return [replace(_step_entry(step), runs="missing", note=str(error))]
        return [_step_entry(step)]
    try:
        inner, extras = step.inner(context), step.extras(context)
    except PolicyError as error:
        return [replace(_step_entry(step), runs="missing", note=str(error))]
    rows = [_inner_entry(step, name, "default") for name in inner]
    destroys = tuple(dict.fromkeys(kind for row in rows if row.runs == "default" for kind in row.destroys))
    own = replace(_step_entry(step), destroys=destroys)
    return [own, *rows, *(_inner_entry(step, extra, "extra") for extra in extras if extra not in inner)]


def _user_entries() -> list[CatalogEntry]:
    """Entries of the user's passes that installed packages announce; no pass is loaded for this."""
    return [
        CatalogEntry(
            name,
            point.dist.name if point.dist is not None else "user",
            "extra",
            f"A pass of the user's own, {point.value}",
            "values",
            groups_of(name),
        )
        for name, point in installed_passes().items()
    ]


def _single_entry(step: Step, runs: Runs) -> CatalogEntry:
    return _entry(step.name, step.source, runs, step.describes.get(step.name, UNDESCRIBED))


def _step_entry(step: Step) -> CatalogEntry:
    runs = "default" if step.name in TORCH_RECIPE else "extra"
    return _entry(step.name, step.source, runs, step.description)


def _inner_entry(step: Step, bare: str, runs: Runs) -> CatalogEntry:
    never = step.never_run.get(bare, "")
    name = f"{step.name}/{bare}"
    return _entry(name, step.source, "never" if never else runs, step.describes.get(bare, UNDESCRIBED), never)


def _entry(name: str, source: str, runs: Runs, words: Description, note: str = "") -> CatalogEntry:
    destroys = DESTROYS.get(name.rpartition("/")[2], ())
    return CatalogEntry(name, source, runs, words.does, words.reads, groups_of(name), destroys, note)
