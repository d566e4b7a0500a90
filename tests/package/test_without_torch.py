"""What works on an ONNX file where torch is not installed, and the sentence on the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx

from tests.support.onnx_models import attention

PROGRAM = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # an import fails, as where they are not installed
import onnxline
from pipeline.config import RunConfig
from pipeline.errors import UsageError
from pipeline.quantsim import QuantSim
from pipeline.stages.check import check_settings
from pipeline.workspace import Workspace

for backends in ("[plan]", "[onnxruntime, torch]"):
    try:
        check_settings(RunConfig.from_source("m.onnx", [f"runtime.backends={backends}"]), Workspace("runs"))
    except UsageError as error:
        print(error)
for name in ("compile_graph", "torch_ir"):
    try:
        getattr(onnxline, name)
    except ImportError as error:
        print(error)
notes = []
result = QuantSim(RunConfig.from_source("m.onnx", ["passes.recipe=[]"]), "out", notes.append).run()
print(result.report.not_estimated, "torch" in {name for name, module in sys.modules.items() if module})
"""

SAID = """\
runtime.backends: plan needs torch, which is not installed; pip install 'onnxline[torch]'
runtime.backends: torch needs torch, which is not installed; pip install 'onnxline[torch]'
onnxline.compile_graph needs torch, which is not installed; pip install 'onnxline[torch]'
pipeline.torch_ir needs torch, which is not installed; pip install 'onnxline[torch]'
it needs torch, which is not installed; pip install 'onnxline[torch]' False
"""


def test_an_onnx_file_is_quantized_and_a_named_backend_is_refused_before_the_run(tmp_path: Path) -> None:
    onnx.save(attention(), tmp_path / "m.onnx")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == SAID, done.stderr
