"""Inputs of the two graphs, the mapping of their caches, and `generate`, which runs a pair as a host would: prefill,
copy into fixed caches, then token by token. Example inputs are on meta for a weight-free export, or on a real device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from passes.suggest import join_first
from passes.visible import Table, TableResult
from passes.weights.files import replace_when_done
from pipeline.errors import UsageError
from pipeline.export.parts.pair.masked import Prefill, causal_mask
from pipeline.importers.from_torch.modules import as_exporting

PREFILL_INPUTS: Final = ("input_ids", "attention_mask", "position_ids")
DECODE_INPUTS: Final = (*PREFILL_INPUTS, "cache_position")
"""Inputs of decode before the caches."""


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Tokens that prefill takes at once, and tokens that the caches of decode hold.

    Raises:
        UsageError: the caches have no room for a prompt and one token more.
    """

    prefill_len: int = 128
    """The number of tokens that prefill takes at once; shorter prompts are padded."""
    max_cache_len: int = 2048
    """The number of tokens that each cache holds, the prompt and the new ones together."""

    def __post_init__(self) -> None:
        if not 0 < self.prefill_len < self.max_cache_len:
            raise UsageError(
                f"prefill of {self.prefill_len} tokens with caches of {self.max_cache_len}; expected 0 < prefill_len < "
                "max_cache_len, so that the prompt and one more token fit"
            )


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One cache tensor without its length: (1, heads, length, width). K and V may differ, and so may layers."""

    heads: int
    """The number of heads of K or of V."""
    width: int
    """The size of the last axis: elements per head."""
    dtype: torch.dtype
    """The dtype of the cache."""

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype) -> CacheSpec:
        """The spec of a tensor (1, heads, any length, width), such as one that prefill returns.

        Args:
            shape: (1, heads, any length, width).
            dtype: the dtype of the cache.
        """
        return CacheSpec(shape[1], shape[3], dtype)

    def zeros(self, length: int, device: torch.device | str) -> Tensor:
        """(1, heads, length, width), as the cache is before the first token.

        Args:
            length: how many tokens the cache holds.
            device: where the tensor is made.
        """
        return torch.zeros(1, self.heads, length, self.width, dtype=self.dtype, device=device)


def cache_specs(model: nn.Module) -> tuple[CacheSpec, ...]:
    """The specs of k0, v0, k1, v1, …, from one call of the model with one token, on its own device.

    Args:
        model: a decoder of transformers.
    """
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    with torch.no_grad(), as_exporting():  # some operators that experts use otherwise take one dtype only on meta
        _, *states = Prefill(model)(*_prefill_tensors(token))
    return tuple(CacheSpec.of(state.shape, state.dtype) for state in states)


def prefill_inputs(sizes: CacheSizes, device: torch.device | str = "meta") -> tuple[Tensor, ...]:
    """input_ids, attention_mask and position_ids of `Prefill`: tokens 0 at positions 0, 1, …

    Args:
        sizes: the length of the prompt and of the cache, in tokens.
        device: where the tensors are made.
    """
    return _prefill_tensors(torch.zeros(1, sizes.prefill_len, dtype=torch.int64, device=device))


def decode_inputs(
    caches: Sequence[CacheSpec], sizes: CacheSizes, device: torch.device | str = "meta"
) -> tuple[Tensor, ...]:
    """The inputs of `Decode`: token 0 at the position after the prompt, and empty caches.

    Args:
        caches: the specs of k0, v0, k1, v1, ….
        sizes: the length of the prompt and of the cache, in tokens.
        device: where the tensors are made.
    """
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    empty = (cache.zeros(sizes.max_cache_len, device) for cache in caches)
    return (*_decode_tensors(token, sizes.prefill_len, sizes), *empty)


def _prefill_tensors(ids: Tensor) -> tuple[Tensor, ...]:
    """The tensors of PREFILL_INPUTS for the tokens of a prompt, int64 (1, length)."""
    positions = torch.arange(ids.shape[1], device=ids.device)
    return ids, causal_mask(positions, ids.shape[1]), positions.unsqueeze(0)


def _decode_tensors(token: Tensor, position: int, sizes: CacheSizes) -> tuple[Tensor, ...]:
    """The tensors of DECODE_INPUTS for one token at a position of the sequence."""
    positions = torch.full((1,), position, device=token.device)
    mask = causal_mask(positions, sizes.max_cache_len)
    return token.reshape(1, 1), mask, positions.unsqueeze(0), positions


class LayerMapping(TypedDict):
    """The names of one layer's K and V in the two graphs, and of their scales where each token has its own."""

    layer: int
    prefill_key_output: str
    prefill_value_output: str
    decode_key_input: str
    decode_value_input: str
    decode_key_output: str
    decode_value_output: str
    prefill_key_scale_output: NotRequired[str]
    prefill_value_scale_output: NotRequired[str]
    decode_key_scale_input: NotRequired[str]
    decode_value_scale_input: NotRequired[str]
    decode_key_scale_output: NotRequired[str]
    decode_value_scale_output: NotRequired[str]


class KVMapping(TypedDict):
    """One row a layer, in order; `states` has those of other kinds than keys and values, where there are any."""

    num_layers: int
    """The number of `layers`."""
    layers: list[LayerMapping]
    """The names of each layer's K and V, in the order of the layers."""
    states: NotRequired[list[dict[str, Any]]]


def prefill_output_names(layers: int) -> tuple[str, ...]:
    """Names for an ONNX export of `Prefill`; its inputs are PREFILL_INPUTS.

    Args:
        layers: how many layers have a cache.
    """
    return ("logits", *_pairs("key_{}", "value_{}", layers))


def decode_input_names(layers: int) -> tuple[str, ...]:
    """Names for an ONNX export of `Decode`.

    Args:
        layers: how many layers have a cache.
    """
    return (*DECODE_INPUTS, *_pairs("past_key_{}", "past_value_{}", layers))


def decode_output_names(layers: int) -> tuple[str, ...]:
    """Names for an ONNX export of `Decode`; as prefill's, since they mean the same.

    Args:
        layers: how many layers have a cache.
    """
    return prefill_output_names(layers)


def _pairs(key: str, value: str, layers: int) -> tuple[str, ...]:
    return tuple(name.format(layer) for layer in range(layers) for name in (key, value))


def kv_mapping(
    prefill_outputs: Sequence[str],
    decode_inputs: Sequence[str],
    decode_outputs: Sequence[str],
    *,
    layers: Sequence[int] | None = None,
) -> KVMapping:
    """The mapping of two graphs, from the names that they have.

    Args:
        prefill_outputs: logits first, then K and V by layer.
        decode_inputs: those of DECODE_INPUTS that the graph has, and K and V by layer.
        decode_outputs: as `prefill_outputs`.
        layers: the layers that have K and V; all by default.

    Raises:
        UsageError: the three do not have the same number of layers.
    """
    sides = (prefill_outputs[1:], [name for name in decode_inputs if name not in DECODE_INPUTS], decode_outputs[1:])
    counts = [len(side) for side in sides]
    if len(set(counts)) > 1 or counts[0] % 2:
        raise UsageError(
            "prefill returns {}, decode takes {} and returns {} tensors of keys and values; expected the same even "
            "number; were both graphs made of one model?".format(*counts)
        )
    rows = zip(*(name for side in sides for name in (side[::2], side[1::2])), strict=True)
    numbers = range(counts[0] // 2) if layers is None else layers
    return {
        "num_layers": len(numbers),
        "layers": [_row(layer, *names) for layer, names in zip(numbers, rows, strict=True)],
    }


def _row(layer: int, *names: str) -> LayerMapping:
    return LayerMapping(
        layer=layer,
        prefill_key_output=names[0],
        prefill_value_output=names[1],
        decode_key_input=names[2],
        decode_value_input=names[3],
        decode_key_output=names[4],
        decode_value_output=names[5],
    )


def save_kv_mapping(mapping: KVMapping, path: Path) -> None:
    """Write the mapping as JSON; a failed write leaves the old file.

    Args:
        mapping: which output of the first graph is which input of the second.
        path: the file to write.
    """
    with replace_when_done(path) as temporary:
        temporary.write_text(json.dumps(mapping, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Program:
    """Anything that runs one of the two graphs: a module, an exported program, an IR, an ONNX session.

    run: takes the tensors in the order of `inputs`, returns them in the order of `outputs`, logits first.
    """

    run: Callable[..., Sequence[Tensor]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __call__(self, feed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by name, in and out. A name of `feed` that the graph does not take is left out."""
        results = self.run(*(feed[name] for name in self.inputs))
        return dict(zip(self.outputs, results, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Generated(TableResult):
    """The tokens that were generated, and what they were chosen from.

    tokens: int64 (steps + 1,), greedy.
    logits: (steps + 1, vocabulary), from which each token was chosen.
    """

    tokens: Tensor
    logits: Tensor

    def __repr__(self) -> str:
        return f"Generated(tokens=[{self._first_tokens()}], logits of {tuple(self.logits.shape)})"

    def tables(self) -> Iterator[Table]:
        yield Table("generated", [("tokens", self._first_tokens()), ("logits", str(tuple(self.logits.shape)))])

    def _first_tokens(self) -> str:
        return join_first(self.tokens.tolist(), SHOWN, ", … {} more")


SHOWN: Final = 16
"""Tokens that a result prints of itself."""


@torch.no_grad()
def generate(
    prefill: Program, decode: Program, mapping: KVMapping, prompt: Tensor, steps: int, sizes: CacheSizes
) -> Generated:
    """Greedy: one token from prefill, then `steps` more from decode.

    A prompt shorter than `prefill_len` is filled up on the right: the mask hides the rest, and decode overwrites it.

    Args:
        prefill: runs the graph that takes a whole prompt.
        decode: runs the graph that takes one token.
        mapping: which output of a graph is which cache of `decode`.
        prompt: int64 (1, length), on the device that the programs run on.
        steps: tokens after the first one.
        sizes: for which both graphs were made.

    Raises:
        UsageError: the prompt is longer than prefill takes, or prompt and steps do not fit into the caches.
    """
    length = prompt.shape[1]
    if not 0 < length <= sizes.prefill_len or length + steps > sizes.max_cache_len:
        raise UsageError(
            f"a prompt of {length} tokens and {steps} steps; expected 1 to {sizes.prefill_len} tokens, and with the "
            f"steps no more than {sizes.max_cache_len}"
        )
    filled = torch.nn.functional.pad(prompt, (0, sizes.prefill_len - length))
    outputs = prefill(dict(zip(PREFILL_INPUTS, _prefill_tensors(filled), strict=True)))
    caches = _fixed_caches(outputs, mapping, sizes)
    logits = [outputs[prefill.outputs[0]][0, length - 1]]
    for position in range(length, length + steps):
        step = _decode_tensors(logits[-1].argmax(), position, sizes)
        outputs = decode({**dict(zip(DECODE_INPUTS, step, strict=True)), **caches})
        caches = {row[f"decode_{side}_input"]: outputs[row[f"decode_{side}_output"]] for row, side in _tensors(mapping)}
        logits.append(outputs[decode.outputs[0]][0, -1])
    chosen = torch.stack(logits)
    return Generated(chosen.argmax(dim=-1), chosen)


def _fixed_caches(outputs: Mapping[str, Tensor], mapping: KVMapping, sizes: CacheSizes) -> dict[str, Tensor]:
    """The outputs of prefill, padded with zeros to the length of the caches."""
    spare = (0, 0, 0, sizes.max_cache_len - sizes.prefill_len)
    return {
        row[f"decode_{side}_input"]: torch.nn.functional.pad(outputs[row[f"prefill_{side}_output"]], spare)
        for row, side in _tensors(mapping)
    }


def _tensors(mapping: KVMapping) -> list[tuple[Mapping[str, Any], str]]:
    return [(row, side) for row in mapping["layers"] for side in ("key", "value")]
