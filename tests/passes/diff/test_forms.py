"""Weights in another form, constants that one model computes and the other stores, and how long all that gets."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from passes.diff import compare_models, diff_text
from passes.provenance import carry, name_weights
from tests.support.onnx_models import detached, matrix, model_of, vector

READS = "g (float[2, 8] x) => (float[2, 12] y) {{ {} [p] y = MatMul (x, {}) }}"
TURNED = READS.format("[t] wt = Transpose <perm = [1, 0]> (w)", "wt")
STORED = READS.format("", "val_27")
BOTH = READS.format("[t] wt = Add (w, w)", "wt")


def lines(before: onnx.ModelProto, after: onnx.ModelProto, most: int | None = 20) -> list[str]:
    text = diff_text(compare_models(detached(before), detached(after)), most=most)
    return [line for line in text.splitlines() if line.startswith("  ")]


def test_a_weight_that_comes_back_transposed_under_another_name() -> None:
    weight = matrix(12, 8, 0)
    before, after = model_of(TURNED, w=weight), model_of(STORED, val_27=weight.T.copy())
    assert lines(before, after) == [
        "  Transpose t → stored constant val_27",
        "  w float[12,8], transposed → val_27 float[8,12]",
    ]
    assert lines(after, before) == ["  added Transpose t", "  val_27 float[8,12], transposed → w float[12,8]"]


@pytest.mark.parametrize(
    ("shape", "perm", "form"),
    [((2, 3, 4), (2, 0, 1), "transposed"), ((24,), (0,), "reshaped"), ((3, 3), (1, 0), "transposed")],
)
def test_forms_are_found_by_content(shape: tuple[int, ...], perm: tuple[int, ...], form: str) -> None:
    weight = vector(int(np.prod(shape)), 0).reshape(shape)
    other = weight.transpose(perm) if len(shape) > 1 else weight.reshape(4, 6)
    spelled, other_spelled = (",".join(map(str, array.shape)) for array in (weight, other))
    before = model_of(f"g () => (float[{spelled}] y) {{ y = Neg (w) }}", w=weight)
    after = model_of(f"g () => (float[{other_spelled}] y) {{ y = Neg (fresh) }}", fresh=np.ascontiguousarray(other))
    assert f"  w float[{spelled}], {form} → fresh float[{other_spelled}]" in lines(before, after)
    changed = np.ascontiguousarray(other).copy()
    changed.flat[0] += 1
    after = model_of(f"g () => (float[{other_spelled}] y) {{ y = Neg (fresh) }}", fresh=changed)
    assert not any(form in line for line in lines(before, after))


def test_a_computed_value_that_is_stored() -> None:
    weight = matrix(8, 12, 0)
    before, after = model_of(BOTH, w=weight), model_of(STORED, val_27=weight + weight)
    assert lines(before, after) == [
        "  Add t → stored constant val_27",
        "  removed w float[8,12]",
        "  computed by Add t → stored constant val_27 float[8,12]",
    ]
    assert lines(after, before)[1] == "  stored constant val_27 float[8,12] → computed by Add t"


def test_one_of_equal_tensors_is_left() -> None:
    text = "g (float[32] x) => (float[32] y) {{ h = Add (x, a) y = Add (h, {}) }}"
    zeros = np.zeros(32, np.float32)
    lines_of_diff = lines(model_of(text.format("b"), a=zeros, b=zeros), model_of(text.format("a"), a=zeros))
    assert lines_of_diff == ["  removed b float[32], equal to a, which is read in its place"]


ARRANGED = """g (float[2, 8] x) => (float[2, 8] q, float[2, 8] k) {{
    {}
    q = MatMul (x, {})
    k = MatMul (x, {})
}}"""
MERGED = "g (float[2, 8] x) => (float[2, 8] q, float[2, 8] k) { b = MatMul (x, v) q, k = Split <num_outputs = 2> (b) }"


def test_a_merge_of_transposed_weights_names_them_as_the_first_model_does() -> None:
    """The merged tensor knows the module's weights alone, which were transposed before."""
    query, key = matrix(8, 8, 0), matrix(8, 8, 1)
    turns = "qt = Transpose <perm = [1, 0]> (wq) kt = Transpose <perm = [1, 0]> (wk)"
    source = detached(model_of(ARRANGED.format(turns, "qt", "kt"), wq=query, wk=key))
    turned = detached(model_of(ARRANGED.format("", "v1", "v2"), v1=query.T.copy(), v2=key.T.copy()))
    turned = name_weights(source, carry(source, turned, "turn"))
    merged = detached(model_of(MERGED, v=np.concatenate([query.T, key.T], axis=1)))
    merged = name_weights(turned, carry(turned, merged, "merge"))
    said = "  wq_transposed, wk_transposed float[8,8], merged → wq_merged float[8,16]"
    assert said in diff_text(compare_models(turned, merged)).splitlines()


def test_a_line_lists_fewer_nodes_rather_than_cut_a_name() -> None:
    names = [f"layer_{place}_{'of_a_deep_model_' * 3}" for place in range(7)]
    chain = " ".join(f"[{name}] v{place + 1} = Neg (v{place})" for place, name in enumerate(names))
    (line,) = lines(
        model_of(f"g (float[2] v0) => (float[2] y) {{ {chain} y = Relu (v7) }}"),
        model_of("g (float[2] v0) => (float[2] y) { y = Relu (v0) }"),
    )
    assert line == f"  removed {', '.join(f'Neg {name}' for name in names[:3])} and 4 more"


def test_long_lists_and_names_are_cut_with_a_count() -> None:
    name = "layer_" * 60
    chain = " ".join(f"[{name}{i}] v{i + 1} = Neg (v{i})" for i in range(40))
    before = model_of(f"g (float[2] v0) => (float[2] y) {{ {chain} y = Relu (v40) }}")
    after = model_of("g (float[2] v0) => (float[2] y) { y = Relu (v0) }")
    cut, whole = (diff_text(compare_models(detached(before), detached(after)), most=most) for most in (20, None))
    assert max(map(len, cut.splitlines())) <= 300
    assert len(cut) < 1500
    assert "Neg -40" in cut
    assert "and 39 more" in cut
    assert whole.count(name) == 40
