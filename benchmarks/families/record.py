"""What is known of each family, one JSON file each, so that a run can be taken up again where it ended."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from benchmarks.families import detect, measure, truth
from benchmarks.families.detect import Detection
from benchmarks.families.measure import OPTIMIZERS, Outcome
from benchmarks.families.table import Family
from pipeline.workspace import own_code_digest, versions


@dataclass(frozen=True, slots=True)
class Record:
    """One family: why it did not export, or how detection and the optimizers fared. `seconds` is all that it took."""

    key: str
    seconds: float = 0.0
    why_not: str = ""
    detection: Detection | None = None
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)

    def lacks(self, optimizers: tuple[str, ...]) -> tuple[str, ...]:
        """The optimizers that have not been run yet."""
        if self.why_not or (self.detection and not self.detection.found):
            return ()
        return tuple(name for name in optimizers if name not in self.outcomes)

    @property
    def is_known(self) -> bool:
        return bool(self.why_not or self.detection)

    def with_outcome(self, name: str, outcome: Outcome, seconds: float) -> Record:
        return replace(self, outcomes={**self.outcomes, name: outcome}, seconds=self.seconds + seconds)


class Records:
    """The files in `folder`. One counts while the row, the versions, what it was judged by, and onnxline's own code are
    what they were."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        judges = [inspect.getsource(module) for module in (detect, measure, truth)]
        self._code = f"{own_code_digest()} {versions()} {judges}"

    def read(self, family: Family) -> Record:
        """The record of `family`; an empty one if there is none that counts."""
        key = self._key(family)
        try:
            record = FORM.validate_json(self._path(family).read_bytes())
        except (FileNotFoundError, ValidationError):
            return Record(key)
        return record if record.key == key else Record(key)

    def write(self, family: Family, record: Record) -> None:
        path = self._path(family)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_bytes(FORM.dump_json(record, indent=1))
        draft.replace(path)

    def _path(self, family: Family) -> Path:
        return self._folder / f"{family.name}.json"

    def _key(self, family: Family) -> str:
        return hashlib.sha256(f"{self._code} {family} {OPTIMIZERS}".encode()).hexdigest()


FORM = TypeAdapter(Record)
