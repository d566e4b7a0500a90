"""Small valid models of many kinds, from which broken ones are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

DATA_FILE = "seed.data"
"""The file of the external data of all broken models."""
DATA_BYTES = 4096

TEXTS: Mapping[str, str] = {
    "mlp": """
        mlp (float[batch, 16] x) => (float[batch, 4] y) {
            h = Gemm <transB = 1> (x, w1, b1)
            a = Relu (h)
            y = Gemm (a, w2, b2)
        }""",
    "cnn": """
        cnn (float[batch, 3, 8, 8] x) => (float[batch, 5] y) {
            c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [1, 1]> (x, k, kb)
            n = BatchNormalization <epsilon = 0.001> (c, scale, shift, mean, var)
            r = Relu (n)
            p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
            g = GlobalAveragePool (p)
            f = Flatten <axis = 1> (g)
            y = Gemm (f, w, b)
        }""",
    "attention": """
        attention (float[batch, seq, 16] x) => (float[batch, seq, 16] y) {
            q = MatMul (x, wq)
            k = MatMul (x, wk)
            v = MatMul (x, wv)
            heads = Constant <value = int64[4] {0, 0, 2, 8}> ()
            q4 = Reshape (q, heads)
            k4 = Reshape (k, heads)
            v4 = Reshape (v, heads)
            qt = Transpose <perm = [0, 2, 1, 3]> (q4)
            kt = Transpose <perm = [0, 2, 3, 1]> (k4)
            vt = Transpose <perm = [0, 2, 1, 3]> (v4)
            s = MatMul (qt, kt)
            root = Constant <value = float {2.828427}> ()
            d = Div (s, root)
            p = Softmax <axis = -1> (d)
            c = MatMul (p, vt)
            ct = Transpose <perm = [0, 2, 1, 3]> (c)
            flat = Constant <value = int64[3] {0, 0, 16}> ()
            cf = Reshape (ct, flat)
            o = MatMul (cf, wo)
            y = Add (o, x)
        }""",
    "lstm": """
        lstm (float[5, 1, 4] x) => (float[5, 1, 1, 3] y, float[1, 1, 3] last) {
            y, last, cell = LSTM <hidden_size = 3> (x, w, r, b)
        }""",
    "if": """
        branches (float[2, 3] x, bool c) => (float[2, 3] y) {
            y = If (c) <
                then_branch = a () => (float[2, 3] then_out) { then_out = Relu (x) },
                else_branch = b () => (float[2, 3] else_out) { n = Neg (x) else_out = Exp (n) }
            >
        }""",
    "if_known": """
        known (float[1, 3] x) => (float[3] y) {
            s = Shape (x)
            zero = Constant <value = int64 {0}> ()
            one = Constant <value = int64 {1}> ()
            first = Gather <axis = 0> (s, zero)
            c = Equal (first, one)
            y = If (c) <
                then_branch = a () => (float[3] squeezed) {
                    axes = Constant <value = int64[1] {0}> ()
                    squeezed = Squeeze (x, axes)
                },
                else_branch = b () => (float[1, 3] same) { same = Identity (x) }
            >
        }""",
    "loop": """
        loop (float[2] x) => (float[2] y, float[n, 2] all) {
            trips = Constant <value = int64 {3}> ()
            go = Constant <value = bool {1}> ()
            y, all = Loop (trips, go, x) <
                body = step (int64 i, bool c, float[2] s) => (bool c2, float[2] s2, float[2] o) {
                    c2 = Identity (c)
                    s2 = Add (s, s)
                    o = Neg (s2)
                }
            >
        }""",
    "scan": """
        scan (float[2] start, float[4, 2] x) => (float[2] last, float[4, 2] sums) {
            last, sums = Scan <num_scan_inputs = 1, body = step (float[2] s, float[2] e) => (float[2] t, float[2] o) {
                t = Add (s, e)
                o = Identity (t)
            }> (start, x)
        }""",
    "qdq": """
        qdq (float[2, 8] x) => (float[2, 4] y) {
            xq = QuantizeLinear (x, xs, xz)
            xd = DequantizeLinear (xq, xs, xz)
            wd = DequantizeLinear <axis = 1> (wq, ws)
            y = MatMul (xd, wd)
        }""",
    "sequence": """
        sequence (float[2, 6] x) => (float[2, 4] y) {
            two = Constant <value = int64 {2}> ()
            s = SplitToSequence <axis = 1> (x, two)
            i = Constant <value = int64 {0}> ()
            j = Constant <value = int64 {2}> ()
            a = SequenceAt (s, i)
            b = SequenceAt (s, j)
            y = Concat <axis = 1> (a, b)
        }""",
    "built_sequence": """
        built (float[2, 2] x) => (float[4, 2] y, int64 n) {
            r = Relu (x)
            s = SequenceConstruct (x, r)
            n = SequenceLength (s)
            y = ConcatFromSequence <axis = 0> (s)
        }""",
    "optional": """
        optional (float[2] x) => (float[2] y, bool there) {
            o = Optional (x)
            there = OptionalHasElement (o)
            y = OptionalGetElement (o)
        }""",
    "shapes": """
        shapes (float[batch, 6] x, float[batch, 2, 3] z) => (float[batch, 2, 3] y, float[batch, 3] e, int64[n] r) {
            s = Shape (x)
            zero = Constant <value = int64[1] {0}> ()
            n = Gather <axis = 0> (s, zero)
            tail = Constant <value_ints = [2, 3]> ()
            to = Concat <axis = 0> (n, tail)
            a = Reshape (x, to)
            y = Add (a, z)
            three = Constant <value = int64[1] {3}> ()
            both = Concat <axis = 0> (n, three)
            f = ConstantOfShape <value = float[1] {0.5}> (both)
            g = Expand (half, both)
            e = Mul (f, g)
            start = Constant <value_int = 0> ()
            limit = Constant <value_int = 7> ()
            step = Constant <value_int = 2> ()
            r = Range (start, limit, step)
        }""",
    "layout": """
        layout (float[1, 2, 4, 4] x) => (float[1, 2, 4, 6] y, float[1, 2, 8, 8] u, float[2, 2, 4, 4] t) {
            pads = Constant <value = int64[8] {0, 0, 1, 1, 0, 0, 1, 1}> ()
            p = Pad <mode = "constant"> (x, pads)
            starts = Constant <value = int64[1] {1}> ()
            ends = Constant <value = int64[1] {5}> ()
            axes = Constant <value = int64[1] {2}> ()
            steps = Constant <value = int64[1] {1}> ()
            y = Slice (p, starts, ends, axes, steps)
            scales = Constant <value = float[4] {1.0, 1.0, 2.0, 2.0}> ()
            u = Resize <mode = "nearest"> (x, , scales)
            times = Constant <value = int64[4] {2, 1, 1, 1}> ()
            t = Tile (x, times)
        }""",
    "index": """
        index (float[3, 5] x, int64[2] i) => (
            float[2, 5] g, float[3, 2] v, int64[3, 2] k, float[3, 5] s, float[2, 4] h
        ) {
            g = Gather <axis = 0> (x, i)
            two = Constant <value = int64[1] {2}> ()
            v, k = TopK <axis = 1, largest = 1> (x, two)
            at = Constant <value = int64[1, 2] {0, 1}> ()
            new = Constant <value = float[1] {9.0}> ()
            s = ScatterND (x, at, new)
            depth = Constant <value = int64 {4}> ()
            onoff = Constant <value = float[2] {0.0, 1.0}> ()
            h = OneHot <axis = -1> (i, depth, onoff)
        }""",
    "contrib": """
        contrib (float[2, 4] x) => (float[2, 4] y) {
            a = com.microsoft.FusedMatMul <alpha = 0.5, transB = 1> (x, w)
            g = com.microsoft.Gelu (a)
            y = com.microsoft.QuickGelu <alpha = 1.7> (g)
        }""",
    "reduce": """
        reduce (float[2, 3, 4] x, bool[2, 3, 4] m) => (float[2, 1, 4] y, float16[2, 3] h, int64[2, 3] k) {
            z = Constant <value_float = 0.0> ()
            w = Where (m, x, z)
            axes = Constant <value = int64[1] {1}> ()
            y = ReduceMean <keepdims = 1> (w, axes)
            last = Constant <value_ints = [-1]> ()
            q = ReduceSum <keepdims = 0> (w, last)
            h = Cast <to = 10> (q)
            k = ArgMax <axis = 2, keepdims = 0> (x)
        }""",
    "norms": """
        norms (float[batch, 3, 8] x) => (float[batch, 3, 8] y, float[batch, 8, 8] e) {
            n = LayerNormalization <axis = -1, epsilon = 0.00001> (x, scale, shift)
            y = Gelu <approximate = "tanh"> (n)
            e = Einsum <equation = "bij,bik->bjk"> (x, y)
        }""",
    "random": """
        random (float[2, 3] x) => (float[2, 3] y) {
            r = RandomNormalLike <seed = 1.0> (x)
            ratio = Constant <value = float {0.5}> ()
            d = Dropout (x, ratio)
            s = Mul (r, d)
            y = Clip (s, low, high)
        }""",
    "split": """
        split (float[2, 6] x) => (float[2, 2] a, float[2, 4] y) {
            sizes = Constant <value = int64[2] {2, 4}> ()
            a, b = Split <axis = 1> (x, sizes)
            y = Sigmoid (b)
        }""",
    "transposed_conv": """
        transposed (float[1, 2, 5, 5] x) => (float[1, 3, 10, 10] y) {
            t = ConvTranspose <strides = [2, 2], kernel_shape = [2, 2]> (x, k)
            p = PRelu (t, slope)
            y = Conv <group = 3, auto_pad = "SAME_UPPER", kernel_shape = [3, 3]> (p, depthwise)
        }""",
    "words": """
        words (string[3] x) => (int64[3] y) {
            y = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_int64s = [1, 2], default_int64 = 0> (x)
        }""",
    "gru": """
        gru (float[4, 2, 3] x) => (float[1, 2, 2] last) {
            all, last = GRU <hidden_size = 2, linear_before_reset = 1> (x, w, r)
        }""",
    "nested": """
        nested (float[2] x, bool c) => (float[2] y) {
            y = If (c) <
                then_branch = a () => (float[2] ta) {
                    ta = If (c) <
                        then_branch = aa () => (float[2] taa) { taa = Abs (x) },
                        else_branch = ab () => (float[2] tab) { tab = Neg (x) }
                    >
                },
                else_branch = b () => (float[2] tb) { tb = Identity (x) }
            >
        }""",
}

WEIGHTS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "mlp": {"w1": (32, 16), "b1": (32,), "w2": (32, 4), "b2": (4,)},
    "cnn": {
        "k": (12, 3, 3, 3),
        "kb": (12,),
        "scale": (12,),
        "shift": (12,),
        "mean": (12,),
        "var": (12,),
        "w": (12, 5),
        "b": (5,),
    },
    "attention": dict.fromkeys(("wq", "wk", "wv", "wo"), (16, 16)),
    "lstm": {"w": (1, 12, 4), "r": (1, 12, 3), "b": (1, 24)},
    "gru": {"w": (1, 6, 3), "r": (1, 6, 2)},
    "qdq": {"xs": (), "ws": (4,)},
    "shapes": {"half": (1, 3)},
    "contrib": {"w": (4, 4)},
    "norms": {"scale": (8,), "shift": (8,)},
    "random": {"low": (), "high": ()},
    "transposed_conv": {"k": (2, 3, 2, 2), "slope": (3, 1, 1), "depthwise": (3, 1, 3, 3)},
}


def seed_models() -> dict[str, onnx.ModelProto]:
    """The models by name; each is valid, and made anew."""
    made = {name: _parsed(name, text) for name, text in TEXTS.items()}
    for name, make in OTHERS.items():
        made[name] = make()
    return made


def write_data_file(folder: Path) -> None:
    """Write the external data that the model `external` refers to."""
    (folder / DATA_FILE).write_bytes(_numbers("external", (DATA_BYTES // 4,)).tobytes())


def _parsed(name: str, text: str, header: str = "") -> onnx.ModelProto:
    imports = '"" : 21, "com.microsoft" : 1, "ai.onnx.ml" : 3'
    model = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}] {header}> {text}")
    for weight, shape in WEIGHTS.get(name, {}).items():
        model.graph.initializer.append(numpy_helper.from_array(np.abs(_numbers(weight, shape)), weight))
    if name == "qdq":
        model.graph.initializer.append(numpy_helper.from_array(np.uint8(128), "xz"))
        quantized = (_numbers("wq", (8, 4)) * 100).astype(np.int8)
        model.graph.initializer.append(numpy_helper.from_array(quantized, "wq"))
        note = model.graph.quantization_annotation.add(tensor_name="x")
        note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="xs")
    if name == "attention":  # as torch's exporter writes it
        for node in model.graph.node:
            node.name = f"node_{node.output[0]}"
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'block', 'attn', 'linear']")
            node.metadata_props.add(key="pkg.torch.onnx.class_hierarchy", value="['M', 'B', 'A', 'aten.linear']")
        model.metadata_props.add(key="made by", value="a seed")
    return model


def _numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    generator = np.random.default_rng(list(name.encode()))
    return generator.uniform(0.1, 1.0, shape).astype(np.float32)


def _function() -> onnx.ModelProto:
    model = _parsed(
        "function",
        """
        function (float[2, 3] x) => (float[2, 3] y) {
            h = own.scaled <alpha = 2.0> (x)
            y = own.twice (h)
        }
        <domain: "own", opset_import: ["" : 21]>
        scaled <alpha> (a) => (b) {
            k = Constant <value_float : float = @alpha> ()
            b = Mul (a, k)
        }
        <domain: "own", opset_import: ["" : 21, "own" : 1]>
        twice (a) => (b) {
            c = own.scaled <alpha = 0.5> (a)
            b = Add (c, a)
        }""",
    )
    model.opset_import.add(domain="own", version=1)
    return model


def _sparse() -> onnx.ModelProto:
    model = _parsed("sparse", "sparse (float[2, 4] x) => (float[2, 4] y) { y = Add (x, w) }")
    values = helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0])
    places = helper.make_tensor("places", TensorProto.INT64, [2], [1, 6])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [2, 4]))
    return model


def _external() -> onnx.ModelProto:
    model = _parsed("external", "external (float[2, 16] x) => (float[2, 16] y) { h = MatMul (x, w) y = Add (h, b) }")
    for name, shape, offset in (("w", (16, 16), 0), ("b", (16,), 1024)):
        tensor = model.graph.initializer.add(name=name, data_type=TensorProto.FLOAT, dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", DATA_FILE), ("offset", offset), ("length", 4 * int(np.prod(shape)))):
            tensor.external_data.add(key=key, value=str(value))
    return model


def _dtypes() -> onnx.ModelProto:
    """Initializers in typed fields, of many dtypes."""
    model = _parsed("dtypes", "dtypes (float[2] x) => (float[2] y) { y = Identity (x) }")
    kinds = (
        "FLOAT16",
        "BFLOAT16",
        "DOUBLE",
        "INT8",
        "UINT16",
        "INT32",
        "INT64",
        "UINT64",
        "BOOL",
        "FLOAT8E4M3FN",
        "INT4",
    )
    last = "x"
    for kind in kinds:
        dtype = TensorProto.DataType.Value(kind)
        model.graph.initializer.append(helper.make_tensor(kind, dtype, [2], [1, 1]))
        model.graph.node.add(op_type="Cast", input=[kind], output=[f"c_{kind}"]).attribute.append(
            helper.make_attribute("to", TensorProto.FLOAT)
        )
        model.graph.node.add(op_type="Mul", input=[last, f"c_{kind}"], output=[f"m_{kind}"])
        last = f"m_{kind}"
    model.graph.node[0].input[0] = last
    model.graph.node.append(model.graph.node.pop(0))
    return model


def _string_initializer() -> onnx.ModelProto:
    model = _parsed("strings", "strings (string[1] x) => (bool[2] y) { y = Equal (x, w) }")
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.STRING, [2], [b"a", b"\xff"]))
    return model


def _old() -> onnx.ModelProto:
    """IR version 3: initializers are inputs too; opset 9: axes are attributes."""
    model = onnx.parser.parse_model(
        """<ir_version: 3, opset_import: ["" : 9]>
        old (float[2, 3] x, float[3] b) => (float[3] y) {
            s = Add (x, b)
            u = Unsqueeze <axes = [0]> (s)
            r = ReduceSum <axes = [0, 1], keepdims = 0> (u)
            y = Softmax <axis = 0> (r)
        }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(_numbers("b", (3,)), "b"))
    return model


OTHERS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "function": _function,
    "sparse": _sparse,
    "external": _external,
    "dtypes": _dtypes,
    "string_initializer": _string_initializer,
    "old": _old,
}
