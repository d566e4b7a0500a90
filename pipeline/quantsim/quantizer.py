"""From a float model to the model with QuantizeLinear and DequantizeLinear: what `onnxline quantsim` and `onnxline
to-int8` share. Read `ModelQuantizer.begin`, `find_ranges`, `encode` and `simulate`, in this order."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from passes.errors import StepFailed
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from pipeline.config import KEYS, OptionNames, QuantSimConfig
from pipeline.errors import CheckFailed
from pipeline.events import Note, Observer, time_stage
from pipeline.quantsim.calibration import MeasuredRanges, group_ranges, measure
from pipeline.quantsim.encodings import Encoding, Range, encode
from pipeline.quantsim.given_encodings import adopt_encodings, find_calibrated, read_given
from pipeline.quantsim.hidden_values import describe_opaque_operators, describe_untyped_values
from pipeline.quantsim.infinity import find_dropped_infinities
from pipeline.quantsim.placement import Placement, PlacementRule, place
from pipeline.quantsim.profiles import own_rules, read_profile, rules_of
from pipeline.quantsim.qdq import check_opset
from pipeline.quantsim.range_notes import describe_ranges
from pipeline.quantsim.samples import Feeds, Samples
from pipeline.quantsim.simulation import DeviceLike, OutputNoise, simulate_outputs
from pipeline.quantsim.sites import find_quantized, find_sites
from pipeline.quantsim.stored_constants import declare_types, store_constants
from pipeline.quantsim.target_check import describe_obstructions, refuse_formats


class ModelQuantizer:
    """Decides formats, measures ranges, and simulates the quantized model.

    Args:
        model: in float.
        settings: the rules and the data.
        observer: called with each event.
        scratch: a folder for files of a simulation; by default the system's.
        names: what messages call the options.
    """

    def __init__(
        self,
        model: DetachedModel,
        settings: QuantSimConfig,
        observer: Observer,
        scratch: Path | None = None,
        names: OptionNames = KEYS,
    ) -> None:
        self._model, self._settings = declare_types(store_constants(model)), settings
        self._send, self._scratch, self._names = observer, scratch, names
        self._profile, self._sites = read_profile(settings), find_sites(self._model, names)
        self._in_float = tuple[PlacementRule, ...]()
        self._given: Mapping[str, Encoding] | None = None
        self._measured: MeasuredRanges | None = None
        self._of_adapters = frozenset[str]()
        self.compared = 0
        """On how many samples `simulate` has compared outputs."""

    @property
    def model(self) -> DetachedModel:
        """The model in float, with its constants stored and its values typed."""
        return self._model

    @property
    def measured_samples(self) -> int:
        """How many samples the ranges are of."""
        return 0 if self._measured is None else self._measured.samples

    def begin(self) -> None:
        """Decide formats, by rules or by the encodings of a file."""
        path = self._settings.encodings_from
        self._given = None if path is None else read_given(path, self._model, self._names)
        self.placement = self.place(self._given or ())  # which tensor is quantized how
        if self._given is not None:
            self._of_adapters = find_calibrated(self._model, self._given, self.placement)
        if self.needs_ranges:
            # now, and not after hours of calibration
            check_opset(self._model.proto, self.placement.formats(), self._names)

    @property
    def needs_ranges(self) -> bool:
        """Whether no file has all scales."""
        return self._given is None or bool(self._of_adapters)

    def place(self, given: Collection[str] = (), dtypes: Collection[str] = ("float32",)) -> Placement:
        with time_stage(self._send, "place") as details:
            own = own_rules(self._settings)
            rules, notes = self._profile.rules(self._model, given, self._sites, own)
            placement = place(self._model, (*rules, *own), dtypes, self._sites, self._names)
            details.append(f"{len(placement.quantized_sites())} of {len(placement.sites)} tensors quantized")
            for sentence in describe_obstructions(
                self._model, self._profile.name, self._profile.target, refuse=self._settings.unsupported == "refuse"
            ):
                self._send(Note(sentence))
            if self._profile.target is not None and not given:  # those of a file are not those of the rules
                refuse_formats(placement, self._profile.target)
            opaque = describe_opaque_operators(self._model, self._names)
            for sentence in (*notes, *opaque, *describe_untyped_values(self._model)):
                self._send(Note(sentence))
            if own := find_quantized(self._model.proto.graph):
                self._send(Note(f"left as they are, since the model quantizes them: {plural(len(own), 'value')}"))
        return placement

    def find_ranges(self, samples: Samples) -> None:
        """Measure what values each activation takes."""
        if not self.needs_ranges:
            return
        with time_stage(self._send, "calibrate"):
            if samples.note:
                self._send(Note(samples.note))
            self._take_measured(measure(self._model, self.placement, samples.first(samples.fitted)))

    def _take_measured(self, measured: MeasuredRanges) -> None:
        """Leave in float what is infinite or NaN on a sample, where the model drops that."""
        self._measured = measured
        self._in_float = tuple(find_dropped_infinities(self._model, self.placement, measured.extents()))
        if self._in_float:
            rules = (*rules_of(self._settings, self._model), *self._in_float)
            self.placement = place(self._model, rules, sites=self._sites, names=self._names)

    def ranges(self, placement: Placement) -> dict[str, Range]:
        """The range of each group of `placement`, by what was measured."""
        assert self._measured is not None
        return group_ranges(self._measured, placement, self._model)

    def encode(
        self, ranges: Mapping[str, Range], chosen: Mapping[str, Encoding] = MappingProxyType({})
    ) -> tuple[Placement, dict[str, Encoding], tuple[str, ...]]:
        """The placement, scales and zero points, and sentences on ranges that leave a tensor few numbers.

        Args:
            ranges: of groups.
            chosen: encodings of weights in place of those by their least and greatest elements.
        """
        placement = self.placement
        if self._given is not None:  # scales as a file has them, and those of adapters, which are no part of their base
            own = encode(placement, ranges, self._model) if self._of_adapters else {}
            own = {name: encoding for name, encoding in own.items() if name in self._of_adapters}
            return (*self._adopt(placement, self._given, own), ())
        assert self._measured is not None, "find_ranges has run"
        encodings = encode(placement, ranges, self._model, chosen)
        notes = describe_ranges(self._model, placement, self._measured.extents(), ranges)
        return placement, encodings, tuple(notes)

    def _adopt(
        self, placement: Placement, given: Mapping[str, Encoding], own: Mapping[str, Encoding]
    ) -> tuple[Placement, dict[str, Encoding]]:
        """Join the encodings `given` by a file with `own` ones of other tensors; returns the placement of all, too."""
        with time_stage(self._send, "adopt") as details:
            placement, encodings = adopt_encodings(placement, given, self._model, own)
            name = Path(str(self._settings.encodings_from)).name
            details.append(f"{len(encodings.keys() - own.keys())} encodings of {name}")
            if self._profile.target is not None:
                refuse_formats(placement, self._profile.target, self._names.encodings)
            if own:
                details.append(f"{len(own)} of adapters calibrated")
        return placement, encodings

    def simulate(
        self, quantized: DetachedModel, samples: Samples, source: DetachedModel | None = None
    ) -> tuple[dict[str, OutputNoise], DeviceLike]:
        """The outputs of the quantized model by the specification, and as a device computes them.

        Args:
            quantized: the model with QuantizeLinear and DequantizeLinear.
            samples: the inputs.
            source: the model in float whose outputs they are compared with; by default the model that is quantized.

        Raises:
            CheckFailed: it does not run.
        """
        with time_stage(self._send, "simulate") as details, tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            evaluated = self._count(samples.evaluation(self._settings.evaluation))
            try:
                outputs, device = simulate_outputs(
                    source or self._model, quantized, evaluated, Path(folder), self._names.data
                )
            except StepFailed as failure:
                raise CheckFailed(f"the quantized model does not run on onnxruntime: {failure}") from failure
            details.append(", ".join(f"{name} {found.sqnr_db:.2f} dB" for name, found in outputs.items()))
        return outputs, device

    def _count(self, samples: Iterable[Feeds]) -> Iterator[Feeds]:
        for self.compared, feeds in enumerate(samples, 1):
            yield feeds
