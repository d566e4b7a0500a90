"""What is known of passes by their names: their groups, for `skip:`, and the structures that they destroy.

A group is a set of globs, so it holds for releases yet to come. One is not: `unsafe` holds the names that an audit of
the installed releases has found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Final

from passes.advisories.known import QUARANTINE, quarantined_passes
from passes.recipe.steps import STEP_TYPES


def in_group(group: str, pass_name: str) -> bool:
    """Whether the pass called `pass_name` (`fuse_qkv` or `onnxsim/fuse_qkv`) belongs to `group`; False where there
    is no such group.

    A glob with a `/` matches the passes inside one step; one without matches the pass of that name anywhere. Case does
    not count, since some libraries write `FusionConvBN`. `unsafe` holds whole names, as the catalogue has them.
    """
    if pass_name in quarantined_passes(group):
        return True
    name = pass_name.lower()
    bare = name.rpartition("/")[2]
    return any(fnmatchcase(name if "/" in glob else bare, glob) for glob in GROUPS.get(group, ()))


def groups_of(pass_name: str) -> tuple[str, ...]:
    """Every group that `pass_name` belongs to."""
    return tuple(group for group in ALL_GROUPS if in_group(group, pass_name))


GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    # Several operators become one.
    "fusions": (
        "fuse*",
        "*fusion*",
        "fold-batchnorm",
        "onnxruntime_fusions/enable_[!s]*",
        "onnxruntime_fusions/enable_skip_*",
        "successive_*",
        "m[ai][nx]_m[ai][nx]_rule",
    ),
    # What changes nothing, is there twice, or is read by nothing, goes.
    "eliminations": (
        "eliminat*",
        "*elimination",
        "*remover",
        "remove_*",
        "no_op_*",
        "dropout_*",
        "*_by_1_rule",
        "*_0_rule",
        "weight_tying",
        "constantsharing",
    ),
    # The same, written with other operators.
    "rewrites": (
        "rewrite_*",
        "replace_*",
        "adjust_*",
        "defuse_*",
        "decompose-*",
        "explicit_*",
        "*_to_mul",
        "normalize_*",
        "slice_split_rule",
        "*quantrewrite",
        "dilated_conv_to_taps",
        "gemm_transa_to_transpose",
        "maxpool_rowmajor_*",
        "rank0_to_rank1",
        "split_large_gather",
    ),
    # Shapes and the order of axes.
    "layout": (
        "*[!v]_transpose*",  # not of conv_transpose, which is an operator of its own
        "*elimination*transpose*",
        "transposeoptimizer*",
        "*[lm]transpose*",
        "*_reshape*",  # not PreShapeNode
        "*elimination*reshape*",
        "fusion*reshape*",
        "reshapefusion",
        "*squeeze*",
        "*flatten*",
        "*expand*",
        "rank0_to_rank1",
        "fuse_matmul_into_conv",
        "fuse_matmul_add_bias_into_gemm_batched",
    ),
    # What depends on constants alone is computed.
    "folding": (
        "constant_folding",
        "constantfolding",
        "fold_constants",
        "*_with_const_*",
        "*_on_constant",
        "eliminate_shape_gather",
        "eliminate_shape_op",
        "eliminate_slice_after_shape",
        "eliminate_sequence_length_construct",
        "eliminate_optional_has_element",
        "fuse_concat_into_reshape",
    ),
    # Weights or values in fewer bits or another dtype, pruned or approximated, and what prepares or rearranges that.
    "quantizing": (
        "*quant*",
        "*qdq*",
        "*dummydq",
        "*nbits*",
        "*qordered*",
        "*integer_to_float",
        "*integertofloat*",
        "gguf_*",
        "ibert_*",
        "magnitude_pruning_*",
        "float16_to_float32",
        "adpq",
        "any_precision_llm",
        "aqlm",
        "cross_layer_equalization",
        "d2quant_dsq",
        "deepseek_fp8",
        "drop_by_drop",
        "fp6_llm",
        "hqq",
        "if4",
        "intactkv",
        "iq4_nl",
        "kbvq_moe",
        "llm_fp4",
        "lo_bcq",
        "nf4",
        "olive",
        "qoq",
        "quarot",
        "quip_sharp",
    ),
}
"""Group → globs over names of passes, in lower case. A pass may be in several groups, or in none."""

ALL_GROUPS: Final = (*GROUPS, QUARANTINE)


def merging(kinds: Collection[str]) -> frozenset[str]:
    """The passes that destroy structures of `kinds` wherever they find them."""
    return frozenset(name for name, broken in DESTROYS.items() if not set(broken).isdisjoint(kinds)) - OF_EQUALS


OF_EQUALS: Final = frozenset(name for step_type in STEP_TYPES for name in step_type.destroys_equals)
"""Passes that destroy a structure only where it has two equal parts, and are useful everywhere else."""

_KNOWN: Final = {name: kinds for step_type in STEP_TYPES for name, kinds in step_type.destroys.items()}

DESTROYS: Final[Mapping[str, tuple[str, ...]]] = {
    name: _KNOWN[name] for name in sorted(_KNOWN, key=lambda name: name in OF_EQUALS)
}
"""Pass → kinds, as the adapter of each library knows them. Skipping one of them watches the structure, whatever
destroys it under another name; and these are suspected first, in this order, when a composite step has broken one."""
