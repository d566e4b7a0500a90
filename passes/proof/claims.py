"""Claims that values of a changed model equal values of the model before: what has to be run is no more than these.

After most changes a model differs in a few places, and behind each of them the same operators run on the same values,
if only the values at those places are the same. So each place becomes a claim, `new is old`. With the claims taken for
granted, the outputs of both models have to have one meaning; then it is enough to run the changed nodes, on values of
the model before, and to find each claim true bit for bit. Claims rest only on claims that come before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from onnx import NodeProto

from passes.model.canonical import Meanings, Reading
from passes.model.weights import DetachedModel
from passes.proof.base import Base, is_opaque

__all__ = ["Claim", "Claims", "claims_by_name", "claims_refined"]


@dataclass(frozen=True, slots=True)
class Claim:
    """Value `new` of the changed model is value `old` of the base; `digest` is what `new` means without the claim."""

    new: str
    old: str
    digest: str


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims under which `after` computes what the base does, and what its values then mean."""

    after: DetachedModel
    reading: Reading
    meanings: Meanings
    claims: tuple[Claim, ...]

    def learned(self, base: Base, equal: dict[str, str]) -> Meanings:
        """What the values of `after` mean now that the claims have been found true; adds to `equal` what that takes.

        Meanings of the base stay as they are, also when two of them turned out to be equal.
        """
        known = frozenset(base.meanings.values.values())

        def settle(name: str, digest: str) -> str:
            digest = equal.get(digest, digest)
            settled = self.meanings.values.get(name, digest)
            if digest in known or settled not in known:
                return digest
            equal[digest] = settled
            return settled

        return self.reading.meanings(settle)

    def cover(self, base: Base, names: Iterable[str]) -> bool:
        """Whether they also say that the values called `names`, where both models have them, are the same."""
        before = {claim.new: claim.digest for claim in self.claims}
        for name in names:
            now, then = self.meanings.values.get(name), base.meanings.values.get(name)
            if now is not None and then is not None and then not in (now, before.get(name)):
                return False
        return True


def claims_by_name(base: Base, after: DetachedModel, reading: Reading, equal: Mapping[str, str]) -> Claims | None:
    """Claim that every value which kept its name, and is computed in a new way, is still the same value.

    None when the outputs differ even then.
    """
    known = frozenset(base.meanings.values.values())

    def old_name(name: str, digest: str) -> str | None:
        return name if digest not in known and name in base.producers else None

    return _claimed(base, after, reading, equal, old_name)


def claims_refined(base: Base, claims: Claims, equal: Mapping[str, str]) -> Claims | None:
    """Push each claim back through nodes that are the same on both sides: `Reshape(x, a)` is `Reshape(x, b)` if a is b.

    This finds smaller values to look at. None when there is nothing to refine, or the outputs then differ.
    """
    producers = {name: node for node in claims.after.proto.graph.node for name in node.output if name}
    pairs: dict[str, str] = {}
    for claim in claims.claims:
        _refine(claim.new, claim.old, base, claims.meanings.values, producers, pairs)
    if all(claim.new in pairs for claim in claims.claims):
        return None
    return _claimed(base, claims.after, claims.reading, equal, lambda name, _: pairs.get(name))


def _claimed(
    base: Base,
    after: DetachedModel,
    reading: Reading,
    equal: Mapping[str, str],
    old_name: Callable[[str, str], str | None],
) -> Claims | None:
    claims: list[Claim] = []

    def settle(name: str, digest: str) -> str:
        digest = equal.get(digest, digest)
        old = old_name(name, digest)
        if old is None or base.meanings.values[old] == digest:
            return digest
        claims.append(Claim(name, old, digest))
        return base.meanings.values[old]

    meanings = reading.meanings(settle)
    if meanings.whole != base.meanings.whole:
        return None
    return Claims(after, reading, meanings, tuple(claims))


def _refine(
    new: str,
    old: str,
    base: Base,
    meaning: Mapping[str, str],
    producers: Mapping[str, NodeProto],
    pairs: dict[str, str],
) -> None:
    """Add to `pairs` what has to be equal for `new` to be `old`."""
    left, right = producers.get(new), base.producers.get(old)
    if left is None or right is None or not _same_operation(left, right) or _places(left, new) != _places(right, old):
        pairs[new] = old
        return
    differing = [
        (one, other)
        for one, other in zip(left.input, right.input, strict=True)
        if meaning.get(one) != base.meanings.values.get(other)
    ]
    if not differing or any(one not in producers or other not in base.producers for one, other in differing):
        pairs[new] = old
        return
    for one, other in differing:
        _refine(one, other, base, meaning, producers, pairs)


def _same_operation(left: NodeProto, right: NodeProto) -> bool:
    if (left.domain, left.op_type, len(left.input)) != (right.domain, right.op_type, len(right.input)):
        return False
    return not is_opaque(left) and _attributes(left.attribute) == _attributes(right.attribute)


def _attributes(attributes: Iterable) -> list[bytes]:
    return sorted(one.SerializeToString(deterministic=True) for one in attributes)


def _places(node: NodeProto, name: str) -> list[int]:
    return [index for index, output in enumerate(node.output) if output == name]
