"""`quantsim.optimize`: weights that libraries round otherwise than to the nearest number, kept where that is better.

Each step is an algorithm of a library, called in a process of its own (algorithm.py) on the samples that ranges are
measured on. Then each layer is judged on samples that the library has not seen: a weight that makes its layer worse
there keeps the rounding that it had before the step.

What has been chosen is a float model with other numbers, which rounding to nearest turns into the chosen ones. So all
that comes after this knows nothing of it: it quantizes that model in place of the float model.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from onnx import NodeProto, TensorProto

from passes.errors import StepFailed
from passes.graph.op_facts import BIAS, BIASED, MATRIX_PRODUCTS
from passes.suggest import plural
from passes.weights.detached import PROTOBUF_LIMIT, DetachedModel
from passes.weights.files import save
from passes.weights.split_run import names_computed_in_numpy
from pipeline.errors import Unsupported, UsageError
from pipeline.quantsim.encodings import Encoding, dequantize_integers, fit_scale
from pipeline.quantsim.noise import measure_noise, sqnr_db
from pipeline.quantsim.optimizers import BiasCorrection, Distill, Gptq, Optimizer
from pipeline.quantsim.placement import Placement
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.sensitivity import Layer, find_layers

SCRIPT: Final = Path(__file__).with_name("algorithm.py")

Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class OptimizedLayer:
    """A layer with a weight that a step has rounded: the ratio of signal to noise of its result where that weight alone
    is quantized, on samples that the step has not seen. `taken` says whether the new rounding stands."""

    layer: str
    weight: str
    before_db: float
    after_db: float
    taken: bool


@dataclass(frozen=True, slots=True)
class OptimizedStep:
    """What a step of `quantsim.optimize` did, or of `quantsim.prepare`, which rounds nothing and leaves no weight out.

    `outputs_db` are the least ratios of the model's outputs before and after it, or those of the chain of parts;
    `left`: weight → why the step does not take it; `is_whole`: whether it chose for all weights together.
    """

    name: str
    status: str
    """ran, reverted (nothing was better) or failed."""
    reason: str = ""
    release: str = ""
    """The library that was called, and its version."""
    layers: tuple[OptimizedLayer, ...] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    outputs_db: tuple[float, float] | None = None
    seconds: float = 0.0
    kind: Literal["optimize", "prepare"] = "optimize"
    is_whole: bool = False

    def __str__(self) -> str:
        if self.status == "failed":
            return f"optimize {self.name} failed, so every weight keeps the rounding that it had: {self.reason}"
        if self.kind == "prepare" and self.reason:
            return f"prepare {self.name}: {self.reason}"
        better = sum(layer.after_db > layer.before_db for layer in self.layers)
        by_layer = self.kind == "optimize" and not self.is_whole
        taken = sum(layer.taken for layer in self.layers) if by_layer else better
        parts = [f"{taken} of {plural(len(self.layers), 'layer')} better on samples that it did not see"]
        if not self.layers and self.reason:
            parts = [self.reason]
        if self.left:
            name, why = next(iter(self.left.items()))
            parts.append(f"{plural(len(self.left), 'weight')} left, such as {name}: {why}")
        if self.outputs_db:
            before, after = self.outputs_db
            undone = f", so it is undone: {self.reason}" if self.status == "reverted" and after < before else ""
            parts.append(f"outputs {before:.2f} → {after:.2f} dB{undone}")
        return f"{self.kind} {self.name} ({self.release}): {'; '.join(parts)}; {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the steps have chosen in place of min-max scales and rounding to nearest.

    encodings: by weight.
    arrays: stored tensor → float32 values that rounding to nearest turns into the chosen ones.
    """

    encodings: Mapping[str, Encoding] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """The tensors of which it has anything."""
        return frozenset((*self.encodings, *self.arrays))

    def tune(self, model: DetachedModel) -> DetachedModel:
        """`model` with the chosen values; itself where there are none."""
        return model.with_arrays(self.arrays)

    def suit(self, placement: Placement) -> Chosen:
        """What holds for a placement: weights that have other formats there are left out. Then the biases are, too, as
        they make up for the rounding of all weights."""
        formats = placement.formats()
        fitting = {name for name, encoding in self.encodings.items() if formats.get(name) == encoding.precision}
        kept = fitting if len(fitting) < len(self.encodings) else self.names
        return Chosen(
            {name: self.encodings[name] for name in fitting},
            {name: array for name, array in self.arrays.items() if name in kept},
        )

    def take(self, other: Chosen, names: Iterable[str]) -> Chosen:
        """This, with what `other` has for the weights `names`."""
        wanted = set(names)
        arrays = {name: array for name, array in self.arrays.items() if name not in wanted}
        arrays |= {name: array for name, array in other.arrays.items() if name in wanted}
        encodings = {name: encoding for name, encoding in other.encodings.items() if name in wanted}
        return Chosen({**self.encodings, **encodings}, arrays)


@dataclass(frozen=True, slots=True)
class Optimization:
    """Runs the steps on one placed model.

    Args:
        encodings: of the weights alone, by min-max; `select_weights` gives them.
        held_out: gives the samples that no step sees, anew with each call.
        rate: gives the least ratio of the outputs in dB with what was chosen.
        must_not_fall: whether a step by which `rate` falls is undone, as where it is that of a chain of parts.
        folder: for the float model and the samples that the libraries see, which lie there.
    """

    model: DetachedModel
    placement: Placement
    encodings: Mapping[str, Encoding]
    held_out: Callable[[], Iterable[Feeds]]
    rate: Callable[[Chosen], float]
    folder: Path
    must_not_fall: bool = False

    def run(
        self,
        steps: Sequence[Optimizer],
        samples: Iterable[Feeds],
        observer: Callable[[str, int], object] = lambda *_: None,
    ) -> tuple[Chosen, tuple[OptimizedStep, ...]]:
        """Run the steps in order, each on what those before it have chosen.

        Args:
            samples: those that the libraries see.
            observer: called with the name of each step that begins, or of a part of it, and how many steps are done.
        """
        chosen = Chosen(self.encodings)
        rows: list[OptimizedStep] = []
        self.write_samples(samples)
        rated = self.rate(chosen)
        for done, step in enumerate(steps):
            observer(step.name, done)
            begun = time.perf_counter()
            try:
                found, row = self._run_step(step, chosen, lambda part, done=done: observer(part, done))
                before, after = rated, self.rate(found) if row.status == "ran" else rated
                row = replace(row, outputs_db=(before, after))
                if (self.must_not_fall or step.is_whole) and after < before:
                    what = "chain is" if self.must_not_fall else "outputs are"
                    row = replace(row, status="reverted", reason=f"the {what} worse by it")
                else:
                    chosen, rated = found, after
            except StepFailed as failure:
                row = OptimizedStep(step.name, "failed", str(failure))
            rows.append(replace(row, seconds=time.perf_counter() - begun))
        return chosen, tuple(rows)

    def write_samples(self, samples: Iterable[Feeds]) -> None:
        """Write the float model, and the samples that the libraries see, into the folder."""
        save(self.model, self.folder / "model.onnx", external_from=PROTOBUF_LIMIT)
        (self.folder / "samples").mkdir()
        for index, sample in enumerate(samples):
            np.savez(self.folder / "samples" / f"{index:06}.npz", **dict(sample))  # type: ignore[arg-type]

    def offer(
        self, step: Optimizer, chosen: Chosen, show: Callable[[str], object] = lambda _: None
    ) -> tuple[Chosen, str, dict[str, str]]:
        """Let the library of a step round on what `chosen` has; the folder holds the samples.

        Args:
            show: called with the part of the step that begins, where it has parts.

        Returns:
            What the library has chosen, its name and version, and weight → why the step leaves it.

        Raises:
            StepFailed: with the library's reason.
        """
        is_bias = isinstance(step, BiasCorrection)
        entries, left = (
            self._find_biases() if is_bias else find_weights(step, self.model, self.placement, self.encodings)
        )
        if not entries:
            return Chosen(), step.module, left
        if isinstance(step, Distill):
            names = [entry["tensor"] for entry in entries]
            return self._distill(step, chosen, names, show), f"torch {version('torch')}", left
        if isinstance(step, Gptq) and step.mse:
            chosen = self._fit_scales(chosen, [entry["tensor"] for entry in entries])
        self._write_job(step, chosen, entries)
        found = call_library(step, self.folder)
        release = f"{found['library']} {found['version']}"
        return self._read_result(chosen, entries), release, left | found["left"]

    def _run_step(self, step: Optimizer, chosen: Chosen, show: Callable[[str], object]) -> tuple[Chosen, OptimizedStep]:
        offered, release, left = self.offer(step, chosen, show)
        if not offered.names:
            return chosen, OptimizedStep(step.name, "reverted", "it takes nothing of the model", release, (), left)
        layers = {
            layer.output: layer
            for layer in find_layers(self.model, self.encodings)
            if not offered.names.isdisjoint(layer.tensors())
        }
        before, after = (self._judge(layers, choice) for choice in (chosen, chosen.take(offered, offered.names)))
        rows, better = compare(layers, offered, before, after)
        if step.is_whole:
            better, rows = [*offered.names], tuple(replace(row, taken=True) for row in rows)
        status = "ran" if better else "reverted"
        row = OptimizedStep(step.name, status, "", release, rows, left, is_whole=step.is_whole)
        return chosen.take(offered, better), row

    def _distill(self, step: Distill, chosen: Chosen, names: Sequence[str], show: Callable[[str], object]) -> Chosen:
        """All weights together, by the outputs' gradients, in this process: torch runs the model op by op."""
        from pipeline.quantsim.distill import distill  # few runs need torch's functions

        samples = sorted((self.folder / "samples").glob("*.npz"))
        weights = {name: chosen.encodings[name] for name in names}

        def count(done: int) -> None:
            show(f"{step.name}, step {done + 1} of {step.iterations}")

        try:
            found = distill(self.model, chosen.tune(self.model), weights, samples, step, count)
        except Unsupported as error:
            raise StepFailed(str(error)) from error
        return Chosen(*found)

    def _fit_scales(self, chosen: Chosen, names: Sequence[str]) -> Chosen:
        """The scales of least squared error of each weight, in place of those of its range."""
        fitted: dict[str, Encoding] = {}
        for name in names:
            array = chosen.arrays.get(name, self.model.array(self.model.index.initializers[name]))
            fitted[name] = fit_scale(array, chosen.encodings[name])
        return Chosen({**chosen.encodings, **fitted}, chosen.arrays)

    def _find_biases(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The stored biases that one layer alone reads, and the products before them."""
        stored, consumers = self.model.index.initializers, self.model.index.consumers
        found: dict[str, str] = {}
        for layer in find_layers(self.model, self.encodings):
            product, *added = layer.nodes
            reads = added[0].input if added else product.input[BIAS:]
            if product.op_type in (*BIASED, "MatMul"):
                found |= dict.fromkeys((name for name in reads if name in stored), product.output[0])
        entries: list[dict[str, Any]] = []
        left: dict[str, str] = {}
        for name, output in found.items():
            if stored[name].data_type != TensorProto.FLOAT or len(consumers[name]) > 1:
                left[name] = "it is not float32, or several nodes read it"
                continue
            entries.append({"index": len(entries), "tensor": name, "output": output})
        return entries, left

    def _write_job(self, step: Optimizer, chosen: Chosen, weights: Sequence[Mapping[str, Any]]) -> None:
        if isinstance(step, BiasCorrection):
            quantized = insert_qdq(chosen.tune(self.model), chosen.encodings)
            save(quantized, self.folder / "quantized.onnx", external_from=PROTOBUF_LIMIT)
        scales: dict[str, np.ndarray] = {}
        for weight in weights:
            encoding = chosen.encodings.get(weight["tensor"])
            if encoding is not None:
                scales |= {f"{weight['index']}/{part}": getattr(encoding, part) for part in ("scale", "zero_point")}
        np.savez(self.folder / "scales.npz", **scales)  # type: ignore[arg-type]
        job = {"step": step.name, "options": asdict(step), "seed": step.seed, "weights": weights}
        (self.folder / "job.json").write_text(json.dumps(job), encoding="utf-8")

    def _read_result(self, chosen: Chosen, weights: Sequence[Mapping[str, Any]]) -> Chosen:
        encodings: dict[str, Encoding] = {}
        arrays: dict[str, np.ndarray] = {}
        with np.load(self.folder / "found.npz") as found:
            for weight in weights:
                key, name = weight["index"], weight["tensor"]
                if f"{key}/shift" in found:
                    tensor = self.model.index.initializers[name]
                    before, shift = chosen.arrays.get(name, self.model.array(tensor)), found[f"{key}/shift"]
                    if before.size == shift.size:  # one number may serve all channels
                        arrays[name] = before + shift.astype(np.float32).reshape(before.shape)
                if name not in chosen.encodings:
                    continue
                encoding = chosen.encodings[name]
                if f"{key}/scale" in found:
                    encoding = encodings[name] = replace(encoding, scale=found[f"{key}/scale"])
                if f"{key}/zero_point" in found:
                    encoding = encodings[name] = replace(encoding, zero_point=found[f"{key}/zero_point"])
                if f"{key}/numbers" in found:
                    encodings[name] = encoding
                    arrays[name] = dequantize_integers(found[f"{key}/numbers"].astype(np.int64), encoding)
        return Chosen(encodings, arrays)

    def _judge(self, layers: Mapping[str, Layer], chosen: Chosen) -> dict[str, float]:
        """Layer → the noise of its result as a part of the signal, where its weights alone are quantized."""
        steps = {name: layer.nodes for name, layer in layers.items()}
        noise = measure_noise(
            self.model, chosen.encodings, steps, self.held_out(), tuned=chosen.tune(self.model), has_total=False
        )
        return {name: found.local / (found.signal or 1.0) for name, found in noise.items()}


def refuse_numpy_operators(model: DetachedModel) -> None:
    """Refuse a model that onnxruntime does not run by itself, as the libraries do.

    Raises:
        UsageError: naming an operator.
    """
    for name in names_computed_in_numpy(model.proto):
        raise UsageError(
            f"quantsim.optimize: the algorithms run the model on onnxruntime, and {name} has a reference in numpy "
            "alone; give its CustomOp a `shared_library` with a kernel, or leave `optimize` out"
        )


def find_weights(
    step: Optimizer,
    model: DetachedModel,
    placement: Placement,
    formats: Mapping[str, object],
    dtypes: Collection[str] = ("float32",),
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The weights that a step takes, as algorithm.py reads them, and why others are left.

    Args:
        formats: has the weights that are quantized.
        dtypes: of weights that can be read.
    """
    stored = model.index.initializers
    read_by: dict[str, list[str]] = {}
    for layer in find_layers(model, formats):
        for name in formats.keys() & set(layer.tensors()):
            read_by.setdefault(name, []).append(data_of(layer, name, formats))
    weights: list[dict[str, Any]] = []
    left: dict[str, str] = {}
    for placed in placement.quantized_sites():
        site, precision = placed.site, placed.precision
        if site.role != "weight" or precision is None:
            continue
        data = read_by.get(site.tensor, [""])
        why = step.why_left(placed, data if len(stored[site.tensor].dims) == 2 and all(data) else (), dtypes)
        if why:
            left[site.tensor] = why
            continue
        weights.append(
            {
                "index": len(weights),
                "tensor": site.tensor,
                "bits": precision.bits,
                "lowest": precision.lowest,
                "highest": precision.highest,
                "granularity": precision.granularity,
                "block": precision.block,
                "channel_axis": site.channel_axis,
                "summed_size": site.summed_size,
                "data": sorted(set(filter(None, data))),
            }
        )
    return weights, left


def select_weights(placement: Placement, encodings: Mapping[str, Encoding]) -> dict[str, Encoding]:
    """The encodings of what products read as their weights."""
    weights = (placed.site.tensor for placed in placement.quantized_sites() if placed.site.role == "weight")
    return {name: encodings[name] for name in weights}


def call_library(step: Optimizer, folder: Path) -> dict[str, Any]:
    """Run the step on the job in `folder`, in a process of its own; returns what it says of it.

    Raises:
        StepFailed: the process did not come to its end; with the last line that it wrote.
    """
    for stale in ("found.json", "found.npz"):
        (folder / stale).unlink(missing_ok=True)
    command = [step.python or sys.executable, str(SCRIPT), str(folder)]
    child = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if child.returncode or not (folder / "found.json").exists():
        lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
        raise StepFailed(lines[-1] if lines else f"its process ended with {child.returncode}")
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


def data_of(layer: Layer, weight: str, weights: Mapping[str, object]) -> str:
    """The value whose rows a layer multiplies with a stored matrix; empty where it does something else."""
    node: NodeProto = layer.nodes[0]
    is_turned = any(entry.name == "transA" and entry.i for entry in node.attribute)
    is_second = node.input[1] == weight or (weight in layer.weights and node.input[1] not in weights)
    if node.op_type not in MATRIX_PRODUCTS or is_turned or not is_second or node.input[0] in weights:
        return ""
    return node.input[0]


def compare(
    layers: Mapping[str, Layer], offered: Chosen, before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[tuple[OptimizedLayer, ...], list[str]]:
    """A row for each layer and weight, and the weights whose new rounding is better over all layers that read them."""
    readers: dict[str, list[str]] = {}
    for name, layer in layers.items():
        for weight in offered.names & set(layer.tensors()):
            readers.setdefault(weight, []).append(name)
    better = [
        weight
        for weight, names in readers.items()
        if sum(after[name] for name in names) < sum(before[name] for name in names)
    ]
    rows = tuple(
        OptimizedLayer(name, weight, sqnr_db(1.0, before[name]), sqnr_db(1.0, after[name]), weight in better)
        for weight, names in readers.items()
        for name in names
    )
    return rows, better
