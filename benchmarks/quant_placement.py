"""Do the profiles round what the tools of their targets round? Models of transformers and torchvision, by tensor.

    python -m benchmarks.quant_placement [--aimet PYTHON] [--modelopt PYTHON] [--folder DIR] [MODEL ...]

A name that MODELS has not is one of torchvision's, such as resnet18; the interpreter of AIMET, which needs torchvision,
exports it with random weights.
    python -m benchmarks.quant_placement --config configs/minilm.yaml …

`ort-cpu` is held against what onnxruntime's `quantize_static` writes for the same file, and `qnn-htp` against the
quantizers that AIMET's simulation has for it and against AIMET's loader, which is strict. `tensorrt` is held against
ModelOpt, which runs on a CPU; the interpreter needs nvidia-modelopt with what its extra `onnx` names but cupy. What
only moves numbers has no encoding in AIMET, and that of its source in onnxruntime; the bias of a normalization has 32
bits in onnxruntime alone, which makes copies of a bias that several products read. These are left out.

With `--config` the encodings of the final model of a configuration, by `qnn-htp`, are held against the check of
`onnxline check --encodings`, AIMET's strict loader and onnxruntime's configuration for QNN.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import torch
import transformers
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize, quantize_static
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

from benchmarks.measure import machine, versions_line
from passes.encodings.aimet import read_aimet
from passes.encodings.encoding import share_by_moves
from passes.weights.detached import read_model
from pipeline.config import RunConfig
from pipeline.errors import OnnxlineError
from pipeline.quantsim.encodings_check import check_encodings
from pipeline.quantsim.run import QuantSim
from pipeline.quantsim.sites import find_sites
from pipeline.run import Pipeline

SIZES: Final[dict[str, Any]] = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}

WORDS: Final[dict[str, Any]] = {**SIZES, "vocab_size": 100, "hidden_size": 32}

MODELS: Final[dict[str, Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]]]] = {
    "MobileNetV2": lambda: (_model("MobileNetV2Model", "MobileNetV2Config"), _image(64)),
    "ConvNext": lambda: (
        _model("ConvNextModel", "ConvNextConfig", hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1]), _image(64),
    ),
    "ViT": lambda: (_model("ViTModel", "ViTConfig", **SIZES, hidden_size=32, image_size=32, patch_size=8), _image(32)),
    "Bert": lambda: (_model("BertModel", "BertConfig", **WORDS), _ids()),
    "Llama": lambda: (
        _model("LlamaForCausalLM", "LlamaConfig", **WORDS, num_key_value_heads=2, use_cache=False), _ids(),
    ),
    "DistilBert": lambda: (
        _model("DistilBertModel", "DistilBertConfig", vocab_size=100, dim=32, n_layers=2, n_heads=4, hidden_dim=64),
        _ids(),
    ),
    "Electra": lambda: (_model("ElectraModel", "ElectraConfig", **WORDS, embedding_size=32), _ids()),
    "Qwen2": lambda: (
        _model("Qwen2ForCausalLM", "Qwen2Config", **WORDS, num_key_value_heads=2, use_cache=False), _ids(),
    ),
    "OPT": lambda: (
        _model(
            "OPTForCausalLM", "OPTConfig", vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            ffn_dim=64, word_embed_proj_dim=32, use_cache=False,
        ),
        _ids(),
    ),
    "GPT2": lambda: (
        _model("GPT2LMHeadModel", "GPT2Config", vocab_size=100, n_embd=32, n_layer=2, n_head=4, use_cache=False),
        _ids(),
    ),
}  # fmt: skip


def _model(name: str, config: str, **settings: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**settings)).eval()


def _image(size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, 3, size, size)}


def _ids() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, 90, (1, 16))}


@dataclass(frozen=True, slots=True)
class Row:
    """What differs: tensors that we alone round, and those that the tool alone does."""

    model: str
    profile: str
    tensors: int
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    remark: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[*MODELS])
    parser.add_argument("--aimet", metavar="PYTHON", default=os.environ.get("AIMET_PYTHON", ""))
    parser.add_argument("--modelopt", metavar="PYTHON", default="")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--config", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        print(f"{machine()}; {versions_line()}")
        if options.config:
            print("| configuration | encodings | `check --encodings` | AIMET | |\n| --- | --- | --- | --- | --- |")
            for path in options.config:
                print(check_config(path, folder / path.stem, options.aimet), flush=True)
            return
        print("| model | profile | tensors | ours alone | the tool alone | |\n| --- | --- | --- | --- | --- | --- |")
        for name in options.models:
            for row in compare(name, folder / name, options.aimet, options.modelopt):
                alone = (f"{len(names)} ({', '.join(names[:3])})" if names else "0" for names in (row.ours, row.theirs))
                print(
                    f"| {row.model} | {row.profile} | {row.tensors} | {' | '.join(alone)} | {row.remark} |", flush=True
                )


def check_config(path: Path, folder: Path, aimet: str) -> str:
    """A row for the final model of a configuration."""
    settings = ["profile=qnn-htp", "rules={}", "evaluation=1", "calibration.samples=4"]
    config = RunConfig.from_yaml(path, [f"quantsim.{setting}" for setting in settings])
    try:
        sampler = Pipeline(config, folder, lambda _: None).run().sampler
        QuantSim(config, folder, progress=False).run()
    except OnnxlineError as error:
        return f"| {path.stem} | refused: {str(error).splitlines()[0]} | | | |"
    report = check_encodings(read_model(folder / "model.onnx"), folder / "model.encodings", "qnn-htp")
    checked = "complete" if report.is_complete else "; ".join(report.lines())
    try:
        asked = _ask_qnn(folder, sampler.draw(0)) if sampler else "no sample"
    except Exception as error:  # it raises errors of many types
        asked = f"onnxruntime's quantizer ends with {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    loaded = load_in_aimet(folder, aimet)[1] if aimet else "not asked"
    return f"| {path.stem} | {len(_encoded(folder))} | {checked} | {loaded} | {asked} |"


def load_in_aimet(folder: Path, python: str) -> tuple[set[str], str]:
    """The tensors that have a quantizer in AIMET's simulation, and what its strict loader says of our encodings."""
    command = [python, "-c", ASK_AIMET, str(folder / "model.onnx"), str(folder / "model.encodings")]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode:
        return set(), f"AIMET's simulation ends with {child.stderr.strip().splitlines()[-1][:160]}"
    enabled, remark = json.loads(child.stdout.splitlines()[-1])
    return set(enabled), remark


def compare(name: str, folder: Path, aimet: str, modelopt: str) -> Iterator[Row]:
    """A row for each profile whose tool is here."""
    folder.mkdir(parents=True, exist_ok=True)
    sample = export(name, folder, aimet)
    np.savez(folder / "sample.npz", **sample)  # type: ignore[arg-type]
    if modelopt:
        yield _against_modelopt(name, _simulate(folder, "tensorrt"), modelopt)
        return
    yield _against_onnxruntime(name, _simulate(folder, "ort-cpu"), sample)
    if aimet:
        yield _against_aimet(name, _simulate(folder, "qnn-htp"), sample, aimet)


def export(name: str, folder: Path, aimet: str) -> dict[str, np.ndarray]:
    """Write `source.onnx` into the folder; returns a sample."""
    if name not in MODELS:
        subprocess.run([aimet, "-c", EXPORT_VISION, name, str(folder / "source.onnx")], check=True, capture_output=True)
        [image] = onnx.load(folder / "source.onnx", load_external_data=False).graph.input
        return {image.name: np.random.default_rng(0).standard_normal((1, 3, 64, 64), np.float32)}
    module, example = MODELS[name]()
    program = torch.onnx.export(module, (), kwargs=example, dynamo=True, opset_version=21, verbose=False)
    assert program is not None
    program.save(folder / "source.onnx")
    names = [value.name for value in program.model.graph.inputs]
    return {str(key): value.numpy() for key, value in zip(names, example.values(), strict=True)}


EXPORT_VISION: Final = """
import sys
import torch, torchvision
torch.manual_seed(0)
module = torchvision.models.get_model(sys.argv[1]).eval()
for layer in module.modules():
    if isinstance(layer, torch.nn.BatchNorm2d):
        torch.nn.init.uniform_(layer.weight, 0.5, 1.5)
        torch.nn.init.normal_(layer.running_mean, std=0.1)
        torch.nn.init.uniform_(layer.running_var, 0.5, 1.5)
torch.onnx.export(
    module, (torch.randn(1, 3, 64, 64),), sys.argv[2], dynamo=True, opset_version=21, verbose=False, external_data=False
)
"""


def _simulate(folder: Path, profile: str) -> Path:
    config = RunConfig.model_validate(
        {
            "model": {"onnx": str(folder / "source.onnx")},
            "runtime": {"backends": ["onnxruntime"]},
            "quantsim": {
                "profile": profile,
                "calibration": {"data": [str(folder / "sample.npz")]},
                "sensitivity": False,
                "evaluation": 1,
            },
        }
    )
    return QuantSim(config, folder / profile, progress=False).run().folder


def _encoded(folder: Path) -> set[str]:
    data = json.loads((folder / "model.encodings").read_text(encoding="utf-8"))
    return {row["name"] for section in ("activation_encodings", "param_encodings") for row in data[section]}


class Reader(CalibrationDataReader):
    """One sample for onnxruntime's calibrators."""

    def __init__(self, sample: dict[str, np.ndarray]) -> None:
        self._left = iter([sample])

    def get_next(self) -> dict[str, np.ndarray] | None:  # type: ignore[override]
        return next(self._left, None)


def _against_onnxruntime(name: str, folder: Path, sample: dict[str, np.ndarray]) -> Row:
    paths = folder / "model.onnx", folder / "quantized.onnx"
    quantize_static(*paths, Reader(sample), per_channel=True, activation_type=QuantType.QUInt8)
    written = onnx.load(paths[1]).graph
    theirs = {_stem(tensor.name, "_quantized") for tensor in written.initializer if tensor.name.endswith("_quantized")}
    read = (node.input[0] for node in written.node if node.op_type == "QuantizeLinear")
    theirs |= {_stem(value, "_QuantizeLinear_Input") for value in read}
    sites = find_sites(read_model(paths[0]))
    left_out = {site.tensor for site in sites if site.moves or site.role == "bias" or site.parameter == "bias"}
    theirs.intersection_update(site.tensor for site in sites)
    return _row(name, "ort-cpu", _encoded(folder), theirs, left_out)


def _stem(name: str, ending: str) -> str:
    return name.removesuffix(ending)


ASK_AIMET: Final = """
import json, logging, sys
import onnx
from aimet_onnx.quantsim import QuantizationSimModel, load_encodings_to_sim
sim = QuantizationSimModel(
    onnx.load(sys.argv[1]), param_type="int8", activation_type="int16", config_file="htp_v73"
)
enabled = [name for name, quantizer in sim.qc_quantize_op_dict.items() if quantizer and quantizer.enabled]
try:
    load_encodings_to_sim(sim, sys.argv[2])
    remark = "loaded with strict=True"
except Exception as error:
    remark = "refused: " + str(error).splitlines()[0]
print(json.dumps([enabled, remark]))
"""


def _against_aimet(name: str, folder: Path, sample: dict[str, np.ndarray], python: str) -> Row:
    enabled, remark = load_in_aimet(folder, python)
    report = check_encodings(read_model(folder / "model.onnx"), folder / "model.encodings", "qnn-htp")
    checked = "complete for the converter" if report.is_complete else "; ".join(report.lines())
    remark = f"{remark}; {checked}; {_ask_qnn(folder, sample)}"
    return _row(name, "qnn-htp", _encoded(folder), enabled, (), remark)


ASK_MODELOPT: Final = """
import sys
import numpy as np
from modelopt.onnx.quantization import quantize
quantize(
    sys.argv[1], quantize_mode="int8", calibration_data=dict(np.load(sys.argv[2])), calibration_method="max",
    calibration_eps=["cpu"], high_precision_dtype="fp32", output_path=sys.argv[3],
)
"""


def _against_modelopt(name: str, folder: Path, python: str) -> Row:
    paths = folder / "model.onnx", folder.parent / "sample.npz", folder / "modelopt.onnx"
    child = subprocess.run([python, "-c", ASK_MODELOPT, *map(str, paths)], capture_output=True, text=True)
    if child.returncode:
        why = f"ModelOpt ends with {child.stderr.strip().splitlines()[-1][:160]}"
        return _row(name, "tensorrt", _encoded(folder), set(), (), why)
    model = read_model(paths[0])
    sites = find_sites(model)
    read = {node.input[0] for node in onnx.load(paths[2]).graph.node if node.op_type == "QuantizeLinear"}
    row = _row(
        name,
        "tensorrt",
        _encoded(folder),
        read.intersection(site.tensor for site in sites),
        [site.tensor for site in sites if site.moves],
    )
    readers = {value: node.op_type for node in model.proto.graph.node for value in node.input}
    counts = [count_operators(names, readers) or " none" for names in (row.ours, row.theirs)]
    return replace(row, remark=f"read by: ours alone{counts[0]}, ModelOpt's alone{counts[1]}")


def _ask_qnn(folder: Path, sample: dict[str, np.ndarray]) -> str:
    """What onnxruntime's configuration for QNN makes of the activations' encodings, as overrides of the same file.

    What only moves values has the encoding of its source there, too, as AIMET means it; and activations stay that
    onnxruntime would take for limits of a range.
    """
    source = onnx.load(folder / "model.onnx", load_external_data=False).graph
    known = share_by_moves(source, read_aimet(folder / "model.encodings")[0])
    stored = {tensor.name for tensor in source.initializer}
    overrides = {
        tensor: [
            {
                "quant_type": QuantType.QUInt16,
                "scale": encoding.scale,
                "zero_point": np.asarray(encoding.zero_point + middle),
            }
        ]
        for tensor, encoding in known.items()
        if tensor not in stored and (middle := QNN_MIDDLES.get(str(encoding.precision))) is not None
    }
    makers = {name: node.op_type for node in source.node for name in node.output}
    types = {"activation_type": QuantType.QUInt16, "weight_type": QuantType.QInt8, "keep_removable_activations": True}
    paths = folder / "model.onnx", folder / "qnn.onnx"
    quantize(*paths, get_qnn_qdq_config(paths[0], Reader(sample), init_overrides=overrides, **types))  # type: ignore[arg-type]
    graph = onnx.load(paths[1]).graph
    scales = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    quantizers = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    found = {_stem(node.input[0], "_QuantizeLinear_Input"): scales[node.input[1]] for node in quantizers}
    taken = [name for name in found.keys() & overrides if found[name] == overrides[name][0]["scale"]]
    lost = sorted((found.keys() & overrides) - set(taken))
    left = sorted(overrides.keys() - found)
    own = sorted(found.keys() - overrides.keys() - stored)
    return (
        f"takes {len(taken)} of {len(overrides)}; another scale for {len(lost)}{count_operators(lost, makers)}; leaves "
        f"{len(left)} in float{count_operators(left, makers)}; rounds {len(own)} more{count_operators(own, makers)}"
    )


QNN_MIDDLES: Final = {"uint16": 0, "int16": 2**15}
"""The formats of activations, and what makes their zero points those of uint16, as AIMET's files have them."""


def count_operators(names: Iterable[str], makers: Mapping[str, str]) -> str:
    """How many of the tensors each operator gives, in parentheses; `makers` has the operators."""
    counts = Counter(makers.get(name, "input") for name in names)
    return f" ({', '.join(f'{count} of {operator}' for operator, count in counts.most_common())})" if counts else ""


def _row(name: str, profile: str, ours: set[str], theirs: set[str], left_out: Iterable[str], remark: str = "") -> Row:
    ours, theirs = ours.difference(left_out), theirs.difference(left_out)
    return Row(name, profile, len(ours | theirs), tuple(sorted(ours - theirs)), tuple(sorted(theirs - ours)), remark)


if __name__ == "__main__":
    main()
