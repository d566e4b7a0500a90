"""Make steps of the names and options in `passes.recipe` of a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_type_hints

from passes.errors import PolicyError
from passes.recipe.steps import OWN_STEPS, default_passes, known_names, single_passes
from passes.recipe.user_passes import installed_passes, is_reference, user_step, user_worker
from passes.step import Repeat, Step
from passes.suggest import nearest
from passes.worker.client import Worker

RecipeItem = str | Mapping[str, Mapping[str, Any] | None]

SEQUENCE: Final = "sequence"

UNTIL_STABLE: Final = "until-stable"


def steps_of(recipe: Sequence[RecipeItem], worker: Worker | None = None) -> tuple[Step | Repeat, ...]:
    """The steps of a recipe, in order.

    An item is a name, or a mapping of one name to its options. `default` stands for onnxoptimizer's
    fuse-and-eliminate set; `file.py:Name` and `module:Name` are passes of the user's own. A name that onnxline has
    itself is never taken from another package. Every item takes the option `repeat: until-stable`, and
    `sequence: {steps: […], repeat: until-stable}` gives it to several together.

    Args:
        worker: in which passes of the user's own are loaded; by default one that is started for them.

    Raises:
        PolicyError: no such pass (naming the nearest), or an option that the pass does not take.
    """
    result: list[Step | Repeat] = []
    with user_worker(worker) as loader:
        for item in recipe:
            name, settings = _name_and_options(item)
            options = {key: value for key, value in settings.items() if key != "repeat"}
            steps = _steps(name, options, loader)
            result += [Repeat(steps)] if _repeats(name, settings) else steps
    return tuple(result)


def _steps(name: str, options: Mapping[str, Any], loader: Worker) -> tuple[Step, ...]:
    if name == "default":
        _refuse_options(name, options)
        return default_passes()
    if name == SEQUENCE:
        inner = steps_of(_inner_items(options), loader)
        if any(isinstance(step, Repeat) for step in inner):
            raise PolicyError(f"{SEQUENCE}: found repeat inside of another one; expected it around all the steps")
        return tuple(step for step in inner if not isinstance(step, Repeat))
    return (_step(name, options, loader),)


def _inner_items(options: Mapping[str, Any]) -> Sequence[RecipeItem]:
    steps = options.get("steps")
    if set(options) != {"steps"} or not isinstance(steps, list | tuple) or not steps:
        raise PolicyError(
            f"{SEQUENCE}: found {dict(options)!r}, expected steps: a list, as in "
            "{sequence: {steps: [eliminate_identity, onnxsim], repeat: until-stable}}"
        )
    return steps


def _repeats(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the item asks for a fixed point."""
    if "repeat" not in options:
        return False
    if options["repeat"] != UNTIL_STABLE:
        raise PolicyError(f"{name}: repeat is {options['repeat']!r}; expected {UNTIL_STABLE!r}")
    return True


def names_of(recipe: Sequence[RecipeItem]) -> tuple[str, ...]:
    """The names in a recipe, as written, including the names inside of sequences."""
    names: list[str] = []
    for item in recipe:
        name, options = _name_and_options(item)
        inner = options.get("steps", ()) if name == SEQUENCE else ()
        names += [name, *(names_of(inner) if isinstance(inner, list | tuple) else ())]
    return tuple(names)


def _step(name: str, options: Mapping[str, Any], loader: Worker) -> Step:
    if name in OWN_STEPS:
        return _own_step(name, options)
    single = next((step for step in single_passes() if step.name == name), None)
    if single is not None:
        _refuse_options(name, options)
        return single
    others = installed_passes()
    if is_reference(name) or name in others:
        return user_step(name, options, loader)
    raise PolicyError(
        f"no pass named {name!r}{nearest(name, ('default', SEQUENCE, *known_names(), *others))} "
        "(`onnxline passes` lists what this installation has)"
    )


def _own_step(name: str, options: Mapping[str, Any]) -> Step:
    step_type = OWN_STEPS[name]
    if not step_type.hands_on_options:
        _check_fields(name, step_type, options)
    return step_type.from_options(options)


def _check_fields(name: str, step_type: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that are no fields of a step, a dataclass, or that have another type."""
    takes = [field.name for field in dataclasses.fields(step_type) if field.init and field.name != "left_out"]
    for option in options:
        if option not in takes:
            hint = nearest(option, takes) or f"; it has: {', '.join(takes) or 'none'}"
            raise PolicyError(f"pass {name!r} does not take these options: no option {option!r}{hint}")
    types = get_type_hints(step_type)
    for option, value in options.items():
        if types[option] in EXPECTED and not _has_type(value, types[option]):
            raise PolicyError(f"pass {name!r}: {option} is {value!r}; expected {EXPECTED[types[option]]}")


def _has_type(value: object, expected: Any) -> bool:
    """`isinstance`, except that true is not an integer."""
    return isinstance(value, expected) and (not isinstance(value, bool) or expected is bool)


EXPECTED: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "an integer",
    int | None: "an integer or null",
    int | float: "a number",
    int | float | None: "a number or null",
}


def _name_and_options(item: RecipeItem) -> tuple[str, Mapping[str, Any]]:
    if isinstance(item, str):
        return item, {}
    if not isinstance(item, Mapping):
        raise PolicyError(f"recipe holds {item!r}, expected the name of a pass, or one name with its options")
    if len(item) != 1:
        raise PolicyError(f"a recipe step with options is a mapping of one name, found {sorted(item)}")
    ((name, options),) = item.items()
    return name, options or {}


def _refuse_options(name: str, options: Mapping[str, Any]) -> None:
    if options:
        raise PolicyError(f"pass {name!r} takes no options, found {', '.join(sorted(options))}")
