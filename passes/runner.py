"""The loop: try a step, look at what came out, keep it or go on with the model from before."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata

import onnx

from passes.base import Composite, Step, Workbench
from passes.canonical import canonical_digest
from passes.catalog import DESTROYS, catalog
from passes.errors import PolicyMistake, StepFailed
from passes.external.onnxsim import STAGES
from passes.narrow import culprits
from passes.numbers import Errors
from passes.pins import pin, unpin
from passes.policy import Policy
from passes.prove import Measurement, Prover
from passes.provenance import carry
from passes.result import PassRow, PassRun, Status, StructureVerdict
from passes.structures import STRUCTURES, Instance
from passes.weights import DetachedModel

__all__ = ["Observer", "library_versions", "run_passes"]

Observer = Callable[[str, int, int, PassRow | None], None]
"""Called as (step name, its index, number of steps, None) when a step begins, and with its row when it has ended."""


@dataclass(frozen=True, slots=True)
class Watched:
    """The structures of a run: those that are only observed, and those that a step may not break."""

    instances: Mapping[str, tuple[Instance, ...]]
    enforced: frozenset[str]
    pinned: frozenset[str]

    def pins(self) -> list[onnx.ValueInfoProto]:
        return [info for kind in self.pinned for instance in self.instances.get(kind, ()) for info in instance.pins]

    def lost(self, model: DetachedModel) -> dict[tuple[str, str], str]:
        """(kind, instance) → why it is not in `model`."""
        return {
            (kind, name): why
            for kind, instances in self.instances.items()
            for name, why in STRUCTURES[kind].lost(instances, model).items()
        }


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a step made, and what is wrong with it: `why` is empty for a sound result."""

    model: DetachedModel
    changed: bool
    lost: Mapping[tuple[str, str], str]
    measurement: Measurement | None
    why: str

    @property
    def errors(self) -> Mapping[str, Errors]:
        return self.measurement.errors if self.measurement else {}


def run_passes(
    model: DetachedModel,
    steps: Sequence[Step],
    policy: Policy,
    prover: Prover,
    bench: Workbench,
    observer: Observer = lambda *_: None,
) -> PassRun:
    """Run `steps` in order on the exported `model`; every change is proven, and what breaks something is reverted.

    Raises:
        PolicyMistake: an unknown name, or a `keep` that matches nothing in the model.
    """
    steps = _prepared(steps, policy, bench)
    watched = _find(model, policy, _all_names(steps, bench))
    power = prover.watch(model, [one for kind in watched.enforced for one in watched.instances[kind]])
    run = _Run(model, watched, prover, bench, exported=model)
    for index, step in enumerate(steps):
        observer(step.name, index, len(steps), None)
        for row in run.step(step, policy):
            observer(step.name, index, len(steps), row)
    run.conclude()
    verdicts = tuple(
        StructureVerdict(
            kind, one.name, one.module, (kind, one.name) not in run.lost, run.broken_by.get((kind, one.name))
        )
        for kind, instances in watched.instances.items()
        for one in instances
    )
    return PassRun(run.model, tuple(run.rows), verdicts, power, library_versions())


@dataclass(slots=True)
class _Run:
    """The state of the loop."""

    model: DetachedModel
    watched: Watched
    prover: Prover
    bench: Workbench
    exported: DetachedModel
    rows: list[PassRow] = field(default_factory=list)
    digest: str = ""
    proven: DetachedModel | None = None
    """The last model that was run and not only reasoned about, with the number of rows up to it."""
    proven_rows: int = 0
    lost: dict[tuple[str, str], str] = field(default_factory=dict)
    broken_by: dict[tuple[str, str], str] = field(default_factory=dict)

    def step(self, step: Step, policy: Policy) -> list[PassRow]:
        """Try one step; returns its row, after those of the inner passes that had to be taken out of it."""
        begun = time.perf_counter()
        before = len(self.rows)
        skip = policy.skips(step.name)
        if skip is not None:
            self._record(step, Status.SKIPPED, skip.reason, begun)
            return self.rows[before:]
        try:
            attempt = self._attempt(step)
            if attempt.lost or attempt.why:
                step, attempt = self._narrowed(step, attempt)
        except StepFailed as failure:
            self._record(step, Status(failure.status), str(failure), begun)
            return self.rows[before:]
        if attempt.why:
            self._record(step, Status.REVERTED, attempt.why, begun, attempt)
            return self.rows[before:]
        nodes = len(self.model.proto.graph.node)
        if attempt.changed:
            self.model, self.digest = attempt.model, ""
            if self.prover.has_run(self.model):
                self.proven, self.proven_rows = self.model, len(self.rows) + 1
        self.lost |= attempt.lost
        left_out = step.left_out if isinstance(step, Composite) else ()
        reason = "without " + ", ".join(left_out) if left_out else ""
        self._record(step, Status.RAN, reason, begun, attempt, nodes)
        return self.rows[before:]

    def conclude(self) -> None:
        """Run the final model, if its proof was that it computes the same as one that was run.

        Should onnxruntime refuse it all the same (a wrong type annotation, say), the steps since then are reverted.
        """
        base = self.proven or self.exported
        if self.model is base:
            return
        try:
            why = self.prover.run(self.model).why
        except StepFailed as failure:
            why = str(failure)
        if not why:
            return
        self.model = base
        for index in range(self.proven_rows, len(self.rows)):
            if self.rows[index].changed and self.rows[index].status is Status.RAN:
                self.rows[index] = replace(self.rows[index], status=Status.REVERTED, reason=f"the final model: {why}")

    def _attempt(self, step: Step) -> Attempt:
        outputs = [output.name for output in self.model.proto.graph.output]
        made = step.apply(pin(self.model, self.watched.pins()), self.bench)
        after = unpin(made, outputs)
        _same_signature(self.model, after)
        self.digest = self.digest or canonical_digest(self.model)
        if canonical_digest(after) == self.digest:
            return Attempt(self.model, False, {}, None, "")
        after = carry(self.model, after, step.name)
        lost = {key: why for key, why in self.watched.lost(after).items() if key not in self.lost}
        broken = [f"{kind} {name}: {why}" for (kind, name), why in lost.items() if kind in self.watched.enforced]
        if broken:
            return Attempt(after, True, lost, None, _several("breaks", broken))
        measurement = self.prover.measure(after)
        return Attempt(after, True, lost, measurement, measurement.why and f"differs: {measurement.why}")

    def _narrowed(self, step: Step, attempt: Attempt) -> tuple[Step, Attempt]:
        """Find the inner passes at fault; leave them out if what they broke must hold, else only name them."""
        if not isinstance(step, Composite):
            self._blame(attempt, step.name)
            return step, attempt
        tried: dict[tuple[str, ...], Attempt] = {(): attempt}

        def is_good(names: tuple[str, ...]) -> bool:
            if names not in tried:
                try:
                    tried[names] = self._attempt(step.without(names))
                except StepFailed as failure:
                    tried[names] = Attempt(self.model, False, {}, None, str(failure))
            return not tried[names].why and not tried[names].lost

        suspects = [name for name, kinds in DESTROYS.items() if any(kind in kinds for kind, _ in attempt.lost)]
        found = culprits(step.inner(self.bench), suspects or list(STAGES), is_good)
        if found is None:
            self._blame(attempt, step.name)
            return step, attempt
        guilty = [f"{step.name}/{name}" for name in found]
        # With several culprits, the one that did it is the one whose absence the others make up for.
        for name in found[1:] and found:
            others = tuple(other for other in found if other != name)
            is_good(others)
            if canonical_digest(tried[others].model) == canonical_digest(attempt.model):
                guilty.insert(0, f"{step.name}/{name}")
                break
        self._blame(attempt, guilty[0])
        if not attempt.why:
            return step, attempt
        for name in dict.fromkeys(guilty):
            self._record_inner(step, name, attempt)
        return step.without(found), tried[found]

    def _blame(self, attempt: Attempt, author: str) -> None:
        for key in attempt.lost:
            self.broken_by.setdefault(key, author)

    def _record_inner(self, step: Step, name: str, attempt: Attempt) -> None:
        nodes = len(self.model.proto.graph.node)
        after = len(attempt.model.proto.graph.node)
        reason = attempt.why
        self.rows.append(PassRow(name, step.source, Status.REVERTED, reason, nodes, after, 0.0, True, attempt.errors))

    def _record(
        self, step: Step, status: Status, reason: str, begun: float, attempt: Attempt | None = None, before: int = -1
    ) -> None:
        nodes = len(self.model.proto.graph.node)
        before = nodes if before < 0 else before
        after = len(attempt.model.proto.graph.node) if attempt else nodes
        changed = attempt is not None and attempt.changed
        errors = attempt.errors if attempt else {}
        seconds = time.perf_counter() - begun
        self.rows.append(PassRow(step.name, step.source, status, reason, before, after, seconds, changed, errors))


def library_versions() -> dict[str, str]:
    """Every library whose release can change the result of a pass run."""
    names = ("onnx", "onnx_ir", "onnxoptimizer", "onnxsim", "onnxscript", "onnxruntime", "numpy", "protobuf")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _prepared(steps: Sequence[Step], policy: Policy, bench: Workbench) -> tuple[Step, ...]:
    """Steps with the policy's skips told to those that have inner passes."""
    ready: list[Step] = []
    for step in steps:
        if not isinstance(step, Composite):
            ready.append(step)
            continue
        step.check(bench)
        ready.append(step.without([name for name in step.inner(bench) if policy.skips(f"{step.name}/{name}")]))
    policy.check(_all_names(steps, bench))
    return tuple(ready)


def _all_names(steps: Sequence[Step], bench: Workbench) -> tuple[str, ...]:
    """Names that a skip list may hold; onnxsim's own count only where it runs, since asking for them takes seconds."""
    with_onnxsim = any(isinstance(step, Composite) for step in steps)
    return tuple(row.name for row in catalog(bench, with_onnxsim=with_onnxsim))


def _find(model: DetachedModel, policy: Policy, names: Sequence[str]) -> Watched:
    found = {kind: structure.find(model) for kind, structure in STRUCTURES.items()}
    kept = policy.kept()
    for kind, required in kept.items():
        if required and not found[kind].instances:
            raise PolicyMistake(
                f"keep: {kind} matches nothing in this model, which has {found[kind].instead}; "
                f"write {kind + '?'!r} to keep it where it is"
            )
    watched = (kind for kind in policy.watched(names) if kind in STRUCTURES)
    instances = {kind: one.instances for kind, one in found.items()}
    return Watched(instances, frozenset((*kept, *watched)), frozenset(kept))


def _same_signature(before: DetachedModel, after: DetachedModel) -> None:
    initializers = {tensor.name for tensor in before.proto.graph.initializer}
    for what in ("input", "output"):
        had = [info.name for info in getattr(before.proto.graph, what) if info.name not in initializers]
        has = [info.name for info in getattr(after.proto.graph, what) if info.name not in initializers]
        if [name for name in has if name in had] != had:
            raise StepFailed(f"changes the model's {what}s from {had} to {has}")


def _several(verb: str, items: Sequence[str]) -> str:
    return f"{verb} {items[0]}" + (f" (and {len(items) - 1} more)" if len(items) > 1 else "")
