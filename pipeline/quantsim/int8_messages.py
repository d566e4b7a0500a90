"""What a simulation says, in the words of `onnxline to-int8`, which has options where `quantsim` has keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from passes.errors import OnnxlineError


def name_own_options(message: str) -> str:
    """A message of a simulation, with options of `to-int8` where it names keys of a configuration."""
    for pattern, words in OWN_WORDS:
        message = pattern.sub(words, message)
    return message


@contextmanager
def own_options() -> Iterator[None]:
    """Errors inside name options of `to-int8`."""
    try:
        yield
    except OnnxlineError as error:
        error.args = (name_own_options(str(error)),)
        raise


def _apply(step: str) -> str:
    return rf"apply {step} first (onnxline optimize MODEL -o OUT --recipe {step})"


OWN_WORDS: Final = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\Aquantsim: ", "to-int8: "),
        (r"quantsim\.rules, (\S+:.+?): \{(?:activations|weights): float\}", r"keep \1"),
        (r"by a rule, such as \{'(tensor:.+?)': \{activations: float\}\}", r"by keep \1"),
        (r"quantsim\.rules: ", "keep: "),
        (r" as quantsim\.calibration\.data", ""),
        (r"quantsim\.calibration\.data", "data"),
        (r"tensor:GLOB or a structure \(.*?\)", "tensor:GLOB"),
        (r"quantsim\.encodings_from", "encodings"),
        (r"put ([\w-]+) in(?:to)? quantsim\.prepare", _apply(r"\1")),
        (r"untie in quantsim\.prepare gives", "untie, applied first (onnxline optimize), gives"),
        (r"(\w+) into passes\.recipe", r"\1 likewise"),
        (r"say by model\.inputs\.NAME\.range which numbers the inputs may hold \(.*?\)", "give data like that in use"),
        (r"declare model\.inputs\.(\S+?)\.shape", r"give it one: onnxline fix-shapes MODEL -o OUT --shape \1=SIZES"),
        (r"set model\..* to sizes that fit", "give data of sizes that fit"),
        (r", or give model\.inputs\.NAME\.shape of a torch model numbers", ""),
        (r"; if nothing here can run it, prove by structure alone: .*?\)", ""),
        (r", or prove by structure alone \(proof: structure\)", ""),
    )
)
"""What a simulation says → what `to-int8` says."""
