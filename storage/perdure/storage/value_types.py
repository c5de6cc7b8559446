"""What user values are made of beyond Python's own types, and the errors of their codec.

`values` is the module to import from; this one exists so that the encoder and the decoder share a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from perdure.storage.errors import DecodeError, EncodeError

__all__ = [
    "NESTING_MAX",
    "NUMBER_BITS_MAX",
    "UNDEFINED",
    "ErrorValue",
    "OversizedValueError",
    "TaggedValue",
    "ValueDecodeError",
    "ValueEncodeError",
    "ValueTooDeepError",
]

NESTING_MAX: Final = 100
"""How many containers a value may have inside each other."""

NUMBER_BITS_MAX: Final = 65_536
"""Most bits that the digits of a `Decimal`, or a part of a `Fraction`, may have: making one takes time by the square of that,
during which nothing else runs (at 4 million bits: minutes)."""

UNDEFINED: Final = b"\xf7"
"""CBOR `undefined`: what the reference engine stores where there is no value, as in a loop without state."""


class ValueEncodeError(EncodeError):
    """A value holds something that cannot be stored. `path` is like `value["a"][3]`, `type_name` what is there."""


class ValueTooDeepError(ValueEncodeError):
    """A value nests over `NESTING_MAX` deep, or contains itself."""


class OversizedValueError(EncodeError):
    """A value is too large. `size` is its encoded size, or where the encoder gave up; `limit` the most it may be."""

    size: int = 0
    limit: int = 0


class ValueDecodeError(DecodeError):
    """Stored bytes are not a value."""


@dataclass(frozen=True, slots=True)
class ErrorValue:
    """A JavaScript error that was stored as a value (CBOR tag 27).

    Attributes:
        name: The error's class, such as `TypeError`.
        message: Its message.
        cause: What caused it, as a value; `None` for nothing.
    """

    name: str
    message: str
    cause: Any = None


@dataclass(frozen=True, slots=True)
class TaggedValue:
    """A CBOR tag that has no Python type here. It is stored again as it came.

    Attributes:
        tag: The tag's number, 0 to 2**64 - 1.
        value: Its content, as a value.
    """

    tag: int
    value: Any
