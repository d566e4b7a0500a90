"""A diff in words, for a person: short where many entries say the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from passes.diff.found import Diff, NodeLabel
from passes.diff.numbers import Numbers
from passes.proof.numbers import Errors

__all__ = ["diff_text", "numbers_text", "summary"]

MOST: Final = 20
"""Entries of one kind that are written out."""


def summary(diff: Diff) -> str:
    """One line: `12 removed, 1 added, 3 rewired`."""
    counts = {
        "removed": len(diff.removed),
        "added": len(diff.added),
        "with other attributes": len({one.node for one in diff.attributes}),
        "rewired": len({one.node for one in diff.rewired}),
        "of the stored tensors": len(diff.initializers),
        "of the model itself": len(diff.header),
        "of equal values read otherwise": len(diff.shared),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "no difference"


def diff_text(diff: Diff, *, names: bool = False, most: int = MOST) -> str:
    """Sections with an entry a line, `most` of each; with `names` also what was only renamed."""
    return "\n".join(_lines(diff, names, most)) + "\n"


def _lines(diff: Diff, names: bool, most: int) -> Iterator[str]:
    yield summary(diff)
    yield from _section("model", diff.header, most)
    if diff.replaced:
        yield from _section(f"nodes: {_ops(diff.removed, diff.added)}", diff.replaced, most)
    yield from _section("attributes", diff.attributes, most)
    yield from _section("inputs of nodes", diff.rewired, most)
    yield from _section("initializers", diff.initializers, most)
    yield from _section("which of equal values is read", diff.shared, most)
    if names:
        yield from _section("renamed, which is no difference", diff.renamed, most)


def _ops(removed: Sequence[NodeLabel], added: Sequence[NodeLabel]) -> str:
    """`Identity -25, Gemm +1`."""
    counts = Counter(node.op for node in added)
    counts.subtract(node.op for node in removed)
    told = [f"{op} {count:+d}" for op, count in sorted(counts.items()) if count]
    return ", ".join(told) or "as many of each operator"


def _section(title: str, entries: Sequence[object], most: int) -> Iterator[str]:
    if not entries:
        return
    yield ""
    yield title
    for entry in entries[:most]:
        yield f"  {entry}"
    if len(entries) > most:
        yield f"  and {len(entries) - most} more"


def numbers_text(numbers: Numbers | None, why: str = "", *, most: int = MOST, title: str = "numbers") -> str:
    """How far outputs are apart, and the inner values that are; empty if nothing was run."""
    if numbers is None:
        return f"\nno numbers: {why}\n" if why else ""
    lines = ["", title, *(f"  output {name}: {_distance(errors)}" for name, errors in numbers.outputs.items())]
    if numbers.values:
        apart = [one for one in numbers.values if one.errors.max_abs or not one.errors.ok]
        lines.append(
            f"  of {len(numbers.values)} values between, {len(numbers.values) - len(apart)} are equal in every bit"
        )
        lines.extend(f"  {one.after}: {_distance(one.errors)}" for one in apart[:most])
        if len(apart) > most:
            lines.append(f"  and {len(apart) - most} more")
        if numbers.first_apart is not None:
            lines.append(f"  the first out of tolerance is {numbers.first_apart.after}")
    return "\n".join(lines) + "\n"


def _distance(errors: Errors) -> str:
    if errors.ok and not errors.max_abs:
        return "equal in every bit"
    told = f"max error {errors.max_abs:.3g}, relative {errors.max_rel:.3g}, SQNR {errors.sqnr_db:.1f} dB"
    return told if errors.ok else f"{told}; {errors.why}"
