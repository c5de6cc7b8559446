"""User values as stored: CBOR that the reference engine reads, and that reads what it wrote.

1. Whatever can be encoded can be decoded, to a value that a second round trip leaves as it is.
2. What a caller keeps is the *round-tripped* value, on the first run too, so that first run and replay agree in value
   and type: a step that returns a tuple returns a list, every time.
3. A decoded value shares nothing with the one encoded or with the stored bytes; changing it changes no history.

The encoder decides what is storable (`value_encoder`), the decoder what is readable (`value_decoder`), which is more,
since the reference engine stores JavaScript's types. The rejected alternative, pickle, ties history to the code that
wrote it and runs code when read.
"""

from __future__ import annotations

from typing import Any, Final, cast

from perdure.storage.driver import VALUE_BYTES_MAX
from perdure.storage.value_decoder import decode_value
from perdure.storage.value_encoder import encode_flat, encode_value
from perdure.storage.value_types import (
    NESTING_MAX,
    UNDEFINED,
    ErrorValue,
    OversizedValueError,
    TaggedValue,
    ValueDecodeError,
    ValueEncodeError,
    ValueTooDeepError,
)

__all__ = [
    "NESTING_MAX",
    "UNDEFINED",
    "VALUE_BYTES_MAX",
    "ErrorValue",
    "OversizedValueError",
    "TaggedValue",
    "ValueDecodeError",
    "ValueEncodeError",
    "ValueTooDeepError",
    "decode_value",
    "encode_value",
    "round_trip",
]

_UNCHANGED: Final = frozenset({type(None), bool, int, float, str, bytes})
"""Types whose values are immutable and come back as themselves."""


def round_trip(value: object, *, bytes_max: int = VALUE_BYTES_MAX, what: str = "value") -> tuple[bytes, Any]:
    """Encode a value, and give what a replay will give for it.

    Args:
        value: As for `encode_value`.
        bytes_max: As for `encode_value`.
        what: As for `encode_value`.

    Returns:
        The encoding, and the value decoded from it: a fresh copy, or the value itself if it is a plain scalar.

    Raises:
        ValueEncodeError: The value holds something that cannot be stored.
        ValueTooDeepError: It nests over `NESTING_MAX` deep, or contains itself.
        OversizedValueError: Its encoding is larger than `bytes_max`.
    """
    flat = encode_flat(value, bytes_max)
    if flat is not None:
        return flat, cast("dict[str, Any]", value).copy()  # what decoding would give, and quicker
    data = encode_value(value, bytes_max=bytes_max, what=what)
    return data, value if type(value) in _UNCHANGED else decode_value(data)
