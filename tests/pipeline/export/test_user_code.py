"""What a user's code may do to the process around it, and what a run makes of that."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import ModelConfig
from pipeline.errors import SourceError
from pipeline.export import TorchSource, load_source, run_torch

CHANGES = """
import os, sys
import numpy as np

def change():
    os.chdir("/")
    np.seterr(all="raise")

class Changes(nn.Linear):
    def forward(self, input):
        change()
        return super().forward(input)

def make():
    change()
    return Changes(4, 2)
"""


def test_the_working_directory_and_numpys_errors_are_put_back(
    factory: Callable[..., ModelConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a run is relative to the working directory: such a run ended with `the folder was removed`."""
    monkeypatch.chdir(tmp_path)
    source = load_source(factory(CHANGES, inputs={"input": {"shape": [2, 4]}}))
    assert isinstance(source, TorchSource)
    run_torch(source, {"input": np.ones((2, 4), np.float32)})
    assert Path.cwd() == tmp_path.resolve()
    assert np.geterr()["under"] == "ignore"


@pytest.mark.parametrize("code", ["sys.exit(0)", "sys.exit('done')"])
def test_a_forward_pass_that_exits_is_an_error(factory: Callable[..., ModelConfig], code: str) -> None:
    """The command ended with exit code 0, without a word and without a model."""
    text = f"import sys\nclass Exits(nn.Linear):\n    def forward(self, input):\n        {code}\ndef make():\n"
    with pytest.raises(SourceError, match=r"the model raises on its example inputs.*: SystemExit: (0|done)"):
        load_source(factory(f"{text}    return Exits(4, 2)\n", inputs={"input": {"shape": [2, 4]}}))


def test_a_child_that_forward_forks_does_not_go_on_with_the_run(
    factory: Callable[..., ModelConfig], tmp_path: Path
) -> None:
    """Both processes wrote the same files, and said the same lines."""
    reached = tmp_path / "reached"
    text = "import os\nclass Forks(nn.Linear):\n    def forward(self, input):\n        os.fork()\n"
    text += "        return super().forward(input)\ndef make():\n    return Forks(4, 2)\n"
    process = os.getpid()
    try:
        load_source(factory(text, inputs={"input": {"shape": [2, 4]}}))
    finally:
        if os.getpid() != process:  # where nothing ends the child
            reached.touch()
            os._exit(0)
    os.wait()
    assert not reached.exists()
