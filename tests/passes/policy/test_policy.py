"""Wishes as they are written, and what is wrong with those that mean nothing."""

from __future__ import annotations

import pytest

from passes.errors import PolicyError
from passes.policy.policy import Policy

NAMES = ("fuse_qkv", "fuse_bn_into_conv", "nop", "onnxsim", "onnxsim/fuse_gelu", "onnxsim/fuse_attention")


def test_a_question_mark_makes_an_entry_optional() -> None:
    policy = Policy(keep=("qkv", "gelu?", "op:Softmax", "module:encoder.*?"))
    assert policy.kept_kinds() == {"qkv": True, "gelu": False, "op:Softmax": True, "module:encoder.*": False}
    policy.check(NAMES, NAMES)


@pytest.mark.parametrize(
    ("skip", "kinds"),
    [
        (["fuse_bn_into_conv"], ("batchnorm",)),
        (["onnxsim/fuse_gelu"], ("gelu",)),
        (["fuse_attention", "fuse_qkv"], ("qkv", "attention")),
        (["nop"], ()),
    ],
)
def test_the_skip_of_a_pass_watches_what_it_destroys(skip: list[str], kinds: tuple[str, ...]) -> None:
    assert Policy(tuple(skip)).watched_kinds(NAMES) == kinds
    assert Policy(tuple(skip), watch=False).watched_kinds(NAMES) == ()


def test_a_group_may_name_no_pass_of_this_installation() -> None:
    assert not any(Policy(("quantizing",)).skips(name) for name in NAMES)
    Policy(("quantizing",)).check(NAMES, NAMES)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (
            "batchnrom",
            r"no structure named 'batchnrom'; did you mean 'batchnorm'\?; known: qkv, attention, .*; or op:GLOB",
        ),
        (
            "ops:Softmax",
            r"nothing can be chosen by 'ops'; did you mean 'op'\?; known: op:Softmax, node:\*attn\*, module:",
        ),
        ("op:", r"'op:' names nothing; write 'op:Softmax', say"),
        ("module:?", r"'module:' names nothing; write 'module:encoder.layer.3.\*', say"),
    ],
)
def test_a_keep_that_means_nothing(entry: str, words: str) -> None:
    with pytest.raises(PolicyError, match=f"keep: {words}"):
        Policy(keep=(entry,)).check(NAMES, NAMES)
