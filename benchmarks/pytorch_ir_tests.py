"""Run the 120 tests of pytorch-ir 0.2.3 on onnxline's package of the same name.

    python -m benchmarks.pytorch_ir_tests                   download the source of pytorch-ir from the package registry
    python -m benchmarks.pytorch_ir_tests --source FILE     use this .tar.gz of it

The tests are moved out of the source, so that `import torch_ir` finds `pipeline/compat/torch_ir` and not the peer's
own package. Exits with pytest's code.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELEASE = "pytorch-ir==0.2.3"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a .tar.gz of the source of pytorch-ir")
    source: Path | None = parser.parse_args().source
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run_tests(source or download(Path(folder)), Path(folder)))


def download(folder: Path) -> Path:
    """The source of the release, as a .tar.gz in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-binary", ":all:", "--no-deps", RELEASE, "--dest", folder]
    subprocess.run(command, check=True)
    return next(folder.glob("*.tar.gz"))


def run_tests(source: Path, folder: Path) -> int:
    """pytest's exit code on the tests of `source`, which are unpacked into `folder`."""
    with tarfile.open(source) as archive:
        archive.extractall(folder / "source", filter="data")
    tests = next((folder / "source").glob("*/tests")).rename(folder / "tests")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "pipeline" / "compat")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    main()
