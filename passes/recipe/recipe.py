"""Recipes: the steps that a recipe can name, one row each, with queries over all of them; and steps made of the names
and options in `passes.recipe` of a configuration."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, Final, get_type_hints

from passes.errors import PolicyError
from passes.external import onnxoptimizer
from passes.external.aimet_rotations import Rotate
from passes.external.onnxruntime_graph import OnnxRuntimeFusions, OnnxRuntimeGraph
from passes.external.onnxscript import OnnxScriptOptimizer, OnnxScriptRewrites
from passes.external.onnxsim import OnnxSim
from passes.external.onnxsim_equalize import CrossLayerEqualization
from passes.external.onnxslim import OnnxSlim
from passes.recipe import CLEANING, EARLIER_RECIPES
from passes.recipe.user_passes import installed_passes, user_step, user_worker
from passes.rewrites.canonical_attention import CanonicalAttention
from passes.rewrites.canonical_gelu import CanonicalGelu
from passes.rewrites.canonical_norm import CanonicalNorm
from passes.rewrites.canonical_rope import CanonicalRope
from passes.rewrites.channels_last import ToNhwc
from passes.rewrites.clamp_mask import ClampMask
from passes.rewrites.convert_opset import ConvertOpset, InferShapes
from passes.rewrites.decompose_attention import DecomposeAttention
from passes.rewrites.fold_batchnorm import FoldBatchnorm
from passes.rewrites.fold_constants import FixDefaults, FoldConstants
from passes.rewrites.fold_scale import FoldScale
from passes.rewrites.fold_shape import FoldShape
from passes.rewrites.four_axes import To4d
from passes.rewrites.half_precision import ToBf16, ToFp16
from passes.rewrites.interface import ChangeBatch, ChangeOutputs, Extract, FixShapes, Rename
from passes.rewrites.lora_inputs import LoraInputs
from passes.rewrites.matmul_nbits import FromMatMulNBits, ToMatMulNBits
from passes.rewrites.merge_layout import MergeLayout
from passes.rewrites.npu_forms import LinearToConv, MhaToSha, NoInt64
from passes.rewrites.smooth_quant import Awq, SmoothQuant
from passes.rewrites.softmax_guard import DropSoftmaxGuard
from passes.rewrites.split_merged import SplitGateUp, SplitQkv
from passes.rewrites.take_weights import TakeWeights
from passes.rewrites.untie import Tie, Untie
from passes.step import Repeat, Step
from passes.suggest import nearest
from passes.user_files import is_reference
from passes.worker.client import Worker

OWN_STEPS: Final[Mapping[str, type[Step]]] = {
    "onnxsim": OnnxSim,
    "onnxslim": OnnxSlim,
    "onnxruntime": OnnxRuntimeGraph,
    "onnxruntime_fusions": OnnxRuntimeFusions,
    "onnxscript": OnnxScriptOptimizer,
    "onnxscript_rewrites": OnnxScriptRewrites,
    "infer_shapes": InferShapes,
    "fold_constants": FoldConstants,
    "split-qkv": SplitQkv,
    "split-gate-up": SplitGateUp,
    "clamp-mask": ClampMask,
    "untie": Untie,
    "tie": Tie,
    "decompose-attention": DecomposeAttention,
    "convert-opset": ConvertOpset,
    "fix-defaults": FixDefaults,
    "fold-batchnorm": FoldBatchnorm,
    "smooth-quant": SmoothQuant,
    "awq": Awq,
    "cross-layer-equalization": CrossLayerEqualization,
    "rotate": Rotate,
    "drop-softmax-guard": DropSoftmaxGuard,
    "fold-shape": FoldShape,
    "merge-layout": MergeLayout,
    "fold-scale": FoldScale,
    "canonical-attention": CanonicalAttention,
    "canonical-norm": CanonicalNorm,
    "canonical-gelu": CanonicalGelu,
    "canonical-rope": CanonicalRope,
    "linear-to-conv": LinearToConv,
    "mha-to-sha": MhaToSha,
    "no-int64": NoInt64,
    "to-4d": To4d,
    "to-nhwc": ToNhwc,
    "extract": Extract,
    "outputs": ChangeOutputs,
    "rename": Rename,
    "fix-shapes": FixShapes,
    "change-batch": ChangeBatch,
    "to-fp16": ToFp16,
    "to-bf16": ToBf16,
    "to-matmul-nbits": ToMatMulNBits,
    "from-matmul-nbits": FromMatMulNBits,
    "take-weights": TakeWeights,
    "lora-inputs": LoraInputs,
}

STEP_TYPES: Final[Sequence[type[Step]]] = (*OWN_STEPS.values(), onnxoptimizer.OnnxOptimizerPass)
"""The class of each step; the last class stands for the passes that a recipe names one by one."""

SINGLE_PASS_LIBRARY: Final = onnxoptimizer.NAME
"""The library whose passes a recipe names one by one."""

LIBRARIES: Final = tuple(dict.fromkeys((SINGLE_PASS_LIBRARY, *(make().source for make in OWN_STEPS.values()))))
"""The distributions that the steps come from, onnxline itself among them."""


def single_passes() -> tuple[Step, ...]:
    """The passes of the installed release that a recipe names one by one."""
    return onnxoptimizer.passes_of(onnxoptimizer.available())


def default_passes() -> tuple[Step, ...]:
    """The passes that `default` stands for, in the order of their library."""
    return onnxoptimizer.passes_of(onnxoptimizer.default_set())


def known_names() -> tuple[str, ...]:
    """Every name of a step that needs no package of the user's own."""
    return (*onnxoptimizer.available(), *OWN_STEPS)


def library_versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Name → version of the libraries whose release can change a result, and of `more`, where they are installed."""
    libraries = (name for name in LIBRARIES if name != "onnxline")
    names = dict.fromkeys(("onnx", "onnx_ir", *libraries, "numpy", "protobuf", *more))
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
        f"no pass named {name!r}{nearest(name, ('default', *SETS, SEQUENCE, *known_names(), *others))} "
        "(`onnxline passes` lists what this installation has)"
    )


def _own_step(name: str, options: Mapping[str, Any]) -> Step:
    step_type = OWN_STEPS[name]
    if not step_type.hands_on_options:
        check_fields(name, step_type, options)
    return step_type.from_options(options)


def check_fields(name: str, step_type: Any, options: Mapping[str, Any]) -> None:
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
