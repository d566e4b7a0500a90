"""Labels along an axis that follows the model."""

from __future__ import annotations

from pipeline.report.block_labels import block_labels


def test_each_block_has_a_label_at_its_first_place() -> None:
    modules = ["embeddings.patch", "", "encoder.layer.0.norm", "encoder.layer.0.mlp.fc", "encoder.layer.1.norm", "head"]
    assert block_labels(modules) == ((0, "embeddings"), (2, "encoder.layer.0"), (4, "encoder.layer.1"), (5, "head"))


def test_labels_that_would_touch_are_left_out_and_long_ones_keep_their_end() -> None:
    many = [f"model.language_model.layers.{index}" for index in range(64)]
    assert block_labels(many)[:2] == ((0, "…_model.layers.0"), (4, "…_model.layers.4"))
    assert len(block_labels(many)) == 16


def test_no_modules_no_labels() -> None:
    assert block_labels([]) == () == block_labels(["", ""])
