"""Runs of models in the proof worker: the one question to it, the side that answers, and the side that asks.

The question: run one model on every draw, compare values, and keep some of them. The worker holds nothing between two
questions. Arrays lie in files that both processes map, so a worker that has died is replaced by putting the same
question to a new one.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from passes.errors import StepFailed
from passes.proof.draw_choice import choose_draws
from passes.proof.draws import Draw, DrawPlan
from passes.proof.gauges import Gauges, Readings, add_gauges
from passes.proof.numbers import DRAWN, Errors, Tolerance, compare, same_bits
from passes.proof.precision import Precisions
from passes.weights.mapped import FileMaps, FileRange
from passes.weights.sharing import MappedModel, portable
from passes.weights.stand_ins import Weight
from passes.worker.platforms import return_free_memory

if TYPE_CHECKING:  # who answers needs no more than the above
    from passes.context import PassContext
    from passes.proof.claims import ProofPart
    from passes.proof.exported_run import InjectedFault
    from passes.proof.prover import Reference
    from passes.weights.detached import DetachedModel
    from passes.weights.sessions import Session


Arrays = dict[str, np.ndarray]

INLINE_BYTES: Final = 2**10
"""Arrays up to this size are sent in the message."""

THREADED_BYTES: Final = 2**18
"""Values below this size in sum are compared sooner than two threads start."""

KEEP_BYTES: Final = 2**18
"""Values in `RunRequest.hold` that are larger are not kept."""

LARGE_BYTES: Final = 2**26
"""Weights above this size in sum: what the run before has freed is given back before such a model runs. On ViT-base it
is 54 MiB of the peak, or nothing, as the heap happens to lie, and takes 0.02 s of 0.3."""

ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a file."""

    file_range: FileRange
    dtype: np.dtype
    shape: tuple[int, ...]


Value = np.ndarray | StoredArray
"""An array, or where it lies."""


def load(values: Mapping[str, Value]) -> Arrays:
    """The arrays of `values`; those in files are mapped, and read-only."""
    maps = FileMaps()
    return {
        name: value
        if isinstance(value, np.ndarray)
        else np.asarray(maps.view(value.file_range)).view(value.dtype).reshape(value.shape)
        for name, value in values.items()
    }


def store(arrays: Mapping[str, np.ndarray], path: Path) -> dict[str, Value]:
    """Append `arrays` to a file, and return where they lie; small arrays, and arrays of objects, are returned as they
    are.

    Raises:
        OSError: the disk is full.
    """
    stored: dict[str, Value] = {}
    with path.open("ab") as file:
        for name, array in arrays.items():
            if array.nbytes <= INLINE_BYTES or array.dtype.hasobject:
                stored[name] = np.array(array)
                continue
            offset = -(-file.tell() // ALIGNMENT) * ALIGNMENT
            file.write(bytes(offset - file.tell()))
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            stored[name] = StoredArray(FileRange(str(path), offset, array.nbytes), array.dtype, array.shape)
    return stored


@dataclass(frozen=True, slots=True)
class Criteria:
    """What values are judged by.

    Args:
        tolerances: by dtype, in place of the documented ones.
        computed_in: the types that the exported model computes values in.
        shares: value → the factor on its absolute tolerance.
    """

    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    computed_in: Precisions = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)

    def errors(self, expected: Arrays, results: Arrays) -> dict[str, Errors]:
        """The errors of the values that are `expected`; of large ones two at a time, as numpy releases the GIL."""

        def errors_of(name: str) -> Errors:
            judged_as, share = self.computed_in.get(name), self.shares.get(name, 1.0)
            return compare(expected[name], results[name], self.tolerances, judged_as, share)

        if sum(array.nbytes for array in expected.values()) < THREADED_BYTES:
            return {name: errors_of(name) for name in expected}
        with ThreadPoolExecutor(2) as pool:
            return dict(zip(expected, pool.map(errors_of, expected), strict=True))


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Run `model` on every draw.

    Args:
        draws: for each draw what is fed by name, and what values of the model are compared with.
        file: where to keep arrays.
        own: values that become the expected ones: they are compared with themselves, and kept.
        hold: values to keep if they are small.
        same: pairs that have to be the same bits; each of them is a value of the model, or is fed. No draw is run after
            one on which a pair differs.
        zeroed: weights to set to zero.
        may_evaluate: whether ONNX's evaluator may run the model where onnxruntime has no kernel.
        plan: the draws to choose from, in place of `draws`.
    """

    model: MappedModel
    draws: Sequence[tuple[Mapping[str, Value], Mapping[str, Value]]]
    criteria: Criteria
    file: str
    own: Sequence[str] = ()
    hold: Sequence[str] = ()
    same: Sequence[tuple[str, str]] = ()
    zeroed: Sequence[str] = ()
    gauges: Gauges = field(default_factory=Gauges)
    may_evaluate: bool = True
    plan: DrawPlan | None = None


@dataclass(frozen=True, slots=True)
class DrawAnswer:
    """The results on one draw: errors by value, what was kept, and whether all pairs are the same."""

    errors: Mapping[str, Errors]
    kept: Mapping[str, Value]
    is_same: bool = True


@dataclass(frozen=True, slots=True)
class RunAnswer:
    """The answer to a `RunRequest`; `drawn` and `skipped` are what was chosen of its plan."""

    draws: Sequence[DrawAnswer]
    readings: Readings
    is_evaluated: bool
    drawn: Sequence[Draw] = ()
    skipped: Sequence[str] = ()


def run_model(request: RunRequest) -> RunAnswer:
    """In the worker: run a model with its gauges, or without them where it does not run with them.

    Raises:
        StepFailed: onnxruntime refuses the model, or stops.
    """
    refusals: list[StepFailed] = []
    for may_evaluate in (False, True) if request.may_evaluate else (False,):  # onnxruntime, if only without gauges
        for gauges in [request.gauges] + [Gauges()] * (request.gauges != Gauges()):
            why_not = " ".join(str(refusals[0]).split())[:200] if refusals and gauges != request.gauges else ""
            try:
                return _run_gauged(request, gauges, Readings(why_not=why_not), may_evaluate)
            except StepFailed as failure:
                refusals.append(failure)
    raise refusals[-1]


def _run_gauged(request: RunRequest, gauges: Gauges, readings: Readings, may_evaluate: bool) -> RunAnswer:
    draws = [(load(feeds), load(expected)) for feeds, expected in request.draws]
    session = _open_session(request, gauges, draws, may_evaluate)
    file, answers, drawn, skipped = Path(request.file), list[DrawAnswer](), list[Draw](), list[str]()
    file.unlink(missing_ok=True)  # of a worker that has died

    def run_all() -> Iterator[tuple[Arrays, Arrays, Arrays]]:
        """What is fed, what is expected, and the results, for each draw."""
        if request.plan is None:
            yield from ((feeds, expected, session.run(feeds)) for feeds, expected in draws)
            return
        outputs = [info.name for info in request.model.model().graph.output]
        steady = [name for name in outputs if request.criteria.computed_in.get(name) != DRAWN]
        for chosen in choose_draws(request.plan, session.run, steady, skipped):
            drawn.append(chosen.draw)
            yield dict(chosen.feeds), {}, dict(chosen.results)

    for feeds, expected, results in run_all():
        own = {name: results[name] for name in request.own}
        small = {name: results[name] for name in request.hold if results[name].nbytes <= KEEP_BYTES}
        values = feeds | results
        is_same = all(same_bits(values[left], values[right]) for left, right in request.same)
        answers.append(DrawAnswer(request.criteria.errors(expected | own, results), store(small | own, file), is_same))
        readings.add(gauges, results)
        del results, own, small, values  # the next draw is run in their memory
        if not is_same:  # one draw refutes what is claimed of all
            break
    return RunAnswer(answers, readings, session.is_evaluated, drawn, skipped)


def _open_session(
    request: RunRequest, gauges: Gauges, draws: Sequence[tuple[Arrays, Arrays]], may_evaluate: bool
) -> Session:
    from passes.weights.sessions import Session  # not above: who only asks needs no onnxruntime

    proto, weights = request.model.model(), request.model.map_weights()
    if sum(weight.data.nbytes for weight in weights.values()) > LARGE_BYTES:
        return_free_memory()
    fed, expected = draws[0] if draws else ({}, {})
    pairs = [name for pair in request.same for name in pair if name not in fed]
    values = [*expected, *request.own, *request.hold, *pairs, *add_gauges(proto.graph, gauges)]
    _set_to_zero(proto.graph, weights, request.zeroed)
    _type_inputs(proto.graph, fed)
    return Session(proto, weights, list(dict.fromkeys(values)), may_evaluate=may_evaluate)


def _set_to_zero(graph: onnx.GraphProto, weights: dict[str, Weight], names: Sequence[str]) -> None:
    for tensor in graph.initializer:
        if tensor.name in names and tensor.name in weights:
            weight = weights[tensor.name]
            zeros = np.zeros(weight.data.nbytes, np.uint8)
            weights[tensor.name] = Weight(weight.dims, weight.data_type, zeros, "")
        elif tensor.name in names:  # small weights are stored in the model itself
            tensor.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(tensor)), tensor.name))


def _type_inputs(graph: onnx.GraphProto, fed: Arrays) -> None:
    """Give inputs without a type the dtype and rank of what is fed; sizes may differ from draw to draw."""
    for info in graph.input:
        if not info.type.WhichOneof("value"):
            array = fed[info.name]
            dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
            info.CopyFrom(helper.make_tensor_value_info(info.name, dtype, [None] * array.ndim))


def _largest(array: np.ndarray) -> np.ndarray:
    """The largest finite magnitude in `array`, as an array: what zeros in its place are furthest from."""
    magnitudes = np.abs(array[np.isfinite(array)])
    return np.full(1, magnitudes.max(initial=0), array.dtype)


@dataclass(slots=True)
class DrawValues:
    """The values of one draw; most arrays lie in files."""

    feeds: Mapping[str, Value]
    outputs: dict[str, Value]
    """Expected outputs."""
    inner: dict[str, Value] = field(default_factory=dict)
    """Expected values inside of the model."""
    held: dict[str, Value] = field(default_factory=dict)
    """Value digest → the value, as some model computed it."""


class ProofClient:
    """Puts the questions of one proof to the worker.

    Args:
        references: the draws; `take_draws` adds those that the worker chooses.
        criteria: by what values are judged.
    """

    def __init__(self, references: Sequence[Reference], criteria: Criteria, context: PassContext) -> None:
        self.criteria = criteria
        self._worker, self._spill = context.proofs, context.spill
        self._folder = Path(tempfile.mkdtemp(prefix="proof-", dir=context.folder))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._numbers = itertools.count()
        self._may_evaluate = True
        """Whether ONNX's evaluator may run a model: the first one, and later ones if the first one needed it."""
        self.draws: list[DrawValues] = []
        self.take_draws(references)

    def take_draws(self, references: Sequence[Reference]) -> None:
        """Take further draws."""
        file = self._folder / "references"
        self.draws += [
            DrawValues(store(reference.feeds, file), store(reference.outputs, file)) for reference in references
        ]

    def held_digests(self) -> frozenset[str]:
        """The digests of which every draw has the value."""
        return frozenset.intersection(*(frozenset(draw.held) for draw in self.draws)) if self.draws else frozenset()

    def has_nan(self) -> str:
        """An expected output that holds NaN, so that nothing can be compared with it; empty for none."""
        for draw in self.draws:
            for name, array in load(draw.outputs).items():
                if array.dtype.kind == "f" and np.isnan(array).any():
                    return name
        return ""

    def run_exported(
        self, model: DetachedModel, own: Sequence[str], hold: Sequence[str], gauges: Gauges, plan: DrawPlan | None
    ) -> Callable[[], RunAnswer]:
        """Begin to run the model whose values `own` become the expected values; draws are chosen from `plan`.

        The returned function waits for the answer.
        """
        expected = [{name: value for name, value in draw.outputs.items() if name not in own} for draw in self.draws]
        request = self._request(model, expected, own=own, hold=hold, gauges=gauges, plan=plan)
        return self._worker.begin(run_model, request=request)

    def note(self, answer: RunAnswer, outputs: Sequence[str], inner: Sequence[str], digests: Mapping[str, str]) -> None:
        """Take values that an answer has kept: expected `outputs` and `inner` values, and those that have `digests`."""
        self._may_evaluate = self._may_evaluate and answer.is_evaluated
        for draw, answered in zip(self.draws, answer.draws, strict=True):
            kept = answered.kept
            draw.outputs |= {name: kept[name] for name in outputs}
            draw.inner |= {name: kept[name] for name in inner}
            draw.held |= {digest: kept[name] for name, digest in digests.items() if name in kept}

    def run(self, model: DetachedModel, inner: Sequence[str], hold: Mapping[str, str]) -> RunAnswer:
        """Run a model and compare its outputs, and `inner` values; keep the values called `hold` by their digests."""
        expected = [
            {**draw.outputs, **{name: draw.inner[name] for name in inner if name in draw.inner}} for draw in self.draws
        ]
        answer = self._ask(self._request(model, expected, hold=[*hold]))
        self.note(answer, (), (), hold)
        return answer

    def read_gauges(self, model: DetachedModel, gauges: Gauges) -> Readings:
        """The readings of `gauges` in `model`; empty, with a reason, if `model` does not run with them."""
        try:
            return self._ask(self._request(model, gauges=gauges)).readings
        except StepFailed as failure:
            return Readings(why_not=" ".join(str(failure).split())[:200])

    def are_equal(self, part: ProofPart) -> bool:
        """Whether the values of each pair of `part` have the same bits on every draw."""
        request = self._request(part.model, feeds=self._feeds_of(part), same=part.pairs)
        return all(draw.is_same for draw in self._ask(request).draws)

    def run_part(self, part: ProofPart, names: Collection[str]) -> RunAnswer:
        """Run a part, and compare the values called `names`, outputs and `inner` values, with the expected ones."""
        known = [draw.outputs | draw.inner for draw in self.draws]
        expected = [{name: values[name] for name in names if name in values} for values in known]
        return self._ask(self._request(part.model, expected, self._feeds_of(part)))

    def _feeds_of(self, part: ProofPart) -> list[dict[str, Value]]:
        held = [{name: draw.held[digest] for name, digest in part.held.items()} for draw in self.draws]
        return [{**draw.feeds, **values} for draw, values in zip(self.draws, held, strict=True)]

    def excess(self, fault: InjectedFault) -> dict[str, float]:
        """How far `fault` moves each of its values on the first draw, in units of the tolerance."""
        draw = self.draws[0]
        largest = {
            name: _largest(array) for name, array in load({name: draw.inner[name] for name in fault.vanishing}).items()
        }
        errors = self.criteria.errors(largest, {name: np.zeros_like(array) for name, array in largest.items()})
        if fault.computed:
            feeds = {**draw.feeds, **{name: draw.inner[name] for name in fault.cuts}}
            expected = {name: draw.inner[name] for name in fault.computed}
            answer = self._ask(self._request(fault.model, [expected], [feeds], zeroed=fault.zeroed))
            errors |= answer.draws[0].errors
        return {name: found.excess for name, found in errors.items()}

    def _request(
        self,
        model: DetachedModel,
        expected: Sequence[Mapping[str, Value]] = (),
        feeds: Sequence[Mapping[str, Value]] = (),
        **asked: Any,
    ) -> RunRequest:
        fed = feeds or [draw.feeds for draw in self.draws]
        draws = list(zip(fed, expected or [{}] * len(fed), strict=True))
        file = str(self._folder / str(next(self._numbers)))
        asked = {"may_evaluate": self._may_evaluate, **asked}
        return RunRequest(portable(model, self._spill), draws, self.criteria, file, **asked)

    def _ask(self, request: RunRequest) -> RunAnswer:
        return self._worker.ask(run_model, request=request)
