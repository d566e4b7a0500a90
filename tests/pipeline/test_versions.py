"""The digest by which a result of an earlier release of our own code is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.versions import digest_of_packages


@pytest.mark.parametrize("file", ["code.py", "tables/lib-1.txt", "planted/one.onnxtxt", "html/page.j2"])
def test_every_file_of_a_package_counts(file: str, tmp_path: Path) -> None:
    before = digest_of_packages(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("one", encoding="utf-8")
    digest = digest_of_packages(tmp_path)
    (tmp_path / file).write_text("two", encoding="utf-8")
    assert len({before, digest, digest_of_packages(tmp_path)}) == 3


def test_what_python_compiles_does_not_count(tmp_path: Path) -> None:
    before = digest_of_packages(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "code.cpython-311.pyc").write_bytes(b"one")
    assert digest_of_packages(tmp_path) == before
