"""What a workflow's history says, without what differs between two runs that are equally right.

1. Left out: ids and times; how many attempts there were and why they failed, as a crash can take one; what became of a race's
   losers; and what `ctx.now` recorded.
2. What is left is compared with `==`, and shown as it is. Where `==` cannot tell, as of a NaN, an array, or objects of a class
   that says nothing of it, two values are the same that look alike and hold the same.

Rejected: to take for the same what looks alike. A field that a class leaves out of its text may hold the wrong amount.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Final, cast

from perdure.storage.schema import EntryStatus
from perdure.workflow import HistoryEntry

__all__ = ["IGNORED", "Alike", "Line", "is_same", "looks", "outline_of", "shown", "shown_path", "unlike_any"]

_SHOWN_MAX: Final = 80
_COUNT: Final = ":count"
_ADDRESS: Final = re.compile(r"<[^<>]* at 0x[0-9a-fA-F]+")
IGNORED: Final = "…"
"""Stands where a value was left out."""


@dataclass(frozen=True, slots=True)
class Line:
    """One entry of an outline.

    Attributes:
        path: Where it is.
        kind: What it is.
        says: What is recorded, by name.
    """

    path: tuple[str | int, ...]
    kind: str
    says: dict[str, Any]

    def __str__(self) -> str:
        said = ", ".join(f"{name}={shown(value)}" for name, value in self.says.items() if value is not None)
        return f"{self.kind} {shown_path(self.path)!r}{f' ({said})' if said else ''}"


class Alike:
    """A value as a key: the same key as any value that it is the same as.

    Its hash says nothing, as equal values may look different, and values that look alike have hashes of their own: look it up
    along with a name.
    """

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value: object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike) and is_same(self.value, other.value)

    def __hash__(self) -> int:
        return 0


def is_same(one: object, other: object) -> bool:
    """Whether two values are equal; or, where `==` cannot tell, look alike and hold the same."""
    try:
        if one == other:
            return True
        can_tell = type(one).__eq__ is not object.__eq__
    except Exception:  # arrays have no truth
        can_tell = False
    return looks(one) == looks(other) and _hold_the_same(one, other, unless_known=not can_tell)


def _hold_the_same(one: object, other: object, *, unless_known: bool) -> bool:
    """Whether all that is in two values is the same, bit by bit; `unless_known` where that cannot be had."""
    try:
        return _held(one) == _held(other)
    except Exception:  # a lock, say
        return unless_known


def _held(value: object) -> bytes:
    held = io.BytesIO()
    _Pickler(held).dump(value)
    return held.getvalue()


class _Pickler(pickle.Pickler):
    """Writes down what a value holds, to be compared and never to be read again."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.fast = True  # what is there twice is written twice: whether it is one object or two says nothing

    def persistent_id(self, obj: Any) -> int | None:
        """Classes and functions are themselves, wherever they were made."""
        return id(obj) if isinstance(obj, type | FunctionType | ModuleType) else None


def looks(value: object) -> str:
    """A value as text, whole; of what has none, no two are alike."""
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__} at {id(value):#x}, whose repr raised {type(error).__name__}>"


def unlike_any(value: object, others: Iterable[object] = ()) -> str | None:
    """What to do about a value that may be like no other, which its text does not show; or `None`.

    Args:
        value: The value.
        others: What it is not the same as, though it may look so.
    """
    text = looks(value)
    if _ADDRESS.search(text) is not None:
        return "if no other object is equal to it, record what it holds, such as its id, or make it a dataclass"
    if any(looks(other) == text and not is_same(other, value) for other in others):
        return (
            "what looks the same is not equal to it: let its repr show all that counts, and its == ask for nothing else"
        )
    return None


def shown(value: Any) -> str:
    """A value in one line, cut where it is long."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return text if len(text) <= _SHOWN_MAX else f"{text[: _SHOWN_MAX - 1]}…"


def shown_path(path: Iterable[str | int]) -> str:
    """A place as people read it."""
    return "/".join(str(part) for part in path)


def outline_of(entries: Iterable[HistoryEntry], *, ignore: Collection[str] = ()) -> tuple[Line, ...]:
    """The outline of a history, in order of place.

    Args:
        entries: The history.
        ignore: Names of entries whose values may differ.
    """
    lines = [Line(entry.path, entry.kind, _says(entry, ignore)) for entry in entries]
    return tuple(sorted(lines, key=lambda line: tuple(str(part) for part in line.path)))


def _says(entry: HistoryEntry, ignore: Collection[str]) -> dict[str, Any]:
    data = dict(entry.data)
    data.pop("deadline_ms", None)
    if entry.metadata is not None:
        data["status"] = entry.metadata.status.name.lower()
        data["undone"] = entry.metadata.rollback_completed_at_ms is not None or None
        data["rollback_error"] = entry.metadata.rollback_error
        if entry.metadata.status is EntryStatus.COMPLETED:
            data.pop("error", None)  # of an attempt before the one that came through
    match entry.kind:
        case "message":
            data = _message(entry, data)
        case "race" if data["winner"] is not None:
            data["branches"] = {data["winner"]: data["branches"][data["winner"]]}
        case "step" if _is_time(entry):
            data["output"] = IGNORED
        case _:
            pass
    if entry.path and entry.path[-1] in ignore:
        data = {
            name: IGNORED if name in ("output", "error", "state", "body") else value for name, value in data.items()
        }
    return data


def _message(entry: HistoryEntry, data: dict[str, Any]) -> dict[str, Any]:
    body: object = data["body"]
    if isinstance(body, dict) and "createdAt" in body:
        message = cast("dict[str, Any]", body)
        return {name: message.get(name) for name in ("name", "body", "completed")}
    if entry.path and str(entry.path[-1]).endswith(_COUNT):
        return {"count": data["body"]}
    return data


def _is_time(entry: HistoryEntry) -> bool:
    """Whether this was recorded by `ctx.now`: nothing else gives, in no time, the time at which it is recorded."""
    output, metadata = entry.data["output"], entry.metadata
    if not isinstance(output, float) or metadata is None:
        return False
    return round(output * 1000) == metadata.created_at_ms == metadata.completed_at_ms
