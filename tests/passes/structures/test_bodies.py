"""Q, K and V inside of nodes with graphs: branches that may run, and recurrences in Scan and Loop."""

from __future__ import annotations

import pytest

from passes.context import PassContext
from passes.errors import PolicyError
from passes.structures import STRUCTURES
from tests.support.onnx_models import attention, detached, merged_attention
from tests.support.structure_models import drawn, found, lost, run

QKV = STRUCTURES["qkv"]
WEIGHTS = ", ".join(f"float[8, 8] {name}{at}" for at in (0, 1) for name in ("wq", "wk", "wv"))
HEAD = f"g (float[2, 6, 8] x, bool c) => (float[2, 6, 8] y) <{WEIGHTS}>"

CONDITIONS = {
    "a Constant": ("never = Constant <value = bool {0}> ()", 1),
    "a comparison of constants": (
        "a = Constant <value_int = 3> () b = Constant <value_int = 4> () never = Equal (a, b)",
        1,
    ),
    "a size that is known": (
        """s = Shape (x) one = Constant <value_int = 1> () b = Gather (s, one) d = Constant <value_int = 6> ()
        is = Equal (b, d) never = Not (is)""",
        1,
    ),
    "always": ("never = Constant <value = bool {1}> ()", 0),
}


def branch(at: int) -> str:
    return f"""b{at} () => (float[2, 6, 8] o{at}) {{
        q{at} = MatMul (r, wq{at}) k{at} = MatMul (r, wk{at}) v{at} = MatMul (r, wv{at})
        t{at} = Transpose <perm = [0, 2, 1]> (k{at}) s{at} = MatMul (q{at}, t{at})
        p{at} = Softmax <axis = -1> (s{at}) o{at} = MatMul (p{at}, v{at})
    }}"""


def chosen(condition: str, name: str = "never") -> str:
    branches = f"then_branch = {branch(0)}, else_branch = {branch(1)}"
    return f"{HEAD} {{ r = Relu (x) {condition} y = If <{branches}> ({name}) }}"


@pytest.mark.parametrize("way", CONDITIONS)
def test_only_the_branch_that_runs_is_held(way: str) -> None:
    condition, runs = CONDITIONS[way]
    instances = found("qkv", drawn(chosen(condition)))
    assert [[weight.name for weight in one.weights] for one in instances] == [[f"wq{runs}", f"wk{runs}", f"wv{runs}"]]


def test_another_kind_in_a_branch_is_named_and_what_to_do() -> None:
    result = STRUCTURES["attention"].find(detached(drawn(chosen(CONDITIONS["a Constant"][0]))))
    assert result.instances == ()
    assert "one inside of an If" in result.instead and "in a run without this keep" in result.remedy
    assert "inside" not in STRUCTURES["layernorm"].find(detached(drawn(chosen("", "c")))).instead


def test_both_branches_of_a_condition_from_data_are_held() -> None:
    assert len(found("qkv", drawn(chosen("", "c")))) == 2


def test_the_branch_is_kept_and_the_if_goes(context: PassContext) -> None:
    condition, _ = CONDITIONS["a Constant"]
    kept = run(drawn(chosen(condition)), context, ["onnxsim"], keep=["qkv"])
    assert [verdict.kept for verdict in kept.structures] == [True]
    final = kept.to_proto()
    assert "If" not in {node.op_type for node in final.graph.node}
    assert {tensor.name for tensor in final.graph.initializer} == {"wq1", "wk1", "wv1"}


def test_the_same_weights_in_a_dead_branch_keep_nothing() -> None:
    condition, _ = CONDITIONS["a Constant"]
    shared = chosen(condition)
    for name in ("wq", "wk", "wv"):
        shared = shared.replace(f", {name}0)", f", {name}1)")
    instances = found("qkv", drawn(shared))
    broken = shared.replace("(r, wk1) v1 = MatMul (r, wv1)", "(r, wq1) v1 = MatMul (r, wv1)")
    assert lost("qkv", instances, drawn(shared)) == {}
    assert len(lost("qkv", instances, drawn(broken))) == 1


STEP = """
    c = Constant <value_ints = [2]> () r = Constant <value_ints = [1]> ()
    kc = Unsqueeze (kt, c) vr = Unsqueeze (vt, r) qr = Unsqueeze (qt, r)
    WRITE
    o3 = MatMul (qr, sn) o = Squeeze (o3, r)
"""
SCANNED = (
    "g (float[6, 2, 8] x) => (float[6, 2, 8] y) <float[8, 8] wq, float[8, 8] wk, float[8, 8] wv, float[2, 8, 8] zero>"
)
PROJECTED = "q = MatMul (x, wq) k = MatMul (x, wk) v = MatMul (x, wv)"
STATES = {
    "a sum": "kv = Mul (kc, vr) sn = Add (s, kv)",
    "a product of column and row": "kv = MatMul (kc, vr) sn = Add (s, kv)",
    "a delta rule": """kr = Unsqueeze (kt, r) h = MatMul (kr, s) d = Sub (vr, h) kd = Mul (kc, d) sn = Add (s, kd)""",
}


def scan(state: str) -> str:
    step = f"""step (float[2, 8, 8] s, float[2, 8] qt, float[2, 8] kt, float[2, 8] vt) =>
        (float[2, 8, 8] sn, float[2, 8] o) {{ {STEP.replace("WRITE", state)} }}"""
    return f"{SCANNED} {{ {PROJECTED} last, y = Scan <num_scan_inputs = 3, body = {step}> (zero, q, k, v) }}"


def loop(state: str) -> str:
    step = f"""step (int64 i, bool c0, float[2, 8, 8] s) => (bool c1, float[2, 8, 8] sn, float[2, 8] o) {{
        c1 = Identity (c0) qt = Gather (q, i) kt = Gather (k, i) vt = Gather (v, i)
        {STEP.replace("WRITE", state)} }}"""
    ends = "n = Constant <value_int = 6> () t = Constant <value = bool {1}> ()"
    return f"{SCANNED} {{ {PROJECTED} {ends} last, y = Loop <body = {step}> (n, t, zero) }}"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("write", [scan, loop])
def test_roles_in_a_recurrence(write, state: str) -> None:
    (instance,) = found("qkv", drawn(write(STATES[state])))
    assert [(weight.role, weight.name) for weight in instance.weights] == [("Q", "wq"), ("K", "wk"), ("V", "wv")]
    assert [site.tight.name for site in instance.pins] == ["q", "k", "v"]


def test_an_attention_of_what_a_loop_carries_is_named() -> None:
    """Each turn reads the attention of the turn before: its nodes are computed from themselves."""
    text = """
    g (float[2, 8, 32] x) => (float[2, 8, 32] y) <float[32, 32] wq, float[32, 32] wk, float[32, 32] wv> {
        n = Constant <value_int = 3> () go = Constant <value = bool {1}> ()
        y = Loop <body = b (int64 i, bool c0, float[2, 8, 32] h) => (bool c1, float[2, 8, 32] a) {
            c1 = Identity (c0) q = MatMul (h, wq) k = MatMul (h, wk) v = MatMul (h, wv)
            kt = Transpose <perm = [0, 2, 1]> (k) s = MatMul (q, kt) p = Softmax <axis = -1> (s) a = MatMul (p, v)
        }> (n, go, x)
    }"""
    said = STRUCTURES["attention"].find(detached(drawn(text)))
    assert said.instances == () and "one inside of an If, a Loop or a Scan" in said.instead


def test_one_matrix_names_the_step_that_takes_it_apart(context: PassContext) -> None:
    with pytest.raises(PolicyError, match=r"one matrix in the source already: w .*split-qkv.* or write 'qkv\?'"):
        run(merged_attention(), context, ["eliminate_identity"], keep=["qkv"])
    packed = attention()
    del packed.graph.node[:]
    packed = drawn(
        """g (float[2, 6, 8] x) => (float[2, 6, 8] y) <float[8, 24] w, float[24] b> {
        y = com.microsoft.Attention <num_heads = 2> (x, w, b) }"""
    )
    said = QKV.find(detached(packed))
    assert said.instead == "1 attention block whose Q, K and V are one matrix in the source already: w (8×24)"
    assert "split-qkv" in said.remedy


def test_what_came_nearest_is_said() -> None:
    text = """g (float[2, 6, 8] x) => (float[2, 6, 8] y) <float[8, 8] wa, float[8, 8] wb, float[8, 8] wc> {
        a = MatMul (x, wa) b = MatMul (x, wb) c = MatMul (x, wc) d = Add (a, b) y = Add (d, c) }"""
    assert QKV.find(detached(drawn(text))).instead.endswith(
        "no Softmax); nearest: 3 products of one input, with wa, wb, wc"
    )
