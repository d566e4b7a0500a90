"""What many targets cannot take is named, with counts, modules and what to do; a clean model is not mentioned."""

from __future__ import annotations

import onnx

from passes.portability import find_obstacles
from tests.support.onnx_models import attention

SPLIT = """<ir_version: 9, opset_import: ["": 20, "mine": 1]>
g (float[2, 4] x, string[2] words) => (float[2, 2] y, float[2, 2] z, float[2, 2] w, string[2] same) {
    parts = SplitToSequence <axis = 1> (x, two)
    y = SequenceAt (parts, zero)
    last = SequenceAt (parts, one)
    as_y = CastLike (last, y)
    z = mine.twice (as_y)
    w = mine.Unknown (z)
    same = Identity (words)
}
<domain: "mine", opset_import: ["": 20]>
twice (a) => (b) { b = Add (a, a) }
"""


def test_each_family_is_one_sentence_with_counts() -> None:
    model = onnx.parser.parse_model(SPLIT)
    for node in model.graph.node:
        if node.op_type == "SequenceAt":
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'blocks.0.norm', 'chunk']")
    sequences, likes, function, custom, strings = find_obstacles(model)
    assert sequences.startswith(
        "left over: 2 SequenceAt, 1 SplitToSequence (in blocks.0.norm): a sequence is no tensor"
    )
    assert "put onnxscript first in the recipe" in sequences
    assert likes.startswith("left over: 1 CastLike: ")
    assert function.startswith("left over: 1 mine::twice: many targets do not look inside")
    assert custom.startswith("left over: 1 mine::Unknown: it is no operator of ONNX's main set")
    assert strings.startswith("left over: 1 Identity: few targets have strings")


LOOP = """<ir_version: 9, opset_import: ["": 20]>
g (bool c, float[2] x) => (float[2] y) {
    y = If (c) <
        then_branch = t () => (float[2] a) { i = NonZero (x)  d = Cast <to = 1> (i)  a = Add (x, x) },
        else_branch = e () => (float[2] b) { b = Neg (x) }
    >
}
"""


def test_bodies_are_looked_into() -> None:
    obstacles = find_obstacles(onnx.parser.parse_model(LOOP))
    assert [text.split(":")[1].strip() for text in obstacles] == ["1 If", "1 NonZero"]


def test_a_clean_model_is_not_mentioned() -> None:
    assert find_obstacles(attention()) == ()
