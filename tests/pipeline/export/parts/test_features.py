"""The task feature-extraction: the body of a model as one part, with the inputs that any model of its kind has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from transformers import BertConfig, BertForSequenceClassification

from pipeline.config import ExportConfig, ModelConfig
from pipeline.export import TorchSource, export_onnx, load_source

SMALL: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def test_the_body_of_a_classifier(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SMALL)).eval()
    model.save_pretrained(tmp_path / "source")
    settings = {"transformers": str(tmp_path / "source"), "task": "feature-extraction", "part": "model"}
    section = ModelConfig.model_validate(settings)
    assert ModelConfig.model_validate({**settings, "part": None}).part_names == ("model",)
    source = load_source(section)
    assert isinstance(source, TorchSource) and source.draws is None
    assert [spec.name for spec in source.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    export_onnx(source, ExportConfig(), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    ids = np.arange(15).reshape(3, 5)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    found = session.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids})[0]
    with torch.no_grad():
        expected = model.bert(torch.from_numpy(ids), torch.from_numpy(mask)).last_hidden_state.numpy()
    shown = mask.astype(bool)
    np.testing.assert_allclose(np.asarray(found)[shown], expected[shown], atol=1e-5)
