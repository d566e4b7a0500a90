"""Generates with onnxruntime-genai from a folder of models: run by the interpreter of an environment that has it.

    PYTHON generate_by_genai.py '{"models": FOLDER, "prompt": [1, 2, 3], "count": 32, "eos": 88}'

With "features", a file .npy, these are what an encoder hears: float32 (1, bins, 3000).

Prints {"tokens": […], "version": …}, greedy. Imports nothing of this repository.
"""

import json
import sys

import numpy as np
import onnxruntime_genai as genai  # pyright: ignore[reportMissingImports]


def main() -> None:
    asked = json.loads(sys.argv[1])
    config = genai.Config(asked["models"])
    config.overlay(json.dumps({"model": {"eos_token_id": asked["eos"]}}))  # none that ends the text early
    model = genai.Model(config)
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=len(asked["prompt"]) + asked["count"], do_sample=False)
    generator = genai.Generator(model, settings)
    prompt = np.array([asked["prompt"]], dtype=np.int32)
    if "features" in asked:
        tensors = genai.NamedTensors()
        tensors["input_features"], tensors["input_ids"] = np.load(asked["features"]), prompt
        generator.set_inputs(tensors)
    else:
        generator.append_tokens(prompt)
    tokens = []
    while len(tokens) < asked["count"] and not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    print(json.dumps({"tokens": tokens, "version": genai.__version__}))


if __name__ == "__main__":
    main()
