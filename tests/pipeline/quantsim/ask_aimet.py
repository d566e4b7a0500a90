"""What AIMET reads in our files, and writes for the same weights: `PYTHON ask_aimet.py FOLDER`, in its environment.

FOLDER holds `cases.json`, a list of [name, format, block], `NAME.onnx` with the weight `w`, and our files
`NAME.VERSION.encodings`. The scale of `w` after loading becomes `NAME/VERSION` in `result.npz`, or the refusal a line
in `refused.json`; `NAME/own` is AIMET's own scale, and `NAME.aimet.VERSION.encodings` its own file.
"""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from aimet_onnx import QuantizationSimModel
from aimet_onnx.quantsim import load_encodings_to_sim, set_blockwise_quantization_for_weights, set_lpbq_for_params

OPERATORS = ("MatMul", "Gemm", "Conv", "ConvTranspose")


def simulate(path: Path, kind: str, block: int) -> Any:
    """A simulation whose one quantizer is that of `w`, in its format."""
    model = onnx.load(path)
    sim = QuantizationSimModel(model, param_type="int8", activation_type="int16", config_file="htp_v73")
    if kind == "block":
        set_blockwise_quantization_for_weights(sim, OPERATORS, 4, True, block, strict=True)
    elif kind == "lpbq":
        set_lpbq_for_params(sim, 4, block, op_types=OPERATORS, strict=True)
    for tensor, quantizer in sim.qc_quantize_op_dict.items():
        quantizer.enabled = tensor == "w"
    return sim


def main(folder: Path) -> None:
    scales: dict[str, np.ndarray] = {}
    refused: dict[str, str] = {}
    for name, kind, block in json.loads((folder / "cases.json").read_text()):
        for path in sorted(folder.glob(f"{name}.[0-9]*.encodings")):
            version = path.name.removeprefix(f"{name}.").removesuffix(".encodings")
            sim = simulate(folder / f"{name}.onnx", kind, block)
            try:
                load_encodings_to_sim(sim, str(path), strict=True)
                scales[f"{name}/{version}"] = sim.qc_quantize_op_dict["w"]._get_scale()
            except Exception as error:
                refused[f"{name}/{version}"] = f"{type(error).__name__}: {error}"
        sim = simulate(folder / f"{name}.onnx", kind, block)
        inputs = {value.name: value.type.tensor_type.shape.dim for value in sim.model.model.graph.input}
        ones = {tensor: np.ones([dim.dim_value for dim in dims], np.float32) for tensor, dims in inputs.items()}
        sim.compute_encodings([ones])
        scales[f"{name}/own"] = sim.qc_quantize_op_dict["w"]._get_scale()
        for version in ("1.0.0", "2.0.0"):
            sim.export(str(folder), f"{name}.aimet.{version}", export_model=False, encoding_version=version)
    np.savez(folder / "result.npz", **scales)  # type: ignore[arg-type]
    (folder / "refused.json").write_text(json.dumps(refused))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
