"""Recipes: the steps that a recipe can name, one row each, and steps made of the names and options in `passes.recipe`
of a configuration.

The module of a step is imported when its class is first asked for: to make all classes takes a tenth of a second, and a
run needs a few.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from passes.context import PassContext
from passes.errors import PolicyError
from passes.external import onnxoptimizer
from passes.recipe import CLEANING, EARLIER_RECIPES
from passes.recipe.user_passes import installed_passes, user_step, user_worker
from passes.step import Repeat, Step
from passes.suggest import nearest
from passes.user_files import is_reference
from passes.worker.client import Worker

if TYPE_CHECKING:
    from passes.step import Step


SINGLE_PASS_LIBRARY: Final = onnxoptimizer.NAME
"""The library whose passes a recipe names one by one."""

LIBRARIES: Final = (SINGLE_PASS_LIBRARY, "onnxsim", "onnxslim", "onnxruntime", "onnxscript", "onnx", "aimet-onnx")
"""The distributions that the steps come from, besides onnxline itself."""


def single_passes() -> tuple[Step, ...]:
    """The passes of the installed release that a recipe names one by one."""
    return onnxoptimizer.passes_of(onnxoptimizer.available())


def default_passes() -> tuple[Step, ...]:
    """The passes that `default` stands for, in the order of their library."""
    return onnxoptimizer.passes_of(onnxoptimizer.default_set())


def known_names() -> tuple[str, ...]:
    """Every name of a step that needs no package of the user's own."""
    return (*onnxoptimizer.available(), *OWN_STEPS)


def pass_names(steps: Sequence[Step], context: PassContext) -> tuple[str, ...]:
    """Every name that a skip list may hold in a run of `steps`; only their libraries are asked.

    Raises:
        PolicyError: a library that a step needs is not installed, or cannot be asked.
    """
    names = [*known_names()]
    for step in steps:
        names.append(step.name)
        names += [f"{step.name}/{name}" for name in step.known_inner(context)]
    return tuple(dict.fromkeys(names))


def library_versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Name → version of the libraries whose release can change a result, and of `more`, where they are installed."""
    names = dict.fromkeys(("onnx", "onnx_ir", *LIBRARIES, "numpy", "protobuf", *more))
    versions = {}
    for name in names:
        try:
            versions[name] = _version_of(metadata.distribution(name))
        except metadata.PackageNotFoundError:
            continue
    return versions


def _version_of(found: metadata.Distribution) -> str:
    """Its version by one line of its metadata; `Distribution.version` parses all of it, 3 ms each."""
    line = VERSION.search(found.read_text("METADATA") or "")
    return found.version if line is None else line[1]


VERSION: Final = re.compile(r"^Version: *(\S+)$", re.MULTILINE)


RecipeItem = str | Mapping[str, Mapping[str, Any] | None]

SETS: Final[Mapping[str, tuple[str, ...]]] = {"clean": CLEANING, **EARLIER_RECIPES}
"""Name in a recipe → the items that it stands for."""

SEQUENCE: Final = "sequence"

UNTIL_STABLE: Final = "until-stable"


def steps_of(recipe: Sequence[RecipeItem], worker: Worker | None = None) -> tuple[Step | Repeat, ...]:
    """The steps of a recipe, in order.

    Args:
        recipe: items, each a name, or a mapping of one name to its options. `default` stands for onnxoptimizer's
            fuse-and-eliminate set, `clean` for our steps that only remove operators, and `default@0.1` for the default
            recipe that release 0.1 had for an ONNX file; `file.py:Name` and `module:Name` are passes of the user's own.
            A name that onnxline has itself is never taken from another package. Every item takes the option `repeat:
            until-stable`, and `sequence: {steps: […], repeat: until-stable}` gives it to several together.
        worker: in which passes of the user's own are loaded; by default one that is started for them.

    Returns:
        The steps; steps that repeat together are one `Repeat`.

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
    if name in SETS:
        _refuse_options(name, options)
        return tuple(step for item in SETS[name] for step in _steps(item, {}, loader))
    if name == SEQUENCE:
        inner = steps_of(_inner_items(options), loader)
        if any(isinstance(step, Repeat) for step in inner):
            raise PolicyError(f"{SEQUENCE}: found a repeat inside of a repeat; expected one around all the steps")
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


def library_imports(names: Iterable[str]) -> tuple[Callable[[], None], ...]:
    """The functions with which a worker imports the libraries of steps; none for steps whose library takes no time.

    Args:
        names: of steps, as in a recipe.
    """
    used = (OWN_STEPS[name].import_library for name in names if name in OWN_STEPS)
    return tuple(dict.fromkeys(function for function in used if function is not Step.import_library))


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
    if name in NO_STEPS:
        raise PolicyError(f"{name} is a command and no step: {NO_STEPS[name]}")
    raise PolicyError(
        f"no pass named {name!r}{nearest(name, ('default', *SETS, SEQUENCE, *known_names(), *others))} "
        "(`onnxline passes` lists what this installation has)"
    )


NO_STEPS: Final[Mapping[str, str]] = {
    "to-int8": "its result is not equal within a tolerance, by which a recipe is proven; quantize the final model, by "
    "onnxline to-int8 MODEL -o OUT, or by the section quantsim of a configuration",
    "split": "it makes several models; run onnxline split OUT -o DIR on the final model, or name one part by the step "
    "extract",
}
"""Commands that a user may look for among the steps → why there is none, and what to do."""


def _own_step(name: str, options: Mapping[str, Any]) -> Step:
    step_type = OWN_STEPS[name]
    if not step_type.hands_on_options:
        check_fields(name, step_type, options)
    return step_type.from_options(options)


def check_fields(name: str, step_type: Any, options: Mapping[str, Any], where: str = "pass") -> None:
    """Refuse options that are no fields of a step, a dataclass, or that have another type.

    Args:
        name: of the step.
        step_type: its class.
        options: by name.
        where: how the message begins: `pass`, or the key of a configuration that lists the step.
    """
    takes = options_of(step_type)
    for option in options:
        if option not in takes:
            hint = nearest(option, takes) or f"; it has: {', '.join(takes) or 'none'}"
            raise PolicyError(f"{where} {name!r} does not take these options: no option {option!r}{hint}")
    types = get_type_hints(step_type)
    for option, value in options.items():
        if types[option] in EXPECTED and not _has_type(value, types[option]):
            raise PolicyError(f"{where} {name!r}: {option} is {value!r}; expected {EXPECTED[types[option]]}")


def options_of(step_type: Any) -> list[str]:
    """The names of the options of a step, a dataclass, that does not hand options on."""
    return [field.name for field in dataclasses.fields(step_type) if field.init and field.name != "left_out"]


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


class StepTypes(Mapping[str, "type[Step]"]):
    """Name of a step → its class.

    Args:
        homes: name of a step → `room.module.Class` in this package.
    """

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = dict(homes)

    def __getitem__(self, name: str) -> type[Step]:
        module, _, class_name = self._homes[name].rpartition(".")
        return getattr(importlib.import_module(f"{PACKAGE}.{module}"), class_name)

    def __contains__(self, name: object) -> bool:
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


PACKAGE: Final = __name__.rpartition(".recipe.")[0]

OWN_STEPS: Final = StepTypes(
    {
        "onnxsim": "external.onnxsim.OnnxSim",
        "onnxslim": "external.onnxslim.OnnxSlim",
        "onnxruntime": "external.onnxruntime_graph.OnnxRuntimeGraph",
        "onnxruntime_fusions": "external.onnxruntime_graph.OnnxRuntimeFusions",
        "onnxscript": "external.onnxscript.OnnxScriptOptimizer",
        "onnxscript_rewrites": "external.onnxscript.OnnxScriptRewrites",
        "infer_shapes": "rewrites.convert_opset.InferShapes",
        "fold_constants": "rewrites.fold_constants.FoldConstants",
        "split-qkv": "rewrites.split_merged.SplitQkv",
        "split-gate-up": "rewrites.split_merged.SplitGateUp",
        "clamp-mask": "rewrites.clamp_mask.ClampMask",
        "untie": "rewrites.untie.Untie",
        "tie": "rewrites.untie.Tie",
        "decompose-attention": "rewrites.attention_operators.DecomposeAttention",
        "convert-opset": "rewrites.convert_opset.ConvertOpset",
        "fix-defaults": "rewrites.fold_constants.FixDefaults",
        "fold-batchnorm": "rewrites.fold_batchnorm.FoldBatchnorm",
        "smooth-quant": "rewrites.smooth_quant.SmoothQuant",
        "awq": "rewrites.smooth_quant.Awq",
        "cross-layer-equalization": "external.preparation.CrossLayerEqualization",
        "rotate": "external.preparation.Rotate",
        "drop-softmax-guard": "rewrites.softmax_guard.DropSoftmaxGuard",
        "fold-shape": "rewrites.fold_shape.FoldShape",
        "merge-layout": "rewrites.merge_layout.MergeLayout",
        "fold-scale": "rewrites.fold_scale.FoldScale",
        "canonical-attention": "rewrites.canonical_attention.CanonicalAttention",
        "canonical-norm": "rewrites.canonical_parts.CanonicalNorm",
        "canonical-gelu": "rewrites.canonical_parts.CanonicalGelu",
        "canonical-rope": "rewrites.canonical_rope.CanonicalRope",
        "linear-to-conv": "rewrites.npu_forms.LinearToConv",
        "mha-to-sha": "rewrites.npu_forms.MhaToSha",
        "no-int64": "rewrites.npu_forms.NoInt64",
        "to-4d": "rewrites.four_axes.To4d",
        "to-nhwc": "rewrites.channels_last.ToNhwc",
        "extract": "rewrites.interface.Extract",
        "outputs": "rewrites.interface.ChangeOutputs",
        "rename": "rewrites.interface.Rename",
        "fix-shapes": "rewrites.interface.FixShapes",
        "change-batch": "rewrites.interface.ChangeBatch",
        "to-fp16": "rewrites.half_precision.ToFp16",
        "to-bf16": "rewrites.half_precision.ToBf16",
        "to-float32": "rewrites.to_float32.ToFloat32",
        "to-matmul-nbits": "rewrites.matmul_nbits.ToMatMulNBits",
        "from-matmul-nbits": "rewrites.matmul_nbits.FromMatMulNBits",
        "take-weights": "rewrites.take_weights.TakeWeights",
        "merge": "rewrites.merge.Merge",
        "lora-inputs": "rewrites.lora_inputs.LoraInputs",
    }
)
"""Name in a recipe → the class of the step, in the order of the catalogue."""
