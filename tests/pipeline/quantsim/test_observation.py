"""What tensors hold on a sample: extremes are computed where the tensors are, elements come in portions."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.weights.detached import attach
from passes.weights.sessions import Session
from pipeline.quantsim.observation import EMPTY, TensorObserver, divide_by_size, reduce_values
from tests.pipeline.quantsim.pictures_of_qdq import mlp
from tests.support.onnx_models import detached, model_of

BRANCHES = """
g (float[batch, 4] x, float[batch, 2] z) => (float[batch, 4] y) {
    w = Transpose (v)
    h = MatMul (x, w)
    r = Relu (h)
    y = Add (r, x)
    unread = Exp (z)
}
"""


def test_a_tensor_is_reduced_directly_after_the_node_that_makes_it() -> None:
    model = detached(model_of(BRANCHES, v=np.ones((4, 4), np.float32)))
    found = attach(reduce_values(model, ["h", "r"], ["ReduceMin", "ReduceMax"]))
    nodes = [f"{node.output[0]} = {node.op_type}({', '.join(node.input)})" for node in found.graph.node]
    assert nodes == [
        "w = Transpose(v)",
        "h = MatMul(x, w)",
        "h/ReduceMin = ReduceMin(h)",
        "h/ReduceMax = ReduceMax(h)",
        "r = Relu(h)",
        "r/ReduceMin = ReduceMin(r)",
        "r/ReduceMax = ReduceMax(r)",
    ]
    assert [info.name for info in found.graph.output] == ["h/ReduceMin", "h/ReduceMax", "r/ReduceMin", "r/ReduceMax"]


@pytest.mark.parametrize("place", range(8))
def test_the_extremes_of_a_tensor_with_a_nan_are_nan(place: int) -> None:
    x = np.ones((2, 4), np.float32)
    x.flat[place] = np.nan
    found = TensorObserver(mlp(), ["x", "h"]).find_extremes({"x": x}, 1)
    assert np.isnan(list(found.values())).all()


@pytest.mark.parametrize("most_bytes", [1, 48, 2**29])
def test_elements_are_those_of_one_run_whatever_the_portions(most_bytes: int) -> None:
    model, names = mlp(), ["x", "h", "r", "y"]
    draw = np.random.default_rng(3)
    tensors = TensorObserver(model, names, most_bytes)
    for number in range(2):
        sample = {"x": draw.standard_normal((2, 4)).astype(np.float32)}
        expected = Session.of(model, ["h", "r"]).run(sample) | sample
        found = dict(tensors.walk(sample, number))
        assert list(found) == names
        assert all(np.array_equal(found[name], expected[name]) for name in names)
        ends = {name: (expected[name].min(), expected[name].max()) for name in names}
        assert tensors.find_extremes(sample, number) == ends


def test_a_tensor_without_elements_has_no_extremes() -> None:
    model = detached(model_of(BRANCHES, v=np.ones((4, 4), np.float32)))
    sample = {"x": np.ones((0, 4), np.float32), "z": np.ones((2, 2), np.float32)}
    found = TensorObserver(model, ["x", "r", "unread"]).find_extremes(sample, 1)
    assert found == {"x": EMPTY, "r": EMPTY, "unread": pytest.approx((np.e, np.e))}


def test_a_long_chain_of_constants_is_computed() -> None:
    """Longer than Python's stack is deep."""
    chain = "\n".join(f"c{at + 1} = Neg (c{at})" for at in range(1500))
    model = detached(
        model_of(f"g (float[2] x) => (float[2] y) {{ {chain} y = Add (x, c1500) }}", c0=np.float32([1, 2]))
    )
    found = TensorObserver(model, ["y"]).find_extremes({"x": np.float32([10, 10])}, 1)
    assert found == {"y": (11, 12)}


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 20))
def test_portions_are_bounded_and_complete(sizes: list[int], most: int) -> None:
    named = {str(place): size for place, size in enumerate(sizes)}
    portions = list(divide_by_size(named, most))
    assert [name for portion in portions for name in portion] == list(named)
    assert all(len(portion) == 1 or sum(named[name] for name in portion) <= most for portion in portions)
    together = [sum(named[name] for name in (*first, second[0])) for first, second in pairwise(portions)]
    assert all(size > most for size in together)  # no portion ends early


MIB = 8

PEAK = """
import numpy as np, onnx
from passes.weights.detached import detach
from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.noise import measure_noise
from pipeline.quantsim.placement import PlacementRule, place

def peak():
    # What getrusage says is at least the peak of the process that has started this one.
    words = open("/proc/self/status").read().split()
    return int(words[words.index("VmHWM:") + 1]) // 2**10

nodes = " ".join(f"v{i + 1} = {('Sin', 'HardSwish')[i % 2]} (v{i})" for i in range(90))
head = '<ir_version: 10, opset_import: ["": 21]> g (float[16, 131072] v0) => (float[16, 131072] v90)'
model = detach(onnx.parser.parse_model(f"{head} {{ {nodes} }}"))
sample = {"v0": np.ones((16, 131072), np.float32)}
begun = peak()
placement = place(model, [PlacementRule("op:*", None, parse_precision("uint16"))])
ranges = calibrate(model, placement, [sample])
print(peak() - begun)
measure_noise(model, encode(placement, ranges, model), [f"v{i}" for i in range(1, 90)], [sample])
print(peak() - begun)
"""


def test_activations_are_freed_as_they_are_read() -> None:
    """A chain of 90 values of 8 MiB: all of them at once are 720 MiB, and three times as much in a model of noise. Its
    1,170 nodes are more than those for which memory is planned in another order."""
    found = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout.split()
    calibration, noise = map(int, found)
    assert calibration < 8 * MIB
    assert noise < 16 * MIB
