"""Mapped files: one mapping for all tensors of a file, and each tensor knows where it lies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from passes.weights.mapped import FileMaps, FileRange, find_file_range, release


def write_numbers(path: Path, count: int) -> str:
    path.write_bytes((np.arange(count) % 251).astype(np.uint8).tobytes())
    return str(path)


def descriptors(path: str) -> int:
    """Those of this process that hold the file."""
    return sum(entry.is_symlink() and str(entry.readlink()) == path for entry in Path("/proc/self/fd").iterdir())


def test_a_thousand_views_of_a_file_take_one_descriptor(tmp_path: Path) -> None:
    path, maps = write_numbers(tmp_path / "w", 9000), FileMaps()

    views = [maps.view(FileRange(path, 9 * place, 9)) for place in range(1000)]

    assert descriptors(path) == 1
    assert all(np.array_equal(view, np.arange(9 * at, 9 * at + 9) % 251) for at, view in enumerate(views))


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 70_001])
def test_a_view_knows_its_place_and_gives_back_its_pages(tmp_path: Path, offset: int) -> None:
    path = write_numbers(tmp_path / "w", 100_000)
    view = FileMaps().view(FileRange(path, offset, 12_345))

    assert find_file_range(view) == FileRange(path, offset, 12_345)
    assert find_file_range(view[100:200]) == FileRange(path, offset + 100, 100)
    release(view)
    assert np.array_equal(view, np.arange(offset, offset + 12_345) % 251)


def test_a_mapping_of_numpys_own_knows_its_place_too(tmp_path: Path) -> None:
    path = write_numbers(tmp_path / "w", 100_000)
    view = np.memmap(path, np.uint8, "r", offset=5000, shape=(60_000,))
    assert find_file_range(view) == FileRange(path, 5000, 60_000)
    release(view[10_000:])
    assert view[30_000] == 35_000 % 251


def test_memory_has_no_place(tmp_path: Path) -> None:
    path = write_numbers(tmp_path / "w", 10)
    view = FileMaps().view(FileRange(path, 0, 10))
    assert find_file_range(np.array(view)) is None
    Path(path).unlink()
    assert find_file_range(view) is None


def test_a_file_that_has_grown_is_mapped_again(tmp_path: Path) -> None:
    path, maps = write_numbers(tmp_path / "w", 10), FileMaps()
    first = maps.view(FileRange(path, 0, 10))
    write_numbers(tmp_path / "w", 20)
    assert maps.view(FileRange(path, 10, 10)).tolist() == list(range(10, 20))
    assert first.tolist() == list(range(10))
    with pytest.raises(ValueError, match="has 20 bytes, and 30 were asked for"):
        maps.view(FileRange(path, 20, 10))
