"""Histories of workflows as files, to be kept beside the tests and replayed with the code of later days.

1. What is recorded is the namespace as it is stored, byte by byte; a file is read back into the same bytes.
2. A file is JSON, one line for each pair, in the order of the keys, so that two of them can be compared with `diff`. It begins
   with its version; one that is not known is refused.
3. `outline` says in words what the pairs hold, for people; it is not read back. It holds no values of users: a history that a
   codec encrypted stays secret.
4. A file that is there is never overwritten: histories are added, and not changed. Its directory is made, as `open_supervisor`
   makes its own: the first history of a project is no special case.
5. No SQLite file is opened where it lies, but a copy of it: closing a second descriptor would drop the locks of whoever has it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

from perdure.actors import Supervisor
from perdure.storage import CodedDriver, DecodeError, Driver, MemoryDriver, SqliteDriver, layout
from perdure.storage.process_lock import ProcessLock
from perdure.storage.schema import KIND_NAMES, EntryStatus, SleepEntry, SleepState, StepEntry
from perdure.testing.errors import HistoryFileError
from perdure.workflow import Clock, InvalidArgumentError, SystemClock, WorkflowState
from perdure.workflow.history import History, order_of_location
from perdure.workflow.post import check_clock

__all__ = ["RecordedHistory", "read_history", "record_history"]

VERSION: Final = 1
"""Of the file format; never change or reuse."""

_SQLITE: Final = b"SQLite format 3\0"


@dataclass(frozen=True, slots=True)
class RecordedHistory:
    """What was stored of one workflow at one moment.

    Attributes:
        workflow_id: Its id.
        workflow: The name of its function.
        state: Where it stood.
        recorded_at_ms: When that was, in milliseconds since the epoch.
        waits: What it waited for, as far as that is stored, in words.
        outline: What its history holds, in words, without any values.
        pairs: All keys and values.
    """

    workflow_id: str
    workflow: str
    state: str
    recorded_at_ms: int
    waits: tuple[str, ...]
    outline: tuple[str, ...] = field(repr=False)
    pairs: Mapping[bytes, bytes] = field(repr=False)

    def __str__(self) -> str:
        waits = f", and waits for {'; '.join(self.waits)}" if self.waits else ""
        return f"workflow {self.workflow_id!r} ({self.workflow}) is {self.state}{waits}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a new file; its directory is made if it is not there.

        Raises:
            HistoryFileError: There is such a file, or it cannot be written.
            InvalidArgumentError: `path` is none.
        """
        name = _check_is_new(path)
        data = encode_history(self)
        try:
            os.makedirs(os.path.dirname(name) or os.curdir, exist_ok=True)
            with open(name, "xb") as file:
                file.write(data)
        except OSError as error:
            raise HistoryFileError(f"{name} cannot be written: {error}", path=name) from error


def read_history(path: str | os.PathLike[str]) -> RecordedHistory:
    """A history that was recorded into a file.

    Raises:
        HistoryFileError: It is not there, or no such file, or of a later version.
    """
    name = os.fspath(path)
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise HistoryFileError(f"{name} is not there; record it with record_history(...)", path=name) from None
    except (OSError, ValueError) as error:
        raise HistoryFileError(f"{name} cannot be read: {error}", path=name) from error
    return decode_history(data, name)


def encode_history(history: RecordedHistory) -> bytes:
    """The content of its file."""
    content: dict[str, Any] = {
        "perdure_history": VERSION,
        "workflow_id": history.workflow_id,
        "workflow": history.workflow,
        "state": history.state,
        "recorded_at": _iso(history.recorded_at_ms),
        "recorded_at_ms": history.recorded_at_ms,
        "waits": list(history.waits),
        "outline": list(history.outline),
        "pairs": {key.hex(): history.pairs[key].hex() for key in sorted(history.pairs)},
    }
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def decode_history(data: bytes, name: str) -> RecordedHistory:
    """The history that a file holds; `name` is the file's.

    Raises:
        HistoryFileError: It holds none, or one of a later version.
    """
    try:
        content: Any = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise HistoryFileError(f"{name} cannot be read: {error}", path=name) from error
    told: dict[str, Any] = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    version: object = told.get("perdure_history")
    if version != VERSION:
        what = "holds no recorded history" if version is None else f"is of version {version!r}"
        raise HistoryFileError(
            f"{name} {what:.80}; this Perdure reads version {VERSION}, as record_history(...) writes it", path=name
        )
    try:
        return RecordedHistory(
            _text(told["workflow_id"]),
            _text(told["workflow"]),
            WorkflowState(_text(told["state"])).value,
            _time_ms(told["recorded_at_ms"]),
            tuple(map(_text, told["waits"])),
            tuple(map(_text, told["outline"])),
            {bytes.fromhex(key): bytes.fromhex(value) for key, value in told["pairs"].items()},
        )
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise HistoryFileError(f"{name} is damaged: {type(error).__name__}: {error}", path=name) from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    value.encode()  # half a surrogate pair is refused
    return value


def _time_ms(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.40} is no time")
    if not 0 <= (time_ms := int(value)) <= layout.U64_MAX // 2:
        raise ValueError(f"{value!r:.40} is no time")
    return time_ms


async def record_history(
    source: Supervisor | Driver | Mapping[bytes, bytes] | str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    workflow_id: str | None = None,
    clock: Clock | None = None,
) -> RecordedHistory:
    """Record what is stored of a workflow, and say where it waits. The workflow may go on meanwhile.

        print(await record_history(supervisor, "tests/histories/order-waits.json", workflow_id="order-1"))

    Args:
        source: Where it is: a supervisor, which may be running it; a driver; the SQLite file of a backup, or of a data
            directory that no process has; or all pairs. Values that a codec changed are recorded as they are stored;
            from a `CodedDriver`, as it gives them, decoded.
        path: The file to make, with its directory; `None`: none.
        workflow_id: Which of the supervisor's workflows.
        clock: Where the time comes from that the history is marked with; the system's clock unless given. Of the
            supervisor, its own.

    Raises:
        HistoryFileError: `path` exists or cannot be written; or `source` is a file that is not there, or no SQLite file.
        InvalidArgumentError: Nothing can be recorded of it; or `path` or `clock` is something else.
        WorkflowNotFoundError: The supervisor has no such workflow.
        StoreLockedError: The file belongs to a data directory that a process has.
        DecodeError: What is stored is damaged, or no workflow.
    """
    check_clock(clock)
    if path is not None:
        _check_is_new(path)
    pairs = await _pairs(source, workflow_id)
    if isinstance(source, Supervisor) and clock is None:
        clock = source._clock  # pyright: ignore[reportPrivateUsage] - the one by which its workflows live
    recorded = await describe_pairs(pairs, (clock or SystemClock()).now_ms(), workflow_id)
    if path is not None:
        recorded.save(path)
    return recorded


def _check_is_new(path: object) -> str:
    """The path, of what is not there yet."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgumentError(
            f"the path of a file is needed, not {path!r:.80}; write 'tests/histories/order.json'"
        )
    name = os.fspath(cast("str | os.PathLike[str]", path))
    if os.path.exists(name):
        raise HistoryFileError(
            f"{name} exists; recorded histories are added to, never changed: choose another name", path=name
        )
    return name


def check_pairs(pairs: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """A copy of all that is stored; refuses what is no bytes."""
    given: Mapping[Any, Any] = pairs
    for key, value in given.items():
        if not (isinstance(key, bytes) and isinstance(value, bytes)):
            raise InvalidArgumentError(
                f"pairs are bytes as they are stored, not {type(key).__name__} and {type(value).__name__}; give "
                "dict(await driver.list(b''))"
            )
    return dict(pairs)


async def _pairs(source: object, workflow_id: str | None) -> dict[bytes, bytes]:
    if isinstance(source, Mapping):
        return check_pairs(cast("Mapping[bytes, bytes]", source))
    if isinstance(source, Supervisor):
        if workflow_id is None:
            raise InvalidArgumentError(
                "a supervisor has many workflows; write record_history(supervisor, path, workflow_id='order-1')"
            )
        with tempfile.TemporaryDirectory() as directory:
            backup = Path(directory) / "workflow.sqlite"
            await source.backup(backup, workflow_id)
            return await _pairs_of_file(backup)
    if isinstance(source, str | os.PathLike):
        return await _pairs_of_copy(Path(cast("str | os.PathLike[str]", source)))
    is_driver = callable(getattr(source, "list", None)) and callable(getattr(source, "batch", None))
    if is_driver and not isinstance(source, type):
        return dict(await cast("Driver", source).list(b""))
    raise InvalidArgumentError(
        f"nothing can be recorded of {source!r:.80}; give a supervisor, a driver, or a workflow's SQLite file"
    )


async def _pairs_of_copy(path: Path) -> dict[bytes, bytes]:
    lock_file = _lock_file(path)
    # First, as a workflow of a process that is at work may have no file yet.
    lock = None if lock_file is None else ProcessLock.take(lock_file)
    try:
        _check_is_sqlite(path)
        with tempfile.TemporaryDirectory() as directory:
            return await _pairs_of_file(_copied(path, Path(directory)))
    finally:
        if lock is not None:
            lock.release()


def _check_is_sqlite(path: Path) -> None:
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            is_sqlite = file.read(len(_SQLITE)) == _SQLITE
    except OSError as error:
        raise HistoryFileError(f"{name} cannot be read: {error.strerror}", path=name) from error
    if not is_sqlite:
        raise HistoryFileError(f"{name} is not the SQLite file of a workflow", path=name)


def _lock_file(path: Path) -> Path | None:
    """The lock of the data directory that a file belongs to, if it belongs to one."""
    return next((parent / "lock" for parent in path.resolve().parents if (parent / "catalog.sqlite").exists()), None)


def _copied(path: Path, directory: Path) -> Path:
    """A copy of the file and of its write-ahead log."""
    copy = directory / "workflow.sqlite"
    for suffix in ("", "-wal"):
        if os.path.exists(f"{path}{suffix}"):
            shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
    return copy


async def _pairs_of_file(path: Path) -> dict[bytes, bytes]:
    driver = await SqliteDriver.open(path, durability="normal", commit_in="inline")
    try:
        return dict(await driver.list(b""))
    finally:
        await driver.aclose()


async def describe_pairs(
    pairs: Mapping[bytes, bytes], now_ms: int | None = None, workflow_id: str | None = None
) -> RecordedHistory:
    """What a dump says of itself.

    Args:
        pairs: All that is stored.
        now_ms: When that was; `None` takes the latest time that history tells.
        workflow_id: Its id, where the dump does not tell it.

    Raises:
        DecodeError: It is damaged, or no workflow.
    """
    readable = {key: value for key, value in pairs.items() if key != layout.CODEC_KEY}  # no value of a user's is read
    history = await History.load(workflow_id or "", MemoryDriver(readable))
    if history.input is None:
        raise DecodeError("these pairs hold no workflow: there is no input")
    stored_id = pairs.get(layout.WORKFLOW_ID_KEY)
    return RecordedHistory(
        workflow_id or (stored_id or b"workflow").decode(errors="replace"),
        history.workflow_type or "",
        history.state.value,
        _latest_ms(history) if now_ms is None else now_ms,
        () if history.state.is_terminal else tuple(_waits(history)),
        tuple(_outline(history)),
        dict(pairs),
    )


def _latest_ms(history: History) -> int:
    times = [0]
    for entry in history.entries():
        metadata = history.metadata(entry.id)
        if metadata is not None:
            times += [metadata.created_at_ms, metadata.last_attempt_at_ms, metadata.completed_at_ms or 0]
    return max(times)


def _waits(history: History) -> Iterator[str]:
    used = {segment for entry in history.entries() for segment in entry.location}
    for number, name in enumerate(history.names):
        if number not in used and name.endswith(":count"):
            yield f"a message, in the read {name.removesuffix(':count')!r}"
    for entry in sorted(history.entries(), key=lambda entry: order_of_location(entry.location)):
        path = _path_text(history, entry.location)
        metadata = history.metadata(entry.id)
        if isinstance(entry.kind, SleepEntry) and entry.kind.state is SleepState.PENDING:
            what = (
                "the time of" if str(history.path_of(entry.location)[-1]).endswith(":deadline") else "the end of sleep"
            )
            yield f"{what} {path}, at {_iso(entry.kind.deadline_ms)}"
        elif isinstance(entry.kind, StepEntry) and (call := history.calls.get(entry.id)) is not None:
            yield f"workflow {call.child_id!r}, in the call {path}"
        elif metadata is not None and metadata.status is EntryStatus.FAILED:
            yield f"the next attempt of step {path}"
    if history.alarm_ms is not None and not history.entries():
        yield f"its start, at {_iso(history.alarm_ms)}"


def _outline(history: History) -> Iterator[str]:
    for entry in sorted(history.entries(), key=lambda entry: order_of_location(entry.location)):
        metadata = history.metadata(entry.id)
        state = ""
        if isinstance(entry.kind, SleepEntry):
            state = entry.kind.state.name.lower()
        elif metadata is not None:
            state = metadata.status.name.lower()
            if metadata.rollback_completed_at_ms is not None:
                state += ", rolled back"
        yield f"{KIND_NAMES[type(entry.kind)]} {_path_text(history, entry.location)}{state and f': {state}'}"


def _path_text(history: History, location: Any) -> str:
    return " > ".join(repr(part) if isinstance(part, str) else f"#{part}" for part in history.path_of(location))


def _iso(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms"


def coded(driver: Driver, codec: Any, workflow_id: str) -> Driver:
    """The driver, with values decoded if there is a codec."""
    return driver if codec is None else CodedDriver(driver, codec, workflow_id)
