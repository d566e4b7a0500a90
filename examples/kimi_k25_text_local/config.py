"""The numbers that shape the model, checked: what this code does not compute is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from onnxline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnConfig:
    """How rotary positions are stretched from `original_max_position_embeddings` by `factor`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        _check_types(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiTextConfig:
    """The fields of the checkpoint's `text_config` that the text model needs, under the names that they have there.

    Raises:
        UsageError: one is of another type, or the numbers do not make a model.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_shared_experts: int
    n_routed_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    rope_theta: float
    yarn: YarnConfig
    dtype: torch.dtype

    def __post_init__(self) -> None:
        _check_types(self)
        if self.num_experts_per_tok > self.n_routed_experts:
            raise UsageError(
                f"the text config: num_experts_per_tok is {self.num_experts_per_tok}, and n_routed_experts "
                f"{self.n_routed_experts}; expected at least as many experts as a token is given to"
            )
        if self.qk_rope_head_dim % 2:
            raise UsageError(f"the text config: qk_rope_head_dim is {self.qk_rope_head_dim}; expected an even number")

    @property
    def qk_head_dim(self) -> int:
        """Width of a query and of a key: the part without positions, then the rotated one."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> KimiTextConfig:
        """From the JSON of a `text_config` or of the config around it, or from `to_dict()` of a transformers config.

        Raises:
            UsageError: a value is missing, or asks for something that this model does not compute.
        """
        values = _an_object("the text config", values)
        values = _an_object("text_config", values.get("text_config") or values)
        rope_given = values.get("rope_parameters") or values.get("rope_scaling") or {}
        _check_computed(values, _an_object("rope_scaling", rope_given))
        # transformers 5 moves `rope_scaling` and `rope_theta` into `rope_parameters`.
        rope = {**values, **rope_given}
        dtype = str(values.get("dtype") or values.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        plain = {**values, "rope_theta": rope.get("rope_theta"), "dtype": getattr(torch, dtype, None)}
        return KimiTextConfig(**_picked(KimiTextConfig, {**plain, "yarn": YarnConfig(**_picked(YarnConfig, rope))}))

    @staticmethod
    def from_json(path: Path) -> KimiTextConfig:
        """
        Raises:
            UsageError: there is no such file, it is no JSON object, or as `from_mapping`.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read as the JSON of a text_config: {error}") from error
        return KimiTextConfig.from_mapping(values)


def _picked(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the dataclass's fields; a default stands in for an absent one or for null."""
    found = {one.name: values[one.name] for one in fields(kind) if values.get(one.name) is not None}
    missing = [one.name for one in fields(kind) if one.name not in found and one.default is MISSING]
    if missing:
        raise UsageError(f"the text config has no {', '.join(missing)}; expected a config of Kimi-K2.5's text model")
    return found


def _an_object(what: str, values: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise UsageError(f"{what}: found {values!r:.60}, expected an object with the keys of Kimi-K2.5's text config")
    return values


def _check_types(config: Any) -> None:
    for one in fields(config):
        value = getattr(config, one.name)
        kinds, expected, least = TYPES[str(one.type)]
        if type(value) not in kinds or (least is not None and value < least.get(one.name, least[""])):
            raise UsageError(f"the text config: {one.name}: found {value!r:.60}, expected {expected}")


def _check_computed(values: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    found = {**values, "rope type": rope.get("type") or rope.get("rope_type")}
    given = {key: found[key] for key in COMPUTED if found.get(key) is not None}
    other = [f"{key} = {one!r} (computed: {COMPUTED[key]!r})" for key, one in given.items() if one != COMPUTED[key]]
    if other:
        raise UsageError(f"the text config asks for what this model does not compute: {'; '.join(other)}")


COMPUTED = {
    "rope type": "yarn",
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
}

TYPES: dict[str, tuple[tuple[type, ...], str, dict[str, int] | None]] = {
    "int": ((int,), "a whole number of at least 1", {"": 1, "first_k_dense_replace": 0}),
    "float": ((int, float), "a number", None),
    "bool": ((bool,), "true or false", None),
    "torch.dtype": ((torch.dtype,), "a dtype of torch, as in 'bfloat16'", None),
    "YarnConfig": ((YarnConfig,), "a YarnConfig", None),
}
"""By the annotation of a field: what it may be, in words too, and the least number by its name."""
