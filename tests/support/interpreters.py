"""Interpreters of other environments, which environment variables name: AIMET and NNCF are installed apart."""

from __future__ import annotations

import json
import subprocess
from typing import Any, Final

AIMET: Final = "AIMET_PYTHON"

NNCF: Final = "NNCF_PYTHON"


def ask(python: str, code: str, *arguments: str) -> Any:
    """What a program prints as the JSON of its last line.

    Args:
        python: the interpreter.
        code: the text of the program.
        arguments: of its command line.
    """
    child = subprocess.run([python, "-c", code, *arguments], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])
