"""Text-only Kimi-K2.5, 1.03 T parameters, as two static graphs and a mapping, without a byte of its weights.

    python examples/extract_kimi_k25_text_ir.py --output-dir out/kimi
    python examples/extract_kimi_k25_text_ir.py --output-dir out/kimi --verify

The first writes the graphs of prefill and decode. The second does so for a small config, and runs what it has written:
prefill and 16 steps of decode have to give the tokens of the eager model. After seed document 000.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kimi_k25_text_local import KimiK25TextForCausalLM, KimiTextConfig, shrunk
from onnxline.errors import OnnxlineError, UsageError
from onnxline.static_cache import CacheSizes

MODEL: Final = "moonshotai/Kimi-K2.5"
CONFIG: Final = Path(__file__).with_name("kimi_k25_text_local") / "config.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 `--verify` failed, 2 a mistake in what was given, 3 a bug of ours."""
    given = _parser().parse_args(arguments)
    try:
        _check_given(given)
        (_verify if given.verify else _extract)(given)
    except OnnxlineError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _check_given(given: argparse.Namespace) -> None:
    if given.layers is not None and given.layers < 1:
        raise UsageError(f"--layers: found {given.layers}, expected at least 1")
    try:
        given.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a file, or no right to make it
        raise UsageError(f"--output-dir {given.output_dir}: {error.strerror}; expected a folder") from error


def _extract(given: argparse.Namespace) -> None:
    config = _config(given.config)
    from kimi_k25_text_local.graphs import GraphFiles  # after a mistake in the config: it loads the whole of the IR

    if given.layers is not None:
        config = replace(config, num_hidden_layers=given.layers)
    start = time.perf_counter()
    files = GraphFiles(given.output_dir, given.compress)
    gc.disable()  # 70,000 modules and two large graphs, all of which stay
    try:
        files.write(KimiK25TextForCausalLM(config), _sizes(given, CacheSizes()))
    finally:
        gc.enable()
    _say(f"{config.num_hidden_layers} layers in {time.perf_counter() - start:.1f} s:")
    for path in (files.prefill, files.decode, files.mapping):
        _say(f"  {path}  {path.stat().st_size / 1e6:.1f} MB")


def _verify(given: argparse.Namespace) -> None:
    config = shrunk(_config(given.config), layers=given.layers or 4)
    from kimi_k25_text_local.check import SIZES, STEPS, TOLERANCE, check_saved_graphs
    from kimi_k25_text_local.graphs import GraphFiles

    difference = check_saved_graphs(config, GraphFiles(given.output_dir, given.compress), _sizes(given, SIZES))
    _say(f"prefill and {STEPS} steps of decode from {given.output_dir}: every token is the eager model's")
    _say(f"logits differ by {difference:.1e} of the largest one; allowed {TOLERANCE:.0e}")


def _sizes(given: argparse.Namespace, default: CacheSizes) -> CacheSizes:
    lengths = {key: getattr(given, key) for key in ("prefill_len", "max_cache_len") if getattr(given, key) is not None}
    return replace(default, **lengths)


def _config(given: str) -> KimiTextConfig:
    if given != "hub":
        return KimiTextConfig.from_json(Path(given))
    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(MODEL, trust_remote_code=True)
    except OSError as error:
        raise UsageError(f"--config hub: {MODEL} cannot be had: {error}; leave --config out for {CONFIG}") from error
    return KimiTextConfig.from_mapping(whole.text_config.to_dict())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--output-dir", type=Path, required=True, help="where the three files go")
    parser.add_argument(
        "--config",
        default=str(CONFIG),
        help="a text_config as JSON, by itself or in a whole config, or 'hub' (default: %(default)s)",
    )
    parser.add_argument("--prefill-len", type=int, help="tokens that prefill takes (default: 128; 8 with --verify)")
    parser.add_argument(
        "--max-cache-len", type=int, help="tokens that decode's caches hold (default: 2048; 32 with --verify)"
    )
    parser.add_argument("--layers", type=int, help="fewer layers, to try something (with --verify: 4)")
    parser.add_argument("--compress", action="store_true", help="graphs as .json.zst")
    parser.add_argument("--verify", action="store_true", help="a small config instead, extracted, saved, read and run")
    return parser


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
