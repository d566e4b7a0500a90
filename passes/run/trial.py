"""Try a step on a model: pin, run, unpin, judge the result. The runner decides whether to accept it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from passes.context import PassContext
from passes.errors import InvalidResult, StepFailed
from passes.model.analysis import AnalyzedModel
from passes.model.canonical import canonical_digest
from passes.model.signature import annotations_of, keep_signature, with_defaults
from passes.policy.policy import DESTROYS, merging
from passes.proof.numbers import Errors
from passes.proof.prover import Measurement, Prover
from passes.provenance import Carrier
from passes.run.apply_step import apply_step, keep_ir_version
from passes.run.growth import compute_again
from passes.run.narrow import minimal_culprits, primary_culprit
from passes.run.result import Status
from passes.run.tracked import Lost, TrackedStructures, pin, unpin
from passes.step import PassResult, Step
from passes.structures.merges import MergedProducts, find_merged_products, has_siblings
from passes.suggest import AND_MORE, join_first, plural
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of trying a step. `why` says what is wrong with it and is empty for a sound result; `lost` holds every
    structure that the step broke, also those that are only observed."""

    after: AnalyzedModel
    changed: bool
    lost: Lost
    measurement: Measurement | None
    why: str
    status: Status = Status.REVERTED
    """Status to report if this attempt is rejected."""
    note: str = ""
    """What the step says of itself."""

    @property
    def model(self) -> DetachedModel:
        return self.after.model

    @property
    def broke_down(self) -> bool:
        """Whether the worker died, or ran out of time, in this attempt."""
        return self.status in (Status.CRASHED, Status.TIMED_OUT)

    @property
    def errors(self) -> Mapping[str, Errors]:
        return self.measurement.errors if self.measurement else {}

    @property
    def nodes(self) -> int:
        return len(self.model.proto.graph.node)


@dataclass(frozen=True, slots=True)
class NarrowedStep:
    """A composite step without the inner passes at fault, and its attempt.

    `authors` maps each structure that was lost on the way to the step, or inner pass, that broke it.
    """

    step: Step
    attempt: Attempt
    taken_out: tuple[str, ...]
    authors: Mapping[tuple[str, str], str]


@dataclass
class Trial:
    """Tries steps on one model; `gone` are the structures that it has lost already."""

    before: AnalyzedModel
    gone: Lost
    watched: TrackedStructures
    prover: Prover
    context: PassContext
    carrier: Carrier
    refuses_contrib: bool = False
    """Whether a step is rejected that brings in operators that ONNX does not have."""

    @property
    def model(self) -> DetachedModel:
        return self.before.model

    # Made once, so that a step which keeps facts about a model finds the same object again.
    @cached_property
    def pinned(self) -> DetachedModel:
        """The model with the tight pins."""
        return pin(self.model, self.watched.tight_pins(self.model.index.live_values))

    @cached_property
    def with_wide_pins(self) -> DetachedModel | None:
        """The model with the wide pins; None where they are the tight ones."""
        return self._pin_wide(self.before)

    def _pin_wide(self, start: AnalyzedModel) -> DetachedModel | None:
        pins = self.watched.wide_pins(start.model.index.live_values)
        return pin(start.model, pins) if pins else None

    def try_step(self, step: Step) -> Attempt:
        """`attempt`, with a step that fails as an attempt too.

        Args:
            step: the step to try.

        Returns:
            The attempt; for a failed step with the model from before, and the reason.
        """
        try:
            return self.attempt(step)
        except StepFailed as failure:
            # An empty reason would say that nothing is wrong.
            why = str(failure).strip() or type(failure).__name__
            return Attempt(self.before, False, {}, None, why, Status(failure.status))

    def attempt(self, step: Step) -> Attempt:
        """Run a step with the kept structures pinned, and judge the result by structure and by its output values.

        No pass can fuse across a pin. So the pins are as wide as they can be, and tight only where the result would not
        be sound. A merging pass would find its pattern with wide pins. So it has its turn with the tight pins, and then
        the other passes of the step run once more with the wide ones.

        Args:
            step: the step to try.

        Returns:
            The attempt, sound or not.

        Raises:
            StepFailed: the step raised, crashed, timed out, or changed the model's inputs or outputs.
        """
        return self._without_growth(step, self._attempt(step))

    def _attempt(self, step: Step) -> Attempt:
        known = merging(self.watched.enforced)
        mergers = [name for name in step.inner(self.context) or (step.name,) if name in known] if known else []
        others = step.without(mergers)
        attempt = self._try_wide_pins(others, self.before) if not mergers or self._merges_only_kept(step) else None
        if attempt is not None:
            return attempt
        first = self._judge(step, self.before, self.pinned)
        again = self._try_wide_pins(others, first.after, again=True) if step.is_composite and not first.why else None
        return again or self._measure(first)

    def _merges_only_kept(self, step: Step) -> bool:
        """Whether the merging passes of `step` could merge nothing but what is kept."""
        return (
            step.merges_siblings
            and set(self.watched.enforced) == {"qkv"}
            and not has_siblings(self.model, self._kept_weights("qkv"))
        )

    def _try_wide_pins(self, step: Step, start: AnalyzedModel, again: bool = False) -> Attempt | None:
        """The sound attempt on `start` with wide pins; None without one.

        Args:
            step: the step to try.
            start: the model to run it on.
            again: `start` is a result of the step, and the attempt has to leave fewer nodes.
        """
        pinned = self.with_wide_pins if start is self.before else self._pin_wide(start)
        if pinned is None:
            return None
        try:
            attempt = self._judge(step, start, pinned)
            if again and not (attempt.changed and len(attempt.model.index.live) < len(start.model.index.live)):
                return None
            attempt = self._measure(attempt)
        except StepFailed:
            return None
        return None if attempt.why else attempt

    def _kept_weights(self, *kinds: str) -> list[frozenset[str]]:
        """The digests of the weights of each tracked instance; of all kinds where none is named."""
        return [
            frozenset().union(*(weight.digests for weight in instance.weights))
            for kind in kinds or self.watched.instances
            for instance in self.watched.instances[kind]
        ]

    def _without_growth(self, step: Step, attempt: Attempt) -> Attempt:
        """`attempt`, or a sound attempt that leaves fewer nodes: with folded values computed again, or without an inner
        pass that is known to grow models. A step that may grow the model keeps its attempt."""
        if not attempt.changed or attempt.why or step.may_grow:
            return attempt
        attempt = self._with_computed_values(step, attempt)
        left = attempt.after.node_count
        for name in step.known_to_grow(self.context) if left > self.before.node_count else ():
            smaller = self.try_step(step.without((name,)))
            if not smaller.why and smaller.after.node_count < left:
                words = f"without {name}, which would have left {plural(left, 'node')}"
                return replace(smaller, note="; ".join(filter(None, (words, smaller.note))))
        return attempt

    def _with_computed_values(self, step: Step, attempt: Attempt) -> Attempt:
        """`attempt` with the folded values computed that make the model much larger, where that is sound."""
        computed, note = compute_again(self.before, attempt.after)
        if not note:
            return attempt
        note = "; ".join(filter(None, (attempt.note, note)))
        try:
            smaller = self._measure(self._judge_result(PassResult(computed, why=note), step, self.before, self.pinned))
        except StepFailed:
            return attempt
        return attempt if smaller.why else smaller

    def _judge(self, step: Step, start: AnalyzedModel, pinned: DetachedModel) -> Attempt:
        """Run `step` on `pinned`, a pinned copy of `start`, and judge the structure of the result against the current
        model."""
        pinned = with_defaults(self.model, pinned) if step.fixes_defaults else pinned
        return self._judge_result(apply_step(step, pinned, self.context), step, start, pinned)

    def _judge_result(self, result: PassResult, step: Step, start: AnalyzedModel, pinned: DetachedModel) -> Attempt:
        after = self._receive(result, step, start, pinned) if result.changed else None
        if after is None:
            return Attempt(self.before, False, {}, None, "", note=result.why or "")
        lost = {key: why for key, why in self.watched.find_lost(after.model).items() if key not in self.gone}
        broken = [f"{kind} {name}: {why}" for (kind, name), why in lost.items() if kind in self.watched.enforced]
        if broken:
            return Attempt(after, True, lost, None, _several("breaks", broken))
        if self.refuses_contrib:
            from passes.portability import describe_brought_in  # not above: few runs refuse such operators

            if brought := describe_brought_in(self.model.proto, after.model.proto):
                return Attempt(after, True, lost, None, brought)
        return Attempt(after, True, lost, None, "", note=result.why or "")

    def _measure(self, attempt: Attempt) -> Attempt:
        """`attempt` with its output values judged, if it has changed the model and its structure is right."""
        if attempt.why or not attempt.changed:
            return attempt
        measurement = self.prover.measure(attempt.after)
        return replace(attempt, measurement=measurement, why=measurement.why and f"differs: {measurement.why}")

    def _receive(
        self, result: PassResult, step: Step, start: AnalyzedModel, pinned: DetachedModel
    ) -> AnalyzedModel | None:
        """Unpin the result of `step` on `pinned` and carry provenance over to it; None if nothing has changed."""
        made = result.model if step.fixes_defaults else with_defaults(self.model, result.model)
        _refuse_new_outputs(pinned, made)
        after = AnalyzedModel(self.remove_pins(made, narrows=step.narrows))
        if after.invalid and not self.before.invalid:  # a source may be; then no step is blamed for it
            raise InvalidResult(f"makes a model that is not valid ONNX: {after.invalid}")
        is_same = after.size == self.before.size and after.canonical.digest == self.before.canonical.digest
        if is_same and not step.annotates:
            return None
        self.carrier.carry(start, after, step.name)
        has_same_annotations = is_same and annotations_of(after.model.proto) == annotations_of(pinned.proto)
        return None if has_same_annotations else after

    def remove_pins(self, after: DetachedModel, *, narrows: bool = False) -> DetachedModel:
        """Unpin the result of a step, in place, and give it the outputs and the signature of the model.

        Args:
            after: the result of a step on the pinned model.
            narrows: whether the step was asked to change the declared shapes of inputs.

        Returns:
            `after`.

        Raises:
            StepFailed: see `keep_signature`.
        """
        unpin(after, [output.name for output in self.model.proto.graph.output])
        keep_signature(self.model, after, narrows=narrows)
        keep_ir_version(self.model, after)
        return after

    def narrow(self, step: Step, attempt: Attempt) -> NarrowedStep:
        """Find the inner passes that are at fault for an attempt.

        Passes that broke a required structure are taken out; passes that only broke an observed structure are named.

        Args:
            step: the step that was tried.
            attempt: its attempt, which lost a structure or is not sound.

        Returns:
            The step without the passes at fault, its attempt, and who broke what.
        """
        # To wait for many more time limits would cost more than the name is worth.
        if not step.is_composite or attempt.status is Status.TIMED_OUT:
            return NarrowedStep(step, attempt, (), dict.fromkeys(attempt.lost, step.name))
        tried: dict[tuple[str, ...], Attempt] = {(): attempt}

        def without(names: tuple[str, ...]) -> Attempt:
            key = tuple(sorted(names))
            if key not in tried:
                tried[key] = self.try_step(step.without(names))
            return tried[key]

        def is_good(names: tuple[str, ...]) -> bool:
            result = without(names)
            return not result.why and (bool(attempt.why) or not result.lost)

        kinds = {kind for kind, _ in attempt.lost}
        suspects = [name for name, destroyed in DESTROYS.items() if kinds & set(destroyed)]
        culprits = minimal_culprits(step.inner(self.context), suspects or step.suspects, is_good)
        if culprits is None:
            return NarrowedStep(step, attempt, (), dict.fromkeys(attempt.lost, step.name))
        author = primary_culprit(
            culprits, lambda others: canonical_digest(without(others).model) == canonical_digest(attempt.model)
        )
        authors = dict.fromkeys(attempt.lost, f"{step.name}/{author}")
        if len(culprits) > 1:
            alone = {name: without(tuple(culprit for culprit in culprits if culprit != name)).lost for name in culprits}
            for key in attempt.lost:
                doers = [name for name in culprits if key in alone[name]]
                if doers and author not in doers:
                    authors[key] = f"{step.name}/{doers[0]}"
        if not attempt.why:
            return NarrowedStep(step, attempt, (), authors)
        sound = without(culprits)
        # What is only observed may still be lost; it is named, and stays lost.
        observed = self.narrow(step.without(culprits), sound).authors if sound.lost else {}
        return NarrowedStep(step.without(culprits), sound, culprits, {**authors, **observed})

    def find_merges(self, attempt: Attempt) -> tuple[MergedProducts, ...]:
        """The products of one input that an attempt has merged and that belong to no tracked structure.

        Args:
            attempt: a sound attempt.

        Returns:
            The merged products; none for an attempt that is not sound.
        """
        if not attempt.changed or attempt.why:
            return ()
        found = find_merged_products(self.model, attempt.model, self._kept_weights())
        for model in (self.model, attempt.model):  # whose elements were compared
            model.release()
        return found

    def find_held(self, step: Step, known: Collection[tuple[str, str]]) -> tuple[str, Lost]:
        """The kept structures that a step breaks when their values are not pinned.

        Only a step with a pass that is known to merge is run, and its result is never accepted.

        Args:
            step: the step.
            known: (kind, instance) of structures to leave out.

        Returns:
            The name of the inner pass that breaks them, and (kind, instance) → the reason.
        """
        held = {(kind, instance.name) for kind in self.watched.pinned for instance in self.watched.instances[kind]}
        if held <= {*known, *self.gone}:
            return "", {}
        suspects = merging(self.watched.pinned).intersection(step.inner(self.context) or (step.name,))
        if not suspects:
            return "", {}

        def find_lost(tried: Step) -> Lost:
            try:
                result = apply_step(tried, pin(self.model, ()), self.context)
                lost = self.watched.find_lost(self.remove_pins(result.model)) if result.changed else {}
            except StepFailed:
                return {}
            return {key: why for key, why in lost.items() if key in held and key not in known and key not in self.gone}

        lost = find_lost(step.in_one_round()) or find_lost(step)
        if not lost or not step.is_composite:
            return step.name, lost
        culprits = minimal_culprits(
            step.inner(self.context), sorted(suspects), lambda names: not find_lost(step.without(names))
        )
        return "/".join((step.name, *(culprits or ())[:1])), lost

    def find_merger(self, step: Step) -> str:
        """The pass that merges products.

        Args:
            step: a step that merges products.

        Returns:
            The name of the step, or `step/inner` for its inner pass.
        """
        if not step.is_composite:
            return step.name

        def is_good(names: tuple[str, ...]) -> bool:
            attempt = self.try_step(step.without(names))
            return not attempt.why and not self.find_merges(attempt)

        suspects = [name for name, destroyed in DESTROYS.items() if "qkv" in destroyed]
        culprits = minimal_culprits(step.inner(self.context), suspects, is_good)
        return step.name if culprits is None else f"{step.name}/{culprits[0]}"


def _several(verb: str, items: Sequence[str]) -> str:
    return f"{verb} {join_first(items, 1, AND_MORE)}"


def _refuse_new_outputs(pinned: DetachedModel, made: DetachedModel) -> None:
    """Refuse outputs that no pin made: `unpin` would remove them in silence."""
    held = {output.name for output in pinned.proto.graph.output}
    names = [output.name for output in made.proto.graph.output]
    added = [name for name in names if name not in held]
    if added and held <= set(names):
        raise StepFailed(f"adds the outputs {added} to the model; the step `outputs` gives a model further outputs")
