"""Paths of leaves, where torch's own walk knows them and where it does not."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils import _pytree as pytree

from pipeline.export.tree import leaves_with_path

Pair = namedtuple("Pair", "first second")


class Row:
    """Entered with two functions only, as a user may."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class Answer(OrderedDict[str, Any]):
    """As the outputs of transformers were entered before it gave their keys."""


@pytest.fixture
def entered() -> Iterator[None]:
    pytree.register_pytree_node(
        Row, lambda row: (row.parts, None), lambda parts, _: Row(*parts), serialized_type_name="tests.Row"
    )
    pytree.register_pytree_node(
        Answer,
        lambda answer: (list(answer.values()), list(answer)),
        lambda parts, names: Answer(zip(names, parts, strict=True)),
        serialized_type_name="tests.Answer",
    )
    yield
    for kind in (Row, Answer):
        pytree._deregister_pytree_node(kind)


def test_where_torch_knows_the_names() -> None:
    value = {"a": [1, None, Pair(2, {"z": 3})], "b": OrderedDict(q=4)}
    actual = [(".".join(path), leaf) for path, leaf in leaves_with_path(value)]
    assert actual == [("a.0", 1), ("a.1", None), ("a.2.first", 2), ("a.2.second.z", 3), ("b.q", 4)]
    assert [leaf for _, leaf in actual] == pytree.tree_leaves(value)


@pytest.mark.usefixtures("entered")
def test_where_it_does_not() -> None:
    value = (Answer(logits=1, inner=Row(2, [3])), 4)
    with pytest.raises(ValueError, match="flatten_with_keys_fn"):
        pytree.tree_flatten_with_path(value)
    actual = [(".".join(path), leaf) for path, leaf in leaves_with_path(value)]
    assert actual == [("0.logits", 1), ("0.inner.0", 2), ("0.inner.1.0", 3), ("1", 4)]
