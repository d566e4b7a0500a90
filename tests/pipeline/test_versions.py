"""The digests by which a result of an earlier release of our own code, or of other files, is known."""

from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path

import pytest

from pipeline.workspace import digest_of_file, digest_of_packages


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


def test_a_large_file_is_read_in_pieces(tmp_path: Path) -> None:
    """16 MiB take less memory than that, and have the digest of their bytes."""
    path, data = tmp_path / "weights", bytes(range(256)) * 2**16
    path.write_bytes(data)
    tracemalloc.start()
    digest = digest_of_file(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert digest == hashlib.blake2b(data, digest_size=8).hexdigest()
    assert most < len(data) / 4
