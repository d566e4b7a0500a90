"""The metric of the task, of the float model and of a quantized one: a function of the user's, or one of `BUILT_INS`.

A built-in metric compares with the truth where the samples hold it (`quantsim.metric.target`), and with what the float
model says where they do not: then the float model has the best value there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from passes.suggest import nearest, plural
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.config import is_reference
from pipeline.config.quantsim import MetricConfig
from pipeline.errors import MissingExtra, SourceError, UsageError
from pipeline.export.user_code import call_user_code, load_function

KEY: Final = "quantsim.metric"

Sample = Mapping[str, np.ndarray]
Outputs = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class MetricResult:
    """The metric of both models, and the worst value that passes, if one was given."""

    name: str
    float_value: float
    value: float
    samples: int
    lower_is_better: bool
    bound: float | None = None

    @property
    def passes(self) -> bool:
        """Whether the quantized model is no worse than the bound."""
        return self.bound is None or (self.value <= self.bound if self.lower_is_better else self.value >= self.bound)

    @property
    def limit(self) -> str:
        """`at least 0.9`; empty where there is no bound."""
        return "" if self.bound is None else f"at {'most' if self.lower_is_better else 'least'} {self.bound:.6g}"

    def baseline_entry(self) -> dict[str, str]:
        """The value, and the bound that a later run is held to: without one given, a hundredth of the value worse."""
        slack = SLACK * abs(self.value)
        bound = self.value + (slack if self.lower_is_better else -slack) if self.bound is None else self.bound
        return {self.name: f"{self.value:.6g}, {replace(self, bound=bound).limit}"}

    def __str__(self) -> str:
        wanted = f", expected {self.limit}" if self.limit else ""
        values = f"{self.float_value:.4f} in float, {self.value:.4f} quantized"
        return f"{self.name}: {values} ({plural(self.samples, 'sample')}){wanted}"


SLACK: Final = 0.01


class TaskMetric:
    """The metric that a configuration names, with its value for the float model.

    Args:
        read: reads the samples anew: inputs and, where `target` names them, further arrays.

    Raises:
        UsageError: the outputs or the samples do not suit the metric, or there is no sample.
        SourceError: the user's function raises, or gives no number.
    """

    def __init__(self, settings: MetricConfig, model: DetachedModel, read: Callable[[], Iterable[Sample]]) -> None:
        self._settings, self._read = settings, read
        self._truths: list[Any] | None = None
        self._outputs = [info.name for info in model.proto.graph.output]
        self._function = load_function(settings.use, KEY, _title(settings)) if is_reference(settings.use) else None
        built_in = BUILT_INS.get(settings.use)
        self.lower_is_better = settings.lower_is_better or (built_in is not None and built_in.lower_is_better)
        self.samples = sum(1 for _ in read())
        if not self.samples:
            raise UsageError(f"{KEY}: found no sample to measure it on; give {KEY}.data")
        if settings.output is not None and settings.output not in self._outputs:
            raise UsageError(
                f"{KEY}: the model has no output {settings.output!r}{nearest(settings.output, self._outputs)}; "
                f"expected one of {', '.join(self._outputs)}"
            )
        self.float_value = self.rate(model)

    @property
    def name(self) -> str:
        """The name of a built-in metric, or that of the user's function."""
        return self._settings.use.rpartition(":")[2]

    def rate(self, model: DetachedModel) -> float:
        """The value for `model`, which has the inputs and outputs of the float model."""
        session = Session.of(model)
        if self._function is None:
            return self._rate_built_in(BUILT_INS[self._settings.use], session)
        function, title = self._function, _title(self._settings)
        value = call_user_code(
            lambda: function(session.run, RepeatedSamples(self._read, self.samples)),
            f"{title} raises",
            self._settings.use,
        )
        number = getattr(value, "item", lambda: value)() if getattr(value, "size", 1) == 1 else value
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise SourceError(f"{title} returns {value!r}, expected a finite number")
        return float(number)

    def result(self, quantized: DetachedModel) -> MetricResult:
        """The value for the quantized model next to that for the float model."""
        value, bound = self.rate(quantized), self._settings.bound
        return MetricResult(self.name, self.float_value, value, self.samples, self.lower_is_better, bound)

    def is_within(self, value: float, drop: float) -> bool:
        """Whether `value` is worse than that of the float model by `drop` of it at most."""
        return self.loss(value) <= drop * abs(self.float_value) + ROUNDING

    def loss(self, value: float) -> float:
        """By how much `value` is worse than the value of the float model."""
        return value - self.float_value if self.lower_is_better else self.float_value - value

    def _rate_built_in(self, metric: BuiltIn, session: Session) -> float:
        found, truths = list[Any](), list[Any]()
        for sample in self._read():
            outputs = session.run(sample)
            picked = outputs if metric.reads_all else outputs[self._settings.output or self._outputs[0]]
            truth = self._truth_of(sample, metric)
            try:
                found.append(metric.reduce(picked, truth))
            except (ValueError, KeyError, IndexError) as error:
                shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items())
                wanted = f"{KEY}: {self._settings.use} reads {metric.expected}; found {shapes}"
                raise UsageError(f"{wanted} ({error})") from error
            truths.append(truth)
        has_truth = bool(self._settings.target)
        if self._truths is None:  # the first model is the float model
            self._truths = truths if has_truth else found
        try:
            return metric.score(found, self._truths, has_truth)
        except ValueError as error:
            raise UsageError(f"{KEY}: {self._settings.use}: {error}") from error

    def _truth_of(self, sample: Sample, metric: BuiltIn) -> Any:
        names = self._settings.target
        if not names:
            return sample if metric.reads_inputs else None
        if len(names) != metric.targets:
            raise UsageError(f"{KEY}.target: found {', '.join(names)}, expected {plural(metric.targets, 'name')}")
        arrays = [np.asarray(sample[name]) for name in names]
        return arrays[0] if len(arrays) == 1 else arrays


ROUNDING: Final = 1e-12
"""Far below a step of any metric: a difference of two floats is not exact."""


class RepeatedSamples:
    """The samples for a user's function, which may go through them more than once."""

    def __init__(self, read: Callable[[], Iterable[Sample]], count: int) -> None:
        self._read, self._count = read, count

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._read())

    def __len__(self) -> int:
        return self._count


def _title(settings: MetricConfig) -> str:
    return f"{KEY}: {settings.use}"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A metric that is there.

    reduce: an output and the truth, if any, of one sample → what `score` reads.
    score: these of all samples, and the truth or what the float model says, and whether it is the truth → the value.
    expected: the output that it reads, in words.
    targets: how many arrays are the truth.
    reads_inputs: whether the sample is the truth where no target is named.
    reads_all: whether `reduce` reads all outputs by name.
    load: imports the library that `score` needs, or says that it is missing.
    """

    reduce: Callable[[Any, Any], Any]
    score: Callable[[Sequence[Any], Sequence[Any], bool], float]
    expected: str
    lower_is_better: bool = False
    targets: int = 1
    reads_inputs: bool = False
    reads_all: bool = False
    load: Callable[[], object] = lambda: None


def _score_classes(found: Sequence[np.ndarray], truths: Sequence[np.ndarray], _: bool) -> float:
    """The part of the rows whose class is the true one; a truth below zero is no row."""
    predicted, expected = _flatten(found), _flatten(truths)
    if predicted.size != expected.size:
        raise ValueError(f"found {predicted.size} classes and {expected.size} true ones, expected as many")
    return float((predicted == expected)[expected >= 0].mean())


def _flatten(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(array).reshape(-1) for array in arrays])


def _find_neighbours(embeddings: np.ndarray) -> np.ndarray:
    """The row that is most alike to each row, by cosine."""
    if len(embeddings) < 2:
        raise ValueError("found one row, expected two at least")
    rows = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    likeness = rows @ rows.T
    np.fill_diagonal(likeness, -np.inf)
    return likeness.argmax(axis=1)


def _score_retrieval(found: Sequence[np.ndarray], truths: Sequence[np.ndarray], has_truth: bool) -> float:
    """The part of the rows whose nearest row is that of the float model; with labels, one of the same label."""
    nearest_rows = _find_neighbours(np.concatenate(found))
    if has_truth:
        labels = _flatten(truths)
        return float((labels[nearest_rows] == labels).mean())
    return float((nearest_rows == _find_neighbours(np.concatenate(truths))).mean())


def _measure_losses(logits: np.ndarray, truth: Any) -> np.ndarray:
    """The negative logarithm of the probability of each token that follows; padding is left out."""
    mask = truth.get("attention_mask") if isinstance(truth, Mapping) else None
    tokens = _tokens_of(truth, logits.shape[:-1]) if isinstance(truth, Mapping) else np.asarray(truth)
    if tokens.shape != logits.shape[:-1]:
        raise ValueError(f"tokens {list(tokens.shape)} do not fit the logits")
    ahead, following = logits[..., :-1, :].astype(np.float64), tokens[..., 1:]
    ahead -= ahead.max(axis=-1, keepdims=True)
    totals = np.log(np.exp(ahead).sum(axis=-1))
    losses = totals - np.take_along_axis(ahead, np.maximum(following, 0)[..., None], -1)[..., 0]
    kept = following >= 0
    if mask is not None and mask.shape == tokens.shape:
        kept &= mask[..., 1:] != 0
    return losses[kept]


def _tokens_of(sample: Sample, shape: tuple[int, ...]) -> np.ndarray:
    """The input of tokens: the input of that name, or the only input of integers with the shape of the positions."""
    fitting = {name: array for name, array in sample.items() if array.dtype.kind in "iu" and array.shape == shape}
    named = next((fitting[name] for name in ("input_ids", "tokens", "ids") if name in fitting), None)
    if named is not None:
        return named
    if len(fitting) != 1:
        raise ValueError(f"found {', '.join(fitting) or 'no input'} of tokens, expected one; name it as {KEY}.target")
    return next(iter(fitting.values()))


def _score_iou(found: Sequence[np.ndarray], truths: Sequence[np.ndarray], _: bool) -> float:
    """Intersection over union of each class, over all samples; the mean of the classes that occur."""
    predicted, expected = _flatten(found), _flatten(truths)
    if predicted.size != expected.size:
        raise ValueError(f"found {predicted.size} places and {expected.size} true ones, expected as many")
    known = (expected >= 0) & (expected != IGNORED)
    predicted, expected = predicted[known], expected[known]
    ratios = [
        ((predicted == kind) & (expected == kind)).sum() / ((predicted == kind) | (expected == kind)).sum()
        for kind in np.union1d(predicted, expected)
    ]
    return float(np.mean(ratios))


IGNORED: Final = 255
"""The class of places without a label in Cityscapes, VOC and others."""


def _load_precision() -> Any:
    try:
        from torchmetrics.detection import MeanAveragePrecision  # pyright: ignore[reportMissingImports]
    except ImportError as error:  # the class is missing as well where torchvision is
        raise MissingExtra("torchmetrics", f"{KEY}: map") from error
    return MeanAveragePrecision


def _score_boxes(found: Sequence[Outputs], truths: Sequence[Any], has_truth: bool) -> float:
    """Mean average precision by torchmetrics; without a truth the float model's boxes with a score of half or more."""
    import torch

    def as_tensors(arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        tensors = {name: torch.as_tensor(np.array(array)) for name, array in arrays.items()}
        tensors["boxes"] = tensors["boxes"].reshape(-1, 4).float()
        return {name: tensor if name == "boxes" else tensor.reshape(-1) for name, tensor in tensors.items()}

    metric = _load_precision()()
    for boxes, truth in zip(found, truths, strict=True):
        if has_truth:
            expected = {"boxes": truth[0], "labels": truth[1]}
        else:
            sure = np.asarray(truth["scores"]).reshape(-1) >= SURE
            expected = {"boxes": truth["boxes"].reshape(-1, 4)[sure], "labels": truth["labels"].reshape(-1)[sure]}
        metric.update([as_tensors(boxes)], [as_tensors(expected)])
    return float(metric.compute()["map"])


SURE: Final = 0.5

BUILT_INS: Final[Mapping[str, BuiltIn]] = {
    "top-1": BuiltIn(
        lambda scores, _: scores.argmax(-1), _score_classes, "scores with the classes along the last axis"
    ),
    "token-agreement": BuiltIn(lambda logits, _: logits.argmax(-1), _score_classes, "logits [batch, position, token]"),
    "retrieval-agreement": BuiltIn(
        lambda rows, _: rows.reshape(-1, rows.shape[-1]).astype(np.float64),
        _score_retrieval,
        "embeddings [row, number]",
    ),
    "perplexity": BuiltIn(
        _measure_losses,
        lambda found, *_: float(np.exp(np.concatenate(found).mean())),
        "logits [batch, position, token]",
        lower_is_better=True,
        reads_inputs=True,
    ),
    "mean-iou": BuiltIn(lambda scores, _: scores.argmax(1), _score_iou, "scores with the classes along axis 1"),
    "map": BuiltIn(
        lambda outputs, _: {name: outputs[name] for name in ("boxes", "scores", "labels")},
        _score_boxes,
        "the outputs boxes, scores and labels of one image",
        targets=2,
        reads_all=True,
        load=_load_precision,
    ),
}


def check_metric(settings: MetricConfig) -> None:
    """Refuse a metric that is not there, before a model is loaded.

    Raises:
        UsageError: there is no built-in metric of that name, its library is missing, or an option does not suit a
            function.
    """
    if is_reference(settings.use):
        if settings.output is not None:
            raise UsageError(f"{KEY}: found output with {settings.use}, expected it with a built-in metric alone")
        load_function(settings.use, KEY, _title(settings))
    elif settings.use not in BUILT_INS:
        known = ", ".join(BUILT_INS)
        close = nearest(settings.use, BUILT_INS)
        raise UsageError(f"{KEY}: no metric {settings.use!r}{close}; expected {known}, or file.py:evaluate")
    else:
        BUILT_INS[settings.use].load()
