"""The words of messages that carry numbers."""

from __future__ import annotations

import pytest

from passes.suggest import bytes_text, is_named, milliseconds_text, with_article


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (44_647, "43.6 KiB"), (9 << 20, "9.0 MiB"), (3 << 30, "3.0 GiB")],
)
def test_a_size_has_the_largest_unit_that_fits(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.00035, "0.35 ms"), (0.0999, "99.90 ms"), (1.4, "1400 ms")])
def test_a_time_is_in_milliseconds(seconds: float, text: str) -> None:
    assert milliseconds_text(seconds) == text


def test_a_name_with_the_letters_of_a_glob_means_itself() -> None:
    names = ["layer[0]/q", "layer0/q", "layer1/q"]
    assert [name for name in names if is_named(name, "layer[0]/q")] == ["layer[0]/q", "layer0/q"]
    assert [name for name in names if is_named(name, "layer?/q")] == ["layer0/q", "layer1/q"]


def test_an_article_goes_by_the_first_letter() -> None:
    assert [with_article(noun) for noun in ("int", "DynamicCache", "EntryPoint")] == [
        "an int",
        "a DynamicCache",
        "an EntryPoint",
    ]
