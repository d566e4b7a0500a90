"""`passes.optimize`: the whole pass run on an ONNX model, with that model itself as the reference."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import onnx

from passes.context import PassContext, import_libraries, limit_runs, open_context
from passes.errors import ModelError, PolicyError, UsageError, check_arguments, is_number
from passes.graph.formatting import format_type
from passes.graph.index import required_inputs
from passes.graph.inference import start_process
from passes.load import to_path
from passes.model.analysis import AnalyzedModel
from passes.policy.policy import GROUPS, Policy, check_lists
from passes.proof.draws import FURTHER_SIZES, Draw, DrawnInput, DrawPlan
from passes.proof.lookups import has_loops, length_inputs, rows_by_input
from passes.proof.masks import independent_dims
from passes.proof.prover import STRUCTURE, Prover, StructureProver
from passes.proof.relation import ModelInputs
from passes.recipe import DEFAULT_RECIPE
from passes.recipe.recipe import RecipeItem, library_imports, names_of, pass_names, steps_of
from passes.run.apply_step import check_names, fitting_feeds, fix_input_shapes, without_weight_readers
from passes.run.restart import describe_misplaced, join_runs, restart
from passes.run.result import PassRow, PassRun, Status
from passes.run.runner import ChangeObserver, Observer, run_passes
from passes.step import Repeat, Step, flatten
from passes.weights.detached import DetachedModel, read_model
from passes.weights.sharing import detached_copy
from passes.weights.weight_stacks import collapse, expand
from passes.worker.platforms import check_limits

if TYPE_CHECKING:  # imported where they are used: most models have neither encodings nor layers as functions
    from passes.encodings.carry import CarriedEncodings
    from passes.encodings.encoding import Encoding
    from passes.functions import FunctionLayout

FIRST_SIZE: Final = 2
"""What open dims are drawn as at first."""


def optimize(
    model: onnx.ModelProto | str | Path | DetachedModel,
    recipe: Sequence[RecipeItem] = DEFAULT_RECIPE,
    skip: Sequence[str] = (),
    keep: Sequence[str] = (),
    *,
    watch: bool = True,
    proof: Literal["numbers", "structure"] = "numbers",
    feeds: Sequence[Mapping[str, np.ndarray]] = (),
    sizes: Sequence[int] = FURTHER_SIZES,
    timeout_s: float = 600.0,
    memory_gib: float | None = None,
    reproducers: Path | None = None,
    encodings: Mapping[str, Encoding] | str | Path | None = None,
    contrib: Literal["keep", "refuse"] = "keep",
    context: PassContext | None = None,
    prover: Prover | None = None,
    observer: Observer = lambda *_: None,
    on_change: ChangeObserver = lambda *_: None,
) -> PassRun:
    """Run `recipe` over `model` and prove after every change that it computes what it did before.

    Args:
        model: left as it is; a path may have external data next to it.
        recipe: names of passes, and mappings of a name to its options, in order; by default onnxoptimizer's
            fuse-and-eliminate set, then onnxsim.
        skip: passes, groups and globs to leave out, such as `fuse_qkv` or `fusions`.
        keep: structures to keep, such as `qkv` or `op:Softmax`; `qkv?` may be absent.
        watch: whether the skip of a pass that destroys a structure also reverts other passes that destroy it.
        proof: `structure` runs nothing and compares no numbers, and leaves external weights unread: for a model that is
            too large to run. Give it as a path. What is not proven then: docs/how-to/weight-free.md.
        feeds: inputs to compare on, name → array of the input's shape and dtype; seeded draws when there are none. Open
            dims are drawn as 2, or larger if the model does not run with 2; then each is drawn as another size too.
        sizes: further sizes to draw every open dim as, where the model runs so.
        timeout_s: seconds for one call of native code.
        memory_gib: GiB that one worker process may allocate; see `passes.context.worker_memory`.
        reproducers: a folder for the smallest model that still brings a step down; none is saved by default.
        encodings: those of `model`, by tensor or as a file of AIMET's, to be carried to the final model: see
            `PassRun.encodings`.
        contrib: `refuse` reverts what brings in operators that ONNX does not have, such as `com.microsoft::Attention`;
            of a composite step only the inner passes that do.
        context: workers and a folder that several optimizations share, so that the workers start once; threads that
            share it take turns. `timeout_s` and `memory_gib` are then those with which it was opened.
        prover: proves the changes in place of the seeded draws, on that `context`, whose caller limits the runs.
        observer: is called when a step begins and when it has ended; see `passes.run.runner.Observer`.
        on_change: is shown each change of the model; see `passes.run.runner.ChangeObserver`.

    Returns:
        A PassRun: the final model, a row for each pass, and a verdict on each structure.

    Raises:
        ModelError: the model cannot be read or does not run.
        PolicyError: an unknown name, a `keep` that matches nothing, or a single value where a list is expected.
        UsageError: a value that an argument cannot have; `encodings` of other tensors than those of the model.

    Example:
        >>> import passes
        >>> run = passes.optimize("model.onnx", ["eliminate_identity", "fuse_qkv"], keep=["qkv"])
        >>> [(row.name, row.nodes_before - row.nodes_after) for row in run.rows]
        [('eliminate_identity', 1), ('fuse_qkv', 0)]
    """
    check_lists(recipe=recipe, skip=skip, keep=keep, feeds=feeds, sizes=sizes)
    _check_values(feeds, sizes, timeout_s, memory_gib)
    check_arguments(
        ("watch", watch, type(watch) is bool, "True or False"),
        ("proof", proof, isinstance(proof, str) and proof in ("numbers", STRUCTURE), f"'numbers' or {STRUCTURE!r}"),
        ("contrib", contrib, isinstance(contrib, str) and contrib in ("keep", "refuse"), "'keep' or 'refuse'"),
        ("reproducers", reproducers, reproducers is None or isinstance(reproducers, Path), "a Path, or None"),
        ("context", context, context is None or isinstance(context, PassContext), "what open_context gives, or None"),
        ("prover", prover, prover is None or hasattr(prover, "measure"), "a Prover, or None"),
        ("observer", observer, callable(observer), "a function"),
        ("on_change", on_change, callable(on_change), "a function"),
    )
    with nullcontext(context) if context else open_context(timeout_s, memory_gib) as context, context.turn:
        policy = Policy(tuple(skip), tuple(keep), watch, contrib)
        imports = library_imports(name for name in names_of(recipe) if not policy.skips(name))
        if imports:  # first: onnxsim's takes longer than the model to be read, and names to be checked
            context.worker.begin(import_libraries, functions=imports)
        if proof != STRUCTURE:
            context.proofs.start()
        start_process()
        context.spill.renew()
        steps = steps_of(recipe, context.user_code)
        if not all(step.makes_reference for step in flatten(steps)):
            context.worker.start()
        stored = read_source(model, context, unread=True if proof == STRUCTURE else None)
        if stored.has_layers():
            _refuse_on_layers(steps, encodings)
        check_names(flatten(steps), policy, context)
        for item in filter(_makes_reference, steps):
            if isinstance(item, Repeat) or (prover is not None and not item.keeps_outputs):
                raise PolicyError(describe_misplaced(item))
        run = _Stages(policy, proof, sizes, timeout_s, reproducers, context, observer, on_change, prover, not feeds)
        given = None if encodings is None else _read_encodings(encodings, collapse(stored)[0])
        return run.through(stored, steps, feeds, given)


@dataclass(frozen=True, slots=True)
class _Stages:
    """Runs a recipe in stages: a step that makes a reference ends one, and is proven by its own relation."""

    policy: Policy
    proof: str
    sizes: Sequence[int]
    timeout_s: float
    reproducers: Path | None
    context: PassContext
    observer: Observer
    on_change: ChangeObserver
    prover: Prover | None
    has_own_draws: bool  # not the inputs of the caller; a stage before may have drawn other shapes
    observes: bool = True
    """Whether structures that are only observed are looked for."""

    def through(
        self,
        stored: DetachedModel,
        steps: Sequence[Step | Repeat],
        feeds: Sequence[Mapping[str, np.ndarray]],
        given: Mapping[str, Encoding] | None,
        earlier: PassRun | None = None,
    ) -> PassRun:
        """Run `steps` on `stored`, after an `earlier` stage; `given` are the encodings of `stored`."""
        place = next((at for at, item in enumerate(steps) if _makes_reference(item)), len(steps))
        policy = self.policy if place == len(steps) and earlier is None else self._policy_of(steps[:place], earlier)
        total = len(flatten(steps)) + (len(earlier.rows) if earlier else 0)
        done = len(earlier.rows) if earlier else 0

        def observe(name: str, index: int, _: int, row: PassRow | None) -> None:
            self.observer(name, done + index, total, row)

        # Nothing to prove: no step before one that is proven by its relation, or none after one that was proven.
        is_empty = place == 0 and self.prover is None and (bool(steps) or earlier is not None)
        stage = replace(self, proof=STRUCTURE, observes=not steps) if is_empty else self
        run, drawn = stage._stage(stored, steps[:place], feeds, given, policy, observe, done)
        run = run if earlier is None else join_runs(earlier, run)
        if place == len(steps):
            return run
        step = steps[place]
        assert isinstance(step, Step), "checked before the first stage"
        self.observer(step.name, place + done, total, None)
        begun = time.perf_counter()
        inputs = self._inputs_of(run.model, feeds) if is_empty else ModelInputs(run.model, self.context, drawn)
        with nullcontext() if inputs.are_none else limit_runs(self.context, run.model):
            is_last = place + 1 == len(steps)
            encoded = run.encodings.encodings if run.encodings is not None else ()
            made = restart(step, run.model, inputs, self.policy, self.context, is_last=is_last, encoded=encoded)
        row = replace(made.row, seconds=time.perf_counter() - begun)
        self.observer(step.name, place + done, total, row)
        self.on_change(len(run.rows), row, AnalyzedModel(run.model), AnalyzedModel(made.model))
        encodings = run.encodings
        if encodings is not None and row.changed:
            from passes.encodings.carry import join_carried

            log = _VersionLog()
            log.note_change(0, row, AnalyzedModel(run.model), AnalyzedModel(made.model))
            with self.context.drawing(lambda: ()):
                then = log.carry(run.model, made.model, encodings.encodings, self.context, made.same)
            encodings = join_carried(encodings, then)
        if is_empty:
            run = replace(run, example=next(iter(made.feeds), {}), coverage=made.coverage)
        run = replace(run, model=made.model, rows=(*run.rows, row), encodings=encodings)
        known = None if encodings is None else encodings.encodings
        return self.through(made.model, steps[place + 1 :], made.feeds, known, run)

    def _inputs_of(self, model: DetachedModel, feeds: Sequence[Mapping[str, np.ndarray]]) -> ModelInputs:
        """The inputs for the proof of a step that no other step comes before: `feeds`, or else draws."""
        if feeds or self.proof == STRUCTURE:
            return ModelInputs(model, self.context, feeds if self.proof != STRUCTURE else ())
        return ModelInputs(model, self.context, plan=plan_draws(model, self.sizes, advice=self.context.run_advice))

    def _stage(
        self,
        stored: DetachedModel,
        steps: Sequence[Step | Repeat],
        feeds: Sequence[Mapping[str, np.ndarray]],
        given: Mapping[str, Encoding] | None,
        policy: Policy,
        observer: Observer,
        first: int,
    ) -> tuple[PassRun, Sequence[Mapping[str, np.ndarray]]]:
        """Run steps that keep inputs and outputs; the model itself is the reference. Returns the draws too."""
        context, proof = self.context, self.proof
        limits = nullcontext() if self.prover or proof == STRUCTURE else limit_runs(context, stored)
        fixed = fix_input_shapes(flatten(steps), stored.proto)
        feeds = (
            fitting_feeds(feeds, fixed) if fixed and self.has_own_draws else feeds
        )  # a stage before drew other shapes
        prover = self.prover or _choose_prover(stored, context, proof, feeds, self.sizes, fixed)
        source, stacks = collapse(stored)
        layout: FunctionLayout | None = None
        if source.has_layers():
            from passes.functions import LayoutProver, lay_out

            source, layout = lay_out(source)
            assert layout is not None, "it has layers"
            prover = LayoutProver(prover, layout.fold if proof == STRUCTURE else layout.make_whole)
        versions = _VersionLog(lambda index, *change: self.on_change(first + index, *change))
        steps = without_weight_readers(steps) if source.unread() else steps
        with limits, context.drawing(prover.feeds):
            run = run_passes(
                *(source, steps, policy, prover, context, observer, self.reproducers, versions.note_change),
                observes=self.observes,
            )
            carried = None if given is None else versions.carry(source, run.model, given, context)
            drawn = list(prover.feeds())
        run = replace(run, encodings=carried)
        if layout is not None:
            from passes.functions import fold_run

            run = fold_run(run, layout)
        return replace(run, model=expand(run.model, stacks, stored)), drawn

    def _policy_of(self, steps: Sequence[Step | Repeat], earlier: PassRun | None) -> Policy:
        """The policy with what can be known of these steps: all names were checked before the first stage."""
        names = pass_names(flatten(steps), self.context)
        skip = tuple(
            entry
            for entry in self.policy.skip
            if entry in GROUPS or any(Policy((entry,)).skips(name) for name in names)
        )
        keep = self.policy.keep if earlier is None else tuple(f"{kind.rstrip('?')}?" for kind in self.policy.keep)
        return replace(self.policy, skip=skip, keep=keep)


def _refuse_on_layers(steps: Sequence[Step | Repeat], encodings: object) -> None:
    """Refuse what a model with layer functions cannot take.

    Raises:
        PolicyError: a step that changes inputs, outputs or types, or encodings.
    """
    step = next((step for step in flatten(steps) if step.makes_reference or step.fixes_defaults), None)
    found = "encodings" if encodings is not None else f"the step {step.name}" if step is not None else ""
    if found:
        raise PolicyError(
            f"the model has layers as functions, which {found} cannot be used with: export without export.functions, "
            "or inline them with onnx.inliner.inline_local_functions"
        )


def _makes_reference(item: Step | Repeat) -> bool:
    return any(step.makes_reference for step in flatten([item]))


class _VersionLog:
    """Keeps the model that each accepted step has made, for the encodings to be carried through."""

    def __init__(self, on_change: ChangeObserver = lambda *_: None) -> None:
        self._on_change = on_change
        self._versions: dict[int, tuple[str, AnalyzedModel]] = {}

    def note_change(self, index: int, row: PassRow, before: AnalyzedModel, after: AnalyzedModel) -> None:
        self._versions.pop(index, None)
        if row.changed and row.status is Status.RAN:
            self._versions[index] = (row.name, after)
        self._on_change(index, row, before, after)

    def carry(
        self,
        source: DetachedModel,
        final: DetachedModel,
        encodings: Mapping[str, Encoding],
        context: PassContext,
        same: Collection[str] = (),
    ) -> CarriedEncodings:
        from passes.encodings.carry import carry_encodings
        from passes.encodings.versions import ModelVersion

        steps = [version for _, version in sorted(self._versions.items())]
        versions = [("", AnalyzedModel(source)), *steps, ("", AnalyzedModel(final))]
        return carry_encodings([ModelVersion(*version) for version in versions], encodings, context, same)


def _read_encodings(encodings: Mapping[str, Encoding] | str | Path, model: DetachedModel) -> dict[str, Encoding]:
    from passes.encodings.aimet import read_aimet
    from passes.encodings.encoding import fit_encodings

    given = encodings if isinstance(encodings, Mapping) else read_aimet(to_path(encodings))[0]
    return fit_encodings(given, model)


def _check_values(feeds: Sequence[object], sizes: Sequence[object], timeout_s: object, memory_gib: object) -> None:
    for draw in feeds:
        if not isinstance(draw, Mapping):
            raise UsageError(f"feeds holds {type(draw).__name__}, expected mappings of an input's name to its array")
    for size in sizes:
        if not is_number(size) or size != int(size) or size < 1:
            raise UsageError(f"sizes holds {size!r}, expected integers of 1 or more")
    check_limits(timeout_s, memory_gib)


def read_source(
    model: onnx.ModelProto | str | Path | DetachedModel, context: PassContext, *, unread: bool | None = None
) -> DetachedModel:
    """The model that a run begins with; large weights of a message go to a file of the context.

    Args:
        model: left as it is.
        context: its folder has the file.
        unread: whether weights of a file stay unread; see `passes.weights.detached.read_model`.

    Raises:
        ModelError: it is no model, or cannot be read.
    """
    if isinstance(model, DetachedModel):
        return model
    if isinstance(model, onnx.ModelProto):
        return detached_copy(model, context.spill)
    return read_model(to_path(model), unread=unread)


def _choose_prover(
    model: DetachedModel,
    context: PassContext,
    proof: str,
    feeds: Sequence[Mapping[str, np.ndarray]],
    sizes: Sequence[int],
    inputs: onnx.ModelProto | None,
) -> Prover:
    """`model` itself is the reference, on draws of the shapes that `inputs` declares."""
    if proof == STRUCTURE:
        return StructureProver()
    from passes.proof.numeric import NumericProver  # not above: a run of one step that makes a reference needs it not

    if feeds:
        return NumericProver.of_itself(feeds, context)
    return NumericProver.of_plan(plan_draws(model, sizes, inputs, context.run_advice), context)


def open_dims(model: onnx.ModelProto) -> tuple[str, ...]:
    """The names of the dims of inputs without a fixed size; all dims without a name share the empty name.

    A dim that is the sum of others by its name, such as `total_sequence_length`, is left out.
    """
    dims = [dim for info in required_inputs(model.graph) for dim in info.type.tensor_type.shape.dim]
    return independent_dims(dim.dim_param for dim in dims if not dim.HasField("dim_value"))


def second_sizes(names: Sequence[str]) -> tuple[Mapping[str, int], ...]:
    """Sizes to draw open dims as after FIRST_SIZE; the sizes that reveal most faults come first.

    A size that a pass took for a constant shows at another size. A dim that a pass took for another dim shows where the
    two sizes differ. But a model may need equal sizes, or exactly FIRST_SIZE.
    """
    distinct = {name: FIRST_SIZE + 1 + index for index, name in enumerate(names)}
    alike, same = dict.fromkeys(names, FIRST_SIZE + 1), dict.fromkeys(names, FIRST_SIZE)
    return tuple(sizes for index, sizes in enumerate((distinct, alike, same)) if sizes not in (distinct, alike)[:index])


def plan_draws(
    model: DetachedModel, sizes: Sequence[int] = FURTHER_SIZES, inputs: onnx.ModelProto | None = None, advice: str = ""
) -> DrawPlan:
    """The draws to try on a model that is its own reference.

    Args:
        model: the reference.
        sizes: to draw open dims as, in addition to the first size and the size after it.
        inputs: a model with the inputs to draw, where other dims of them are fixed than in `model`.
        advice: of the error, such as `run_advice` of the PassContext.

    Raises:
        ModelError: an input is no tensor.
    """
    infos = required_inputs((inputs or model.proto).graph)
    names = open_dims(inputs or model.proto)
    plan = DrawPlan(
        tuple(_input_to_draw(info, advice) for info in infos),
        (dict.fromkeys(names, FIRST_SIZE),),
        second_sizes(names),
        tuple(dict.fromkeys(sizes)),
        open=names,
    )
    return plan.with_rows(rows_by_input(model), lengths=length_inputs(model), has_loops=has_loops(model))


def draw_feeds(model: DetachedModel, seed: int, *, sizes: Mapping[str, int] | None = None) -> dict[str, np.ndarray]:
    """Seeded inputs for every graph input that has no initializer; `sizes` are those of open dims, by name.

    Raises:
        ModelError: an input is no tensor, or too large to be drawn.
    """
    draw = Draw(seed, {**dict.fromkeys(open_dims(model.proto), FIRST_SIZE), **(sizes or {})})
    return DrawPlan(tuple(map(_input_to_draw, required_inputs(model.proto.graph))), ()).feeds(draw)


def _input_to_draw(info: onnx.ValueInfoProto, advice: str = "") -> DrawnInput:
    if info.type.WhichOneof("value") != "tensor_type":
        raise ModelError(
            f"input {info.name!r} has the type {format_type(info)}, and inputs are drawn for tensors only"
            f"{advice and f'; {advice}'}"
        )
    dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type).name
    low, high = (-1.0, 1.0) if "float" in dtype else (0.0, 2.0)
    dims = info.type.tensor_type.shape.dim
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in dims)
    return DrawnInput(info.name, shape, dtype, low, high, info.name, is_assumed=True)


def drawn_shape(info: onnx.ValueInfoProto, sizes: Mapping[str, int]) -> list[int]:
    """The shape of an input, with `sizes` for open dims."""
    dims = info.type.tensor_type.shape.dim
    return [dim.dim_value if dim.HasField("dim_value") else sizes.get(dim.dim_param, FIRST_SIZE) for dim in dims]
