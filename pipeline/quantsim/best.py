"""`onnxline quantsim CONFIG --best 4bit`: the algorithms that are there, tried one after the other within a budget.

All trials are judged on the same samples, which no step and no calibration has seen. The winner is the one whose worst
output, or whose chain of parts, has the highest ratio of signal to noise there; its configuration is written as a file
of its own.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import yaml

from passes.errors import OnnxlineError
from passes.suggest import bytes_text, plural
from passes.visible import table_lines
from pipeline.config import FormatsConfig, QuantSimConfig, RunConfig
from pipeline.config.quantsim import EVERYTHING, parse_precision
from pipeline.errors import CheckFailed, UsageError
from pipeline.events import Note, Observer
from pipeline.quantsim.optimizers import (
    FOUR_BITS,
    OPTIMIZERS,
    AdaRound,
    BiasCorrection,
    Gptq,
    Optimizer,
    ScaleEstimation,
    SeqMse,
    optimizers_of,
)
from pipeline.quantsim.parts import PartsQuantSimResult
from pipeline.quantsim.preparation import prepare_config
from pipeline.quantsim.report import QuantSimResult
from pipeline.quantsim.run import QuantSim

BEST: Final = "best.yaml"
"""The configuration of the winner, next to the files of its run."""

TITLE: Final = "# Chosen by onnxline quantsim --best, for its result on samples that were held out, among"


@dataclass(frozen=True, slots=True)
class Combination:
    """One choice of a format and steps, and what came of it.

    sqnr_db: of the worst output, on samples that were held out; None where it did not run.
    why: why it did not.
    left: a weight that a step has left as it was, and why.
    """

    weights: str
    prepare: tuple[Any, ...] = ()
    optimize: tuple[Any, ...] = ()
    sqnr_db: float | None = None
    weight_bytes: int = 0
    seconds: float = 0.0
    why: str = ""
    left: str = ""

    def config(self, config: RunConfig) -> RunConfig:
        """`config` with the format for all weights before its rules, and the steps after its own."""
        settings = config.quantsim or QuantSimConfig(profile="weight-only")
        own = settings.rules.get(EVERYTHING)
        formats = FormatsConfig(weights=self.weights, activations=own.activations if own else None)
        rules = {EVERYTHING: formats, **{name: rule for name, rule in settings.rules.items() if name != EVERYTHING}}
        update = {"rules": rules, "prepare": (*settings.prepare, *self.prepare), "optimize": self.optimize}
        return config.model_copy(update={"quantsim": settings.model_copy(update=update)})

    def row(self) -> tuple[str, ...]:
        """The cells of a table."""
        steps = ", ".join(map(_name_of, (*self.prepare, *self.optimize))) or "rounding to nearest"
        if self.sqnr_db is None:
            return (self.weights, steps, self.why, "", "")
        return self.weights, steps, f"{self.sqnr_db:.2f} dB", bytes_text(self.weight_bytes), f"{self.seconds:.0f} s"


@dataclass(frozen=True, slots=True)
class Best:
    """All trials in order, the winner among them, the file of its configuration, and its simulation."""

    trials: tuple[Combination, ...]
    winner: Combination
    config: Path
    result: QuantSimResult

    def lines(self) -> Iterator[str]:
        """The table, and a sentence on the winner."""
        what = "chain" if isinstance(self.result, PartsQuantSimResult) else "worst output"
        head = ("weights", "steps", f"{what}, held out", "weights", "time")
        yield from table_lines([head, *(trial.row() for trial in self.trials)])
        if same := self._describe_same():
            yield same
        steps = self.winner.row()[1]
        yield (
            f"best on samples that no step has seen: {self.winner.weights}, {steps}, {self.winner.sqnr_db:.2f} dB; "
            f"{self.config} has it"
        )

    def _describe_same(self) -> str:
        """A sentence where all trials that ran have one result; empty where they differ, or one alone ran."""
        ran = [trial for trial in self.trials if trial.sqnr_db is not None]
        if len(ran) < 2 or len({(trial.sqnr_db, trial.weight_bytes) for trial in ran}) > 1:
            return ""
        left = next((trial.left for trial in ran if trial.left), "")
        why = f": {left}" if left else ""
        return f"all {len(ran)} trials have one result, so no step and no format makes a difference to this model{why}"


def seconds_of(text: str) -> float:
    """`90s`, `20m` or `1.5h` in seconds.

    Raises:
        UsageError: it is something else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", text.strip())
    if found is None or not float(found[1]):
        raise UsageError(f"--budget: found {text!r}, expected a time such as 90s, 20m or 1.5h")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def trials_of(settings: QuantSimConfig, installed: Collection[str]) -> tuple[Combination, ...]:
    """The trials for 4 bits: first the steps of `settings` as they are, then those that take least time.

    Args:
        settings: an interpreter that a step of `optimize` names serves all steps of its library.
        installed: the modules of libraries that this interpreter has.
    """
    named = {step.module: step.python for step in optimizers_of(settings.optimize) if step.python is not None}
    pythons: dict[str, str | None] = {**dict.fromkeys(installed), **named}

    def use(*kinds: type[Optimizer]) -> tuple[Any, ...]:
        steps = ((kind.name, pythons.get(kind.module)) for kind in kinds)
        return tuple({name: {"python": python}} if python else name for name, python in steps)

    def use_gptq(**options: bool) -> tuple[Any, ...]:
        python = pythons.get(Gptq.module)
        return ({Gptq.name: {**options, **({"python": python} if python else {})}},)

    gptq = use(Gptq)
    chains: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [((), ()), ((), gptq), ((), use(Gptq, BiasCorrection))]
    if SeqMse.module in pythons:
        chains += [((), use(SeqMse)), ((), use(SeqMse, Gptq))]
    chains += [(({name: {"add_nodes": True}},), gptq) for name in ("smooth-quant", "awq")]
    chains += [(("cross-layer-equalization",), gptq)]
    found = [Combination(weights, *chain) for chain in chains for weights in (DEFAULT_FORMAT, "int4/channel")]
    found[4:4] = [  # next to GPTQ without options, whose time they take
        Combination("int4/channel", optimize=use_gptq(mse=True)),  # where it gains most
        Combination("uint4/block32", optimize=use_gptq(act_order=True)),
        Combination("uint4/block32", optimize=use_gptq(act_order=True, mse=True)),  # best for normally drawn weights
    ]
    if ScaleEstimation.module in pythons:
        formats = ("uint4/block32", "int4/channel/asymmetric")  # it knows no symmetric ones
        found += [Combination(weights, optimize=use(ScaleEstimation)) for weights in formats]
    if AdaRound.module in pythons:
        found.append(Combination("int4/channel", optimize=use(AdaRound)))
    own = Combination(_own_format(settings), optimize=settings.optimize)
    return (own, *(trial for trial in found if trial != own)) if own.optimize else tuple(found)


def _own_format(settings: QuantSimConfig) -> str:
    """The format that the configuration gives all weights, where it has 4 bits."""
    rule = settings.rules.get(EVERYTHING)
    text = rule.weights if rule is not None else None
    precision = None if text is None else parse_precision(text)
    return text if text is not None and precision is not None and precision.bits == FOUR_BITS else DEFAULT_FORMAT


DEFAULT_FORMAT: Final = "int4/block32"


def find_best(
    config: RunConfig,
    budget_s: float,
    out: str | Path | None = None,
    observer: Observer = lambda _: None,
    trials: Sequence[Combination] | None = None,
) -> Best:
    """Run the trials until the time is up, the winner once more, and write its configuration.

    A trial begins where there is time for the longest one so far; the first begins in any case.

    Raises:
        UsageError: something that was given is wrong.
        CheckFailed: no trial came to its end.
    """
    if config.model.parts is not None:  # a chain has one result to choose by
        config.refuse_parts("quantsim --best")
    begun = time.perf_counter()
    installed = {kind.module for kind in OPTIMIZERS.values() if find_spec(kind.module) is not None}
    offered = trials_of(config.quantsim or QuantSimConfig(), installed) if trials is None else tuple(trials)
    done: list[Combination] = []
    tried: Combination | None = None
    result: QuantSimResult | None = None
    for trial in offered:
        left = budget_s - (time.perf_counter() - begun)
        if done and left < max(known.seconds for known in done):
            done.append(replace(trial, why="no time left"))
            continue
        steps = trial.row()[1]
        observer(Note(f"trial {len(done) + 1} of {len(offered)}: {trial.weights}, {steps}"))
        tried, result = run_trial(trial, config, out, observer)
        done.append(tried)
    ran = [trial for trial in done if trial.sqnr_db is not None]
    if not ran:
        reasons = "".join(f"\n  {trial.weights}, {trial.row()[1]}: {trial.why}" for trial in done)
        raise CheckFailed(f"--best: none of {plural(len(done), 'trial')} came to its end:{reasons}")
    winner = max(ran, key=lambda trial: trial.sqnr_db or -math.inf)
    if winner is not tried or result is None:  # the folder has the files of the last trial
        _, result = run_trial(winner, config, out, observer)
    assert result is not None
    chosen = winner.config(config)
    whole = chosen.model_copy(update={"export": prepare_config(chosen).export})  # with the opset of the trials
    path = _free_path(result.folder)
    path.write_text(f"{TITLE} {plural(len(ran), 'trial')}.\n{whole.to_yaml()}", encoding="utf-8")
    return Best(tuple(done), winner, path, result)


def _free_path(folder: Path) -> Path:
    """A name that no file has but one of an earlier choice: a configuration of the user's own is not written over."""
    path, number = folder / BEST, 1
    while path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(TITLE):
        number += 1
        path = folder / BEST.replace(".", f"-{number}.")
    return path


def run_trial(
    trial: Combination, config: RunConfig, out: str | Path | None, observer: Observer
) -> tuple[Combination, QuantSimResult | None]:
    """Simulate one combination; returns it with what came of it."""
    begun = time.perf_counter()
    try:
        result = QuantSim(trial.config(config), out, observer, progress=False, holds_out=True).run()
    except UsageError:
        raise
    except OnnxlineError as error:
        return replace(trial, why=str(error).partition("\n")[0], seconds=time.perf_counter() - begun), None
    reports = [part.report for part in result.parts.values()] if isinstance(result, PartsQuantSimResult) else []
    steps = [step for report in reports or [result.report] for step in report.optimized]
    left = next((f"{step.name} leaves {name}: {why}" for step in steps for name, why in step.left.items()), "")
    failed = next((step for step in steps if step.status == "failed"), None)
    seconds = time.perf_counter() - begun
    if failed is not None:
        return replace(trial, why=f"{failed.name} failed: {failed.reason}", seconds=seconds), result
    if isinstance(result, PartsQuantSimResult):
        ratio, size = result.chain.noise.sqnr_db if result.chain else math.inf, result.quantized_weight_bytes
    else:
        ratio = min((noise.sqnr_db for noise in result.report.outputs.values()), default=math.inf)
        size = result.report.quantized_weight_bytes
    return replace(trial, sqnr_db=ratio, weight_bytes=size, seconds=seconds, left=left), result


def _name_of(item: Any) -> str:
    """The step as a configuration writes it, without the path of an interpreter."""
    name, options = (item, {}) if isinstance(item, str) else next(iter(item.items()))
    shown = {key: value for key, value in (options or {}).items() if key != "python"}
    return f"{name} {yaml.safe_dump(shown, default_flow_style=True, width=1000).strip()}" if shown else name
