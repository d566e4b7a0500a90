"""Generates with onnxruntime-genai from a folder of models: run by the interpreter of an environment that has it.

    PYTHON generate_by_genai.py '{"models": FOLDER, "prompt": [1, 2, 3], "count": 32}'

Prints {"tokens": […], "version": …}, greedy. Imports nothing of this repository.
"""

import json
import sys

import numpy as np
import onnxruntime_genai as genai  # pyright: ignore[reportMissingImports]


def main() -> None:
    asked = json.loads(sys.argv[1])
    model = genai.Model(asked["models"])
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=len(asked["prompt"]) + asked["count"], do_sample=False)
    generator = genai.Generator(model, settings)
    generator.append_tokens(np.array([asked["prompt"]], dtype=np.int32))
    tokens = []
    while len(tokens) < asked["count"] and not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    print(json.dumps({"tokens": tokens, "version": genai.__version__}))


if __name__ == "__main__":
    main()
