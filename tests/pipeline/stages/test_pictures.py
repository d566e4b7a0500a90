"""What the report's page shows of a model, and up to which size."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode

import pytest

import passes
from pipeline.stages.pictures import BrokenStructures, take_pictures
from tests.support.onnx_models import detached, model_of


@pytest.mark.parametrize(("count", "is_drawn"), [(5_000, True), (5_001, False)])
def test_the_graph_is_drawn_up_to_5000_nodes(count: int, is_drawn: bool) -> None:
    nodes = " ".join(f"v{place + 1} = Relu (v{place})" for place in range(count))
    model = detached(model_of(f"g (float[4] v0) => (float[4] v{count}) {{ {nodes} }}"))
    pictures = take_pictures(passes.optimize(model, [], proof="structure"), model, BrokenStructures())
    assert bool(pictures.view) == is_drawn
    if is_drawn:
        before, after = json.loads(zlib.decompress(b64decode(pictures.view)))["scenes"]
        assert len(before["boxes"]) == len(after["boxes"]) == count + 2  # the input and the output
