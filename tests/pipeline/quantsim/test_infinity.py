"""What is infinite or NaN on a sample stays in float where the model drops it, and is refused where it is used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from passes.weights.detached import DetachedModel
from pipeline.config.quantsim import FLOAT, parse_precision
from pipeline.errors import UsageError
from pipeline.quantsim.calibration import MeasuredRanges, RangeMeasurement, calibrate, group_ranges, measure
from pipeline.quantsim.encodings import encode, round_trip
from pipeline.quantsim.encodings_file import encode_chosen_infinities
from pipeline.quantsim.histograms import Method
from pipeline.quantsim.infinity import find_dropped_infinities
from pipeline.quantsim.placement import Placement, PlacementRule, place
from tests.pipeline.quantsim.pictures_of_qdq import model_of

HEAD = "g (float[3] x, bool[3] c) => (float[3] y) <float one = {1.0}>"

CHOSEN = f"{HEAD} {{ log = Log(x) twice = Add(log, log) z = Where(c, x, twice) y = Mul(z, one) }}"
LIMITED = f"{HEAD} {{ log = Log(x) z = Max(log, one) y = Mul(z, one) }}"
MOVED = f"{HEAD} {{ log = Log(x) both = Concat <axis = 0> (log, x) z = Max(both, one) s = ReduceSum(z) y = Mul(s, x) }}"
INTEGERS = f"""{HEAD} {{
    log = Log(x) place = Cast <to = 7> (log) near = Cast <to = 7> (x) bin = Where(c, near, place)
    z = Cast <to = 1> (bin) y = Mul(z, one)
}}"""
MASKED = f"{HEAD} {{ log = Log(x) rest = Sub(x, x) off = Mul(log, rest) z = Where(c, x, off) y = Mul(z, one) }}"
COMPARED = f"{HEAD} {{ log = Log(x) is = Less(log, one) y = Where(is, x, one) }}"

DROPPED: dict[str, tuple[str, set[str], str]] = {
    "Where": (CHOSEN, {"log", "twice"}, "Where drops those elements"),
    "Max": (LIMITED, {"log"}, "Max drops those elements"),
    "after Concat": (MOVED, {"log", "both"}, "Max drops those elements"),
    "integers": (INTEGERS, {"log"}, "Where drops those elements"),
    "NaN before Where": (MASKED, {"log", "off"}, "Where drops those elements"),
    "comparison": (COMPARED, {"log"}, "Less drops those elements"),
}

EVERYTHING = (PlacementRule("op:*", activations=parse_precision("uint8")),)

ROWS = ([1, 2, 4], [0, 1, 3])
SAMPLES = [{"x": np.array(row, np.float32), "c": np.array([True, False, False])[np.argsort(row)]} for row in ROWS]
"""The smallest number is chosen from x, so that Log(0) is not."""


def placed_by(
    model: DetachedModel, samples: Sequence[dict[str, np.ndarray]], method: Method
) -> tuple[MeasuredRanges, Placement]:
    placement = place(model, EVERYTHING)
    measured = measure(model, placement, samples, method)
    return measured, place(model, (*EVERYTHING, *find_dropped_infinities(model, placement, measured.extents())))


@pytest.mark.parametrize("method", ["minmax", "mse", "percentile"])
@pytest.mark.parametrize("name", DROPPED)
def test_infinity_that_the_model_drops_stays_in_float(name: str, method: Method) -> None:
    text, expected, reason = DROPPED[name]
    model = model_of(text)
    measured, placement = placed_by(model, SAMPLES, method)
    left = {placed.site.tensor: placed.reason for placed in placement.left_in_float()}
    assert left == dict.fromkeys(expected, f"it is infinite or NaN on a sample, and {reason}")
    assert all(np.isfinite(limits).all() for limits in group_ranges(measured, placement, model).values())


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD} {{ log = Log(x) y = Mul(log, one) }}",  # an output of the model
        f"{HEAD} {{ log = Log(x) y = Softmax(log) }}",  # a mask, whose values are used
        f"{HEAD} {{ log = Log(x) z = Where(c, x, log) e = Exp(log) y = Mul(z, e) }}",  # dropped by one of two
        f"{HEAD} {{ log = Log(x) y = Where(c, log, x) }}",  # taken, and not dropped
    ],
)
def test_infinity_that_something_uses_is_refused(text: str) -> None:
    model = model_of(text)
    measured, placement = placed_by(model, SAMPLES, "minmax")
    with pytest.raises(UsageError, match="'log' reaches -inf to"):
        group_ranges(measured, placement, model)


@pytest.mark.parametrize("method", ["minmax", "mse", "percentile"])
@pytest.mark.parametrize("row", [[4, 1, 0], [0, 1, 4], [1, 0, 4]])
def test_a_nan_that_something_uses_is_refused_by_name_wherever_it_is(row: list[float], method: Method) -> None:
    model = model_of(f"{HEAD} {{ log = Log(x) rest = Sub(x, x) off = Mul(log, rest) z = Max(off, x) y = Mul(z, x) }}")
    samples = [SAMPLES[0], {"x": np.array(row, np.float32), "c": np.ones(3, np.bool_)}, SAMPLES[0]]
    placement = place(model, (*EVERYTHING, PlacementRule("tensor:log", activations=FLOAT)))
    measured = measure(model, placement, samples, method)
    assert np.isnan(measured.extents()["off"]).all()
    assert not list(find_dropped_infinities(model, placement, measured.extents()))
    with pytest.raises(UsageError, match="'off' is NaN on a sample, which no scale can express"):
        group_ranges(measured, placement, model)


def test_a_model_without_infinity_is_placed_as_before() -> None:
    model = model_of(CHOSEN)
    _, placement = placed_by(model, SAMPLES[:1], "minmax")
    assert not placement.left_in_float()


def test_a_stopped_run_knows_what_was_infinite() -> None:
    model = model_of(CHOSEN)
    placement = place(model, EVERYTHING)
    data = [*SAMPLES[::-1], SAMPLES[0]]
    known = RangeMeasurement(model, placement, "mse").add(data[0])
    again = RangeMeasurement(model, placement, "mse", known)
    assert [again.add(sample) is None for sample in data] == [True, *[False] * (len(data) - 1)]
    assert again.finish().extents() == measure(model, placement, data, "mse").extents()


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("y = Mul(z, one)", {"low"}),
        ("w = Where(c, one, low) v = Mul(z, w) y = Mul(v, one)", set()),  # two results with ranges of their own
        ("w = Max(z, low) y = Mul(w, one)", set()),  # a reader that is no Where
    ],
)
def test_infinity_that_a_where_chooses_has_the_encoding_of_the_result(rest: str, expected: set[str]) -> None:
    """For the file of encodings: a converter would calibrate a constant without an entry by itself."""
    model = model_of(f"{HEAD} {{ z = Where(c, x, low) {rest} }}", low=LOW)
    samples = [{"x": np.array(row, np.float32), "c": np.ones(3, bool)} for row in ROWS]
    placement = place(model, EVERYTHING)
    encodings = encode(placement, calibrate(model, placement, samples), model)
    found = encode_chosen_infinities(model, placement, encodings)
    assert found.keys() == expected and "low" not in encodings
    for encoding in found.values():
        x = np.array([3.0, -np.inf], np.float32)
        once = round_trip(x, encodings["z"], is_stored=False)
        twice = round_trip(round_trip(x, encoding, is_stored=True), encodings["z"], is_stored=False)
        assert once.tolist() == twice.tolist()


LOW = np.array(-np.inf, np.float32)
