"""Checkers, each against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from allmask.data import Bad, Maybe, label, list_of, number, text
from allmask.data.fields import Cell, check_row

PASS = [
    (text, " 北京 ", " 北京 "),
    (text, Cell("a"), "a"),
    (number, 3, 3.0),
    (number, -0.5, -0.5),
    (number, Cell("1e3"), 1000.0),
    (label, "neg", "neg"),
    (label, 0, 0),
    (label, 2.5, 2.5),
    (label, Cell("2"), "2"),
    (list_of(text), ["我", "b"], ["我", "b"]),
    (list_of(number), [1, 2.5], [1.0, 2.5]),
    (list_of(text), Cell('["我", "b"]'), ["我", "b"]),
    (list_of(list_of(text)), [["a"], ["b", "c"]], [["a"], ["b", "c"]]),
    (Maybe(text), "a", "a"),
    (Maybe(text), None, None),
    (Maybe(text), "  ", None),
    (Maybe(number), Cell(""), None),
]

FAIL = [
    (text, "", "is empty"),
    (text, "\u3000", "is blank"),
    (text, 3, "is 3 (a number); expected text"),
    (text, True, "is true; expected text"),
    (text, {"a": 1}, 'is {"a": 1} (an object); expected text'),
    (text, b"a", "is b'a' (bytes); expected text"),
    (text, ["x" * 50], 'is ["' + "x" * 37 + "… (a list); expected text"),
    (number, "3", 'is "3" (text); expected a number'),
    (number, Cell("three"), 'is "three" (text); expected a number'),
    (number, True, "is true; expected a number"),
    (number, math.nan, "is nan; expected a finite number"),
    (number, Cell("inf"), "is inf; expected a finite number"),
    (number, 10**400, "is 1" + "0" * 38 + "… (a number); expected a number"),
    (label, None, "is null; expected text or a number"),
    (label, False, "is false; expected text or a number"),
    (label, math.inf, "is inf; expected a finite number"),
    (label, " ", "is blank"),
    (list_of(text), "ab", 'is "ab" (text); expected a list'),
    (list_of(text), Cell("a b"), 'is "a b" (text); expected a list'),
    (list_of(text), [], "is an empty list"),
    (list_of(text), ["a", 3], "has an item 2 that is 3 (a number); expected text"),
    (Maybe(number), "3", 'is "3" (text); expected a number'),
]


@pytest.mark.parametrize(("check", "value", "expected"), PASS)
def test_passes(check, value, expected):
    found = check(value)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(("check", "value", "what"), FAIL)
def test_fails(check, value, what):
    with pytest.raises(Bad) as caught:
        check(value)
    assert caught.value.what == what


@pytest.mark.parametrize("row", [{"text": "a", "label": " "}, {"text": "", "label": "b"}])
def test_the_reason_names_the_field_that_is_blank(row: dict[str, str]):
    blank = next(name for name, value in row.items() if not value.strip())
    with pytest.raises(Bad) as caught:
        check_row({"text": text, "label": label}, row)
    assert caught.value.reason == f'blank "{blank}"'


def test_only_required_fields_must_be_there():
    assert check_row({"a": text, "b": Maybe(text)}, {"a": "x", "c": 1}) == {"a": "x", "b": None}
    with pytest.raises(Bad, match='no "a"; found "b", "c", "d", "e", "f", "g", …'):
        check_row({"a": text}, dict.fromkeys("bcdefgh", "x"))
