"""Two layers of a Llama with a cache: prefill and decode are one model, and have one set of encodings.

    python -m benchmarks.case_studies.llama

The weights are random, from a seed, so the text means nothing; the table shows what each calibration costs prefill (24
tokens at once) and 16 steps of decoding, in which the quantized model reads the cache that it has written itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import onnxruntime

from benchmarks.case_studies.study import FOLDER, Feeds, Study, open_model, quantize, show_table, sqnr_db
from pipeline.config import RunConfig
from pipeline.run import Pipeline

if TYPE_CHECKING:
    from torch import Tensor, nn

LAYERS, HEADS, WIDTH, WORDS = 2, 4, 32, 512
PROMPT, STEPS, CALIBRATED, EVALUATED = 24, 16, 8, 16

CONFIG: Final = "benchmarks/case_studies/llama.yaml"

FLOAT: Final = FOLDER / "llama-float" / "model.onnx"

CACHE: Final = [f"{kind}_{layer}" for layer in range(LAYERS) for kind in ("key", "value")]


def make() -> nn.Module:
    """A causal LM that takes its cache as inputs, and returns the longer one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.cache_utils import DynamicCache

    class WithCache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = LlamaForCausalLM(
                LlamaConfig(
                    num_hidden_layers=LAYERS,
                    hidden_size=HEADS * WIDTH,
                    intermediate_size=4 * HEADS * WIDTH,
                    num_attention_heads=HEADS,
                    num_key_value_heads=HEADS,
                    vocab_size=WORDS,
                    attn_implementation="eager",
                )
            )

        def forward(
            self, tokens: Tensor, places: Tensor, key_0: Tensor, value_0: Tensor, key_1: Tensor, value_1: Tensor
        ) -> dict[str, Tensor]:
            cache = DynamicCache()
            cache.update(key_0, value_0, 0)
            cache.update(key_1, value_1, 1)
            found = self.model(tokens, position_ids=places, past_key_values=cache)
            first, second = found.past_key_values.layers
            return {
                "logits": found.logits,
                "longer_key_0": first.keys,
                "longer_value_0": first.values,
                "longer_key_1": second.keys,
                "longer_value_1": second.values,
            }

    torch.manual_seed(0)
    return WithCache().eval()


def calibrate_prefill() -> Iterator[Feeds]:
    """The loader of someone who runs prompts and looks no further."""
    session = open_model(FLOAT)
    for number in range(CALIBRATED):
        yield next(_generate(session, _prompt(number)))[0]


def calibrate_both(prompts: int = CALIBRATED) -> Iterator[Feeds]:
    """The loader: a prompt, and then steps with the cache as the float model left it."""
    session = open_model(FLOAT)
    for number in range(prompts):
        yield from (feeds for feeds, _ in _generate(session, _prompt(number)))


def main() -> None:
    Pipeline(RunConfig.from_yaml(CONFIG), FLOAT.parent).run()
    head = ("W8 per channel, calibrated on", "prefill", "decoding", "same next token", "past and longer cache")
    show_table(head, _rows())


def _rows() -> Iterator[Sequence[str]]:
    for bits, profile in ((8, "ort-cpu"), (16, "qnn-htp")):
        for title in ("prefill", "both"):
            calibration = {"data": f"benchmarks/case_studies/llama.py:calibrate_{title}", "samples": 10**6}
            study = quantize(
                CONFIG, f"llama-{title}-{bits}", {"quantsim.profile": profile, "quantsim.calibration": calibration}
            )
            yield f"{title}, A{bits}", *_judge(study), _shared_encodings(study)


def _judge(study: Study) -> tuple[str, str, str]:
    """Both models read the tokens that the float model chose."""
    sessions = [open_model(study.folder / name) for name in ("model.onnx", "model.qdq.onnx")]
    prefill: list[list[np.ndarray]] = [[], []]
    decode: list[list[np.ndarray]] = [[], []]
    for number in range(EVALUATED):
        prompt = _prompt(1000 + number)
        told = [int(logits[0, -1].argmax()) for _, logits in _generate(sessions[0], prompt)]
        for place, session in enumerate(sessions):
            logits = [found for _, found in _generate(session, prompt, told)]
            prefill[place].append(logits[0])
            decode[place].extend(logits[1:])
    expected, found = (np.concatenate(rows, 1)[0].argmax(1) for rows in decode)
    return f"{sqnr_db(*prefill):.1f} dB", f"{sqnr_db(*decode):.1f} dB", f"{(expected == found).mean():.1%}"


def _generate(
    session: onnxruntime.InferenceSession, prompt: np.ndarray, told: Sequence[int] = ()
) -> Iterator[tuple[Feeds, np.ndarray]]:
    """What each call reads, and its logits: the prompt after a start token, then tokens, the best or those told."""
    empty = {name: np.zeros((1, HEADS, 0, WIDTH), np.float32) for name in CACHE}
    outputs = _call(session, {"tokens": np.array([[0]]), "places": np.array([[0]]), **empty})
    tokens, seen = prompt, 1
    for step in range(STEPS + 1):
        cache = {name: outputs[f"longer_{name}"] for name in CACHE}
        feeds = {"tokens": tokens[None], "places": np.arange(seen, seen + len(tokens))[None], **cache}
        outputs = _call(session, feeds)
        yield feeds, outputs["logits"]
        seen += len(tokens)
        tokens = np.array([told[step] if told else int(outputs["logits"][0, -1].argmax())])


def _call(session: onnxruntime.InferenceSession, feeds: Feeds) -> Feeds:
    names = [info.name for info in session.get_outputs()]
    return dict(zip(names, cast("list[np.ndarray]", session.run(names, feeds)), strict=True))


def _prompt(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, WORDS, PROMPT)


def _shared_encodings(study: Study) -> str:
    """For how many parts of the cache the input has the very encoding of the output."""
    entries = json.loads((study.folder / "model.encodings").read_text())["activation_encodings"]
    found = {entry["name"]: (entry["scale"], entry["offset"]) for entry in entries}
    return f"{sum(found[name] == found[f'longer_{name}'] for name in CACHE)} of {len(CACHE)} equal"


if __name__ == "__main__":
    main()
