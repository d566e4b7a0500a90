"""Claims that values of a changed model equal values of the model before: what has to be run is no more than these.

After most changes a model differs in a few places, and behind each of them the same operators run on the same values,
if only the values at those places are the same. So each place becomes a claim, `new is old`. With the claims taken for
granted, the outputs of both models have to have one meaning; then it is enough to run the changed nodes, on values of
the model before, and to find each claim true bit for bit. Claims rest only on claims that come before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from onnx import NodeProto

from passes.model.canonical import Meanings, Reading
from passes.model.weights import DetachedModel
from passes.proof.base import Base, is_opaque

__all__ = ["Claim", "Claims", "Refinement", "claims_by_name", "claims_refined"]


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
    pairs = Refinement(base, claims).smallest_pairs()
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


@dataclass(slots=True)
class Refinement:
    """Finds the smallest values that have to be equal for `claims` to hold.

    A residual stream has a path for every subset of its layers, so each pair of values is looked at once; `visits`
    counts them.
    """

    base: Base
    claims: Claims
    visits: int = 0
    producers: Mapping[str, NodeProto] = field(init=False)

    def __post_init__(self) -> None:
        graph = self.claims.after.proto.graph
        self.producers = {name: node for node in graph.node for name in node.output if name}

    def smallest_pairs(self) -> dict[str, str]:
        """New value → the old one that it has to equal."""
        pairs: dict[str, str] = {}
        visited: set[tuple[str, str]] = set()
        stack = [(claim.new, claim.old) for claim in reversed(self.claims.claims)]
        while stack:
            pair = stack.pop()
            if pair in visited:
                continue
            visited.add(pair)
            self.visits += 1
            operands = self._differing_operands(*pair)
            if operands:
                stack.extend(reversed(operands))
            else:
                new, old = pair
                pairs[new] = old
        return pairs

    def _differing_operands(self, new: str, old: str) -> list[tuple[str, str]]:
        """The pairs of computed operands by which two results of one operation differ; empty where that is not all."""
        left, right = self.producers.get(new), self.base.producers.get(old)
        if (
            left is None
            or right is None
            or not _same_operation(left, right)
            or _places(left, new) != _places(right, old)
        ):
            return []
        meaning = self.claims.meanings.values
        differing = [
            (one, other)
            for one, other in zip(left.input, right.input, strict=True)
            if meaning.get(one) != self.base.meanings.values.get(other)
        ]
        computed = all(one in self.producers and other in self.base.producers for one, other in differing)
        return differing if computed else []


def _same_operation(left: NodeProto, right: NodeProto) -> bool:
    if (left.domain, left.op_type, len(left.input)) != (right.domain, right.op_type, len(right.input)):
        return False
    return not is_opaque(left) and _attributes(left.attribute) == _attributes(right.attribute)


def _attributes(attributes: Iterable) -> list[bytes]:
    return sorted(one.SerializeToString(deterministic=True) for one in attributes)


def _places(node: NodeProto, name: str) -> list[int]:
    return [index for index, output in enumerate(node.output) if output == name]
