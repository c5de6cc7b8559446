"""One owner per data directory, and what a fork of the owner must not do.

1. The lock is `flock` on a file that is never removed: removing it would let two processes lock two files of one name.
2. The kernel drops the lock when its holder dies, however it dies. The file's text (the holder's pid, the session) is
   for messages and for the catalog; whether the lock is held is never read from it.
3. A forked child does not own what its parent owns. It closes its copy of the descriptor at once, so that a child that
   outlives a killed parent does not keep the directory locked, and every use of the lock in it is refused.
4. A forked child never closes its parent's SQLite connections. SQLite believes there that it holds the parent's
   exclusive lock, and closing "the last connection" checkpoints and removes the write-ahead log under the parent's
   feet (measured: the parent's later commits were gone after a crash). The child keeps such objects for good instead.

Rejected: POSIX record locks (`lockf`). A fork does not inherit them, but closing *any* descriptor of the file anywhere
in the process, by a backup that copies the directory for example, silently drops them.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from perdure.storage.descriptors import out_of_descriptors
from perdure.storage.errors import StorageError, StoreLockedError, UnsupportedFileSystemError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["LockNote", "ProcessLock", "keep_in_fork", "release_from_fork"]

_NOTE_BYTES_MAX = 4096

_kept_in_fork: dict[int, object] = {}
_descriptors: set[int] = set()


def keep_in_fork(resource: object) -> None:
    """Never finalise `resource` in a forked child, whatever the child does; say so again with `release_from_fork`.

    Args:
        resource: An object whose finalisation would harm the parent, such as one that holds a SQLite connection.
    """
    _kept_in_fork[id(resource)] = resource


def release_from_fork(resource: object) -> None:
    """Forget a resource that was closed in the process that owns it. Unknown resources are ignored."""
    _kept_in_fork.pop(id(resource), None)


def _after_fork_in_child() -> None:
    for resource in _kept_in_fork.values():
        # A reference that nobody drops outlasts even the end of the interpreter, which a module-level list does not.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(resource))
    _kept_in_fork.clear()
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@dataclass(frozen=True, slots=True)
class LockNote:
    """What the lock file says.

    Attributes:
        pid: The process that holds the lock, or held it last; `None` when nothing legible is there.
        session: The number of that ownership, 1 or more; `None` when it is unknown.
    """

    pid: int | None
    session: int | None


class ProcessLock:
    """A lock that one process holds on a file, until `release` or its death."""

    def __init__(self, path: Path, descriptor: int, previous: LockNote) -> None:
        self._path = path
        self._descriptor: int | None = descriptor
        self._pid = os.getpid()
        self.previous = previous
        """What the file said when the lock was taken: the last holder and its session."""

    @classmethod
    def take(cls, path: Path) -> ProcessLock:
        """Take the lock without waiting.

        Args:
            path: The lock file; it is created when missing, and its directory must exist.

        Raises:
            StoreLockedError: It is held, by this process or by another; `holder_pid` says by which.
            UnsupportedFileSystemError: The file system has no such locks.
            StorageError: The file cannot be opened, or the platform has no `flock`.
        """
        fcntl = _fcntl(path)
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                what = f"cannot open the lock file {path}"
                raise out_of_descriptors(what, error, path=str(path)) or StorageError(
                    f"{what}: {error.strerror}", path=str(path)
                ) from error
            try:
                _flock(fcntl, descriptor, path)
                if _is_current(descriptor, path):
                    lock = cls(path, descriptor, _read_note(descriptor))
                    _descriptors.add(descriptor)
                    return lock
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def write_note(self, session: int | None) -> None:
        """Write this process's pid and `session` into the lock file; durable on return.

        Raises:
            StorageError: The lock is not held here, or the file cannot be written.
        """
        self.check()
        assert self._descriptor is not None
        text = json.dumps({"pid": self._pid, "session": session}).encode() + b"\n"
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text, 0)
            os.fsync(self._descriptor)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}", path=str(self._path)) from error

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that took the lock."""
        return self._pid != os.getpid()

    def check(self) -> None:
        """Make sure that this very process holds the lock.

        Raises:
            StoreLockedError: This process is a fork of the holder.
            StorageError: The lock was released.
        """
        if self.is_foreign:
            raise StoreLockedError(
                f"{self._path} is held by process {self._pid}, of which this one is a fork; "
                "a fork cannot share a data directory: let the parent do the work, or give the child its own directory",
                path=str(self._path),
                holder_pid=self._pid,
            )
        if self._descriptor is None:
            raise StorageError(f"the lock on {self._path} was released", path=str(self._path))

    def release(self) -> None:
        """Let the lock go. Releasing twice, or in a fork, does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and not self.is_foreign:
            _descriptors.discard(descriptor)
            os.close(descriptor)


def _fcntl(path: Path) -> ModuleType:
    try:
        import fcntl
    except ImportError as error:  # pragma: no cover - Windows
        raise StorageError("a data directory needs a POSIX system (no fcntl here)", path=str(path)) from error
    return fcntl


def _flock(fcntl: ModuleType, descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise _locked(path, _read_note(descriptor).pid) from None
        raise UnsupportedFileSystemError(
            f"{path} cannot be locked ({error.strerror}); keep the data directory on a local disk", path=str(path)
        ) from error


def _locked(path: Path, holder_pid: int | None) -> StoreLockedError:
    if holder_pid == os.getpid():
        whose = f"this process (pid {holder_pid})"
        advice = "share the one that is open"
    else:
        whose = "another process" if holder_pid is None else f"process {holder_pid}"
        advice = "stop it, or use another directory"
    return StoreLockedError(
        f"the data directory {path.parent} is already in use by {whose}; {advice}",
        path=str(path),
        holder_pid=holder_pid,
    )


def _is_current(descriptor: int, path: Path) -> bool:
    """Whether the locked file is still the one at `path`, and not one that was replaced before the lock was had."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _read_note(descriptor: int) -> LockNote:
    try:
        note: Any = json.loads(os.pread(descriptor, _NOTE_BYTES_MAX, 0))
    except (OSError, ValueError):
        note = None
    fields = cast("dict[str, Any]", note) if isinstance(note, dict) else {}
    return LockNote(pid=_positive(fields.get("pid")), session=_positive(fields.get("session")))


def _positive(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
