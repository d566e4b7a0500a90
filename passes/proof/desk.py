"""Where models are run: the draws, what is expected of them, and values of models that were run before.

Works in the proof worker, since onnxruntime may crash on a model that a pass has made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from passes.model.sessions import Session
from passes.model.sharing import Portable
from passes.model.stand_ins import Weight
from passes.proof.evidence import Draws, Watched
from passes.proof.moves import Distinct, distinct_arrays
from passes.proof.numbers import Errors, Tolerance, compare, same_bits
from passes.proof.precision import Precisions
from passes.proof.zeros import zeros_of

__all__ = ["KEEP_BYTES", "Desk", "ask"]

KEEP_BYTES = 2**18
"""Values larger than this are not held from one run to the next, unless they are at a kept structure."""

Arrays = dict[str, np.ndarray]


class Desk:
    """Runs models on every draw.

    Args:
        feeds: inputs by name, for each draw.
        tolerances: by dtype, in place of the documented ones.
    """

    def __init__(self, feeds: Sequence[Arrays], tolerances: Mapping[str, Tolerance]) -> None:
        self._feeds = feeds
        self._tolerances = tolerances
        self._computed_in: Precisions = {}
        self._expected: list[Arrays] = [{} for _ in feeds]
        self._inner: list[Arrays] = [{} for _ in feeds]
        self._values: list[Arrays] = [{} for _ in feeds]
        self._beside = ThreadPoolExecutor(1)
        self._excess: Future[list[float]] | None = None
        self._rehearsed: Future[Draws] | None = None

    def expect(self, outputs: Sequence[Arrays]) -> None:
        """The outputs to compare with, for each draw."""
        self._expected = list(outputs)

    def judge(self, computed_in: Precisions) -> None:
        """From now on judge values by the types that the exported model computes them in."""
        self._computed_in = computed_in

    def watch(
        self,
        model: Portable,
        inner: Sequence[str],
        keep: Mapping[str, str],
        computed_in: Precisions,
        *,
        is_reference: bool,
    ) -> Watched:
        """`run` the exported model, whose values called `inner` are from now on expected; see `judge`."""
        self.judge(computed_in)
        draws = self.run(model, inner, keep, as_expected=True, is_reference=is_reference)
        return Watched(draws, self.held(), self._nan_outputs())

    def _nan_outputs(self) -> list[str]:
        """The expected outputs with which nothing can be compared."""
        return [
            name
            for expected in self._expected
            for name, array in expected.items()
            if array.dtype.kind == "f" and np.isnan(array).any()
        ]

    def run(
        self,
        model: Portable,
        inner: Sequence[str],
        keep: Mapping[str, str],
        *,
        as_expected: bool = False,
        is_reference: bool = False,
    ) -> Draws:
        """Run `model` and compare its outputs, and the values called `inner`; both for each draw.

        Args:
            keep: value name → meaning, of those to hold for `equal`.
            as_expected: the values called `inner` are from now on what is expected of those names.
            is_reference: so are the outputs.
        """
        if is_reference:
            self._expected = [{} for _ in self._feeds]
        outputs = [info.name for info in model.model().graph.output]
        session = model.session(list(dict.fromkeys((*inner, *keep))))
        found = []
        for feeds, expected, known, values in zip(self._feeds, self._expected, self._inner, self._values, strict=True):
            got = session.run(feeds)
            if is_reference:
                expected.update({name: got[name] for name in outputs})
            if as_expected:
                known.update({name: got[name] for name in inner})
            kept = (name for name in keep if name in inner or got[name].nbytes <= KEEP_BYTES)
            values.update({keep[name]: got[name] for name in kept})
            probes = {name: known[name] for name in inner if name in known}
            found.append((self._compared(expected, got), self._compared(probes, got)))
        return found

    def rehearse(self, model: Portable, inner: Sequence[str]) -> None:
        """Begin to `run` a model of which nobody knows yet whether it will be asked for, beside what comes after."""
        self._rehearsed = self._beside.submit(self.run, model, inner, {})

    def rehearsed(self) -> Draws | None:
        """What `rehearse` has found; None at a desk that was set up since."""
        return None if self._rehearsed is None else self._rehearsed.result()

    def held(self) -> frozenset[str]:
        """The meanings of which every draw has the value."""
        return frozenset.intersection(*(frozenset(values) for values in self._values)) if self._values else frozenset()

    def equal(
        self,
        part: Portable,
        given: Mapping[str, str],
        distinct: Mapping[str, Distinct],
        pairs: Sequence[tuple[str, str]],
    ) -> list[bool]:
        """Whether the two values of each pair are the same bits in every draw.

        Args:
            part: a piece of a model that computes the first of each pair, and the second if it is not held.
            given: input name → the meaning of the held value to feed.
            distinct: input name → what to feed there, of which only the shape matters.
            pairs: names of values in `part`, or held meanings.
        """
        verdicts = [True] * len(pairs)
        session = None
        for feeds, values in zip(self._feeds, self._values, strict=True):
            fed = {**feeds, **distinct_arrays(distinct), **{name: values[meaning] for name, meaning in given.items()}}
            wanted = [name for pair in pairs for name in pair if name not in values]
            session = session or (_part_session(part, fed, wanted) if wanted else None)
            got = {**values, **(session.run(fed) if session else {})}
            for index, (left, right) in enumerate(pairs):
                verdicts[index] &= same_bits(got[left], got[right])
        return verdicts

    def plant(self, part: Portable, given: Mapping[str, str], zeroed: Sequence[str], seen: Sequence[str]) -> None:
        """Begin to find out how far the values called `seen` move when the weights `zeroed` are zero.

        Reads the first draw. `given` names values that are expected `inner` ones, or inputs of the model. It goes on
        beside the questions that come after it. Where it is known that all of `seen` are zeros then, nothing is run.
        """
        self._excess = self._beside.submit(self._moved_by, part, given, zeroed, seen)

    def excess(self) -> list[float]:
        """How far they moved, in units of their tolerance."""
        assert self._excess is not None, "nothing was planted"
        return self._excess.result()

    def _moved_by(
        self, part: Portable, given: Mapping[str, str], zeroed: Sequence[str], seen: Sequence[str]
    ) -> list[float]:
        fed = {**self._feeds[0], **{name: self._inner[0][value] for name, value in given.items()}}
        expected = {name: self._inner[0][name] for name in seen}
        if zeros_of(part.model().graph, zeroed, fed).issuperset(seen):
            got = {name: np.zeros_like(value) for name, value in expected.items()}
        else:
            got = _zeroed_session(part, fed, zeroed, seen).run(fed)
        return [errors.excess for errors in self._compared(expected, got).values()]

    def _compared(self, expected: Arrays, got: Arrays) -> dict[str, Errors]:
        return {
            name: compare(value, got[name], self._tolerances, self._computed_in.get(name))
            for name, value in expected.items()
        }


def _zeroed_session(part: Portable, fed: Arrays, zeroed: Sequence[str], outputs: Sequence[str]) -> Session:
    weights = part.mapped()
    weights |= {name: _zeros(weights[name]) for name in zeroed if name in weights}
    proto = part.model()
    for tensor in proto.graph.initializer:  # small ones lie in the model itself
        if tensor.name in zeroed and tensor.name not in weights:
            tensor.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(tensor)), tensor.name))
    _type_inputs(proto.graph, fed)
    return Session(proto, weights, outputs)


def _zeros(weight: Weight) -> Weight:
    return Weight(weight.dims, weight.data_type, np.zeros(weight.data.nbytes, np.uint8), "")


def _part_session(part: Portable, fed: Arrays, outputs: Sequence[str]) -> Session:
    proto = part.model()
    _type_inputs(proto.graph, fed)
    return Session(proto, part.mapped(), list(dict.fromkeys(outputs)))


def _type_inputs(graph: onnx.GraphProto, fed: Arrays) -> None:
    """Give inputs without a type that of what is fed: dtype and rank, since sizes may differ from draw to draw."""
    for info in graph.input:
        if not info.type.WhichOneof("value"):
            array = fed[info.name]
            dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
            info.CopyFrom(helper.make_tensor_value_info(info.name, dtype, [None] * array.ndim))


def ask(desk: dict[str, Any], owner: str, question: str, **arguments: Any) -> Any:
    """In the worker: put one question to the desk of `owner`; `open` sets up a new one."""
    if question == "open":
        desk[owner] = Desk(**arguments)
        return None
    return getattr(desk[owner], question)(**arguments)
