"""Generates with onnxruntime-genai from a folder of models: run by the interpreter of an environment that has it.

    PYTHON generate_by_genai.py '{"models": FOLDER, "prompt": [1, 2, 3], "count": 32, "eos": 88}'

With "inputs", a file .npz, its arrays are what comes before a text: what an encoder hears, input_features, float32
(1, bins, 3000); or an image as pixel_values, image_grid_thw and num_image_tokens.

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
    if "inputs" in asked:
        tensors = genai.NamedTensors()
        for name, array in np.load(asked["inputs"]).items():
            tensors[name] = array
        tensors["input_ids"] = prompt
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
