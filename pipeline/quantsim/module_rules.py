"""Rules for tensors as rules for modules: what is suggested is read by people, who know the modules of their model."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping

from pipeline.config import FormatsConfig
from pipeline.quantsim.placement import PlacedSite, Placement


def name_modules(
    rules: Mapping[str, FormatsConfig], place_with: Callable[[Mapping[str, FormatsConfig]], Placement]
) -> dict[str, FormatsConfig]:
    """The rules with one for a module in place of those for its tensors, outermost modules first.

    Args:
        rules: selector → formats; `tensor:NAME` with the name of one tensor.
        place_with: the placement of the model with such rules.

    Returns:
        Rules that place every tensor as `rules` do: those for modules, and after these the ones for what is left.
        They are `rules` themselves where modules would place a tensor otherwise.
    """
    if not rules:
        return {}
    wanted = place_with(rules)
    selectors = {placed.site.tensor: f"tensor:{glob.escape(placed.site.tensor)}" for placed in wanted.sites}
    formats = {tensor: rules[selector] for tensor, selector in selectors.items() if selector in rules}
    left, named = dict(rules), dict[str, dict[str, str]]()
    for (kind, members), path in sorted(_find_candidates(wanted).items(), key=lambda item: -len(item[0][1])):
        texts = {getattr(formats.get(tensor), kind, None) for tensor in members}
        text = texts.pop()
        if text is None or texts or not any(selectors[tensor] in left for tensor in members):
            continue
        named.setdefault(f"module:{glob.escape(path)}", {})[kind] = text
        for tensor in members:
            left.pop(selectors[tensor], None)
    found = {**{selector: FormatsConfig(**kinds) for selector, kinds in named.items()}, **left}
    return found if named and _decisions(place_with(found)) == _decisions(wanted) else dict(rules)


def _find_candidates(placement: Placement) -> dict[tuple[str, frozenset[str]], str]:
    """(What a rule gives formats of, the tensors that it decides) → the innermost module that has just these tensors.

    A bias is decided by its products; where one has to stay in float, a rule for the module would quantize it.
    """
    modules: dict[str, list[PlacedSite]] = {}
    for placed in placement.sites:
        for path in filter(None, () if placed.site.body_of else placed.site.modules):
            modules.setdefault(path, []).append(placed)
    found: dict[tuple[str, frozenset[str]], str] = {}
    for path, sites in modules.items():
        weights = frozenset(placed.site.tensor for placed in sites if placed.site.role == "weight")
        others = frozenset(placed.site.tensor for placed in sites if placed.site.role not in ("weight", "bias"))
        if weights:
            found["weights", weights] = path
        if others and all(placed.precision for placed in sites if placed.site.role == "bias"):
            found["activations", others] = path
    return found


def _decisions(placement: Placement) -> list[object]:
    """What is decided of each tensor, whichever rule says it."""
    return [(placed.site, placed.precision, placed.limits) for placed in placement.sites]
