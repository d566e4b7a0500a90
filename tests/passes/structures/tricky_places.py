"""Attention over a cache that is written to, in functions and in bodies; and a model of both kinds of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from tests.passes.structures.tricky_model import WEIGHTS, Tricky
from tests.support.structure_models import drawn

CACHED = f"""
g (float[2, 1, 32] x, float[2, 8, 32] kc, float[2, 8, 32] vc, int64[1] at, int64[2, 1, 32] where)
    => (float[2, 1, 32] y) <{WEIGHTS}> {{
    q0 = MatMul (x, wq) k0 = MatMul (x, wk) v0 = MatMul (x, wv) WRITTEN
    kt = Transpose <perm = [0, 2, 1]> (k) s = MatMul (q0, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v) }}"""

WRITES = {
    "ScatterElements": """
        k = ScatterElements <axis = 1> (kc, where, k0) v = ScatterElements <axis = 1> (vc, where, v0)""",
    "ScatterND": """
        last = Constant <value_ints = [1]> () row = Unsqueeze (at, last)
        ku = Transpose <perm = [1, 0, 2]> (kc) kn = Transpose <perm = [1, 0, 2]> (k0) kw = ScatterND (ku, row, kn)
        vu = Transpose <perm = [1, 0, 2]> (vc) vn = Transpose <perm = [1, 0, 2]> (v0) vw = ScatterND (vu, row, vn)
        k = Transpose <perm = [1, 0, 2]> (kw) v = Transpose <perm = [1, 0, 2]> (vw)""",
    "Concat": "k = Concat <axis = 1> (kc, k0) v = Concat <axis = 1> (vc, v0)",
}
CACHES: Mapping[str, Callable[[], Tricky]] = {
    f"cache by {name}": lambda text=text: Tricky(drawn(CACHED.replace("WRITTEN", text)))
    for name, text in WRITES.items()
}

FUNCTION = f"""
g (float[2, 8, 32] x) => (float[2, 8, 32] y) <{WEIGHTS}> {{ y = own.attend (x, wq, wk, wv) }}
<domain: "own", opset_import: ["": 20]>
attend (x, wq, wk, wv) => (y) {{
    q0 = MatMul (x, wq) k0 = MatMul (x, wk) v0 = MatMul (x, wv)
    kt = Transpose <perm = [0, 2, 1]> (k0) s = MatMul (q0, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v0)
}}"""

INSIDE = """q0 = MatMul (X, wq) k0 = MatMul (X, wk) v0 = MatMul (X, wv) kt = Transpose <perm = [0, 2, 1]> (k0)
    s = MatMul (q0, kt) p = Softmax <axis = -1> (s)"""
BODIES = {
    "If": f"""g (float[2, 8, 32] x, bool c) => (float[2, 8, 32] y) <{WEIGHTS}> {{
        y = If (c) <then_branch = t () => (float[2, 8, 32] a) {{ {INSIDE.replace("X", "x")} a = MatMul (p, v0) }},
                    else_branch = e () => (float[2, 8, 32] b) {{ b = Relu (x) }}> }}""",
    "If, projected outside": f"""g (float[2, 8, 32] x, bool c) => (float[2, 8, 32] y) <{WEIGHTS}> {{
        q0 = MatMul (x, wq) k0 = MatMul (x, wk) v0 = MatMul (x, wv)
        y = If (c) <then_branch = t () => (float[2, 8, 32] a) {{
            kt = Transpose <perm = [0, 2, 1]> (k0) s = MatMul (q0, kt) p = Softmax <axis = -1> (s)
            a = MatMul (p, v0) }},
                    else_branch = e () => (float[2, 8, 32] b) {{ b = Relu (x) }}> }}""",
    "Loop": f"""g (float[2, 8, 32] x) => (float[2, 8, 32] y) <{WEIGHTS}, int64 n = {{3}}, bool go = {{1}}> {{
        y = Loop (n, go, x) <body = b (int64 i, bool ci, float[2, 8, 32] h) => (bool co, float[2, 8, 32] a) {{
            co = Identity (ci) {INSIDE.replace("X", "h")} a = MatMul (p, v0) }}> }}""",
    "Scan": f"""g (float[4, 2, 8, 32] x) => (float[4, 2, 8, 32] y) <{WEIGHTS}> {{
        y = Scan <num_scan_inputs = 1, body = b (float[2, 8, 32] h) => (float[2, 8, 32] a) {{
            {INSIDE.replace("X", "h")} a = MatMul (p, v0) }}> (x) }}""",
    "If in a Loop": f"""g (float[2, 8, 32] x, bool c) => (float[2, 8, 32] y)
        <{WEIGHTS}, int64 n = {{3}}, bool go = {{1}}> {{
        y = Loop (n, go, x) <body = b (int64 i, bool ci, float[2, 8, 32] h) => (bool co, float[2, 8, 32] a) {{
            co = Identity (ci) a = If (c) <then_branch = t () => (float[2, 8, 32] u) {{
                {INSIDE.replace("X", "h")} u = MatMul (p, v0) }},
                else_branch = e () => (float[2, 8, 32] w) {{ w = Relu (h) }}> }}> }}""",
}


def function() -> onnx.ModelProto:
    """Attention in a function of the model's own."""
    head = '<ir_version: 10, opset_import: ["": 20, "own": 1]>'
    model = onnx.parser.parse_model(f"{head}\n{FUNCTION}")
    plain = drawn(f"g (float[2, 8, 32] x) => (float[2, 8, 32] y) <{WEIGHTS}> {{ y = Identity (x) }}")
    model.graph.initializer.extend(plain.graph.initializer)
    del model.graph.value_info[:]
    return model


NESTED: Mapping[str, Callable[[], Tricky]] = {
    "function": lambda: Tricky(function(), products=None),
    **{
        name: lambda text=text, name=name: Tricky(
            drawn(text), products=("q0", "k0", "v0") if "outside" in name else None
        )
        for name, text in BODIES.items()
    },
}


def merged_partly() -> onnx.ModelProto:
    """Two blocks with three projections, and two with one."""
    block = """
        q{0} = MatMul ({1}, wq{0}) k{0} = MatMul ({1}, wk{0}) v{0} = MatMul ({1}, wv{0})"""
    joined = """
        j{0} = MatMul ({1}, w{0}) q{0}, k{0}, v{0} = Split <axis = -1, num_outputs = 3> (j{0})"""
    rest = """
        kt{0} = Transpose <perm = [0, 2, 1]> (k{0}) s{0} = MatMul (q{0}, kt{0}) p{0} = Softmax <axis = -1> (s{0})
        {2} = MatMul (p{0}, v{0})"""
    body, weights = [], []
    for at, source, result in ((0, "x", "h0"), (1, "h0", "h1"), (2, "h1", "h2"), (3, "h2", "y")):
        body.append(((block if at % 2 else joined) + rest).format(at, source, result))
        weights += [f"float[32, 32] w{role}{at}" for role in "qkv"] if at % 2 else [f"float[32, 96] w{at}"]
    return drawn(f"g (float[2, 8, 32] x) => (float[2, 8, 32] y) <{', '.join(weights)}> {{ {' '.join(body)} }}")
