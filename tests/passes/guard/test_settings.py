"""What a guard refuses before anything runs, and what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

import passes
from passes import PolicyError
from passes.guard.calls import TARGETS
from passes.guard.settings import CombinedPolicy, Settings, guards_in, variables_of
from passes.guard.startup.hooks import LIBRARIES


def test_settings_survive_the_environment() -> None:
    guards = (Settings(("qkv?",), ("fuse_qkv",), False, False, 2.5, 0.5, True, "/a/log"), Settings())
    assert guards_in(variables_of(guards)) == guards


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"keep": ["qvk"]}, "keep: no structure named 'qvk'; did you mean 'qkv'?"),
        ({"skip": ["fuse_qvk"]}, "skip: no pass named 'fuse_qvk'; did you mean 'fuse_qkv'?"),
        ({"keep": "qkv"}, r'keep is "qkv", expected a list: keep=\["qkv"\]'),
        ({"log": "nowhere/calls.jsonl"}, "log cannot be written"),
    ],
    ids=str,
)
def test_mistakes_are_refused_when_the_block_begins(wishes: dict, words: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PolicyError, match=words), passes.guard(**wishes):
        pytest.fail("the block ran")


def test_a_skip_holds_what_the_pass_destroys_unless_watch_is_off() -> None:
    skip = Settings(skip=("fuse_attention",))
    assert "qkv" in skip.kinds()
    assert Settings(skip=("fuse_attention",), watch=False).kinds() == ()
    assert "qkv" in Settings(skip=("onnxsim/fuse_attention",)).kinds()
    assert Settings(keep=("qkv?",)).kinds() == ("qkv",)


def test_guards_inside_of_each_other_add_up() -> None:
    policy = CombinedPolicy((Settings(keep=("qkv",), compare=False), Settings(skip=("fusions",), watch=False)))
    assert policy.merge().keep == ("qkv?",)
    assert policy.skips("fuse_qkv") and not policy.skips("eliminate_identity")
    assert policy.compare


def test_the_limits_are_those_of_the_innermost_guard() -> None:
    policy = CombinedPolicy((Settings(timeout_s=1.0, memory_gib=1.0), Settings(timeout_s=2.0, memory_gib=2.0)))
    assert (policy.timeout_s, policy.memory_gib) == (2.0, 2.0)


def test_the_libraries_that_a_guard_waits_for_are_those_whose_calls_it_knows() -> None:
    assert {target.package for target in TARGETS} == set(LIBRARIES)
