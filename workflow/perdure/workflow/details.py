"""What is kept of an entry beyond the reference's fields, read: the detail, a CBOR map by entry id.

1. A field that the engine knows is of the shape that the engine writes, or the detail is damaged: whoever asks for it
   afterwards needs not look again. What a run would otherwise meet is a `TypeError` in the middle of somebody's rollback.
2. A field that is not known here is left as it is: a newer Perdure may have written it.
3. Nothing here says what a field is for; that is with those who write it (`step.py`, `children.py`, `branches.py`, ...).

Rejected: one class with a field for each. A detail holds one or two of a dozen, and is passed on with what is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast, get_args

from perdure.storage import decode_value
from perdure.storage.errors import DecodeError
from perdure.storage.layout import U64_MAX
from perdure.workflow.errors import FailureKind

__all__ = ["decode_detail"]

_FAILURE_KINDS: Final = frozenset(get_args(FailureKind))


def decode_detail(data: bytes, entry_id: str) -> dict[str, Any]:
    """The detail of an entry.

    Raises:
        DecodeError: It is no map, or a field of it is not of the shape that it has.
    """
    detail = decode_value(data)
    if not isinstance(detail, dict):
        raise DecodeError(f"the detail of entry {entry_id} is not a map")
    wrong = _wrong_field(cast("dict[str, object]", detail), _FIELDS)
    if wrong is not None:
        raise DecodeError(f"the detail of entry {entry_id} has something else where its {wrong!r} belongs")
    return cast("dict[str, Any]", detail)


def _wrong_field(fields: dict[str, object], checks: dict[str, Callable[[object], bool]]) -> str | None:
    for name, value in fields.items():
        check = checks.get(name)
        if check is not None and not check(value):
            return name
    return None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= U64_MAX


def _is_sequence(value: object) -> bool:
    return value is None or (type(value) is int and -(2**63) <= value <= U64_MAX)


def _is_text(value: object) -> bool:
    return type(value) is str and value != ""


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("list[object]", value))


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _is_kind(value: object) -> bool:
    return isinstance(value, str) and value in _FAILURE_KINDS


def _is_call(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    fields = cast("dict[str, object]", value)
    return {"child", "workflow"} <= fields.keys() and _wrong_field(fields, _CALL) is None


def _are_branches(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_branch, cast("dict[str, object]", value).values()))


def _is_branch(value: object) -> bool:
    return isinstance(value, dict) and _wrong_field(cast("dict[str, object]", value), _BRANCH) is None


_CALL: Final[dict[str, Callable[[object], bool]]] = {
    "child": _is_text,
    "workflow": _is_text,
    "given": _is_flag,
    "fresh": _is_count,
    "failure": _is_text,
    "chain": _is_texts,
}
_BRANCH: Final[dict[str, Callable[[object], bool]]] = {"causes": _is_texts}
_FIELDS: Final[dict[str, Callable[[object], bool]]] = {
    "kind": _is_kind,
    "completed": _is_count,
    "undone": _is_count,
    "rollback_attempts": _is_count,
    "rollback_last_ms": _is_count,
    "sequence": _is_sequence,
    "sleep": _is_flag,
    "call": _is_call,
    "branches": _are_branches,
}
"""What is not here has any shape: an `error` is read by `info_from_map`, which takes what there is."""
