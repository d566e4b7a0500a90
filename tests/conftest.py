"""What many tests of passes and of whole runs need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from passes.context import PassContext, open_context


@pytest.fixture(scope="session")
def bench() -> Iterator[PassContext]:
    """Workers and a folder, for all tests: they take seconds to start. A worker that dies is replaced."""
    with open_context() as opened:
        yield opened


ROOT: Final = Path(__file__).parent

MARKS: Final = {
    "ray": ("pipeline/jobs/test_ray.py",),
    "browser": ("pipeline/report/test_browser.py",),
    "families": (
        "families/", "pipeline/test_families.py", "torch_ir/test_families.py", "export/test_mixtures.py",
        "export/test_exported_transformers.py", "export/static_cache/test_families.py", "runtime/test_onnx_cases.py",
        "passes/structures/test_exports.py", "passes/structures/test_tricky_kept.py", "passes/external/test_bert.py",
        "passes/provenance/test_models.py", "importers/from_torch/layer_dedup/test_transformers.py",
    ),
    "tutorials": (
        "docs/test_tutorials.py", "docs/test_readme.py", "docs/test_torch_ir_page.py", "examples/", "package/",
    ),
    "slow": (
        "pipeline/", "fuzz/", "passes/audit/", "passes/guard/", "passes/test_isolate.py", "export/test_to_onnx.py",
        "export/test_translations.py", "export/test_untranslatable.py", "export/test_weight_free.py",
        "torch_ir/test_view_writes.py", "torch_ir/test_writes.py", "torch_ir/test_custom_ops.py",
        "torch_ir/test_caches.py", "torch_ir/test_compat.py", "torch_ir/test_flex_attention.py", "aten/test_bodies.py",
        "importers/from_torch/test_functional.py", "importers/from_torch/layer_dedup/test_plain.py",
        "passes/provenance/test_shared_weights.py",
    ),
}  # fmt: skip
"""Mark → the files and folders below tests/ that bear it. `make test-fast` leaves all of them out, more than four
fifths of the time of the whole suite."""


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        place = item.path.relative_to(ROOT).as_posix()
        for mark, places in MARKS.items():
            if place.startswith(places):
                item.add_marker(mark)
