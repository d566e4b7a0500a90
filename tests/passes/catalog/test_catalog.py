"""The catalogue says what the installed libraries have; no words without a pass, no default pass without words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import onnxoptimizer
import onnxsim.onnxsim_cpp2py_export as native_onnxsim
import pytest

from passes.catalog import CatalogEntry, catalog, rows_of
from passes.catalog.listing import example_of, find_entries, read_example, show
from passes.context import PassContext
from passes.errors import PolicyError
from passes.external.installed import require
from passes.external.onnxoptimizer import OnnxOptimizerPass
from passes.external.onnxsim import OnnxSim
from passes.optimize import draw_feeds
from passes.policy.policy import DESTROYS, GROUPS, Policy, groups_of, in_group
from passes.recipe.recipe import OWN_STEPS, pass_names, steps_of
from passes.step import UNDESCRIBED, CompositeStep, Description, PassResult, Step, flatten
from passes.weights.detached import DetachedModel, open_model
from passes.weights.sessions import Session

Kind = TypeVar("Kind")


class Family(Step, Generic[Kind]):
    """Steps of a user's that differ by a type."""


class Marked:
    marks: ClassVar[list[str]] = []

    def __init_subclass__(cls, mark: str, **others: Any) -> None:
        super().__init_subclass__(**others)
        cls.marks.append(mark)


def test_a_step_may_have_other_bases() -> None:
    class Cleaned(Family[int], Marked, name="clean", reads="structure", mark="user"):
        """Drop nodes. Nothing reads them."""

    assert Marked.marks == ["user"] and Cleaned.name == "clean"
    assert Cleaned.description == Description("Drop nodes", "structure")


def test_a_step_without_a_docstring_says_so() -> None:
    """Python that runs with -OO leaves docstrings out."""

    class Silent(Step, name="silent", reads="values"):
        pass

    assert "no docstring" in Silent.description.does


@pytest.fixture(scope="module")
def rows(context: PassContext) -> tuple[CatalogEntry, ...]:
    return catalog(context)


def named(rows: Sequence[CatalogEntry], name: str) -> CatalogEntry:
    return next(row for row in rows if row.name == name)


def test_every_pass_is_there_once_and_those_of_the_default_sets_are_described(rows: tuple[CatalogEntry, ...]) -> None:
    names = [row.name for row in rows]
    assert len(names) == len(set(names)) > 250
    listed = [row for row in rows if row.source == "onnxoptimizer" or "/" not in row.name]
    listed += [row for row in rows if row.source == "onnxsim" and row.runs in ("default", "never")]
    assert [row.name for row in listed if not row.described] == []


def test_every_description_has_its_pass(rows: tuple[CatalogEntry, ...]) -> None:
    names = {row.name for row in rows}
    steps = [make() for make in OWN_STEPS.values() if named(rows, make().name).runs != "missing"]
    described = [*OnnxOptimizerPass.describes]
    described += [f"{step.name}/{bare}" for step in steps for bare in step.describes]
    assert "onnxsim/fuse_gqa" in described
    assert [name for name in described if name not in names] == []


def test_descriptions_are_one_short_sentence_without_a_full_stop(rows: tuple[CatalogEntry, ...]) -> None:
    described = [row for row in rows if row.described]
    odd = [row.name for row in described if row.does.endswith(".") or not row.does[0].isupper() or len(row.does) > 140]
    assert odd == []


def test_the_default_set_is_the_librarys_own(rows: tuple[CatalogEntry, ...]) -> None:
    default = [row.name for row in rows if row.source == "onnxoptimizer" and row.runs == "default"]
    assert default == list(onnxoptimizer.get_fuse_and_elimination_passes())
    assert {row.name for row in rows if row.source == "onnxoptimizer"} == set(onnxoptimizer.get_available_passes())


def test_onnxsims_passes_are_those_that_it_has_after_its_first_call(rows: tuple[CatalogEntry, ...]) -> None:
    inner = [row for row in rows if row.name.startswith("onnxsim/")]
    assert set(native_onnxsim._list_optimizers()) <= {row.bare for row in inner}
    for late in ("fuse_attention", "fuse_gqa", "fuse_rope", "fuse_matmul_add_bias_into_gemm_batched"):
        assert named(rows, f"onnxsim/{late}").runs == "default"
    assert named(rows, "onnxsim/nf4").runs == "extra"
    assert named(rows, "onnxsim/extract_constant_to_initializer").runs == "never"


def test_what_a_pass_destroys_is_listed_wherever_it_runs(rows: tuple[CatalogEntry, ...]) -> None:
    for row in rows:
        if row.name not in COMPOSITE:
            assert row.destroys == DESTROYS.get(row.bare, ()), row.name
    assert "qkv" in named(rows, "onnxsim/fuse_qkv").destroys


COMPOSITE = tuple(name for name, step_type in OWN_STEPS.items() if step_type.is_composite)


@pytest.mark.parametrize("step", COMPOSITE)
def test_a_composite_step_destroys_what_the_passes_inside_of_it_destroy(
    step: str, rows: tuple[CatalogEntry, ...]
) -> None:
    if named(rows, step).runs == "missing":
        pytest.skip(f"{step} is not installed")
    inside = {kind for row in rows if row.name.startswith(f"{step}/") for kind in row.destroys if row.runs == "default"}
    assert set(named(rows, step).destroys) == inside


@dataclass(frozen=True)
class Newer(CompositeStep):
    """A composite step of a release that nobody has read yet."""

    needs: str = "onnx"
    left_out: tuple[str, ...] = ()
    name: str = field(default="newer", init=False)
    source: str = field(default="tests", init=False)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        return PassResult(model, changed=False)

    def inner(self, context: PassContext) -> tuple[str, ...]:
        require(self.needs, self.name, extra="newer")
        return tuple(name for name in ("fuse_everything", "tidy") if name not in self.left_out)


def test_a_pass_that_nobody_described_is_shown_and_counts_as_reading_values(context: PassContext) -> None:
    rows = rows_of(Newer(), context)
    assert [row.name for row in rows] == ["newer", "newer/fuse_everything", "newer/tidy"]
    assert {(row.does, row.reads) for row in rows} == {(UNDESCRIBED.does, "values")}
    assert rows[1].groups == ("fusions",)
    assert "no picture in this release" in show(rows[1], rows, context).why_not


def test_a_library_that_is_not_installed_is_a_row_that_says_what_to_install(context: PassContext) -> None:
    [row] = rows_of(Newer(needs="no_such_library"), context)
    assert (row.name, row.runs) == ("newer", "missing")
    assert "pip install 'onnxline[newer]'" in row.note
    assert show(row, [row], context).why_not == row.note


def test_a_pass_that_a_package_announces_is_a_row_and_is_not_loaded(
    context: PassContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "tidy_passes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tidy-passes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[onnxline.passes]\nfuse_tidy = no_such_module:Tidy\n")
    monkeypatch.syspath_prepend(tmp_path)
    row = named(catalog(context, steps=()), "fuse_tidy")
    assert (row.source, row.runs, row.reads, row.groups) == ("tidy-passes", "extra", "values", ("fusions",))
    assert "no_such_module:Tidy" in row.does
    assert "no picture" in show(row, [row], context).why_not


def test_names_for_a_skip_list_ask_only_the_steps_that_run(context: PassContext) -> None:
    names = pass_names([OnnxOptimizerPass("nop"), Newer().without(["tidy"])], context)
    assert {"fuse_qkv", "nop", "onnxsim", "newer", "newer/fuse_everything", "newer/tidy"} <= set(names)
    assert not any(name.startswith("onnxsim/") for name in names)
    assert {"onnxsim/fuse_attention", "onnxsim/nf4"} <= set(pass_names([OnnxSim()], context))


def test_a_name_means_the_pass_itself_or_those_of_that_name_inside_of_steps(rows: tuple[CatalogEntry, ...]) -> None:
    assert [row.name for row in find_entries("fuse_qkv", rows)] == ["fuse_qkv"]
    assert [row.name for row in find_entries("onnxsim/fuse_qkv", rows)] == ["onnxsim/fuse_qkv"]
    assert [row.name for row in find_entries("fuse_rope", rows)] == ["onnxsim/fuse_rope"]
    with pytest.raises(PolicyError, match=r"no pass named 'fuse_qvk'; did you mean 'fuse_qkv'\?"):
        find_entries("fuse_qvk", rows)


GROUPED = [
    ("fuse_qkv", {"fusions"}),
    ("onnxsim/fuse_qkv", {"fusions"}),
    ("eliminate_nop_transpose", {"eliminations", "layout"}),
    ("fuse_consecutive_transposes", {"fusions", "layout"}),
    ("rewrite_where", {"rewrites"}),
    ("onnxsim/constant_folding", {"folding"}),
    ("fold_constants", {"folding"}),
    ("onnxsim/nf4", {"quantizing"}),
    ("onnxsim/quantize_fp16", {"quantizing"}),
    ("onnxruntime/QDQSelectorActionTransformer", {"quantizing", "unsafe"}),
    ("onnxruntime/PreShapeNodeElimination", {"eliminations"}),
    ("onnxslim/FusionConvTransposeAdd", {"fusions"}),
    ("onnxscript_rewrites/fuse_batchnorm_into_conv_transpose_rule", {"fusions"}),
    ("onnxruntime_fusions/enable_attention", {"fusions"}),
    ("nop", set()),
]


@pytest.mark.parametrize(("name", "groups"), GROUPED)
def test_groups(name: str, groups: set[str]) -> None:
    assert set(groups_of(name)) == groups
    for group in GROUPS:
        assert in_group(group, name) == (group in groups)
        assert (Policy((group,)).skips(name) is not None) == (group in groups)
    assert not in_group("no such group", name)


def test_every_glob_of_a_group_names_a_pass_of_this_installation(rows: tuple[CatalogEntry, ...]) -> None:
    for group, globs in GROUPS.items():
        lone = [glob for glob in globs if not any(in_group_of(glob, row.name) for row in rows)]
        assert lone == [], group


def in_group_of(glob: str, name: str) -> bool:
    return fnmatchcase(name.lower(), glob) or fnmatchcase(name.lower().rpartition("/")[2], glob)


def test_a_group_may_be_skipped_where_nothing_of_it_runs() -> None:
    Policy(("quantizing",)).check(["fuse_qkv"], ["fuse_qkv"])
    with pytest.raises(PolicyError, match=r"did you mean 'quantizing'\?"):
        Policy(("quantising",)).check(["fuse_qkv"], ["fuse_qkv"])


def test_passes_that_change_bits_or_dtypes_are_quantizing_and_no_default(rows: tuple[CatalogEntry, ...]) -> None:
    grouped = {row.name for row in rows if row.source == "onnxsim" and "quantizing" in row.groups}
    assert len(grouped) > 60
    assert [row.name for row in rows if row.name in grouped and row.runs == "default"] == []


def own_pictures() -> list[str]:
    return [name for name, step in OWN_STEPS.items() if step().source == "onnxline" and example_of(name)]


@pytest.mark.parametrize("name", own_pictures())
def test_a_step_of_ours_does_nothing_the_second_time_and_says_why(name: str, context: PassContext) -> None:
    file = example_of(name)
    assert file is not None
    (step,) = flatten(steps_of([name]))
    once = step.apply(open_model(read_example(file).model), context)
    again = step.apply(once.model, context)
    assert once.changed and not again.changed
    assert again.why, "its row says why it did nothing"


@pytest.mark.parametrize("name", own_pictures())
def test_a_value_that_keeps_its_name_in_a_step_of_ours_keeps_what_it_is(name: str, context: PassContext) -> None:
    """Comparisons, encodings and `why` go by names."""
    file = example_of(name)
    assert file is not None
    (step,) = flatten(steps_of([name]))
    before = open_model(read_example(file).model)
    after = step.apply(before, context).model
    names = [value for value in before.index.producers if value in after.index.producers]
    feeds = draw_feeds(before, 0)
    first, second = (Session.of(model, names).run(feeds) for model in (before, after))
    for value in names:
        np.testing.assert_allclose(second[value], first[value], rtol=1e-4, atol=1e-5, err_msg=value)


def test_a_step_of_ours_is_installed_and_says_its_options(rows: tuple[CatalogEntry, ...], context: PassContext) -> None:
    """Also a step that wants for an option which has no default."""
    everyday = ("extract", "outputs", "rename", "fix-shapes", "change-batch", "convert-opset", "to-fp16", "to-bf16")
    found = {name: named(rows, name) for name in (*everyday, "merge", "take-weights")}
    assert {row.runs for row in found.values()} == {"extra"}
    assert found["extract"].options == {"inputs": [], "outputs": []}
    assert found["fix-shapes"].options == {"shapes": {}}
    assert found["to-bf16"].options == {"keep": [], "measured": True}
    assert all(row.options for row in found.values())
    assert show(found["fix-shapes"], rows, context).why_not.startswith("no picture: what it does follows")
