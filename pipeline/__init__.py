"""From a torch module to verified ONNX, to a static IR, to a planned run. Start reading at `pipeline.model_run`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING


def _refuse_other_passes() -> None:
    """Raises ImportError, in one sentence, where `passes` is somebody else's module: this package needs its own."""
    try:
        spec = importlib.util.find_spec("passes")
    except ValueError:  # a module that was put into `sys.modules` by hand
        spec = None
    found = spec.origin if spec is not None else None
    own = Path(__file__).resolve().parents[1] / "passes" / "__init__.py"
    if found is None or Path(found).resolve() != own:
        raise ImportError(
            f"`passes` is {found or 'a module without a file'} here, and onnxline's `pipeline` needs the package "
            f"{own.parent}; use `import onnxline`, which works next to any such file, or rename the file",
            name="passes",
        )


if __name__ == "pipeline":  # under a private name its `passes` is private too
    _refuse_other_passes()

if TYPE_CHECKING:
    from pipeline.config import RunConfig as RunConfig
    from pipeline.result import RunResult as RunResult
    from pipeline.run import Pipeline as Pipeline
else:
    from passes.doors import open_door

    __all__, __getattr__ = open_door(__name__, __file__)
