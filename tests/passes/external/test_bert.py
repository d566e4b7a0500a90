"""A BERT from transformers, tiny, as our exporter writes it, through every optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from passes import PassRun, Status
from passes.context import PassContext
from pipeline.config import ExportConfig, RunConfig
from pipeline.export import TorchSource, export_onnx, load_source
from tests.support.pass_runs import broken, ops, optimized, row, valid

BERT: dict[str, Any] = {
    "transformers": {
        "class": "BertModel",
        "config": {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "vocab_size": 40,
            "max_position_embeddings": 16,
            "initializer_range": 0.3,
        },
    },
    "inputs": {
        "input_ids": {"shape": [2, 8], "dtype": "int64", "range": [0, 40]},
        "attention_mask": {"shape": [2, 8], "dtype": "int64", "range": [1, 1]},
    },
}
FEEDS = [{"input_ids": np.arange(16).reshape(2, 8) % 40, "attention_mask": np.ones((2, 8), np.int64)}]

RECIPES: dict[str, list] = {
    "onnxslim": ["onnxslim"],
    "onnxruntime": ["onnxruntime"],
    "onnxruntime basic": [{"onnxruntime": {"level": "basic"}}],
    "onnxruntime_fusions": ["onnxscript", "onnxruntime_fusions"],
    "onnxscript": ["onnxscript"],
    "onnxscript_rewrites": ["onnxscript_rewrites"],
    "ort_fusions": [{"onnxscript_rewrites": {"rules": ["ort_fusions"]}}],
}
MERGING = {"ort_fusions": "onnxscript_rewrites/fuse_attention"}
"""Recipe → the inner pass that merges Q, K and V. The others find nothing to merge in what torch exports today."""

LOST = {
    "onnxruntime": {"residual": "onnxruntime/SkipLayerNormFusion"},
    "onnxruntime_fusions": {
        "residual": "onnxruntime_fusions/enable_skip_layer_norm",
        "gelu": "onnxruntime_fusions/enable_bias_gelu",
    },
    "ort_fusions": {
        "residual": "onnxscript_rewrites/fuse_skip_layer_normalization",
        "gelu": "onnxscript_rewrites/fuse_bias_gelu",
    },
}
"""Recipe → kind → the inner pass that is known to destroy it in this model."""


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    folder = tmp_path_factory.mktemp("bert")
    source = load_source(RunConfig.from_mapping({"model": BERT}, folder).model)
    assert isinstance(source, TorchSource)
    path = Path(folder, "bert.onnx")
    export_onnx(source, ExportConfig()).save(path)
    return onnx.load(path)


@pytest.fixture(scope="module")
def freely(bert: onnx.ModelProto, context: PassContext) -> Callable[[str], PassRun]:
    """What comes of a recipe when nothing is asked for."""
    return cache(lambda name: optimized(context, bert, RECIPES[name], feeds=FEEDS))


@pytest.mark.parametrize("name", RECIPES)
def test_keeps_both_triples_at_two_nodes_each(
    name: str, bert: onnx.ModelProto, context: PassContext, freely: Callable[[str], PassRun]
) -> None:
    kept = optimized(context, bert, RECIPES[name], keep=["qkv"], feeds=FEEDS)
    assert [verdict for verdict, _ in broken(kept)] == [True, True]
    assert kept.rows[-1].status is Status.RAN
    assert kept.rows[-1].changed or name == "onnxscript_rewrites"
    assert kept.power.margin > 1
    assert valid(kept)
    by_name = freely(name)
    if name in MERGING:
        by_name = optimized(context, bert, RECIPES[name], skip=[MERGING[name]], watch=False, feeds=FEEDS)
    assert [verdict for verdict, _ in broken(by_name)] == [True, True]
    assert ops(kept).total() <= ops(by_name).total() + 2 * 2


@pytest.mark.parametrize("name", RECIPES)
def test_without_keep_the_report_says_who_merged(name: str, freely: Callable[[str], PassRun]) -> None:
    run = freely(name)
    guilty = MERGING.get(name)
    assert broken(run) == [(guilty is None, guilty)] * 2
    assert ops(run)["Attention"] == (0 if guilty is None else 2)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in LOST.items() for kind in kinds])
def test_what_destroys_another_kind_is_left_out_alone(
    name: str, kind: str, bert: onnx.ModelProto, context: PassContext
) -> None:
    """To skip what destroys a kind watches the kind. Nothing is pinned, so another pass goes ahead and is found."""
    skipped = {"residual": "fuse_skip_rms_normalization", "gelu": "fuse_erfgelu"}[kind]
    brings_the_name = [] if name == "ort_fusions" else RECIPES["ort_fusions"]
    run = optimized(context, bert, [*RECIPES[name], *brings_the_name], skip=[skipped], feeds=FEEDS)
    verdicts = broken(run, kind)
    assert verdicts
    assert all(verdict for verdict, _ in verdicts)
    assert LOST[name][kind] in {by for _, by in verdicts}
    assert row(run, LOST[name][kind]).status is Status.REVERTED
