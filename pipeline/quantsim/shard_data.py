"""Weights of a model that fits nowhere, rounded by GPTQ on data: the model runs piece by piece, one piece in memory.

In step k a job runs piece k on all samples, and reads and writes their values as files. In the same step other jobs
round the weights whose products read what piece k - 1 has made. Then the files that step k has read are removed, so the
disk holds the values of two pieces. As in `quantsim.optimize` the values are those of the float model, the last samples
are held out, and a weight keeps its rounding to the nearest where GPTQ does not lessen the error on these.

With the option `sequential` each piece runs twice: with float weights, for what GPTQ reads, and then with its rounded
weights, for the piece after it.

A run that was killed goes on with the first step that is not done, whose files are there until it is.
"""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from passes.graph.op_facts import ARRANGING, op_of
from passes.weights.detached import DetachedModel
from pipeline.jobs import Job, JobExecutor, JobProgress, Outcome, run_jobs
from pipeline.jobs.run import OutcomeTable
from pipeline.quantsim.algorithm import round_by_gptq
from pipeline.quantsim.noise import sqnr_db
from pipeline.quantsim.optimizers import Gptq, Optimizer
from pipeline.quantsim.pieces import ModelPiece, cut_pieces, run_piece
from pipeline.quantsim.shard_files import (
    RoundedWeight,
    ShardFile,
    WeightFormat,
    dequantize,
    index_channels,
    open_source,
    round_to_nearest,
    split_channels,
)
from pipeline.workspace import key_of, versions

Feeds = Mapping[str, np.ndarray]

Entry = dict[str, Any]
"""A weight as algorithm.py reads it."""

GPTQ_SLICE: Final = 2**26
"""Elements of a weight that GPTQ rounds at once, in double precision and four times; each slice inverts the Hessian."""

JUDGED_SLICE: Final = 2**24


@dataclass(frozen=True, slots=True)
class FittingData:
    """The samples: GPTQ sees the first `fitted` of them, the others judge it. `identity` tells them from others."""

    step: Optimizer
    samples: Callable[[], Iterable[Feeds]]
    fitted: int
    identity: Sequence[object]


@dataclass(frozen=True, slots=True)
class FittingStep:
    """Jobs that may run at a time.

    Args:
        needs: folders of values that these jobs and later ones read.
        frees: folders that no later job reads.
        reads_rounded: whether the jobs run with the weights that are rounded before them.
    """

    jobs: Sequence[Job]
    needs: Sequence[Path]
    frees: Sequence[Path]
    reads_rounded: bool = False


class PiecewiseRounding:
    """The steps in which GPTQ rounds `entries`, each a list of jobs that may run at a time.

    Args:
        path: of the model; `identity` tells it from others.
        formats: weight → its format.
        folder: gets a file for each set of weights whose products read the same values.
        most: bytes of the weights of a piece.
    """

    def __init__(
        self,
        model: DetachedModel,
        path: Path,
        identity: Sequence[object],
        entries: Sequence[Entry],
        formats: Mapping[str, WeightFormat],
        data: FittingData,
        folder: Path,
        most: int,
    ) -> None:
        self._data, self._folder, self._formats = data, folder / DATA, formats
        self._is_sequential = isinstance(data.step, Gptq) and data.step.sequential
        pieces = cut_pieces(model, most)
        groups = self._group_entries(model, entries, [piece.first for piece in pieces])
        last = max(number for number, _ in groups)
        keeps = [
            sorted({name for (number, names) in groups if number == place for name in names})
            for place in range(last + 1)
        ]
        key = [identity, data.identity, data.fitted, asdict(data.step)]
        if self._is_sequential:  # then values depend on how weights before them are rounded
            key.append([asdict(form) for form in formats.values()])
        runs, again = self._plan_pieces(path, pieces[: last + 1], keeps, key)
        fits = self._plan_fits(path, folder, groups, key)
        if self._is_sequential:
            self.steps = list(self._plan_sequence(runs, fits, again))
        else:
            joined = zip((*([job] for job in runs), []), ([], *fits), strict=True)
            self.steps = [
                FittingStep([*first, *then], (folder := self._values(place),), (folder,))
                for place, (first, then) in enumerate(joined)
            ]

    def _group_entries(
        self, model: DetachedModel, entries: Sequence[Entry], starts: Sequence[int]
    ) -> dict[tuple[int, tuple[str, ...]], list[Entry]]:
        """(piece, the values that its products read) → the weights that are fitted together."""
        groups: dict[tuple[int, tuple[str, ...]], list[Entry]] = {}
        for entry in entries:
            places = [model.index.positions.get(name, 0) for name in entry["data"]]
            if self._is_sequential:  # with its product, whose data from pieces before has their rounded weights
                places.append(self._find_product(model, entry["tensor"]))
            group = max(bisect_right(starts, place) - 1 for place in places)
            groups.setdefault((group, tuple(entry["data"])), []).append(entry)
        return groups

    def _plan_pieces(
        self, path: Path, pieces: Sequence[ModelPiece], keeps: Sequence[Sequence[str]], key: Sequence[object]
    ) -> tuple[list[Job], list[Job]]:
        """The jobs that run each piece in float, and the jobs that run each piece with rounded weights."""
        runs: list[Job] = []
        again: list[Job] = []
        for place, piece in enumerate(pieces):
            makes_values = place < len(pieces) - 1 and not self._is_sequential
            part = asdict(piece if makes_values else replace(piece, makes=()))
            common = {"path": str(path), "source": str(self._values(place))}
            name = f"{place:04}-{key_of(key, part, keeps[place])[:16]}"
            result = str(self._fitting_values(place + 1))
            arguments = {**common, "piece": part, "keeps": keeps[place], "result": result}
            runs.append(Job(f"piece-{name}", run_piece, arguments))
            arguments = {**common, "piece": asdict(piece), "keeps": [], "result": str(self._values(place + 1))}
            again.append(Job(f"rounded-piece-{name}", run_piece, arguments))
        return runs, again

    def _plan_fits(
        self,
        path: Path,
        folder: Path,
        groups: Mapping[tuple[int, tuple[str, ...]], Sequence[Entry]],
        key: Sequence[object],
    ) -> list[list[Job]]:
        """The jobs that round the weights of each piece."""
        fits: list[list[Job]] = [[] for _ in range(max(number for number, _ in groups) + 1)]
        for number, ((place, _), group) in enumerate(sorted(groups.items())):
            own = [asdict(self._formats[entry["tensor"]]) for entry in group]
            arguments = {
                "path": str(path),
                "entries": group,
                "formats": own,
                "folder": str(self._fitting_values(place + 1)),
                "fitted": self._data.fitted,
                "options": asdict(self._data.step),
                "file": str(folder / f"fitted-{number:04}.data"),
            }
            fits[place].append(Job(key_of(key, group, own)[:16], round_by_data, arguments))
        return fits

    def _fitting_values(self, place: int) -> Path:
        """The folder of the values that the weights of a piece are fitted to."""
        return self._float_values(place) if self._is_sequential else self._values(place)

    def _plan_sequence(
        self, runs: Sequence[Job], fits: Sequence[Sequence[Job]], again: Sequence[Job]
    ) -> Iterator[FittingStep]:
        """Each piece runs with float weights, its weights are rounded, and it runs with these for the next piece."""
        for place, (run, fit) in enumerate(zip(runs, fits, strict=True)):
            values, floats = self._values(place), self._float_values(place + 1)
            if fit:
                yield FittingStep([run], (values,), ())
                yield FittingStep(fit, (values, floats), (floats,))
            if place < len(runs) - 1:
                yield FittingStep([again[place]], (values,), (values,), reads_rounded=True)

    def run(
        self,
        executor: JobExecutor,
        table: Path,
        observer: Callable[[JobProgress], None],
        has_file: Callable[[Outcome], bool],
        known: Sequence[Outcome] = (),
    ) -> list[Outcome]:
        """Run the steps in order, starting at the first one that is not done, or whose values are gone.

        Args:
            known: of the jobs that have rounded other weights.

        Returns:
            The outcomes of the jobs that write weights; it ends with the first step of which a job fails.
        """
        begin = self._find_begin(table, has_file, known)
        if begin == 0 and not self._values(0).is_dir():
            self._write_samples()
        outcomes: list[Outcome] = []
        for place, step in enumerate(self.steps):

            def is_current(outcome: Outcome, place: int = place) -> bool:
                is_piece = "folder" in outcome.value
                return place < begin or Path(outcome.value["folder"]).is_dir() if is_piece else has_file(outcome)

            outcomes += run_jobs(
                self._jobs_of(step, (*known, *outcomes)), executor, table, versions(), observer, is_current
            )
            if any(outcome.value is None for outcome in outcomes):
                return outcomes
            for folder in step.frees:
                shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        return [outcome for outcome in outcomes if "folder" not in outcome.value]

    def _find_begin(self, table: Path, has_file: Callable[[Outcome], bool], known: Sequence[Outcome]) -> int:
        outcomes = [*known]
        with OutcomeTable(table, versions()).open() as recorded:
            for place, step in enumerate(self.steps):
                found = [recorded.find(job) for job in self._jobs_of(step, outcomes)]
                outcomes += filter(None, found)
                if not all(outcome and ("folder" in outcome.value or has_file(outcome)) for outcome in found):
                    return place if all(folder.is_dir() for folder in step.needs) else 0
        return len(self.steps)

    @staticmethod
    def _find_product(model: DetachedModel, weight: str) -> int:
        """The place of the first node after those that only move a weight."""
        index, values = model.index, [weight]
        for value in values:
            values += [node.output[0] for node in index.consumers.get(value, ()) if op_of(node) in ARRANGING]
        products = [node for value in values for node in index.consumers.get(value, ()) if op_of(node) not in ARRANGING]
        return min((index.positions[node.output[0]] for node in products), default=0)

    def _jobs_of(self, step: FittingStep, outcomes: Sequence[Outcome]) -> Sequence[Job]:
        """The jobs of a step; `outcomes` are those of the steps before it."""
        if not step.reads_rounded:
            return step.jobs
        rounded = self._find_rounded(outcomes)
        return [replace(job, arguments={**job.arguments, "rounded": rounded}) for job in step.jobs]

    def _find_rounded(self, outcomes: Iterable[Outcome]) -> dict[str, Any]:
        """Weight → its format, and its places in files, as `run_piece` takes it."""
        found: dict[str, Any] = {}
        for outcome in outcomes:
            for place in outcome.value.get("places", ()):
                form = self._formats.get(place["name"])
                if form is not None:
                    entry = found.setdefault(form.name, {"format": asdict(form), "places": []})
                    entry["places"].append({**place, "file": outcome.value["file"]})
        return found

    def _values(self, place: int) -> Path:
        """The folder of the values that piece `place` reads, a file for each sample."""
        return self._folder / f"{place:04}"

    def _float_values(self, place: int) -> Path:
        """The folder of what the piece before `place` makes with float weights, of values of rounded pieces."""
        return self._folder / f"{place:04}-float"

    def _write_samples(self) -> None:
        temporary = self._folder / "samples"
        shutil.rmtree(self._folder, ignore_errors=True)
        temporary.mkdir(parents=True)
        for number, sample in enumerate(self._data.samples()):
            np.savez(temporary / f"{number:06}.npz", **dict(sample))  # type: ignore[arg-type]
        temporary.rename(self._values(0))


DATA: Final = "values"
"""The folder of the values between pieces, as long as the run lasts."""


def round_by_data(
    path: str,
    entries: Sequence[Entry],
    formats: Sequence[Mapping[str, Any]],
    folder: str,
    fitted: int,
    options: Mapping[str, Any],
    file: str,
) -> dict[str, Any]:
    """The job of some weights whose products read the same values: write them to `file`, as GPTQ rounds them.

    Args:
        entries: the weights, with the values that their products read.
        folder: has these values, in a file for each sample; the first `fitted` are fitted to.

    Returns:
        As that of `quantize_shard`; and for each weight in `layers` the ratio in dB of what its products give on the
        other samples, rounded to the nearest and by GPTQ, as torch computes it of what is written, and which is taken.
    """
    model = open_source(path)
    files = sorted(Path(folder).glob("*.npz"))
    names = entries[0]["data"]
    hessian = measure_hessian(files[:fitted], names)
    held = np.concatenate([rows for sample in files[fitted:] for rows in _read_rows(sample, names)])
    ratios: dict[str, float] = {}
    layers: dict[str, list[Any]] = {}
    with ShardFile.open(Path(file)) as out:
        for entry, fields in zip(entries, formats, strict=True):
            form = WeightFormat(**fields)
            tensor = model.index.initializers[form.name]
            array = model.array(tensor)
            nearest, _ = round_to_nearest(array, form)
            offered = replace(nearest, integers=np.empty_like(nearest.integers))
            for first, last in split_channels(array.shape, form.channel_axis, GPTQ_SLICE):
                place = index_channels(array.ndim, form.channel_axis, first, last)
                own = nearest.select(form, first, last)
                grid = own.scales.astype(np.float32), own.zero_points
                offered.integers[place] = round_by_gptq(entry, array[place], *grid, hessian, options)
            before, after = (judge(array, found, form, held) for found in (nearest, offered))
            taken = after.product_db > before.product_db
            out.write_rounded(form, offered if taken else nearest, tensor.data_type)
            ratios[form.name] = (after if taken else before).weight_db
            layers[form.name] = [before.product_db, after.product_db, taken]
    return {"file": file, "nbytes": Path(file).stat().st_size, "places": out.places, "ratios": ratios, "layers": layers}


def measure_hessian(files: Sequence[Path], names: Sequence[str]) -> np.ndarray:
    """The sum of xᵀx over the rows x of the values `names`, in double precision."""
    total: np.ndarray | None = None
    for name in names:
        own: np.ndarray | None = None
        for file in files:
            rows = next(_read_rows(file, [name])).astype(np.float64)
            product = rows.T @ rows
            own = product if own is None else np.add(own, product, out=own)
        total = own if total is None or own is None else np.add(total, own, out=total)
    assert total is not None
    return total


def _read_rows(file: Path, names: Sequence[str]) -> Iterator[np.ndarray]:
    with np.load(file) as archive:
        for name in names:
            array = archive[name]
            yield array.reshape(-1, array.shape[-1])


@dataclass(frozen=True, slots=True)
class Judgement:
    """Ratios of signal to noise in dB: of a product on samples, and of its weight."""

    product_db: float
    weight_db: float


def judge(array: np.ndarray, found: RoundedWeight, form: WeightFormat, rows: np.ndarray) -> Judgement:
    """Multiply `rows` by torch with the float weight and with what is written of it."""
    import torch

    from pipeline.runtime.tensors import as_tensor

    sums = np.zeros(4)
    left = as_tensor(rows)
    for first, last in split_channels(array.shape, form.channel_axis, JUDGED_SLICE):
        place = index_channels(array.ndim, form.channel_axis, first, last)
        weight = as_tensor(array[place]).float()
        difference = dequantize(found.select(form, first, last), form)[0].sub_(weight)
        for index, values in enumerate((weight, difference)):
            product = left @ (values.T if form.channel_axis == 0 else values)
            for place_of_sum, part in ((index, product), (index + 2, values)):
                sums[place_of_sum] += torch.linalg.vector_norm(part, dtype=torch.float64).item() ** 2
    return Judgement(*(sqnr_db(sums[index], sums[index + 1]) for index in (0, 2)))
