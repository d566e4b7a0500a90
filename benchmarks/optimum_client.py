"""optimum-onnx as the client of folders that runs in parts have written: tokens, features, a pipeline's image.

    python -m benchmarks.optimum_client --peers PYTHON

`PYTHON` (in tests `$OPTIMUM_PYTHON`) is the interpreter of an environment that has optimum-onnx, transformers 4 and
diffusers below 0.37, which optimum-onnx 0.1.0 needs; it imports nothing of this repository. The rows are in RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

TOKENIZER: Final = "tokenizer"

DECODE: Final = """
import json, sys, torch
from optimum.onnxruntime import ORTModelForCausalLM
ids = torch.tensor([json.loads(sys.argv[2])])
model = ORTModelForCausalLM.from_pretrained(sys.argv[1], file_name="decoder.onnx", use_io_binding=False)
settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
print(json.dumps(model.generate(ids, max_new_tokens=32, **settings)[0, ids.shape[1]:].tolist()))
"""

ANSWER: Final = """
import json, sys, numpy, torch
from optimum import onnxruntime as client
arrays = {name: torch.from_numpy(array) for name, array in numpy.load(sys.argv[2]).items()}
kind = client.ORTModelForSeq2SeqLM if "input_ids" in arrays else client.ORTModelForSpeechSeq2Seq
model = kind.from_pretrained(sys.argv[1], decoder_with_past_file_name="decoder.onnx", use_io_binding=False)
settings = {"do_sample": False, "eos_token_id": int(sys.argv[3]), "begin_suppress_tokens": None}
print(json.dumps(model.generate(**arrays, max_new_tokens=32, **settings)[0].tolist()))
"""

FEEL: Final = """
import sys, numpy, torch
from optimum.onnxruntime import ORTModelForFeatureExtraction
arrays = {name: torch.from_numpy(array) for name, array in numpy.load(sys.argv[2]).items()}
model = ORTModelForFeatureExtraction.from_pretrained(sys.argv[1], use_io_binding=False)
numpy.save(sys.argv[3], model(**arrays).last_hidden_state.numpy())
"""

DRAW: Final = """
import sys, numpy, torch
from optimum.onnxruntime import ORTStableDiffusionPipeline
arrays = {name: torch.from_numpy(array) for name, array in numpy.load(sys.argv[2]).items()}
pipe = ORTStableDiffusionPipeline.from_pretrained(sys.argv[1])
image = pipe(**arrays, height=16, width=16, num_inference_steps=4, output_type="np").images
numpy.save(sys.argv[3], image)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--peers", metavar="PYTHON", required=True, help="that has optimum-onnx and diffusers")
    python = parser.parse_args().peers
    with tempfile.TemporaryDirectory() as folder:
        print(f"ORTModelForCausalLM: {compare_tokens(python, Path(folder))}", flush=True)
        print(f"ORTModelForSeq2SeqLM: {compare_answers(python, 'T5', Path(folder))}", flush=True)
        print(f"ORTModelForSpeechSeq2Seq: {compare_answers(python, 'Whisper', Path(folder))}", flush=True)
        print(f"ORTModelForFeatureExtraction: off by {compare_features(python, Path(folder)):.1e} at most", flush=True)
        print(f"ORTStableDiffusionPipeline: off by {compare_images(python, Path(folder)):.1e} at most after 4 steps")


def compare_tokens(python: str, folder: Path) -> str:
    """How many tokens of a small Llama are those of torch's `generate`."""
    from benchmarks.generation import configuration, count_equal, make_model
    from benchmarks.parts_table import run_in_parts
    from pipeline.parts.chain import generate_by_torch

    make_model("Llama").save_pretrained(folder / "llama")
    result, _, _ = run_in_parts(configuration(folder / "llama"), "llama", folder / "decoder")
    text = generate_by_torch(make_model("Llama"), 5, 1)
    found = json.loads(call(python, DECODE, [str(result.models), json.dumps(text.prompt)]))
    return f"{count_equal(found, text.tokens)} of {len(text.tokens)} tokens"


def compare_answers(python: str, family: str, folder: Path) -> str:
    """How many tokens of a small model with an encoder are those of torch's `generate`."""
    from benchmarks.encoder_decoder import configuration, make_model
    from benchmarks.generation import count_equal
    from benchmarks.parts_table import run_in_parts
    from pipeline.config import ModelConfig
    from pipeline.parts.chain import generate_after_encoder

    model = make_model(family)
    model.save_pretrained(folder / family)
    settings = configuration(family, folder / family)
    result, _, _ = run_in_parts(settings, family, folder / f"{family}-run")
    text = generate_after_encoder(model, ModelConfig.model_validate(settings["model"]), 5, 1)
    np.savez(folder / f"{family}.npz", **text.inputs)
    unused = next(
        token for token in range(len(text.tokens) + 1) if token not in text.tokens
    )  # which ends no text early
    found = json.loads(call(python, ANSWER, [str(result.models), str(folder / f"{family}.npz"), str(unused)]))
    return f"{count_equal(found[-len(text.tokens) :], text.tokens)} of {len(text.tokens)} tokens"


def compare_features(python: str, folder: Path) -> float:
    """How far the features of a small BERT are from torch's."""
    import torch
    import transformers

    from benchmarks.parts_table import run_in_parts

    sizes = {"vocab_size": 89, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=48)).eval()
    model.save_pretrained(folder / "bert")
    settings = {"model": {"transformers": str(folder / "bert"), "task": "feature-extraction"}}
    result, _, _ = run_in_parts(settings, "bert", folder / "features")
    ids = torch.arange(14).view(2, 7)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    tensors = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}
    np.savez(folder / "words.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
    call(python, FEEL, [str(result.models), str(folder / "words.npz"), str(folder / "features.npy")])
    with torch.no_grad():
        expected = model(**tensors).last_hidden_state.numpy()
    return float(np.abs(np.load(folder / "features.npy") - expected).max())


def compare_images(python: str, folder: Path) -> float:
    """How far the image after 4 steps of a small Stable Diffusion 1.5 is from that of diffusers."""
    from benchmarks.diffusion import configuration
    from benchmarks.parts_table import run_in_parts
    from pipeline import RunConfig
    from pipeline.export.parts import load_for_parts

    pipe = load_for_parts(RunConfig.from_mapping(configuration("SD 1.5"), title="sd").model).module.pipe
    write_pipeline(pipe, folder / "sd")
    settings: Any = {"model": {"diffusers": {"folder": str(folder / "sd"), "height": 16, "width": 16}}}
    result, _, _ = run_in_parts(settings, "sd", folder / "pipeline")
    generator = np.random.default_rng(0)
    shapes = {"prompt_embeds": (1, 24, 32), "negative_prompt_embeds": (1, 24, 32), "latents": (1, 4, 8, 8)}
    arrays = {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    np.savez(folder / "given.npz", **arrays)
    call(python, DRAW, [str(result.models), str(folder / "given.npz"), str(folder / "image.npy")])
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    with torch.no_grad():
        expected = pipe(**tensors, height=16, width=16, num_inference_steps=4, output_type="np").images
    return float(np.abs(np.load(folder / "image.npy") - expected).max())


def write_pipeline(pipe: Any, folder: Path) -> None:
    """Write the folder of a pipeline with a tokenizer of letters, which a client loads and does not call."""
    pipe.save_pretrained(folder)
    index = folder / "model_index.json"
    more = {TOKENIZER: ["transformers", "CLIPTokenizer"], "safety_checker": [None, None]}
    names = json.loads(index.read_text()) | more | {"feature_extractor": [None, None]}
    index.write_text(json.dumps(names))
    (folder / TOKENIZER).mkdir(exist_ok=True)
    letters = [chr(97 + place) for place in range(26)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / TOKENIZER / "vocab.json").write_text(json.dumps({word: place for place, word in enumerate(words)}))
    (folder / TOKENIZER / "merges.txt").write_text("#version: 0.2\n")
    (folder / TOKENIZER / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer"}))


def call(python: str, script: str, arguments: Sequence[str]) -> str:
    """The last line that a script prints in the other environment."""
    done = subprocess.run([python, "-c", script, *arguments], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return (done.stdout.splitlines() or [""])[-1]


if __name__ == "__main__":
    main()
