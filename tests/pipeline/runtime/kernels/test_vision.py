"""Kernels on regions of pictures against onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.runtime import compile_graph
from tests.pipeline.runtime.kernels.kernel_reference import Case, assert_close, expected, graph_of, rand


def roi_align(mode: str, *, half_pixel: bool, sampling_ratio: int) -> Case:
    """Regions inside, over the edge, tiny, and past the edge."""
    boxes = np.array([[1, 1, 9, 7], [-2, 3, 5, 20], [4.2, 4.2, 4.4, 4.9], [30, 30, 40, 35]], np.float32)
    inputs = [rand(2, 3, 8, 10), boxes, np.array([0, 1, 1, 0])]
    attrs = {"mode": mode, "half_pixel": half_pixel, "sampling_ratio": sampling_ratio, "spatial_scale": 0.5}
    node = {
        "mode": mode,
        "coordinate_transformation_mode": "half_pixel" if half_pixel else "output_half_pixel",
        "sampling_ratio": sampling_ratio,
        "spatial_scale": 0.5,
        "output_height": 3,
        "output_width": 2,
    }
    return Case("RoiAlign", inputs, attrs, node, by_ort=True, opset=16)


CASES = [
    roi_align("avg", half_pixel=True, sampling_ratio=0),
    roi_align("avg", half_pixel=False, sampling_ratio=2),
    roi_align("max", half_pixel=True, sampling_ratio=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_like_reference(case: Case) -> None:
    results = expected(case)
    actual = compile_graph(graph_of(case, results)).run({f"in{at}": array for at, array in enumerate(case.inputs)})
    assert_close(actual["out0"].numpy(), results[0])
