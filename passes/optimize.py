"""`passes.optimize`: the whole pass run on an ONNX model, with that model itself as the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx

from passes.base import Workbench
from passes.bench import open_bench
from passes.draw import draw_array
from passes.policy import Policy
from passes.prove import Prover
from passes.recipe import DEFAULT_RECIPE, RecipeItem, steps_of
from passes.result import PassRun
from passes.runner import run_passes
from passes.sharing import detached_copy
from passes.weights import DetachedModel, read_model

__all__ = ["draw_feeds", "optimize"]


def optimize(
    model: onnx.ModelProto | str | Path,
    recipe: Sequence[RecipeItem] = DEFAULT_RECIPE,
    skip: Sequence[str] = (),
    keep: Sequence[str] = (),
    *,
    watch: bool = True,
    feeds: Sequence[Mapping[str, np.ndarray]] = (),
    timeout_s: float = 600.0,
    memory_gib: float | None = None,
    reproducers: Path | None = None,
    bench: Workbench | None = None,
) -> PassRun:
    """Run `recipe` over `model` and prove after every change that it computes what it did before.

    Args:
        model: left as it is; a path may have external data beside it.
        feeds: inputs to compare on; two seeded draws when there are none. Named dims are drawn as 2.
        timeout_s: seconds for one call of native code.
        memory_gib: what one worker process may allocate; see `passes.bench.memory_limit`.
        reproducers: a folder for the smallest model that still brings a step down; none is saved by default.
        bench: where to work, for who optimizes several models: its workers start but once. `timeout_s` and `memory_gib`
            are then those with which it was opened.

    Raises:
        ModelMistake: the model cannot be read or does not run.
        PolicyMistake: an unknown name, or a `keep` that matches nothing.
    """
    with nullcontext(bench) if bench else open_bench(timeout_s, memory_gib) as bench:
        bench.start()
        detached = detached_copy(model, bench.spill) if isinstance(model, onnx.ModelProto) else read_model(Path(model))
        draws = feeds or [draw_feeds(detached, seed) for seed in range(2)]
        prover = Prover.of_itself(draws, bench)
        policy = Policy(tuple(skip), tuple(keep), watch)
        return run_passes(detached, steps_of(recipe), policy, prover, bench, reproducers=reproducers)


def draw_feeds(model: DetachedModel, seed: int) -> dict[str, np.ndarray]:
    """Seeded inputs for every graph input that has no initializer."""
    graph = model.proto.graph
    stored = {tensor.name for tensor in graph.initializer}
    feeds = {}
    for info in graph.input:
        if info.name in stored:
            continue
        tensor = info.type.tensor_type
        shape = [dim.dim_value if dim.HasField("dim_value") else 2 for dim in tensor.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
        low, high = (-1.0, 1.0) if "float" in dtype else (0.0, 2.0)
        feeds[info.name] = draw_array(f"{seed}:{info.name}", shape, dtype, low, high)
    return feeds
