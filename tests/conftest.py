"""What many tests of passes and of whole runs need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pytest
from hypothesis import settings

from passes.context import PassContext, open_context
from tests.support.paths import TESTS

settings.register_profile("onnxline", deadline=None)  # no test asserts a time: other work may hold the machine
settings.load_profile("onnxline")


@pytest.fixture(scope="session")
def context() -> Iterator[PassContext]:
    """Workers and a folder, for all tests: they take seconds to start. A worker that dies is replaced."""
    with open_context() as opened:
        yield opened


MARKS: Final = {
    "ray": ("pipeline/jobs/test_ray.py",),
    "browser": ("pipeline/report/test_browser.py",),
    "families": (
        "benchmarks/model_families/", "whole_runs/test_model_families.py", "pipeline/torch_ir/test_model_families.py",
        "pipeline/export/test_mixtures.py", "pipeline/export/test_exported_transformers.py",
        "pipeline/export/static_cache/test_model_families.py", "pipeline/runtime/test_onnx_cases.py",
        "pipeline/importers/from_torch/layer_dedup/test_transformers.py", "passes/structures/test_exports.py",
        "passes/structures/test_tricky_kept.py", "passes/external/test_bert.py", "passes/provenance/test_models.py",
    ),
    "tutorials": (
        "docs/test_tutorials.py", "docs/test_readme.py", "docs/test_torch_ir_page.py", "examples/", "package/",
    ),
    "slow": (
        "whole_runs/", "fuzz/", "passes/audit/", "passes/guard/", "passes/provenance/test_shared_weights.py",
        "passes/worker/test_client.py", "pipeline/batch/", "pipeline/commands/", "pipeline/jobs/", "pipeline/report/",
        "pipeline/compat/", "pipeline/export/test_to_onnx.py", "pipeline/export/test_translations.py",
        "pipeline/export/test_untranslatable.py", "pipeline/export/test_weight_free.py",
        "pipeline/runtime/kernels/aten/test_bodies.py", "pipeline/importers/from_torch/test_functionalize.py",
        "pipeline/importers/from_torch/layer_dedup/test_plain.py", "pipeline/quantsim/test_whole_simulation.py",
        "pipeline/torch_ir/test_caches.py", "pipeline/torch_ir/test_custom_ops.py",
        "pipeline/torch_ir/test_flex_attention.py", "pipeline/torch_ir/test_view_writes.py",
        "pipeline/torch_ir/test_writes.py",
    ),
}  # fmt: skip
"""Mark → the files and folders below tests/ that bear it. `make test-fast` leaves all of them out, more than four
fifths of the time of the whole suite."""


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        place = item.path.relative_to(TESTS).as_posix()
        for mark, places in MARKS.items():
            if place.startswith(places):
                item.add_marker(mark)
