"""Compare two models by structure: what each pair of matched nodes has otherwise, and what has no counterpart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from passes.diff.attributes import attribute_changes
from passes.diff.found import Diff, Replacement
from passes.diff.header import header_changes
from passes.diff.initializers import Stored, initializer_changes
from passes.diff.inputs import input_changes
from passes.diff.labels import label_of
from passes.diff.matched import Matched, match_models
from passes.diff.renamed import renamings
from passes.diff.whole import function_changes, output_changes, sharing_changes
from passes.model.canonical import CanonicalGraph
from passes.weights.detached import DetachedModel

__all__ = ["compare_matched", "compare_models"]


def compare_models(
    before: DetachedModel, after: DetachedModel, readings: tuple[CanonicalGraph, CanonicalGraph] | None = None
) -> Diff:
    """What `after` has otherwise than `before`; `readings` are theirs, if they have been read already.

    Nodes are matched by what they compute, so other names, another order of independent nodes and other metadata are no
    difference. A node that only computes something else because of what it reads is none either.
    """
    return compare_matched(match_models(before, after, readings))


def compare_matched(matched: Matched) -> Diff:
    """`compare_models`, of models that have been matched."""
    attributes, rewired = [], []
    stored: list[Stored] = []
    for old, new in matched.pairs():
        item, old_item = matched.same.after.items[new], matched.same.before.items[old]
        attributes.extend(attribute_changes(matched, item, old_item))
        changed, tensors = input_changes(matched, item, old_item)
        rewired.extend(changed)
        stored.extend(tensors)
    header = header_changes(matched.before.proto, matched.after.proto)
    found = Diff(
        replaced=tuple(_replacements(matched, stored)),
        attributes=tuple(attributes),
        rewired=tuple(rewired),
        initializers=tuple(initializer_changes(matched, stored)),
        header=(*header, *function_changes(matched), *output_changes(matched)),
        renamed=tuple(dict.fromkeys(renamings(matched))),
    )
    return found if not found.is_empty else replace(found, shared=tuple(sharing_changes(matched)))


def _replacements(matched: Matched, stored: Sequence[Stored]) -> Iterator[Replacement]:
    before, after = matched.same.before, matched.same.after
    names: dict[int, dict[str, None]] = {}
    """Node that computed a constant → the initializers that hold it now."""
    for old, new in stored:
        if old not in before.tensors and new in after.tensors:
            names.setdefault(before.makers[old], {})[after.names[new]] = None
    for olds, news in matched.groups:
        yield Replacement(
            tuple(label_of(before.items[old].node) for old in olds),
            tuple(label_of(after.items[new].node) for new in news),
            tuple(name for old in olds for name in names.get(old, ())),
        )
