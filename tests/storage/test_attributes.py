"""Attributes: what can be one, and that no two values of different types are taken for each other."""

from __future__ import annotations

import pickle
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.storage import EncodeError, InvalidAttributeError
from perdure.storage.attributes import attribute_text, check_attributes, decode_attributes, encode_attributes
from perdure.storage.errors import DecodeError
from perdure.storage.values import encode_value


class Colour(StrEnum):
    RED = "red"


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)
scalars = (
    texts
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
    | st.none()
)


@given(st.dictionaries(texts.filter(bool), scalars, max_size=8))
def test_what_is_accepted_comes_back_with_its_types(attributes: dict[str, Any]) -> None:
    found = decode_attributes(encode_attributes(attributes))
    assert [(name, type(value), attribute_text(value)) for name, value in found.items()] == [
        (name, type(value), attribute_text(value)) for name, value in attributes.items()
    ]


@given(scalars, scalars)
def test_two_values_have_one_text_only_if_they_are_the_same(one: Any, other: Any) -> None:
    same = type(one) is type(other) and repr(one) == repr(other)
    assert (attribute_text(one) == attribute_text(other)) is same


def test_numbers_booleans_and_texts_that_look_alike_are_apart() -> None:
    alike = [1, 1.0, True, "1", "true", "True", None, "null", "", 0, 0.0, -0.0, False]
    assert len({attribute_text(value) for value in alike}) == len(alike)


@pytest.mark.parametrize(
    ("attributes", "path", "says"),
    [
        ([("customer", 7)], "", "mapping"),
        ("customer", "", "mapping"),
        ({"": 7}, "''", "non-empty"),
        ({7: 7}, "7", "non-empty text"),
        ({"x" * 513: 7}, "x" * 513, "513 bytes"),
        ({"é" * 257: 7}, "é" * 257, "514 bytes"),
        ({"\ud800": 7}, "'\\ud800'", "surrogate"),
        ({"customer": "\ud800"}, "'customer'", "surrogate"),
        ({"customer": "x" * 1025}, "customer", "1025 bytes"),
        ({"customer": [7]}, "customer", "list"),
        ({"customer": b"7"}, "customer", "bytes"),
        ({"colour": Colour.RED}, "colour", "Colour"),
        ({"customer": float("nan")}, "customer", "nan"),
        ({"customer": float("inf")}, "customer", "inf"),
        ({"customer": 2**63}, "customer", "64 bits"),
        ({"customer": -(2**63) - 1}, "customer", "64 bits"),
        ({f"name-{number}": number for number in range(65)}, "", "at most 64"),
    ],
)
def test_anything_else_is_refused_with_its_name(attributes: Any, path: str, says: str) -> None:
    with pytest.raises(InvalidAttributeError, match=says) as caught:
        check_attributes(attributes)
    assert caught.value.path == path
    assert isinstance(caught.value, EncodeError)
    assert isinstance(caught.value, ValueError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.path, again.type_name, str(again)) == (path, caught.value.type_name, str(caught.value))


def test_the_limits_are_inclusive() -> None:
    attributes = {f"{number:0512}": "x" * 1024 for number in range(64)}
    assert decode_attributes(encode_attributes(attributes)) == attributes


@pytest.mark.parametrize("data", [b"", b"\xff", encode_value([1]), encode_value({"a": [1]}), encode_value({1: 1})])
def test_stored_bytes_that_are_no_attributes_are_said_to_be_so(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_attributes(data)
