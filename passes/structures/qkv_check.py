"""Are the projections still apart? Judged by weights alone: names may change, matrices may not.

Shares no code with the finder: it does not know what attention looks like. It looks for a product node of its own for
each kept matrix (`operand_check.py` says who reads which), and counts them, since layers may share a matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from passes.structures.base import Instance
from passes.structures.operand_check import ProductOperands
from passes.weights.detached import DetachedModel

__all__ = ["lost_projections"]


def lost_projections(instances: Sequence[Instance], model: DetachedModel) -> dict[str, str]:
    """Instance name → why it is lost. An instance stands when each of its matrices has a product node of its own.

    Layers may share a matrix. Where there are fewer products with it than instances, those instances stand whose own
    value is still such a product.
    """
    products = ProductOperands(model)
    needed = Counter(weight.digests for instance in instances for weight in instance.weights)
    reasons: dict[str, str] = {}
    for instance in instances:
        values = {weight.role: pin.name for weight, pin in zip(instance.weights, instance.pins, strict=False)}
        missing = []
        for weight in instance.weights:
            made = products.values_with(weight)
            if len(made) < needed[weight.digests] and values.get(weight.role) not in made:
                missing.append(f"{weight.role} ({weight.name})")
        if missing:
            reasons[instance.name] = f"no separate product with the matrix of {', '.join(missing)}"
    return reasons
