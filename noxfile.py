"""Other Pythons, the newest releases, and the built package: `nox`, or `nox -s fast-3.12`.

`make test-all` is the whole suite with pinned releases; this is what it leaves out. An interpreter that is not
installed is skipped. `TORCH_INDEX` is the index that torch is taken from, as in the Makefile.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["fast", "wheel"]

FAST = ("--fast",)
"""What `make test-fast` runs."""

ROOT = Path(__file__).parent


def install(session: nox.Session, *what: str, pinned: bool = False) -> None:
    """Install torch first, from its own index: the wheels of PyPI bring CUDA. What torch needs comes with the rest."""
    pins = ("-c", str(ROOT / "constraints.txt")) if pinned else ()
    index = os.environ.get("TORCH_INDEX", "")
    session.install("--no-deps", *pins, *(("--index-url", index) if index else ()), "torch")
    session.install(*pins, *what)


def names_in(wheel: Path) -> list[str]:
    return sorted(zipfile.ZipFile(wheel).namelist())


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
def fast(session: nox.Session) -> None:
    """The fast tests, with the newest releases that this Python has."""
    install(session, "-e", ".[torch,models,onnxslim,dev]")
    session.run("python", "-m", "pytest", *(session.posargs or FAST))


@nox.session(python="3.11")
def wheel(session: nox.Session) -> None:
    """The wheel, made from the source distribution, has the files of one made from the checkout, and outside of the
    checkout each starter runs."""
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder)
    folder.mkdir()
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools packs what an earlier build left there
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(folder / "dist"), str(ROOT))
    session.run("python", "-m", "build", "--wheel", "--outdir", str(folder / "direct"), str(ROOT))
    [built], [direct] = (list((folder / name).glob("*.whl")) for name in ("dist", "direct"))
    if names_in(built) != names_in(direct):
        session.error(f"files in one wheel alone: {sorted(set(names_in(built)) ^ set(names_in(direct)))}")
    install(session, f"{built}[torch]", pinned=True)
    session.chdir(folder)
    for kind in ("vit", "llm", "cnn", "onnx-file"):
        session.run("onnxline", "init", kind, "--out", f"{kind}.yaml")
        session.run("onnxline", "run", f"{kind}.yaml")
