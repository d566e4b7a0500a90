"""Metadata: dropped where that is asked for, and taken whatever its text is."""

from __future__ import annotations

import onnx
import pytest

from passes.provenance import module_path_of
from passes.provenance.annotations import is_stripped, strip_metadata
from passes.structures.view import modules_of
from tests.support.onnx_models import detached, model_of

SCOPES = "pkg.torch.onnx.name_scopes"


def annotated(scopes: str) -> onnx.ModelProto:
    model = model_of("g (float[4] x) => (float[4] y) { y = Relu (x) }")
    model.graph.node[0].metadata_props.add(key=SCOPES, value=scopes)
    model.metadata_props.add(key="labels", value="cat, dog")
    return model


def test_nodes_lose_their_metadata_and_the_model_keeps_its_own() -> None:
    stripped = strip_metadata(detached(annotated("['', 'layer', 'relu']"))).proto
    assert not stripped.graph.node[0].metadata_props
    assert {entry.key for entry in stripped.metadata_props} == {"labels", "onnxline.metadata"}
    assert is_stripped(stripped)
    assert strip_metadata(detached(stripped)).proto == stripped


@pytest.mark.parametrize("text", ["[/red]", "null", "['x'", "{}", "-5", "[" * 5000, "\x00", "['', [], 3]"])
def test_scopes_of_any_text_are_taken(text: str) -> None:
    node = annotated(text).graph.node[0]
    assert isinstance(modules_of(node), tuple)
    assert module_path_of(node) is not None


def test_scopes_of_the_exporter_are_modules() -> None:
    assert modules_of(annotated("['', 'layer', 'relu']").graph.node[0]) == ("layer",)
