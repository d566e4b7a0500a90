"""The kernels in C++ are compiled once, by a compiler that may be missing or fail, into a folder that is ours alone.

A process can load one such library only, so most tests build without loading, by compilers of a few lines.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.errors import UsageError
from pipeline.runtime.kernels.native.kernel_library import build_library, is_library_built
from tests.support.native import native_library
from tests.support.processes import run_forked, start_forked

LOADING = """
from pipeline.errors import UsageError
from pipeline.runtime.kernels import load_library
try:
    print("panel", load_library().panel)
except UsageError as error:
    print(error)
"""

BUILDING = """
from pipeline.runtime.kernels.native.kernel_library import build_library
print(build_library())
"""

LOADING_TWO = """
import os
from pipeline.errors import UsageError
from pipeline.runtime.kernels.native.kernel_library import load_library
load_library()
load_library.cache_clear()
print("again", load_library().panel)
load_library.cache_clear()
os.environ["CXX"] = os.environ["OTHER"]
try:
    load_library()
except UsageError as error:
    print(error)
"""

QUICK = """
case "$*" in *-shared*) ;; *) echo "quick 1.0"; exit 0 ;; esac
echo compiled >> "$0.log"
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""
"""A compiler that writes down its calls, and makes a file that is no library."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "onnxline"


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return choose_compiler(tmp_path / "quick", QUICK, monkeypatch)


def choose_compiler(path: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def test_it_is_compiled_once(cache: Path, quick: Path) -> None:
    assert not is_library_built()
    path = build_library()
    assert is_library_built()
    assert build_library() == path
    assert list(cache.iterdir()) == [path]
    assert Path(f"{quick}.log").read_text() == "compiled\n"


def test_other_sources_flags_or_compilers_make_another_library(
    cache: Path, quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_library()
    choose_compiler(quick, QUICK.replace("1.0", "2.0"), monkeypatch)
    second = build_library()
    choose_compiler(tmp_path / "other", QUICK, monkeypatch)
    assert len({first, second, build_library()}) == len(list(cache.iterdir())) == 3


def test_a_compiler_with_arguments(cache: Path, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `ccache g++`, or `g++ -m64`."""
    plain = build_library()
    monkeypatch.setenv("CXX", f"/bin/sh '{quick}' -m64")
    assert build_library() != plain
    assert Path(f"{quick}.log").read_text() == "compiled\n" * 2
    monkeypatch.setenv("CXX", "g++ 'x")
    with pytest.raises(UsageError, match=r"did not find \"g\+\+ 'x\" of \$CXX"):
        build_library()


def test_a_compiler_that_is_missing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match=r"did not find 'no-such-compiler' of \$CXX; install one, or leave out `nat"):
        build_library()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(UsageError, match=r"did not find any of c\+\+, g\+\+, clang\+\+; install one"):
        build_library()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo 'note: a line' >&2; echo 'x.cpp:1: error: no such flag' >&2; exit 1", "x.cpp:1: error: no such flag"),
        ("echo 'unknown option' >&2; exit 2", "unknown option"),
        ("exit 1", "it said nothing"),
        ("exit 0", "it wrote no library"),
        (
            "test $LC_ALL = C && printf 'error: \\351 is no letter\\n' >&2; exit 1",
            "error: \N{REPLACEMENT CHARACTER} is no letter",
        ),
    ],
)
def test_a_compiler_that_fails(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    choose_compiler(tmp_path / "failing", body, monkeypatch)
    with pytest.raises(UsageError) as refusal:
        build_library()
    assert f"failed to compile the kernels ({said}); name another compiler in $CXX" in str(refusal.value)
    assert list(cache.iterdir()) == []  # nothing half done is left


def test_a_compiler_that_is_no_program(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_compiler(tmp_path / "text", "", monkeypatch).write_text("no program")
    with pytest.raises(UsageError, match=r"failed to compile the kernels \(it cannot be run: .*\); name another"):
        build_library()


def test_a_compiler_with_flags_or_a_space_in_its_path(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my tools").mkdir()
    path = choose_compiler(tmp_path / "my tools" / "quick", QUICK.replace("compiled", "$1 $2"), monkeypatch)
    first = build_library()
    monkeypatch.setenv("CXX", f"'{path}' -m64 ")
    second = build_library()
    assert first != second
    assert Path(f"{path}.log").read_text() == "-std=c++20 -O3\n-m64 -std=c++20\n"
    monkeypatch.setenv("CXX", f"'{path}")
    with pytest.raises(UsageError, match=r"did not find .* of \$CXX"):
        build_library()


def test_a_damaged_library(cache: Path, quick: Path) -> None:
    build_library()
    said = run_forked("-c", LOADING).stdout
    assert "cannot be loaded (" in said
    assert "; remove it, so that it is compiled again" in said


def test_a_folder_that_cannot_be_made(cache: Path, quick: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    with pytest.raises(UsageError, match=r"cannot be made \(.*\); set XDG_CACHE_HOME to a folder that can, or leave"):
        build_library()


def test_a_user_without_a_home(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    with pytest.raises(UsageError, match=r"found no home folder; set XDG_CACHE_HOME to a folder of yours, or leave"):
        build_library()


def test_a_folder_in_the_place_of_the_library(cache: Path, quick: Path) -> None:
    path = build_library()
    path.unlink()
    path.mkdir()
    with pytest.raises(
        UsageError, match=r"\.so cannot be written \(Is a directory\); make room, or set XDG_CACHE_HOME"
    ):
        build_library()


@pytest.mark.parametrize("umask", [0o002, 0o000])
def test_a_umask_that_lets_a_group_write(cache: Path, quick: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = build_library()
    finally:
        os.umask(before)
    assert (cache.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o755)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives a link to somebody else")
@pytest.mark.parametrize("of", ["folder", "library"])
def test_a_link_of_somebody_else(cache: Path, quick: Path, tmp_path: Path, of: str) -> None:
    """It may lead to a folder of ours now, and elsewhere when the library is loaded."""
    place = build_library() if of == "library" else cache
    place.parent.mkdir(parents=True, exist_ok=True)
    target = place.rename(tmp_path / "ours") if of == "library" else tmp_path
    place.symlink_to(target)
    os.lchown(place, os.getuid(), os.getgid())
    assert build_library().is_file()
    os.lchown(place, 12345, -1)
    with pytest.raises(UsageError, match="others can write to"):
        build_library()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="whoever may write everywhere")
def test_a_folder_that_cannot_be_written(cache: Path, quick: Path) -> None:
    cache.mkdir(mode=0o500, parents=True)
    with pytest.raises(UsageError, match=r"cannot be written"):
        build_library()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="who may write is a matter of POSIX permissions")
def test_a_folder_or_a_library_that_others_can_write_to(cache: Path, quick: Path) -> None:
    """Whoever can write there could have anything run here."""
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(UsageError, match=r"others can write to .*, and code in it would be run"):
        build_library()
    assert list(cache.iterdir()) == []
    cache.chmod(0o700)
    build_library().chmod(0o722)
    with pytest.raises(UsageError, match=r"others can write to .*\.so"):
        build_library()


def test_two_processes_that_build_at_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes a file of its own; the one that ends last takes the place of the other, whose path stays right."""
    waiting = 'while [ $(wc -l < "$0.log") -lt 2 ]; do sleep 0.1; done'
    slow = choose_compiler(tmp_path / "slow", QUICK.replace("while", f"{waiting}\nwhile", 1), monkeypatch)
    files = [tmp_path / name for name in "ab"]
    started = [start_forked("-c", BUILDING, said=file) for file in files]
    for process in started:
        process.join(300)
    assert [file.read_text().strip() for file in files] == [str(path) for path in cache.iterdir()] * 2
    assert Path(f"{slow}.log").read_text() == "compiled\n" * 2  # both were at it at the same time


def test_a_process_has_one_library_of_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would abort at operators that are registered twice."""
    native_library()
    other = choose_compiler(tmp_path / "quick", QUICK, monkeypatch)
    monkeypatch.setenv("OTHER", str(other))
    monkeypatch.delenv("CXX")
    process = run_forked("-c", LOADING_TWO)
    again, refusal = process.stdout.splitlines()
    assert again.startswith("again ")
    assert "this process has loaded other kernels than" in refusal
    assert process.returncode == 0
