"""Whether two stored values are the same to whoever reads them: types count, the order of maps does not."""

from __future__ import annotations

from typing import Any, cast

from perdure.storage import decode_value

__all__ = ["is_same_value"]


def is_same_value(one: bytes, other: bytes) -> bool:
    """Whether two stored values are equal once they are decoded."""
    return one == other or _equal(decode_value(one), decode_value(other))


def _equal(one: Any, other: Any) -> bool:
    kind = cast("object", type(one))
    if kind is not type(other):
        return False
    if kind is dict:
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if kind is list:
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other) or (one != one and other != other)
