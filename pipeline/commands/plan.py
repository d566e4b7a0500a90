"""`onnxline plan`: what a plan decided, as text and as a picture of its arena; and a run of it, launch by launch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from passes.suggest import bytes_text, nearest, plural
from passes.visible import visible_line
from passes.weights.files import write_file
from pipeline.commands.shared import add_command
from pipeline.errors import SourceError, UsageError
from pipeline.terminal import print_line, print_text
from pipeline.workspace import disk_errors

if TYPE_CHECKING:
    from pipeline.planning import ExecutionPlan

MOST_ROWS: Final = 12
"""Rows of a table in the terminal."""


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="What a plan decided: calls, places, memory over time; and a run of it, launch by launch.")
    add_command(group, "plan show", show)
    add_command(group, "plan trace", trace)
    app.add_typer(group, name="plan")


def show(
    path: Path,
    svg: Path | None = None,
    regions: str | None = None,
    pins: list[str] | None = None,
    entry: str | None = None,
    with_weights: bool = False,
) -> None:
    """Print what a plan holds: its calls, its arena against the bound, and who lives where at the peak."""
    from pipeline.planning import check_plan, map_memory, parse_regions

    if with_weights:
        print_line(_check_weights(path))
    if pins and regions is None:
        raise UsageError("--pin holds a value in a region, and no regions were given; add --regions")
    plan = _choose_entry(_read_entries(path), entry)
    if regions is not None:
        plan = map_memory(plan, parse_regions(regions), _read_pins(pins or ()))
        check_plan(plan)
    print_text("\n".join(map(visible_line, _lines(plan))))
    if svg is not None:
        from pipeline.report.arena_picture import draw_arena

        write_file(svg, draw_arena(plan) + "\n")
        print_line(f"picture: {svg}")


def trace(folder: Path, out: Path = Path("trace.json"), runs: int = 3) -> None:
    """Run the final model of RUN on random inputs, and write the time of each launch in Chrome's trace format."""
    if not (folder / "model.onnx").is_file():
        found = "is a file" if folder.is_file() else "has no model.onnx" if folder.is_dir() else "does not exist"
        raise UsageError(f"{folder} {found}; expected the folder of a run")
    plan: ExecutionPlan = _choose_entry(_read_entries(folder), None)
    from pipeline.config import RunConfig, RuntimeConfig
    from pipeline.importers import from_onnx
    from pipeline.lowering.fusion import fuse
    from pipeline.ops import emitter_of
    from pipeline.runtime import compile_graph
    from pipeline.runtime.trace import random_feed, to_chrome_trace, trace_runs

    shapes = {plan.slots[vid].name: plan.slots[vid].spec.sizes for vid in plan.inputs}
    settings = folder / "run.yaml"
    config = RunConfig.from_yaml(settings).runtime if settings.is_file() else RuntimeConfig()
    graph = from_onnx(folder / "model.onnx", shapes=shapes, emitter_of=emitter_of, fallback=True)
    program = compile_graph(fuse(graph, config.chosen_fusions), **config.program_options)
    bound = program.context.bound
    times = trace_runs(bound, random_feed(program.feed_signature), runs=runs)
    write_file(out, json.dumps(to_chrome_trace(bound, times)) + "\n")
    spent: Counter[str] = Counter()
    for time in times:
        spent[program.plan.calls[time.call].attr_schema.partition("/")[0]] += time.ended - time.begun
    total = sum(spent.values()) or 1
    print_line(
        f"{plural(len(times), 'launch', 'launches')} in {plural(runs, 'run')}: {total / runs / 1e6:.3f} ms a run"
    )
    for kind, nanoseconds in spent.most_common(MOST_ROWS):
        print_line(f"  {nanoseconds / runs / 1e6:9.3f} ms  {nanoseconds / total:5.1%}  {kind}")
    print_line(f"trace: {out}")


def _read_entries(path: Path) -> dict[str, ExecutionPlan]:
    """The plans of a file, or of the folder of a run, by entry point."""
    from pipeline.planning import decode_plans, from_json

    if path.is_dir():
        # plan.json first: this release may not read a plan.bin that an earlier one has written.
        found = [path / name for name in ("plan.json", "plan.bin") if (path / name).is_file()]
        if not found:
            raise UsageError(
                f"{path} has neither plan.bin nor plan.json; a run writes them when `plan` is among its backends and "
                "can take the model"
            )
        path = found[0]
    with disk_errors(path):
        if not path.is_file():
            raise UsageError(f"there is no file {path}; expected a plan.bin, a plan.json, or the folder of a run")
        data = path.read_bytes()
    if path.suffix != ".json":
        return dict(decode_plans(data, str(path)).entries)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: it is not JSON: {error}") from error
    return {"main": from_json(content, str(path))}


def _check_weights(path: Path) -> str:
    """A line on the weights of a plan.bin, whose bytes are as they should be.

    Raises:
        SourceError: a weight has other bytes, or its file is not there.
        UsageError: a plan.json, which does not say where the weights are.
    """
    from pipeline.planning import check_weights, decode_plans

    file = path / "plan.bin" if path.is_dir() else path
    if file.suffix == ".json" or not file.is_file():
        raise UsageError(f"--check-weights: found {path}, expected a plan.bin, which says where the weights are")
    with disk_errors(file):
        content = decode_plans(file.read_bytes(), str(file))
    check_weights(content, file.parent, str(file))
    nbytes = sum(stored.nbytes or len(stored.data) for stored in content.weights.values())
    return f"weights: {len(content.weights)}, {bytes_text(nbytes)}, with the bytes that the plan was made with"


def _choose_entry(entries: dict[str, ExecutionPlan], name: str | None) -> ExecutionPlan:
    if name is None and len(entries) == 1:
        return next(iter(entries.values()))
    if name is None:
        raise UsageError(f"the plan has the entry points {', '.join(entries)}; choose one by --entry")
    if name not in entries:
        raise UsageError(f"the plan has no entry point {name!r}{nearest(name, entries)}; it has {', '.join(entries)}")
    return entries[name]


def _read_pins(texts: Sequence[str]) -> dict[str, str]:
    """{value: region}; the name of a value may have a `=`."""
    pins: dict[str, str] = {}
    for text in texts:
        name, equals, region = text.rpartition("=")
        if not (name and equals and region):
            raise UsageError(f"--pin: found {text!r}, expected VALUE=REGION")
        if pins.setdefault(name, region) != region:
            raise UsageError(f"--pin: {name!r} is pinned to {pins[name]!r} and to {region!r}; leave one of them out")
    return pins


def _lines(plan: ExecutionPlan) -> Iterator[str]:
    from pipeline.ops import Kind
    from pipeline.planning import alive_bytes, occupants

    everyone = list(occupants(plan).values())
    kinds = Counter(Kind(call.kind_id).name for call in plan.calls)
    free = sum(
        isinstance(position := call.constraints.get("view"), int)
        and all(plan.alias.get(vid) == call.in_vids[position] for vid in call.out_vids)
        for call in plan.calls
    )
    yield f"plan of graph {plan.graph_name!r}, digest {plan.graph_digest[:12] or 'none'}"
    yield f"calls: {len(plan.calls)}, of which {free} are views and do nothing: {_counts(kinds)}"
    generic = plan.generic_calls()
    yield f"called by name (Aten): {sum(generic.values())}{': ' if generic else ''}{_counts(Counter(generic))}"
    ratio = plan.arena_bytes / plan.live_bytes if plan.live_bytes else 1
    bound = f"at least {bytes_text(plan.live_bytes)} are alive at once ({ratio:.3f} x)"
    yield f"arena: {bytes_text(plan.arena_bytes)}, {bound}; {plural(len(plan.alias), 'alias', 'aliases')}"
    alive = alive_bytes(everyone, len(plan.calls))
    if alive:
        peak = alive.index(max(alive))
        yield f"peak: {bytes_text(alive[peak])} in call {peak}, {Kind(plan.calls[peak].kind_id).name}:"
        there = sorted(
            (value for value in everyone if value.life.first <= peak <= value.life.last),
            key=lambda value: -value.nbytes,
        )
        for value in there[:MOST_ROWS]:
            place = (
                f"bytes {value.offset} to {value.offset + value.nbytes}, calls {value.life.first} to {value.life.last}"
            )
            yield f"  {bytes_text(value.nbytes):>11}  {value.name}  {place}"
        if len(there) > MOST_ROWS:
            yield f"  and {len(there) - MOST_ROWS} more"
    yield from _region_lines(plan)


def _region_lines(plan: ExecutionPlan) -> Iterator[str]:
    if plan.memory is None:
        return
    sizes: dict[int, int] = {vid: plan.slots[vid].spec.nbytes for vid in plan.offsets}
    for at, region in enumerate(plan.memory.regions):
        here = [stay for stay in plan.memory.residences if stay.region == at]
        values = len({stay.root for stay in here})
        used = max((stay.offset + sizes[stay.root] for stay in here), default=0)
        arriving = [move for move in plan.memory.moves() if move.target.region == at]
        room = "" if region.nbytes is None else f" of {bytes_text(region.nbytes)}"
        copied = bytes_text(sum(sizes[move.root] for move in arriving))
        yield (
            f"region {region.name}: {bytes_text(used)}{room} used, {plural(values, 'value')}, "
            f"{plural(len(arriving), 'copy', 'copies')} into it ({copied})"
        )


def _counts(counts: Counter[Any]) -> str:
    shown = [f"{count} {name}" for name, count in counts.most_common(MOST_ROWS)]
    return ", ".join(shown) + (f", and {len(counts) - MOST_ROWS} more kinds" if len(counts) > MOST_ROWS else "")
