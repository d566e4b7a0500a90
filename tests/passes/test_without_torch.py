"""`passes` works on an ONNX file where torch is not installed."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
sys.modules["torch"] = None  # an import of it fails
sys.modules["transformers"] = None
import passes
for module in pkgutil.walk_packages(passes.__path__, "passes."):
    if module.name != "passes.viewer.explorer.main":  # Model Explorer loads it, which is an extra
        importlib.import_module(module.name)
import onnx
text = '<ir_version: 9, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { a = Identity (x) y = Neg (a) }'
run = passes.optimize(onnx.parser.parse_model(text), recipe=["default", "fold_constants", "infer_shapes"])
print(len(run.model.proto.graph.node), sorted(name for name in sys.modules if name.startswith("pipeline")))
"""


def test_passes_needs_neither_torch_nor_pipeline() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.stdout == "1 []\n", done.stderr
