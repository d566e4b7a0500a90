"""Real passes of the installed libraries on models that are known to bring them down."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

import onnx
import pytest

from passes.advisories import AuditFinding
from passes.audit.cases import case_names, load_case
from passes.audit.job import open_trial, reproduce, run_job
from passes.audit.judge import normalize
from passes.audit.trial import AuditTarget, AuditTrial, missing_steps, targets_of
from passes.context import PassContext
from passes.recipe.recipe import OWN_STEPS

VERSIONS = {name: metadata.version(name) for name in ("onnxoptimizer", "onnxsim")}
KNOWN = pytest.mark.skipif(
    VERSIONS != {"onnxoptimizer": "0.4.2", "onnxsim": "0.8.1"}, reason="what these two releases are known to do"
)


def optimizer(*names: str) -> list[AuditTarget]:
    return [AuditTarget(name, "onnxoptimizer", "onnxoptimizer", (name,)) for name in names]


ONNXSIM = AuditTarget("onnxsim", "onnxsim", "onnxsim")


@pytest.fixture(scope="module")
def trial() -> Iterator[AuditTrial]:
    with open_trial(60.0, None) as opened:
        yield opened


def try_case(trial: AuditTrial, case: str, *targets: AuditTarget) -> list[tuple[str, str, str]]:
    """Without lost metadata, which is almost everywhere."""
    findings = trial.of(load_case(case), targets).findings
    return [(finding.name, finding.kind, finding.why) for finding in findings if finding.kind != "lost-metadata"]


@KNOWN
def test_a_crash_costs_one_pass_and_the_others_go_on(trial: AuditTrial) -> None:
    targets = optimizer("nop", "eliminate_shape_op", "rename_input_output")
    assert try_case(trial, "node/test_shape_start_greater_than_end", *targets) == [
        ("eliminate_shape_op", "crashed", "SIGSEGV"),
        ("rename_input_output", "signature", "other inputs"),
    ]


@KNOWN
def test_an_if_that_hands_out_an_initializer(trial: AuditTrial) -> None:
    targets = optimizer("eliminate_if_with_const_cond")
    assert try_case(trial, "planted/if_outputs_initializer", *targets) == [(targets[0].name, "crashed", "SIGSEGV")]


@KNOWN
def test_an_assertion_on_a_shared_graph_input(trial: AuditTrial) -> None:
    ((name, kind, why),) = try_case(trial, "planted/qkv_of_graph_input", *optimizer("fuse_qkv"))
    assert (name, kind) == ("fuse_qkv", "raised")
    assert "Assertion" in why


@KNOWN
@pytest.mark.parametrize("case", ["epsilon", "example"])
def test_wrong_numbers(trial: AuditTrial, case: str) -> None:
    targets = optimizer("eliminate_consecutive_idempotent_ops", "eliminate_identity")
    assert try_case(trial, f"node/test_group_normalization_{case}_expanded", *targets) == [
        ("eliminate_consecutive_idempotent_ops", "wrong", "max error 1")
    ]


@KNOWN
def test_the_type_of_a_sequence_is_lost_by_each_pass(trial: AuditTrial) -> None:
    targets = optimizer("nop", "eliminate_deadend")
    assert [(name, kind) for name, kind, _ in try_case(trial, "node/test_identity_sequence", *targets)] == [
        ("nop", "invalid"),
        ("eliminate_deadend", "invalid"),
    ]


@KNOWN
def test_onnxsim_raises(trial: AuditTrial) -> None:
    ((name, kind, why),) = try_case(trial, "node/test_depthtospace_example_expanded", ONNXSIM)
    assert (name, kind) == ("onnxsim", "raised")
    assert "onnxsim_transient_constant" in why


def test_a_constant_that_is_spread_out_grows(trial: AuditTrial) -> None:
    assert ("onnxsim", "grew-bytes", "") in try_case(trial, "planted/expand_of_constant", ONNXSIM)


def test_a_call_that_takes_too_long_is_one_finding() -> None:
    with open_trial(0.001, None) as hasty:
        hasty.judges.timeout_s = 60.0
        assert try_case(hasty, "planted/named_dims", *optimizer("nop")) == [("nop", "timed-out", "")]


@pytest.mark.parametrize(("length", "end"), [(110, "no"), (111, "…")])
def test_a_message_is_cut_after_110_characters(length: int, end: str) -> None:
    line = normalize(("no " * 40)[: length - 2] + "no")
    assert len(line) == 110 and line.endswith(end)


EXTRAS = {"onnxslim": "onnxslim", "rotate": "aimet_onnx"}
"""Step → the package that it needs, which an extra brings."""

NEED_A_FILE = ("take-weights", "merge")
"""Steps that do nothing without a file of the user's."""


@pytest.mark.parametrize("name", OWN_STEPS)
def test_each_step_of_a_recipe_can_be_tried(trial: AuditTrial, name: str, context: PassContext) -> None:
    """An error in calling the step would count as a finding of its library."""
    if name in NEED_A_FILE or (name in EXTRAS and find_spec(EXTRAS[name]) is None):
        assert name not in [target.name for target in targets_of(context)]
        pytest.skip(missing_steps(context)[name])
    target = AuditTarget(name, "", name)
    assert [kind for _, kind, _ in try_case(trial, "node/test_add", target) if kind == "raised"] == []


def test_a_call_reads_as_its_users_write_it() -> None:
    calls = [
        (
            AuditTarget("default", "", "onnxoptimizer", ("nop", "fuse_qkv")),
            "onnxoptimizer.optimize(model, ['nop', 'fuse_qkv'])",
        ),
        (
            AuditTarget("onnxsim/fuse_qkv", "", "onnxsim", left_out=("pow2_to_mul", "constant_folding")),
            "onnxsim.simplify(model, skip_constant_folding=True, skipped_optimizers=['pow2_to_mul'])",
        ),
        (
            AuditTarget("onnxslim/FusionGelu", "", "onnxslim", left_out=("FusionConvBN",)),
            "onnxslim.slim(model)  # without FusionConvBN",
        ),
        (AuditTarget("untie", "", "untie"), "untie"),
    ]
    assert [target.make_step().format_call() for target, _ in calls] == [call for _, call in calls]


def test_a_job_is_plain_data() -> None:
    value = run_job(
        ["planted/named_dims", "models/absent"],
        [attempt.data() for attempt in optimizer("rename_input_output")],
        models="/nowhere",
    )
    findings = [AuditFinding(*finding) for finding in value["findings"]]
    assert [finding for finding in findings if finding.kind == "signature"] == [
        AuditFinding("rename_input_output", "signature", "planted/named_dims", "other inputs")
    ]
    assert list(value["unread"]) == ["models/absent"]
    assert "no ONNX file at" in value["unread"]["models/absent"]


@KNOWN
def test_a_reproducer_is_small_and_says_how() -> None:
    value = reproduce("fuse_qkv", optimizer("fuse_qkv")[0].data(), "raised", "gallery/fuse_attention")
    small = onnx.load_from_string(__import__("base64").b64decode(value["model"]))
    assert [node.op_type for node in small.graph.node] == ["MatMul"] * 3
    assert 'onnxoptimizer.optimize(model, ["fuse_qkv"])' in value["text"].replace("'", '"')
    assert value["name"] == "fuse_qkv-raised"


def test_there_are_models_of_every_source() -> None:
    names = case_names()
    assert len(names) == len(set(names))
    sources = [name.partition("/")[0] for name in names]
    assert {source: sources.count(source) > 5 for source in dict.fromkeys(sources)} == {
        "node": True,
        "package": True,
        "planted": True,
        "gallery": True,
    }
    for name in names:
        if not name.startswith("node/"):
            load_case(name)
