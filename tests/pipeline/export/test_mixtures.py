"""Mixtures of experts of transformers: they export as they are configured, and route each token by its own values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper

from pipeline.config import ExportConfig, ModelConfig
from pipeline.errors import SourceError
from pipeline.export import TorchSource, draw_inputs, export_onnx, load_source, named_dims, run_torch

Configured = Callable[..., ModelConfig]
Arrays = Mapping[str, np.ndarray]

IDS = {"input_ids": {"shape": ["batch", "seq"], "dtype": "int64", "range": [3, 90]}}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "use_cache": False,
    "initializer_range": 0.3,  # at 0.02 the experts would hardly be seen in the output
    "num_experts_per_tok": 2,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16, "mamba_n_groups": 1}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
ROUTED = {**LATENT, "first_k_dense_replace": 0, "n_routed_experts": 8, "moe_intermediate_size": 16}

LOOPS_OVER_TOKENS = {"JambaModel"}
"""Without the kernels of others, transformers steps through a state space token by token: a fixed length."""

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3MoeModel": {**SMALL, "num_experts": 4, "moe_intermediate_size": 32},
    "DeepseekV3Model": {**SMALL, **ROUTED, "q_lora_rank": 16, "n_group": 2, "topk_group": 1},
    "Llama4TextModel": {
        **SMALL,
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "head_dim": 8,
        "no_rope_layers": [1],  # with rope, which is complex
        "attention_chunk_size": 4,
        "pad_token_id": 0,
    },
    "GptOssModel": {**SMALL, "head_dim": 8, "num_local_experts": 4, "layer_types": ["full_attention"]},
    "JambaModel": {
        **SMALL,
        "num_hidden_layers": 2,
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "pad_token_id": 0,
    },
    "PhimoeModel": {**SMALL, "num_local_experts": 4},
    "GraniteMoeHybridModel": {
        **SMALL,
        **MAMBA,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention"],
    },
}
"""Class → configuration, in which nothing is said of how the experts are computed."""

MIXTRAL = {**SMALL, "num_local_experts": 4}


def load(configured: Configured, name: str, config: Mapping[str, Any]) -> TorchSource:
    shape = ["batch", 3] if name in LOOPS_OVER_TOKENS else ["batch", "seq"]
    inputs = {"input_ids": {**IDS["input_ids"], "shape": shape}}
    source = load_source(configured(transformers={"class": name, "config": config}, inputs=inputs))
    assert isinstance(source, TorchSource)
    return source


def run(model: onnx.ModelProto, feeds: Arrays) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [info.name for info in session.get_outputs()]
    return dict(zip(names, (np.asarray(array) for array in session.run(names, dict(feeds))), strict=True))


def assert_same(actual: Arrays, expected: Arrays) -> None:
    """Weights of 0.3 make values of some tens, in float32."""
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, atol=2e-4, rtol=1e-4, err_msg=name)


def routing(model: onnx.ModelProto) -> list[str]:
    """Which experts each token goes to: the indices of each TopK, or of each ArgMax."""
    return [node.output[-1] for node in model.graph.node if node.op_type in ("TopK", "ArgMax")]


def with_routing_as_output(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    copy.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in routing(model))
    return copy


def with_routing_burned_in(model: onnx.ModelProto, chosen: Arrays) -> onnx.ModelProto:
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    for node in copy.graph.node:
        node.input[:] = [f"{value}_burned_in" if value in chosen else value for value in node.input]
    copy.graph.initializer.extend(numpy_helper.from_array(array, f"{name}_burned_in") for name, array in chosen.items())
    return copy


@pytest.mark.parametrize("name", FAMILIES)
def test_each_token_goes_to_its_own_experts(name: str, configured: Configured) -> None:
    source = load(configured, name, FAMILIES[name])
    exported = export_onnx(source, ExportConfig())
    assert named_dims(exported.source.inputs) == (("batch",) if name in LOOPS_OVER_TOKENS else ("batch", "seq"))
    model = onnx_ir.to_proto(exported.ir_model)

    short, other, longer = (
        draw_inputs(source.inputs, sizes, seed=seed)
        for sizes, seed in (({"batch": 2, "seq": 3}, 1), ({"batch": 2, "seq": 3}, 2), ({"batch": 1, "seq": 9}, 3))
    )
    for feeds in (short, other, longer):
        assert_same(run(model, feeds), run_torch(exported.source, feeds))

    routed = with_routing_as_output(model)
    first, second = ({name: run(routed, feeds)[name] for name in routing(model)} for feeds in (short, other))
    assert any((first[name] != second[name]).any() for name in first)  # the second draw is routed otherwise
    burned = run(with_routing_burned_in(model, first), other)
    expected = run_torch(exported.source, other)
    moved = max(float(np.abs(burned[key] - array).max()) for key, array in expected.items())
    assert moved > 0.01  # so a routing that was burned in would have been seen above


def test_the_report_says_what_was_set(configured: Configured) -> None:
    source = load(configured, "MixtralModel", MIXTRAL)
    module: Any = source.module
    assert module.config._experts_implementation == "batched_mm"
    (note,) = source.notes
    assert note.startswith("model.transformers.config: experts_implementation was not given and is set to batched_mm, ")


@pytest.mark.parametrize("choice", ["grouped_mm", "batched_mm", "eager"])
def test_what_the_user_chose_stays(choice: str, configured: Configured) -> None:
    source = load(configured, "MixtralModel", {**MIXTRAL, "experts_implementation": choice})
    module: Any = source.module
    assert module.config._experts_implementation == choice
    assert source.notes == ()


def test_a_model_without_experts_is_not_spoken_of(configured: Configured) -> None:
    dense = {key: value for key, value in SMALL.items() if key != "num_experts_per_tok"}
    assert load(configured, "LlamaModel", dense).notes == ()


def test_a_loop_over_the_experts_is_refused_with_the_way_out(configured: Configured) -> None:
    source = load(configured, "MixtralModel", {**MIXTRAL, "experts_implementation": "eager"})
    with pytest.raises(SourceError) as caught:
        export_onnx(source, ExportConfig())
    message = str(caught.value)
    assert "in module 'layers.0.mlp.experts'" in message
    assert "set experts_implementation to batched_mm or grouped_mm in the model's configuration" in message


def test_a_factory_s_mixture_exports_as_it_was_made(factory: Configured, assert_agrees: Callable[..., None]) -> None:
    """Nobody can tell what its author chose; transformers' own default is grouped_mm."""
    code = f"""
from transformers import MixtralConfig, MixtralModel

def make():
    return MixtralModel(MixtralConfig(**{ ({**MIXTRAL, "initializer_range": 0.02})!r}))
"""
    source = load_source(factory(code, inputs=IDS))
    assert isinstance(source, TorchSource)
    module: Any = source.module
    assert module.config._experts_implementation == "grouped_mm"
    exported = export_onnx(source, ExportConfig())
    assert_agrees(exported, batch=2, seq=4)
    assert_agrees(exported, batch=1, seq=1)


def test_a_mixture_without_weights(configured: Configured) -> None:
    section = {"class": "MixtralModel", "config": MIXTRAL}
    source = load_source(configured(transformers=section, inputs=IDS), weightless=True)
    assert isinstance(source, TorchSource)
    assert all(parameter.is_meta for parameter in source.module.parameters())
    exported = export_onnx(source, ExportConfig())
    assert "TopK" in {node.op_type for node in exported.ir_model.graph}
    assert source.notes
    assert exported.notes[: len(source.notes)] == source.notes


class Config:
    """As much of a configuration of transformers as the defaults use, its setter included."""

    def __init__(self, own: str | None, **parts: Config) -> None:
        self.sub_configs = dict.fromkeys(parts)
        vars(self).update(parts)
        self._own = own

    @property
    def _experts_implementation(self) -> str | None:
        return self._own

    @_experts_implementation.setter
    def _experts_implementation(self, value: str) -> None:
        self._own = value
        for key in self.sub_configs:
            getattr(self, key)._experts_implementation = value


def test_sub_configurations_keep_what_they_were_given() -> None:
    from pipeline.export.transformers_defaults import set_experts

    text, image = Config("eager", inner=Config("eager")), Config(None)
    config = Config(None, thinker=Config(None, text=text, image=image))
    assert set_experts(config)
    assert (config._own, image._own, text._own, text.inner._own) == ("batched_mm", "batched_mm", "eager", "eager")  # type: ignore[attr-defined]
    assert not set_experts(config)


def test_a_release_without_the_attribute_is_left_alone() -> None:
    from pipeline.export.transformers_defaults import set_experts

    class Older:
        sub_configs: Mapping[str, Any] = {}

    config = Older()
    assert not set_experts(config)
    assert vars(config) == {}


def test_experts_are_computed_as_transformers_computes_them(configured: Configured) -> None:
    """The way that we choose against the loop that defines the model."""
    source = load(configured, "MixtralModel", MIXTRAL)
    feeds = draw_inputs(source.inputs, {"batch": 2, "seq": 6}, seed=4)
    chosen = run_torch(source, feeds)
    module: Any = source.module
    module.config._experts_implementation = "eager"
    with torch.no_grad():
        assert_same(chosen, run_torch(source, feeds))
