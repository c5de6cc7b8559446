"""Attributes: a few named scalars by which a workflow can be found.

1. They are kept in the workflow's own namespace, as a CBOR map, and indexed in the catalog. The map is the truth.
2. A value finds itself only, type included: `1`, `1.0`, `True` and `"1"` are four values. So an index entry is the JSON
   text of the value, in which the four differ, and which people can read.
3. They are checked whole before anything is written: a workflow never exists with attributes that cannot be searched.

Rejected: letting SQLite compare the values themselves. There 1, 1.0 and true are one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Final, TypeAlias, cast

from perdure.storage.errors import DecodeError, EncodeError
from perdure.storage.value_types import ValueDecodeError
from perdure.storage.values import decode_value, encode_value

__all__ = [
    "ATTRIBUTES_MAX",
    "ATTRIBUTE_NAME_BYTES_MAX",
    "ATTRIBUTE_TEXT_BYTES_MAX",
    "InvalidAttributeError",
    "Scalar",
    "attribute_text",
    "check_attributes",
    "decode_attributes",
    "encode_attributes",
]

ATTRIBUTES_MAX: Final = 64
"""Most attributes of one workflow."""

ATTRIBUTE_NAME_BYTES_MAX: Final = 512
"""Most bytes of a name, in UTF-8."""

ATTRIBUTE_TEXT_BYTES_MAX: Final = 1024
"""Most bytes of a text value, in UTF-8: each is a key of an index."""

_INTEGER_MAX: Final = 2**63 - 1
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})

Scalar: TypeAlias = str | int | float | bool | None
"""What the value of an attribute can be."""


class InvalidAttributeError(EncodeError, ValueError):
    """An attribute cannot be kept; `path` is its name, `type_name` the type of its value."""


def check_attributes(attributes: object) -> dict[str, Scalar]:
    """Make sure that these are attributes; what they are, as a dictionary of its own.

    Args:
        attributes: A mapping of at most 64 names (text of 1 to 512 bytes) to text (at most 1,024 bytes), `int` (64 bits,
            signed), finite `float`, `bool` or `None`.

    Raises:
        InvalidAttributeError: They are not; the message says which, and what to write instead.
    """
    if not isinstance(attributes, Mapping):
        raise _invalid(
            f'attributes are a mapping of names to values, not {attributes!r:.200}; write attributes={{"customer": 7}}',
            "",
            attributes,
        )
    given = cast("Mapping[object, object]", attributes)
    if len(given) > ATTRIBUTES_MAX:
        raise _invalid(
            f"a workflow has at most {ATTRIBUTES_MAX} attributes, not {len(given)}; keep the rest in its state",
            "",
            given,
        )
    return {
        checked: _checked_value(checked, value) for name, value in given.items() if (checked := _checked_name(name))
    }


def encode_attributes(attributes: object) -> bytes:
    """The CBOR map of attributes, checked.

    Raises:
        InvalidAttributeError: They cannot be kept.
    """
    return encode_value(check_attributes(attributes))


def decode_attributes(data: bytes) -> dict[str, Scalar]:
    """The inverse of `encode_attributes`.

    Raises:
        DecodeError: It is not the CBOR of attributes.
    """
    try:
        return check_attributes(decode_value(data))
    except (InvalidAttributeError, ValueDecodeError) as error:
        raise DecodeError(f"the stored attributes cannot be read: {error}") from error


def attribute_text(value: Scalar) -> str:
    """A value as the index has it: JSON, in which values of different types differ."""
    return json.dumps(value, ensure_ascii=False)


def _checked_name(name: object) -> str:
    if type(name) is not str or not name:
        raise _invalid(f"the name of an attribute is non-empty text, not {name!r:.200}", repr(name)[:200], name)
    if (size := _size(name, name)) > ATTRIBUTE_NAME_BYTES_MAX:
        raise _invalid(
            f"the name {name!r:.60} of an attribute has {size} bytes, the limit is {ATTRIBUTE_NAME_BYTES_MAX}",
            name,
            name,
        )
    return name


def _checked_value(name: str, value: object) -> Scalar:
    if type(value) not in _SCALARS:
        raise _invalid(
            f"the attribute {name!r:.60} is a {type(value).__name__}; an attribute is text, a number, a boolean or None: "
            "write its text or its number instead",
            name,
            value,
        )
    if type(value) is str and (size := _size(name, value)) > ATTRIBUTE_TEXT_BYTES_MAX:
        raise _invalid(
            f"the attribute {name!r:.60} has {size} bytes of text, the limit is {ATTRIBUTE_TEXT_BYTES_MAX}; an attribute "
            "is there to search by, so keep the text in the workflow's state",
            name,
            value,
        )
    if type(value) is float and not isfinite(value):
        raise _invalid(f"the attribute {name!r:.60} is {value}, which equals nothing; use None", name, value)
    if type(value) is int and not -_INTEGER_MAX - 1 <= value <= _INTEGER_MAX:
        raise _invalid(f"the attribute {name!r:.60} does not fit 64 bits; write it as text", name, value)
    return cast("Scalar", value)


def _size(name: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise _invalid(
            f"the attribute {name!r:.200} has a lone surrogate, which UTF-8 cannot hold; remove it",
            repr(name)[:200],
            text,
        ) from None


def _invalid(message: str, path: str, value: object) -> InvalidAttributeError:
    return InvalidAttributeError(message, path=path, type_name=type(value).__name__)
