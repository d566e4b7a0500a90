"""Defaults for a `transformers` model: keys of its configuration and inputs that the user left open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torch import nn

from pipeline.config import InputConfig, ModelConfig
from pipeline.export.tree import parameter_names


def set_experts(config: Any) -> bool:
    """Set the experts' implementation to `EXPERTS` where `config` leaves it open; return whether it did.

    The setter overwrites all sub-configurations: what the user set there is restored, from outside in. Releases
    of transformers without this attribute are left alone.
    """
    if getattr(config, ATTRIBUTE, "absent") is not None:
        return False
    before = [(part, getattr(part, ATTRIBUTE, None)) for part in sub_configs(config)]
    setattr(config, ATTRIBUTE, EXPERTS)
    for part, value in before:
        if value is not None:
            setattr(part, ATTRIBUTE, value)
    return True


def notes_on_experts(module: nn.Module) -> tuple[str, ...]:
    """A note for the report on the value of `set_experts`; empty where `module` has no such experts."""
    if not any(map(is_switchable_experts, module.modules())):
        return ()
    return (
        f"model.transformers.config: experts_implementation was not given and is set to {EXPERTS}, which has the same "
        "sizes whichever experts the tokens go to; it gathers the weights of an expert for each token that goes there, "
        "so for long inputs set grouped_mm, which multiplies once for each expert and whose sizes depend on the values",
    )


def is_switchable_experts(module: nn.Module) -> bool:
    """Whether `module` is a mixture of experts whose implementation the configuration chooses."""
    return hasattr(module, "is_transposed") and hasattr(getattr(module, "config", None), "_experts_implementation")


def sub_configs(config: Any) -> Iterator[Any]:
    """The configurations inside of `config`, at any depth: of its text, of its vision tower."""
    for key in getattr(config, "sub_configs", {}):
        part = getattr(config, key, None)
        if part is not None:
            yield part
            yield from sub_configs(part)


ATTRIBUTE: Final = "_experts_implementation"
"""Attribute of a configuration that holds `experts_implementation`; None means open."""

EXPERTS: Final = "batched_mm"

DIMS: Final[Mapping[str, tuple[int, ...]]] = {"batch": (2, 3), "sequence": (8, 5), "decoder_sequence": (6, 4)}
"""Sizes to try for the named dims of derived inputs."""

IMAGE_SIZE: Final = 224
"""Pixels along each side where the configuration names no size: most of these models were trained on it."""

SAMPLES: Final = 16_000
"""Length of a waveform: a second at 16 kHz."""


def with_derived_inputs(model: ModelConfig, module: Any) -> ModelConfig:
    """Fill in the inputs that `module` takes, where the user declared none.

    An entry without a shape refines what is derived. Where some entry has a shape the list is the user's own, and only
    gaps in its entries are filled.
    """
    derived = dict(_inputs(module))
    declared = model.inputs
    is_own = any(entry.shape is not None for entry in declared.values())
    names = declared if is_own else {**derived, **declared}
    filled = {name: _fill_gaps(declared.get(name), derived.get(name)) for name in names}
    return model.model_copy(update={"inputs": filled, "dims": model.dims if is_own else {**DIMS, **model.dims}})


def _fill_gaps(declared: InputConfig | None, derived: InputConfig | None) -> InputConfig:
    if declared is None or derived is None:
        return declared or derived or InputConfig()
    known = {key: value for key in ("shape", "dtype", "range") if (value := getattr(declared, key)) is not None}
    if known.get("dtype", derived.dtype) != derived.dtype:
        known.setdefault("range", None)
    if "range" in known or "padding" in declared.model_fields_set:
        known["padding"] = declared.padding
    return derived.model_copy(update={**known, "seed": declared.seed, "dynamic": declared.dynamic})


def _inputs(module: Any) -> Iterator[tuple[str, InputConfig]]:
    """Inputs in the order of forward's parameters. Masks need `input_ids`; parameters without a rule are left out."""
    names, _ = parameter_names(module)
    for name in names:
        rule = RULES.get(name)
        derived = rule(module.config) if rule and (name in CONTENT or "input_ids" in names) else None
        if derived is not None:
            yield name, derived


def _value(config: Any, *keys: str, default: Any = None) -> Any:
    """The value of the first of `keys` that the configuration or one of its sub-configurations has."""
    for part in (config, *sub_configs(config)):
        for key in keys:
            value = getattr(part, key, None)
            if value is not None:
                return value
    return default


def _tokens(dim: str) -> Callable[[Any], InputConfig]:
    def derive(config: Any) -> InputConfig:
        count = _value(config, "vocab_size", default=2)
        return InputConfig(shape=("batch", dim), dtype="int64", range=(0.0, float(count)))

    return derive


def _mask(_: Any) -> InputConfig:
    return InputConfig(shape=("batch", "sequence"), dtype="int64", range=(0.0, 2.0), padding=True)


def _token_types(config: Any) -> InputConfig | None:
    count = _value(config, "type_vocab_size", default=0)
    return InputConfig(shape=("batch", "sequence"), dtype="int64", range=(0.0, float(count))) if count > 1 else None


def _pixels(config: Any) -> InputConfig:
    """Images, or videos where the configuration has a number of frames."""
    size = _value(config, "image_size", default=IMAGE_SIZE)
    if isinstance(size, Mapping):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = _value(config, "num_frames")
    channels = _value(config, "num_channels", default=3)
    shape = ("batch", *([frames] if frames else []), channels, height, width)
    return InputConfig(shape=shape, dtype="float32", range=(-1.0, 1.0))


def _spectrum(config: Any) -> InputConfig:
    """Audio features: Whisper's length follows from its encoder's positions; other encoders take any length."""
    positions = _value(config, "max_source_positions")
    bins = _value(config, "num_mel_bins")
    if bins and positions:
        return InputConfig(shape=("batch", bins, 2 * positions), dtype="float32")
    width = _value(config, "feature_projection_input_dim", "input_feat_per_channel", "input_dim", default=80)
    return InputConfig(shape=("batch", 100, width), dtype="float32")


def _waveform(config: Any) -> InputConfig:
    """Samples, or, for a model that says how many frames and bins, a spectrogram."""
    frames, bins = _value(config, "max_length"), _value(config, "num_mel_bins")
    if frames and bins:
        return InputConfig(shape=("batch", frames, bins), dtype="float32")
    return InputConfig(shape=("batch", SAMPLES), dtype="float32")


RULES: Final[Mapping[str, Callable[[Any], InputConfig | None]]] = {
    "input_ids": _tokens("sequence"),
    "attention_mask": _mask,
    "token_type_ids": _token_types,
    "decoder_input_ids": _tokens("decoder_sequence"),
    "pixel_values": _pixels,
    "input_features": _spectrum,
    "input_values": _waveform,
}

CONTENT: Final = frozenset({"input_ids", "decoder_input_ids", "pixel_values", "input_features", "input_values"})
"""Inputs that stand by themselves; masks and token types accompany `input_ids`."""
