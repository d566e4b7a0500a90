"""Format a diff as text, for a person, and as plain data, for JSON."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from passes.diff.layers import LayerErrors
from passes.diff.numbers import Numbers
from passes.diff.types import Diff, NodeLabel, Replacement
from passes.errors import check_type
from passes.proof.numbers import DRAWN, ROUNDING, Errors
from passes.suggest import join_first
from passes.visible import visible_line

MOST: Final = 20
"""Entries of one kind that are written out."""

MOST_NODES: Final = 6
"""Nodes on one side of an entry that are written out."""

LONGEST: Final = 240
"""Characters of one line."""

NOTE: Final = 40
"""Characters that a cut has to save: the words in its place are nearly as many."""


def summarize(diff: Diff) -> str:
    """One line: `12 removed, 1 added, 3 rewired`."""
    counts = {
        "removed": len(diff.removed),
        "added": len(diff.added),
        "with other attributes": len({change.node for change in diff.attributes}),
        "rewired": len({change.node for change in diff.rewired}),
        "{changes} of the stored tensors": len(diff.initializers),
        "quantized": len(diff.quantized),
        "quantized otherwise": len(diff.requantized),
        "{changes} of the model itself": len(diff.header),
        "equal values rewired": len(diff.shared),
    }
    texts = [
        f"{count} {what.format(changes='change' if count == 1 else 'changes')}"
        for what, count in counts.items()
        if count
    ]
    return ", ".join(texts) or "no difference"


def diff_text(diff: Diff, *, names: bool = False, most: int | None = MOST) -> str:
    """Write a diff as text: sections with an entry a line.

    Args:
        diff: what `compare_models` returns.
        names: list renamed nodes and values too.
        most: the most entries of a section; None for all entries, in full.
    """
    check_type(diff, Diff, "diff_text: diff", "a Diff, as compare_models returns")
    return "\n".join(map(visible_line, _lines(diff, names, most))) + "\n"


def _lines(diff: Diff, names: bool, most: int | None) -> Iterator[str]:
    yield summarize(diff)
    for name, entries in diff.sections().items():
        title = f"nodes: {_ops(diff.removed, diff.added)}" if name == "nodes" else name
        if name == "nodes" and most is not None:
            entries = _group_removed(diff.replaced)
        yield from _section(title, entries, most)
    if names:
        yield from _section("renamed, which is no difference", diff.renamed, most)


def _group_removed(replaced: Sequence[Replacement]) -> list[Replacement]:
    """`replaced`, with nodes that were only removed grouped into one entry for each operator, at the end."""
    entries, removed = list[Replacement](), dict[str, list[NodeLabel]]()
    for replacement in replaced:
        if replacement.added or replacement.stored:
            entries.append(replacement)
        else:
            for node in replacement.removed:
                removed.setdefault(node.op, []).append(node)
    return [*entries, *(Replacement(tuple(nodes), ()) for nodes in removed.values())]


def _ops(removed: Sequence[NodeLabel], added: Sequence[NodeLabel]) -> str:
    """`Identity -25, Add +1`."""
    counts = Counter(node.op for node in added)
    counts.subtract(node.op for node in removed)
    texts = [f"{op} {count:+d}" for op, count in sorted(counts.items()) if count]
    return ", ".join(texts) or "as many of each operator"


def _section(title: str, entries: Sequence[object], most: int | None) -> Iterator[str]:
    if not entries:
        return
    yield ""
    yield title
    for entry in entries[:most]:
        yield f"  {_entry(entry, is_cut=most is not None)}"
    if most is not None and len(entries) > most:
        yield f"  and {len(entries) - most} more"


def _entry(entry: object, *, is_cut: bool) -> str:
    if not is_cut:
        return str(entry)
    if isinstance(entry, Replacement):  # fewer nodes, rather than a name that is cut
        texts = [entry.text(most) for most in range(MOST_NODES, 0, -1)]
        text = next((text for text in texts if len(text) <= LONGEST), texts[-1])
    else:
        text = str(entry)
    if len(text) <= LONGEST + NOTE:
        return text
    half = LONGEST // 2
    return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"


def numbers_text(numbers: Numbers | None, why: str = "", *, most: int | None = MOST, title: str = "numbers") -> str:
    """The errors of outputs and of inner values; empty if nothing was run."""
    if numbers is None:
        return f"\nno numbers: {visible_line(why)}\n" if why else ""
    lines = ["", title, *(f"  output {name}: {distance_text(errors)}" for name, errors in numbers.outputs.items())]
    lines.extend(f"  output {name}: {UNCOMPARED}" for name in numbers.not_compared)
    if numbers.values:
        differing = [value for value in numbers.values if value.errors.max_abs or not value.errors.ok]
        lines.append(
            f"  of {len(numbers.values)} values between, {len(numbers.values) - len(differing)} are equal in every bit"
        )
        lines.extend(f"  {value.after}: {distance_text(value.errors)}" for value in differing[:most])
        if most is not None and len(differing) > most:
            lines.append(f"  and {len(differing) - most} more")
        if numbers.first_apart is not None:
            lines.append(f"  the first out of tolerance is {numbers.first_apart.after}")
    known = (*numbers.outputs.values(), *(value.errors for value in numbers.values))
    types = [dtype for dtype in dict.fromkeys(errors.judged_as for errors in known) if dtype in ROUNDING]
    if types not in ([], ["float32"]):
        lines.append(f"  {TOLERATED.format(join_first(types, MOST))}")
    lines.extend(f"  {draw}" for draw in numbers.not_run)
    if numbers.draws:
        lines.append(f"  the worst of {'; '.join(numbers.draws)}")
    return "\n".join(map(visible_line, lines)) + "\n"


def layers_text(layers: Sequence[LayerErrors], *, most: int | None = MOST) -> str:
    """A table of the layers, in order; if the table is cut, the layers with the largest errors stay."""
    if not layers:
        return "\nlayers\n  the models have no value in common at which a layer ends\n"
    indices = range(len(layers))
    if most is not None and len(layers) > most:
        indices = sorted(sorted(indices, key=lambda index: layers[index].errors.sqnr_db)[:most])
    rows = [("layer", "op", "dtype", "max abs error", "SQNR"), *(_layer_row(layers[index]) for index in indices)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if index < RIGHT else text.rjust(width) for index, (text, width) in enumerate(cells)
        )
        for cells in (zip(row, widths, strict=True) for row in rows)
    ]
    more = [f"  and {len(layers) - len(indices)} more, with smaller errors"] if len(layers) > len(indices) else []
    return "\n".join(["", "layers", *(visible_line(f"  {line.rstrip()}") for line in lines), *more]) + "\n"


def _layer_row(layer: LayerErrors) -> tuple[str, ...]:
    sqnr = "equal" if layer.errors.sqnr_db == math.inf else f"{layer.errors.sqnr_db:.1f} dB"
    return layer.layer or layer.before, layer.op, layer.dtype, f"{layer.errors.max_abs:.3g}", sqnr


RIGHT: Final = 3
"""The first column that is aligned to the right."""


TOLERATED: Final = (
    "judged by the tolerance of {}: for each value the least precise type that either model computes it in"
)

UNCOMPARED: Final = "not compared, since its values are random"


def distance_text(errors: Errors) -> str:
    """How far a value is from what was expected, as words."""
    if errors.judged_as == DRAWN and errors.ok:
        return "random values: only shape and dtype compared"
    if errors.ok and not errors.max_abs:
        return "equal in every bit"
    text = f"max error {errors.max_abs:.3g}, relative {errors.max_rel:.3g}, SQNR {errors.sqnr_db:.1f} dB"
    return text if errors.ok else f"{text}; {errors.why}"


def diff_as_data(diff: Diff) -> dict[str, Any]:
    """The fields of `Diff`, with `different` and the one line `summary`."""
    return {"different": not diff.is_empty, "summary": summarize(diff), **dataclasses.asdict(diff)}


def numbers_as_data(numbers: Numbers | None, why: str = "") -> dict[str, Any]:
    """`outputs` by name and `values` in order; `why_no_numbers` says why there are none."""
    if numbers is None:
        return {"why_no_numbers": why}
    values = [
        {"before": value.before, "after": value.after, "errors": _errors(value.errors)} for value in numbers.values
    ]
    outputs = {name: _errors(errors) for name, errors in numbers.outputs.items()}
    return {
        "outputs": outputs,
        "values": values,
        "draws": numbers.draws,
        "not_run": numbers.not_run,
        "not_compared": numbers.not_compared,
    }


def layers_as_data(layers: Sequence[LayerErrors]) -> list[dict[str, Any]]:
    """The fields of `LayerErrors`, in order."""
    return [{**dataclasses.asdict(layer), "errors": _errors(layer.errors)} for layer in layers]


def _errors(errors: Errors) -> dict[str, Any]:
    """The fields of `errors`. JSON has no infinity and no NaN: they are written as words."""
    return {
        name: value if not isinstance(value, float) or math.isfinite(value) else str(value).replace("inf", "Infinity")
        for name, value in dataclasses.asdict(errors).items()
    }
