"""Real models as torch exports them: as many of each kind as the tree of modules says, and all of them kept."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx
import pytest

from passes.context import PassContext
from passes.structures import STRUCTURES
from passes.structures.view import GraphView
from tests.support.onnx_models import detached
from tests.support.structure_models import run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TRUTH: Mapping[str, Mapping[str, int]] = {
    "attention": {
        **dict.fromkeys(("BertSelfAttention", "ViTAttention", "LlamaAttention", "CohereAttention"), 1),
        **dict.fromkeys(("GPT2Attention", "GPTJAttention", "T5Attention", "Gemma2Attention"), 1),
    },
    "batchnorm": {"BatchNorm2d": 1},
    "embedding": {"Embedding": 1, "Gemma2TextScaledWordEmbedding": 1},
    "gelu": {"GELUActivation": 1, "NewGELUActivation": 1, "GELUTanh": 1},
    "layernorm": {"LayerNorm": 1, "CohereLayerNorm": 1, "ConvNextLayerNorm": 1},
    "residual": {
        **dict.fromkeys(("BertLayer", "ViTLayer", "LlamaDecoderLayer", "CohereDecoderLayer"), 2),
        **dict.fromkeys(("GPT2Block", "T5Block", "Gemma2DecoderLayer"), 2),
        **dict.fromkeys(("ResNetBasicLayer", "GPTJBlock", "ConvNextLayer"), 1),
    },
    "rmsnorm": {"LlamaRMSNorm": 1, "T5LayerNorm": 1, "Gemma2RMSNorm": 1},
    "rope": dict.fromkeys(("LlamaAttention", "CohereAttention", "GPTJAttention", "Gemma2Attention"), 2),
    "swiglu": {"LlamaMLP": 1, "CohereMLP": 1},
}
"""Kind → module class → how many of the kind one such module is. GPT-J's two branches share one sum with the input."""

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 30,
    "max_position_embeddings": 32,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
GPT = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 30, "n_positions": 32, "use_cache": False}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 30}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
IMAGES = {"image_size": 16, "patch_size": 8}


@dataclass(frozen=True)
class Case:
    """`constant` tables are looked up by positions that are known, or are another module's table."""

    model: str
    config: Mapping[str, Any]
    inputs: tuple[str, ...] = ("input_ids",)
    opset: int = 20
    dynamic: bool = False
    constant: int = 0


CASES = {
    "BERT": Case("BertModel", SMALL, ("input_ids", "attention_mask", "token_type_ids"), dynamic=True),
    "ViT, opset 18": Case("ViTModel", {**SMALL, **IMAGES}, ("pixel_values",), 18),
    "Llama, opset 23": Case("LlamaForCausalLM", {**SMALL, **TOKENS, "num_key_value_heads": 2}, opset=23),
    "GPT-2": Case("GPT2LMHeadModel", GPT, constant=1),
    "GPT-J": Case("GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    "Cohere": Case("CohereForCausalLM", {**SMALL, **TOKENS}),
    "Gemma 2": Case("Gemma2ForCausalLM", {**SMALL, **TOKENS, "num_key_value_heads": 2, "head_dim": 8}),
    "T5": Case("T5EncoderModel", {**T5, "feed_forward_proj": "gated-gelu", "attn_implementation": "eager"}, constant=2),
    "ResNet": Case("ResNetModel", RESNET, ("pixel_values",)),
    "ConvNext": Case("ConvNextModel", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, ("pixel_values",)),
}


@dataclass(frozen=True)
class Exported:
    model: onnx.ModelProto
    modules: Mapping[str, int]
    constant: int

    def expected(self, kind: str) -> int:
        count = sum(self.modules.get(name, 0) * each for name, each in TRUTH[kind].items())
        return count - self.constant if kind == "embedding" else count


@cache
def export_case(name: str) -> Exported:
    """A case as torch exports it, with the number of modules of each class."""
    case = CASES[name]
    torch.manual_seed(0)
    build = getattr(transformers, case.model)
    model = build(build.config_class(**case.config)).eval()
    with torch.no_grad():
        for weight in model.parameters():  # as if trained: a scale of ones is no scale to an optimizer
            weight += 0.02 * torch.randn_like(weight)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    inputs: dict[str, Any] = {name: torch.ones(2, 8, dtype=torch.long) for name in case.inputs}
    if "pixel_values" in case.inputs:
        side = case.config.get("image_size", 32)
        inputs = {"pixel_values": torch.randn(1, 3, side, side)}
    dynamic = dict.fromkeys(case.inputs, sizes) if case.dynamic else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"dynamo": True, "optimize": False, "verbose": False}
        program = torch.onnx.export(
            model, (), kwargs=inputs, dynamic_shapes=dynamic, opset_version=case.opset, **settings
        )
    modules = Counter(type(module).__name__ for module in model.modules())
    return Exported(program.model_proto, modules, case.constant)


@pytest.mark.parametrize("name", CASES)
def test_finds_what_the_tree_of_modules_has(name: str) -> None:
    export = export_case(name)
    view = GraphView(detached(export.model))
    instances_by_kind = {
        kind: structure.search(view).instances for kind, structure in STRUCTURES.items() if kind in TRUTH
    }
    assert {kind: len(instances) for kind, instances in instances_by_kind.items()} == {
        kind: export.expected(kind) for kind in TRUTH
    }
    for kind, instances in instances_by_kind.items():
        assert len({instance.name for instance in instances}) == len(instances), "verdicts are known by their names"
        assert all(instance.module for instance in instances if kind != "residual")
        assert STRUCTURES[kind].find_lost(instances, view.model) == {}, "the model itself has all that was found"


@pytest.mark.parametrize(
    ("name", "loses", "merging"),
    [
        ("ResNet", {"batchnorm"}, ["fuse_bn_into_conv"]),
        ("ViT, opset 18", {"qkv"}, ["fuse_qkv", "fuse_attention"]),
        ("BERT", set(), []),
        ("Llama, opset 23", {"rmsnorm"}, ["fuse_rms_norm"]),
    ],
)
def test_keeps_every_kind_of_a_model(name: str, loses: set[str], merging: list[str], context: PassContext) -> None:
    export = export_case(name)
    source = detached(export.model)
    recipe = ["onnxscript", "default", "onnxsim"]
    free = run(export.model, context, recipe)
    by_name = run(export.model, context, recipe, watch=False, skip=merging)
    kept = run(export.model, context, recipe, keep=[f"{kind}?" for kind in STRUCTURES])
    instances_by_kind = {kind: structure.find(source).instances for kind, structure in STRUCTURES.items()}
    assert {
        kind for kind, instances in instances_by_kind.items() if STRUCTURES[kind].find_lost(instances, free.model)
    } == loses
    assert all(verdict.kept for verdict in kept.structures)
    assert len(kept.structures) == sum(map(len, instances_by_kind.values()))
    assert kept.power.blind == ()
    sizes = [len(result.model.proto.graph.node) for result in (kept, by_name)]
    assert sizes[0] <= sizes[1] + 2 * len(kept.structures)
