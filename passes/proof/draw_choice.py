"""Choose the draws of a plan on which the reference runs and its outputs are finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from passes.context import PassContext
from passes.errors import ModelError, PassError, StepCrashed, StepTimedOut, WrongReference
from passes.load import MOST_DRAWN
from passes.proof.draws import BROUGHT_DOWN, WORDS, Draw, DrawnInput, DrawPlan, GivenDraw, InputSampler, Trait
from passes.proof.numbers import compare
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel, portable

MOST_NOISE: Final = 0.1
"""How far, in tolerances, outputs may move when each float of the outliers moves by one rounding: if they move more,
the errors of a sound pass may exceed the tolerance."""

Feeds = Mapping[str, np.ndarray]
Run = Callable[[Feeds], Mapping[str, np.ndarray]]


@dataclass(frozen=True, slots=True)
class ChosenDraw:
    """A draw on which the reference runs, with its inputs and the results of the reference."""

    draw: Draw
    feeds: Feeds
    results: Mapping[str, np.ndarray]
    is_optional: bool
    """Whether the caller did not ask for this draw. An export may skip such a draw, since the export may hold for other
    sizes only."""
    inputs: tuple[DrawnInput, ...] = ()
    """The inputs, with ranges in which the reference runs."""


def sampler_of(chosen: Sequence[ChosenDraw]) -> InputSampler | None:
    """Draws further inputs at the sizes of the first draw; None if there is no draw."""
    return InputSampler(chosen[-1].inputs, chosen[0].draw.sizes) if chosen else None


def choose_draws(
    plan: DrawPlan, run: Run, outputs: Sequence[str], skipped: list[str], failures: type[Exception] = PassError
) -> Iterator[ChosenDraw]:
    """Yield the draws on which the reference runs, with the results of `run`.

    Args:
        plan: the draws to choose from.
        run: the reference; it may return more than `outputs`.
        outputs: the outputs that decide which draws are taken: they have to be finite.
        skipped: a sentence is appended for everything that is not drawn.
        failures: what `run` raises where the reference does not run.

    Raises:
        failures: the reference does not run on a draw that is needed.
    """
    return _Choice(plan, run, outputs, skipped, failures).draws()


def choose_in_worker(
    model: DetachedModel, plan: DrawPlan, context: PassContext, random_outputs: Sequence[str] = ()
) -> tuple[list[ChosenDraw], list[str]]:
    """The draws of `plan` on which `model` runs in onnxruntime, and a sentence for everything that is not drawn.

    The model runs in the proof worker: onnxruntime may crash on it, or never return.

    Args:
        model: the reference.
        plan: the draws to choose from.
        context: whose proof worker runs the model.
        random_outputs: outputs that depend on random values, so they do not decide what is drawn.

    Raises:
        StepFailed: onnxruntime refuses the model, it does not run on a draw that is needed, or the process ended.
    """
    asked = {"model": portable(model, context.spill), "random_outputs": random_outputs}
    try:
        return context.proofs.ask(_run_and_choose, plan=plan, **asked)
    except (StepCrashed, StepTimedOut) as failure:
        chosen, skipped = context.proofs.ask(_run_and_choose, plan=plan.reduce_to_needed(), **asked)
        return chosen, [*skipped, BROUGHT_DOWN.format(failure)]


def _run_and_choose(
    model: MappedModel, plan: DrawPlan, random_outputs: Sequence[str]
) -> tuple[list[ChosenDraw], list[str]]:
    """`choose_in_worker`, in the worker."""
    session, skipped = model.session(may_evaluate=True), []
    outputs = [name for name in session.outputs if name not in random_outputs]
    return list(choose_draws(plan, session.run, outputs, skipped)), skipped


@dataclass(slots=True)
class _Choice:
    """The state of `choose_draws`."""

    plan: DrawPlan
    run: Run
    outputs: Sequence[str]
    skipped: list[str]
    failures: type[Exception]
    seed: int = 0
    unbounded: frozenset[str] = frozenset()
    """Outputs that hold infinities even in the first draw."""
    drawn: set[tuple[str, int]] = field(default_factory=set)
    """The sizes of dims that were drawn."""
    why: str = ""
    """Why the last draw that was tried was rejected."""
    elements: int = 0
    """The number of elements in the inputs of all draws so far."""

    def draws(self) -> Iterator[ChosenDraw]:
        self.seed = self.plan.seed
        for entry in self.plan.given:
            yield self._run_given(entry)
        if not self.plan.needed:
            return
        yield self._first_draw()
        first, *others = self.plan.needed
        ends = frozenset({Trait.OUTLIERS, Trait.ONES}) & self.plan.traits
        alternatives = [[sizes] for sizes in others] + ([list(self.plan.second)] if self.plan.second else [])
        for sizes in alternatives:
            # A size that the user asked for gets a draw without extremes.
            extremes = ends if not others or sizes == [first] else frozenset()
            yield self._draw_first_of(sizes, extremes)
            ends -= extremes
        wide = frozenset({Trait.WIDE}) & self.plan.traits
        for extreme in (ends, frozenset({Trait.ZEROS}) & self.plan.traits, *[wide] * self._wide_draws(first)):
            if extreme:
                yield from self._draw_extremes(first, extreme)
        yield from self._at_further_sizes(first)

    def _next_seed(self) -> int:
        self.seed += 1
        return self.seed - 1

    def _run_given(self, entry: GivenDraw) -> ChosenDraw:
        try:
            return self._run_needed(entry.draw, entry.feeds)
        except self.failures as failure:
            raise type(failure)(f"{entry.draw.label}: {failure}") from failure

    def _first_draw(self) -> ChosenDraw:
        """The draw at the first sizes of the plan, or of another plan if the reference fails there or computes NaN."""
        asked, seed = self.plan, self._next_seed()
        try:
            first = self._draw_needed(Draw(seed, asked.needed[0]))
        except WrongReference:
            raise
        except self.failures:
            plans = list(asked.at_other_sizes())
            chosen = self._by_other_plans(plans, seed) or self._without_zeros(plans, seed)
            if chosen is None:
                raise
            return chosen
        why = self._fault_of(first.draw, first.feeds, first.results)
        if why:
            self.why = why
            return self._without_zeros([asked], seed) or first
        return first

    def _without_zeros(self, plans: Iterable[DrawPlan], seed: int) -> ChosenDraw | None:
        """Try `plans` with ones in each input of zeros and ones; returns the first draw on which the reference runs."""
        asked, why = self.plan, self.why
        chosen = self._by_other_plans((ones for plan in plans for ones in plan.without_zeros()), seed)
        if chosen is None:
            self.plan = asked
        else:
            self.skipped.append(f"not drawn: zeros in integers ({why})")
        return chosen

    def _by_other_plans(self, plans: Iterable[DrawPlan], seed: int) -> ChosenDraw | None:
        """The first draw of the first plan on which the reference runs; that plan replaces `self.plan`."""
        for self.plan in plans:
            chosen = self._try_draw(Draw(seed, self.plan.needed[0]), is_optional=False)
            if chosen is not None:
                self.unbounded = frozenset(name for name in self.outputs if not _is_finite(chosen.results[name]))
                return chosen
        return None

    def _draw_needed(self, draw: Draw) -> ChosenDraw:
        return self._run_needed(draw, self._feeds(draw))

    def _run_needed(self, draw: Draw, feeds: Feeds) -> ChosenDraw:
        results = self.run(feeds)
        self.drawn.update(draw.sizes.items())
        self.unbounded = frozenset(name for name in self.outputs if not _is_finite(results[name]))
        return ChosenDraw(draw, feeds, results, False, self.plan.inputs)

    def _draw_first_of(self, alternatives: Sequence[Mapping[str, int]], ends: frozenset[Trait]) -> ChosenDraw:
        """A draw at the first of the sizes on which the reference runs, with as many of `ends` as possible."""
        seed = self._next_seed()
        for sizes in alternatives:
            chosen = self._draw_with_traits(seed, sizes, ends, is_optional=False)
            if chosen is not None:
                return chosen
        plans = (replace(self.plan, needed=(sizes,)) for sizes in alternatives)
        return self._without_zeros(plans, seed) or self._draw_needed(Draw(seed, alternatives[-1]))  # says what is wrong

    def _draw_extremes(self, sizes: Mapping[str, int], ends: frozenset[Trait]) -> Iterator[ChosenDraw]:
        chosen = self._draw_with_traits(self._next_seed(), sizes, ends, is_optional=False)
        if chosen is None:
            self.skipped.extend(f"not drawn: {WORDS[trait]} ({self.why})" for trait in Trait if trait in ends)
        elif chosen.draw.traits & ends:
            yield chosen

    def _draw_with_traits(
        self, seed: int, sizes: Mapping[str, int], ends: frozenset[Trait], *, is_optional: bool
    ) -> ChosenDraw | None:
        """The draw at `sizes` with as many of `ends` as the reference runs with; reports the ends that were given
        up."""
        asked = ends | (frozenset({Trait.ROWS, Trait.EXACT}) & self.plan.traits)
        present = [trait for trait in GIVEN_UP if trait in asked]
        reduced = [asked - {trait} for trait in present]
        reduced += [asked - set(present[:count]) for count in range(2, len(present) + 1)]
        whys: list[str] = []
        for traits in dict.fromkeys((asked, *reduced)):
            chosen = self._try_draw(Draw(seed, sizes, traits), is_optional=is_optional)
            if chosen is not None:
                notes = [f"not drawn: {WORDS[trait]} ({whys[0]})" for trait in present if trait not in traits]
                self.skipped.extend(note for note in notes if note not in self.skipped)
                return chosen
            whys.append(self.why)
        return None

    def _wide_draws(self, sizes: Mapping[str, int]) -> int:
        """How many draws reach the ends and the middle of wide ranges: one, or two for an input of one number."""
        draw = Draw(0, sizes)
        counts = [math.prod(known.sizes_in(draw)) for known in self.plan.inputs if known.wide is not None]
        return 2 if min(counts, default=2) < 2 else 1

    def _at_further_sizes(self, first: Mapping[str, int]) -> Iterator[ChosenDraw]:
        """Draw every named dim at each further size, in turns: few draws are needed, and no two dims are 1 at once."""
        further = self.plan.further_sizes()
        missing = {(dim, size) for dim, sizes in further.items() for size in sizes} - self.drawn
        reasons: dict[tuple[str, int], str] = {}
        for sizes in _arrangements(further, len(self.plan.further), first):
            fresh = missing & set(sizes.items())
            if not fresh:
                continue
            chosen = self._draw_with_traits(self._next_seed(), sizes, frozenset(), is_optional=True)
            if chosen is not None:
                missing -= fresh
                yield chosen
            elif len(fresh) == 1:
                reasons[next(iter(fresh))] = self.why
        for dim, size in sorted(missing):
            why = reasons.get((dim, size), self.why)
            self.skipped.append(f"not drawn: {dim or 'unnamed dims'}={size} ({why})")

    def _try_draw(self, draw: Draw, *, is_optional: bool) -> ChosenDraw | None:
        """Run the reference on `draw`; None, with `why` set, if it fails or its outputs cannot be compared."""
        if self.elements >= MOST_DRAWN // 2:  # each further draw would take seconds, and as much memory again
            self.why = f"the inputs of the draws before it have {self.elements:,} elements, which is enough"
            return None
        try:
            feeds = self._feeds(draw)
        except ModelError as error:
            self.why = str(error)
            return None
        try:
            results = self.run(feeds)
            self.why = self._fault_of(draw, feeds, results)
        except WrongReference:
            raise
        except self.failures as failure:
            self.why = f"the model does not run on it: {' '.join(str(failure).split())[:200]}"
            return None
        if self.why:
            return None
        self.drawn.update(draw.sizes.items())
        return ChosenDraw(draw, feeds, results, is_optional, self.plan.inputs)

    def _feeds(self, draw: Draw) -> Feeds:
        feeds = self.plan.feeds(draw)
        self.elements += sum(array.size for array in feeds.values())
        return feeds

    def _fault_of(self, draw: Draw, feeds: Feeds, results: Mapping[str, np.ndarray]) -> str:
        """Why the outputs of `draw` cannot be compared; empty if they can."""
        nan = [name for name in self.outputs if _has_nan(results[name])]
        if nan:
            return f"output {nan[0]!r} holds NaN there"
        if not draw.traits - {Trait.ROWS}:
            return ""
        infinite = [name for name in self.outputs if name not in self.unbounded and not _is_finite(results[name])]
        if infinite:
            return f"output {infinite[0]!r} is not finite there"
        if Trait.OUTLIERS not in draw.traits:
            return ""
        nudged = self.run({name: _nudge(array) for name, array in feeds.items()})
        excess = {name: compare(results[name], nudged[name]).excess for name in self.outputs}
        worst = max(excess, key=excess.__getitem__, default="")
        if worst and not excess[worst] <= MOST_NOISE:
            return f"output {worst!r} moves by {excess[worst]:.2g} tolerances when the inputs move by one rounding"
        return ""


GIVEN_UP: Final = (Trait.OUTLIERS, Trait.ONES, Trait.ZEROS, Trait.WIDE, Trait.EXACT, Trait.ROWS)
"""The order in which traits are given up, if the reference does not run with all of them."""


def _arrangements(
    further: Mapping[str, Sequence[int]], turns: int, first: Mapping[str, int]
) -> Iterator[Mapping[str, int]]:
    """Sizes for all dims, in the order in which they are tried.

    First the first `turns` of the further sizes in turns: batch 1 with a sequence of 8, and the reverse, since a
    softmax over a sequence of 1 is always 1 and hides faults before it. Then those that only some dims have. Then one
    dim alone, since others may have to keep their sizes, and then all dims at the same size, since some models need
    equal ones.
    """
    for turn in range(turns):
        yield {dim: sizes[(index + turn) % turns] for index, (dim, sizes) in enumerate(further.items())}
    for index in range(turns, max(map(len, further.values()), default=0)):
        yield {dim: sizes[index] if index < len(sizes) else first[dim] for dim, sizes in further.items()}
    for dim, sizes in further.items():
        for size in sizes:
            yield {**first, dim: size}
    for size in dict.fromkeys(size for sizes in further.values() for size in sizes):
        yield dict.fromkeys(further, size)


def _nudge(array: np.ndarray) -> np.ndarray:
    """Move floats one rounding up and down in turns; other dtypes are returned unchanged."""
    if array.dtype.kind != "f":
        return array
    towards = np.where(np.arange(array.size) % 2, np.inf, -np.inf).astype(array.dtype).reshape(array.shape)
    with np.errstate(all="ignore"):  # the neighbour of a zero is a denormal number
        return np.nextafter(array, towards)


def _has_nan(array: np.ndarray) -> bool:
    return _holds_floats(array) and bool(np.isnan(_widen(array)).any())


def _is_finite(array: np.ndarray) -> bool:
    return not _holds_floats(array) or bool(np.isfinite(_widen(array)).all())


def _holds_floats(array: np.ndarray) -> bool:
    return array.dtype.kind not in "OUSbiu"


def _widen(array: np.ndarray) -> np.ndarray:
    """Cast to a dtype that numpy itself implements."""
    return array if array.dtype.kind == "c" else array.astype(np.float64, copy=False)
