"""What the default recipe leaves of each family, against plain torch.onnx.export + onnxsim, side by side.

    python -m benchmarks.node_counts [--unseen] [--family NAME]… [--seconds 240] [--markdown FILE]
        [--recorded] [--no-kept]

Each family (benchmarks/families/*.yaml, and a small DiT of diffusers) is made with random weights. Plain:
`torch.onnx.export(dynamo=True)` as it comes, so with `optimize=True`, which is onnxscript's optimizer, and one bare
`onnxsim.simplify`. Ours: the export of `onnxline run` and the default recipe for torch, each change proven, without
`keep`; and once more with `keep: [qkv?]`. Nodes inside of If, Loop and Scan count. What is known is written down at
once, so a run that was stopped, by `--seconds` too, goes on where it ended. Exits 1 where ours has more nodes.
`--unseen` counts the families of families/unseen, which no step was written for. `--recorded` takes the sums of plain
from RESULTS_node_counts.md, which the same versions have to have made.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import onnx
import torch
from pydantic import TypeAdapter, ValidationError

from benchmarks.families.detect import stir
from benchmarks.families.table import UNSEEN, Family, families
from benchmarks.measure import machine, versions_line
from passes.context import PassContext, open_context
from passes.errors import PassError
from passes.external.onnxsim import simplify
from passes.graph.traversal import every_node
from passes.policy.policy import Policy
from passes.proof.numeric import NumericProver
from passes.recipe import TORCH_RECIPE
from passes.recipe.recipe import steps_of
from passes.run.runner import run_passes
from passes.weights.detached import read_model
from pipeline.config import ExportConfig, ModelConfig
from pipeline.errors import OnnxlineError
from pipeline.export import TorchSource, export_onnx, load_source
from pipeline.export.call_watch import capture_output
from pipeline.export.source import draw_inputs
from pipeline.workspace import own_code_digest, versions

FOLDER: Final = Path("runs/benchmarks")
RECORDED: Final = Path(__file__).with_name("RESULTS_node_counts.md")
CALL_S: Final = 60.0
"""Seconds for one call of an optimizer, which takes one or two; onnxsim does not end on VITS."""

DIT: Final = "dit"


@dataclass(frozen=True, slots=True)
class Counts:
    """One family: nodes by operator on each side. `plain_fails` and `ours_fails` say why a side has none."""

    key: str
    plain: Mapping[str, int] = field(default_factory=dict)
    ours: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)
    plain_fails: str = ""
    ours_fails: str = ""
    ours_reverted: tuple[str, ...] = ()
    kept_reverted: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def extra(self) -> int:
        """Nodes that ours has more than plain."""
        return sum(self.ours.values()) - sum(self.plain.values()) if self.plain and self.ours else 0

    @property
    def more(self) -> dict[str, int]:
        """Operators of which ours has more than plain."""
        return dict(Counter(self.ours) - Counter(self.plain)) if self.plain else {}


def main() -> None:
    options = _options()
    begun = time.perf_counter()
    rows: dict[str, Counts] = {}
    with open_context(CALL_S) as context:
        for name in options.family or (families(UNSEEN) if options.unseen else [DIT, *families()]):
            counts = _read(name, options.any_code)
            if counts is None:
                if time.perf_counter() - begun > options.seconds:
                    continue
                counts = _measure(name, context, options)
                _write(name, counts)
                print(f"{name}: {_said(counts)} ({counts.seconds:.0f} s)", flush=True)
            rows[name] = counts
    options.markdown.parent.mkdir(parents=True, exist_ok=True)
    options.markdown.write_text(_markdown(rows), encoding="utf-8")
    worse = [name for name, counts in rows.items() if counts.extra > 0]
    print(f"{len(rows)} families; ours has more nodes in: {', '.join(worse) or 'none'}; {options.markdown}")
    sys.exit(1 if worse else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", action="append", choices=[DIT, *families(), *families(UNSEEN)], metavar="NAME")
    parser.add_argument("--unseen", action="store_true", help="count the families that no step was written for")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no family after this time")
    parser.add_argument(
        "--any-code", action="store_true", help="take what is known, whichever code it was measured with"
    )
    parser.add_argument("--recorded", action="store_true", help="take the sums of plain from RESULTS_node_counts.md")
    parser.add_argument("--no-kept", action="store_true", help="leave the run with Q, K and V kept out")
    parser.add_argument("--markdown", type=Path, default=FOLDER / "node_counts.md")
    return parser.parse_args()


def _section(name: str) -> ModelConfig:
    if name == DIT:
        return ModelConfig.model_validate({"factory": "benchmarks.families.dit:make"})
    return _family(name).section()


def _family(name: str) -> Family:
    return families().get(name) or families(UNSEEN)[name]


def _measure(name: str, context: PassContext, options: argparse.Namespace) -> Counts:
    begun = time.perf_counter()
    counts: dict[str, Any] = {"key": _key(name)}
    source: TorchSource | None = None
    with tempfile.TemporaryDirectory(prefix="onnxline-nodes-") as folder:
        try:
            source = source_of(name)
            counts |= _ours(source, Path(folder), context, {} if options.no_kept else {"kept": Policy(keep=("qkv?",))})
        except (OnnxlineError, PassError) as error:
            counts["ours_fails"] = _in_a_line(error)
        try:
            if options.recorded:
                counts["plain"] = _recorded(name)
            elif source:
                counts["plain"] = _operators(onnx.load(export_plain(source, Path(folder), context)).graph)
        except Exception as error:  # torch's exporter and onnxsim raise anything
            counts["plain_fails"] = _in_a_line(error)
    torch._dynamo.reset()  # it would hold on to every model it has seen
    return Counts(**counts, seconds=time.perf_counter() - begun)


def source_of(name: str) -> TorchSource:
    source = load_source(_section(name))
    assert isinstance(source, TorchSource)
    stir(source.module)
    return source


def _ours(source: TorchSource, folder: Path, context: PassContext, others: Mapping[str, Policy]) -> dict[str, Any]:
    """What `onnxline run` leaves by default, and with other policies."""
    export_onnx(source, ExportConfig(), folder / "ours.onnx")
    model, feeds = read_model(folder / "ours.onnx"), [draw_inputs(source.inputs, {}, 0)]
    counts: dict[str, Any] = {}
    for side, policy in {"ours": Policy(), **others}.items():
        run = run_passes(model, steps_of(TORCH_RECIPE), policy, NumericProver.of_itself(feeds, context), context)
        counts[side] = _operators(run.model.proto.graph)
        counts[f"{side}_reverted"] = tuple(f"{row.name}: {row.status} {row.reason}" for row in run.reverted)
    return counts


def export_plain(source: TorchSource, folder: Path, context: PassContext) -> Path:
    """The file that `torch.onnx.export` leaves with its own defaults, and one `onnxsim.simplify` with its own."""
    exported, simplified = folder / "plain.onnx", folder / "simplified.onnx"
    example = source.example
    with capture_output(), torch.no_grad():
        torch.onnx.export(source.module, example.args, str(exported), kwargs=example.kwargs, dynamo=True, verbose=False)
    context.worker.call(simplify, source=str(exported), target=str(simplified), options={})
    return simplified


def _recorded(name: str) -> dict[str, int]:
    """The sum of plain in the committed table, under no operator's name; empty where plain fails."""
    row = re.search(rf"^\| {re.escape(name)} \| (\d+) \|", RECORDED.read_text(encoding="utf-8"), re.MULTILINE)
    return {"all": int(row[1])} if row else {}


def _operators(graph: onnx.GraphProto) -> dict[str, int]:
    names = (f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in every_node(graph))
    return dict(sorted(Counter(names).items()))


def _in_a_line(error: Exception) -> str:
    """The first words of an error, without where this machine has its libraries."""
    text = re.sub(r"\S*/site-packages/|\x1b\[\d+m", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:160]


def _key(name: str) -> str:
    source = inspect.getsource(sys.modules[__name__])
    return hashlib.sha256(
        f"{own_code_digest()} {versions()} {source} {name != DIT and _family(name)}".encode()
    ).hexdigest()


def _path(name: str) -> Path:
    return FOLDER / "node_counts" / f"{name}.json"


def _read(name: str, any_code: bool) -> Counts | None:
    """What is known of a family, unless the code has changed since; with `any_code`, even then."""
    try:
        counts = FORM.validate_json(_path(name).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    return counts if any_code or counts.key == _key(name) else None


def _write(name: str, counts: Counts) -> None:
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_bytes(FORM.dump_json(counts, indent=1))
    draft.replace(path)


def _said(counts: Counts) -> str:
    sides = (counts.plain, counts.ours, counts.kept)
    totals = " → ".join(str(sum(side.values())) if side else "fails" for side in sides)
    fails = "".join(f"; {why}" for why in (counts.plain_fails, counts.ours_fails) if why)
    return f"{totals}; more: {_listed(counts.more)}; reverted: {', '.join(counts.ours_reverted)}{fails}"


def _listed(operators: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in operators.items())


def _markdown(rows: Mapping[str, Counts]) -> str:
    head = ("family", "plain + onnxsim", "ours", "ours, keep qkv", "only in ours", "only in plain", "remark")
    lines = [head, ("---",) * len(head)]
    for name, counts in rows.items():
        totals = [str(sum(side.values())) if side else "" for side in (counts.plain, counts.ours, counts.kept)]
        only = [_listed(_only(*pair)) for pair in ((counts.ours, counts.plain), (counts.plain, counts.ours))]
        fails = [
            f"{side} fails: {why}" for side, why in (("plain", counts.plain_fails), ("ours", counts.ours_fails)) if why
        ]
        both = bool(counts.plain and counts.ours)
        lines.append((name, *totals, *(only if both else ("", "")), "; ".join(fails).replace("|", "/")))
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{time.strftime('%Y-%m-%d')}\n\n{table}\n\nMachine: {machine()}. Versions: {versions_line()}.\n"


def _only(operators: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in operators.items() if name not in others}


FORM: Final = TypeAdapter(Counts)


if __name__ == "__main__":
    main()
