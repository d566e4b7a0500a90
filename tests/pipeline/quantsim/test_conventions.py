"""AIMET's configurations of a target: what is read, what is refused, and the placement that follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from passes.weights.detached import DetachedModel
from pipeline.config import AimetProfile, QuantSimConfig
from pipeline.errors import ConfigError, UsageError
from pipeline.quantsim.aimet_config import AimetConfig, read_aimet_config
from pipeline.quantsim.conventions import apply_conventions
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.placement import Placement, place
from pipeline.quantsim.profiles import load_target, read_profile, rules_of
from pipeline.quantsim.sites import find_sites
from tests.pipeline.quantsim.pictures_of_qdq import mlp, model_of


def config(**sections: Any) -> dict[str, Any]:
    """The least that AIMET takes, with sections replaced."""
    return {
        "defaults": {
            "ops": {"is_output_quantized": "True"},
            "params": {"is_quantized": "True", "is_symmetric": "True"},
            "strict_symmetric": "True",
        },
        "params": {},
        "op_type": {},
        "supergroups": [],
        "model_input": {"is_input_quantized": "True"},
        "model_output": {},
        **sections,
    }


def place_by(data: dict[str, Any], model: Any, weight_bits: int = 8, activation_bits: int = 16) -> Placement:
    read = AimetConfig.model_validate(data)
    return place(model, apply_conventions(read, weight_bits, activation_bits, model, find_sites(model)).rules)


def formats(placement: Placement) -> dict[str, str]:
    return {placed.site.tensor: str(placed.precision or placed.reason) for placed in placement.sites}


ATTENTION = """g (float[1, 4, 8] x) => (float[1, 4, 8] y) {
    h = LayerNormalization (x, scale, shift)
    p = MatMul (h, w)
    q = Add (p, b)
    k = Tanh (h)
    t = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul (q, t)
    a = Softmax (s)
    y = MatMul (a, h)
}"""


def attention() -> Any:
    draw = np.random.default_rng(0).standard_normal
    vectors = {name: draw(8).astype(np.float32) for name in ("scale", "shift", "b")}
    return model_of(ATTENTION, w=draw((8, 8)).astype(np.float32), **vectors)


def test_the_profile_of_htp() -> None:
    placement = place(attention(), rules_of(QuantSimConfig(profile="qnn-htp"), attention()))
    assert formats(placement) == {
        "x": "uint16",
        "scale": "uint8",
        "shift": "params.bias.is_quantized is False",
        "h": "int16",  # the second factor of a product of computed values
        "w": "int8/channel",
        "p": "supergroup_pass_list: MatmulAdd: the target does not round it",
        "b": "supergroup_pass_list: MatmulAdd: a constant inside, which the target does not round",
        "q": "uint16",
        "k": "int16",
        "t": "int16",
        "s": "uint16",
        "a": "uint16",
        "y": "uint16",
    }
    limits = {placed.site.tensor: placed.limits for placed in placement.sites if placed.limits}
    assert limits == {"a": (0, 1), "k": (-1 + 2**-15, 1 - 2**-15)}


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        ({}, {"s": 2**16, "t": 2**15, "p": 2**16 - 1, "q": 2**16 - 1}),
        ({"op:*": {"activations": "uint8"}}, {"s": 255, "t": 127.5, "p": 255, "q": 255}),
        ({"op:*": {"activations": "int8"}}, {"s": 127, "t": 127, "p": 127, "q": 127}),
        ({"op:*": {"activations": "int16"}}, {"s": 2**15, "t": 2**15, "p": 2**15 - 1, "q": 2**15 - 1}),
        ({"op:*": {"activations": "int16/asymmetric"}}, {"s": 2**15, "t": 2**15, "p": 2**16 - 1, "q": 2**16 - 1}),
        ({"op:*": {"activations": "uint16/symmetric"}}, {"s": 2**15, "t": 2**15}),
    ],
)
def test_scales_of_16_bits_that_a_kernel_of_htp_asks_for(rules: dict[str, Any], wanted: dict[str, float]) -> None:
    """QNN takes Sigmoid and Tanh with powers of 2 alone, as onnxruntime's configuration for it sets them; one that
    shares its encoding with a Softmax has its range."""
    model = model_of(
        """g (float[1, 8] x) => (float[1, 8] s, float[1, 8] t, float[1, 16] c) {
            s = Sigmoid(x) t = Tanh(x)
            p = Softmax(x) q = Sigmoid(x) c = Concat <axis = 1> (p, q)
        }"""
    )
    placement = place(model, rules_of(QuantSimConfig(profile="qnn-htp", rules=rules), model))
    encodings = encode(placement, {placed.site.group: (-3, 3) for placed in placement.sites}, model)
    assert {name: np.float32(1 / wanted[name]) for name in wanted} == {name: encodings[name].scale for name in wanted}


def test_what_a_concat_joins_has_the_format_of_its_result() -> None:
    """AIMET ties the quantizers of Sin and Cos, whose ranges are symmetric, to that of the Concat, which is not."""
    model = model_of(
        """g (float[1, 8] x) => (float[1, 16] c, float[1, 8] z) {
            s = Sin(x) t = Cos(x) c = Concat <axis = 1> (s, t) z = Sin(x)
        }"""
    )
    placement = place(model, rules_of(QuantSimConfig(profile="qnn-htp"), model))
    assert formats(placement) == {"x": "uint16", "s": "uint16", "t": "uint16", "c": "uint16", "z": "int16"}
    assert {placed.limits for placed in placement.sites if placed.site.tensor in ("s", "t")} == {(-1, 1)}


def test_one_entry_of_a_profile_is_one_rule_of_the_report() -> None:
    """What a Concat joins is decided last, by the entry that says it of all results."""
    text = "g (float[1, 8] x) => (float[1, 16] c) { s = Relu(x) t = Neg(x) c = Concat <axis = 1> (s, t) }"
    model = model_of(text)
    rules = place(model, rules_of(QuantSimConfig(profile="qnn-htp"), model)).rules
    assert [(rule.selector, rule.activations, rule.in_force) for rule in rules] == [
        ("defaults.ops", 3, 3), ("model_input", 1, 1)
    ]  # fmt: skip


def test_entries_count_in_order() -> None:
    model = mlp()
    data = config(
        op_type={
            "MatMul": {"per_channel_quantization": "True", "params": {"weight": {"is_symmetric": "False"}}},
            "Relu": {"is_symmetric": "True"},
        },
        supergroups=[{"op_list": ["Gemm", "Relu"]}],
        model_input={},
    )
    assert formats(place_by(data, model)) == {
        "x": "model_input does not say that inputs and constants are quantized",
        "first": "int8",
        "bias": "x and first are not both quantized",
        "h": "supergroups: Gemm, Relu: the target does not round it",
        "r": "int16",
        "t": "int16",
        "second": "uint8/channel",
        "y": "uint16",
    }


def test_kernels_raise_bits_or_leave_float_and_never_lower_them() -> None:
    def kernels(dtype: str, bits: int) -> dict[str, Any]:
        number = {"bitwidth": bits, "dtype": dtype}
        return config(op_type={"MatMul": {"supported_kernels": [{"activation": number, "param": number}]}})

    raised = formats(place_by(kernels("int", 16), mlp()))
    assert (raised["second"], raised["y"], raised["r"]) == ("int16", "uint16", "uint16")
    floats = formats(place_by(kernels("float", 16), mlp()))
    assert floats["second"] == floats["y"] == "supported_kernels of MatMul: float16 is the first one"
    with pytest.raises(UsageError, match="begins with 4 bits, and 16 are asked for 'y'"):
        place_by(kernels("int", 4), mlp())
    assert formats(place_by(kernels("int", 8), mlp(), 8, 8))["y"] == "uint8", "the pair that is asked for is there"


def test_old_hardware_has_no_weights_of_16_bits() -> None:
    data = config()
    data["defaults"]["hw_version"] = "V68"
    found = formats(place_by(data, attention()))
    assert found["k"] == found["t"] == found["h"] == "int8"


def norm_in_parts() -> DetachedModel:
    return model_of(
        """g (float[2, 8] x) => (float[2, 8] y) {
            m = ReduceMean (x, axes)
            d = Sub (x, m)
            s = Mul (d, d)
            v = ReduceMean (s, axes)
            e = Add (v, epsilon)
            r = Sqrt (e)
            q = Div (d, r)
            w = Mul (q, scale)
            y = Add (w, shift)
        }""",
        axes=np.array([-1], np.int64),
        epsilon=np.array(1e-5, np.float32),
        scale=np.ones(8, np.float32),
        shift=np.ones(8, np.float32),
    )


def test_a_norm_in_parts_is_one_operator() -> None:
    model = norm_in_parts()
    found = formats(place_by(config(supergroup_pass_list=["LayerNormalization"]), model))
    quantized = {name: text for name, text in found.items() if "int" in text.split(":")[0]}
    assert quantized == {"x": "uint16", "scale": "int16", "y": "uint16"}
    assert formats(place_by(config(), model))["d"] == "uint16"


def test_a_mean_whose_axes_are_an_input_is_no_part_of_a_norm() -> None:
    """aimet-onnx 2.42 fuses the division alone where the file lists RMSNormalization, too, as that of V73 does."""
    found = formats(place_by(config(supergroup_pass_list=["LayerNormalization", "RMSNormalization"]), norm_in_parts()))
    quantized = {name: text for name, text in found.items() if "int" in text.split(":")[0]}
    outside = {"x": "uint16", "m": "uint16", "d": "uint16", "w": "uint16", "shift": "uint16", "y": "uint16"}
    assert quantized == outside | {"scale": "uint16"}


def test_a_mean_by_a_sum_makes_no_norm() -> None:
    """As TensorFlow writes it; magika's encodings were refused by aimet-onnx 2.42, which has a quantizer for each."""
    model = model_of(
        """g (float[2, 8] x) => (float[2, 8] y) {
            t = ReduceSum (x, axes)
            m = Div (t, size)
            d = Sub (x, m)
            s = Mul (d, d)
            u = ReduceSum (s, axes)
            v = Div (u, size)
            e = Add (v, epsilon)
            r = Sqrt (e)
            y = Div (d, r)
        }""",
        axes=np.array([-1], np.int64),
        size=np.array(8, np.float32),
        epsilon=np.array(1e-5, np.float32),
    )
    found = formats(place_by(config(supergroup_pass_list=["LayerNormalization"]), model))
    assert {found[name] for name in "xtmdsuvery"} == {"uint16"}


def test_an_input_that_bodies_alone_read_is_not_rounded() -> None:
    model = model_of(
        """g (bool c, float[2] x, float[2] z) => (float[2] y) {
            a = Relu (z)
            b = If (c) <
                then_branch = t () => (float[2] p) { p = Relu (x) },
                else_branch = e () => (float[2] q) { q = Neg (x) }
            >
            y = Add (a, b)
        }"""
    )
    found = formats(place_by(config(), model))
    assert (found["z"], found["x"]) == ("uint16", "only the bodies of If, Loop or Scan read it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op_type": {"Relu": {"is_outputquantized": "True"}}}, "unknown key 'is_outputquantized' in op_type.Relu"),
        ({"params": {"bias": {"is_quantized": "no"}}}, "params.bias.is_quantized: found 'no', expected \"True\" or"),
        ({"supergroup_pass_list": ["Gelu"]}, "supergroup_pass_list"),
        ({"extra": {}}, "unknown key 'extra'"),
        ({"op_type": {"Relu": {"encoding_constraints": {"min": 1}}}}, "encoding_constraints with min 1 and no max"),
        ({"op_type": {"Add": {"is_input_quantized": "False"}}}, "which AIMET does not support"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "htp.json"
    path.write_text(json.dumps(config(**change)))
    with pytest.raises(ConfigError, match=message):
        read_aimet_config(path)


def test_a_file_of_the_user_is_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "htp.json"
    data = config(op_type={"ChannelShuffle": {"is_output_quantized": "False"}})
    data["defaults"]["strict_symmetric"] = "False"
    path.write_text(json.dumps(data))
    profile = read_profile(QuantSimConfig(profile=AimetProfile(aimet_config=str(path), activation_bits=8)))
    rules, notes = profile.rules(mlp())
    assert formats(place(mlp(), rules))["y"] == "uint8"
    assert [note.split(": ")[1].partition(",")[0] for note in notes] == [
        "strict_symmetric is not True",
        "op_type names ChannelShuffle",
        "params.bias is quantized",
    ]
    path.write_text('{"defaults": {}, "defaults": {}}')
    with pytest.raises(ConfigError, match="'defaults' is there twice"):
        read_aimet_config(path)


def test_tensorrt_takes_no_bias_of_32_bits() -> None:
    found = formats(place(mlp(), rules_of(QuantSimConfig(profile="tensorrt"), mlp())))
    assert (found["bias"], found["first"], found["x"]) == (
        "tensorrt takes biases in float alone",
        "int8/channel",
        "int8",
    )


def test_a_target_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no target named 'qnn-htpp'; did you mean 'qnn-htp'"):
        load_target("qnn-htpp")
