"""From names and options to steps: what `passes.recipe` of a configuration means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from passes.base import Step
from passes.catalog import OWN_STEPS
from passes.errors import PolicyMistake
from passes.external import onnxoptimizer
from passes.external.onnxoptimizer import OnnxOptimizerPass
from passes.external.onnxscript import OnnxScriptOptimizer
from passes.external.onnxsim import OnnxSim
from passes.names import nearest

__all__ = ["DEFAULT_RECIPE", "RecipeItem", "steps_of"]

RecipeItem = str | Mapping[str, Mapping[str, Any] | None]

DEFAULT_RECIPE: Final = ("default", "onnxsim")


def steps_of(recipe: Sequence[RecipeItem]) -> tuple[Step, ...]:
    """The steps of a recipe, in order.

    An item is a name, or a mapping of one name to its options. `default` stands for onnxoptimizer's
    fuse-and-eliminate set.

    Raises:
        PolicyMistake: no such pass (naming the nearest), or an option that the pass does not take.
    """
    steps: list[Step] = []
    for item in recipe:
        name, options = _name_and_options(item)
        if name == "default":
            _refuse_options(name, options)
            steps.extend(OnnxOptimizerPass(each) for each in onnxoptimizer.default_set())
        else:
            steps.append(_step(name, options))
    return tuple(steps)


def _step(name: str, options: Mapping[str, Any]) -> Step:
    if name in _WITH_FREE_OPTIONS:
        return _WITH_FREE_OPTIONS[name](options)
    if name in OWN_STEPS:
        try:
            return OWN_STEPS[name](**options)
        except TypeError as error:
            raise PolicyMistake(f"pass {name!r} does not take these options: {error}") from error
    available = onnxoptimizer.available()
    if name in available:
        _refuse_options(name, options)
        return OnnxOptimizerPass(name)
    raise PolicyMistake(
        f"no pass named {name!r}{nearest(name, ('default', *OWN_STEPS, *available))} "
        "(`onnxline passes` lists what this installation has)"
    )


def _name_and_options(item: RecipeItem) -> tuple[str, Mapping[str, Any]]:
    if isinstance(item, str):
        return item, {}
    if len(item) != 1:
        raise PolicyMistake(f"a recipe step with options is a mapping of one name, found {sorted(item)}")
    ((name, options),) = item.items()
    return name, options or {}


def _refuse_options(name: str, options: Mapping[str, Any]) -> None:
    if options:
        raise PolicyMistake(f"pass {name!r} takes no options, found {', '.join(sorted(options))}")


_WITH_FREE_OPTIONS: Final[Mapping[str, Callable[[Mapping[str, Any]], Step]]] = {
    "onnxsim": OnnxSim,
    "onnxscript": OnnxScriptOptimizer,
}
"""Steps that hand their options on to the library, which knows them best."""
